"""What the columns held at one moment, and which of it is live.

A moment is made under the columns' lock and read without it. Whatever is asked is worked out then,
once: the rows of each name, those that nothing superseded, and the records of the steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.records import Kind, Record
from everyrank.series import Series, plain_values
from everyrank.tables import CHUNK_ROWS, Place, Table, View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

_DTYPES: Mapping[Kind, type[np.generic]] = {"float": np.float64, "int": np.int64, "bool": np.bool_}


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
    def of(cls, view: View, place: int, rows: NDArray[np.int64] | None) -> _Axis:
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


class Moment:
    """All that the columns held at one moment; the reading of it needs no lock."""

    def __init__(
        self,
        places: Mapping[str, tuple[Place, ...]],
        views: Mapping[Table, View],
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
        """Give the live values of a name."""
        axis = self.live(name)
        return Series(name, axis.steps, self.values(name, axis))

    def timeline(self) -> _Timeline:
        """Give the live steps of all names together."""
        company = {self._company(name): name for name in self.places}
        return _Timeline.of([self.live(name) for name in company.values()])

    def records(self) -> Iterator[Record]:
        """Give one record for each live step, in step order."""
        line = self.timeline()
        for start in range(0, len(line.steps), CHUNK_ROWS):  # bounds the Python objects alive
            here = slice(start, start + CHUNK_ROWS)
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
        """Give the record of the highest live step, or None."""
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
            for i, value in zip(at, plain_values(self.values(name, axis)), strict=True):
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
