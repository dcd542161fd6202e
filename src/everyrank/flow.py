"""What becomes of a closed window on the background thread: packed, reduced, kept, handed out.

    windows -> pack -> ranks -> columns -> backends

* **Order.** Windows are taken in the order in which they were closed; one whose values are still on
  their way from a device holds back those behind it. A record is in the columns before any backend
  sees it, and each backend sees every record once, in the order of the run.
* **Together.** All windows that are ready are packed into as few batches as their names allow, and
  reduced together: who is behind catches up at a fraction of the price.
* **Bound.** What was handed on and is in no column yet counts, also while it waits for other ranks.
  Above the bound `update` waits; nothing is dropped.
* **Deadline.** Other ranks are waited for no longer than their `timeout` (see `ranks.base`), so a
  window is always answered. `settle` and `close` end at their own deadline; `close` then records
  what is left without the ranks that did not come.
* **Failure.** What goes wrong here is logged once and counted; training sees none of it.
* **Close.** `close(seconds)` hands on what is open, says goodbye to the other ranks, waits for what
  is unfinished, then closes every backend. It is idempotent, and does nothing in a forked child. One
  that is interrupted, as by Ctrl-C, has not been: the next goes on with it.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np

from everyrank.backends.background import Background
from everyrank.backends.per_rank import PerRank
from everyrank.columns import Columns
from everyrank.handed import Finishers, without_states
from everyrank.intake import Intake, Wait
from everyrank.messages import log
from everyrank.ranks.base import Ranks
from everyrank.ranks.local import Alone
from everyrank.records import Batch, Record, merged, statistics_of
from everyrank.window import Row, Window, handed_in, pack
from everyrank.worker import Worker, on_worker_thread

#: So many values may wait: about 20 MB of Python floats.
_CAPACITY = 1 << 18

#: While a device still works on values, we look again after this many seconds.
_DEVICE_TICK = 0.001

#: Printing and reading wait this long for other ranks; each time in vain, half as long the next.
_PATIENCE = 1.0

#: Without other ranks only our own thread is waited for, which is a matter of milliseconds.
_LOCAL_PATIENCE = 60.0

#: At its deadline `close` waits for nobody else, and what is left then takes milliseconds.
_SLACK = 5.0

#: So many rows of each of the last batches are at hand for whoever prints what `update` gave.
_TAIL = 64

Order = Callable[[], object]


class Flow:
    """The background half of a History: from closed windows to columns and backends."""

    def __init__(
        self,
        *,
        ranks: Callable[[Any], Ranks],
        columns: Columns,
        sync_every: int,
        generation: int,
        went_back: Callable[[int, int], int],
        backends: Callable[[], Sequence[Background]],
        per_rank: PerRank | None = None,
    ) -> None:
        self.columns = columns
        self.closed = False  # no more is recorded
        self.ended = False  # and all is delivered, or given up
        self.intake = Intake(
            self._put, sync_every=sync_every, generation=generation, went_back=went_back
        )
        self._per_rank = per_rank
        self._queue: deque[Window | Order] = deque()
        self._width = 1  # values of the row that was started last
        self._after: dict[int, int] = {}  # of generations to come, the step after which they go on
        self._rewound: list[tuple[int, int]] = []  # the same of those that have begun
        self._asked = False  # another rank wants what we have, and training held the lock
        self._recent: deque[Batch] = deque(maxlen=64)
        self._patience = _PATIENCE
        self._finishers = Finishers()
        self.lost = 0  # rows that could not be read
        self._said_lost = False
        self._closing = threading.RLock()  # of the thread: a signal's handler may close it, too
        self._delivered = True
        selector = selectors.DefaultSelector()
        self.ranks = ranks(selector)
        self.backends = tuple(backends())  # with a thread each: once nothing is refused any more
        self._worker: Worker[Window | Order] = Worker(
            self._work,
            name="everyrank",
            capacity=_CAPACITY,
            unfinished=self._unfinished,
            selector=selector,
            at_end=self.ranks.close,
        )

    def order(self, order: Order) -> None:
        """Have something done on the background thread, behind everything handed on before it."""
        self._worker.put(order, wait=False)

    def supersede(self, generation: int, after_step: int) -> None:
        """Note that the rows of this generation supersede earlier ones past a step."""
        self._after[generation] = after_step

    def settle(self, seconds: float) -> bool:
        """Hand on what is open, here and on other ranks, and wait until every backend has it."""
        deadline = time.monotonic() + seconds
        self.intake.hand_over()
        self.order(self.ranks.request_flush)
        recorded = self._worker.flush(seconds)
        delivered = [o.flush(max(0.0, deadline - time.monotonic())) for o in self._outlets()]
        return recorded and all(delivered)

    def own_rows(self) -> None:
        """Hand on what is open, and wait until our own values can be read; for no other rank."""
        self.intake.hand_over()
        self._worker.flush(_LOCAL_PATIENCE, until=lambda: not self._queue)

    def settle_a_little(self) -> bool:
        """Settle for somebody who reads or prints, without ever making a habit of waiting.

        Others may have to wait for this very rank before they can report, so each wait in vain
        halves the next: two seconds altogether, and not two seconds a line.
        """
        self.intake.hand_over()
        self.order(self.ranks.request_flush)
        return self._wait_a_little()

    def recorded(self, row: Row) -> Record | None:
        """Give the record of a recent row if it is there; waits a little if it is on its way."""
        found = self._look_up(row)
        if found is None and not self.intake.holds(row):
            # It asks the other ranks as well: without being woken they look every 10 ms only.
            self.order(self.ranks.request_flush)
            self._wait_a_little()
            found = self._look_up(row)
        return found

    def close(self, seconds: float) -> bool:
        """Record and deliver everything, and end; True if nothing was left behind."""
        # The one who is at it may have more time than we have.
        if not self._closing.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX))):
            return False
        try:
            if not self.ended and not self.forked:
                self.closed = True
                self._delivered = self._close(seconds)
                self.ended = True
            return self._delivered
        finally:
            self._closing.release()

    def health(self) -> dict[str, Any]:
        """Count what a person may ask."""
        outlets = self._outlets()
        return {
            "waiting": self._worker.waiting,
            "unfinished_rows": self.ranks.unfinished,
            "failures": self._worker.failures,
            "lost_rows": self.lost,
            **self.ranks.health(),
            "backends": {outlet.name: outlet.health() for outlet in outlets},
        }

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks to reduce with."""
        return isinstance(self.ranks, Alone)

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child, which records nothing."""
        return self._worker.forked

    # ---------------------------------------------------------------- on the background thread

    def _work(self, items: list[Window | Order]) -> float | None:
        self._queue.extend(items)
        if self._asked or self.ranks.flush_requested():
            # At the end all was handed over, and who closes may hold the lock until we are done.
            self._asked = not self.closed and not self.intake.hand_over(wait=False)
        self._take_in()
        for batch in merged(self.ranks.poll()):
            self._hand_out(batch)
        hints = [self.ranks.wait, _DEVICE_TICK if self._queue or self._asked else None]
        return min((hint for hint in hints if hint is not None), default=None)

    def _take_in(self) -> None:
        """Start the reduction of every window that is ready; carry out the orders in between."""
        windows: list[Window] = []
        while self._queue:
            head = self._queue[0]
            if isinstance(head, Window) and not self._is_ready(head):
                break
            self._queue.popleft()  # first, since an order that fails must not come again
            if isinstance(head, Window):
                windows.append(head)
            else:
                self._start(windows)
                windows = []
                head()
        self._start(windows)

    def _is_ready(self, window: Window) -> bool:
        try:
            return window.ready()
        except Exception as error:  # noqa: BLE001 - the border: a device that is lost, most likely
            self._say_lost(error)
            return True  # what can be fetched of it still will be, row by row

    def _start(self, windows: Iterable[Window]) -> None:
        for batch in merged(self._packed(windows)):
            self._width = len(batch.names) or 1
            # Our own values can be read at once; the statistics come when they are known.
            self._keep(without_states(batch))
            if self._per_rank is not None:
                self._per_rank.write_batch(self._finishers.finish(batch)[0])
            self.ranks.start(batch)

    def _packed(self, windows: Iterable[Window]) -> Iterator[Batch]:
        """Pack windows together that are of one generation: ten rows cost little more than one."""
        for generation, alike in groupby(windows, key=attrgetter("generation")):
            rows = list(chain.from_iterable(window.take() for window in alike))
            for name, handed in chain.from_iterable(map(handed_in, rows)):
                self._finishers.learn(name, handed)
            try:
                batches = list(pack(rows))
            except Exception as error:  # noqa: BLE001 - the border: a value may do anything
                self._say_lost(error)
                batches = self._one_by_one(rows)
            for batch in batches:
                yield replace(batch, generation=generation) if generation else batch

    def _one_by_one(self, rows: Iterable[Row]) -> list[Batch]:
        """Pack rows of which some cannot be, so that they cost themselves only."""
        batches: list[Batch] = []
        for row in rows:
            try:
                batches += pack([row])
            except Exception as error:  # noqa: BLE001 - the border: a value may do anything
                self.lost += 1
                self._say_lost(error)
        return batches

    def _say_lost(self, error: Exception) -> None:
        if not self._said_lost:
            self._said_lost = True
            log.error(
                "a value could not be read, and costs the rows that hold it: %s: %s (said once; "
                "history.health() counts the rows)",
                type(error).__name__,
                error,
                exc_info=error,
            )

    def _keep(self, batch: Batch) -> None:
        """Add our own rows to the columns, after what the first of a generation supersedes."""
        for generation in [g for g in self._after if g <= batch.generation]:
            after = self._after.pop(generation)
            self._rewound.append((generation, after))
            self.columns.rewind(after)
        self.columns.append(batch)

    def _keep_statistics(self, batch: Batch) -> None:
        """Add statistics to the columns, but for steps that a rewind has superseded meanwhile."""
        steps = [after for generation, after in self._rewound if generation > batch.generation]
        if steps:
            batch = batch.chosen(batch.steps <= min(steps))
        self.columns.append(batch)

    def _hand_out(self, batch: Batch) -> None:
        batch, finished = self._finishers.finish(batch)
        for statistics in (statistics_of(batch), finished):
            if statistics is not None:
                self._keep_statistics(statistics)
        self._recent.append(_tail(batch))
        for backend in self.backends:
            backend.write_batch(batch)

    def _unfinished(self) -> int:
        waiting = sum(w.size for w in self._queue if isinstance(w, Window))
        return waiting + self.ranks.unfinished * self._width + self._asked

    # ---------------------------------------------------------------- on the training thread

    def _outlets(self) -> list[Background | PerRank]:
        return [*self.backends, *([self._per_rank] if self._per_rank else [])]

    def _put(self, window: Window) -> Wait | None:
        full = self._worker.put(window, window.size, wait=False)
        # What we log ourselves may come back as an update, by a handler of the program.
        return self._worker.wait_for_room if full and not on_worker_thread() else None

    def _wait_a_little(self) -> bool:
        recorded = self._worker.flush(_LOCAL_PATIENCE if self.alone else self._patience)
        self._patience = _PATIENCE if recorded else self._patience / 2
        return recorded

    def _look_up(self, row: Row) -> Record | None:
        for batch in reversed(self._recent.copy()):
            # By time as well: a step may be recorded by several updates.
            at = np.flatnonzero((batch.steps == row.step) & (batch.times == row.time))
            if len(at):
                return next(iter(batch.part(int(at[0]), int(at[0]) + 1)))
        return None

    def _close(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        self.intake.leftover()
        self.intake.hand_over()
        self.order(self.ranks.leave)
        if not self._worker.flush(seconds):
            self.order(self.ranks.give_up)
        finished = self._worker.close(_SLACK)
        if not finished:
            log.warning(
                "%d values were not recorded within %g s: they are lost. A device that does not "
                "finish its work keeps them.",
                self._worker.waiting,
                seconds + _SLACK,
            )
        finished &= not self.lost
        for outlet in self._outlets():
            # One that hangs has used up the time, but not that of the others.
            finished &= outlet.close(max(1.0, deadline - time.monotonic()))
        return finished


def _tail(batch: Batch) -> Batch:
    """Give the last rows, which somebody may print, without keeping the others in memory."""
    if len(batch) <= _TAIL:
        return batch
    part = batch.part(len(batch) - _TAIL, len(batch))
    arrays = {name: getattr(part, name).copy() for name in ("steps", "times", "numbers")}
    return replace(part, **arrays)
