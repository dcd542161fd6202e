"""Curves and calibration: how near histograms come to what scikit-learn has of every score."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError, OptionError
from everyrank.metrics.catalogue.curves import AUROC, AveragePrecision, CalibrationError


def value(metric: Any, scores: Any, targets: Any, parts: int = 1) -> Any:
    """Give what a metric computes, from some batches."""
    scores, targets = torch.as_tensor(scores), torch.as_tensor(targets)
    for batch in zip(scores.chunk(parts), targets.chunk(parts), strict=True):
        metric.update(*batch)
    return metric.compute().numpy()


def samples(seed: int, n: int) -> tuple[Any, Any]:
    """Give scores, some crowded and some at the ends, and targets with both labels."""
    rng = np.random.default_rng(seed)
    targets = rng.permutation(np.arange(n) % rng.integers(2, n + 1) == 0).astype(int)
    targets[:2] = 0, 1
    scores = rng.beta(*rng.choice([0.2, 1.0, 4.0], 2), size=n)
    return np.where(targets == 1, np.sqrt(scores), scores), targets


def by_torchmetrics(name: str, scores: Any, targets: Any, **options: Any) -> Any:
    """Give what a function of torchmetrics says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchmetrics.functional.classification as tm

        found = getattr(tm, name)(torch.as_tensor(scores), torch.as_tensor(targets), **options)
    return found.numpy()


def softmax(x: Any) -> Any:
    """Give probabilities along axis 1."""
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


CURVES = pytest.mark.parametrize(
    ("make", "reference"),
    [(AUROC, sk.roc_auc_score), (AveragePrecision, sk.average_precision_score)],
)


@CURVES
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 80), st.sampled_from([1, 2, 7, 64]))
def test_law_it_is_exact_for_scores_in_bins(
    make: Any, reference: Any, seed: int, n: int, bins: int
):
    """The value is that of scikit-learn for scores that are rounded down to their bins."""
    scores, targets = samples(seed, n)
    rounded = np.minimum(np.floor(scores * bins), bins - 1) / bins
    found = value(make(bins=bins), scores, targets, 1 + seed % 3 if n > 9 else 1)
    assert found == pytest.approx(reference(targets, rounded), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 80), st.sampled_from([1, 2, 7, 64]))
def test_law_auroc_is_off_by_at_most_half_the_pairs_in_one_bin(seed: int, n: int, bins: int):
    """The bound of the docstring holds against scikit-learn on the scores themselves."""
    scores, targets = samples(seed, n)
    index = np.minimum(np.floor(scores * bins), bins - 1)
    pairs = index[targets == 1][:, None] == index[targets == 0]
    off = abs(value(AUROC(bins=bins), scores, targets) - sk.roc_auc_score(targets, scores))
    assert off <= pairs.mean() / 2 + 1e-12


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 80), st.sampled_from([1, 2, 7, 64]))
def test_law_average_precision_is_off_by_at_most_what_shares_bins(seed: int, n: int, bins: int):
    """The bound of the docstring holds against scikit-learn on the scores themselves."""
    scores, targets = samples(seed, n)
    index = np.minimum(np.floor(scores * bins), bins - 1)
    shares = [np.sum(index == i) / np.sum(index >= i) for i in index[targets == 1]]
    found = value(AveragePrecision(bins=bins), scores, targets)
    assert abs(found - sk.average_precision_score(targets, scores)) <= np.mean(shares) + 1e-12


def test_the_default_bins_are_fine_for_spread_scores():
    """Scores that are spread evenly are off by 0.0005 at most."""
    rng = np.random.default_rng(0)
    scores, targets = rng.random(20_000), rng.integers(0, 2, 20_000)
    assert abs(value(AUROC(), scores, targets) - sk.roc_auc_score(targets, scores)) < 5e-4
    expected = sk.average_precision_score(targets, scores)
    assert abs(value(AveragePrecision(), scores, targets) - expected) < 2e-3


@CURVES
@pytest.mark.parametrize("average", ["macro", "weighted", None])
def test_several_classes_and_labels_are_those_of_scikit_learn(
    make: Any, reference: Any, average: Any
):
    """One against the rest, with inner axes, and each label, for every average."""
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 4, (50, 3))
    scores = np.round(softmax(rng.normal(size=(50, 4, 3))), 3) + 0.0005  # in the middle of bins
    found = value(make(classes=4, average=average), scores, targets, 2)
    each = np.eye(4, dtype=int)[targets.reshape(-1)]
    flat = np.moveaxis(scores, 1, -1).reshape(-1, 4)
    np.testing.assert_allclose(found, reference(each, flat, average=average), rtol=1e-12)
    found = value(make(labels=4, average=average), flat, each, 3)
    np.testing.assert_allclose(found, reference(each, flat, average=average), rtol=1e-12)


@pytest.mark.parametrize("average", ["macro", "weighted"])
@pytest.mark.parametrize(
    ("make", "name"), [(AUROC, "auroc"), (AveragePrecision, "average_precision")]
)
def test_torchmetrics_says_the_same_where_all_is_there(make: Any, name: str, average: Any):
    """With ignored targets, in tasks with several classes."""
    rng = np.random.default_rng(2)
    targets = np.where(rng.random(80) < 0.2, -1, rng.integers(0, 4, 80))
    scores = softmax(rng.normal(size=(80, 4))).astype(np.float32)
    options = {"average": average, "ignore_index": -1, "num_classes": 4}
    expected = by_torchmetrics(f"multiclass_{name}", scores, targets, **options)
    found = value(make(classes=4, average=average, ignore=-1, bins=100_000), scores, targets)
    assert found == pytest.approx(float(expected), abs=1e-4)


