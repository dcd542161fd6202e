"""The array functions that metrics are written in, the same for torch, JAX and numpy.

What arrays do by themselves (`+`, `<`, `abs()`, indexing, `.shape`, `.reshape`) is not in here; the
rest is asked of the room that belongs to the array in hand:

    >>> import numpy as np
    >>> values = np.array([0.5, 1.5])
    >>> xp = arrays_of(values)
    >>> float(xp.total(xp.sqrt(values)))
    1.931...

Every room has the functions of `Arrays`. Sums are kept in wide floats: 64 bits, or 32 where a device
or JAX has no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from numbers import Number
from typing import Any, Protocol

import numpy as np

from everyrank.errors import MetricError
from everyrank.stage import framework_of

Axis = int | tuple[int, ...] | None


class Arrays(Protocol):
    """What every room has; `x` is an array of its framework, and so are the answers."""

    name: str

    def array(self, x: Any) -> Any:
        """Take numbers, lists and numpy arrays as an array."""
        ...

    def is_float(self, x: Any) -> bool:
        """Say whether it holds floats, as scores do and labels do not."""
        ...

    def wide(self, x: Any) -> Any:
        """Give wide floats."""
        ...

    def whole(self, x: Any) -> Any:
        """Give integers, as labels and counts are."""
        ...

    def total(self, x: Any, axis: Axis = None) -> Any:
        """Sum up in wide floats; truth values count as 0 and 1."""
        ...

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Choose element by element."""
        ...

    def isnan(self, x: Any) -> Any:
        """Say which elements are NaN."""
        ...

    def sqrt(self, x: Any) -> Any:
        """Give the square root, NaN of what is negative."""
        ...

    def log(self, x: Any) -> Any:
        """Give the natural logarithm, -inf of 0."""
        ...

    def exp(self, x: Any) -> Any:
        """Give e to the power of x."""
        ...

    def logsumexp(self, x: Any, axis: int = -1) -> Any:
        """Give the logarithm of the sum of exponentials, in floats of at least 32 bits."""
        ...

    def floor(self, x: Any) -> Any:
        """Round down."""
        ...

    def clip(self, x: Any, low: float | None, high: float | None) -> Any:
        """Bring what lies outside to the nearer end; NaN stays."""
        ...

    def maximum(self, x: Any, y: Any) -> Any:
        """Give the larger of two, element by element; NaN if either is."""
        ...

    def minimum(self, x: Any, y: Any) -> Any:
        """Give the smaller of two, element by element; NaN if either is."""
        ...

    def highest(self, x: Any, axis: Axis = None) -> Any:
        """Give the maximum, NaN if there is any."""
        ...

    def lowest(self, x: Any, axis: Axis = None) -> Any:
        """Give the minimum, NaN if there is any."""
        ...

    def argmax(self, x: Any, axis: int = -1) -> Any:
        """Say where the maximum is: the first, if there are several."""
        ...

    def argsort(self, x: Any, axis: int = -1) -> Any:
        """Give the order from low to high; of equals, the first comes first."""
        ...

    def take(self, x: Any, index: Any, axis: int = -1) -> Any:
        """Take elements along an axis, as `take_along_axis` of numpy."""
        ...

    def cumsum(self, x: Any, axis: int = -1) -> Any:
        """Give running sums."""
        ...

    def cumprod(self, x: Any, axis: int = -1) -> Any:
        """Give running products."""
        ...

    def arange(self, n: int, like: Any) -> Any:
        """Give the integers below n, on the device of `like`."""
        ...

    def constant(self, values: float | Sequence[float], like: Any) -> Any:
        """Give wide floats on the device of `like`."""
        ...

    def counts(self, index: Any, size: int, weights: Any = None) -> Any:
        """Count how often each of the integers below `size` occurs, as wide floats.

        Every index is from 0 to `size` - 1. Weights are floats, or truth values that say which count.
        """
        ...

    def pair_counts(self, rows: Any, columns: Any, size: int, weights: Any = None) -> Any:
        """Count how often each pair of integers below `size` occurs, as size * size wide floats.

        What is outside is counted somewhere: see `outside`.
        """
        ...

    def outside(self, x: Any, size: int) -> Any:
        """Say whether any integer is not from 0 to `size` - 1; there is at least one."""
        ...

    def stack(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Put arrays of one shape beside each other."""
        ...

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        """Put arrays behind each other."""
        ...


#: Of the types that were met; a room adds those that torch.compile could not look for.
BY_TYPE: dict[type, Arrays] = {}


def arrays_of(x: Any) -> Arrays:
    """Give the array functions of the framework that `x` is of."""
    # Looked up by type alone, which torch.compile follows.
    return BY_TYPE.get(type(x)) or _find(type(x))


def _find(kind: type) -> Arrays:
    room = framework_of(kind)
    if room is None and issubclass(kind, np.ndarray | np.generic | Number):
        room = "numpy"
    if room is None:
        raise MetricError(
            f"a {kind.__module__}.{kind.__name__} is no array of torch, JAX or numpy. Convert it "
            "first, for example with torch.as_tensor()."
        )
    arrays: Arrays = import_module(f"everyrank.arrays.{room}").ARRAYS
    BY_TYPE[kind] = arrays
    return arrays
