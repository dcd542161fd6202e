"""Bring the ranks' streams of steps together, whatever they disagree about, and reduce them.

Each rank delivers a stream of rows. In the steady state all streams carry the same steps, and one
look at their heads reduces as many rows as all of them have. Ranks may also skip steps, log twice
at one step, go back, fall silent, or never speak; the rules by which a row is reduced then:

1. The next step is the lowest among the heads, unless another stream has that very step further
   behind: then what stands before it there goes first. (So a rewind that ranks meet at different
   moments cannot keep them apart for longer than a few rows.)
2. A stream whose head is this step takes part. One whose head is another step has passed it.
3. A stream with nothing at hand is waited for, unless it is closed or gone, or its last step was
   already past this one and this row does not itself go back.
4. Patience begins when the row arrives, and lasts `timeout` seconds with a rank that has reported
   before, `grace` with one that has opened no History, three times `grace` with one that has opened
   one and reported nothing yet; never longer than `timeout`. Then the row is reduced without that
   rank, whose stream is *silent*: nobody waits for it until it speaks again.
5. What a silent stream then says of steps that were reduced without it comes late: it is counted,
   and answered at once by a row without statistics. Where the others went back meanwhile, it may
   go back as often before it has caught up.

Rows that wait are kept in few pieces and reduced many at a time, so that a rank which is thousands
of windows behind costs the others no more than if it had come with them in a few.

There is no I/O here and no clock: `now` is an argument, which lets tests play every disagreement.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everyrank.handed import groups_of, is_state, merge_states
from everyrank.ranks.base import Reduced
from everyrank.records import Batch, Kind, merged
from everyrank.reductions import over_ranks

State = Literal["absent", "live", "silent", "closed", "gone"]

#: A rank that never had anything to say is waited for this long, once, and at close.
GRACE = 5.0

# What is reduced at a time: enough that the price of a call no longer counts, and bounded, since
# it is held once for each rank, and sent to each in one piece.
_MOST_ROWS, _MOST_VALUES = 4096, 1 << 20

_FLOAT: tuple[Kind, ...] = ("float",)


class Event(NamedTuple):
    """Something to tell the user: ranks fell silent, or spoke again."""

    what: Literal["silent", "back"]
    ranks: tuple[int, ...]
    step: int


class _Stream:
    """The rows of one rank that are not reduced yet."""

    def __init__(self) -> None:
        self.state: State = "absent"
        self.queue: deque[Batch] = deque()
        self.head: int | None = None  # the step at hand
        self.last: int | None = None  # the last step that was taken off the queue
        self.late = 0
        # While silent, what is reduced without us: the last step before each time it went back.
        self.missed: deque[int] = deque()
        self._arrivals: deque[tuple[int, float]] = deque()  # up to which row, and when
        self._added = self._taken = 0
        self._held: Counter[int] | None = None  # the steps in the queue, once somebody asks

    @property
    def arrived(self) -> float:
        """Give the moment at which the row at hand arrived."""
        return self._arrivals[0][1]

    def holds(self, step: int) -> bool:
        """Say whether `step` stands anywhere in the queue."""
        if self._held is None:
            self._held = Counter(s for batch in self.queue for s in batch.steps.tolist())
        return step in self._held

    def goes_back(self) -> bool:
        """Say whether the row at hand is not past the one before it."""
        return self.last is not None and self.head is not None and self.head <= self.last

    def speak(self) -> bool:
        """Note that there are rows; True if a silent stream has spoken again."""
        back = self.state == "silent"
        if self.state in ("absent", "silent"):
            self.state = "live"
        return back

    def fall_silent(self) -> None:
        """Note that nobody waits for this stream any longer."""
        self.state = "silent"
        if not self.missed and self.last is not None:
            self.missed.append(self.last)

    def miss(self, first: int, last: int) -> None:
        """Note that rows from one step up to another were reduced without us."""
        if self.missed and first >= self.missed[-1]:
            self.missed.pop()
        self.missed.append(last)

    def add(self, batch: Batch, now: float) -> int:
        """Queue rows, and count those that come late instead: they are the first ones."""
        late = self._count_late(batch) if self.missed else 0
        self.late += late
        if late < len(batch):
            self._append(_bare(batch.part(late, len(batch))))
            self._added += len(batch) - late
            self._arrivals.append((self._added, now))
        return late

    def take(self, n: int) -> None:
        """Drop the next `n` rows of the first batch."""
        batch = self.queue.popleft()
        self.last = int(batch.steps[n - 1])
        if n < len(batch):
            self.queue.appendleft(batch.part(n, len(batch)))
        self.head = int(self.queue[0].steps[0]) if self.queue else None
        self._taken += n
        while self._arrivals and self._arrivals[0][0] <= self._taken:
            self._arrivals.popleft()
        if self._held is not None:
            self._forget(batch.steps[:n].tolist())

    def _append(self, batch: Batch) -> None:
        """Queue rows together with what waits and looks like them.

        A piece is moved only into one of at least twice its size: each row a few times at most.
        """
        if self._held is not None:
            self._held.update(batch.steps.tolist())
        pieces, rows = [batch], len(batch)
        while self.queue and self.queue[-1].names == batch.names and len(self.queue[-1]) <= rows:
            rows += len(self.queue[-1])
            pieces.append(self.queue.pop())
        self.queue += merged(reversed(pieces))
        self.head = int(self.queue[0].steps[0])

    def _forget(self, steps: Sequence[int]) -> None:
        assert self._held is not None
        for step in steps:
            self._held[step] -= 1
            if not self._held[step]:
                del self._held[step]
        if not self.queue:
            self._held = None

    def _count_late(self, batch: Batch) -> int:
        """Count the leading rows that were reduced without us; the first other ends it."""
        late = 0
        for step in batch.steps.tolist():
            if self.last is not None and step < self.last:
                self.missed.popleft()
            if not self.missed or step > self.missed[0]:
                self.missed.clear()
                break
            self.last = step
            late += 1
        return late


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
        self.stats = tuple(stats)
        self._timeout = timeout
        self._grace = min(grace, timeout)
        self._answers: list[Reduced] = []  # to rows that came late, for the next `pop`

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
        """Note that a rank is there, though it has said nothing yet.

        One that had left comes back as if it had only been silent.
        """
        stream = self._streams[rank]
        if stream.state == "absent":
            stream.state = "live"
        elif stream.state in ("closed", "gone"):
            stream.state = "silent"

    def add(self, rank: int, batch: Batch, now: float) -> None:
        """Take some rows of one rank."""
        if not len(batch):
            return
        stream = self._streams[rank]
        if stream.speak():
            self.events.append(Event("back", (rank,), int(batch.steps[0])))
        if late := stream.add(batch, now):
            self._answers.append(self._reduce([(rank, _nameless(batch.part(0, late)))]))

    def leave(self, rank: int, *, gone: bool = False) -> None:
        """Note that a rank says no more; what it said before still counts."""
        self._streams[rank].fall_silent()  # should it come back, it has missed what comes now
        self._streams[rank].state = "gone" if gone else "closed"

    def hurry(self) -> None:
        """Wait no longer than `grace` for anybody from now on, as at the end of a run.

        Nor longer than half the timeout: whoever closes waits that long, and should see the end.
        """
        self._grace = self._timeout = min(self._grace, self._timeout / 2)

    def give_up(self) -> None:
        """Wait for nobody any longer."""
        self._grace = self._timeout = 0.0

    def pop(self, now: float) -> list[Reduced]:
        """Reduce every row that need not wait any longer."""
        out, self._answers = self._answers, []
        while (step := self._next_step()) is not None:
            parts = self._parts(step)
            if not self._settled(step, parts, now):
                break
            n = self._together(step, parts)
            out.append(self._reduce([(r, self._streams[r].queue[0].part(0, n)) for r in parts]))
            self._took(parts, n)
        return out

    def deadline(self, now: float) -> float | None:
        """Give the seconds until somebody's patience ends, or None if nothing waits."""
        step = self._next_step()
        if step is None or self._answers:
            return 0.0 if self._answers else None
        parts = self._parts(step)
        ends = [self._patience(r, parts) for r in self._awaited(step, parts)]
        return max(0.0, min(ends) - now) if ends else 0.0

    def _next_step(self) -> int | None:
        heads = {s.head for s in self._streams.values() if s.head is not None}
        if len(heads) <= 1:
            return heads.pop() if heads else None
        ordered = sorted(heads)
        for step in ordered:
            others = (s for s in self._streams.values() if s.queue and s.head != step)
            if not any(s.holds(step) for s in others):
                return step
        return ordered[0]

    def _parts(self, step: int) -> list[int]:
        """Name the ranks whose row at hand is this step's."""
        return [rank for rank, stream in self._streams.items() if stream.head == step]

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
                self._streams[rank].fall_silent()
            self.events.append(Event("silent", tuple(overdue), step))
        return True

    def _together(self, step: int, parts: list[int]) -> int:
        """Count the rows from here on that all of `parts` have, and nobody else can have."""
        batches = [self._streams[r].queue[0] for r in parts]
        most = max(1, min(_MOST_ROWS, _MOST_VALUES // max(1, len(parts) * len(batches[0].names))))
        n = min(most, *map(len, batches))
        steps = batches[0].steps[:n]
        same = np.ones(n, np.bool_)
        same[1:] = steps[1:] > steps[:-1]
        for batch in batches[1:]:
            same &= batch.steps[:n] == steps
        others = [s for s in self._streams.values() if s.head != step]
        for stream in others:
            same &= _passed(stream, steps, step)
        n = n if same.all() else max(1, int(np.argmin(same)))
        # By the first rule, a step that somebody has further behind is not the next.
        busy = [s for s in others if s.queue]
        ahead = steps[1:n].tolist() if busy else []
        return next((i for i, s in enumerate(ahead, 1) if any(o.holds(s) for o in busy)), n)

    def _took(self, parts: list[int], n: int) -> None:
        steps = self._streams[parts[0]].queue[0].steps
        first, last = int(steps[0]), int(steps[n - 1])
        for rank in parts:
            self._streams[rank].take(n)
        for stream in self._streams.values():
            if stream.state in ("silent", "closed", "gone") and not stream.queue:
                stream.miss(first, last)

    def _reduce(self, batches: Sequence[tuple[int, Batch]]) -> Reduced:
        return reduce_rows(
            batches, stats=self.stats, weights=self.weights, world_size=len(self._ranks)
        )


def _bare(batch: Batch) -> Batch:
    """Give the steps and numbers alone: no more is reduced, and no more tells pieces apart."""
    kinds = _FLOAT * len(batch.names)
    return Batch(batch.steps, batch.times, batch.names, batch.numbers, kinds)


def _nameless(batch: Batch) -> Batch:
    """Give the steps alone."""
    return Batch(batch.steps, batch.times, (), np.empty((len(batch), 0)), ())


def _passed(stream: _Stream, steps: NDArray[np.int64], step: int) -> NDArray[np.bool_] | bool:
    """Say of which of these steps, the first being `step`, this stream certainly has no row."""
    if stream.head is not None:
        return steps < stream.head if stream.head > step else steps == step
    if stream.state in ("absent", "live"):
        return steps < (step if stream.last is None else stream.last)
    return True


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
    states = tuple(filter(is_state, places))
    names = tuple(name for name in places if not is_state(name)) if states else tuple(places)
    at = {name: u for u, name in enumerate(names)}
    shape = (len(first), len(names))
    values = np.empty((len(stats), *shape))
    ranks = np.empty(shape, np.int64)
    nonfinite = np.empty(shape, np.int64)
    for holders, members in _by_holders({name: places[name] for name in names}).items():
        out = [at[m] for m in members] if len(members) < len(names) else slice(None)
        stack = np.stack(
            [batches[h][1].numbers[:, [places[m][h] for m in members]] for h in holders]
        )
        weigh = _weights(stack, members, holders, batches, weights)
        these = np.array([batches[h][0] for h in holders])
        values[:, :, out], nonfinite[:, out] = over_ranks(
            stack, ranks=these, stats=stats, weights=weigh
        )
        ranks[:, out] = len(holders)
    who = frozenset(rank for rank, _ in batches)
    return Reduced(
        first.steps,
        first.times,
        names,
        tuple(stats),
        values,
        ranks,
        nonfinite,
        world_size,
        who,
        states,
        tuple(len(places[name]) for name in states),
        _merged_states(states, places, batches),
    )


def _merged_states(
    states: tuple[str, ...],
    places: Mapping[str, Mapping[int, int]],
    batches: Sequence[tuple[int, Batch]],
) -> NDArray[np.float64]:
    """Merge the states of each metric over the ranks that have it."""
    merged = np.empty((len(batches[0][1]), len(states)))
    for group in groups_of(states):
        names = [states[column] for column in group.columns]
        parts = [
            batches[holder][1].numbers[:, [places[name][holder] for name in names]]
            for holder in places[names[0]]
        ]
        merged[:, group.columns] = merge_states(group, parts)
    return merged


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
