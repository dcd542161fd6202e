"""The array functions of numpy, and of what is like it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from everyrank.arrays import Axis


class NumpyLike:
    """The functions of a module with numpy's names; see `Arrays` for what each does."""

    def __init__(self, xp: Any, name: str) -> None:
        self.name = name
        self._xp = xp

    @property
    def _wide(self) -> Any:
        return self._xp.result_type(float)  # JAX has no wider one, unless it is told to

    def array(self, x: Any) -> Any:
        return self._xp.asarray(x)

    def is_float(self, x: Any) -> bool:
        return bool(self._xp.issubdtype(x.dtype, self._xp.floating))

    def wide(self, x: Any) -> Any:
        return self._xp.asarray(x, self._wide)

    def whole(self, x: Any) -> Any:
        return self._xp.asarray(x, self._xp.result_type(int))

    def total(self, x: Any, axis: Axis = None) -> Any:
        return self._xp.sum(x, axis=axis, dtype=self._wide)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        return self._xp.where(condition, x, y)

    def isnan(self, x: Any) -> Any:
        return self._xp.isnan(x)

    def sqrt(self, x: Any) -> Any:
        return self._xp.sqrt(x)

    def log(self, x: Any) -> Any:
        return self._xp.log(x)

    def exp(self, x: Any) -> Any:
        return self._xp.exp(x)

    def logsumexp(self, x: Any, axis: int = -1) -> Any:
        if x.dtype.itemsize < 4:
            x = x.astype("float32")
        top = self._xp.max(x, axis=axis, keepdims=True)
        top = self._xp.where(self._xp.isinf(top), 0, top)
        total = self._xp.sum(self._xp.exp(x - top), axis=axis)
        return self._xp.log(total) + self._xp.squeeze(top, axis=axis)

    def floor(self, x: Any) -> Any:
        return self._xp.floor(x)

    def clip(self, x: Any, low: float | None, high: float | None) -> Any:
        return self._xp.clip(x, low, high)

    def maximum(self, x: Any, y: Any) -> Any:
        return self._xp.maximum(x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        return self._xp.minimum(x, y)

    def highest(self, x: Any, axis: Axis = None) -> Any:
        return self._xp.max(x, axis=axis)

    def lowest(self, x: Any, axis: Axis = None) -> Any:
        return self._xp.min(x, axis=axis)

    def argmax(self, x: Any, axis: int = -1) -> Any:
        return self._xp.argmax(x, axis=axis)

    def argsort(self, x: Any, axis: int = -1) -> Any:
        return self._xp.argsort(x, axis=axis, stable=True)

    def take(self, x: Any, index: Any, axis: int = -1) -> Any:
        return self._xp.take_along_axis(x, index, axis=axis)

    def cumsum(self, x: Any, axis: int = -1) -> Any:
        return self._xp.cumsum(x, axis=axis)

    def cumprod(self, x: Any, axis: int = -1) -> Any:
        return self._xp.cumprod(x, axis=axis)

    def arange(self, n: int, like: Any) -> Any:
        del like
        return self._xp.arange(n)

    def constant(self, values: float | Sequence[float], like: Any) -> Any:
        del like
        return self._xp.asarray(values, self._wide)

    def counts(self, index: Any, size: int, weights: Any = None) -> Any:
        found = self._xp.zeros(size, self._wide)
        if weights is None:
            weights = self._xp.ones(index.shape, self._wide)
        return self._added(found, index, weights)

    def _added(self, found: Any, index: Any, weights: Any) -> Any:
        np.add.at(found, index, weights)
        return found

    def pair_counts(self, rows: Any, columns: Any, size: int, weights: Any = None) -> Any:
        index = self._xp.clip(rows * size + columns, 0, size * size - 1)
        return self.counts(index, size * size, weights)

    def outside(self, x: Any, size: int) -> Any:
        return (self._xp.min(x) < 0) | (self._xp.max(x) >= size)

    def stack(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self._xp.stack(parts, axis=axis)

    def concatenate(self, parts: Sequence[Any], axis: int = 0) -> Any:
        return self._xp.concatenate(parts, axis=axis)


ARRAYS = NumpyLike(np, "numpy")
