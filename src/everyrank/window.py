"""The open window: what `update` was handed since the last one closed, copied at once, read later.

A `Layout` is what one kind of call looks like: its keys and the types of its values. It is worked out
once and found again by those two, so that the usual call costs a look-up and a tuple. The background
thread packs a closed window into batches: one matrix for each run of steps that look alike.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.records import ROW_KEYS, STATISTIC, Batch, Kind
from everyrank.stage import Block, Part, Stage, check_size, framework_of, open_stage

_EXACT = 2**53  # past this, a float64 does not hold every int
_KINDS: dict[str, Kind] = {"f": "float", "i": "int", "u": "int", "b": "bool"}


class Row(NamedTuple):
    """One update, copied."""

    step: int
    time: float
    layout: Layout
    values: tuple[Any, ...]
    parts: tuple[Part, ...] = ()
    skip: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Layout:
    """What one kind of call looks like; compared by identity."""

    names: tuple[str, ...]  # one for each value; "step" among them if it was in the dict
    types: tuple[type, ...]
    metric_names: frozenset[str]  # without "step"
    step_at: int | None
    plain: bool  # numbers of the host only: a tuple of them is already a copy
    kinds: tuple[Kind, ...]
    columns: tuple[int, ...]  # of plain layouts: where the numbers are
    staged: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by framework
    arrays: tuple[int, ...] = ()  # numpy arrays and sequences, which may change later

    @property
    def size(self) -> int:
        """How many values a row has."""
        return len(self.names)


def learn(metrics: Mapping[str, Any]) -> Layout:
    """Work out the layout of a flat dict, or say what in it is no metric."""
    staged: dict[str, tuple[int, ...]] = {}
    arrays: list[int] = []
    kinds: list[Kind] = []
    numbers_at: list[int] = []
    plain = True
    for i, (name, value) in enumerate(metrics.items()):
        check_name(name)
        if name == "step":
            continue
        kind = _host_kind(value)
        if kind is not None:
            numbers_at.append(i)
            kinds.append(kind)
            continue
        plain = False
        if framework := framework_of(type(value)):
            staged[framework] = (*staged.get(framework, ()), i)
        elif isinstance(value, np.ndarray | list | tuple):
            arrays.append(i)
        elif not isinstance(value, str | None):
            raise _no_metric(name, value)
    names = tuple(metrics)
    return Layout(
        names=names,
        types=tuple(map(type, metrics.values())),
        metric_names=frozenset(names) - {"step"},
        step_at=names.index("step") if "step" in metrics else None,
        plain=plain,
        kinds=tuple(kinds),
        columns=tuple(numbers_at),
        staged=staged,
        arrays=tuple(arrays),
    )


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Give nested dicts as one, their keys joined with `/`."""
    flat: dict[str, Any] = {}
    for name, value in _leaves(metrics, ""):
        if name in flat:
            raise MetricError(
                f"the key {name!r} comes twice: once as it is, and once from a dict in the dict. "
                "Rename one of the two."
            )
        flat[name] = value
    return flat


