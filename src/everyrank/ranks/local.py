"""Ranks in one process: the world of one, and the reference that all others are tested against.

    >>> first, second = in_process(2)
    >>> a, b = History(group=first), History(group=second)

Each History behaves as if it ran on a rank of its own, with no socket and no second process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from everyrank.messages import log
from everyrank.ranks.align import GRACE, Alignment
from everyrank.ranks.base import Identity, Reduced
from everyrank.ranks.join import OwnRows
from everyrank.records import Batch
from everyrank.reductions import DEFAULT_STATS

_MESSAGES = {
    "silent": "step %d is reduced without rank %s, which did not report it in time. Statistics go "
    "on over the others, and include it again as soon as it reports.",
    "back": "from step %d on, rank %s reports again.",
}


class Alone:
    """The world of one: a value is its own statistics, so rows are finished as they come."""

    wait: float | None = None
    facts: dict[str, Any] | None = None

    def __init__(self, identity: Identity | None = None) -> None:
        self.identity = identity or Identity()
        self._rows: list[Batch] = []

    @property
    def unfinished(self) -> int:
        """How many rows wait for `poll`."""
        return sum(map(len, self._rows))

    def start(self, batch: Batch) -> None:
        """Finish rows."""
        self._rows.append(batch)

    def poll(self) -> list[Batch]:
        """Give them back."""
        rows, self._rows = self._rows, []
        return rows

    def declare_weight(self, name: str, weight: str) -> None:
        """Do nothing: the weighted mean of one value is the value."""

    def request_flush(self) -> None:
        """Do nothing: there is nobody to ask."""

    def flush_requested(self) -> bool:
        """Say no: there is nobody who could ask."""
        return False

    def leave(self) -> None:
        """Do nothing: nobody waits for us."""

    def give_up(self) -> None:
        """Do nothing: we wait for nobody."""

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def health(self) -> dict[str, Any]:
        """Nobody is missing."""
        return {}


class _Meeting:
    """What ranks in one process share: the alignment, and a place for each one's answers."""

    def __init__(self, alignment: Alignment, clock: Callable[[], float]) -> None:
        self.alignment = alignment
        self.clock = clock
        self.answers: dict[int, list[Reduced]] = {}  # of the ranks that are there
        self.flush: set[int] = set()  # the ranks that are asked to hand over what they have
        self.lock = threading.RLock()  # of the thread: who hears what is said here may ask for more

    def tell(self) -> None:
        """Reduce what can be, and give it to everybody who is there."""
        reduced = self.alignment.pop(self.clock())
        for answers in self.answers.values():
            answers += reduced
        events, self.alignment.events = self.alignment.events, []
        for event in events:
            log.warning(_MESSAGES[event.what], event.step, ", ".join(map(str, event.ranks)))


class InProcess:
    """One of several ranks that live in one process."""

    facts: dict[str, Any] | None = None

    def __init__(self, identity: Identity, meeting: _Meeting) -> None:
        self.identity = identity
        self.stats = meeting.alignment.stats
        self._meeting = meeting
        self._own = OwnRows(identity.rank)
        self._closed = False

    @property
    def unfinished(self) -> int:
        """How many rows were started here and are not finished."""
        return self._own.waiting

    @property
    def wait(self) -> float | None:
        """Look again soon: without sockets nobody wakes us."""
        return 0.01 if self._own.waiting else 0.05

    def start(self, batch: Batch) -> None:
        """Hand over some steps."""
        self._own.add(batch)
        with self._meeting.lock:
            self._join()
            self._meeting.alignment.add(self.identity.rank, batch, self._meeting.clock())

    def poll(self) -> list[Batch]:
        """Give the rows that are finished."""
        with self._meeting.lock:
            answers = self._join()
            self._meeting.tell()
            mine = answers.copy()
            answers.clear()
        return [batch for reduced in mine for batch in self._own.answer(reduced)]

    def declare_weight(self, name: str, weight: str) -> None:
        """Weigh a mean."""
        with self._meeting.lock:
            self._meeting.alignment.weights[name] = weight

    def request_flush(self) -> None:
        """Ask the other ranks to hand over what they have."""
        with self._meeting.lock:
            self._meeting.flush |= self._meeting.answers.keys() - {self.identity.rank}

    def flush_requested(self) -> bool:
        """Say, once, whether another rank asked."""
        with self._meeting.lock:
            asked = self.identity.rank in self._meeting.flush
            self._meeting.flush.discard(self.identity.rank)
        return asked

    def leave(self) -> None:
        """Say that nothing more comes from this rank."""
        with self._meeting.lock:
            self._meeting.alignment.leave(self.identity.rank)
            if self.identity.rank == 0:
                # As in `host`, whoever brings the numbers together waits for nobody much longer.
                self._meeting.alignment.hurry()
        if self.identity.rank == 0:
            self.request_flush()

    def give_up(self) -> None:
        """Wait for nobody any longer."""
        with self._meeting.lock:
            self._meeting.alignment.give_up()

    def close(self) -> None:
        """Take in no more answers."""
        with self._meeting.lock:
            self._closed = True
            self._meeting.answers.pop(self.identity.rank, None)

    def health(self) -> dict[str, Any]:
        """Say who is missing and what came late."""
        alignment = self._meeting.alignment
        with self._meeting.lock:
            missing = {str(rank): state for rank, state in alignment.missing().items()}
            return {"missing_ranks": missing, "late_rows": alignment.late}

    def _join(self) -> list[Reduced]:
        """Be there, from the first row or the first look on; give the place for our answers."""
        if self._closed:
            return []
        self._meeting.alignment.join(self.identity.rank)
        return self._meeting.answers.setdefault(self.identity.rank, [])


def in_process(
    n: int,
    *,
    stats: Sequence[str] = DEFAULT_STATS,
    timeout: float = 60.0,
    grace: float = GRACE,
    clock: Callable[[], float] = time.monotonic,
) -> list[InProcess]:
    """Give `n` ranks that reduce together within this process."""
    alignment = Alignment(range(n), stats=stats, timeout=timeout, grace=grace)
    meeting = _Meeting(alignment, clock)
    return [
        InProcess(Identity(rank=r, world_size=n, source="in process"), meeting) for r in range(n)
    ]
