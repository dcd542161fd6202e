"""The border between the halves of the house: what a record is, and how a number is shown.

A `Record` is one step as plain Python: no tensor comes this far. Records travel in a `Batch`: a run
of steps that have the same names, as one matrix, because the background handles fifty steps in
little more time than one. A batch read as a sequence is its records.

    >>> Record(step=3, time=0.0, values={"loss": 0.25}).values["loss"]
    0.25
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["float", "int", "bool"]

#: Names of a row that are not metrics.
ROW_KEYS = ("step", "time", "generation", "nonfinite")

_SOME_ROWS = 64

#: Ends of a name that a statistic over ranks owns.
STATISTIC = re.compile(r"/(mean|max|min|std|ranks|nonfinite|max_rank|min_rank|p\d{1,2}(\.\d+)?)$")

_NO_VALUES: Mapping[str, Any] = MappingProxyType({})
_NO_EXTRAS: Mapping[int, Mapping[str, Any]] = MappingProxyType({})


class Record(NamedTuple):
    """One step: its numbers, texts and small arrays by name, in the order in which they are shown.

    `generation` counts how often the run went back to an earlier step before this row was written;
    `skip` names the backends that the caller of `update` asked to leave this step out.
    """

    step: int
    time: float
    values: Mapping[str, Any] = _NO_VALUES
    generation: int = 0
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Description:
    """What a person should know about a metric to read it: data for every backend and report."""

    unit: str | None = None
    format: str | None = None  # a format specification, such as ".3e"
    better: Literal["lower", "higher"] | None = None
    title: str | None = None
    weight: str | None = None  # the key whose values weigh this one's mean over ranks


@dataclass(frozen=True, slots=True)
class Batch(Sequence[Record]):
    """A run of records with the same names, as one matrix of float64 with a row a step.

    `kinds` says which columns were ints or bools, so that they are shown as such. `extras` holds,
    by row, what is not a float64: texts, None, arrays, ints past 2**53; there it stands for the
    name's column, or beside the columns if the name has none.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    names: tuple[str, ...]
    numbers: NDArray[np.float64]
    kinds: tuple[Kind, ...]
    extras: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: _NO_EXTRAS)
    generation: int = 0
    skip: frozenset[str] = frozenset()
    own: bool = True  # False where only other ranks reported these steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        at = range(len(self))[index]
        return next(iter(self.part(at, at + 1)))

    def __iter__(self) -> Iterator[Record]:
        others = [(j, self._plain(j)) for j, kind in enumerate(self.kinds) if kind != "float"]
        steps, times = self.steps.tolist(), self.times.tolist()
        for i, row in enumerate(self._rows()):
            for j, column in others:
                row[j] = column[i]
            values = dict(zip(self.names, row, strict=True))
            if self.extras and i in self.extras:
                values.update(self.extras[i])
            yield Record(steps[i], times[i], MappingProxyType(values), self.generation, self.skip)

    def part(self, start: int, stop: int) -> Batch:
        """Give some of the rows, without copying the numbers."""
        if start == 0 and stop >= len(self):
            return self
        return replace(
            self,
            steps=self.steps[start:stop],
            times=self.times[start:stop],
            numbers=self.numbers[start:stop],
            extras=self._extras_of(start, stop),
        )

    def chosen(self, mask: NDArray[np.bool_]) -> Batch:
        """Give the rows of a mask."""
        at = {int(row): i for i, row in enumerate(np.flatnonzero(mask))}
        return replace(
            self,
            steps=self.steps[mask],
            times=self.times[mask],
            numbers=self.numbers[mask],
            extras={at[row]: extra for row, extra in self.extras.items() if row in at},
        )

    def _extras_of(self, start: int, stop: int) -> Mapping[int, Mapping[str, Any]]:
        """Give the extras of some rows, counted from the first of them."""
        # The fewer of the two are gone through: many rows with one extra, and one row of many.
        rows = range(start, stop) if stop - start < len(self.extras) else self.extras
        return {i - start: self.extras[i] for i in rows if start <= i < stop and i in self.extras}

    def _rows(self) -> Iterator[list[Any]]:
        """Give the rows as lists of floats, a few at a time: many at once leave the caches."""
        for start in range(0, len(self), _SOME_ROWS):
            yield from self.numbers[start : start + _SOME_ROWS].tolist()

    def _plain(self, column: int) -> list[Any]:
        """Give one column as the Python numbers that it was."""
        numbers: NDArray[Any] = self.numbers[:, column]
        if self.kinds[column] == "int":
            # What an int64 does not hold is exact in the extras, and anything here.
            with np.errstate(invalid="ignore"):
                numbers = numbers.astype(np.int64)
        elif self.kinds[column] == "bool":
            numbers = numbers.astype(np.bool_)
        plain: list[Any] = numbers.tolist()
        return plain


def merged(batches: Iterable[Batch]) -> list[Batch]:
    """Give the same rows in as few batches as can be: neighbours that look alike become one."""
    return [_joined(list(run)) for _, run in groupby(batches, key=_look)]


def _look(batch: Batch) -> tuple[Any, ...]:
    return batch.names, batch.kinds, batch.generation, batch.skip, batch.own


def _joined(batches: Sequence[Batch]) -> Batch:
    """Give batches that look alike as one."""
    if len(batches) == 1:
        return batches[0]
    extras: dict[int, Mapping[str, Any]] = {}
    start = 0
    for batch in batches:
        for i, row in batch.extras.items():
            extras[start + i] = row
        start += len(batch)
    return replace(
        batches[0],
        steps=np.concatenate([batch.steps for batch in batches]),
        times=np.concatenate([batch.times for batch in batches]),
        numbers=np.concatenate([batch.numbers for batch in batches]),
        extras=extras,
    )


def statistics_of(batch: Batch) -> Batch | None:
    """Give the statistics over ranks in a batch, without the rank's own values; None if it has none.

    >>> statistics_of(Batch(np.array([0]), np.zeros(1), ("a",), np.ones((1, 1)), ("float",)))
    """
    at = [i for i, name in enumerate(batch.names) if STATISTIC.search(name)]
    if not at:
        return None
    return replace(
        batch,
        names=tuple(batch.names[i] for i in at),
        kinds=tuple(batch.kinds[i] for i in at),
        numbers=batch.numbers[:, at],
        extras=_NO_EXTRAS,
    )


def show(value: Any, *, precision: int = 6, format: str | None = None) -> str:
    """Show one value as a person reads it: floats with exactly `precision` decimals."""
    if isinstance(value, np.ndarray):
        # A matrix has line ends of its own, which would break the one line of its step.
        return " ".join(np.array2string(value, precision=precision, threshold=8).split())
    if isinstance(value, int) and value.bit_length() > 1024:
        return hex(value)  # Python refuses to write out thousands of decimal digits
    if not isinstance(value, float):
        return str(value)
    return f"{value:{format}}" if format else f"{value:.{precision}f}"
