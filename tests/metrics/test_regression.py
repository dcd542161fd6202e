"""Regression: the numbers of scikit-learn and scipy, also where they are hard to keep."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from everyrank.errors import MetricError
from everyrank.metrics.catalogue.regression import (
    CosineSimilarity,
    ExplainedVariance,
    MaxError,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    PearsonCorrelation,
    R2Score,
    RootMeanSquaredError,
    SymmetricMeanAbsolutePercentageError,
)

REFERENCES: dict[Any, Any] = {
    MeanSquaredError: sk.mean_squared_error,
    RootMeanSquaredError: sk.root_mean_squared_error,
    MeanAbsoluteError: sk.mean_absolute_error,
    MeanAbsolutePercentageError: sk.mean_absolute_percentage_error,
    MaxError: sk.max_error,
    R2Score: sk.r2_score,
    ExplainedVariance: sk.explained_variance_score,
    PearsonCorrelation: lambda t, p: stats.pearsonr(p, t).statistic,
}
WEIGHTED = [MeanSquaredError, RootMeanSquaredError, MeanAbsoluteError]
PAIRS = [*REFERENCES, SymmetricMeanAbsolutePercentageError]


def value(metric: Any, *batches: Any) -> float:
    """Give what a metric computes from batches of arguments."""
    for batch in batches:
        metric.update(*batch)
    return float(metric.compute())


def exact(x: Any, y: Any) -> tuple[Fraction, Fraction, Fraction]:
    """Give the sums of xx, xy and yy about the means by rational arithmetic."""
    x, y = [Fraction(float(v)) for v in x], [Fraction(float(v)) for v in y]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    pairs = [(a - mean_x, b - mean_y) for a, b in zip(x, y, strict=True)]
    return sum(a * a for a, _ in pairs), sum(a * b for a, b in pairs), sum(b * b for _, b in pairs)


@pytest.mark.parametrize("kind", REFERENCES)
@pytest.mark.parametrize("shape", [(50,), (2,), (10, 3)])
def test_the_reference_says_the_same(kind: Any, shape: tuple[int, ...]):
    """Every metric has scikit-learn's or scipy's number for all elements as samples."""
    predictions, targets = np.random.default_rng(0).normal(size=(2, *shape))
    expected = REFERENCES[kind](targets.ravel(), predictions.ravel())
    assert value(kind(), (predictions, targets)) == pytest.approx(expected, rel=1e-12)


def test_torchmetrics_says_the_same():
    """The symmetric percentage error and the cosine are those of torchmetrics."""
    from torchmetrics.functional import cosine_similarity as cosine
    from torchmetrics.functional import symmetric_mean_absolute_percentage_error as symmetric

    predictions, targets = torch.randn(
        2, 30, 4, generator=torch.Generator().manual_seed(0)
    ).double()
    smape = value(SymmetricMeanAbsolutePercentageError(), (predictions, targets))
    assert smape == pytest.approx(float(symmetric(predictions, targets)), rel=1e-12)
    expected = float(cosine(predictions, targets, reduction="mean"))
    assert value(CosineSimilarity(), (predictions, targets)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weights_are_those_of_scikit_learn(kind: Any):
    """A weight says how often its sample counts, and the mean is divided by all of them."""
    rng = np.random.default_rng(1)
    predictions, targets = rng.normal(size=(2, 20))
    weights = rng.random(20)
    expected = REFERENCES[kind](targets, predictions, sample_weight=weights)
    halves = [(predictions[s], targets[s], weights[s]) for s in (slice(7), slice(7, 20))]
    assert value(kind(), *halves) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", WEIGHTED)
def test_weight_zero_leaves_out_even_nan(kind: Any):
    """What has weight zero says nothing; nothing but such has no mean; a NaN of weight is NaN."""
    predictions, targets = np.array([1.0, np.nan, np.inf]), np.zeros(3)
    assert value(kind(), (predictions, targets, np.array([2, 0, 0]))) == 1.0
    assert math.isnan(value(kind(), (predictions, targets, np.zeros(3))))
    assert math.isnan(value(kind(), (predictions, targets, np.array([2, 1, 0]))))
    assert math.isnan(value(kind(), (np.ones(3), targets, np.array([2, np.nan, 0]))))


def test_weights_may_be_of_samples_or_of_all():
    """A weight of a row counts for each of its elements, and a number for everything."""
    predictions, targets = np.array([[1.0, 3.0], [5.0, 7.0]]), np.zeros((2, 2))
    by_row = value(MeanAbsoluteError(), (predictions, targets, np.array([3.0, 1.0])))
    assert by_row == (3 * (1 + 3) + 5 + 7) / 8
    both = [(predictions[:1], targets[:1], 3.0), (predictions[1:], targets[1:], 1)]
    assert value(MeanAbsoluteError(), *both) == by_row
    with pytest.raises(MetricError, match=r"`weights` has the shape \(3,\).*\(2, 2\)"):
        MeanAbsoluteError().update(predictions, targets, np.ones(3))


@pytest.mark.parametrize("kind", PAIRS)
def test_integers_numbers_and_lists_are_taken_too(kind: Any):
    """Unsigned bytes do not wrap around, and single numbers and lists are values."""
    predictions, targets = np.array([3, 250, 7, 0]), np.array([5, 0, 9, 0])
    expected = value(kind(), (predictions.astype(float), targets.astype(float)))
    for dtype in (np.uint8, np.int32):
        assert value(kind(), (predictions.astype(dtype), targets.astype(dtype))) == expected
    assert value(kind(), (predictions.tolist(), targets.tolist())) == expected
    single = [(int(p), torch.tensor(int(t))) for p, t in zip(predictions, targets, strict=True)]
    assert value(kind(), *single) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 1e3, -1e5, 1e7]),
    st.sampled_from([1.0, 1e-3]),
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(0, 1000),
)
def test_law_huge_offsets_do_not_eat_the_digits(
    offset: float, spread: float, sizes: list[int], seed: int
):
    """However the samples come in batches, what is lost is what rounding their means takes away."""
    # Two means of each of two variables are rounded where two batches meet.
    assert_digits(offset, spread, sizes, seed, 1e-9 + 4 * 2.0**-52 * abs(offset) / spread)


@pytest.mark.parametrize("sizes", [[2000], [500, 1, 499, 1000], [100] * 20])
def test_nine_digits_are_left_of_a_small_spread_far_from_zero(sizes: list[int]):
    """At 1e5 +- 1e-3, where sums of squares about zero would have none, nine digits are right."""
    assert_digits(1e5, 1e-3, sizes, 0, 1e-9)


def assert_digits(offset: float, spread: float, sizes: list[int], seed: int, error: float) -> None:
    """Compare the scores of random batches with rational arithmetic."""
    rng = np.random.default_rng(seed)
    targets = offset + spread * rng.normal(size=sum(sizes))
    predictions = targets + spread * rng.normal(size=sum(sizes))
    cuts = np.cumsum(sizes)[:-1]
    batches = list(zip(np.split(predictions, cuts), np.split(targets, cuts), strict=True))
    xx, xy, yy = exact(predictions, targets)
    errors = [
        Fraction(float(p)) - Fraction(float(t)) for p, t in zip(predictions, targets, strict=True)
    ]
    squared = sum(e * e for e in errors)
    centred, _, _ = exact(errors, errors)
    correlation = float(xy) / math.sqrt(float(xx) * float(yy))
    close = {"rel": error, "abs": error}
    assert value(PearsonCorrelation(), *batches) == pytest.approx(correlation, **close)
    assert value(R2Score(), *batches) == pytest.approx(float(1 - squared / yy), **close)
    assert value(ExplainedVariance(), *batches) == pytest.approx(float(1 - centred / yy), **close)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e5 / 3, 7e12 / 3])
@pytest.mark.parametrize("batches", [1, 4])
def test_constant_targets_are_known_as_such(constant: float, batches: int):
    """Rounding the mean is no variance: scores are 1 if met, else 0, and there is no correlation."""
    targets = np.full(40, constant)
    predictions = targets + np.random.default_rng(0).normal(size=40)

    def split(x: Any) -> Any:
        return zip(np.split(x, batches), np.split(targets, batches), strict=True)

    for kind in (R2Score, ExplainedVariance):
        assert value(kind(), *split(targets)) == 1.0
        assert value(kind(), *split(predictions)) == 0.0
        assert math.isnan(value(kind(), *split(targets * np.nan)))
    assert math.isnan(value(PearsonCorrelation(), *split(predictions)))


def test_one_sample_is_enough_for_an_error_and_too_few_for_a_score():
    """R2 and the correlation are NaN; the explained variance is 1, as in scikit-learn."""
    one = (np.array([1.0]), np.array([3.0]))
    assert [value(kind(), one) for kind in WEIGHTED] == [4.0, 2.0, 2.0]
    assert value(MaxError(), one) == 2.0
    assert math.isnan(value(R2Score(), one))
    assert math.isnan(value(PearsonCorrelation(), one))
    assert value(ExplainedVariance(), one) == sk.explained_variance_score([3.0], [1.0])


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_either_makes_nan(kind: Any, place: int):
    """A NaN among predictions or targets is not left out, also if batches without it follow."""
    pair = [np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 3.0])]
    fine = tuple(x.copy() for x in pair)
    pair[place][1] = np.nan
    assert math.isnan(value(kind(), fine, tuple(pair), fine))


def test_infinities_are_errors_without_end():
    """An infinite prediction makes errors infinite and R2 minus infinity, as arithmetic has it."""
    pair = (np.array([1.0, np.inf, 4.0]), np.array([1.0, 3.0, 3.0]))
    for kind in (*WEIGHTED, MaxError, MeanAbsolutePercentageError):
        assert value(kind(), pair) == math.inf
    assert value(R2Score(), pair) == -math.inf
    assert math.isnan(value(PearsonCorrelation(), pair))


def test_percentages_of_zero_are_as_documented():
    """A target of 0 counts as 2.2e-16, as in scikit-learn; where both are 0 there is no error."""
    pair = (np.array([0.5, 0.0, 3.0]), np.array([0.0, 0.0, 2.0]))
    expected = sk.mean_absolute_percentage_error(pair[1], pair[0])
    assert value(MeanAbsolutePercentageError(), pair) == pytest.approx(expected, rel=1e-12)
    assert value(SymmetricMeanAbsolutePercentageError(), pair) == pytest.approx((2 + 0 + 0.4) / 3)


def test_cosines_need_a_direction_and_no_size():
    """Rows of zeros count as 0, and rows whose squares are no numbers as any other."""
    rows = torch.tensor(
        [[3.0, 4.0], [0.0, 0.0], [3e200, 4e200], [3e-200, 4e-200]], dtype=torch.float64
    )
    targets = torch.tensor([[4.0, 3.0], [1.0, 0.0], [3e200, -4e200], [3e-200, 4e-200]]).double()
    targets[2:] = rows[2:] * torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    cosines = [value(CosineSimilarity(), (r, t)) for r, t in zip(rows, targets, strict=True)]
    assert cosines == pytest.approx([0.96, 0.0, -0.28, 1.0])
    assert value(CosineSimilarity(), (rows, targets)) == pytest.approx(sum(cosines) / 4)
    with pytest.raises(MetricError, match=r"shape \(\), but must hold vectors"):
        CosineSimilarity().update(1.0, 1.0)


@pytest.mark.parametrize("kind", [*PAIRS, CosineSimilarity])
def test_unequal_shapes_are_refused(kind: Any):
    """What would broadcast to a wrong number is an error that says how to go on."""
    with pytest.raises(
        MetricError, match=r"`predictions` has the shape \(4, 1\), but `targets` \(4,\)"
    ):
        kind().update(np.ones((4, 1)), np.ones(4))
    with pytest.raises(MetricError, match=r"targets\.reshape\(predictions\.shape\)"):
        kind().update(np.ones((4, 1)), np.ones(4))
    with pytest.raises(MetricError, match="sliced or padded"):
        kind().update(np.ones(4), np.ones(5))


def test_a_correlation_is_never_beyond_one():
    """Rounding does not make it more than perfect."""
    for seed in range(30):
        x = np.random.default_rng(seed).normal(size=7)
        assert value(PearsonCorrelation(), (3 * x + 1, x)) == pytest.approx(1.0, abs=1e-15)
        assert -1.0 <= value(PearsonCorrelation(), (-x / 3, x)) <= 1.0
