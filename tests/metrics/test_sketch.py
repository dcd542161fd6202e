"""Sketches: every quantile is within the error that is promised, and nothing gets lost."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError, OptionError
from everyrank.metrics.catalogue.sketch import Histogram, Quantile

QS = (0.0, 0.01, 0.25, 0.5, 0.75, 0.99, 1.0)
IN_RANGE = st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9) | st.just(0.0)
EDGES = {error: Histogram(error=error).compute().edges.tolist() for error in (0.01, 0.3)}


def near_edges(draw: Any, error: float) -> float:
    """Give a number close to where one bucket ends and the next begins."""
    edges = EDGES[error]
    edge = edges[draw(st.integers(1, len(edges) - 2))]
    for _ in range(draw(st.integers(0, 3))):
        edge = math.nextafter(edge, draw(st.sampled_from([-math.inf, math.inf])))
    return edge if abs(edge) >= 1e-9 else math.copysign(1e-9, edge)  # below, it is 0


def quantiles(values: Any, q: Any = QS, **options: Any) -> list[float]:
    """Give quantiles of values that came in two batches."""
    metric = Quantile(q=q, **options)
    half = len(values) // 3
    metric.update(np.array(values[:half], float))
    metric.update(np.array(values[half:], float))
    return np.atleast_1d(metric.compute().numpy()).tolist()


def assert_close(values: Any, error: float) -> None:
    """Compare with the samples that are at the places of the quantiles."""
    expected = np.quantile(np.array(values, float), QS, method="lower")
    found = np.array(quantiles(values, error=error))
    assert np.all(abs(found - expected) <= error * abs(expected))


@settings(max_examples=100, deadline=None)
@given(st.lists(IN_RANGE, min_size=1, max_size=60), st.sampled_from([0.01, 0.3]))
def test_law_quantiles_are_within_the_error(values: list[float], error: float):
    """Whatever the values, each quantile is that close to the sample at its place."""
    assert_close(values, error)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_law_numbers_at_the_edges_of_buckets_are_within_the_error(data: st.DataObject):
    """Rounding the logarithm does not put a number where it is beyond the error."""
    error = data.draw(st.sampled_from([0.01, 0.3]))
    size = data.draw(st.integers(1, 6))
    assert_close([near_edges(data.draw, error) for _ in range(size)], error)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.normal(size=5000),
        lambda rng: rng.lognormal(0, 4, 5000),
        lambda rng: rng.standard_cauchy(5000),
        lambda rng: rng.choice([-1.0, 0.0, 1e-8, 1e8], 5000),
        lambda rng: 1e5 + rng.normal(size=5000),
    ],
)
def test_quantiles_of_random_values_are_within_the_error(draw: Any):
    """Values of one magnitude or of many, of both signs, of few distinct ones."""
    assert_close(draw(np.random.default_rng(0)), 0.01)


def test_what_lies_outside_is_counted_at_the_end():
    """Small magnitudes are 0, and large ones, infinity too, are in the outermost bucket."""
    outside = [-math.inf, -1e300, -1e-12, 0.0, 5e-324, 1e-10, 1e12, math.inf]
    found = quantiles(outside, q=tuple(np.arange(8) / 7))
    assert found[2:6] == [0.0] * 4
    assert found[6] == found[7] == pytest.approx(1e9, rel=0.05)
    assert found[0] == found[1] == -found[7]
    assert quantiles(outside, q=0.5, smallest=1e-15) == [0.0]


def test_nan_is_counted_apart_and_makes_quantiles_nan():
    """A histogram says how many there were, a quantile does not pretend that there were none."""
    values = torch.tensor([1.0, math.nan, -2.0, math.nan])
    histogram = Histogram()
    histogram.update(values)
    counts, _, nans = histogram.compute()
    assert (int(counts.sum()), int(nans)) == (2, 2)
    metric = Quantile(q=(0.0, 1.0))
    metric.update(values)
    metric.update(torch.ones(100))
    assert metric.compute().isnan().all()


def test_a_histogram_counts_what_is_between_its_edges():
    """Each bucket has the counts that numpy has with the same edges."""
    values = np.random.default_rng(0).standard_cauchy(4000)
    histogram = Histogram(error=0.1)
    histogram.update(values)
    counts, edges, _ = (part.numpy() for part in histogram.compute())
    assert len(edges) == len(counts) + 1
    assert np.all(np.diff(edges) > 0)
    assert np.array_equal(counts, np.histogram(values, edges)[0])
    ratio = edges[-1] / edges[-2]
    assert (ratio - 1) / (ratio + 1) == pytest.approx(0.1, rel=2e-3)
    assert edges[-1] >= 1e9 > edges[-2]
    other = Histogram(error=0.1)
    other.update(1.0)
    assert np.array_equal(other.compute().edges, edges)


def test_weights_are_counts():
    """A weight says how often its value counts, or each value of its row; 0 is not at all."""
    values = torch.tensor([[1.0, 2.0], [math.nan, 3.0]])
    weighted, plain = Histogram(), Histogram()
    weighted.update(values, torch.tensor([2, 0]))
    plain.update(values[:1])
    plain.update(values[:1])
    assert weighted.compute().nans == 0
    assert torch.equal(weighted.compute().counts, plain.compute().counts)
    with pytest.raises(MetricError, match=r"`weights` has the shape \(3,\)"):
        weighted.update(values, torch.ones(3))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
)
def test_values_may_be_of_any_dtype_and_shape(dtype: torch.dtype):
    """They are widened first; a number without dimensions is one value."""
    values = torch.tensor([[0, 1], [1, 0]], dtype=dtype)
    metric = Quantile(q=(0.0, 1.0))
    metric.update(values)
    metric.update(values[0, 0])
    assert metric.compute().tolist() == pytest.approx([0.0, 1.0], rel=0.01)


def test_a_single_q_gives_a_single_number():
    """And several give as many, in their order."""
    metric, several = Quantile(), Quantile(q=[1, 0])
    for each in (metric, several):
        each.update([4.0, 1.0, 2.0])
    assert metric.compute().shape == ()
    assert float(metric.compute()) == pytest.approx(2.0, rel=0.01)
    assert several.compute().tolist() == pytest.approx([4.0, 1.0], rel=0.01)


def test_jax_is_within_the_error_with_the_rounding_of_its_floats():
    """In 32 bits the promise holds with a hundredth of it to spare."""
    values = np.random.default_rng(0).lognormal(0, 4, 2000).astype(np.float32)
    metric = Quantile(q=QS)
    found = np.asarray(metric.finish(**metric.batch(jnp.asarray(values))))
    expected = np.quantile(values, QS, method="lower")
    assert np.all(abs(found - expected) <= 0.0101 * abs(expected))


def test_wrong_options_say_what_is_right():
    """Errors, ranges and quantiles that are none are refused, and so is a sketch beyond reason."""
    for error in (0, 1, -0.1, math.nan):
        with pytest.raises(OptionError, match=r"error=.* between 0 and 1"):
            Histogram(error=error)
    for limits in ({"smallest": 0.0}, {"smallest": 2e9}, {"largest": math.inf}, {"largest": -1.0}):
        with pytest.raises(OptionError, match="must be finite magnitudes above 0"):
            Histogram(**limits)
    for q in (-0.1, 1.5, (), (0.5, 2), math.nan):
        with pytest.raises(OptionError, match=r"q=.* must be a number from 0 to 1, or several"):
            Quantile(q=q)
    with pytest.raises(OptionError, match=r"makes 4[\d,]+ buckets, but there may be 1,000,000"):
        Quantile(error=1e-6 * 10)
