"""The array functions of JAX.

Where it has no 64 bits, a float32 has no room for what counts add up to. Truth values are summed up,
and occurrences counted, as integers then, and sums of integers are rounded once, at the end.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from everyrank.arrays import Axis
from everyrank.arrays.numpy import NumpyLike

#: So many numbers of 8 bits can be added up in 32.
_MOST = 1 << 23


class JaxArrays(NumpyLike):
    """The functions of JAX; without 64 bits some totals and counts are integers."""

    def array(self, x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic) and not _fits(x):
            x = np.asarray(x, np.float64)  # JAX would take the lower half of the bits
        try:
            return self._xp.asarray(x)
        except OverflowError:
            return self._xp.asarray(np.asarray(x, np.float64))

    def total(self, x: Any, axis: Axis = None) -> Any:
        if not self.is_whole(x):
            return super().total(x, axis)
        if not x.ndim or math.prod(x.shape) * _largest(x.dtype) < 2**31:
            return self._xp.sum(x, axis=axis, dtype=_total_dtype(x.dtype))
        high, rest = self.exact_total(x, axis)
        return high + rest

    def exact_total(self, x: Any, axis: Axis = None) -> tuple[Any, Any]:
        """Sum up integers of at most 32 bits as two floats; the second is what the first lost."""
        if math.prod(x.shape) > _MOST:  # rounded, as sums of floats are
            return super().total(x, axis), 0.0
        x = x.astype(_total_dtype(x.dtype))
        high, rest = split(self._xp.sum(x & 255, axis=axis))
        for bits in (8, 16, 24):
            part = x >> bits if bits == 24 else (x >> bits) & 255
            more = split(self._xp.sum(part, axis=axis, dtype=x.dtype))
            high, rest = two_sum(high, more[0] * 2.0**bits, rest + more[1] * 2.0**bits)
        return two_sum(high, rest)

    def counts(self, index: Any, size: int, weights: Any = None) -> Any:
        if self._wide == np.float64 or not (weights is None or weights.dtype == np.bool_):
            return super().counts(index, size, weights)
        ones = 1 if weights is None else weights.astype(np.int32)
        return self._added(self._xp.zeros(size, np.int32), index, ones)

    def _added(self, found: Any, index: Any, weights: Any) -> Any:
        return found.at[index].add(weights)

    def is_whole(self, x: Any) -> bool:
        """Say whether it holds integers or truth values that a wide float may not hold."""
        if self._wide == np.float64:
            return False
        return not self._xp.issubdtype(x.dtype, self._xp.inexact)


def split(x: Any) -> tuple[Any, Any]:
    """Give integers of at most 32 bits as two float32."""
    x = x.astype(_total_dtype(x.dtype))
    high = (x >> 12) << 12  # either half has digits enough
    return two_sum(high.astype(np.float32), (x - high).astype(np.float32))


def two_sum(a: Any, b: Any, rest: Any = 0.0) -> tuple[Any, Any]:
    """Add floats, and what they lose to the rest (Knuth)."""
    total = a + b
    part = total - a
    return total, rest + ((a - (total - part)) + (b - part))


def _fits(x: Any) -> bool:
    """Say whether JAX has the integers among its own."""
    if x.dtype.kind not in "iu" or not x.size:
        return True
    kept = np.iinfo(jnp.asarray(x[..., :0] if x.ndim else x[None][:0]).dtype)
    return bool(kept.min <= int(x.min()) and int(x.max()) <= kept.max)


def _largest(dtype: Any) -> int:
    """Give what no number of a dtype is further from zero than."""
    return 1 if dtype == np.bool_ else 1 << 8 * int(dtype.itemsize)


def _total_dtype(dtype: Any) -> Any:
    return np.uint32 if dtype == np.uint32 else np.int32


ARRAYS = JaxArrays(jnp, "jax")
