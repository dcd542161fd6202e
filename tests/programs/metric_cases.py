"""Metrics with random samples for them: what the laws that hold for every metric are tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from everyrank.metrics.declared import DeclaredMetric


@dataclass(frozen=True)
class Case:
    """How to make a metric, and so many random samples for it.

    `data` gives the arguments of `update`: numpy arrays with a sample in each row, or lists.
    """

    make: Callable[[], DeclaredMetric]
    data: Callable[[np.random.Generator, int], tuple[Any, ...]]
