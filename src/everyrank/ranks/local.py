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

from everyrank.ranks.align import GRACE, Alignment
from everyrank.ranks.base import Identity, Reduced
from everyrank.ranks.join import OwnRows
from everyrank.records import Batch


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

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def health(self) -> dict[str, Any]:
        """Nobody is missing."""
        return {}


class _Meeting:
    """What ranks in one process share: the alignment, and a place for each one's answers."""

    def __init__(self, alignment: Alignment, n: int, clock: Callable[[], float]) -> None:
        self.alignment = alignment
        self.clock = clock
        self.answers: list[list[Reduced]] = [[] for _ in range(n)]
        self.flush: list[bool] = [False] * n
        self.lock = threading.Lock()


class InProcess:
    """One of several ranks that live in one process."""

    facts: dict[str, Any] | None = None

    def __init__(self, identity: Identity, meeting: _Meeting) -> None:
        self.identity = identity
        self._meeting = meeting
        self._own = OwnRows()
        with meeting.lock:
            meeting.alignment.join(identity.rank)

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
            self._meeting.alignment.add(self.identity.rank, batch, self._meeting.clock())

    def poll(self) -> list[Batch]:
        """Give the rows that are finished."""
        meeting = self._meeting
        with meeting.lock:
            for reduced in meeting.alignment.pop(meeting.clock()):
                for answers in meeting.answers:
                    answers.append(reduced)
            mine, meeting.answers[self.identity.rank] = meeting.answers[self.identity.rank], []
        return [batch for reduced in mine for batch in self._own.answer(reduced)]

    def declare_weight(self, name: str, weight: str) -> None:
        """Weigh a mean."""
        with self._meeting.lock:
            self._meeting.alignment.weights[name] = weight

    def request_flush(self) -> None:
        """Ask the other ranks to hand over what they have."""
        me = self.identity.rank
        self._meeting.flush = [asked or r != me for r, asked in enumerate(self._meeting.flush)]

    def flush_requested(self) -> bool:
        """Say, once, whether another rank asked."""
        asked = self._meeting.flush[self.identity.rank]
        self._meeting.flush[self.identity.rank] = False
        return asked

    def leave(self) -> None:
        """Say that nothing more comes from this rank."""
        with self._meeting.lock:
            self._meeting.alignment.leave(self.identity.rank)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def health(self) -> dict[str, Any]:
        """Say who is missing and what came late."""
        alignment = self._meeting.alignment
        return {"missing_ranks": alignment.missing(), "late_rows": alignment.late}


def in_process(
    n: int,
    *,
    stats: Sequence[str] = ("mean", "max", "min", "std"),
    timeout: float = 60.0,
    grace: float = GRACE,
    clock: Callable[[], float] = time.monotonic,
) -> list[InProcess]:
    """Give `n` ranks that reduce together within this process."""
    alignment = Alignment(range(n), stats=stats, timeout=timeout, grace=grace)
    meeting = _Meeting(alignment, n, clock)
    return [
        InProcess(Identity(rank=r, world_size=n, source="in process"), meeting) for r in range(n)
    ]