def _leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        _check_text(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class Window:
    """The rows since the last window closed."""

    def __init__(self, slots: int) -> None:
        self.rows: list[Row] = []
        self.generation = 0
        self._slots = slots
        self._stages: dict[str, Stage] = {}

    def capture(
        self, layout: Layout, values: list[Any]
    ) -> tuple[tuple[Any, ...], tuple[Part, ...]]:
        """Copy what may change after the call: device values beside them, arrays into new ones."""
        parts: list[Part] = []
        for i in layout.arrays:
            values[i] = _copied(layout.names[i], values[i])
        for framework, columns in layout.staged.items():
            stage = self._stages.get(framework)
            if stage is None:
                stage = self._stages[framework] = open_stage(framework, self._slots)
            names = [layout.names[c] for c in columns]
            parts += stage.add(columns, names, [values[c] for c in columns])
            for column in columns:
                values[column] = None  # the caller's tensor, and its graph, are let go
        return tuple(values), tuple(parts)

    def seal(self) -> None:
        """Close the window: from here on its values are on their way to the host."""
        for stage in self._stages.values():
            stage.seal()

    def ready(self) -> bool:
        """Say whether every value has reached the host."""
        blocks = {id(p.block): p.block for row in self.rows for p in row.parts}
        # Each is asked, since asking is what starts its copy.
        states = [block.ready() for block in blocks.values()]
        return all(states)


def pack(rows: Iterable[Row]) -> Iterator[Batch]:
    """Give the rows as batches, one for each run of steps that look alike."""
    return _pack(rows, _Fetched())


def values_of(row: Row) -> dict[str, Any]:
    """Give the values of one row as a record has them; waits for the device if they are there."""
    (batch,) = _pack([row], _peek)
    return dict(next(iter(batch)).values)


#: How the staged values of some slots come to the host, as one row for each.
_Read = Callable[[Block, list[int]], NDArray[Any]]


class _Fetched:
    """The blocks that were read so far: each is fetched once, whoever's rows it holds."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Block, NDArray[Any]]] = {}

    def __call__(self, block: Block, slots: list[int]) -> NDArray[Any]:
        if id(block) not in self._blocks:
            self._blocks[id(block)] = (block, block.fetch())  # the block, so that its id stays its
        return self._blocks[id(block)][1][slots]


def _peek(block: Block, slots: list[int]) -> NDArray[Any]:
    return np.stack([block.peek(slot) for slot in slots])


def _pack(rows: Iterable[Row], read: _Read) -> Iterator[Batch]:
    for (layout, skip, _), run in groupby(rows, key=_look):
        alike = list(run)
        if layout.plain:
            yield _pack_plain(layout, skip, alike)
        else:
            yield from _pack_mixed(skip, alike, read)


def _look(row: Row) -> tuple[Layout, frozenset[str], tuple[tuple[int, Any], ...]]:
    return row.layout, row.skip, tuple((id(p.block), p.places) for p in row.parts)


def _pack_plain(layout: Layout, skip: frozenset[str], rows: list[Row]) -> Batch:
    """Pack rows of plain numbers, which is nearly all there ever is."""
    values = [row.values for row in rows]
    extras: dict[int, dict[str, Any]] = {}
    try:
        matrix = np.array(values, dtype=np.float64)
    except OverflowError:  # an int beyond the range of a float64
        matrix = np.array([[_as_float(v) for v in row] for row in values])
    names = tuple(layout.names[c] for c in layout.columns)
    numbers = matrix if len(names) == layout.size else matrix[:, list(layout.columns)]
    if "int" in layout.kinds:
        for j, kind in enumerate(layout.kinds):
            if kind == "int":
                _keep_exact(numbers[:, j], layout.columns[j], names[j], values, extras)
    return _batch(rows, names, numbers, layout.kinds, extras, skip)


def _pack_mixed(skip: frozenset[str], rows: list[Row], read: _Read) -> Iterator[Batch]:
    """Pack rows with device values, arrays or texts, by columns."""
    layout = rows[0].layout
    columns: dict[int, list[Any] | NDArray[Any]] = {
        i: [row.values[i] for row in rows] for i, name in enumerate(layout.names) if name != "step"
    }
    for at, part in enumerate(rows[0].parts):
        data = read(part.block, [row.parts[at].slot for row in rows])
        for column, start, shape in part.places:
            if shape == ():
                columns[column] = data[:, start]
            else:
                stop = start + int(np.prod(shape))
                columns[column] = [v.reshape(shape) for v in data[:, start:stop]]
    if layout.arrays and len(rows) > 1:
        # An array may be a number in one step and a vector in the next: names would differ.
        kinds = [tuple(_host_kind(columns[i][r]) for i in layout.arrays) for r in range(len(rows))]
        if len(set(kinds)) > 1:
            for row in rows:
                yield from _pack_mixed(skip, [row], read)
            return
    yield _from_columns(layout, skip, rows, columns)


def _from_columns(
    layout: Layout,
    skip: frozenset[str],
    rows: list[Row],
    columns: Mapping[int, list[Any] | NDArray[Any]],
) -> Batch:
    names: list[str] = []
    kinds: list[Kind] = []
    numeric: list[Any] = []
    extras: dict[int, dict[str, Any]] = {}
    for i in sorted(columns):
        name, column = layout.names[i], columns[i]
        kind = _host_kind(column[0])
        if kind is None:
            for r, value in enumerate(column):
                extras.setdefault(r, {})[name] = value
            continue
        floats = _floats(column)
        if kind == "int":
            _keep_exact(floats, 0, name, [(v,) for v in column], extras)
        names.append(name)
        kinds.append(kind)
        numeric.append(floats)
    numbers = np.stack(numeric, axis=1) if numeric else np.empty((len(rows), 0))
    return _batch(rows, tuple(names), numbers, tuple(kinds), extras, skip)


def _batch(
    rows: list[Row],
    names: tuple[str, ...],
    matrix: NDArray[np.float64],
    kinds: tuple[Kind, ...],
    extras: Mapping[int, Mapping[str, Any]],
    skip: frozenset[str],
) -> Batch:
    steps = np.array([row.step for row in rows], np.int64)
    times = np.array([row.time for row in rows], np.float64)
    return Batch(steps, times, names, matrix, kinds, extras, skip=skip)


def _keep_exact(
    floats: NDArray[np.float64],
    column: int,
    name: str,
    values: list[Any],
    extras: dict[int, dict[str, Any]],
) -> None:
    """Keep the ints that a float64 does not hold exactly beside the matrix."""
    for r in np.flatnonzero(~(np.abs(floats) <= _EXACT)):
        extras.setdefault(int(r), {})[name] = int(values[r][column])


def _host_kind(value: Any) -> Kind | None:
    """Say what kind of number of the host this is, or None."""
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "float"
    if isinstance(value, np.generic):
        return _KINDS.get(value.dtype.kind) or ("float" if _is_low_float(value.dtype) else None)
    return "float" if isinstance(value, numbers.Real) or _is_decimal(value) else None


def _is_low_float(dtype: np.dtype[Any]) -> bool:
    """Know bfloat16 and its kin, which numpy holds as opaque types."""
    return dtype.kind == "V" and "float" in dtype.name


def _is_decimal(value: Any) -> bool:
    return type(value).__module__ == "decimal" and type(value).__name__ == "Decimal"


def _floats(column: list[Any] | NDArray[Any]) -> NDArray[np.float64]:
    if isinstance(column, np.ndarray):  # of a device, all of one type
        return column.astype(np.float64)
    return np.array([_as_float(value) for value in column])


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond the range of a float64
        return math.inf if value > 0 else -math.inf


def _copied(name: str, value: Any) -> Any:
    """Copy a small array; one element is a number."""
    try:
        array = np.array(value)
    except ValueError:
        raise _no_metric(name, value) from None
    check_size(name, array.shape)
    if array.dtype.kind not in _KINDS and not _is_low_float(array.dtype):
        if array.size == 0:
            return array.astype(np.float64)
        raise _no_metric(name, value)
    if array.size == 1:
        return array.reshape(()).astype(np.float64 if _is_low_float(array.dtype) else array.dtype)[
            ()
        ]
    return array.astype(np.float64) if _is_low_float(array.dtype) else array


def _check_text(name: Any) -> None:
    if not isinstance(name, str):
        raise MetricError(
            f"the key {name!r} is a {type(name).__name__}, but names are text: use {str(name)!r}."
        )


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a metric."""
    _check_text(name)
    if name in ROW_KEYS and name != "step":
        raise MetricError(
            f"the key {name!r} is a column of every record already. Choose another, for example "
            f"'my_{name}'."
        )
    if end := STATISTIC.search(name):
        raise MetricError(
            f"the key {name!r} ends in {end.group()!r}, which is kept for statistics over ranks. "
            f"Rename it, for example {name.replace(end.group(), '_' + end.group()[1:])!r}."
        )
    if not name:
        raise MetricError("a key is empty: every metric needs a name.")


def _no_metric(name: str, value: Any) -> MetricError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return MetricError(
        f"{name!r} is {shown}, a {type(value).__name__}: neither a number, nor an array of "
        "numbers, nor a text. Hand over a number, for example float(...), or str(...) to keep it "
        "as a text."
    )
