"""The operators: what is left of each element, how such remainders combine, how they finish.

An operator *lifts* elements to parts, each with the way in which parts combine: "sum", "max" or "min".
Combining is done by others: over the elements of an array, over the devices that hold its pieces, or
both. Then the operator *finishes* the combined parts. So the same rows serve numpy on the host, jit
over a mesh, and shard_map.

    >>> import numpy as np
    >>> mean = OPERATORS["mean"]
    >>> [(part.how, float(part.value.sum())) for part in mean.lift(np, np.array([1, 2]))]
    [('sum', 3.0)]
    >>> float(mean.finish(np, [np.float64(3.0)], 2, np.dtype(int)))
    1.5

Elements are widened before they combine: narrow floats to 32 bits, narrow integers to those that a
sum of JAX has, and integers to floats for a mean. Results have the dtypes that numpy and `jax.numpy`
give.

A NaN travels beside the extremes as a part of its own. XLA's all-reduce on CPU drops NaN from max and
min, and so may others: `jnp.max` of an array on 8 devices with a NaN in it gives a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

#: numpy or jax.numpy: an operator is the same in both.
Numpy = Any


class Part(NamedTuple):
    """One array that is left of a metric, and how it combines: "sum", "max" or "min"."""

    how: str
    value: Any


class Operator(NamedTuple):
    """One way to reduce; `finish` gets the parts, the number of elements and their dtype."""

    lift: Callable[..., tuple[Part, ...]]
    finish: Callable[[Numpy, Sequence[Any], int, Any], Any]


def _lift_mean(xp: Numpy, x: Any) -> tuple[Part, ...]:
    return (Part("sum", x.astype(_accumulator(xp, x.dtype))),)


def _finish_mean(xp: Numpy, parts: Sequence[Any], count: int, dtype: Any) -> Any:
    return (parts[0] / count).astype(_inexact(xp, dtype))


def _lift_sum(xp: Numpy, x: Any) -> tuple[Part, ...]:
    wide = _accumulator(xp, x.dtype) if _is_inexact(x.dtype) else _integer(xp, x.dtype)
    return (Part("sum", x.astype(wide)),)


def _finish_sum(xp: Numpy, parts: Sequence[Any], count: int, dtype: Any) -> Any:
    del count
    return parts[0].astype(dtype if _is_inexact(dtype) else _integer(xp, dtype))


def _lift_max(xp: Numpy, x: Any) -> tuple[Part, ...]:
    x = x.astype(_ordered(x.dtype))
    if not _is_inexact(x.dtype):
        return (Part("max", x),)
    return Part("max", x), Part("max", xp.isnan(x).astype(x.dtype))


def _lift_min(xp: Numpy, x: Any) -> tuple[Part, ...]:
    x = x.astype(_ordered(x.dtype))
    if not _is_inexact(x.dtype):
        return (Part("min", x),)
    # Negative where there is a NaN, so that both parts of a minimum are minima: one all-reduce.
    return Part("min", x), Part("min", -xp.isnan(x).astype(x.dtype))


def _finish_extreme(xp: Numpy, parts: Sequence[Any], count: int, dtype: Any) -> Any:
    del count
    value, *nans = parts
    for nan in nans:
        value = xp.where(nan != 0, xp.nan, value)
    return value.astype(dtype)


def _lift_weighted(xp: Numpy, x: Any, weight: Any) -> tuple[Part, ...]:
    x = x.astype(_accumulator(xp, x.dtype))
    weight = xp.broadcast_to(weight.astype(_accumulator(xp, weight.dtype)), x.shape)
    # What has no weight has nothing to say, not even NaN.
    return Part("sum", xp.where(weight == 0, 0, weight * x)), Part("sum", weight)


def _finish_weighted(xp: Numpy, parts: Sequence[Any], count: int, dtype: Any) -> Any:
    del count
    total, weight = parts
    return xp.where(weight == 0, xp.nan, total / weight).astype(_inexact(xp, dtype))


OPERATORS = {
    "mean": Operator(_lift_mean, _finish_mean),
    "sum": Operator(_lift_sum, _finish_sum),
    "max": Operator(_lift_max, _finish_extreme),
    "min": Operator(_lift_min, _finish_extreme),
    "weighted mean": Operator(_lift_weighted, _finish_weighted),
}


def is_complex(dtype: Any) -> bool:
    """Say whether numbers of this dtype have no order."""
    return bool(jnp.issubdtype(dtype, np.complexfloating))


def _is_inexact(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.inexact))


def _inexact(xp: Numpy, dtype: Any) -> Any:
    """Give the dtype of a mean."""
    return dtype if _is_inexact(dtype) else xp.result_type(float)


def _accumulator(xp: Numpy, dtype: Any) -> Any:
    """Give the dtype in which a mean is summed up."""
    dtype = np.dtype(_inexact(xp, dtype))
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def _integer(xp: Numpy, dtype: Any) -> Any:
    """Give the dtype in which integers are summed up: 64 bits, or 32 if JAX is kept to these."""
    wide = np.dtype(xp.result_type(int))
    unsigned = jnp.issubdtype(dtype, np.unsignedinteger)
    return np.dtype(f"u{wide.name}") if unsigned else wide


def _ordered(dtype: Any) -> Any:
    """Give a dtype with the same values, in the same order, that every collective knows."""
    if np.dtype(dtype).itemsize >= 4:
        return dtype
    return np.dtype(np.float32 if _is_inexact(dtype) else np.int32)
