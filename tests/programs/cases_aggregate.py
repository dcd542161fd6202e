"""Cases of the metrics of plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from metric_cases import Case

from everyrank.metrics import Count, Last, Max, Mean, Min, Std, Sum, WeightedMean

Rng = np.random.Generator


def numbers(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give numbers, some of them equal."""
    return (rng.integers(-50, 50, n) / np.float32(4),)


def far_numbers(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give numbers that differ in their last digits only."""
    return (1e5 + 1e-3 * rng.normal(size=n),)


def weighted(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give numbers with weights; what has weight zero is NaN."""
    weights = rng.integers(0, 5, n)
    return np.where(weights == 0, np.nan, rng.normal(size=n)), weights


def ordered(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give numbers with the order in which they came."""
    return rng.normal(size=n), np.arange(n)


CASES = {
    "Sum": Case(Sum, numbers),
    "Count": Case(Count, numbers),
    "Mean": Case(Mean, numbers),
    "WeightedMean": Case(WeightedMean, weighted),
    "Max": Case(Max, numbers),
    "Min": Case(Min, numbers),
    "Std": Case(Std, numbers),
    "Std far from zero": Case(Std, far_numbers),
    "Std of a sample": Case(lambda: Std(correction=1), numbers),
    "Last": Case(Last, ordered),
}
