"""Metrics that were handed to a History: their states travel among the rows, and are finished behind.

    window ──> states as columns ──> ranks (merged) ──> finished ──> records

What is handed over is a `Handed`: an array of all states, and what to do with it later. On the way its
numbers are columns like any other, under names that nobody else can have; the first of them says what
the states are, so that each rank, also one that was handed nothing, can merge and finish them.

* **One reduction.** They travel with the rows of their window: no message and no collective more.
* **Agreement.** Metrics of one name that differ in class, options or states are never merged.
* **Failure.** A metric that cannot be finished is said once, and costs its own values only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everyrank.arrays import arrays_of
from everyrank.messages import log
from everyrank.operators import OPERATORS
from everyrank.records import Batch, Kind

#: No name of a user's begins with it.
MARK = "\0everyrank.state\0"

Floats = NDArray[np.float64]

#: From all states of a metric, as one vector, to its value: a number, an array, or a dict of these.
Finish = Callable[[Floats], Any]

_Value = NDArray[Any]

#: Name, kind and numbers of one column.
_Column = tuple[str, Kind, Any]


class Handed(NamedTuple):
    """What a metric hands over: its states where they lie, and what becomes of them."""

    spec: str  # class, options and states, in JSON
    array: Any  # of its framework; let go of once it is staged
    keys: tuple[str, ...]  # of a collection; ("",) of one metric
    finish: Finish
    done: Callable[[], object]  # begins the metric's next window, once the update is recorded


class HandsOver(Protocol):
    """A value of `update` that hands over states."""

    framework: str

    def hand_over(self, name: str) -> Handed:
        """Give the states as one array, or say why that cannot be."""
        ...


class Group(NamedTuple):
    """The columns of one metric among those of a batch."""

    name: str
    spec: str
    columns: tuple[int, ...]

    @property
    def operators(self) -> list[tuple[str, int]]:
        """The operators of the states in their order, each with how many numbers it merges."""
        return operators_of(self.spec)


def hands_over(kind: type) -> bool:
    """Say whether values of this type hand over states."""
    return hasattr(kind, "hand_over")


def is_state(name: str) -> bool:
    """Say whether a column is a state rather than a metric of its own."""
    return name.startswith(MARK)


@lru_cache(256)
def column_names(name: str, spec: str) -> tuple[str, ...]:
    """Name the columns of a metric's states; the first name says it all."""
    width = sum(n for _, n in operators_of(spec))
    digest = blake2b(json.dumps([name, spec]).encode(), digest_size=8).hexdigest()
    first = json.dumps([name, spec])
    return tuple(f"{MARK}{digest} {i or first}" for i in range(width))


@lru_cache(256)
def operators_of(spec: str) -> list[tuple[str, int]]:
    """Read the operators from what a metric says of itself."""
    return [(operator, width) for operator, width in json.loads(spec)["states"]]


@lru_cache(256)
def groups_of(names: tuple[str, ...]) -> tuple[Group, ...]:
    """Find the metrics among the names of columns."""
    found: dict[str, tuple[str, str]] = {}
    columns: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        if is_state(name):
            digest, _, rest = name.removeprefix(MARK).partition(" ")
            if digest not in columns:  # the first of them, which says it all
                name, spec = json.loads(rest)
                found[digest] = (name, spec)
            columns.setdefault(digest, []).append(at)
    return tuple(Group(*found[digest], tuple(at)) for digest, at in columns.items())


def merge_states(group: Group, parts: Sequence[Floats]) -> Floats:
    """Merge the states of several ranks, each a row a step, in the order of the ranks."""
    merged = parts[0]
    for part in parts[1:]:
        merged = np.concatenate(list(_merged(group, merged, part)), axis=1)
    return merged


def _merged(group: Group, a: Floats, b: Floats) -> Iterator[Floats]:
    at = 0
    xp = arrays_of(a)
    for operator, width in group.operators:
        here = slice(at, at + width)
        at += width
        with np.errstate(all="ignore"):
            both = OPERATORS[operator].merge(xp, a[:, here].reshape(-1), b[:, here].reshape(-1))
        yield both.reshape(-1, width)


_FAILED = (
    "%r has no values, or not all of them: %s. Hand over the same metric on every rank, one whose "
    "finish gives numbers (said once)."
)
_DIFFERENT = (
    "%r stands for different metrics, or for a metric and a number: recorded is the first of them, "
    "over the ranks that have the same. Give them names of their own (said once)."
)


