"""Metrics of classification, each for all three tasks.

    accuracy = Accuracy()                           # binary
    accuracy = Accuracy(classes=10)                 # multiclass
    accuracy = Accuracy(labels=5, threshold=0.0)    # multilabel, from logits
    accuracy.update(predictions, targets)

What predictions and targets may be is said in `labels`. Of several classes or labels there is an
`average`:

* "micro" counts all decisions alike,
* "macro" is the mean over the classes that occur in predictions or targets, or over all labels,
* "weighted" is the mean weighted by how often each occurs in the targets,
* None gives one value for each.

Binary metrics are about the label 1, whatever the average. Where a class gives nothing to divide
by, it has 0, as in scikit-learn; where nothing was taken in at all, the value is NaN.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack, get_args

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import OptionError
from everyrank.metrics.catalogue.labels import Decided, Labels, Task, check_choice, check_int, ratio
from everyrank.metrics.states import State

Average = Literal["micro", "macro", "weighted", None]


class _Averaged(Decided):
    """A metric of four counts: how often a class was hit, predicted, there, and decided on at all."""

    hits = State("sum", "_width")
    predicted = State("sum", "_width")
    actual = State("sum", "_width")
    count = State("sum", "_width")
    invalid = State("sum")

    def __init__(self, *, average: Average = "macro", **task: Unpack[Task]) -> None:
        super().__init__(**task)
        self.average = check_choice("average", average, get_args(Average))
        self._width = 1 if average == "micro" else self.classes or self.labels or 1

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the value of each class from its counts."""
        raise NotImplementedError

    def _of_labels(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        if self.classes is None:
            return self._of_each(xp, labels)
        return self._of_all(xp, labels) if self._width == 1 else self._of_classes(xp, labels.flat())

    def _of_classes(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        predicted = xp.clip(labels.predicted, 0, self._width - 1)
        actual = xp.clip(labels.actual, 0, self._width - 1)
        hit = predicted == actual if labels.kept is None else (predicted == actual) & labels.kept
        counts = xp.counts(actual, self._width, labels.kept)
        return {
            "hits": xp.counts(actual, self._width, hit),
            "predicted": xp.counts(predicted, self._width, labels.kept),
            "actual": counts,
            "count": xp.total(counts) + 0 * counts,
        }

    def _of_all(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        """Count without looking at single classes, of which each is a decision."""
        hit = labels.predicted == labels.actual
        hits = xp.total(hit if labels.kept is None else hit & labels.kept)
        kept = _kept(xp, labels, hits)
        count = kept * float(self.classes or 1)
        return {"hits": hits, "predicted": kept, "actual": kept, "count": count}

    def _of_each(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        """Count 0 and 1, each label apart unless they are averaged."""
        predicted, actual = labels.predicted == 1, labels.actual == 1
        shape = (-1, self._width, math.prod(actual.shape[2:]) if self._width > 1 else 1)

        def total(x: Any) -> Any:
            return xp.total(x.reshape(shape), axis=(0, 2))

        there = total(actual)
        return {
            "hits": total(predicted & actual),
            "predicted": total(predicted),
            "actual": there,
            "count": 0.0 * there + math.prod(actual.shape) / self._width
            if labels.kept is None
            else total(labels.kept),
        }

    def finish(self, hits: Any, predicted: Any, actual: Any, count: Any, invalid: Any) -> Any:
        """Give the value, averaged as it was asked for."""
        xp = arrays_of(hits)
        values = self.score(hits, predicted, actual, count)
        if self.average is None and (self.classes or self.labels):
            return xp.where((count > 0) & (invalid == 0), values, math.nan)
        if self._width == 1:
            value = values[0]
        else:
            weights = xp.wide(self._occurs(predicted, actual, count))
            if self.average == "weighted":
                weights = actual
            value = ratio(xp.total(values * weights), xp.total(weights))
        return xp.where((xp.total(count) > 0) & (invalid == 0), value, math.nan)

    def _right(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of decisions that are right; a sample of one class is decided on once."""
        if self.classes:
            return ratio(hits, actual)
        return ratio(count - predicted - actual + 2 * hits, count)

    def _occurs(self, predicted: Any, actual: Any, count: Any) -> Any:
        """Say which classes are averaged over."""
        return predicted + actual > 0 if self.classes else count > 0


class Accuracy(_Averaged):
    """How many predictions are right, as a share of all.

    The default of `average` is "micro". Of a single class it is the share of its samples that were
    found, so that "macro" is what is called balanced accuracy. With `top_k=5` a prediction is right if
    the target is among the five classes of the highest scores; labels are taken as they are.
    """

    def __init__(
        self,
        *,
        average: Average = "micro",
        top_k: int = 1,
        **task: Unpack[Task],
    ) -> None:
        super().__init__(average=average, **task)
        self.top_k = self._top = check_int("top_k", top_k, 1) or 1
        if self.top_k > 1 and (self.classes is None or self.top_k > self.classes):
            raise OptionError(
                f"top_k={top_k!r} must be at most classes={self.classes!r}, and is for multiclass "
                "metrics only."
            )

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of right decisions."""
        return self._right(hits, predicted, actual, count)

    def _occurs(self, predicted: Any, actual: Any, count: Any) -> Any:
        # Of the other predictions among the top k it is not known which one was meant.
        return super()._occurs(predicted if self.top_k == 1 else actual, actual, count)


class Precision(_Averaged):
    """How much of what was predicted is right; the default of `average` is "macro"."""

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of the predictions that are right."""
        return ratio(hits, predicted)


class Recall(_Averaged):
    """How much of what is there was predicted; the default of `average` is "macro"."""

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of the targets that were found."""
        return ratio(hits, actual)


class Specificity(_Averaged):
    """How much of what is not there was not predicted; the default of `average` is "macro"."""

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of the others that were left alone."""
        return ratio(count - predicted - actual + hits, count - actual)


class FBeta(_Averaged):
    """The harmonic mean of precision and recall, with recall `beta` times as important.

    The default of `average` is "macro".
    """

    def __init__(self, *, beta: float, average: Average = "macro", **task: Unpack[Task]) -> None:
        super().__init__(average=average, **task)
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < math.inf:
            raise OptionError(f"beta={beta!r} must be a number above 0, such as 1.0 for F1.")
        self.beta = float(beta)

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the weighted harmonic mean, from counts."""
        square = self.beta**2
        return ratio((1 + square) * hits, square * actual + predicted)


class F1(FBeta):
    """The harmonic mean of precision and recall; the default of `average` is "macro"."""

    def __init__(self, *, average: Average = "macro", **task: Unpack[Task]) -> None:
        super().__init__(beta=1.0, average=average, **task)


class JaccardIndex(_Averaged):
    """What is there and predicted, as a share of what is either.

    The default of `average` is "macro".
    """

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give intersection over union."""
        return ratio(hits, predicted + actual - hits)


class HammingDistance(_Averaged):
    """How many decisions are wrong, as a share of all: 1 - accuracy, for any average."""

    def __init__(self, *, average: Average = "micro", **task: Unpack[Task]) -> None:
        super().__init__(average=average, **task)

    def score(self, hits: Any, predicted: Any, actual: Any, count: Any) -> Any:
        """Give the share of wrong decisions."""
        return 1.0 - self._right(hits, predicted, actual, count)


def _kept(xp: Arrays, labels: Labels, like: Any) -> Any:
    """Give how many samples count."""
    if labels.kept is None:
        return 0.0 * like + math.prod(labels.actual.shape)
    return xp.total(labels.kept)
