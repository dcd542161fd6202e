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
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
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

#: Name, kind and numbers of one column.
_Column = tuple[str, Kind, Any]


class Handed(NamedTuple):
    """What a metric hands over: its states where they lie, and what becomes of them."""

    spec: str  # class, options and states, in JSON
    array: Any  # of its framework; let go of once it is staged
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
    "%r has no values: %s. Hand over the same metric on every rank, one that is finished by operators "
    "and arrays_of() (said once)."
)
_DIFFERENT = (
    "ranks hand over different metrics as %r: recorded is that of the first rank, over those that have "
    "the same. Give them names of their own (said once)."
)


class Finishers:
    """What was handed over here, and how the rest is finished."""

    def __init__(self) -> None:
        self._known: dict[str, Finish | None] = {}
        self._said: set[tuple[str, str]] = set()

    def learn(self, handed: Handed) -> None:
        """Remember how a metric that was handed over here is finished."""
        self._known[handed.spec] = handed.finish

    def finish(self, batch: Batch) -> tuple[Batch, Batch | None]:
        """Give a batch with values in place of states, and these values by themselves."""
        groups = groups_of(batch.names)
        if not groups:
            return batch, None
        columns: list[_Column] = []
        extras: dict[int, dict[str, Any]] = {}
        ends: dict[
            int, int
        ] = {}  # behind which column of the batch so many of ours have their place
        taken: set[str] = set()
        for group in groups:
            if group.name in taken:
                self._say(group.name, _DIFFERENT)
                continue
            taken.add(group.name)
            for name, values in self._values(group, batch).items():
                if all(np.ndim(value) == 0 for value in values):
                    columns.append((name, _kind(values), np.array(values, np.float64)))
                else:
                    for row, value in enumerate(values):
                        extras.setdefault(row, {})[name] = np.asarray(value)
            ends[group.columns[-1]] = len(columns)
        return _in_place(batch, columns, extras, ends), _batch(batch, columns, extras)

    def _values(self, group: Group, batch: Batch) -> dict[str, list[Any]]:
        """Finish every row of one metric; what comes as a dict has a name for each entry."""
        finish = self._finish_of(group)
        values: dict[str, list[Any]] = {}
        for row in batch.numbers[:, group.columns] if finish is not None else ():
            try:
                value = finish(row) if finish is not None else None
            except Exception as error:  # noqa: BLE001 - the border: it is the user's formula
                self._say(group.name, _FAILED, f"{type(error).__name__}: {error}")
                return {}
            entries = value.items() if isinstance(value, Mapping) else [("", value)]
            for key, entry in entries:
                values.setdefault(f"{group.name}/{key}" if key else group.name, []).append(entry)
        return values

    def _finish_of(self, group: Group) -> Finish | None:
        if group.spec not in self._known:
            self._known[group.spec] = made_again(json.loads(group.spec))
            if self._known[group.spec] is None:
                self._say(group.name, _FAILED, "its class or its options are not known here")
        return self._known[group.spec]

    def _say(self, name: str, text: str, *why: str) -> None:
        if (name, text) not in self._said:
            self._said.add((name, text))
            log.warning(text, name, *why)


def made_again(spec: Mapping[str, Any]) -> Finish | None:
    """Make a metric of what another rank said of it, if its class was imported here."""
    room = sys.modules.get("everyrank.metrics.handing")
    if room is None:
        return None
    made: Finish | None = room.made_again(spec)
    return made


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


def _kind(values: Sequence[Any]) -> Kind:
    whole = all(isinstance(value, int | np.integer) for value in values)
    return "int" if whole and not any(isinstance(value, bool) for value in values) else "float"
