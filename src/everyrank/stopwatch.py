"""How long a part of the program takes, on the host's clock and on the device's.

    with StopWatch("forward pass", wbtag="timing/forward"):
        output = model(batch)

A device runs behind the host, so its time is known only later. Events mark begin and end in the
device's own queue, and nobody waits for them: they are looked at when a later StopWatch ends, and
by a thread that lives only while some are open. Until then `device_elapsed` is None.
"""

from __future__ import annotations

import atexit
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Protocol

from everyrank.forks import let_go_in_child
from everyrank.setup import wandb_disabled
from everyrank.stage.capture import relaxed

_log = logging.getLogger("everyrank")

_INTERVAL = 0.01  # seconds between the thread's looks at what is open
_IDLE_LOOKS = 100  # in vain, then the thread ends; to start one for each lap would cost more
_PATIENCE = 2.0  # seconds that a finished program waits for the device's last laps


class Event(Protocol):
    """A mark in a device's queue, such as `torch.xpu.Event(enable_timing=True)`."""

    def record(self) -> object:
        """Put the mark behind the work that is queued now."""
        ...

    def query(self) -> bool:
        """Say, without waiting, whether the device has passed the mark."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Give the milliseconds from this mark to a later one."""
        ...


class Notes(Protocol):
    """What takes a measured value into its next row: a History."""

    def note(self, name: str, value: float, /) -> object:
        """Add a value to the next row; called from any thread."""
        ...


