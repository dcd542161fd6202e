"""Put a rank's own rows and the statistics over ranks together, as the batches of its records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from everyrank.ranks.align import reduce_rows
from everyrank.ranks.base import Reduced
from everyrank.records import Batch, Kind


def join(own: Batch | None, reduced: Reduced, *, generation: int = 0) -> Iterator[Batch]:
    """Give the rows with their statistics: own value, then those of its name.

    `<name>/ranks` stands there when not every rank reported, `<name>/nonfinite` when values were
    not finite; a batch has one set of names, so it is cut where these change.
    """
    odd = reduced.nonfinite > 0
    changes = np.flatnonzero((odd[1:] != odd[:-1]).any(axis=1)) + 1
    edges = [0, *changes.tolist(), len(reduced)]
    for start, stop in zip(edges, edges[1:], strict=False):
        rows = own.part(start, stop) if own is not None else None
        yield _joined(rows, reduced.part(start, stop), generation)


def _joined(own: Batch | None, reduced: Reduced, generation: int) -> Batch:
    columns = list(_columns(own, reduced))
    numbers = np.empty((len(reduced), len(columns)))
    for j, (_, _, values) in enumerate(columns):
        numbers[:, j] = values
    names = tuple(name for name, _, _ in columns)
    kinds = tuple(kind for _, kind, _ in columns)
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
    ours = own.names if own is not None else ()
    at = {name: u for u, name in enumerate(reduced.names)}
    for j, name in enumerate(ours):
        assert own is not None
        yield name, own.kinds[j], own.numbers[:, j]
        if name in at:
            yield from _statistics(name, at[name], reduced)
    for name in reduced.names:
        if name not in ours:
            yield from _statistics(name, at[name], reduced)


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
    """The rows that were started here and are not answered yet, in order."""

    def __init__(self) -> None:
        self._queue: deque[Batch] = deque()
        self._generation = 0
        self.waiting = 0

    def add(self, batch: Batch) -> None:
        """Remember rows that were started."""
        self._queue.append(batch)
        self._generation = batch.generation
        self.waiting += len(batch)

    @property
    def next_step(self) -> int | None:
        """Give the step of the first row that waits."""
        return int(self._queue[0].steps[0]) if self._queue else None

    def batches(self) -> Iterator[Batch]:
        """Give all rows that wait."""
        return iter(self._queue)

    def answer_alone(
        self, rank: int, *, stats: Sequence[str], weights: Mapping[str, str], world_size: int
    ) -> Iterator[Batch]:
        """Give all rows that wait, with statistics over this rank only, which say so."""
        while self._queue:
            batch = self._queue[0]
            alone = reduce_rows(
                [(rank, batch)], stats=stats, weights=weights, world_size=world_size
            )
            yield from self.answer(alone)

    def answer(self, reduced: Reduced) -> Iterator[Batch]:
        """Give the batches of the reduced rows: with our own values where the steps are ours."""
        at = 0
        while at < len(reduced):
            own = self._queue[0] if self._queue else None
            n = _shared(own, reduced, at) if own is not None else 0
            if own is not None and n:
                self._take(n)
                yield from join(own.part(0, n), reduced.part(at, at + n))
                at += n
            else:
                n = _foreign(own, reduced, at)
                yield from join(None, reduced.part(at, at + n), generation=self._generation)
                at += n

    def _take(self, n: int) -> None:
        batch = self._queue.popleft()
        self.waiting -= n
        if n < len(batch):
            self._queue.appendleft(batch.part(n, len(batch)))


def _shared(own: Batch, reduced: Reduced, at: int) -> int:
    """Count the rows from `at` on that are the next of our own."""
    n = min(len(own), len(reduced) - at)
    same = own.steps[:n] == reduced.steps[at : at + n]
    return n if same.all() else int(np.argmin(same))


def _foreign(own: Batch | None, reduced: Reduced, at: int) -> int:
    """Count the rows from `at` on that only others reported."""
    if own is None:
        return len(reduced) - at
    ours = np.flatnonzero(reduced.steps[at:] == own.steps[0])
    return int(ours[0]) if len(ours) else len(reduced) - at
