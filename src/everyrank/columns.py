"""Growing columns, aligned by step: the run in memory.

Batches that have the same names share one `_Table`: one axis of steps, times and generations beside
a matrix of float64, in chunks that are filled once and never copied or moved. A reader therefore
takes the lock only to note how long each table is, and reads the rows below that without it.

Nothing is deleted. Which rows are *live* is worked out when somebody asks: a value is superseded by
a later value of the same name at the same step or an earlier one (the run went back), and by a
later `rewind` to before its step.

    >>> columns = Columns()
    >>> batch = Batch(
    ...     steps=np.array([0, 1]),
    ...     times=np.array([0.0, 0.5]),
    ...     names=("loss",),
    ...     numbers=np.array([[0.5], [0.25]]),
    ...     kinds=("float",),
    ... )
    >>> columns.append(batch)
    >>> columns.series("loss")
    Series(loss: 2 values of float64, steps 0 to 1, last 0.250000)
"""

from __future__ import annotations

import difflib
import threading
from bisect import bisect_left
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.records import Batch, Kind, Record, show

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

#: Rows of a full chunk, and the bytes that bound it when there are thousands of names.
_CHUNK_ROWS = 4096
_CHUNK_BYTES = 4 << 20

_DTYPES: Mapping[Kind, type[np.generic]] = {"float": np.float64, "int": np.int64, "bool": np.bool_}


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The live values of one metric, with the step of each.

    It reads like the array `values`, and may be handed to numpy as one; `steps` is the other axis
    of a plot, strictly increasing and read-only. `values` holds float64, or int64 or bool if every
    value was one, or objects if some are texts, None, arrays or ints past 2**53.

        >>> loss = Series("loss", np.array([0, 1]), np.array([0.5, 0.25]))
        >>> list(loss)
        [0.5, 0.25]
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[Any]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        """Yield plain Python values, so that a list of them can be printed or written as JSON."""
        return iter(_plain(self.values))

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        if copy is None:  # numpy 1 has no "copy if needed" in np.array
            return np.asarray(self.values, dtype=dtype)
        return np.array(self.values, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> Any:
        """Compare value by value, as the array does."""
        return self.values == (other.values if isinstance(other, Series) else other)

    __hash__ = None  # type: ignore[assignment]  # like the array, it has no single truth

    def __repr__(self) -> str:
        if not len(self):
            return f"Series({self.name}: no values yet)"
        last = show(_plain(self.values[-1:])[0])
        return (
            f"Series({self.name}: {len(self):,} values of {self.values.dtype}, "
            f"steps {self.steps[0]} to {self.steps[-1]}, last {last})"
        )


class Columns:
    """Everything a run recorded, by name and by step; one thread appends while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, ...], _Table] = {}
        # Where each name is found, in the order in which the names were first seen.
        self._places: dict[str, tuple[_Place, ...]] = {}
        self._declared: set[str] = set()
        self._arrived = 0  # rows so far, over all tables: the order in which they came
        self._rewinds: list[tuple[int, int]] = []  # (rows that had arrived, after_step)
        self._known_steps: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def append(self, batch: Batch) -> None:
        """Add the rows of one batch; nothing of the batch is kept but its texts and arrays."""
        if not len(batch):
            return
        with self._lock:
            table = self._tables.get(batch.names)
            if table is None:
                table = self._tables[batch.names] = _Table(batch.names, batch.kinds)
                for column, name in enumerate(batch.names):
                    self._found(name, (table, column))
            # The extras come first: a reader believes that rows below table.rows are complete.
            for row in sorted(batch.extras):
                for name, value in batch.extras[row].items():
                    if table.add_extra(name, table.rows + row, value):
                        self._found(name, (table, None))
            table.append(batch, self._arrived)
            self._arrived += len(batch)

    def rewind(self, after_step: int) -> None:
        """Supersede every row so far whose step is above `after_step`, as a resumed run does."""
        with self._lock:
            self._rewinds.append((self._arrived, after_step))

    def declare(self, name: str) -> None:
        """Let `series(name)` be empty, rather than a KeyError, until the first value comes."""
        with self._lock:
            self._declared.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have, or had, a value, in the order in which they were first seen."""
        with self._lock:
            return tuple(self._places)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps at which any name has a live value: sorted, unique and read-only."""
        version = (self._arrived, len(self._rewinds))
        known = self._known_steps
        if known is None or known[0] != version:
            # Rows may come between the two lines: then the version is merely out of date.
            known = self._known_steps = (version, self._now().timeline().steps)
        return known[1]

    @property
    def nbytes(self) -> int:
        """The bytes set aside for numbers and axes; texts and arrays are not counted."""
        with self._lock:
            return sum(chunk.nbytes for table in self._tables.values() for chunk in table.chunks)

    def __len__(self) -> int:
        return len(self.steps)

    def series(self, name: str) -> Series:
        """Give the live values of one name, in step order."""
        moment = self._now(name)
        if name not in moment.places:
            return Series(name, np.empty(0, np.int64), np.empty(0, np.float64))
        return moment.series(name)

    def all_series(self) -> dict[str, Series]:
        """Give the live values of every name, all as of one moment, by name."""
        moment = self._now()
        return {name: moment.series(name) for name in moment.places}

    def all_rows(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int32]]:
        """Give steps, values and generations of one name as they came, with what was superseded."""
        moment = self._now(name)
        if name not in moment.places:
            return np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int32)
        axis = moment.axis(name)
        return axis.steps, moment.values(name, axis), axis.generations

    def records(self) -> Iterator[Record]:
        """Give one record for each live step, in step order, as of the moment of the call."""
        return self._now().records()

    def latest(self) -> Record | None:
        """Give the record of the highest live step, or None before there is one."""
        return self._now().latest()

    def _found(self, name: str, place: _Place) -> None:
        self._places[name] = (*self._places.get(name, ()), place)

    def _now(self, name: str | None = None) -> _Moment:
        """Note under the lock what is there now: of everything, or of one name."""
        with self._lock:
            if name is None:
                places = dict(self._places)
                tables = list(self._tables.values())
            elif name in self._places:
                places = {name: self._places[name]}
                tables = [table for table, _ in places[name]]
            elif name in self._declared:
                places, tables = {}, []
            else:
                raise KeyError(self._unknown(name))
            views = {table: _View(table) for table in tables}
            return _Moment(places, views, tuple(self._rewinds))

    def _unknown(self, name: str) -> str:
        known = [*self._places, *self._declared]
        if not known:
            return f"There is no metric {name!r}: nothing was recorded so far."
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if close:
            return f"There is no metric {name!r}. Did you mean {close[0]!r}?"
        some = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
        return f"There is no metric {name!r}. There are {some}."


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


class _Table:
    """The rows of all batches that have one tuple of names."""

    def __init__(self, names: tuple[str, ...], kinds: tuple[Kind, ...]) -> None:
        self.kinds: tuple[Kind, ...] = kinds
        self.rows = 0
        self.chunks: list[_Chunk] = []
        # Of each name the rows, ascending, that hold a text, None, an array or a large int.
        self.extras: dict[str, tuple[list[int], list[Any]]] = {}
        self._names = frozenset(names)
        row_bytes = 8 * len(names) + 28
        self._most = max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))

    def add_extra(self, name: str, row: int, value: Any) -> bool:
        """Keep what a float64 cannot hold; True if this table did not have the name before."""
        new = name not in self.extras
        rows, values = self.extras.setdefault(name, ([], []))
        rows.append(row)
        values.append(value)
        return new and name not in self._names

    def append(self, batch: Batch, arrived: int) -> None:
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
_Place = tuple[_Table, int | None]


class _View:
    """The rows that a table had at one moment; they never change, so no lock guards them.

    It is made under the lock, which is why it does nothing but note the length.
    """

    def __init__(self, table: _Table) -> None:
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
        return np.concatenate([c.steps[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def times(self) -> NDArray[np.float64]:
        return np.concatenate([c.times[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def arrivals(self) -> NDArray[np.int64]:
        return np.concatenate([c.arrivals[: self.rows - c.start] for c in self._chunks])

    @cached_property
    def generations(self) -> NDArray[np.int32]:
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


@dataclass(frozen=True, slots=True)
class _Axis:
    """Rows in the order in which they came: what they say of themselves, and where they lie."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    generations: NDArray[np.int32]
    arrivals: NDArray[np.int64]
    place: NDArray[np.int64]  # the index of the place, and the row there
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, view: _View, place: int, rows: NDArray[np.int64] | None) -> _Axis:
        """Read some rows of a view, or all of them."""
        at = slice(None) if rows is None else rows
        rows = np.arange(view.rows) if rows is None else rows
        axes = (view.steps[at], view.times[at], view.generations[at], view.arrivals[at])
        return cls(*axes, np.full(len(rows), place), rows)

    @classmethod
    def joined(cls, parts: list[_Axis]) -> _Axis:
        """Merge rows of several places by arrival."""
        if len(parts) == 1:
            return parts[0]
        every = (np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls))
        axis = cls(*every)
        return axis.take(np.argsort(axis.arrivals, kind="stable"))

    def take(self, key: Any) -> _Axis:
        """Keep the rows of a mask, a slice or an array of positions."""
        return _Axis(*(getattr(self, f.name)[key] for f in fields(self)))

    def by_place(self, places: int) -> list[Any]:
        """Say for each place which of these rows are there, in a form to index with."""
        if places == 1:  # the rule, and sorting a million rows would take longer than reading them
            return [slice(None)]
        order = np.argsort(self.place, kind="stable")
        return np.split(order, np.searchsorted(self.place[order], np.arange(1, places)))


