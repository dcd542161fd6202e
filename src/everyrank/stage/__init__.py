"""Copy values where they are, so that the caller may overwrite them, and read them later.

A `Stage` belongs to one open window and one framework. `add` copies the values of one update with as
few device operations as there are dtypes, usually one, and reads nothing back. `seal` marks the end
of the window. Then, on the background thread, the staged blocks become `ready` and are fetched.

The framework is known by the value in hand: nobody pays for the one they do not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from everyrank.errors import MetricError

#: An array with more elements than this is data, not a metric.
MAX_ELEMENTS = 65_536

_FRAMEWORKS = {"torch": "torch", "jax": "jax", "jaxlib": "jax"}


class Block(Protocol):
    """Copies of the values of several updates, on the device where they were."""

    def ready(self) -> bool:
        """Say whether `fetch` would not wait; starts the way to the host when first asked."""
        ...

    def fetch(self) -> NDArray[Any]:
        """Give one row for each slot as float64, int64 or bool."""
        ...

    def peek(self, slot: int) -> NDArray[Any]:
        """Give one row, also while the window is open; waits for the device."""
        ...


class Place(NamedTuple):
    """Where one value of an update lies in a row of its block."""

    column: int
    start: int
    shape: tuple[int, ...]  # () for a number


class Part(NamedTuple):
    """The values of one update that lie in one block."""

    block: Block
    slot: int
    places: tuple[Place, ...]


class Stage(Protocol):
    """The staged values of one open window, for one framework."""

    def add(self, columns: Sequence[int], names: Sequence[str], values: list[Any]) -> list[Part]:
        """Copy the values of one update; `columns` and `names` say whose they are."""
        ...

    def seal(self) -> None:
        """Note that no more is added, on the streams that made the values."""
        ...


def framework_of(kind: type) -> str | None:
    """Name the framework whose values are of this type, or None."""
    for base in kind.__mro__:
        if name := _FRAMEWORKS.get(base.__module__.partition(".")[0]):
            return name
    return None


def open_stage(framework: str, slots: int) -> Stage:
    """Open the stage of a framework for a window of `slots` updates."""
    stage: Stage = import_module(f"everyrank.stage.{framework}").open_stage(slots)
    return stage


def check_size(name: str, shape: Sequence[int]) -> None:
    """Refuse what is data rather than a metric."""
    if np.prod(shape, dtype=np.int64) > MAX_ELEMENTS:
        raise MetricError(
            f"{name!r} is an array of shape {tuple(shape)}, which is too large for a metric "
            f"(at most {MAX_ELEMENTS:,} elements). Reduce it first, for example {name}.mean()."
        )
