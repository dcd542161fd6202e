"""The operators by which states merge, over batches, steps and ranks alike.

* "sum", "max", "min" merge element by element. A NaN is never dropped.
* "last", "moments" and "comoments" merge a few numbers as a whole. "last" is an order and a value, and
  keeps the value with the higher order; of equals the one that came later, or from the higher rank.
  "moments" are count, mean and sum of squares about the mean; "comoments" are count, the means of x
  and y, and the sums of xx, xy and yy about them.

Merging is associative and, but for ties of "last", commutative up to rounding, which is why batches,
steps and ranks may be merged in any order. There is no "avg": the average of averages is another
number than the average of all, unless all had the same size. A mean is two sums, which are divided at
the end. Nor are there sums of squares about zero: at 1e5 +- 1e-3 nothing is left of a variance that is
made of these, while moments keep ten digits of it.

    >>> import numpy as np
    >>> from everyrank.arrays import arrays_of
    >>> a, b = np.array([1.0, 2.0, 0.0]), np.array([3.0, 6.0, 2.0])
    >>> [float(number) for number in OPERATORS["moments"].merge(arrays_of(a), a, b)]
    [4.0, 5.0, 14.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from everyrank.arrays import Arrays


@dataclass(frozen=True)
class Operator:
    """How states merge; `merge` takes the array functions and two flat vectors of states.

    `identity` is what changes nothing, number by number; more than one number merges as a whole.
    """

    identity: tuple[float, ...]
    merge: Callable[[Arrays, Any, Any], Any]

    @property
    def width(self) -> int:
        """How many numbers merge as a whole."""
        return len(self.identity)


def _later(xp: Arrays, a: Any, b: Any) -> Any:
    a, b = a.reshape(-1, 2), b.reshape(-1, 2)
    return xp.where(b[:, :1] >= a[:, :1], b, a).reshape(-1)


def _moments(xp: Arrays, a: Any, b: Any, *, variables: int = 1) -> Any:
    """Merge by Chan's formulas, for one variable or for two."""
    width = _width(variables)
    a, b = a.reshape(-1, width), b.reshape(-1, width)
    count = a[:, 0] + b[:, 0]
    share = b[:, 0] / xp.clip(count, 1.0, None)
    away = [b[:, 1 + i] - a[:, 1 + i] for i in range(variables)]
    means = [a[:, 1 + i] + away[i] * share for i in range(variables)]
    pairs = [(i, j) for i in range(variables) for j in range(i, variables)]
    squares = [
        # In this order, nothing times something huge is nothing.
        a[:, at] + b[:, at] + away[i] * (a[:, 0] * share) * away[j]
        for at, (i, j) in enumerate(pairs, 1 + variables)
    ]
    return xp.stack([count, *means, *squares], axis=1).reshape(-1)


def _comoments(xp: Arrays, a: Any, b: Any) -> Any:
    return _moments(xp, a, b, variables=2)


def _width(variables: int) -> int:
    return 1 + variables + variables * (variables + 1) // 2


#: In the order in which states lie in checkpoints and messages.
OPERATORS: dict[str, Operator] = {
    "sum": Operator((0.0,), lambda xp, a, b: a + b),
    "max": Operator((-math.inf,), lambda xp, a, b: xp.maximum(a, b)),
    "min": Operator((math.inf,), lambda xp, a, b: xp.minimum(a, b)),
    "last": Operator((-math.inf, 0.0), _later),
    "moments": Operator((0.0,) * _width(1), _moments),
    "comoments": Operator((0.0,) * _width(2), _comoments),
}


def moments_of(xp: Arrays, x: Any) -> Any:
    """Give the moments of all numbers in `x`."""
    return _moments_of(xp, x)


def comoments_of(xp: Arrays, x: Any, y: Any) -> Any:
    """Give the moments of pairs from two arrays of one shape."""
    return _moments_of(xp, x, y)


def _moments_of(xp: Arrays, *variables: Any) -> Any:
    size = math.prod(variables[0].shape)
    wide = [xp.wide(x) for x in variables]
    means = [xp.total(x) / max(1, size) for x in wide]
    away = [x - mean for x, mean in zip(wide, means, strict=True)]
    pairs = [(i, j) for i in range(len(wide)) for j in range(i, len(wide))]
    squares = [xp.total(away[i] * away[j]) for i, j in pairs]
    return xp.stack([xp.constant(size, variables[0]), *means, *squares])
