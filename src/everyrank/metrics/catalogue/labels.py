"""Labels: what predictions and targets say about each sample, as integers.

A metric of classification is for one of three tasks, which its options choose:

* none: **binary**. Every target is 0 or 1.
* `classes=10`: **multiclass**. Every target is one of 0 to 9.
* `labels=5`: **multilabel**. Targets are (N, 5, ...), and each is 0 or 1.

Predictions are labels of the same shape, or scores: floats, of which binary and multilabel metrics take
those above `threshold` as 1, and multiclass metrics the highest along axis 1 of (N, classes, ...). Of
equal scores the first counts. Samples, or labels of samples, whose target is `ignore` are left out.

**What is no label.** A score of NaN, or a label that is out of range, is never counted as some class:
it makes the result NaN until `reset`. With `validate=True` it is refused at once, which waits for the
device at every update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from everyrank.arrays import Arrays, arrays_of
from everyrank.errors import MetricError, OptionError
from everyrank.metrics.declared import DeclaredMetric


class Labels(NamedTuple):
    """Integers in the shape of the targets; where a sample is left out, both are 0."""

    predicted: Any
    actual: Any
    kept: Any  # which samples count, or None for all of them

    def flat(self) -> Labels:
        """Give the same with a single axis."""
        kept = None if self.kept is None else self.kept.reshape(-1)
        return Labels(self.predicted.reshape(-1), self.actual.reshape(-1), kept)


class Task(TypedDict, total=False):
    """The options that every metric of labels has."""

    classes: int | None
    labels: int | None
    threshold: float
    ignore: int | None
    validate: bool


class Classified(DeclaredMetric):
    """A metric of predictions and targets, for one of the three tasks.

    It has a state `invalid`, declared after the others so that a large one begins where memory does.
    """

    def __init__(
        self,
        *,
        classes: int | None = None,
        labels: int | None = None,
        ignore: int | None = None,
        validate: bool = False,
    ) -> None:
        if classes is not None and labels is not None:
            raise OptionError(
                f"classes={classes!r} and labels={labels!r} are for different tasks. Pass `classes` "
                "if every sample has one label, and `labels` if it may have several."
            )
        self.classes = check_int("classes", classes, 2)
        self.labels = check_int("labels", labels, 1)
        self.ignore = check_int("ignore", ignore, None)
        self.validate = bool(validate)

    @property
    def _values(self) -> int:
        """How many values a label can have."""
        return self.classes or 2

    @property
    def _task(self) -> str:
        """The metric as it is written for its task, for messages."""
        option = "classes" if self.classes else "labels"
        value = self.classes or self.labels
        return f"{type(self).__name__}({f'{option}={value}' if value else ''})"

    def batch(self, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Take in predictions and targets; see the head of `everyrank.metrics.catalogue.labels`."""
        xp = arrays_of(targets)
        self._check(xp, predictions, targets, scored=xp.is_float(predictions))
        return self._counted(xp, predictions, targets) if math.prod(targets.shape) else {}

    def _counted(self, xp: Arrays, predictions: Any, targets: Any) -> Mapping[str, Any]:
        """Say what a batch contributes that is not empty."""
        raise NotImplementedError

    def _check(self, xp: Arrays, predictions: Any, targets: Any, *, scored: bool) -> None:
        """Refuse shapes and types that do not belong together; `scored` says if there are scores."""
        if xp.is_float(targets):
            raise MetricError(
                f"`targets` holds floats ({targets.dtype}), but must hold labels, which are integers "
                "or truth values. Convert them, for example with torch's targets.long()."
            )
        shape, expected = tuple(predictions.shape), tuple(targets.shape)
        if scored and self.classes is not None:
            expected = (*expected[:1], self.classes, *expected[1:])
        if shape != expected:
            kind = "scores" if scored else "labels"
            raise MetricError(
                f"`predictions` has the shape {shape}, but {kind} for {self._task} and `targets` of "
                f"shape {tuple(targets.shape)} have {expected}. {self._next_step(shape, expected)}"
            )
        if self.labels is not None and (len(shape) < 2 or shape[1] != self.labels):
            raise MetricError(
                f"`predictions` has the shape {shape}, but {self._task} needs (N, {self.labels}, ...). "
                "Move the axis of labels to 1, or set `labels`."
            )

    def _next_step(self, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
        if self.classes is None and len(shape) == len(expected) + 1 and shape[1] > 1:
            return f"Set classes={shape[1]} if every sample has one of {shape[1]} classes."
        if self.classes is not None and sorted(shape) == sorted(expected):
            return "Move the axis of classes to 1, for example with torch's movedim(-1, 1)."
        if math.prod(shape) == math.prod(expected):
            return f"Reshape them, for example with predictions.reshape({expected})."
        return "Look at where they are sliced or padded."

    def _actual(self, xp: Arrays, targets: Any) -> tuple[Any, Any]:
        """Give targets as integers, and which of them count, or None for all."""
        actual = xp.whole(targets)
        if self.ignore is None:
            return actual, None
        kept = actual != self.ignore
        return xp.where(kept, actual, 0), kept

    def _invalid(self, xp: Arrays, labels: Labels, *, scored: bool) -> Any:
        """Say whether there is anything that is no label; with validate=True raise if so."""
        size = self._values
        if self.validate:
            if not scored:
                self._validate(xp, "predictions", labels.predicted)
            elif bool(xp.outside(labels.predicted, size)):
                raise MetricError(
                    "`predictions` holds NaN, but must hold numbers. Look for where it comes from, or "
                    "set `ignore` to leave out samples by their target."
                )
            self._validate(xp, "targets", labels.actual)
        return xp.outside(labels.predicted, size) | xp.outside(labels.actual, size)

    def _validate(self, xp: Arrays, name: str, labels: Any) -> None:
        """Raise if there is a label that is out of range; waits for the device."""
        last = self._values - 1
        lowest, highest = int(xp.lowest(labels)), int(xp.highest(labels))
        if lowest < 0 or highest > last:
            value = lowest if lowest < 0 else highest
            raise MetricError(
                f"`{name}` holds the label {value}, but {self._task} knows 0 to {last}. Correct it, or "
                f"leave samples with such a target out with ignore={value}."
            )


class Decided(Classified):
    """A metric that looks at labels only, and makes them of scores."""

    def __init__(
        self,
        *,
        classes: int | None = None,
        labels: int | None = None,
        threshold: float = 0.5,
        ignore: int | None = None,
        validate: bool = False,
    ) -> None:
        super().__init__(classes=classes, labels=labels, ignore=ignore, validate=validate)
        if isinstance(threshold, bool) or not isinstance(threshold, int | float):
            raise OptionError(
                f"threshold={threshold!r} must be a number, such as 0.5 for probabilities or 0.0 for "
                "logits."
            )
        self.threshold = threshold
        self._top = 1

    def _of_labels(self, xp: Arrays, labels: Labels) -> dict[str, Any]:
        """Say what the labels of a batch contribute, whatever is no label counted as some other."""
        raise NotImplementedError

    def _counted(self, xp: Arrays, predictions: Any, targets: Any) -> Mapping[str, Any]:
        scored = xp.is_float(predictions)
        actual, kept = self._actual(xp, targets)
        if not scored:
            predicted = xp.whole(predictions)
        elif self.classes is None:
            above = xp.whole(predictions > self.threshold)
            predicted = xp.where(xp.isnan(predictions), -1, above)
        else:
            predicted = best_class(xp, predictions, actual, self._top)[0]
        if kept is not None:
            predicted = xp.where(kept, predicted, 0)
        labels = Labels(predicted, actual, kept)
        invalid = self._invalid(xp, labels, scored=scored)
        return {**self._of_labels(xp, labels), "invalid": xp.wide(invalid)}


def best_class(xp: Arrays, scores: Any, actual: Any, top: int = 1) -> tuple[Any, Any]:
    """Give the class with the highest score along axis 1, and that score.

    Where the actual class is among the `top` highest, it is given. It is -1 where a score is NaN.
    """
    axis = min(1, scores.ndim - 1)
    best = xp.argmax(scores, axis=axis)
    highest = xp.take(scores, _with_axis(best, axis), axis=axis).reshape(best.shape)
    if top > 1:
        size = scores.shape[axis]
        own = _with_axis(xp.clip(actual, 0, size - 1), axis)
        score = xp.take(scores, own, axis=axis)
        ids = xp.arange(size, scores).reshape((size,) + (1,) * (scores.ndim - axis - 1))
        before = (scores > score) | ((scores == score) & (ids < own))
        hit = (xp.total(before, axis=axis) < top) & (actual >= 0) & (actual < size)
        best = xp.where(hit, actual, xp.whole(best))
    return xp.where(xp.isnan(highest), -1, xp.whole(best)), highest


def _with_axis(x: Any, axis: int) -> Any:
    return x.reshape((*x.shape[:axis], 1, *x.shape[axis:]))


def ratio(top: Any, bottom: Any, otherwise: float = 0.0) -> Any:
    """Divide, and give `otherwise` where there is nothing to divide by."""
    xp = arrays_of(bottom)
    some = bottom != 0
    return xp.where(some, top / xp.where(some, bottom, 1.0), otherwise)


def check_int(name: str, value: int | None, least: int | None) -> int | None:
    """Check an option that is a whole number or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{name}={value!r} must be a whole number or None, such as {name}=10.")
    if least is not None and value < least:
        raise OptionError(f"{name}={value!r} must be at least {least}, such as {name}=10.")
    return value


def check_choice(name: str, value: Any, allowed: Sequence[str | None]) -> Any:
    """Check an option that is one of a few."""
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}.")
    return value
