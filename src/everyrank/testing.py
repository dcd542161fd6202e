"""Doubles and launchers for tests of training code: real ranks on one machine, records in memory.

def train(rank, steps):                         # in a module that a new process can import
    with everyrank.History() as history:
        for step in range(steps):
            history.update({"loss": float(rank)})
        return history["loss/mean"]

def test_the_mean_is_over_all_ranks():
    for mean in run_ranks(train, 4, 10):
        assert list(mean) == [1.5] * 10
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from everyrank.errors import EveryrankError, OptionError
from everyrank.records import Record

_GRACE = 10.0  # seconds that the others have to end once a rank has failed
_STACK_PATIENCE = 2.0  # seconds that a hanging process has to write down where it is
_ORPHAN = 30.0  # seconds past the timeout at which a rank whose parent is gone ends itself


class RanksFailed(EveryrankError):  # noqa: N818 - reads as what it says
    """Some ranks did not return; `failures` says by rank what happened, first come first."""

    def __init__(self, name: str, n: int, failures: Mapping[int, str]) -> None:
        """Name every failed rank, those that failed alike together."""
        self.failures = dict(failures)
        alike: dict[str, list[int]] = {}
        for rank, text in failures.items():
            alike.setdefault(text, []).append(rank)
        parts = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, sorted(ranks)))} {text}"
            for text, ranks in alike.items()
        ]
        super().__init__("\n\n".join([f"{len(failures)} of {n} ranks of {name} failed.", *parts]))


@dataclass(frozen=True, slots=True)
class Died:
    """What `run_ranks` gives for a rank that was allowed to die, and did."""

    exitcode: int  # negative: the signal that ended it
    report: str = ""  # its traceback, if it left one


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = "gloo",
    start_method: str = "spawn",
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call `fn(rank, *args)` in `n` new processes of this machine, and give what each returned.

    The processes find the environment of torchrun on one host, with `env` on top. With a `backend`,
    torch.distributed is initialised before the call and destroyed after it; with None, torch is not
    imported. `fn` is a function of a module that a new process can import. If a rank fails, or is
    not done after `timeout` seconds, all are ended, and RanksFailed holds every traceback and where
    the others were. A rank of `may_die` may die: it gives a `Died`.

    `start_method="forkserver"` forks the ranks from one process that has imported torch, once.
    """
    if n < 1:
        raise OptionError(f"n={n} must be at least 1: the number of ranks to start.")
    function = _by_name(fn)
    with tempfile.TemporaryDirectory(prefix="everyrank-ranks-") as directory:
        plan = _Plan(function, args, n, timeout, backend, dict(env or {}), Path(directory))
        ranks = [_Rank(rank, plan, may_die=rank in may_die) for rank in range(n)]
        try:
            _start(ranks, start_method)
            failures = _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
    if failures:
        raise RanksFailed(fn.__qualname__, n, failures)
    return [rank.result for rank in ranks]


def _by_name(fn: Callable[..., Any]) -> bytes:
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"fn={fn!r} cannot be sent to another process ({error}). "
            "Define it with `def` at the top of a module that a new process can import."
        ) from error


