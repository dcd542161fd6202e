"""The algebra: what is left of many ranks' values, how two such remainders merge, how they finish.

Statistics over ranks are `Moments`: a handful of arrays, however many ranks went into them. Merging
is associative and commutative up to rounding, so any split of the ranks, in any order, finishes to
the same numbers; ranks behind a relay and ranks on one machine are treated alike.

    >>> import numpy as np
    >>> a = Moments.of(np.array([1.0, 2.0]), ranks=np.array([0, 1]))
    >>> b = Moments.of(np.array([6.0]), ranks=np.array([2]))
    >>> float(merge(a, b).finish("mean")), int(merge(a, b).finish("max_rank"))
    (3.0, 2)

Sums are taken about a reference, one of the values themselves, and never about zero. For any such
reference the variance loses at most log2(ranks) bits to cancellation, because no single value is
further than sqrt(ranks) standard deviations from the mean: 1e5 +- 1e-3 keeps twelve digits.

A value that is not finite is never swallowed: mean, min, max and std become what IEEE arithmetic
makes of it, min_rank and max_rank name the first rank that held a NaN, and `nonfinite` counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyrank.errors import OptionError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: What one wants to see of a number that many ranks have, in the order in which it is shown.
DEFAULT_STATS = ("mean", "max", "min", "std")

_QUANTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")

# Past these, squares leave the range of float64, also squares of differences in the last place; a
# power of two brings values back without rounding.
_HUGE, _TINY, _SHIFT = 1e150, 1e-120, 600


@dataclass(frozen=True, slots=True)
class Moments:
    """What is left of some ranks' values, element by element of whatever shape they had."""

    count: Ints
    reference: Floats
    sum1: Floats  # of x - reference
    sum2: Floats  # of its square
    weight: Floats
    weighted: Floats  # sum of weight * (x - reference)
    low: Floats
    low_rank: Ints
    high: Floats
    high_rank: Ints
    nonfinite: Ints

    @classmethod
    def of(cls, values: Floats, *, ranks: Ints, weights: Floats | None = None) -> Moments:
        """Take the moments over the first axis, whose entries came from `ranks`."""
        finite = np.isfinite(values)
        with np.errstate(all="ignore"):
            first = np.argmax(finite, axis=0)  # a NaN as the reference would hide the others
            reference = np.take_along_axis(values, first[None], axis=0)[0]
            away = values - np.where(np.isfinite(reference), reference, 0.0)
            sum1, sum2 = away.sum(axis=0), (away * away).sum(axis=0)
            if weights is None:
                weight, weighted = np.full_like(sum1, len(values)), sum1
            else:
                weight = weights.sum(axis=0)
                # A rank with weight zero has nothing to say, not even NaN.
                weighted = np.where(weights == 0.0, 0.0, weights * away).sum(axis=0)
            low, high = np.argmin(values, axis=0), np.argmax(values, axis=0)
        return cls(
            count=np.full(sum1.shape, len(values), np.int64),
            reference=np.where(np.isfinite(reference), reference, 0.0),
            sum1=sum1,
            sum2=sum2,
            weight=weight,
            weighted=weighted,
            low=np.take_along_axis(values, low[None], axis=0)[0],
            low_rank=ranks[low],
            high=np.take_along_axis(values, high[None], axis=0)[0],
            high_rank=ranks[high],
            nonfinite=np.asarray(len(values) - finite.sum(axis=0), np.int64),
        )

    def finish(self, stat: str) -> Any:
        """Give one statistic by name; quantiles need the values and are not moments."""
        with np.errstate(all="ignore"):
            return _FINISH[stat](self)


