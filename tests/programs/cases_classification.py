"""Cases of the metrics of classification, curves and calibration, in each task."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from metric_cases import Case

from everyrank.metrics.catalogue import classification, confusion, curves

Rng = np.random.Generator


def binary(rng: Rng, n: int, *, logits: bool = False) -> tuple[Any, ...]:
    """Give scores, and targets that they have to do with."""
    targets = rng.integers(0, 2, n)
    scores = 0.6 * rng.random(n) + 0.4 * targets
    return (4 * scores - 2 if logits else scores).astype(np.float32), targets


def decided(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give labels of 0 and 1 in rows of three, some of which are to be ignored."""
    targets = np.where(rng.random((n, 3)) < 0.2, -100, rng.integers(0, 2, (n, 3)))
    return rng.random((n, 3)) < 0.6, targets


def multiclass(rng: Rng, n: int, *, inner: tuple[int, ...] = ()) -> tuple[Any, ...]:
    """Give probabilities of five classes; the last hardly occurs, and some targets are ignored."""
    targets = rng.choice(5, (n, *inner), p=[0.3, 0.3, 0.2, 0.19, 0.01])
    logits = rng.normal(size=(n, 5, *inner)) + 2 * (
        np.moveaxis(np.eye(5)[targets], -1, 1) if inner else np.eye(5)[targets]
    )
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return scores.astype(np.float32), np.where(rng.random(targets.shape) < 0.1, -100, targets)


def classes(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give labels of five classes."""
    targets = rng.integers(0, 5, n)
    return np.where(rng.random(n) < 0.5, targets, rng.integers(0, 5, n)), targets


def multilabel(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give scores of three labels, which are not equally frequent, and some to be ignored."""
    targets = (rng.random((n, 3)) < [0.5, 0.2, 0.7]).astype(np.int64)
    scores = (0.7 * rng.random((n, 3)) + 0.3 * targets).astype(np.float32)
    return scores, np.where(rng.random((n, 3)) < 0.1, -1, targets)


CASES: dict[str, Case] = {
    "ConfusionMatrix": Case(confusion.ConfusionMatrix, binary),
    "ConfusionMatrix(classes)": Case(partial(confusion.ConfusionMatrix, classes=5), classes),
    "ConfusionMatrix(classes, normalize)": Case(
        partial(confusion.ConfusionMatrix, classes=5, ignore=-100, normalize="true"), multiclass
    ),
    "ConfusionMatrix(labels)": Case(
        partial(confusion.ConfusionMatrix, labels=3, ignore=-1), multilabel
    ),
    "MatthewsCorrelation": Case(
        partial(confusion.MatthewsCorrelation, threshold=0.0), partial(binary, logits=True)
    ),
    "MatthewsCorrelation(classes)": Case(
        partial(confusion.MatthewsCorrelation, classes=5, ignore=-100), multiclass
    ),
    "MatthewsCorrelation(labels)": Case(
        partial(confusion.MatthewsCorrelation, labels=3, ignore=-1), multilabel
    ),
    "CohenKappa": Case(partial(confusion.CohenKappa, ignore=-100), decided),
    "CohenKappa(classes)": Case(partial(confusion.CohenKappa, classes=5), classes),
    "CohenKappa(classes, quadratic)": Case(
        partial(confusion.CohenKappa, classes=5, weights="quadratic", ignore=-100), multiclass
    ),
    "Accuracy(classes, top_k)": Case(
        partial(classification.Accuracy, classes=5, top_k=2, average=None, ignore=-100), multiclass
    ),
    "CalibrationError": Case(curves.CalibrationError, binary),
    "CalibrationError(classes)": Case(
        partial(curves.CalibrationError, classes=5, bins=10, ignore=-100), multiclass
    ),
}

for _kind in (
    classification.Accuracy,
    classification.Precision,
    classification.Recall,
    classification.Specificity,
    partial(classification.FBeta, beta=0.5),
    classification.F1,
    classification.JaccardIndex,
    classification.HammingDistance,
):
    _name = getattr(_kind, "__name__", "FBeta")
    CASES |= {
        _name: Case(_kind, binary),
        f"{_name}(ignore)": Case(partial(_kind, ignore=-100), decided),
        f"{_name}(classes, micro)": Case(partial(_kind, classes=5, average="micro"), classes),
        f"{_name}(classes, macro)": Case(
            partial(_kind, classes=5, average="macro", ignore=-100), partial(multiclass, inner=(2,))
        ),
        f"{_name}(classes, weighted)": Case(
            partial(_kind, classes=5, average="weighted", ignore=-100), multiclass
        ),
        f"{_name}(classes, None)": Case(partial(_kind, classes=5, average=None), classes),
        f"{_name}(labels, micro)": Case(
            partial(_kind, labels=3, average="micro", ignore=-1), multilabel
        ),
        f"{_name}(labels, macro)": Case(
            partial(_kind, labels=3, average="macro", ignore=-1), multilabel
        ),
    }

for _curve in (curves.AUROC, curves.AveragePrecision):
    CASES |= {
        _curve.__name__: Case(_curve, binary),
        f"{_curve.__name__}(classes)": Case(
            partial(_curve, classes=5, bins=50, ignore=-100), partial(multiclass, inner=(2,))
        ),
        f"{_curve.__name__}(classes, None)": Case(
            partial(_curve, classes=5, average=None, ignore=-100), multiclass
        ),
        f"{_curve.__name__}(labels, weighted)": Case(
            partial(_curve, labels=3, average="weighted", bins=100, ignore=-1), multilabel
        ),
    }
