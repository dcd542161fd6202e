"""Two wrappers that keep a destination from ever hurting a run: `Guard` and `Background`.

    Background(Guard(Jsonl(path)))

reads: on a thread of its own, guarded, write JSON lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping

from everyrank.backends.base import Backend
from everyrank.messages import log
from everyrank.records import Batch, Description, Record
from everyrank.worker import Worker


class Guard:
    """Catch whatever a backend raises, say it once, count the rest, and go on."""

    def __init__(self, to: Backend) -> None:
        self.name = to.name
        self.failures = 0
        self.last_failure: str | None = None
        self.behind = False  # whether the last flush, or the end, failed: records may not be there
        self._to = to

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Tell the backend how metrics are read, or count the failure."""
        try:
            getattr(self._to, "describe", _nothing)(descriptions)
        except Exception as error:  # noqa: BLE001 - the border: no destination may hurt a run
            self._failed("describe", error)

    def write(self, record: Record) -> None:
        """Write, or count the failure."""
        try:
            self._to.write(record)
        except Exception as error:  # noqa: BLE001 - the border: no destination may hurt a run
            self._failed("write", error)

    def flush(self) -> None:
        """Flush, or count the failure."""
        self.behind = False
        try:
            getattr(self._to, "flush", _nothing)()
        except Exception as error:  # noqa: BLE001 - the border: no destination may hurt a run
            self.behind = True
            self._failed("flush", error)

    def close(self) -> None:
        """Close, or count the failure."""
        self.behind = False
        try:
            self._to.close()
        except Exception as error:  # noqa: BLE001 - the border: no destination may hurt a run
            self.behind = True
            self._failed("close", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        self.last_failure = f"{what}: {type(error).__name__}: {error}"
        if self.failures == 1:
            log.warning(
                "the %s backend failed and training goes on without it: %s (said once; "
                "history.health() counts the rest)",
                self.name,
                self.last_failure,
            )


class Background:
    """Write on a thread of its own; `write` returns at once and keeps order.

    At most `capacity` records wait. Above that the caller waits, and nothing is dropped; or, with
    `drop=True`, intermediate records are left out of this one destination, said once and counted,
    and the last one still comes. `flush` and `close` are bounded in time and return False if the
    bound was reached first: whatever the backend does with a record, and also its own `close`,
    happens on the thread.
    """

    def __init__(
        self, to: Backend, *, capacity: int = 8192, name: str | None = None, drop: bool = False
    ) -> None:
        self.name = name or to.name
        self.dropped = 0
        self._to = to if isinstance(to, Guard) else Guard(to)
        self._drop_above = capacity if drop else None
        self._last: Iterable[Record] | None = None  # the last record, if it was left out
        self._said_dropped = False
        self._worker: Worker[Iterable[Record]] = Worker(
            self._work,
            name=f"everyrank-{self.name}",
            capacity=sys.maxsize if drop else capacity,
            at_end=self._to.close,
            say_full=False,  # where that matters, the queue before this one fills up and says so
        )
        self._closed = False
        self._delivered = True

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Tell the backend how metrics are read, at once: no record was written yet."""
        self._to.describe(descriptions)

    def write(self, record: Record) -> None:
        """Queue one record."""
        if self.name not in record.skip:
            self._offer((record,), 1, lambda: (record,))

    def write_batch(self, batch: Batch) -> None:
        """Queue a batch, which is cheaper than its records one by one."""
        if self.name not in batch.skip:
            self._offer(batch, len(batch), lambda: batch.part(len(batch) - 1, len(batch)))

    def flush(self, seconds: float = 30.0) -> bool:
        """Wait until what was written has reached the destination; False if that failed."""
        if self._to.behind:
            self._worker.put((), wait=False)  # the disk may have room by now
        return self._worker.flush(seconds) and not self._to.behind

    def close(self, seconds: float = 30.0) -> bool:
        """Flush, close the backend, end the thread."""
        # In a forked child the backend, and what waits for it, are the parent's.
        if not self._closed and not self._worker.forked:
            self._put_last()
            self._delivered = self._worker.close(seconds)
            self._closed = True
            if not self._delivered:
                log.warning(
                    "the %s backend was not done within %g s and is given up: %d records were "
                    "still waiting for it",
                    self.name,
                    seconds,
                    self._worker.waiting,
                )
        return self._delivered and not self._to.behind

    def health(self) -> dict[str, int | str | None]:
        """Count what waits and what failed."""
        return {
            "waiting": self._worker.waiting,
            "failures": self._to.failures + self._worker.failures,
            "dropped": self.dropped,
            "last_failure": self._to.last_failure,
        }

    def _offer(
        self, records: Iterable[Record], n: int, last: Callable[[], Iterable[Record]]
    ) -> None:
        """Queue records, or leave out all but the last of them."""
        if self._drop_above is None or self._worker.waiting < self._drop_above:
            self._put_last()
            self._worker.put(records, n)
            return
        # The one that was kept so far is an intermediate record now.
        self.dropped += n - (self._last is None)
        self._last = last()
        if not self._said_dropped:
            self._said_dropped = True
            log.warning(
                "the %s backend is %d records behind: from here on some are left out there (said "
                "once; history.health() counts them). The run's log has all of them.",
                self.name,
                self._worker.waiting,
            )

    def _put_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._worker.put(last)

    def _work(self, batches: list[Iterable[Record]]) -> None:
        for batch in batches:
            for record in batch:
                self._to.write(record)
        if batches:
            self._to.flush()


def _nothing(*_: object) -> None:
    """Stand in for an option that a backend does not have."""
