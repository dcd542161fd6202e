"""Bring the ranks' streams of steps together, whatever they disagree about, and reduce them.

Each rank delivers a stream of rows. In the steady state all streams carry the same steps, and one
look at their heads reduces as many rows as all of them have. Ranks may also skip steps, log twice at
one step, go back, fall silent, or never speak; the rules by which a row is reduced then:

1. The next step is the lowest among the heads, unless another stream has that very step further
   behind: then what stands before it there goes first. (So a rewind that ranks meet at different
   moments cannot keep them apart for longer than a few rows.)
2. A stream whose head is this step takes part. One whose head is another step has passed it.
3. A stream with nothing at hand is waited for, unless it is closed or gone, or its last step was
   already past this one and this row does not itself go back.
4. Waiting ends `timeout` seconds after the row arrived; `grace` seconds after it for a rank that has
   opened no History, three times that for one that has, but never had a row. The stream is then *silent*: nobody waits for it until it
   speaks again, and what it says of steps that were reduced without it comes late and is counted.

There is no I/O here and no clock: `now` is an argument, which lets tests play every disagreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everyrank.ranks.base import Reduced
from everyrank.records import Batch
from everyrank.reductions import over_ranks

State = Literal["absent", "live", "silent", "closed", "gone"]

#: A rank that never had anything to say is waited for this long, once, and at close.
GRACE = 5.0


class Event(NamedTuple):
    """Something to tell the user: ranks fell silent, or spoke again."""

    what: Literal["silent", "back"]
    ranks: tuple[int, ...]
    step: int


class _Stream:
    """The rows of one rank that are not reduced yet."""

    def __init__(self) -> None:
        self.state: State = "absent"
        self.queue: deque[tuple[Batch, float]] = deque()
        self.last: int | None = None  # the last step that was taken off the queue
        self.missed: int | None = None  # while silent: the highest step reduced without this rank
        self.late = 0

    @property
    def head(self) -> int | None:
        """Give the step at hand."""
        return int(self.queue[0][0].steps[0]) if self.queue else None

    @property
    def arrived(self) -> float:
        """Give the moment at which the row at hand arrived."""
        return self.queue[0][1]

    def holds(self, step: int) -> bool:
        """Say whether `step` stands anywhere in the queue."""
        return any((batch.steps == step).any() for batch, _ in self.queue)

    def goes_back(self) -> bool:
        """Say whether the row at hand is not past the one before it."""
        return self.last is not None and self.head is not None and self.head <= self.last

    def add(self, batch: Batch, now: float) -> bool:
        """Queue rows; True if a silent stream has spoken again."""
        back = self.state == "silent"
        if self.state in ("absent", "silent"):
            self.state = "live"
        if self.missed is not None:
            batch = self._without_late(batch, self.missed)
        if len(batch):
            self.queue.append((batch, now))
        return back

    def take(self, n: int) -> None:
        """Drop the next `n` rows of the first batch."""
        batch, arrived = self.queue.popleft()
        self.last = int(batch.steps[n - 1])
        if n < len(batch):
            self.queue.appendleft((batch.part(n, len(batch)), arrived))

    def _without_late(self, batch: Batch, missed: int) -> Batch:
        """Leave out the leading rows that were reduced without us; the first other ends it."""
        late = 0
        previous = self.last
        for step in batch.steps.tolist():
            if step > missed or (previous is not None and step < previous):
                self.missed = None
                break
            previous = step
            late += 1
        self.late += late
        self.last = previous
        return batch.part(late, len(batch))


class Alignment:
    """The streams of all ranks, and the rows that can be reduced by now."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        stats: Sequence[str],
        timeout: float,
        grace: float = GRACE,
    ) -> None:
        self.events: list[Event] = []
        self.weights: dict[str, str] = {}
        self._ranks = tuple(ranks)
        self._streams = {rank: _Stream() for rank in ranks}
        self._stats = tuple(stats)
        self._timeout = timeout
        self._grace = min(grace, timeout)

    @property
    def late(self) -> int:
        """How many rows came after their step was reduced."""
        return sum(stream.late for stream in self._streams.values())

    @property
    def waiting(self) -> bool:
        """Whether any row is at hand."""
        return any(stream.queue for stream in self._streams.values())

    def missing(self) -> dict[int, State]:
        """Name the ranks that statistics do without."""
        return {r: s.state for r, s in self._streams.items() if s.state not in ("live", "absent")}

    def join(self, rank: int) -> None:
        """Note that a rank is there, though it has said nothing yet."""
        if self._streams[rank].state == "absent":
            self._streams[rank].state = "live"

    def add(self, rank: int, batch: Batch, now: float) -> None:
        """Take some rows of one rank."""
        stream = self._streams[rank]
        if stream.add(batch, now):
            self.events.append(Event("back", (rank,), int(batch.steps[0])))

    def leave(self, rank: int, *, gone: bool = False) -> None:
        """Note that a rank says no more; what it said before still counts."""
        self._streams[rank].state = "gone" if gone else "closed"

    def hurry(self) -> None:
        """Wait no longer than `grace` for anybody from now on, as at the end of a run."""
        self._timeout = self._grace

    def pop(self, now: float) -> list[Reduced]:
        """Reduce every row that need not wait any longer."""
        out = []
        while (step := self._next_step()) is not None:
            parts = [r for r, s in self._streams.items() if s.head == step]
            if not self._settled(step, parts, now):
                break
            n = self._together(step, parts)
            out.append(self._reduce(parts, n))
            self._took(parts, n)
        return out

    def deadline(self, now: float) -> float | None:
        """Give the seconds until somebody's patience ends, or None if nothing waits."""
        step = self._next_step()
        if step is None:
            return None
        parts = [r for r, s in self._streams.items() if s.head == step]
        ends = [self._patience(r, parts) for r in self._awaited(step, parts)]
        return max(0.0, min(ends) - now) if ends else 0.0

    def _next_step(self) -> int | None:
        heads = {s.head for s in self._streams.values() if s.queue}
        if len(heads) <= 1:
            return heads.pop() if heads else None
        ordered = sorted(head for head in heads if head is not None)
        for step in ordered:
            others = (s for s in self._streams.values() if s.queue and s.head != step)
            if not any(s.holds(step) for s in others):
                return step
        return ordered[0]

    def _awaited(self, step: int, parts: list[int]) -> list[int]:
        """Name the ranks that may still have a row for this step."""
        back = all(self._streams[r].goes_back() for r in parts)
        return [
            rank
            for rank, s in self._streams.items()
            if not s.queue
            and s.state in ("absent", "live")
            and (back or s.last is None or s.last <= step)
        ]

    def _patience(self, rank: int, parts: list[int]) -> float:
        """Give the moment until which this rank is waited for."""
        arrived = min(self._streams[r].arrived for r in parts)
        if self._streams[rank].last is None:
            # It may log nothing at all; one that has opened a History is more likely to.
            patience = self._grace * (1 if self._streams[rank].state == "absent" else 3)
            return arrived + min(patience, self._timeout)
        return arrived + self._timeout

    def _settled(self, step: int, parts: list[int], now: float) -> bool:
        """Say whether the row can be reduced, after giving up on whoever is overdue."""
        awaited = self._awaited(step, parts)
        overdue = [r for r in awaited if self._patience(r, parts) <= now]
        if len(overdue) < len(awaited):
            return False
        if overdue:
            for rank in overdue:
                self._streams[rank].state = "silent"
            self.events.append(Event("silent", tuple(overdue), step))
        return True

    def _together(self, step: int, parts: list[int]) -> int:
        """Count the rows from here on that all of `parts` have, and nobody else can have."""
        batches = [self._streams[r].queue[0][0] for r in parts]
        n = min(len(batch) for batch in batches)
        steps = batches[0].steps[:n]
        same = np.ones(n, np.bool_)
        same[1:] = steps[1:] > steps[:-1]
        for batch in batches[1:]:
            same &= batch.steps[:n] == steps
        for rank, stream in self._streams.items():
            if rank not in parts:
                same &= self._passed(stream, steps, step)
        return n if same.all() else max(1, int(np.argmin(same)))

    def _passed(
        self, stream: _Stream, steps: NDArray[np.int64], step: int
    ) -> NDArray[np.bool_] | bool:
        """Say of which of these steps this stream certainly has no row."""
        if stream.head is not None:
            return steps < stream.head if stream.head > step else steps == step
        if stream.state in ("absent", "live"):
            return steps < (stream.last or step)
        return True

    def _took(self, parts: list[int], n: int) -> None:
        last = int(self._streams[parts[0]].queue[0][0].steps[n - 1])
        for rank in parts:
            self._streams[rank].take(n)
        for stream in self._streams.values():
            if stream.state == "silent" and not stream.queue:
                stream.missed = last if stream.missed is None else max(stream.missed, last)

    def _reduce(self, parts: list[int], n: int) -> Reduced:
        batches = [(rank, self._streams[rank].queue[0][0].part(0, n)) for rank in parts]
        return reduce_rows(
            batches, stats=self._stats, weights=self.weights, world_size=len(self._ranks)
        )


