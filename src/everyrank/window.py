"""The open window: what `update` was handed since the last one closed, copied at once, read later.

A `Layout` is what one kind of call looks like: its keys and the types of its values. It is worked out
once and found again by those two, so that the usual call costs a look-up and a tuple. The background
thread packs a closed window into batches: one matrix for each run of steps that look alike.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.handed import (
    MARK,
    Finishers,
    Handed,
    HandsOver,
    column_names,
    hands_over,
)
from everyrank.records import ROW_KEYS, STATISTIC, Batch, Kind
from everyrank.stage import Block, Part, Stage, Staged, check_size, framework_of, open_stage

_EXACT = 2**53  # from here on, a float64 may stand for the int beside it
_KINDS: dict[str, Kind] = {"f": "float", "i": "int", "u": "int", "b": "bool"}
_FLOAT: list[Kind] = ["float"]
_STACKS = {"torch": "torch.stack", "jax": "jnp.stack"}


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
    kinds: tuple[Kind, ...]  # of the numbers of the host
    columns: tuple[int, ...]  # where they are
    staged: tuple[Staged, ...]  # device values, by framework
    handed: tuple[int, ...]  # metrics, which hand over their states
    copied: tuple[int, ...]  # numpy arrays and sequences, which may change later, and odd numbers
    usual: bool  # plain, and without a step
    plain: bool  # only numbers of the host: a tuple of them is already a copy
    whole: bool  # only device values of one framework

    @property
    def size(self) -> int:
        """How many values a row has."""
        return len(self.names)


def learn(metrics: Mapping[str, Any]) -> Layout:
    """Work out the layout of a flat dict, or say what in it is no metric."""
    names = tuple(map(_checked, metrics))
    staged: dict[str, list[int]] = {}
    copied: list[int] = []
    handed: list[int] = []
    kinds: dict[int, Kind] = {}
    texts = 0
    for i, (name, value) in enumerate(zip(names, metrics.values(), strict=True)):
        if name == "step":
            continue
        if kind := _host_kind(value):
            kinds[i] = kind
        elif framework := framework_of(type(value)):
            staged.setdefault(framework, []).append(i)
        elif hands_over(type(value)):
            handed.append(i)
            staged.setdefault(value.framework, []).append(i)
        elif isinstance(value, np.ndarray | list | tuple | Real) or _is_decimal(value):
            copied.append(i)
        elif isinstance(value, str | None):
            texts += 1
        else:
            raise _no_metric(name, value)
    types = tuple(map(type, metrics.values()))
    plain = not (staged or copied or texts)
    return Layout(
        names=names,
        types=types,
        metric_names=frozenset(names) - {"step"},
        step_at=names.index("step") if "step" in names else None,
        usual=plain and "step" not in names,
        kinds=tuple(kinds.values()),
        columns=tuple(kinds),
        staged=tuple(
            Staged(framework, tuple(at), tuple(names[i] for i in at), tuple(types[i] for i in at))
            for framework, at in staged.items()
        ),
        handed=tuple(handed),
        copied=tuple(copied),
        plain=plain,
        whole=not handed and [len(at) for at in staged.values()] == [len(names)],
    )


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Give nested dicts as one, their keys joined with `/`."""
    if not is_nested(metrics.values()):
        return dict(metrics)
    flat: dict[str, Any] = {}
    for name, value in _leaves(metrics, ""):
        if name in flat:
            raise MetricError(
                f"the key {name!r} comes twice: once as it is, and once from a dict in the dict. "
                "Rename one of the two."
            )
        flat[name] = value
    return flat


def is_nested(values: Iterable[Any]) -> bool:
    """Say whether there are dicts among the values."""
    return any(
        issubclass(kind, Mapping) and not hands_over(kind) for kind in set(map(type, values))
    )


