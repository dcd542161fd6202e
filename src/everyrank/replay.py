"""Read a run back from its files, into the batches and columns that it had while it ran.

    columns = Columns()
    fill(columns, "runs/seven/history.jsonl", facts["generations"])

Rows come in the order of the file, a block of like rows at a time, so that a log of any length fits
into memory one block after the other. A million rows of twenty numbers take some five seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyrank.columns import Columns
from everyrank.jsonlines import Problem, read
from everyrank.records import Batch, Kind, Record

PathLike = str | os.PathLike[str]

#: Rows of a block, and the values that bound it when there are thousands of names.
_ROWS = 4096
_VALUES = 1 << 18

_EXACT = 2**53  # from here on, a float64 may stand for several ints
_KINDS: dict[type, Kind] = {float: "float", int: "int", bool: "bool"}


def batches(path: PathLike, *, problems: list[Problem] | None = None) -> Iterator[Batch]:
    """Give the rows of a log as batches, each a run of rows with the same names and kinds.

    Lines that are no records are passed over, and told in `problems` (see `jsonlines.read`).
    """
    block: _Block | None = None
    for record in read(path, problems=problems):
        names = tuple(record.values)
        values = tuple(record.values.values())
        types = tuple(map(type, values))
        if block is None or not block.takes(record, names, types):
            if block is not None:
                yield block.batch()
            block = _Block(record, names, types)
        block.steps.append(record.step)
        block.times.append(record.time)
        block.rows.append(values)
    if block is not None:
        yield block.batch()


def fill(
    columns: Columns,
    path: PathLike,
    generations: Iterable[Mapping[str, Any]] = (),
    *,
    problems: list[Problem] | None = None,
) -> None:
    """Append the rows of a log to the columns.

    `generations` are those of `run.json`: the rows of one that went on after a checkpoint supersede
    all earlier rows past its `after_step`.
    """
    after = {int(each["generation"]): each.get("after_step") for each in generations}
    for batch in batches(path, problems=problems):
        after_step = after.pop(batch.generation, None)
        if after_step is not None:
            columns.rewind(after_step)
        columns.append(batch)


class _Block:
    """Rows that become one batch: the same names and, wherever there is a number, its kind."""

    def __init__(self, record: Record, names: tuple[str, ...], types: tuple[type, ...]) -> None:
        self.names = names
        self.generation = record.generation
        self.steps: list[int] = []
        self.times: list[float] = []
        self.rows: list[tuple[Any, ...]] = []
        self._most = max(1, min(_ROWS, _VALUES // (len(names) or 1)))
        # Of each name the kind, or None if no row has had a number there yet.
        self._kinds: list[Kind | None] = [_KINDS.get(each) for each in types]
        self._seen = {types}

    def takes(self, record: Record, names: tuple[str, ...], types: tuple[type, ...]) -> bool:
        """Say whether a row belongs to this block."""
        if names != self.names or record.generation != self.generation:
            return False
        return len(self.rows) < self._most and (types in self._seen or self._fits(types))

    def _fits(self, types: tuple[type, ...]) -> bool:
        """Say whether a row of types not seen yet belongs here, and widen the block to it."""
        kinds: list[Kind | None] = []
        for known, each in zip(self._kinds, types, strict=True):
            kind = _KINDS.get(each)
            if known and kind and kind != known:
                return False
            kinds.append(known or kind)
        self._kinds = kinds
        self._seen.add(types)
        return True

    def batch(self) -> Batch:
        """Give the rows as a batch."""
        numeric = [j for j, kind in enumerate(self._kinds) if kind is not None]
        extras: dict[int, dict[str, Any]] = {}
        numbers = self._numbers(numeric, extras)
        for column, j in enumerate(numeric):
            if self._kinds[j] == "int":
                for i in np.flatnonzero(~(np.abs(numbers[:, column]) < _EXACT)).tolist():
                    extras.setdefault(i, {})[self.names[j]] = self.rows[i][j]
        return Batch(
            np.array(self.steps, np.int64),
            np.array(self.times, np.float64),
            tuple(self.names[j] for j in numeric),
            numbers,
            tuple(kind for kind in self._kinds if kind is not None),
            extras,
            generation=self.generation,
        )

    def _numbers(
        self, numeric: list[int], extras: dict[int, dict[str, Any]]
    ) -> NDArray[np.float64]:
        """Give the matrix of the numbers, and put what is none beside it."""
        if all(each in _KINDS for types in self._seen for each in types):
            try:  # the rule, and without a step of Python for each value
                return np.array(self.rows, np.float64).reshape(len(self.rows), len(numeric))
            except OverflowError:  # an int beyond the range of a float64
                pass
        numbers = np.zeros((len(self.rows), len(numeric)))
        at = {j: column for column, j in enumerate(numeric)}
        for j, values in enumerate(zip(*self.rows, strict=True)):
            for i, value in enumerate(values):
                if _is_number(value):
                    numbers[i, at[j]] = value
                else:
                    extras.setdefault(i, {})[self.names[j]] = value
        return numbers


def _is_number(value: Any) -> bool:
    """Say whether a float64 has a place for a value, be it rounded."""
    return type(value) in _KINDS and (type(value) is not int or value.bit_length() < 1000)
