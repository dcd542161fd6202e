"""Metrics of which class is taken for which: the confusion matrix, and agreement beyond chance."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack, get_args

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import OptionError
from everyrank.metrics.catalogue.labels import Decided, Labels, Task, check_choice, ratio
from everyrank.metrics.states import State

Normalize = Literal["true", "pred", "all", None]
Weights = Literal["linear", "quadratic", None]


class ConfusionMatrix(Decided):
    """How often each class was taken for each: targets in rows, predictions in columns.

    It is (2, 2) for a binary task, (classes, classes), or (labels, 2, 2). Counts are whole numbers;
    where a label was out of range or a score NaN, each of them is -1. With `normalize` they are shares
    of a row ("true"), of a column ("pred") or of everything ("all"), and NaN instead of -1.
    """

    counts = State("sum", "_cells")
    invalid = State("sum")

    def __init__(self, *, normalize: Normalize = None, **task: Unpack[Task]) -> None:
        super().__init__(**task)
        self.normalize = check_choice("normalize", normalize, get_args(Normalize))
        self._cells = self._values**2 * (self.labels or 1)

    def _of_labels(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        actual, predicted, kept = labels.actual, labels.predicted, labels.flat().kept
        if self.labels is None:
            pairs = xp.pair_counts(actual.reshape(-1), predicted.reshape(-1), self._values, kept)
            return {"counts": pairs}
        which = xp.arange(self.labels, actual).reshape((-1,) + (1,) * (actual.ndim - 2))
        cell = 4 * which + xp.clip(2 * actual + predicted, 0, 3)
        return {"counts": xp.counts(cell.reshape(-1), self._cells, kept)}

    def finish(self, counts: Any, invalid: Any) -> Any:
        """Give the matrix."""
        xp, size = arrays_of(counts), self._values
        matrices = counts.reshape(-1, size, size)
        if self.normalize is None:
            matrices = xp.whole(xp.where(invalid == 0, matrices, -1.0))
        else:
            matrices = self._shares(xp, matrices, invalid)
        return matrices if self.labels else matrices[0]

    def _shares(self, xp: Arrays, matrices: Any, invalid: Any) -> Any:
        everything = xp.total(matrices, axis=(1, 2)).reshape(-1, 1, 1)
        whole = everything
        if self.normalize == "true":
            whole = xp.total(matrices, axis=2).reshape(-1, self._values, 1)
        elif self.normalize == "pred":
            whole = xp.total(matrices, axis=1).reshape(-1, 1, self._values)
        return xp.where((everything > 0) & (invalid == 0), ratio(matrices, whole), math.nan)


class _Agreement(Decided):
    """A metric of disagreement, and of what would be expected of as many predictions of each class."""

    disagreement = State("sum")
    predicted = State("sum", "_values")
    actual = State("sum", "_values")
    invalid = State("sum")

    def _of_labels(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        flat, size = labels.flat(), self._values
        predicted, actual = xp.clip(flat.predicted, 0, size - 1), xp.clip(flat.actual, 0, size - 1)
        return {
            # Nothing, where both are 0 because the sample is left out.
            "disagreement": xp.total(self._distance(predicted, actual)),
            "predicted": xp.counts(predicted, size, flat.kept),
            "actual": xp.counts(actual, size, flat.kept),
        }

    def _distance(self, a: Any, b: Any) -> Any:
        return a != b


class MatthewsCorrelation(_Agreement):
    """The correlation of predictions and targets: 1 is right, 0 is chance, also if one class is rare.

    It is 0 where all predictions or all targets are the same, as in scikit-learn. Several labels are
    counted together, as in torchmetrics.
    """

    def finish(self, disagreement: Any, predicted: Any, actual: Any, invalid: Any) -> Any:
        """Divide the covariance by both deviations."""
        xp = arrays_of(actual)
        count = xp.total(actual)
        # Shares, because squares of counts are too large for 32 bits.
        p, a, wrong = ratio(predicted, count), ratio(actual, count), ratio(disagreement, count)
        covariance = xp.total(a * (1.0 - p)) - wrong
        variances = xp.total(p * (1.0 - p)) * xp.total(a * (1.0 - a))
        value = ratio(covariance, xp.sqrt(variances))
        return xp.where((count > 0) & (invalid == 0), value, math.nan)


class CohenKappa(_Agreement):
    """The agreement of predictions and targets beyond chance: 1 is complete, 0 is chance.

    With `weights="linear"` or "quadratic" a class that is further off counts for more. It is NaN where
    all predictions and targets are of one class, as in scikit-learn.
    """

    def __init__(self, *, weights: Weights = None, **task: Unpack[Task]) -> None:
        super().__init__(**task)
        self.weights = check_choice("weights", weights, get_args(Weights))
        if self.labels is not None:
            raise OptionError(
                f"labels={self.labels} is for several labels, of which there is no kappa. Make one "
                "metric for each label."
            )

    def _distance(self, a: Any, b: Any) -> Any:
        if self.weights is None:
            return a != b
        return abs(a - b) if self.weights == "linear" else (a - b) * (a - b)

    def finish(self, disagreement: Any, predicted: Any, actual: Any, invalid: Any) -> Any:
        """Compare the disagreement with that of chance."""
        xp = arrays_of(actual)
        ids = xp.arange(self._values, actual)
        distance = self._distance(ids[:, None], ids[None, :])
        count = xp.total(actual)
        expected = xp.total(distance * actual[:, None] * ratio(predicted, count)[None, :])
        value = 1.0 - ratio(disagreement, expected, math.nan)
        return xp.where(invalid == 0, value, math.nan)