class Finishers:
    """What was handed over here, and how the rest is finished."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Finish | None] = {}  # by name and what it says of itself
        self._said: set[tuple[str, str]] = set()

    def learn(self, name: str, handed: Handed) -> None:
        """Remember how a metric that was handed over here is finished."""
        self._known[name, handed.spec] = handed.finish

    def finish(self, batch: Batch) -> tuple[Batch, Batch | None]:
        """Give a batch with values in place of states, and these values by themselves."""
        groups = groups_of(batch.names)
        if not groups:
            return batch, None
        columns: list[_Column] = []
        extras: dict[int, dict[str, Any]] = {}
        ends: dict[int, int] = {}  # behind which column of the batch so many of ours belong
        taken = {name for name in batch.names if not is_state(name)}
        for group in groups:
            for name, values in self._values(group, batch).items():
                if name in taken:
                    self._say(name, _DIFFERENT)
                    continue
                taken.add(name)
                known = [value for value in values if value is not None]
                if all(value.ndim == 0 for value in known):
                    columns.append((name, _kind(known), _numbers(values)))
                else:
                    for row, value in enumerate(values):
                        if value is not None:
                            extras.setdefault(row, {})[name] = value
            ends[group.columns[-1]] = len(columns)
        return _in_place(batch, columns, extras, ends), _batch(batch, columns, extras)

    def _values(self, group: Group, batch: Batch) -> dict[str, list[_Value | None]]:
        """Finish every row of one metric; what comes as a dict has a name for each entry."""
        finish = self._finish_of(group)
        values: dict[str, list[_Value | None]] = {}
        if finish is None:
            return values
        for at, row in enumerate(batch.numbers[:, group.columns]):
            try:
                found = dict(_entries(group.name, finish(row)))
            except Exception as error:  # noqa: BLE001 - the border: it is the user's formula
                self._say(group.name, _FAILED, f"{type(error).__name__}: {error}")
                continue
            for name, value in found.items():
                values.setdefault(name, [None] * len(batch))[at] = value
        return values

    def _finish_of(self, group: Group) -> Finish | None:
        key = group.name, group.spec
        if key not in self._known:
            self._known[key] = made_again(json.loads(group.spec))
            if self._known[key] is None:
                self._say(group.name, _FAILED, "its class or its options are not known here")
        return self._known[key]

    def _say(self, name: str, text: str, *why: str) -> None:
        if (name, text) not in self._said:
            self._said.add((name, text))
            log.warning(text, name, *why)


def made_again(spec: Mapping[str, Any]) -> Finish | None:
    """Make a metric of what another rank said of it; None if it is not known here."""
    # Looked for now, since a rank that was handed nothing has not needed it yet.
    made: Finish | None = import_module("everyrank.metrics.handing").made_again(spec)
    return made


def _entries(name: str, value: Any) -> Iterator[tuple[str, _Value]]:
    """Give the numbers and arrays of a value by name; raises for what is neither."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _entries(f"{name}/{key}", entry)
        return
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"finish gave {value!r}, which is no number and no array of numbers")
    yield name, array


def without_states(batch: Batch) -> Batch:
    """Give a batch without the states in it."""
    at = [j for j, name in enumerate(batch.names) if not is_state(name)]
    if len(at) == len(batch.names):
        return batch
    return replace(
        batch,
        names=tuple(batch.names[j] for j in at),
        kinds=tuple(batch.kinds[j] for j in at),
        numbers=batch.numbers[:, at],
    )


def _batch(batch: Batch, columns: Sequence[_Column], extras: Mapping[int, Any]) -> Batch:
    """Give the rows of a batch with these columns."""
    numbers = np.stack([c for *_, c in columns], axis=1) if columns else np.empty((len(batch), 0))
    names, kinds = tuple(name for name, *_ in columns), tuple(kind for _, kind, _ in columns)
    return replace(batch, names=names, kinds=kinds, numbers=numbers, extras=extras)


def _in_place(
    batch: Batch,
    values: Sequence[_Column],
    extras: Mapping[int, Mapping[str, Any]],
    ends: Mapping[int, int],
) -> Batch:
    """Give a batch with values where the states were."""
    columns: list[_Column] = []
    at = 0
    for j, name in enumerate(batch.names):
        if not is_state(name):
            columns.append((name, batch.kinds[j], batch.numbers[:, j]))
        if j in ends:
            columns += values[at : ends[j]]
            at = ends[j]
    both = {row: dict(some) for row, some in batch.extras.items()}
    for row, some in extras.items():
        both.setdefault(row, {}).update(some)
    return _batch(batch, columns, both)


def _kind(values: Sequence[_Value]) -> Kind:
    return "int" if all(value.dtype.kind in "iu" for value in values) else "float"


def _numbers(values: Sequence[_Value | None]) -> Floats:
    return np.array([np.nan if value is None else float(value) for value in values])
