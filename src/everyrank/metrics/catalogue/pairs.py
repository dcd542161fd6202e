"""Arrays that belong together, and options: what metrics check before they take anything in.

Only shapes are looked at, which the host knows; no value is read.
"""

from __future__ import annotations

import math
from typing import Any

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import MetricError, OptionError


def pair_of(**two: Any) -> tuple[Arrays, Any, Any]:
    """Give the array functions and two arrays of one shape as wide floats."""
    (first, a), (second, b) = two.items()
    xp = arrays_of(a)
    if a.shape != b.shape:
        raise MetricError(
            f"`{first}` has the shape {tuple(a.shape)}, but `{second}` {tuple(b.shape)}. Both must "
            f"have one shape; {_reshaped(first, a, second, b)}."
        )
    return xp, xp.wide(a), xp.wide(b)


def spread(xp: Arrays, weights: Any, values: Any) -> Any:
    """Give weights in the shape of `values`: one for each, for each sample, or one for all."""
    shape = tuple(weights.shape)
    if shape != tuple(values.shape[: len(shape)]):
        raise MetricError(
            f"`weights` has the shape {shape}, which is not how the shape of the values begins: "
            f"{tuple(values.shape)}. Pass one weight for each value, or one for each sample."
        )
    weights = xp.wide(weights).reshape(shape + (1,) * (values.ndim - len(shape)))
    return xp.where(xp.isnan(values), weights, weights)  # to be had in every framework


def weighted(xp: Arrays, values: Any, weights: Any) -> tuple[Any, Any]:
    """Give the weighted sum of values, and the sum of the weights.

    A weight of zero leaves its value out, also if that is NaN.
    """
    if weights is None:
        return xp.total(values), math.prod(values.shape)
    weights = spread(xp, weights, values)
    return xp.total(xp.where(weights == 0, 0.0, weights * values)), xp.total(weights)


def positive_int(name: str, value: Any) -> int:
    """Check an option that counts something."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"{name}={value!r} must be a whole number of at least 1, such as {name}=10."
        )
    return value


def _reshaped(first: str, a: Any, second: str, b: Any) -> str:
    """Give the next step for two arrays of different shapes."""
    if math.prod(a.shape) == math.prod(b.shape):
        return f"for example {second}.reshape({first}.shape)"
    return "look at where they are sliced or padded"
