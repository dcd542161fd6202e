"""Put a rank's own rows and the statistics over ranks together, as the batches of its records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from everyrank.handed import groups_of
from everyrank.ranks.align import reduce_rows
from everyrank.ranks.base import Reduced
from everyrank.records import Batch, Kind, merged


def join(own: Batch | None, reduced: Reduced, *, generation: int = 0) -> Iterator[Batch]:
    """Give the rows with their statistics: own value, then those of its name.

    `<name>/ranks` stands there when not every rank reported, `<name>/nonfinite` when values were
    not finite; a batch has one set of names, so it is cut where these change. Rows of others that
    have no statistics are nothing to us.
    """
    if own is None and not reduced.names and not reduced.states:
        return
    odd = reduced.nonfinite > 0
    changes = np.flatnonzero((odd[1:] != odd[:-1]).any(axis=1)) + 1
    edges = [0, *changes.tolist(), len(reduced)]
    for start, stop in pairwise(edges):
        rows = own.part(start, stop) if own is not None else None
        yield _joined(rows, reduced.part(start, stop), generation)


def _joined(own: Batch | None, reduced: Reduced, generation: int) -> Batch:
    columns = list(_columns(own, reduced))
    numbers = np.empty((len(reduced), len(columns)))
    for j, (_, _, values) in enumerate(columns):
        numbers[:, j] = values
    names = tuple(name for name, _, _ in columns)
    kinds: tuple[Kind, ...] = tuple(kind for _, kind, _ in columns)
    if own is not None:
        return replace(own, names=names, kinds=kinds, numbers=numbers)
    return Batch(
        reduced.steps,
        reduced.times,
        names,
        numbers,
        kinds,
        generation=generation,
        own=False,
    )


def _columns(
    own: Batch | None, reduced: Reduced
) -> Iterator[tuple[str, Kind, NDArray[np.float64] | NDArray[np.int64]]]:
    """Give name, kind and values of every column: ours first, then what only others reported."""
    ours = dict.fromkeys(own.names) if own is not None else {}
    at = {name: u for u, name in enumerate(reduced.names)}
    merged = set(reduced.states)
    for j, name in enumerate(ours):
        assert own is not None
        if name in merged:
            continue
        yield name, own.kinds[j], own.numbers[:, j]
        if name in at:
            yield from _statistics(name, at[name], reduced)
    for name in reduced.names:
        if name not in ours:
            yield from _statistics(name, at[name], reduced)
    said = {*ours, *reduced.names}  # a number by the name of a metric says over how many itself
    for group in groups_of(reduced.states):
        for s in group.columns:
            yield reduced.states[s], "float", reduced.merged[:, s]
        ranks = reduced.state_ranks[group.columns[0]]
        if ranks != reduced.world_size and group.name not in said:
            said.add(group.name)  # another metric by this name is not recorded
            yield f"{group.name}/ranks", "int", np.full(len(reduced), ranks)


def _statistics(
    name: str, u: int, reduced: Reduced
) -> Iterator[tuple[str, Kind, NDArray[np.float64] | NDArray[np.int64]]]:
    for s, stat in enumerate(reduced.stats):
        kind: Kind = "int" if stat.endswith("_rank") else "float"
        yield f"{name}/{stat}", kind, reduced.values[s, :, u]
    if reduced.ranks[0, u] != reduced.world_size:
        yield f"{name}/ranks", "int", reduced.ranks[:, u]
    if reduced.nonfinite[0, u]:
        yield f"{name}/nonfinite", "int", reduced.nonfinite[:, u]


class OwnRows:
    """The rows that were started here and are not answered yet, in order.

    A reduced row answers one of ours if `rank`, which is us, took part in it. Steps alone would not
    tell: ranks that go back at different moments have them twice.
    """

    def __init__(self, rank: int) -> None:
        self.waiting = 0
        self._rank = rank
        self._queue: deque[Batch] = deque()
        self._at = 0  # how many rows of the first batch are answered
        self._generation: int | None = None  # of the row that was answered last

    def add(self, batch: Batch) -> None:
        """Remember rows that were started."""
        if len(batch):
            self._queue.append(batch)
            self.waiting += len(batch)

    @property
    def next_step(self) -> int | None:
        """Give the step of the first row that waits."""
        return int(self._queue[0].steps[self._at]) if self._queue else None

    def batches(self) -> Iterator[Batch]:
        """Give all rows that wait."""
        for i, batch in enumerate(self._queue):
            yield batch if i else batch.part(self._at, len(batch))

    def answer_alone(
        self, *, stats: Sequence[str], weights: Mapping[str, str], world_size: int
    ) -> Iterator[Batch]:
        """Give all rows that wait, with statistics over this rank only, which say so."""
        for own in merged(self._take(self.waiting)):
            alone = reduce_rows(
                [(self._rank, own)], stats=stats, weights=weights, world_size=world_size
            )
            yield from join(own, alone)

    def answer(self, reduced: Reduced) -> Iterator[Batch]:
        """Give the batches of the reduced rows: with our own values where the rows are ours."""
        ours = self._rank in reduced.who
        at = 0
        while at < len(reduced):
            rows = merged(self._take(self._shared(reduced, at) if ours else 0))
            for own in rows:
                yield from join(own, reduced.part(at, at + len(own)))
                at += len(own)
            if not rows:
                n = self._foreign(reduced, at) if ours else len(reduced)
                generation = self._generation_now()
                yield from join(None, reduced.part(at, at + n), generation=generation)
                at += n

    def _take(self, n: int) -> list[Batch]:
        """Take the next `n` rows."""
        self.waiting -= n
        taken = []
        while n:
            batch, start = self._queue[0], self._at
            stop = min(len(batch), start + n)
            taken.append(batch.part(start, stop))
            n -= stop - start
            self._at = stop
            if stop == len(batch):
                self._queue.popleft()
                self._at = 0
            self._generation = batch.generation
        return taken

    def _shared(self, reduced: Reduced, at: int) -> int:
        """Count the rows from `at` on that are the next of our own."""
        n = 0
        for i, batch in enumerate(self._queue):
            own = batch.steps if i else batch.steps[self._at :]
            steps = reduced.steps[at + n : at + n + len(own)]
            same = own[: len(steps)] == steps
            if not same.all():
                return n + int(np.argmin(same))
            n += len(steps)
            if at + n == len(reduced):
                break
        return n

    def _foreign(self, reduced: Reduced, at: int) -> int:
        """Count the rows from `at` on that only others reported."""
        ours = np.flatnonzero(reduced.steps[at:] == self.next_step)
        return int(ours[0]) if self._queue and len(ours) else len(reduced) - at

    def _generation_now(self) -> int:
        """Give the generation of rows that come before the next of our own."""
        if self._generation is not None:
            return self._generation
        return self._queue[0].generation if self._queue else 0