def merge(a: Moments, b: Moments) -> Moments:
    """Give the moments of two disjoint sets of ranks together."""
    with np.errstate(all="ignore"):
        shift = b.reference - a.reference
        return Moments(
            count=a.count + b.count,
            reference=a.reference,
            sum1=a.sum1 + (b.sum1 + b.count * shift),
            sum2=a.sum2 + (b.sum2 + 2.0 * shift * b.sum1 + b.count * shift * shift),
            weight=a.weight + b.weight,
            weighted=a.weighted + (b.weighted + b.weight * shift),
            low=np.minimum(a.low, b.low),
            low_rank=_holder(a.low, a.low_rank, b.low, b.low_rank, np.less),
            high=np.maximum(a.high, b.high),
            high_rank=_holder(a.high, a.high_rank, b.high, b.high_rank, np.greater),
            nonfinite=a.nonfinite + b.nonfinite,
        )


def _holder(
    a: Floats, a_rank: Ints, b: Floats, b_rank: Ints, beats: Callable[[Floats, Floats], Any]
) -> Ints:
    """Say which rank holds the extreme: a NaN before any number, then the lower rank."""
    a_nan, b_nan = np.isnan(a), np.isnan(b)
    tie = (a_nan & b_nan) | (a == b)
    b_wins = np.where(tie, b_rank < a_rank, ~a_nan & (b_nan | beats(b, a)))
    return np.where(b_wins, b_rank, a_rank)


def _std(m: Moments) -> Floats:
    """Give the population standard deviation."""
    mean = m.sum1 / m.count
    return np.asarray(np.sqrt(np.maximum(m.sum2 / m.count - mean * mean, 0.0)))


_FINISH: dict[str, Callable[[Moments], Any]] = {
    "mean": lambda m: m.reference + m.weighted / m.weight,
    "std": _std,
    "min": lambda m: m.low,
    "max": lambda m: m.high,
    "min_rank": lambda m: m.low_rank.astype(np.float64),
    "max_rank": lambda m: m.high_rank.astype(np.float64),
}


def check_stats(stats: Sequence[str]) -> tuple[str, ...]:
    """Give the statistics asked for, or say which one nobody knows."""
    if isinstance(stats, str):
        raise OptionError(
            f"stats={stats!r} is a single text. Hand over a tuple of names: stats=({stats!r},)."
        )
    for stat in stats:
        if not isinstance(stat, str) or (stat not in _FINISH and not _QUANTILE.fullmatch(stat)):
            raise OptionError(
                f"stats={tuple(stats)!r}: {stat!r} is not a statistic. "
                f"Choose from {', '.join(_FINISH)} and quantiles such as 'p50' or 'p99.9'."
            )
    return tuple(dict.fromkeys(stats))


def over_ranks(
    values: Floats, *, ranks: Ints, stats: Sequence[str], weights: Floats | None = None
) -> tuple[Floats, Ints]:
    """Give the statistics over the first axis, stacked in the order of `stats`, and the nonfinite.

    `values` is ranks x steps x metrics; the answer is statistics x steps x metrics.
    """
    exponent = _exponent(values)
    scaled = values if exponent is None else np.ldexp(values, exponent)
    moments = Moments.of(scaled, ranks=ranks, weights=weights)
    out = np.empty((len(stats), *values.shape[1:]))
    for i, stat in enumerate(stats):
        quantile = _QUANTILE.fullmatch(stat)
        if quantile:
            with np.errstate(all="ignore"):
                out[i] = np.quantile(scaled, float(quantile[1]) / 100.0, axis=0)
        else:
            out[i] = moments.finish(stat)
        if exponent is not None and not stat.endswith("_rank"):
            with np.errstate(all="ignore"):
                out[i] = np.ldexp(out[i], -exponent)
    return out, moments.nonfinite


def _exponent(values: Floats) -> NDArray[np.int32] | None:
    """Give the powers of two that keep squares in range, or None where all are (nearly always)."""
    if not values.size:
        return None
    with np.errstate(all="ignore"):
        size = np.abs(np.where(np.isfinite(values), values, 0.0)).max(axis=0)
    if ((size < _HUGE) & ((size > _TINY) | (size == 0.0))).all():
        return None
    up = np.where((size <= _TINY) & (size > 0.0), _SHIFT, 0)
    return np.where(size >= _HUGE, -_SHIFT, up).astype(np.int32)