@CURVES
def test_a_class_without_a_curve_is_nan_and_left_out(make: Any, reference: Any):
    """One class only is NaN; of several, those that are known are averaged."""
    scores = torch.tensor([0.2, 0.7, 0.9])
    assert math.isnan(value(make(), scores, torch.tensor([0, 0, 0])))
    assert make is AveragePrecision or math.isnan(value(make(), scores, torch.tensor([1, 1, 1])))
    many, targets = torch.tensor([[0.2, 0.8, 0], [0.7, 0.3, 0], [0.4, 0.6, 0]]), [1, 1, 0]
    each = value(make(classes=3, average=None), many, torch.tensor(targets))
    assert np.isnan(each).tolist() == [False, False, True]
    assert value(make(classes=3), many, torch.tensor(targets)) == pytest.approx(np.mean(each[:2]))


@CURVES
@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, math.inf, -math.inf])
def test_a_score_that_is_none_makes_the_value_nan(make: Any, reference: Any, wrong: float):
    """It is not put into the nearest bin, unless its target is ignored."""
    scores, targets = torch.tensor([0.1, 0.6, 0.4, wrong]), torch.tensor([0, 1, 1, 1])
    assert math.isnan(value(make(), scores, targets))
    targets[-1] = -100
    assert value(make(ignore=-100), scores, targets) == 1.0
    with pytest.raises(MetricError, match=rf"the score {wrong}, but.*sigmoid"):
        make(validate=True).update(scores, torch.tensor([0, 1, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_scores_may_be_of_any_float_type(dtype: torch.dtype):
    """Narrow floats are widened before they are put into bins."""
    scores, targets = torch.rand(200, generator=torch.Generator().manual_seed(0)).to(dtype), None
    targets = torch.arange(200) % 3 == 0
    expected = sk.roc_auc_score(targets, scores.double())
    assert value(AUROC(bins=4096), scores, targets) == pytest.approx(expected, abs=1e-3)
    expected = by_torchmetrics("binary_calibration_error", scores.float(), targets.int(), n_bins=15)
    assert value(CalibrationError(), scores, targets) == pytest.approx(float(expected), abs=1e-6)


# ---------------------------------------------------------------------------- calibration


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from([1, 10, 15]))
def test_law_the_calibration_error_is_that_of_torchmetrics(seed: int, n: int, bins: int):
    """Binary and multiclass, with scores of exactly 1, ignored targets and several batches."""
    rng = np.random.default_rng(seed)
    scores = np.where(rng.random(n) < 0.1, 1.0, rng.random(n)).astype(np.float32)
    targets = np.where(rng.random(n) < 0.2, -1, rng.integers(0, 2, n))
    targets[0] = 1
    options = {"n_bins": bins, "ignore_index": -1}
    expected = by_torchmetrics("binary_calibration_error", scores, targets, **options)
    found = value(CalibrationError(bins=bins, ignore=-1), scores, targets)
    assert found == pytest.approx(float(expected), abs=1e-6)

    many = softmax(2 * rng.normal(size=(n, 4, 2))).astype(np.float32)
    targets = np.where(rng.random((n, 2)) < 0.2, -1, rng.integers(0, 4, (n, 2)))
    targets[0] = 1
    name = "multiclass_calibration_error"
    expected = by_torchmetrics(name, many, targets, num_classes=4, **options)
    found = value(CalibrationError(classes=4, bins=bins, ignore=-1), many, targets)
    assert found == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan])
def test_confidence_is_from_0_to_1(wrong: float):
    """Logits and NaN make the error NaN, and are refused on demand."""
    scores, targets = torch.tensor([0.1, wrong]), torch.tensor([0, 1])
    assert math.isnan(value(CalibrationError(), scores, targets))
    with pytest.raises(MetricError, match=rf"the score {wrong}"):
        CalibrationError(validate=True).update(scores, targets)


# ---------------------------------------------------------------------------- messages


def test_labels_are_no_scores():
    """Predictions must be floats."""
    for metric in (AUROC(), AveragePrecision(), CalibrationError()):
        with pytest.raises(MetricError, match=r"`predictions` holds torch.int64.*probabilities"):
            metric.update(torch.tensor([1]), torch.tensor([1]))


def test_a_target_that_is_out_of_range_is_refused_on_demand():
    """With validate=True the message says what it is."""
    with pytest.raises(
        MetricError, match=r"`targets` holds the label 2, but AUROC\(\) knows 0 to 1"
    ):
        AUROC(validate=True).update(torch.tensor([0.5]), torch.tensor([2]))


def test_options_that_cannot_be_honoured_are_refused():
    """The message names the option, its value and what is allowed."""
    with pytest.raises(
        OptionError, match=r"average='micro' must be one of 'macro', 'weighted', None"
    ):
        AUROC(classes=3, average="micro")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"bins=0 must be at least 1"):
        AveragePrecision(bins=0)