@dataclass(frozen=True, slots=True)
class _Timeline:
    """Of every live step the time of its latest live row, and the highest generation."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    generations: NDArray[np.int32]

    @classmethod
    def of(cls, axes: list[_Axis]) -> _Timeline:
        """Merge the live rows of some names."""
        axes = [axis for axis in axes if len(axis.steps)]
        if not axes:
            return cls(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int32))
        if len(axes) == 1:  # strictly increasing as it is
            return cls(axes[0].steps, axes[0].times, axes[0].generations)
        steps, times, generations, arrivals = (
            np.concatenate([getattr(axis, field) for axis in axes])
            for field in ("steps", "times", "generations", "arrivals")
        )
        order = np.lexsort((arrivals, steps))
        steps = steps[order]
        first = np.append(True, steps[1:] != steps[:-1])
        starts, ends = np.flatnonzero(first), np.flatnonzero(np.append(first[1:], True))
        merged = cls(
            steps[starts],
            times[order][ends],
            np.maximum.reduceat(generations[order], starts),
        )
        merged.steps.flags.writeable = False
        return merged


class _Moment:
    """All that the columns held at one moment; the reading of it needs no lock."""

    def __init__(
        self,
        places: Mapping[str, tuple[_Place, ...]],
        views: Mapping[_Table, _View],
        rewinds: tuple[tuple[int, int], ...],
    ) -> None:
        self.places = places
        self._views = views
        self._rewinds = rewinds
        self._live: dict[Any, _Axis] = {}

    def axis(self, name: str) -> _Axis:
        """Read all rows of a name, superseded ones too."""
        parts = []
        for i, (table, column) in enumerate(self.places[name]):
            view = self._views[table]
            rows = view.extra_rows(name) if column is None else None
            parts.append(_Axis.of(view, i, rows))
        return _Axis.joined(parts)

    def live(self, name: str) -> _Axis:
        """Read the rows of a name that nothing superseded: their steps strictly increase."""
        key = self._company(name)
        if key not in self._live:
            axis = self.axis(name)
            alive = _unbeaten(axis.steps) & ~self._rewound(axis)
            axis = axis if alive.all() else axis.take(alive)
            axis.steps.flags.writeable = False  # several series share it
            self._live[key] = axis
        return self._live[key]

    def values(self, name: str, axis: _Axis) -> NDArray[Any]:
        """Read the values of a name at the rows of `axis`."""
        numbers = np.zeros(len(axis.rows))
        extras: dict[int, Any] = {}
        kinds: set[Kind] = set()
        here_of = axis.by_place(len(self.places[name]))
        for here, (table, column) in zip(here_of, self.places[name], strict=True):
            view, rows = self._views[table], axis.rows[here]
            if column is not None:
                kinds.add(view.kinds[column])
                numbers[here] = view.numbers(column, rows)
            at, found = view.extras(name, rows)
            if found:
                extras.update(zip(np.arange(len(numbers))[here][at].tolist(), found, strict=True))
        dtype = _DTYPES[kinds.pop() if len(kinds) == 1 else "float"]
        return _with_extras(numbers, dtype, extras) if extras else numbers.astype(dtype, copy=False)

    def series(self, name: str) -> Series:
        axis = self.live(name)
        return Series(name, axis.steps, self.values(name, axis))

    def timeline(self) -> _Timeline:
        company = {self._company(name): name for name in self.places}
        return _Timeline.of([self.live(name) for name in company.values()])

    def records(self) -> Iterator[Record]:
        line = self.timeline()
        for start in range(0, len(line.steps), _CHUNK_ROWS):  # bounds the Python objects alive
            here = slice(start, start + _CHUNK_ROWS)
            rows = self._merged(line.steps[here])
            about = zip(
                line.steps[here].tolist(),
                line.times[here].tolist(),
                line.generations[here].tolist(),
                strict=True,
            )
            for values, (step, time, generation) in zip(rows, about, strict=True):
                yield Record(step, time, MappingProxyType(values), generation)

    def latest(self) -> Record | None:
        line = self.timeline()
        if not len(line.steps):
            return None
        values = self._merged(line.steps[-1:])[0]
        time, generation = float(line.times[-1]), int(line.generations[-1])
        return Record(int(line.steps[-1]), time, MappingProxyType(values), generation)

    def _merged(self, steps: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Give the values of each of some neighbouring live steps, by name."""
        rows: list[dict[str, Any]] = [{} for _ in steps]
        for name in self.places:
            axis = self.live(name)
            first = int(np.searchsorted(axis.steps, steps[0]))
            axis = axis.take(slice(first, int(np.searchsorted(axis.steps, steps[-1], "right"))))
            at = np.searchsorted(steps, axis.steps).tolist()
            for i, value in zip(at, _plain(self.values(name, axis)), strict=True):
                rows[i][name] = value
        return rows

    def _company(self, name: str) -> Any:
        """Give a key that names share if they are always recorded together."""
        places = self.places[name]
        tables = tuple(id(table) for table, _ in places)
        return tables if all(column is not None for _, column in places) else (name, *tables)

    def _rewound(self, axis: _Axis) -> NDArray[np.bool_]:
        if not self._rewinds:
            return np.zeros(len(axis.steps), np.bool_)
        arrived, after = np.array(self._rewinds, np.int64).T
        # Of the rewinds that came after a row, the one that went back furthest decides.
        furthest = np.minimum.accumulate(after[::-1])[::-1]
        furthest = np.append(furthest, np.iinfo(np.int64).max)
        return axis.steps > furthest[np.searchsorted(arrived, axis.arrivals, side="right")]


def _unbeaten(steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say of each row whether every later one has a higher step."""
    lowest = np.minimum.accumulate(steps[::-1])[::-1]
    unbeaten = np.ones(len(steps), np.bool_)
    unbeaten[:-1] = steps[:-1] < lowest[1:]
    return unbeaten


def _with_extras(
    numbers: NDArray[np.float64], dtype: type[np.generic], extras: Mapping[int, Any]
) -> NDArray[np.object_]:
    numbers[list(extras)] = 0  # what stands there may be NaN, and no int
    values = np.empty(len(numbers), object)
    values[:] = numbers.astype(dtype).tolist()
    for i, extra in extras.items():  # one by one: numpy would take an array apart
        values[i] = extra
    return values


def _plain(values: NDArray[Any]) -> list[Any]:
    """Give an array as Python values; arrays inside it stay what they are."""
    return list(values) if values.dtype == object else values.tolist()
