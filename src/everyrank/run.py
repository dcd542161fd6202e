"""One run as one process sees it: who the others are, where it is kept, and the flow between.

    run = Run(Options(outdir="runs/seven", sync_every=50))
    run.flow.intake.add({"loss": 0.25})
    run.close(30.0)

A run has an end, also where a program forgets it: at the exit of the interpreter, or when nobody
holds the History any more, it is closed like any other, within a bounded time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from everyrank.backends.background import Background
from everyrank.backends.base import Backend
from everyrank.backends.per_rank import PerRank
from everyrank.columns import Columns
from everyrank.environment import switched_on
from everyrank.errors import OptionError
from everyrank.flow import Flow
from everyrank.messages import log
from everyrank.ranks import Peers, discover
from everyrank.ranks.base import Ranks
from everyrank.ranks.local import Alone, InProcess
from everyrank.records import STATISTIC, Description
from everyrank.reductions import DEFAULT_STATS, check_stats, over_ranks
from everyrank.runfiles import PathLike, RunFiles
from everyrank.series import Series

#: Set by whoever launches a run to keep every rank's statistics to itself.
_LOCAL = ("EVERYRANK_NO_DISTRIBUTED_HISTORY", "EVERYRANK_LOCAL_HISTORY")


@dataclass(frozen=True, slots=True)
class Options:
    """What a History was asked for; see there."""

    distributed: bool | None = None
    report_dir: PathLike | None = None
    jsonl_path: PathLike | None = None
    jsonl_overwrite: bool = False
    outdir: PathLike | None = None
    run_id: str | None = None
    config: Any = None
    backends: Sequence[Backend] = ()
    sync_every: int = 1
    group: Any = None
    mesh: Any = None
    stats: Sequence[str] = DEFAULT_STATS
    timeout: float = 60.0
    per_rank: bool = False
    transport: Literal["host", "device"] = "host"
    site: str = ""  # the line of the program that asked: ranks that agree on it belong together

    def __post_init__(self) -> None:
        """Refuse what cannot be honoured."""
        n, seconds = self.sync_every, self.timeout
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(
                f"sync_every={n!r} must be an int of at least 1: after so many updates a window "
                "closes. sync_every=1 gives statistics at once, 50 costs least."
            )
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise OptionError(
                f"timeout={seconds!r} must be a number of seconds above 0: other ranks are waited "
                "for so long, for example timeout=60."
            )
        if not math.isfinite(seconds):
            raise OptionError(f"timeout={seconds!r}: nothing waits without a deadline. Try 3600.")
        if self.group is not None and self.mesh is not None:
            raise OptionError("group= and mesh= say the same thing twice: pass one of them.")
        if self.transport not in ("host", "device"):
            raise OptionError(
                f"transport={self.transport!r} is neither 'host' (the default: over host memory, "
                "apart from training) nor 'device' (the accelerator's own collectives)."
            )
        if not isinstance(self.backends, Iterable):
            raise OptionError(f"backends={self.backends!r} must be a list: backends=[...].")
        object.__setattr__(self, "backends", tuple(self.backends))
        for backend in self.backends:
            if not isinstance(backend, Backend):
                raise OptionError(
                    f"backends holds {backend!r} of type {type(backend).__name__}, which is no "
                    "backend: it needs `name`, `write(record)` and `close()`. See "
                    "everyrank.backends.base."
                )


class Run:
    """Everything behind a History."""

    def __init__(self, options: Options) -> None:
        self._stats = check_stats(options.stats)
        group = options.group if options.group is not None else options.mesh
        self.options = options
        self.descriptions: dict[str, Description] = {}
        self.columns = Columns()
        self._outdir = None if options.outdir is None else Path(options.outdir).absolute()
        self.peers = _peers(group, options)
        _check_alike(group, self._stats)
        self.files = _files(self.peers, options)
        self.generation = self.files.run.generation if self.files else 0
        self._said_back = False
        self._noted_end = False
        try:
            self.flow = self._begin(group)
        except BaseException:
            if self.files is not None:  # or whoever tries again would find the log locked
                self.files.log.close()
            raise

    @property
    def run_id(self) -> str | None:
        """The name of the run, the same on every rank; None until the first rank has said it."""
        if self.files is not None:
            return self.files.run.run_id
        return self._told("run_id") or self.options.run_id

    def where(self) -> Path | None:
        """Give the run directory, or None while it is not known."""
        if self.files is not None:
            return self.files.directory
        told = self._told("directory")
        return self._outdir if told is None else Path(told)

    def series(self, name: str) -> Series:
        """Give the live values of one name; only statistics are waited for.

        Without other ranks a value is its own statistics: nobody stores them, but a program that
        reads "loss/mean" should run on one process as well.
        """
        match = STATISTIC.search(name)
        if match is None:
            if self.flow.intake.is_handed(name):
                self.flow.settle_a_little()
            else:
                self.flow.own_rows()
            return self.columns.series(name)
        self.flow.settle_a_little()
        known = self.columns.names
        base = name[: match.start()]
        if name in known or base not in known or match[1] not in self._stats:
            return self.columns.series(name)
        own = self.columns.series(base)
        if not self.flow.alone or own.values.dtype == object:
            return own.empty(name)  # it will come, or has no statistics
        me = np.array([self.peers.identity.rank])
        numbers = own.values.astype(np.float64)[None]
        (values,), _ = over_ranks(numbers, ranks=me, stats=[match[1]])
        return Series(name, own.steps, values)

    def declare(self, name: str, description: Description) -> None:
        """Make known how a metric is read and weighed."""
        self.descriptions[name] = description
        self.columns.declare(name)
        if description.weight is not None:
            weight = description.weight
            self.flow.order(lambda: self.flow.ranks.declare_weight(name, weight))

    def resume(self, step: int, earlier_run: str | None) -> None:
        """Go on after the step of a checkpoint, which a run of that name has written."""
        begun = self.flow.intake.steps.last is not None
        if self.files is None:
            self.generation += 1
        elif begun:
            self.generation = self.files.run.begin_generation(step)
        else:
            self.files.run.resumed(step)
        if begun:
            self.flow.supersede(self.generation, step)
        else:
            self.flow.order(lambda: self.columns.rewind(step))
        self.flow.intake.resume(step, self.generation)
        if self.files is not None:
            if earlier_run not in (None, self.files.run.run_id):
                self.files.run.update(continues=earlier_run)
            self.flow.order(self.files.note)

    def close(self, seconds: float, status: str = "finished") -> bool:
        """Record and deliver everything, note how the run ended; True if nothing was left."""
        if self.flow.forked:
            return True
        delivered = self.flow.close(seconds)
        if self.files is not None and self.flow.ended and not self._noted_end:
            last = self.flow.intake.steps.last
            health = self.flow.health()
            hosts = health.get("hosts") or {"0": self.peers.identity.host}
            self.files.note(
                status=status,
                last_step=last,
                hosts=sorted(set(hosts.values())),
                health=health,
                metrics=self.descriptions,
            )
            self._noted_end = True
        return delivered

    def _went_back(self, last: int, step: int) -> int:
        """Begin the generation of a run that goes on from an earlier step; called under a lock."""
        if self.files is None:
            self.generation += 1
        else:
            self.generation = self.files.run.begin_generation(step - 1)
            self.flow.order(self.files.note)
        self.flow.supersede(self.generation, step - 1)
        if not self._said_back:
            self._said_back = True
            # In the background: whatever handlers make of it, no update has to wait for them.
            self.flow.order(lambda: _say_back(last, step))
        return self.generation

    def _replay(self) -> None:
        assert self.files is not None
        self.files.replay(self.columns)

    def _told(self, fact: str) -> Any:
        """Give what the first rank said of the run; None while it has not."""
        return (self.flow.ranks.facts or {}).get(fact)

    def _begin(self, group: Any) -> Flow:
        """Write what is known, and start what goes on in the background."""
        options = self.options
        if self.files is not None:
            self.files.begin(self._facts())
        flow = Flow(
            ranks=lambda selector: self._ranks(group, selector),
            columns=self.columns,
            sync_every=options.sync_every,
            generation=self.generation,
            went_back=self._went_back,
            backends=self._backends,
            per_rank=PerRank(self.peers.identity.rank, self.where) if options.per_rank else None,
        )
        if self.files is not None and self.files.goes_on:
            flow.order(self._replay)
        return flow

    def _backends(self) -> list[Background]:
        if self.files is None:
            return []
        outlets = [Background(self.files.log)]
        outlets += [Background(b, drop=True) for b in self.options.backends]
        for outlet in outlets:
            outlet.describe(self.descriptions)
        return outlets

    def _facts(self) -> dict[str, Any]:
        me, options = self.peers.identity, self.options
        some = len(self.peers.ranks) < me.world_size
        return {
            # A run that goes on keeps the config that it was begun with, unless another is given.
            **({} if options.config is None and self._has_config() else {"config": options.config}),
            "world_size": me.world_size,
            "launcher": me.source,
            "sync_every": options.sync_every,
            "stats": list(options.stats),
            **({"ranks": list(self.peers.ranks)} if some else {}),
        }

    def _has_config(self) -> bool:
        return self.files is not None and self.files.run.facts.get("config") is not None

    def _ranks(self, group: Any, selector: Any) -> Ranks:
        """Open the way to the other ranks; nothing of it blocks."""
        options = self.options
        if isinstance(group, InProcess):
            return group
        local = options.distributed is False or any(map(switched_on, _LOCAL))
        if local or len(self.peers.ranks) == 1:
            return Alone(replace(self.peers.identity))
        facts: dict[str, Any] = {"host": self.peers.identity.host}
        if self.files is not None:
            facts |= {"run_id": self.files.run.run_id, "directory": str(self.files.directory)}
        about: dict[str, Any] = {"stats": self._stats, "timeout": options.timeout, "facts": facts}
        # Imported by those who need it: sockets by whoever has peers, torch by whoever asks.
        if options.transport == "device":
            from everyrank.ranks.device import DeviceRanks

            return DeviceRanks(self.peers, **about)
        from everyrank.ranks.host import host_ranks

        place = {
            name: os.fspath(value)
            for name in ("outdir", "jsonl_path", "run_id")
            if (value := getattr(options, name)) is not None
        }
        return host_ranks(self.peers, name=options.site, place=place, selector=selector, **about)


def _say_back(last: int, step: int) -> None:
    log.warning(
        "the run went back from step %d to step %d: the rows from there on are superseded by those "
        "that come now, and kept in the log (said once).",
        last,
        step,
    )


def _peers(group: Any, options: Options) -> Peers:
    if isinstance(group, InProcess):
        return Peers(group.identity, tuple(range(group.identity.world_size)))
    directory = Path(options.outdir) if options.outdir is not None else None
    return discover(group=group, directory=directory)


def _check_alike(group: Any, stats: Sequence[str]) -> None:
    if isinstance(group, InProcess) and group.stats != stats:
        raise OptionError(
            f"stats={stats!r}, but the ranks in this process reduce {group.stats!r}. Pass the same "
            "to in_process(n, stats=...)."
        )


def _files(peers: Peers, options: Options) -> RunFiles | None:
    """Open the files on the first rank; a group without rank 0 writes beside the one that has it."""
    if peers.identity.rank != peers.first:
        return None
    return RunFiles(
        outdir=options.outdir,
        report_dir=options.report_dir,
        jsonl_path=options.jsonl_path,
        jsonl_overwrite=options.jsonl_overwrite,
        run_id=options.run_id,
        part=f"group-of-rank-{peers.first}" if peers.first else None,
    )
