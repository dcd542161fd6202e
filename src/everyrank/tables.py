"""Where the rows of a run lie in memory: tables of chunks that are written once and never move.

A table holds the rows of all batches that have one tuple of names. A reader notes under the lock how
long it is, as a `View`, and reads the rows below that without it.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.records import Batch, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Rows of a full chunk, and the bytes that bound it when there are thousands of names.
CHUNK_ROWS = 4096
_CHUNK_BYTES = 4 << 20


class _Chunk:
    """Room for some rows of a table; a row is written once and never changes."""

    __slots__ = ("arrivals", "generations", "numbers", "start", "steps", "times", "used")

    def __init__(self, start: int, rows: int, names: int) -> None:
        self.start = start
        self.used = 0
        self.steps = np.empty(rows, np.int64)
        self.times = np.empty(rows, np.float64)
        self.arrivals = np.empty(rows, np.int64)
        self.generations = np.empty(rows, np.int32)
        # Rows are contiguous because they are written far more often than a column is read.
        self.numbers = np.empty((rows, names), np.float64)

    @property
    def nbytes(self) -> int:
        axes = (self.steps, self.times, self.arrivals, self.generations)
        return self.numbers.nbytes + sum(axis.nbytes for axis in axes)

    def write(self, batch: Batch, done: int, arrived: int) -> int:
        """Take what there is room for of the batch's rows from `done`; say how many that were."""
        count = min(len(self.steps) - self.used, len(batch.steps) - done)
        here, there = slice(self.used, self.used + count), slice(done, done + count)
        self.steps[here] = batch.steps[there]
        self.times[here] = batch.times[there]
        self.arrivals[here] = np.arange(arrived + done, arrived + done + count)
        self.generations[here] = batch.generation
        self.numbers[here] = batch.numbers[there]
        self.used += count
        return count


class Table:
    """The rows of all batches that have one tuple of names."""

    def __init__(self, names: tuple[str, ...], kinds: tuple[Kind, ...]) -> None:
        self.kinds: tuple[Kind, ...] = kinds
        self.rows = 0
        self.chunks: list[_Chunk] = []
        # Of each name the rows, ascending, that hold a text, None, an array or a large int.
        self.extras: dict[str, tuple[list[int], list[Any]]] = {}
        self._names = frozenset(names)
        row_bytes = 8 * len(names) + 28
        self._most = max(1, min(CHUNK_ROWS, _CHUNK_BYTES // row_bytes))

    def add_extra(self, name: str, row: int, value: Any) -> bool:
        """Keep what a float64 cannot hold; True if this table did not have the name before."""
        new = name not in self.extras
        rows, values = self.extras.setdefault(name, ([], []))
        rows.append(row)
        values.append(value)
        return new and name not in self._names

    def append(self, batch: Batch, arrived: int) -> None:
        """Add the rows of a batch; `arrived` rows came before them, over all tables."""
        if batch.kinds != self.kinds:
            both = zip(self.kinds, batch.kinds, strict=True)
            self.kinds = tuple(a if a == b else "float" for a, b in both)
        count = len(batch.steps)
        done = 0
        while done < count:
            if not self.chunks or self.chunks[-1].used == len(self.chunks[-1].steps):
                self._grow(self.rows + done, count - done)
            done += self.chunks[-1].write(batch, done, arrived)
        self.rows += count

    def _grow(self, rows: int, wanted: int) -> None:
        # As many rows again as there are: a run of three steps with 10,000 names pays for a few.
        size = min(max(rows, wanted), self._most)
        self.chunks.append(_Chunk(rows, size, len(self._names)))


#: A table that has a name, and the name's column in it, or None if it has the name in extras only.
Place = tuple[Table, int | None]


class View:
    """The rows that a table had at one moment; they never change, so no lock guards them.

    It is made under the lock, which is why it does nothing but note the length.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows = table.rows
        self.kinds: tuple[Kind, ...] = table.kinds

    @cached_property
    def _chunks(self) -> list[_Chunk]:
        return [chunk for chunk in self._table.chunks if chunk.start < self.rows]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([chunk.start for chunk in self._chunks], np.int64)

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The step of each row."""
        return np.concatenate([c.steps[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """When each row was handed over."""
        return np.concatenate([c.times[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def arrivals(self) -> NDArray[np.int64]:
        """As the how-manyeth each row came, over all tables."""
        return np.concatenate([c.arrivals[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def generations(self) -> NDArray[np.int32]:
        """How often the run had gone back before each row."""
        return np.concatenate([c.generations[: self.rows - c.start] for c in self._chunks])

    def numbers(self, column: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Read one column at ascending rows."""
        out = np.empty(len(rows))
        if not len(rows):
            return out
        first, last = np.searchsorted(self._starts, rows[[0, -1]], side="right").tolist()
        edges = [0, *np.searchsorted(rows, self._starts[first:last]).tolist(), len(rows)]
        for i, chunk in enumerate(self._chunks[first - 1 : last]):
            here = slice(edges[i], edges[i + 1])
            some = rows[here] - chunk.start
            # Nothing superseded in between is the rule, and a slice takes a third of the time.
            gapless = some[-1] - some[0] == len(some) - 1 if len(some) else False
            out[here] = chunk.numbers[slice(some[0], some[-1] + 1) if gapless else some, column]
        return out

    def extra_rows(self, name: str) -> NDArray[np.int64]:
        """Give the rows that hold an extra of this name."""
        rows, _ = self._table.extras.get(name, ([], []))
        return np.array(rows[: bisect_left(rows, self.rows)], np.int64)

    def extras(self, name: str, rows: NDArray[np.int64]) -> tuple[list[int], list[Any]]:
        """Give the extras of a name among ascending rows: where in `rows` they are, and what."""
        all_rows, values = self._table.extras.get(name, ([], []))
        if not all_rows or not len(rows):
            return [], []
        first, last = bisect_left(all_rows, rows[0]), bisect_left(all_rows, rows[-1] + 1)
        extra_rows = np.array(all_rows[first:last], np.int64)
        at = np.searchsorted(rows, extra_rows)
        wanted = np.flatnonzero(rows[at] == extra_rows)
        return at[wanted].tolist(), [values[first + i] for i in wanted.tolist()]
