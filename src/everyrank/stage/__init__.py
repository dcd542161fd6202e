"""Copy values where they are, so that the caller may overwrite them, and read them later.

A `Stage` copies the values of one framework. `add` copies those of one update with as few device
operations as there are dtypes, usually one, and reads nothing back. `seal` ends a window: what is
added later lies in other blocks. Then, on the background thread, the staged blocks become `ready`
and are fetched.

The framework is known by the value in hand: nobody pays for the one they do not use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from everyrank.errors import MetricError

#: An array with more elements than this is data, not a metric.
MAX_ELEMENTS = 65_536

#: The framework of a type, by package and name of one of its bases. Not by package alone: a
#: torch.Size or a module of one's own is of torch as well, and no value.
_FRAMEWORKS = {
    ("torch", "Tensor"): "torch",
    ("jaxlib", "ArrayImpl"): "jax",
    ("jax", "Tracer"): "jax",
}


class Block(Protocol):
    """Copies of the values of several updates, on the device where they were."""

    def ready(self) -> bool:
        """Say whether `fetch` would not wait; starts the way to the host when first asked."""
        ...

    def fetch(self) -> NDArray[Any]:
        """Give one row for each slot as float64, int64, uint64 or bool."""
        ...

    def peek(self, slot: int) -> NDArray[Any]:
        """Give one row, also while the window is open; waits for the device."""
        ...

    def row(self, slot: int) -> Any:
        """Give one row where it lies, as a flat array of the framework."""
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


@dataclass(eq=False, slots=True)
class Staged:
    """Which values of an update are of one framework, for all updates that look alike."""

    framework: str
    columns: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    types: tuple[type, ...] = ()
    plan: Any = None  # how the stage copied them the last time, which is how it will the next


class Stage(Protocol):
    """The way from the values of one framework to blocks."""

    def add(self, staged: Staged, values: list[Any]) -> list[Part]:
        """Copy the values of one update; `staged` says whose they are."""
        ...

    def seal(self) -> None:
        """End a window, on the streams that made its values."""
        ...


def framework_of(kind: type) -> str | None:
    """Name the framework whose values are of this type, or None."""
    for base in kind.__mro__:
        if name := _FRAMEWORKS.get((base.__module__.partition(".")[0], base.__name__)):
            return name
    return None


def open_stage(framework: str, slots: int) -> Stage:
    """Open the stage of a framework for windows of `slots` updates."""
    stage: Stage = import_module(f"everyrank.stage.{framework}").open_stage(slots)
    return stage


def check_size(name: str, shape: Sequence[int]) -> None:
    """Refuse what is data rather than a metric."""
    if math.prod(shape) > MAX_ELEMENTS:
        raise MetricError(
            f"{name!r} is an array of shape {tuple(shape)}, which is too large for a metric "
            f"(at most {MAX_ELEMENTS:,} elements). Reduce it first, for example {name}.mean()."
        )
