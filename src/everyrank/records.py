"""The border between the halves of the house: what a record is, and how a number is shown.

A `Record` is one step as plain Python: no tensor comes this far. Records travel in a `Batch`: a run
of steps that have the same names, as one matrix, because the background handles fifty steps in
little more time than one. A batch read as a sequence is its records.

    >>> Record(step=3, time=0.0, values={"loss": 0.25}).values["loss"]
    0.25
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["float", "int", "bool"]

#: Names of a row that are not metrics.
ROW_KEYS = ("step", "time", "generation", "nonfinite")

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
        return list(self)[index]

    def __iter__(self) -> Iterator[Record]:
        columns = [self._plain(j) for j in range(len(self.names))]
        # zip of no columns has no rows, but a step may hold texts alone.
        rows: Iterator[tuple[Any, ...]] = (
            zip(*columns, strict=True) if columns else iter([()] * len(self))
        )
        steps, times = self.steps.tolist(), self.times.tolist()
        for i, row in enumerate(rows):
            values = dict(zip(self.names, row, strict=True))
            if self.extras and i in self.extras:
                values.update(self.extras[i])
            yield Record(steps[i], times[i], MappingProxyType(values), self.generation, self.skip)

    def part(self, start: int, stop: int) -> Batch:
        """Give some of the rows, without copying the numbers."""
        if start == 0 and stop >= len(self):
            return self
        extras = {i - start: row for i, row in self.extras.items() if start <= i < stop}
        return replace(
            self,
            steps=self.steps[start:stop],
            times=self.times[start:stop],
            numbers=self.numbers[start:stop],
            extras=extras,
        )

    def _plain(self, column: int) -> list[Any]:
        """Give one column as the Python numbers that it was."""
        numbers, kind = self.numbers[:, column], self.kinds[column]
        if kind == "float":
            return numbers.tolist()
        return numbers.astype(np.int64 if kind == "int" else np.bool_).tolist()


def show(value: Any, *, precision: int = 6, format: str | None = None) -> str:
    """Show one value as a person reads it: floats with exactly `precision` decimals."""
    if isinstance(value, np.ndarray):
        return np.array2string(value, precision=precision, threshold=8)
    if not isinstance(value, float):
        return str(value)
    return f"{value:{format}}" if format else f"{value:.{precision}f}"
