"""Who we are, as the program that started this process tells it through environment variables.

Each launcher is a row of `LAUNCHERS`: which variables it sets for what. The first row whose rank
and world size are both set answers, so the order matters: torchrun runs inside the others, and MPI
inside SLURM steps whose tasks are not its ranks but its daemons. Where that row leaves the local
rank open, the next that means the same rank of as many tells it: a script that exports RANK from
SLURM_PROCID, or srun, which sets a few of PMI's variables beside its own.

    >>> from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}).rank
    1
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from everyrank.ranks.base import Identity

_log = logging.getLogger("everyrank")

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables by which a launcher tells a process who it is; the first that is set counts."""

    source: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]  # all that are set count; each must be the same on every rank
    step: tuple[str, ...] = ()  # must hold the id of a real job step
    hosts: tuple[str, ...] = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")


LAUNCHERS = (
    Launcher(
        source="torchrun",
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        # Not its restart count, which each node counts for itself.
        job=("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    ),
    Launcher(
        source="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(  # MPICH, Intel MPI, MVAPICH, Cray PALS, Flux
        source="pmi",
        rank=("PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "PMIX_RANK"),
        world_size=("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "PALS_NRANKS"),
        local_rank=(
            "MPI_LOCALRANKID",
            "PALS_LOCAL_RANKID",
            "PMI_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "FLUX_TASK_LOCAL_ID",
        ),
        local_world_size=(
            "MPI_LOCALNRANKS",
            "PALS_LOCAL_SIZE",
            "PMI_LOCAL_SIZE",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
        job=("PALS_APID", "FLUX_JOB_ID", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID"),
    ),
    Launcher(
        source="slurm",
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_NTASKS_PER_NODE",
            "SLURM_TASKS_PER_NODE",
        ),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        step=("SLURM_STEP_ID", "SLURM_STEPID"),
        hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    ),
)

# Slurm numbers srun's steps from 0. From here on the numbers mean the batch script, an interactive
# salloc and the like: one process that has SLURM_PROCID=0 and the SLURM_NTASKS of the allocation.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def from_environment(environ: Environment = os.environ) -> Identity | None:
    """Say who this process is by its launcher's environment, or None if no launcher started it.

    Values that make no sense are warned about once, and then that launcher counts as absent: a
    metrics library does not end a run over a variable.
    """
    first: Identity | None = None
    for launcher in LAUNCHERS:
        me = _identity(launcher, environ) if _speaks(launcher, environ) else None
        if me is None or (first and (first.rank, first.world_size) != (me.rank, me.world_size)):
            continue
        if _first(launcher.local_rank, environ):
            return me
        first = first or me
    return first


def as_told_by(source: str, rank: int, world_size: int) -> Identity:
    """Say who a framework says we are, with what the launcher knows of this host.

    A launcher that counts other ranks than the framework does knows nothing of these.
    """
    launched = from_environment()
    if launched is None or (launched.rank, launched.world_size) != (rank, world_size):
        return Identity(rank, world_size, source=source)
    return replace(launched, source=source)


def master_address(environ: Environment = os.environ) -> str | None:
    """Give an address at which all ranks reach rank 0's host, or None if it cannot be known.

    It is MASTER_ADDR; else the loopback if all ranks share this host; else the first host of the
    SLURM step or job.
    """
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    me = from_environment(environ)
    if me is None or me.local_world_size == me.world_size:
        return "127.0.0.1"
    launcher = next(each for each in LAUNCHERS if each.source == me.source)
    found = _first(launcher.hosts, environ)
    return first_host(environ[found]) if found else None


def first_host(hosts: str) -> str:
    """Give the first of a list of hosts in Slurm's notation.

    >>> first_host("gpu[003-010,12],login1")
    'gpu003'
    """
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", hosts).split(",")[0]


def _speaks(launcher: Launcher, environ: Environment) -> bool:
    """Tell whether this launcher's variables speak of this very process."""
    if not (_first(launcher.rank, environ) and _first(launcher.world_size, environ)):
        return False
    if not launcher.step:
        return True
    step = environ.get(_first(launcher.step, environ) or "", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _identity(launcher: Launcher, environ: Environment) -> Identity | None:
    try:
        return _read(launcher, environ)
    except ValueError as error:
        _warn_once(f"{error} The {launcher.source} environment is ignored.")
        return None


def _read(launcher: Launcher, environ: Environment) -> Identity:
    world_size = _number(launcher.world_size, environ, at_least=1)
    rank = _number(launcher.rank, environ, below=world_size)
    local_rank = _number(launcher.local_rank, environ, below=world_size)
    local_world_size = _local_world_size(launcher, environ)
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        # Slurm's may be those of the allocation, where the step has fewer tasks.
        local_world_size=min(max(local_world_size, local_rank + 1), world_size),
        source=launcher.source,
        job=".".join(environ[name] for name in launcher.job if environ.get(name)),
    )


def _local_world_size(launcher: Launcher, environ: Environment) -> int:
    """Read the tasks of this node; Slurm lists those of all nodes, as in `4(x2),3`."""
    name = _first(launcher.local_world_size, environ)
    if name is None:
        return 1
    counts = []
    for part in environ[name].split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"{name}={environ[name]!r} is not a number of tasks a node.")
        counts.append((int(match[1]), int(match[2] or 1)))
    node = _number(("SLURM_NODEID",), environ) if len(counts) > 1 else 0
    for tasks, nodes in counts:
        if node < nodes:
            return tasks
        node -= nodes
    return counts[-1][0]


def _first(names: Sequence[str], environ: Environment) -> str | None:
    """Give the first of these variables that is set to something."""
    return next((name for name in names if environ.get(name)), None)


def _number(
    names: Sequence[str], environ: Environment, *, at_least: int = 0, below: int | None = None
) -> int:
    """Read the first of these variables that is set; none is the least number."""
    name = _first(names, environ)
    if name is None:
        return at_least
    text = environ[name]
    if not text.isdecimal():
        raise ValueError(f"{name}={text!r} must be a number, 0 or more.")
    number = int(text)
    if number < at_least or (below is not None and number >= below):
        limit = f"at least {at_least}" if below is None else f"below the world size {below}"
        raise ValueError(f"{name}={text!r} must be {limit}.")
    return number


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
