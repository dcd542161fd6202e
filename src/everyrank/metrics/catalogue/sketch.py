"""Histograms and quantiles of values that nobody keeps: counts in buckets that are known beforehand.

    norms = Quantile(q=(0.5, 0.99))
    norms.update(gradient_norms)
    norms.compute()                   # within one percent of the right ones

* **Buckets.** Each is (1 + error) / (1 - error) times as wide as the one before it, from `smallest` to
  `largest`, with a mirror image for what is negative. By default that is 2 x 2,075 buckets, 33 kB.
* **Error.** Whatever lies in a bucket is within the relative `error` of the number that stands for it.
  So a quantile is within the relative `error` of the sample that is at its place, the one that
  numpy.quantile(method="lower") gives, if the magnitude of that sample is from `smallest` to
  `largest`. Where there are floats of 32 bits only, their rounding comes on top.
* **Outside.** A magnitude below `smallest` is 0. One above `largest`, also infinity, is counted in the
  outermost bucket, and so is at most `largest`, about.
* **NaN.** It is counted apart, and makes every quantile NaN.
* **Merging.** Counts add up: any split over steps and ranks gives exactly the same sketch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import OptionError
from everyrank.metrics.catalogue.pairs import spread
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import State

_MOST = 1_000_000  # buckets, 8 MB of counts


class Bins(NamedTuple):
    """What a histogram counts: bucket i lies from edges[i] to edges[i + 1]; NaN is apart."""

    counts: Any
    edges: Any
    nans: Any


class _Sketch(DeclaredMetric):
    """Counts in buckets: the negative ones from the outermost, zero, the positive ones, and NaN."""

    counts = State("sum", "buckets")

    def __init__(
        self, *, error: float = 0.01, smallest: float = 1e-9, largest: float = 1e9
    ) -> None:
        if not 0 < error < 1:
            raise OptionError(
                f"error={error!r} must be a relative error between 0 and 1, such as 0.01."
            )
        if not 0 < smallest < largest < math.inf:
            raise OptionError(
                f"smallest={smallest!r} and largest={largest!r} must be finite magnitudes above 0, the "
                "smaller one first, such as 1e-9 and 1e9."
            )
        self.error, self.smallest, self.largest = error, smallest, largest
        # A little finer than it need be, so that the rounding of logarithms is in the error too.
        error *= 1 - 2.0**-10
        self._ratio = (1 + error) / (1 - error)
        self._step = math.log(self._ratio)
        self._side = math.ceil(math.log(largest / smallest) / self._step)
        self.buckets = 2 * self._side + 2
        if self.buckets > _MOST:
            raise OptionError(
                f"error={self.error!r} from {smallest!r} to {largest!r} makes {self.buckets:,} "
                f"buckets, but there may be {_MOST:,}. Allow a larger error, or a smaller range."
            )

    def _index(self, xp: Arrays, values: Any) -> Any:
        """Say which bucket each value is in."""
        values = xp.wide(values).reshape(-1)
        size, side = abs(values), self._side
        steps = (xp.log(xp.clip(size, self.smallest, None)) - math.log(self.smallest)) / self._step
        steps = xp.clip(xp.floor(steps), 0, side - 1)
        index = xp.where(values < 0, side - 1 - steps, side + 1 + steps)
        index = xp.where(size < self.smallest, side, index)
        return xp.whole(xp.where(xp.isnan(values), self.buckets - 1, index))

    def _mirrored(self, zero: Sequence[float], lowest: float, n: int, like: Any) -> Any:
        """Give a number for each bucket of one side, `lowest` for the first, and its mirror image."""
        side = [lowest * self._ratio**i for i in range(n)]
        return arrays_of(like).constant([*(-x for x in reversed(side)), *zero, *side], like)


class Histogram(_Sketch):
    """How many values lie in each of many buckets, whose width is in proportion to the values.

    `update` takes values of any shape, and weights if there are any. The value is the counts, the edges
    between them, which never change, and apart from them how many values were NaN:

        counts, edges, nans = histogram.compute()

    A bucket holds the edge of it that is nearer to zero. With error=0.5 each is three times as wide as
    the one before, and there are 2 x 38 of them. See the head of this module for the rest.
    """

    def batch(self, values: Any, weights: Any = None) -> Mapping[str, Any]:
        """Take in values of any shape, and weights: one for each value, for each sample, or for all."""
        xp = arrays_of(values)
        if weights is not None:
            weights = spread(xp, weights, values).reshape(-1)
        return {"counts": xp.counts(self._index(xp, values), self.buckets, weights)}

    def finish(self, counts: Any) -> Bins:
        """Put the edges beside the counts."""
        return Bins(
            counts[:-1], self._mirrored([], self.smallest, self._side + 1, counts), counts[-1]
        )


class Quantile(_Sketch):
    """Quantiles within a relative error, without keeping the values.

    `q` is from 0 to 1, or several such numbers, for as many values. See the head of this module for
    what the error means.
    """

    def __init__(
        self,
        *,
        q: float | Sequence[float] = 0.5,
        error: float = 0.01,
        smallest: float = 1e-9,
        largest: float = 1e9,
    ) -> None:
        super().__init__(error=error, smallest=smallest, largest=largest)
        self.q = q if isinstance(q, int | float) else tuple(q)
        several = self.q if isinstance(self.q, tuple) else (self.q,)
        if not several or not all(0 <= one <= 1 for one in several):
            raise OptionError(
                f"q={q!r} must be a number from 0 to 1, or several, such as (0.5, 0.99)."
            )

    def batch(self, values: Any) -> Mapping[str, Any]:
        """Take in values of any shape."""
        xp = arrays_of(values)
        return {"counts": xp.counts(self._index(xp, values), self.buckets)}

    def finish(self, counts: Any) -> Any:
        """Give what stands for the bucket in which the wanted sample lies."""
        xp = arrays_of(counts)
        running = xp.cumsum(counts[:-1])
        rank = xp.floor(xp.constant(self.q, counts) * (running[-1] - 1))
        at = xp.total(running <= rank[..., None], axis=-1)
        middle = self.smallest * 2 * self._ratio / (1 + self._ratio)
        middles = self._mirrored([0.0], middle, self._side, counts)
        found = middles[xp.whole(xp.clip(at, 0, self.buckets - 2))]
        return xp.where((running[-1] == 0) | (counts[-1] > 0), math.nan, found)
