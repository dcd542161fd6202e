"""Metrics of scores, for every threshold at once: histograms of what is and what is not.

    auroc = AUROC()              # binary; AUROC(classes=10) is one against the rest
    auroc.update(scores, targets)

Scores are floats from 0 to 1: apply a sigmoid or a softmax first. They are counted in `bins` of equal
width, and within a bin they are taken for equal, so that the states are small, and batches and ranks
add up. How far a value may be off is said for each metric. A score that is NaN or not from 0 to 1, or a
label that is out of range, makes the result NaN until `reset`.

Of several classes or labels, `average` is "macro", "weighted" by how often each occurs, or None for one
value each. A class for which there is no curve, because all or none of its samples are of it, has NaN
and is left out of averages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import MetricError
from everyrank.metrics.catalogue.labels import (
    Classified,
    Labels,
    best_class,
    check_choice,
    check_int,
    ratio,
)
from everyrank.metrics.states import State

Average = Literal["macro", "weighted", None]


class _Scored(Classified):
    """A metric that needs the scores themselves."""

    def __init__(
        self,
        *,
        bins: int,
        classes: int | None = None,
        labels: int | None = None,
        ignore: int | None = None,
        validate: bool = False,
    ) -> None:
        super().__init__(classes=classes, labels=labels, ignore=ignore, validate=validate)
        self.bins: int = check_int("bins", bins, 1) or 1

    def _check(self, xp: Arrays, predictions: Any, targets: Any, *, scored: bool) -> None:
        if not scored:
            raise MetricError(
                f"`predictions` holds {predictions.dtype}, but {self._task} needs scores, which are "
                "floats. Pass probabilities instead of labels."
            )
        super()._check(xp, predictions, targets, scored=scored)

    def _targets(self, xp: Arrays, targets: Any) -> tuple[Labels, Any]:
        """Give the labels of targets, with their own for predictions, and whether any is none."""
        actual, kept = self._actual(xp, targets)
        labels = Labels(actual, actual, kept)
        if self.validate:
            self._validate(xp, "targets", actual)
        return labels, xp.outside(actual, self._values)

    def _binned(self, xp: Arrays, scores: Any, kept: Any, bins: int) -> tuple[Any, Any, Any]:
        """Give the bins of scores, the scores, and whether any is none; all have one shape."""
        fine = (scores >= 0) & (scores <= 1)
        if kept is not None:
            fine = fine | ~kept
        if self.validate and not bool(xp.lowest(xp.whole(fine))):
            # Which one is said by the extremes, of which a NaN is both.
            worst = float(xp.lowest(xp.where(fine, 0.0, scores)))
            worst = worst if worst < 0 else float(xp.highest(xp.where(fine, 0.0, scores)))
            raise MetricError(
                f"`predictions` holds the score {worst:.6g}, but must hold numbers from 0 to 1. Apply "
                "a sigmoid or a softmax first."
            )
        scores = xp.wide(xp.where(fine if kept is None else fine & kept, scores, 0.0))
        index = xp.clip(xp.whole(xp.floor(scores * self.bins)), 0, bins - 1)
        return index, scores, xp.total(~fine)


class CalibrationError(_Scored):
    """How far confidence is from accuracy, on average: the expected calibration error.

    Binary, the score is compared with how often the target is 1; multiclass, the highest score with how
    often it is right. Samples are put into `bins` of equal width by their score, and those of score 1
    into one of their own, as in torchmetrics. The differences of the means are weighted by size.
    """

    confidence = State("sum", "_bins")
    right = State("sum", "_bins")
    count = State("sum", "_bins")
    invalid = State("sum")

    def __init__(
        self,
        *,
        classes: int | None = None,
        bins: int = 15,
        ignore: int | None = None,
        validate: bool = False,
    ) -> None:
        super().__init__(bins=bins, classes=classes, ignore=ignore, validate=validate)
        self._bins = self.bins + 1

    def _counted(self, xp: Arrays, predictions: Any, targets: Any) -> Mapping[str, Any]:
        (_, actual, kept), invalid = self._targets(xp, targets)
        if self.classes is None:
            scores, right = predictions, actual == 1
        else:
            best, scores = best_class(xp, predictions, actual)
            right = best == actual
        index, scores, outside = self._binned(xp, scores, kept, self._bins)
        flat = index.reshape(-1)
        if kept is not None:
            right, kept = right & kept, kept.reshape(-1)
        return {
            "confidence": xp.counts(flat, self._bins, scores.reshape(-1)),
            "right": xp.counts(flat, self._bins, right.reshape(-1)),
            "count": xp.counts(flat, self._bins, kept),
            "invalid": xp.wide(invalid) + outside,
        }

    def finish(self, confidence: Any, right: Any, count: Any, invalid: Any) -> Any:
        """Give the mean difference."""
        xp = arrays_of(count)
        error = ratio(xp.total(abs(confidence - right)), xp.total(count), math.nan)
        return xp.where(invalid == 0, error, math.nan)


class _Curve(_Scored):
    """A metric of the scores of positives and those of negatives."""

    positives = State("sum", "_curves", "bins")
    negatives = State("sum", "_curves", "bins")
    invalid = State("sum")

    def __init__(
        self,
        *,
        classes: int | None = None,
        labels: int | None = None,
        average: Average = "macro",
        bins: int = 1000,
        ignore: int | None = None,
        validate: bool = False,
    ) -> None:
        super().__init__(
            bins=bins, classes=classes, labels=labels, ignore=ignore, validate=validate
        )
        self.average = check_choice("average", average, get_args(Average))
        self._curves = self.classes or self.labels or 1

    def _counted(self, xp: Arrays, predictions: Any, targets: Any) -> Mapping[str, Any]:
        labels, invalid = self._targets(xp, targets)
        scores, positive, kept = self._curves_of(xp, predictions, labels)
        bins, _, outside = self._binned(xp, scores, kept, self.bins)
        which = xp.arange(self._curves, targets).reshape(-1, 1)
        index = (2 * which + xp.whole(positive)) * self.bins + bins
        weights = None
        if kept is not None:
            weights = (kept | (which < 0)).reshape(-1)  # in the shape of all curves
        counts = xp.counts(index.reshape(-1), 2 * self._curves * self.bins, weights)
        counts = counts.reshape(self._curves, 2, self.bins)
        return {
            "negatives": counts[:, 0],
            "positives": counts[:, 1],
            "invalid": xp.wide(invalid) + outside,
        }

    def _curves_of(self, xp: Arrays, predictions: Any, labels: Labels) -> tuple[Any, Any, Any]:
        """Give scores, which of them are of positives, and which count, all as (N, curves, rest)."""
        actual, kept, curves = labels.actual, labels.kept, self._curves
        n = actual.shape[0] if actual.ndim else 1
        scores = predictions.reshape(n, curves, -1)
        if self.classes is None:
            shape = scores.shape
            return scores, actual.reshape(shape) == 1, None if kept is None else kept.reshape(shape)
        positive = actual.reshape(n, 1, -1) == xp.arange(curves, actual).reshape(-1, 1)
        return scores, positive, None if kept is None else kept.reshape(n, 1, -1)

    def finish(self, positives: Any, negatives: Any, invalid: Any) -> Any:
        """Give the value, averaged as it was asked for."""
        xp = arrays_of(positives)
        values = xp.where(invalid == 0, self.area(xp, positives, negatives), math.nan)
        if self.classes is None and self.labels is None:
            return values[0]
        if self.average is None:
            return values
        known = ~xp.isnan(values)
        weights = xp.wide(known)
        if self.average == "weighted":
            weights = weights * xp.total(positives, axis=1)
        return ratio(xp.total(xp.where(known, values, 0.0) * weights), xp.total(weights), math.nan)

    def area(self, xp: Arrays, positives: Any, negatives: Any) -> Any:
        """Give the area under each curve, NaN where there is none."""
        raise NotImplementedError


class AUROC(_Curve):
    """The area under the receiver operating characteristic.

    That is how often a positive has a higher score than a negative, of all pairs of both; of pairs in
    one bin, half. So it is exact if no positive shares a bin with a negative, or only those of equal
    scores do, and otherwise off by at most half the share of pairs that are in one bin: 0.0005 for
    scores that are spread evenly over 1000 bins.
    """

    def area(self, xp: Arrays, positives: Any, negatives: Any) -> Any:
        """Count the pairs that are in order."""
        there = xp.total(positives, axis=1).reshape(-1, 1)
        others = xp.total(negatives, axis=1).reshape(-1, 1)
        below = ratio(xp.cumsum(negatives, axis=1) - negatives / 2, others)
        area = xp.total(ratio(positives, there) * below, axis=1)
        return xp.where((there * others)[:, 0] > 0, area, math.nan)


class AveragePrecision(_Curve):
    """The mean of the precision at the score of each positive, as in scikit-learn.

    A positive has the precision at the lower end of its bin. That is off by at most the share which its
    bin has of all samples in it or above, and the value by the mean of this over the positives.
    """

    def area(self, xp: Arrays, positives: Any, negatives: Any) -> Any:
        """Add up the precision of each bin."""
        there = xp.total(positives, axis=1).reshape(-1, 1)
        right = there - xp.cumsum(positives, axis=1) + positives
        others = xp.total(negatives, axis=1).reshape(-1, 1)
        wrong = others - xp.cumsum(negatives, axis=1) + negatives
        area = xp.total(ratio(positives, there) * ratio(right, right + wrong), axis=1)
        return xp.where(there[:, 0] > 0, area, math.nan)
