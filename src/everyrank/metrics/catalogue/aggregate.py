"""Numbers as they come: sums, means, extremes, spread, the last one.

`update` takes a number, a tensor, or anything of either. Sums and counts of nothing are 0; whatever
else is made of nothing is NaN. A NaN among the values makes the result NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from everyrank.arrays import arrays_of
from everyrank.errors import MetricError, OptionError
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import State
from everyrank.operators import moments_of


class Sum(DeclaredMetric):
    """The sum of all values."""

    total = State("sum")

    of_number = {"total": None}  # noqa: RUF012 - nobody writes to it

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        return {"total": arrays_of(values).total(values)}

    def finish(self, total: Any) -> Any:
        """Give the sum."""
        return total


class Count(DeclaredMetric):
    """How many values there were, exact to 2**53."""

    count = State("sum")

    of_number = {"count": 1.0}  # noqa: RUF012

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Count the elements of any shape."""
        return {"count": math.prod(values.shape)}

    def finish(self, count: Any) -> Any:
        """Give the count as a whole number."""
        return arrays_of(count).whole(count)


class Mean(DeclaredMetric):
    """The mean of all values, each of which counts alike."""

    total = State("sum")
    count = State("sum")

    of_number = {"total": None, "count": 1.0}  # noqa: RUF012

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        return {"total": arrays_of(values).total(values), "count": math.prod(values.shape)}

    def finish(self, total: Any, count: Any) -> Any:
        """Divide."""
        return total / count


class WeightedMean(DeclaredMetric):
    """The weighted mean, sum(weights x values) / sum(weights), such as a loss by its tokens.

        loss = WeightedMean()
        loss.update(values=batch_loss, weights=tokens_in_batch)

    What has weight zero has nothing to say, not even NaN.
    """

    total = State("sum")
    weight = State("sum")

    def batch(self, values: Any, weights: Any) -> Mapping[str, Any]:
        """Take in values with a weight each, or with one weight for all of them."""
        xp = arrays_of(values)
        if weights.shape not in ((), values.shape):
            raise MetricError(
                f"weights has the shape {tuple(weights.shape)}, but values has {tuple(values.shape)}. "
                "Give one weight, or one for each value."
            )
        wide, weight = xp.wide(values), xp.wide(weights)
        each = 1 if weights.shape == values.shape else math.prod(values.shape)
        total = xp.total(xp.where(weight == 0.0, 0.0, wide * weight))
        return {"total": total, "weight": xp.total(weight) * each}

    def finish(self, total: Any, weight: Any) -> Any:
        """Divide."""
        return total / weight


#: The name under which others know it.
WeightedMeanMetric = WeightedMean


class _Extreme(DeclaredMetric):
    """An extreme, and whether there was any value at all."""

    def _batch(self, values: Any, extreme: Any) -> Mapping[str, Any]:
        if not math.prod(values.shape):
            return {}
        return {"extreme": extreme(values), "seen": 1.0}

    def _finish(self, extreme: Any, seen: Any) -> Any:
        return arrays_of(extreme).where(seen == 1.0, extreme, math.nan)


class Max(_Extreme):
    """The largest value."""

    extreme = State("max")
    seen = State("max")

    of_number = {"extreme": None, "seen": 1.0}  # noqa: RUF012

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        return self._batch(values, arrays_of(values).highest)

    def finish(self, extreme: Any, seen: Any) -> Any:
        """Give the maximum."""
        return self._finish(extreme, seen)


class Min(_Extreme):
    """The smallest value."""

    extreme = State("min")
    seen = State("min")

    of_number = {"extreme": None, "seen": 1.0}  # noqa: RUF012

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        return self._batch(values, arrays_of(values).lowest)

    def finish(self, extreme: Any, seen: Any) -> Any:
        """Give the minimum."""
        return self._finish(extreme, seen)


class Std(DeclaredMetric):
    """The standard deviation of all values, exact also where their mean is large beside it.

    It divides by the count less `correction`: 0 for the population's, 1 for a sample's.
    """

    moments = State("moments")

    def __init__(self, *, correction: float = 0) -> None:
        if not correction >= 0:
            raise OptionError(f"correction={correction!r} must be 0 or larger: 0 or 1, usually.")
        self.correction = correction

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        return {"moments": moments_of(arrays_of(values), values)}

    def finish(self, moments: Any) -> Any:
        """Give the root of the mean square about the mean; of one value as a sample, NaN."""
        xp = arrays_of(moments)
        free = moments[0] - self.correction
        return xp.sqrt(moments[2] / xp.where(free > 0, free, math.nan))


class Last(DeclaredMetric):
    """The last value: of this rank by time; of all ranks by `order`, and of equals the highest rank's.

    lr = Last()
    lr.update(3e-4)
    lr.update(2e-4, order=step)     # where ranks do not count alike
    """

    last = State("last")

    def batch(self, values: Any, order: Any = None) -> Mapping[str, Any]:
        """Take in values of any shape, with one order or one each; the last of them counts."""
        if not math.prod(values.shape):
            return {}
        if getattr(order, "shape", ()):
            order = order.reshape(-1)[-1]
        return {"last": (order, values.reshape(-1)[-1])}

    def finish(self, last: Any) -> Any:
        """Give the value."""
        return arrays_of(last).where(last[0] > -math.inf, last[1], math.nan)