def _leaves(metrics: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in metrics.items():
        _check_text(key)
        if isinstance(value, Mapping) and not hands_over(type(value)):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


class Window:
    """The rows since the last window closed."""

    def __init__(self, slots: int, stages: dict[str, Stage] | None = None) -> None:
        self.rows: list[Row] = []
        self.generation = 0
        self._slots = slots
        self._stages = {} if stages is None else stages

    @property
    def size(self) -> int:
        """How many numbers it holds, if all rows are like the last."""
        rows = self.rows
        return len(rows) * _row_size(rows[-1]) if rows else 0

    def take(self) -> list[Row]:
        """Give the rows, once: whoever takes them next finds none."""
        rows, self.rows = self.rows, []
        return rows

    def capture(
        self, layout: Layout, values: list[Any]
    ) -> tuple[tuple[Any, ...], tuple[Part, ...]]:
        """Copy what may change after the call: device values beside them, arrays into new ones."""
        if layout.whole:  # nothing to pick and to put back, which is 1 us of 12 for 20 tensors
            (staged,) = layout.staged
            parts = self._stage(staged.framework).add(staged, values)
            return (None,) * layout.size, tuple(parts)
        parts = []
        for i in layout.copied:
            values[i] = _copied(layout.names[i], values[i])
        handed: dict[int, Handed] = {}
        for i in layout.handed:
            metric: HandsOver = values[i]
            handed[i] = metric.hand_over(layout.names[i])
            _check_members(layout.names[i], handed[i].keys, layout.names)
            values[i] = handed[i].array
        for staged in layout.staged:
            parts += self._stage(staged.framework).add(staged, [values[c] for c in staged.columns])
            for column in staged.columns:
                values[column] = None  # the caller's tensor, and its graph, are let go
        for i, one in handed.items():
            values[i] = one._replace(array=None)
        return tuple(values), tuple(parts)

    def seal(self) -> Window:
        """Close the window: its values are on their way to the host. Give the one after it."""
        for stage in self._stages.values():
            stage.seal()
        after = Window(self._slots, self._stages)
        after.generation = self.generation
        return after

    def ready(self) -> bool:
        """Say whether every value has reached the host."""
        blocks = {id(p.block): p.block for row in self.rows for p in row.parts}
        # Each is asked, since asking is what starts its copy.
        states = [block.ready() for block in blocks.values()]
        return all(states)

    def _stage(self, framework: str) -> Stage:
        stage = self._stages.get(framework)
        if stage is None:
            stage = self._stages[framework] = open_stage(framework, self._slots)
        return stage


def _row_size(row: Row) -> int:
    size = row.layout.size
    if not row.layout.plain:
        copies = (row.values[i] for i in row.layout.copied)
        size += sum(value.size for value in copies if isinstance(value, np.ndarray))
        # The last value of a part ends where the part ends.
        size += sum(p.places[-1].start + math.prod(p.places[-1].shape) for p in row.parts)
    return max(1, size)


def pack(rows: Iterable[Row]) -> Iterator[Batch]:
    """Give the rows as batches, one for each run of steps that look alike."""
    return _pack(rows, _Fetched())


def handed_in(row: Row) -> Iterator[tuple[str, Handed]]:
    """Give what was handed over with an update, by name."""
    for i in row.layout.handed:
        yield row.layout.names[i], row.values[i]


@lru_cache(256)
def _check_members(name: str, keys: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Refuse a collection whose values would have names that are taken."""
    for key in keys:
        if key:
            check_name(f"{name}/{key}")
            if f"{name}/{key}" in others:
                raise MetricError(
                    f"{name!r} holds a metric {key!r}, and {name}/{key} was handed over beside it. "
                    "Rename one of the two."
                )


def values_of(row: Row) -> dict[str, Any]:
    """Give the values of one row as a record has them; waits for the device if they are there."""
    (batch,) = _pack([row], _peek)
    if row.layout.handed:
        finishers = Finishers()
        for name, handed in handed_in(row):
            finishers.learn(name, handed)
        batch, _ = finishers.finish(batch)
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
    for _, run in groupby(rows, key=_look):
        alike = list(run)
        layout = alike[0].layout
        yield _pack_plain(layout, alike) if layout.plain else _pack_mixed(layout, alike, read)


def _look(row: Row) -> tuple[Any, ...]:
    """Give what rows of one batch have in common."""
    layout = row.layout
    if layout.plain:
        return layout, row.skip
    places = [(id(part.block), part.places) for part in row.parts]
    # An array may be a number in one step and a vector in the next: names would differ.
    specs = [row.values[i].spec for i in layout.handed]
    return layout, row.skip, places, [_host_kind(row.values[i]) for i in layout.copied], specs


def _pack_plain(layout: Layout, rows: list[Row]) -> Batch:
    """Pack rows of plain numbers, which is nearly all there ever is."""
    values = [row.values for row in rows]
    numbers, names = _floats(values), layout.names
    if layout.step_at is not None:
        numbers = numbers[:, list(layout.columns)]
        names = tuple(names[c] for c in layout.columns)
    extras: dict[int, dict[str, Any]] = {}
    for r, j in _wide(numbers, layout.kinds):
        extras.setdefault(r, {})[names[j]] = int(values[r][layout.columns[j]])
    return _batch(rows, names, numbers, layout.kinds, extras)


def _pack_mixed(layout: Layout, rows: list[Row], read: _Read) -> Batch:
    """Pack rows with device values, arrays or texts, by columns."""
    columns: list[Any] = list(zip(*(row.values for row in rows), strict=True))
    for i, part in enumerate(rows[0].parts):
        data = read(part.block, [row.parts[i].slot for row in rows])
        for at, start, shape in part.places:
            if shape == ():
                columns[at] = data[:, start]
            else:
                stop = start + math.prod(shape)
                columns[at] = [row.reshape(shape) for row in data[:, start:stop]]
    names: list[str] = []
    kinds: list[Kind] = []
    numeric: list[Any] = []
    extras: dict[int, dict[str, Any]] = {}
    for i, (name, column) in enumerate(zip(layout.names, columns, strict=True)):
        if i == layout.step_at:
            continue
        if i in layout.handed:
            states = column_names(name, rows[0].values[i].spec)
            names += states
            kinds += _FLOAT * len(states)
            numeric.extend(np.stack([np.reshape(value, -1) for value in column], axis=1))
            continue
        if kind := _host_kind(column[0]):
            names.append(name)
            kinds.append(kind)
            numeric.append(column)
            continue
        for r, value in enumerate(column):
            extras.setdefault(r, {})[name] = value
    numbers = np.empty((len(rows), len(names)))
    for j, column in enumerate(numeric):
        numbers[:, j] = _floats(column)
    for r, j in _wide(numbers, kinds):
        extras.setdefault(r, {})[names[j]] = int(numeric[j][r])
    return _batch(rows, tuple(names), numbers, tuple(kinds), extras)


def _batch(
    rows: list[Row],
    names: tuple[str, ...],
    numbers: NDArray[np.float64],
    kinds: tuple[Kind, ...],
    extras: Mapping[int, Mapping[str, Any]],
) -> Batch:
    steps = np.array([row.step for row in rows], np.int64)
    times = np.array([row.time for row in rows], np.float64)
    return Batch(steps, times, names, numbers, kinds, extras, skip=rows[0].skip)


def _wide(numbers: NDArray[np.float64], kinds: Sequence[Kind]) -> list[tuple[int, int]]:
    """Say which ints a float64 may not hold exactly, by row and column."""
    ints = [j for j, kind in enumerate(kinds) if kind == "int"]
    if not ints:
        return []
    wide = np.argwhere(~(np.abs(numbers[:, ints]) < _EXACT))
    return [(r, ints[j]) for r, j in wide.tolist()]


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
    return None


def _is_low_float(dtype: np.dtype[Any]) -> bool:
    """Know bfloat16 and its kin, which are no types of numpy's own."""
    return dtype.isbuiltin == 2 and "float" in dtype.name


def _is_decimal(value: Any) -> bool:
    return type(value).__module__ == "decimal" and type(value).__name__ == "Decimal"


def _floats(values: Any) -> NDArray[np.float64]:
    """Give numbers of the host, in rows or in one, as float64; what is too large is infinite."""
    with np.errstate(over="ignore"):
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:  # an int
            return np.array([_as_float(value) for value in values])


def _as_float(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_float(number) for number in value]
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _copied(name: str, value: Any) -> Any:
    """Copy a small array, or convert an odd number; one element is a number."""
    if not isinstance(value, np.ndarray | list | tuple):
        try:
            return _as_float(value)
        except (TypeError, ValueError):  # such as a NaN that signals
            raise _no_metric(name, value) from None
    array = _as_array(name, value)
    check_size(name, array.shape)
    if not array.size:
        return np.empty(array.shape)
    if _is_low_float(array.dtype):
        array = array.astype(np.float64)
    elif array.dtype.kind not in _KINDS:
        raise _no_metric(name, value)
    return array.reshape(())[()] if array.size == 1 else array


def _as_array(name: str, value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray) and (framework := _framework_in(value)):
        raise MetricError(
            f"{name!r} is a {type(value).__name__} of {framework} values, which would have to be "
            f"read one by one. Hand over one array, for example {_STACKS[framework]}({name})."
        )
    try:
        if isinstance(value, np.ma.MaskedArray):  # what is masked is not known
            known: NDArray[Any] = np.ma.filled(value.astype(np.float64), np.nan)
            return known
        return np.array(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_metric(name, value) from None


def _framework_in(values: Iterable[Any]) -> str | None:
    """Name a framework whose values are in a sequence, or in one inside it."""
    for kind in set(map(type, values)):
        if issubclass(kind, list | tuple):
            found = (_framework_in(inner) for inner in values if type(inner) is kind)
            framework = next(filter(None, found), None)
        else:
            framework = framework_of(kind)
        if framework:
            return framework
    return None


def _check_text(name: Any) -> None:
    if not isinstance(name, str):
        raise MetricError(
            f"the key {name!r} is of type {type(name).__name__}, but names are text: use {str(name)!r}."
        )


def _checked(name: Any) -> str:
    check_name(name)
    return str.__str__(name)  # not as the member of an enum or the text of numpy that it may be


def check_name(name: Any) -> None:
    """Refuse what cannot be the name of a metric."""
    _check_text(name)
    if name.startswith(MARK):
        raise MetricError(f"the key {name!r} begins as states in transit do. Rename it.")
    if name in ROW_KEYS and name != "step":
        raise MetricError(
            f"the key {name!r} is a column of every record already. Choose another, for example "
            f"'my_{name}'."
        )
    if end := STATISTIC.search(name):
        raise MetricError(
            f"the key {name!r} ends in {end.group()!r}, which is kept for statistics over ranks. "
            f"Rename it, for example {name[: end.start()] + '_' + end[1]!r}."
        )
    if not name:
        raise MetricError("a key is empty: every metric needs a name.")


def _no_metric(name: str, value: Any) -> MetricError:
    if hasattr(value, "compute") and hasattr(value, "trigger_sync"):
        return MetricError(
            f"{name!r} is a metric that does not declare its states, so nothing but itself can bring "
            f"its ranks together. Call its sync(), and hand over its compute()."
        )
    shown = " ".join(reprlib.repr(value).split())  # on one line
    return MetricError(
        f"{name!r} is {shown} (of type {type(value).__name__}): neither a number, nor an array of "
        "numbers, nor a text. Hand over a number, for example float(...), or str(...) to keep it as "
        "a text."
    )
