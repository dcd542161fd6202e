"""Metrics of predicted numbers: how far off, and how much of the targets they explain.

    error = RootMeanSquaredError()
    error.update(predictions, targets)
    error.compute()

Predictions and targets have one shape, and every element is a sample: two outputs for each of 100 rows
are 200 samples. They may be of any dtype, and are compared in wide floats. Nothing accumulated gives
NaN, and so does a NaN among the values.

What is divided by the variance of the targets (`R2Score`, `ExplainedVariance`, `PearsonCorrelation`) is
made of moments about the mean, so that targets of 1e5 +- 1e-3 keep their digits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import MetricError
from everyrank.metrics.catalogue.pairs import pair_of, weighted
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import State
from everyrank.operators import comoments_of, moments_of

#: What a percentage is taken of at least, as in scikit-learn: of 0 there is none.
_LEAST = 2.0**-52


class _MeanOfErrors(DeclaredMetric):
    """The weighted mean of an error that every sample has."""

    total = State("sum")
    weight = State("sum")

    def batch(self, predictions: Any, targets: Any, weights: Any = None) -> Mapping[str, Any]:
        """Take errors, and weights: one for each value, for each sample, or one for all.

        A weight of zero leaves its sample out, also if that is NaN.
        """
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        errors = self._errors(xp, predictions, targets)
        total, weight = weighted(xp, errors, weights)
        return {"total": total, "weight": weight}

    def finish(self, total: Any, weight: Any) -> Any:
        """Divide."""
        return total / weight

    def _errors(self, xp: Arrays, predictions: Any, targets: Any) -> Any:
        raise NotImplementedError


class MeanSquaredError(_MeanOfErrors):
    """The mean of (prediction - target)^2; `update` takes weights too."""

    def _errors(self, xp: Arrays, predictions: Any, targets: Any) -> Any:
        return (predictions - targets) ** 2


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean of (prediction - target)^2 over all batches and ranks."""

    def finish(self, total: Any, weight: Any) -> Any:
        """Divide, and take the root."""
        return arrays_of(total).sqrt(total / weight)


class MeanAbsoluteError(_MeanOfErrors):
    """The mean of |prediction - target|; `update` takes weights too."""

    def _errors(self, xp: Arrays, predictions: Any, targets: Any) -> Any:
        return abs(predictions - targets)


class MeanAbsolutePercentageError(_MeanOfErrors):
    """The mean of |prediction - target| / |target|, as a fraction: 0.05 is five percent.

    As in scikit-learn, a target of 0 counts as 2.2e-16, which makes the error huge, not infinite.
    """

    def _errors(self, xp: Arrays, predictions: Any, targets: Any) -> Any:
        return abs(predictions - targets) / xp.clip(abs(targets), _LEAST, None)


class SymmetricMeanAbsolutePercentageError(_MeanOfErrors):
    """The mean of 2 |prediction - target| / (|prediction| + |target|), which is from 0 to 2.

    Where both are 0 the error is 0.
    """

    def _errors(self, xp: Arrays, predictions: Any, targets: Any) -> Any:
        size = abs(predictions) + abs(targets)
        return 2 * abs(predictions - targets) / xp.where(size == 0, 1.0, size)


class MaxError(DeclaredMetric):
    """The largest |prediction - target|."""

    error = State("max")

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in two arrays of one shape."""
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        if not math.prod(predictions.shape):
            return {}
        return {"error": xp.highest(abs(predictions - targets))}

    def finish(self, error: Any) -> Any:
        """Give the largest, NaN of none."""
        return arrays_of(error).where(error < 0, math.nan, error)


class R2Score(DeclaredMetric):
    """The coefficient of determination: 1 - squared errors / squared deviations of the targets.

    As in scikit-learn, targets that are all the same give 1 if they are met and 0 if not, and fewer
    than two samples give NaN.
    """

    errors = State("sum")
    targets = State("moments")

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in two arrays of one shape."""
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        errors = xp.total((predictions - targets) ** 2)
        return {"errors": errors, "targets": moments_of(xp, targets)}

    def finish(self, errors: Any, targets: Any) -> Any:
        """Give the share that is explained."""
        xp = arrays_of(errors)
        score = _explained(xp, errors, _squares(xp, *targets))
        return xp.where(targets[0] < 2, math.nan, score)


class ExplainedVariance(DeclaredMetric):
    """1 - variance of the errors / variance of the targets: R2 without a constant offset.

    As in scikit-learn, targets that are all the same give 1 if the errors are as well, and else 0.
    """

    errors = State("moments")
    targets = State("moments")

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in two arrays of one shape."""
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        errors = moments_of(xp, targets - predictions)
        return {"errors": errors, "targets": moments_of(xp, targets)}

    def finish(self, errors: Any, targets: Any) -> Any:
        """Give the share that is explained."""
        xp = arrays_of(errors)
        score = _explained(xp, _squares(xp, *errors), _squares(xp, *targets))
        return xp.where(targets[0] == 0, math.nan, score)


class PearsonCorrelation(DeclaredMetric):
    """The linear correlation of predictions and targets, from -1 to 1; NaN if either is constant."""

    both = State("comoments")

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in two arrays of one shape."""
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        return {"both": comoments_of(xp, predictions, targets)}

    def finish(self, both: Any) -> Any:
        """Divide by both spreads."""
        xp = arrays_of(both)
        count, mean_x, mean_y, xx, xy, yy = both
        # Roots before the product, which might be too large.
        size = xp.sqrt(_squares(xp, count, mean_x, xx)) * xp.sqrt(_squares(xp, count, mean_y, yy))
        return xp.clip(xp.where(size == 0, math.nan, xy / size), -1.0, 1.0)


class CosineSimilarity(DeclaredMetric):
    """The mean over rows of the cosine between prediction and target; a row is the last axis.

    A row of zeros has no direction, and counts as 0.
    """

    total = State("sum")
    rows = State("sum")

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in two arrays of one shape."""
        xp, predictions, targets = pair_of(predictions=predictions, targets=targets)
        if not predictions.ndim or not predictions.shape[-1]:
            raise MetricError(
                f"`predictions` has the shape {tuple(predictions.shape)}, but must hold vectors along "
                "its last axis, as (rows, features)."
            )
        cosines = xp.total(_unit(xp, predictions) * _unit(xp, targets), axis=-1)
        return {"total": xp.total(cosines), "rows": math.prod(predictions.shape[:-1])}

    def finish(self, total: Any, rows: Any) -> Any:
        """Divide."""
        return total / rows


def _unit(xp: Arrays, vectors: Any) -> Any:
    """Bring vectors to a length of one."""
    # By the largest element first, whose square need not be a number.
    largest = xp.highest(abs(vectors), axis=-1)[..., None]
    vectors = vectors / xp.where(largest == 0, 1.0, largest)
    length = xp.sqrt(xp.total(vectors * vectors, axis=-1))[..., None]
    return vectors / xp.where(length == 0, 1.0, length)


def _squares(xp: Arrays, count: Any, mean: Any, squares: Any) -> Any:
    """Give the squares about the mean, but 0 where they come from rounding the mean alone."""
    epsilon = 2.0**-52 if squares.dtype.itemsize == 8 else 2.0**-23
    return xp.where(squares <= count * (16 * epsilon * mean) ** 2, 0.0, squares)


def _explained(xp: Arrays, errors: Any, squares: Any) -> Any:
    """Give 1 - errors / squares; without squares 1 if there are no errors, and else 0."""
    flat = squares == 0
    share = 1 - errors / xp.where(flat, 1.0, squares)
    return xp.where(flat & (errors > 0), 0.0, share)