@dataclass(frozen=True, slots=True)
class _Plan:
    """What every rank of one call is to do."""

    function: bytes
    args: tuple[Any, ...]
    n: int
    timeout: float
    backend: str | None
    env: dict[str, str]
    directory: Path

    def environment(self) -> dict[str, str]:
        """Give what torchrun would set, but for the rank."""
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        return {
            **({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {}),
            **os.environ,
            "WORLD_SIZE": str(self.n),
            "LOCAL_WORLD_SIZE": str(self.n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
            **self.env,
        }

    def stacks(self, rank: int) -> Path:
        """Give the file where a rank writes down where it is, when asked."""
        return self.directory / f"stacks-{rank}"


def _free_port() -> int:
    """Find a port for programs that want one; `run_ranks` itself meets in a file."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Rank:
    """One process as its parent sees it."""

    def __init__(self, rank: int, plan: _Plan, *, may_die: bool) -> None:
        self.rank = rank
        self.may_die = may_die
        self.result: Any = None
        self.running = False
        self._plan = plan
        self._started = False
        self._reports: dict[str, Any] = {}
        self._process: Any = None
        self._pipe: Connection | None = None

    def start(self, context: Any, environment: dict[str, str]) -> None:
        environment = {**environment, "RANK": str(self.rank), "LOCAL_RANK": str(self.rank)}
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_child,
            args=(self.rank, self._plan, environment, theirs),
            name=f"rank {self.rank}",
        )
        self._process.start()
        theirs.close()  # so that the pipe ends when the child does
        self.running = True

    @property
    def signs(self) -> list[Any]:
        """Give what to wait on for news of this rank."""
        return [self._process.sentinel, *([self._pipe] if self._pipe else [])]

    def listen(self) -> None:
        """Take in what the rank has said, and whether it has ended."""
        ended = self._process.exitcode is not None
        try:
            while self._pipe is not None and self._pipe.poll():
                kind, content = self._pipe.recv()
                self._reports[kind] = content
        except (EOFError, OSError):  # it died, perhaps in the middle of a word
            self._pipe = None
        self.running = not ended

    def failure(self) -> str | None:
        """Say what went wrong with a rank that has ended; None if that is as it should be."""
        code = self._process.exitcode
        if "returned" in self._reports and code == 0:
            self.result = pickle.loads(self._reports["returned"])  # noqa: S301 - our own child's
            return None
        if self.may_die:
            self.result = Died(code, self._reports.get("failed", ""))
            return None
        if "failed" in self._reports:
            return str(self._reports["failed"])
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if "returned" in self._reports:
            return f"returned, but then {how} while it shut down."
        return f"{how} before it returned. What it had to say is on its stderr."

    def whereabouts(self) -> str:
        """Ask a rank that hangs for the stacks of its threads, if it has not failed before."""
        if "failed" in self._reports:
            return f"Before that it {self._reports['failed']}"
        if "ready" not in self._reports or not hasattr(faulthandler, "register"):
            return "It had not begun to run the function."
        path = self._plan.stacks(self.rank)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        deadline, size = time.monotonic() + _STACK_PATIENCE, -1
        while time.monotonic() < deadline and not 0 < path.stat().st_size == size:
            size = path.stat().st_size
            time.sleep(0.05)
        return path.read_text(errors="replace") or "It did not say where it was."

    def end(self) -> None:
        """Make sure that nothing of this rank is left."""
        if self._process is None or self._process.pid is None:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        if self._pipe is not None:
            self._pipe.close()


def _start(ranks: Sequence[_Rank], start_method: str) -> None:
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload([__name__, "torch", "torch.distributed"])
    environment = ranks[0]._plan.environment()
    for rank in ranks:
        rank.start(context, environment)


def _wait(ranks: Sequence[_Rank], timeout: float) -> dict[int, str]:
    """Wait until all have ended, or it is time to end them; give what went wrong, first first."""
    failures: dict[int, str] = {}
    deadline, reason = time.monotonic() + timeout, f"was still running after {timeout:g} s."
    while running := [rank for rank in ranks if rank.running]:
        if (left := deadline - time.monotonic()) <= 0:
            return failures | {each.rank: f"{reason}\n{each.whereabouts()}" for each in running}
        wait([sign for rank in running for sign in rank.signs], left)
        for rank in running:
            rank.listen()
            failure = None if rank.running else rank.failure()
            if failure is None:
                continue
            if not failures and deadline > time.monotonic() + _GRACE:
                deadline = time.monotonic() + _GRACE
                reason = f"was still running {_GRACE:g} s after rank {rank.rank} had failed."
            failures[rank.rank] = failure
    return failures


def _child(rank: int, plan: _Plan, environment: dict[str, str], pipe: Connection) -> None:
    """Be one rank: the whole life of a started process."""
    os.environ.clear()  # a fork server was started with the environment of another time
    os.environ.update(environment)
    stacks = plan.stacks(rank).open("w")
    faulthandler.dump_traceback_later(plan.timeout + _ORPHAN, exit=True, file=stacks)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stacks)
    pipe.send(("ready", None))
    function = _load(plan.function, pipe)
    if "torch" in sys.modules:  # imported before OMP_NUM_THREADS was set
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    try:
        with _process_group(rank, plan):
            result = function(rank, *plan.args)
        pipe.send(("returned", pickle.dumps(result)))
    except BaseException as error:  # noqa: BLE001 - whatever ended it, the parent should know
        own = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(error.with_traceback(own))
        pipe.send(("failed", "failed:\n" + "".join(lines)))
        sys.exit(1)


def _load(function: bytes, pipe: Connection) -> Callable[..., Any]:
    try:
        return pickle.loads(function)  # type: ignore[no-any-return]  # noqa: S301 - our own parent's
    except Exception as error:  # noqa: BLE001 - importing the module may raise anything
        text = (
            f"could not import the function: {type(error).__name__}: {error}.\n"
            "Define it at the top of a module that a new process can import, such as a plain "
            "module in a directory of pytest's option `pythonpath`. A test module is none under "
            f"--import-mode=importlib.\n{traceback.format_exc()}"
        )
        pipe.send(("failed", text))
        sys.exit(1)


@contextlib.contextmanager
def _process_group(rank: int, plan: _Plan) -> Iterator[None]:
    """Have torch.distributed initialised, if a backend is given."""
    if plan.backend is None:
        yield
        return
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group(
        plan.backend,
        init_method=f"file://{plan.directory / 'rendezvous'}",
        rank=rank,
        world_size=plan.n,
        timeout=timedelta(seconds=plan.timeout),
    )
    # Not in a `finally`: after a failure the others may never join in, and the process ends anyway.
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class MemoryBackend:
    """A backend that keeps what it is given, for tests to look at.

    memory = MemoryBackend()
    with everyrank.History(backends=[memory]) as history:
        history.update({"loss": 0.25})
    assert [record.values["loss"] for record in memory.records] == [0.25]
    """

    name = "memory"

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = False
        self._changed = threading.Condition()

    def write(self, record: Record) -> None:
        """Keep one record."""
        with self._changed:
            if self.closed:
                raise ValueError(f"The memory backend was closed before step {record.step} came.")
            self.records.append(record)
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more records."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait_for(self, n: int, *, timeout: float = 30.0) -> list[Record]:
        """Wait until there are `n` records, and give them all."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.records) >= n or self.closed, timeout)
            if len(self.records) < n:
                raise TimeoutError(
                    f"{n} records were awaited, but {len(self.records)} have come in {timeout:g} s"
                    f"{' before the backend was closed' if self.closed else ''}."
                )
            return list(self.records)
