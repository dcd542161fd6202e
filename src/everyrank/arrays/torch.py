"""The array functions of torch; see `Arrays` for what each does.

None of them reads a value on the host, and all can be traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyrank.arrays import BY_TYPE, Axis


class TorchArrays:
    """The functions of torch under the names that all rooms share."""

    name = "torch"

    def array(self, x: Any) -> Tensor:
        # As exact as the host has it; by `full`, which is not compiled anew for each number.
        if isinstance(x, bool):
            return torch.full((), x, dtype=torch.bool)
        if isinstance(x, int) and -(2**63) <= x < 2**63:
            return torch.full((), x, dtype=torch.int64)
        if isinstance(x, int | float):
            return torch.full((), float(x), dtype=torch.float64)
        return torch.as_tensor(x)

    def is_float(self, x: Tensor) -> bool:
        return x.is_floating_point()

    def wide(self, x: Tensor) -> Tensor:
        return x.to(wide_dtype(x.device.type))

    def whole(self, x: Tensor) -> Tensor:
        return x.to(torch.int64)

    def total(self, x: Tensor, axis: Axis = None) -> Tensor:
        if x.ndim == 0:
            return self.wide(x)
        return torch.sum(x, dim=axis, dtype=wide_dtype(x.device.type))

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return torch.where(condition, x, y)

    def isnan(self, x: Tensor) -> Tensor:
        return torch.isnan(x)

    def sqrt(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)

    def log(self, x: Tensor) -> Tensor:
        return torch.log(x)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def logsumexp(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.logsumexp(x.float() if x.dtype.itemsize < 4 else x, dim=axis)

    def floor(self, x: Tensor) -> Tensor:
        return torch.floor(x)

    def clip(self, x: Tensor, low: float | None, high: float | None) -> Tensor:
        return torch.clamp(x, low, high)

    def maximum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y)

    def minimum(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.minimum(x, y)

    def highest(self, x: Tensor, axis: Axis = None) -> Tensor:
        return torch.amax(x, dim=() if axis is None else axis)

    def lowest(self, x: Tensor, axis: Axis = None) -> Tensor:
        return torch.amin(x, dim=() if axis is None else axis)

    def argmax(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.argmax(x, dim=axis)

    def argsort(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.argsort(x, dim=axis, stable=True)

    def take(self, x: Tensor, index: Tensor, axis: int = -1) -> Tensor:
        return torch.gather(x, axis, index)  # take_along_dim is compiled anew for each size

    def cumsum(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.cumsum(x, dim=axis)

    def cumprod(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.cumprod(x, dim=axis)

    def arange(self, n: int, like: Tensor) -> Tensor:
        return torch.arange(n, device=like.device)

    def constant(self, values: float | Sequence[float], like: Tensor) -> Tensor:
        wide = wide_dtype(like.device.type)
        if isinstance(
            values, int | float
        ):  # a kernel of its own, where a copy from here would wait
            return torch.full((), values, dtype=wide, device=like.device)
        return torch.tensor(values, dtype=wide).to(like.device, non_blocking=True)

    def counts(self, index: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
        return _counted(index, size, weights).to(wide_dtype(index.device.type))

    def pair_counts(
        self, rows: Tensor, columns: Tensor, size: int, weights: Tensor | None = None
    ) -> Tensor:
        cells = size * size
        if rows.device.type != "cpu" or weights is not None or torch.compiler.is_compiling():
            index = torch.add(columns, rows, alpha=size).clamp_(0, cells - 1)
            return self.counts(index, cells, weights)
        # In parts, because an index of them all is fresh memory to fault in: a million pairs of 1,000
        # classes take half of a bincount where memory is as it comes, 1.1 of one where it is warm
        # (`python -m benchmarks metrics`).
        found = torch.zeros(cells, dtype=torch.int32)
        index = torch.empty(min(len(rows), _PART), dtype=torch.int64)
        ones = torch.ones((), dtype=torch.int32).expand(index.shape)
        for some, others in zip(rows.split(_PART), columns.split(_PART), strict=True):
            part = torch.add(others, some, alpha=size, out=index[: len(some)]).clamp_(0, cells - 1)
            found.scatter_add_(0, part, ones[: len(some)])
        return found.to(torch.float64)

    def outside(self, x: Tensor, size: int) -> Tensor:
        lowest, highest = torch.aminmax(x)
        return (lowest < 0) | (highest >= size)

    def stack(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        return torch.stack(list(parts), dim=axis)

    def concatenate(self, parts: Sequence[Tensor], axis: int = 0) -> Tensor:
        return torch.cat(list(parts), dim=axis)


def _counted(index: Tensor, size: int, weights: Tensor | None) -> Tensor:
    """Count integers, in whole numbers if the weights allow."""
    # Not by bincount, which waits for the device to learn the largest index. What one call counts fits
    # into int32, and a large table of these is reached twice as fast at random as one of float64.
    dtype = (
        torch.int32
        if weights is None or weights.dtype is torch.bool
        else wide_dtype(index.device.type)
    )
    if weights is None:
        weights = torch.ones((), dtype=dtype, device=index.device).expand(index.shape)
    found = torch.zeros(size, dtype=dtype, device=index.device)
    return found.scatter_add_(0, index.to(torch.int64), weights.to(dtype))


# In half as many, the same takes 1.1 to 1.5 times as long; in more, no less.
_PART = 65_536

# Not by functools.cache, of which torch.compile warns.
_WIDE = {"cpu": torch.float64, "cuda": torch.float64}


def wide_dtype(device_type: str) -> torch.dtype:
    """Give float64, or float32 on a device that has no such numbers."""
    if device_type not in _WIDE:
        try:
            torch.zeros(1, dtype=torch.float64, device=device_type)
            _WIDE[device_type] = torch.float64
        except (TypeError, RuntimeError):
            _WIDE[device_type] = torch.float32
    return _WIDE[device_type]


ARRAYS = TorchArrays()
BY_TYPE[Tensor] = BY_TYPE[torch.nn.Parameter] = ARRAYS
