"""The front door: hand over numbers as training goes, and look at them whenever you like.

    import everyrank

    rank = everyrank.setup_torch()
    with everyrank.History(outdir="runs/seven") as history:
        for step in range(100):
            loss = train_step()
            history.update({"loss": loss})          # a float, or a tensor where it lies

    history["loss/mean"]                            # over all ranks, on every rank

Create a History on every rank whose numbers count, and call `update` there. Nothing else must be
done together: ranks may log other keys, at other steps, or close at another time.

What waits, and for how long: `update` never, unless the bounded queue is full; reading own values
for our own thread; printing a summary and reading statistics for other ranks, and if these do not
come, two seconds altogether at most; `flush`, `close` and `finalize` up to `timeout` seconds.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from everyrank.backends.base import Backend
from everyrank.errors import MissingPackage, OptionError
from everyrank.messages import log
from everyrank.records import Description, Record
from everyrank.reductions import DEFAULT_STATS
from everyrank.run import Options, Run
from everyrank.runfiles import PathLike
from everyrank.series import Series
from everyrank.stopwatch import StopWatch as StopWatch  # its users find both here
from everyrank.summary import Summary
from everyrank.window import Row, check_name
from everyrank.worker import on_worker_thread

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


_EVERYWHERE: frozenset[str] = frozenset()
_NOT_WANDB = frozenset({"wandb"})

#: What a program that ends without `close` gives its history to finish, in seconds.
_AT_EXIT = 20.0


class History:
    """Record numbers of every rank, without stalling one.

        history = History(outdir="runs/seven", sync_every=50, stats=("mean", "p95", "max_rank"))
        history.declare("loss", unit="nats", better="lower", weight="tokens")

    * `keys` are names that may be read before they have a value.
    * `outdir` is the directory of this run; opened again, the run goes on. Without it, each run
      gets one of its own under `outputs/`. `report_dir` and `jsonl_path` are places that several
      runs may share; there, `run_id` says which run goes on.
    * `config` is kept among the run's facts, without its secrets.
    * `backends` get every record on the rank that writes, besides the run's log.
    * `sync_every` updates travel together: 1 gives statistics at once, 50 costs least.
    * `group` or `mesh` restricts statistics to a ProcessGroup, a DeviceMesh slice or some ranks.
    * `distributed_history=False` keeps to this rank's own values.
    * `stats` names the statistics over ranks: mean, std, min, max, min_rank, max_rank, p50, p99.9.
    * `timeout` bounds every wait for other ranks, in seconds.
    * `per_rank=True` adds a log of its own for each rank.
    * `transport="device"` carries values by the accelerator's own collectives.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        *,
        distributed_history: bool | None = None,
        report_dir: PathLike | None = None,
        report_enabled: bool = True,
        jsonl_path: PathLike | None = None,
        jsonl_overwrite: bool = False,
        outdir: PathLike | None = None,
        run_id: str | None = None,
        config: Any = None,
        backends: Sequence[Backend] = (),
        sync_every: int = 1,
        group: Any = None,
        mesh: Any = None,
        stats: Sequence[str] = DEFAULT_STATS,
        timeout: float = 60.0,
        per_rank: bool = False,
        transport: Literal["host", "device"] = "host",
    ) -> None:
        if isinstance(keys, str):
            raise OptionError(f"keys={keys!r} is one text. Pass a list of names: keys=[{keys!r}].")
        for key in keys or ():
            check_name(key)
        self.report_enabled = report_enabled
        self._run = Run(
            Options(
                distributed=distributed_history,
                report_dir=report_dir,
                jsonl_path=jsonl_path,
                jsonl_overwrite=jsonl_overwrite,
                outdir=outdir,
                run_id=run_id,
                config=config,
                backends=backends,
                sync_every=sync_every,
                group=group,
                mesh=mesh,
                stats=stats,
                timeout=timeout,
                per_rank=per_rank,
                transport=transport,
                site=_site(),
            )
        )
        self._flow = self._run.flow
        self._add: Callable[[Any, Any, frozenset[str]], Row] = self._flow.intake.add
        self._said_closed = False
        for key in keys or ():
            self._run.columns.declare(key)
        # A program may forget to close: then it happens at its exit, or with the last reference.
        self._finalizer = weakref.finalize(self, _abandon, self._run)
        if processes := sys.modules.get("multiprocessing.util"):
            # One that multiprocessing forked ends without the exit of an interpreter.
            processes.Finalize(self, self._finalizer, exitpriority=0)

    # ---------------------------------------------------------------------------- handing over

    def update(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        precision: int = 6,
        use_wandb: bool | None = None,
    ) -> Summary:
        """Record some numbers, and give a line of them for whoever wants to print it.

        Values may be numbers, tensors of any device, small arrays, texts, None, or dicts of these,
        whose keys are joined with `/`. They are copied at once where they lie. The step is `step`,
        or the key "step", or counted. `use_wandb=False` leaves W&B out. With `sync_every` above 1,
        the line has statistics only if its window was the last to close.

            print(history.update({"loss": loss, "lr": 3e-4}))   # step=42 loss=0.123456 ...
        """
        row = self._add(metrics, step, _NOT_WANDB if use_wandb is False else _EVERYWHERE)
        return Summary(self._run, row, precision)

    def declare(
        self,
        name: str,
        *,
        unit: str | None = None,
        format: str | None = None,
        better: Literal["lower", "higher"] | None = None,
        title: str | None = None,
        weight: str | None = None,
    ) -> None:
        """Say how a metric is read, and by which other one its mean over ranks is weighed.

        Call it on every rank, before the first value. `format` is a format specification, such as
        ".3e"; with `weight="tokens"` the mean is sum(tokens x value) / sum(tokens).

            history.declare("loss", unit="nats", better="lower", weight="tokens")
        """
        check_name(name)
        if better not in (None, "lower", "higher"):
            raise OptionError(f"better={better!r} of {name!r} must be 'lower' or 'higher'.")
        if weight is not None:
            check_name(weight)
        if format is not None:
            try:
                f"{1.0:{format}}"
            except ValueError:
                raise OptionError(
                    f"format={format!r} of {name!r} does not format a number. Pass a format "
                    "specification, for example '.3e' or ',.0f'."
                ) from None
        self._run.declare(name, Description(unit, format, better, title, weight))

    def note(self, name: str, value: Any) -> None:
        """Add a value to the next row; may be called from any thread."""
        self._flow.intake.note(name, value)

    # ---------------------------------------------------------------------------- looking

    def __getitem__(self, name: str) -> Series:
        return self._run.series(name)

    def __contains__(self, name: object) -> bool:
        self._flow.own_rows()
        return name in self._run.columns.names

    def __len__(self) -> int:
        return len(self.steps)

    def __bool__(self) -> bool:
        return True  # an empty history is a history: `if history:` asks whether there is one

    def __iter__(self) -> Iterator[Record]:
        """Give one record for each step, in order; superseded ones are left out."""
        self._flow.settle_a_little()
        return self._run.columns.records()

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that were recorded."""
        self._flow.own_rows()
        return self._run.columns.steps

    @property
    def history(self) -> dict[str, list[Any]]:
        """All values by name, as plain lists."""
        self._flow.settle_a_little()
        return {name: list(series) for name, series in self._run.columns.all_series().items()}

    @property
    def latest(self) -> Record | None:
        """The record of the last step, or None before there is one."""
        self._flow.settle_a_little()
        return self._run.columns.latest()

    @property
    def descriptions(self) -> Mapping[str, Description]:
        """What was declared of each metric."""
        return self._run.descriptions

    @property
    def run_id(self) -> str | None:
        """The name of the run; on other ranks None until the first has said it."""
        return self._run.run_id

    @property
    def outdir(self) -> Any:
        """The run directory; on other ranks None until the first has said it."""
        return self._run.where()

    def to_pandas(self) -> pd.DataFrame:
        """Give a DataFrame with a row for each step and a column for each name."""
        from everyrank.report.frames import to_pandas

        self._flow.settle_a_little()
        return to_pandas(self._run.columns)

    def to_xarray(self) -> xr.Dataset:
        """Give a Dataset of float64 in which each group of names has a step coordinate of its own.

        netCDF has no "/" in names: `eval/loss` is the variable `eval.loss` along `step_eval`, and
        its attribute `name` holds the true name. Texts are left out, and `left_out` names them.
        """
        from everyrank.report.frames import to_xarray

        self._flow.settle_a_little()
        return to_xarray(self._run.columns, {"run_id": self.run_id or ""})

    def health(self) -> dict[str, Any]:
        """Count what waits, what failed, what came late, and name the ranks that are missing."""
        return self._flow.health()

    # ---------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint should hold, so that the run can go on from here."""
        return {"version": 1, "run_id": self.run_id, "step": self._flow.intake.steps.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a checkpoint; rows past it that were recorded are superseded."""
        try:
            version, step = state["version"], state["step"]
        except (TypeError, KeyError) as error:
            raise OptionError(
                f"state={state!r} is not what History.state_dict() gave: {error!r}."
            ) from error
        if version != 1:
            raise OptionError(
                f"state has version {version!r}, and this everyrank reads version 1. "
                "Load it with the everyrank that wrote it, or a newer one."
            )
        if step is not None:
            self._run.resume(int(step), state.get("run_id"))

    # ---------------------------------------------------------------------------- the end

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all so far is recorded and delivered, other ranks' too; False if too late."""
        return self._flow.settle(self._timeout if timeout is None else timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Record and deliver everything, and end; True if nothing was left behind.

        Other ranks are not needed for it: who is not there within `timeout` is left out.
        """
        return self._close(self._timeout if timeout is None else timeout, "finished")

    def finalize(
        self,
        outdir: PathLike | None = None,
        run_name: str | None = None,
        warmup: float = 0.0,
        num_chains: int = 128,
    ) -> xr.Dataset | None:
        """Close the history, and give all of it as an xarray Dataset; any rank may call it.

        `outdir` gets a copy of log and facts, if the run is kept elsewhere. `warmup` leaves out a
        fraction of the first steps, or a number of them; `num_chains` is for ridge plots. Without
        xarray the answer is None, and everything is in the run directory all the same.

            dataset = history.finalize(outdir="./outputs", warmup=0.05)
        """
        from everyrank.report.frames import after_warmup, to_xarray

        self.close()
        if outdir is not None and self._run.files is not None:
            self._run.files.copy_to(outdir)
        attributes = {"run_id": self.run_id or "", "run_name": run_name or self.run_id or ""}
        try:
            return after_warmup(to_xarray(self._run.columns, attributes), warmup)
        except MissingPackage as missing:
            log.warning("finalize gives no dataset: %s", missing)
            return None

    def __enter__(self) -> History:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(self._timeout, _status(kind, error))

    def __repr__(self) -> str:
        names = self._run.columns.names
        return f"History({self.run_id}: {len(self._run.columns)} steps of {len(names)} names)"

    @property
    def _timeout(self) -> float:
        return self._run.options.timeout

    def _close(self, seconds: float, status: str) -> bool:
        self._add = self._add_nothing  # so that an open history need not ask at each update
        return self._run.close(seconds, status)

    def _add_nothing(self, metrics: Any, step: Any, skip: frozenset[str]) -> Row:
        if not self._said_closed:
            self._said_closed = True
            self._flow.intake.ended = True
            log.warning("update() was called after the history was closed: it records nothing.")
        return self._flow.intake.add(metrics, step, skip)


def _abandon(run: Run) -> None:
    """Close a run that nobody holds any more."""
    if on_worker_thread():
        # Garbage is collected by whichever thread makes some, and this one cannot wait for itself.
        # The new one is no daemon: the exit of the interpreter waits for it.
        threading.Thread(
            target=run.close, args=(_AT_EXIT, "abandoned"), name="everyrank-end"
        ).start()
    else:
        run.close(_AT_EXIT, "abandoned")


def _status(kind: type[BaseException] | None, error: BaseException | None) -> str:
    """Say how a run ended: by itself, by a program that had enough, by hand, or by an error."""
    if kind is None or (isinstance(error, SystemExit) and not error.code):
        return "finished"
    return "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"


def _site() -> str:
    """Name the line of the program that opens a History: ranks find each other by it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("everyrank."):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}:{frame.f_lineno}"