class StopWatch(ContextDecorator):
    """Time a block or a function, and log it as `forward pass took 0.012345 s`.

    Where CUDA is in use, that is the time on the device, followed by the host's, and the line comes
    once the device is done. With a `history`, the seconds go into the next row that it records,
    under `wbtag` or a name made of the message; this, too, may happen later and on another thread.
    With a `wbtag` alone they go to the active W&B run.

    `device` names another CUDA device than the current one, or "cpu" for host time alone; `event`
    makes the marks of any other device. One StopWatch may be nested, recursive, and used by several
    threads at once; `elapsed` and `device_elapsed` are those of the use that ended last.

        @StopWatch("validation", history=history)
        def validate(model): ...
    """

    def __init__(
        self,
        message: str,
        *,
        wbtag: str | None = None,
        log: bool = True,
        level: int = logging.INFO,
        history: Notes | None = None,
        device: Any = None,
        event: Callable[[], Event] | None = None,
    ) -> None:
        self.message = message
        self.wbtag = wbtag
        self._level = level if log else None
        self._history = history
        self._device = device
        self._event = event
        self._open = _Open()
        self._last: _Lap | None = None

    @property
    def elapsed(self) -> float:
        """Seconds on the host's clock."""
        return self._last.host if self._last else 0.0

    @property
    def device_elapsed(self) -> float | None:
        """Seconds on the device's clock, or None while they are not known."""
        _PENDING.look()
        return self._last.device if self._last else None

    def __enter__(self) -> StopWatch:
        self._open.laps.append(_Lap(self._event or _cuda_event(self._device)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lap = self._open.laps.pop()
        lap.stop()
        self._last = lap
        if lap.begin is None:
            self._tell(lap)
        else:
            _PENDING.add(lap, self._tell)
        _PENDING.look()

    def _tell(self, lap: _Lap) -> None:
        """Hand a finished lap to the log, and to the history or W&B."""
        seconds = lap.host if lap.device is None else lap.device
        if self._level is not None:
            host = "" if lap.device is None else f" on the device, {lap.host:.6f} s on the host"
            _log.log(self._level, "%s took %.6f s%s", self.message, seconds, host)
        try:
            if self._history is not None:
                self._history.note(self.wbtag or f"timing/{_slug(self.message)}", seconds)
            elif self.wbtag is not None:
                _log_to_wandb({self.wbtag: seconds})
        except Exception as error:  # noqa: BLE001 - a timing never ends the run that it times
            _warn_once(f"The time of {self.message!r} could not be recorded: {error!r}.")


class _Lap:
    """One use of a StopWatch."""

    def __init__(self, event: Callable[[], Event] | None) -> None:
        self.host = 0.0
        self.device: float | None = None
        self.begin = _mark(event)
        self.end: Event | None = None
        self._event = event
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.host = time.perf_counter() - self._began
        if self.begin is not None:
            self.end = _mark(self._event)
            if self.end is None:
                self.begin = None

    def done(self) -> bool:
        """Say whether the time on the device is known by now, or never will be."""
        if self.begin is None or self.end is None:
            return True
        try:
            if not self.end.query():
                return False
            self.device = self.begin.elapsed_time(self.end) / 1e3
        except Exception as error:  # noqa: BLE001 - a lost device is for training to report
            _warn_once(f"The device's clock could not be read: {error!r}. Host time is shown.")
        return True


def _mark(event: Callable[[], Event] | None) -> Event | None:
    """Put a mark in the device's queue; None where there is no device, or it refuses."""
    if event is None:
        return None
    try:
        mark = event()
        mark.record()
    except Exception as error:  # noqa: BLE001 - a lost device is for training to report
        _warn_once(f"The device's clock could not be read: {error!r}. Host time is shown.")
        return None
    return mark


class _Open(threading.local):
    """The laps of one thread that have begun and not ended, innermost last."""

    def __init__(self) -> None:
        self.laps: list[_Lap] = []


class _Pending:
    """The laps whose end the device has not passed yet, and the thread that looks after them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # one thread at a time, so that laps are told in order
        self._laps: list[tuple[_Lap, Callable[[_Lap], None]]] = []
        self._thread: threading.Thread | None = None
        self._leave = threading.Event()
        self._at_exit = False

    def add(self, lap: _Lap, tell: Callable[[_Lap], None]) -> None:
        """Call `tell` with the lap once its time on the device is known."""
        with self._lock:
            self._laps.append((lap, tell))
            if not self._at_exit:
                self._at_exit = True
                atexit.register(self.close)
                let_go_in_child(self)
            if self._thread is None and not self._leave.is_set():
                self._thread = threading.Thread(
                    target=self._watch, name="everyrank-stopwatch", daemon=True
                )
                self._thread.start()

    def look(self) -> None:
        """Tell of the laps that are done, without waiting for the others."""
        if not self._laps or not self._telling.acquire(blocking=False):
            return
        try:
            with self._lock:
                looked = [(lap.done(), lap, tell) for lap, tell in self._laps]
                self._laps = [(lap, tell) for done, lap, tell in looked if not done]
            for done, lap, tell in looked:
                if done:
                    tell(lap)
        finally:
            self._telling.release()

    def close(self) -> None:
        """Wait a little for what is open, tell the rest by the host's clock, and end the thread."""
        deadline = time.monotonic() + _PATIENCE
        while self._laps and time.monotonic() < deadline:
            self.look()
            time.sleep(_INTERVAL)
        self._leave.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE)
        with self._lock:
            left, self._laps = self._laps, []
        for lap, tell in left:
            tell(lap)

    def _watch(self) -> None:
        idle = 0
        while not self._leave.wait(_INTERVAL):
            self.look()
            with self._lock:
                idle = 0 if self._laps else idle + 1
                if idle >= _IDLE_LOOKS:
                    self._thread = None
                    return

    def after_fork(self) -> None:
        """Start anew in a forked child, which has neither the thread nor the device."""
        # The old ones may be held by a thread that is not here.
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._leave = threading.Event()
        self._laps, self._thread = [], None


_PENDING = _Pending()


def _cuda_event(device: Any) -> Callable[[], Event] | None:
    """Say how to mark this CUDA device's queue; None where no CUDA device is in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if device is not None and torch.device(device).type != "cuda":
        return None
    # A mark inside a graph that is being captured would be part of the graph, and never pass.
    if torch.cuda.is_current_stream_capturing():
        return None
    return lambda: _CudaEvent(torch, device)


class _CudaEvent:
    """A CUDA event that any thread may look at."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.current_stream(device)
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record(self._stream)

    def query(self) -> bool:
        with _at_ease(self._torch, self._stream.device):
            return bool(self._event.query())

    def elapsed_time(self, end: _CudaEvent) -> float:
        with _at_ease(self._torch, self._stream.device):
            return float(self._event.elapsed_time(end._event))


@contextmanager
def _at_ease(torch: Any, device: Any) -> Iterator[None]:
    """Let this thread ask about events, also while another one captures a CUDA graph.

    The device is set as well, because a thread that asks without one opens a context on device 0.
    """
    with torch.cuda.device(device), relaxed():
        yield


def _log_to_wandb(values: dict[str, float]) -> None:
    """Add values to what the active W&B run logs next."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is not None and not wandb_disabled():
        # Committed, it would use up a step, and W&B drops rows that come with an earlier one.
        run.log(values, commit=False)


def _slug(message: str) -> str:
    return re.sub(r"\W+", "_", message.lower()).strip("_") or "stopwatch"


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