def reduce_rows(
    batches: Sequence[tuple[int, Batch]],
    *,
    stats: Sequence[str],
    weights: Mapping[str, str],
    world_size: int,
) -> Reduced:
    """Reduce the same steps of several ranks, over the union of their names."""
    first = batches[0][1]
    places = _places([batch.names for _, batch in batches])
    names = tuple(places)
    shape = (len(first), len(names))
    values = np.empty((len(stats), *shape))
    ranks = np.empty(shape, np.int64)
    nonfinite = np.empty(shape, np.int64)
    for holders, members in _by_holders(places).items():
        out = [names.index(m) for m in members] if len(members) < len(names) else slice(None)
        stack = np.stack(
            [batches[h][1].numbers[:, [places[m][h] for m in members]] for h in holders]
        )
        weigh = _weights(stack, members, holders, batches, weights)
        who = np.array([batches[h][0] for h in holders])
        values[:, :, out], nonfinite[:, out] = over_ranks(
            stack, ranks=who, stats=stats, weights=weigh
        )
        ranks[:, out] = len(holders)
    return Reduced(
        first.steps, first.times, names, tuple(stats), values, ranks, nonfinite, world_size
    )


def _places(all_names: Sequence[tuple[str, ...]]) -> dict[str, dict[int, int]]:
    """Say for each name which batches have it, and in which column."""
    places: dict[str, dict[int, int]] = {}
    for i, names in enumerate(all_names):
        for column, name in enumerate(names):
            places.setdefault(name, {})[i] = column
    return places


def _by_holders(places: Mapping[str, Mapping[int, int]]) -> dict[tuple[int, ...], list[str]]:
    """Group the names by the batches that have them: one group, unless ranks disagree."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, columns in places.items():
        groups.setdefault(tuple(columns), []).append(name)
    return groups


def _weights(
    stack: NDArray[np.float64],
    members: Sequence[str],
    holders: Sequence[int],
    batches: Sequence[tuple[int, Batch]],
    declared: Mapping[str, str],
) -> NDArray[np.float64] | None:
    """Give the weight of each value, or None where no mean here is weighted.

    A rank that reports a value without its weight has no part in that mean; if no rank reports the
    weight, the mean is the plain one.
    """
    if not declared or not any(m in declared for m in members):
        return None
    weights = np.ones_like(stack)
    for column, member in enumerate(members):
        key = declared.get(member)
        if key is None or not any(key in batches[h][1].names for h in holders):
            continue
        for i, h in enumerate(holders):
            batch = batches[h][1]
            known = key in batch.names
            weights[i, :, column] = batch.numbers[:, batch.names.index(key)] if known else 0.0
    return weights
