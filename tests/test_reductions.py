"""The algebra: whatever the ranks hold, and however it is merged, it finishes to the same numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import OptionError
from everyrank.records import STATISTIC
from everyrank.reductions import DEFAULT_STATS, Moments, check_stats, merge, over_ranks

STATS = ("mean", "std", "min", "max", "min_rank", "max_rank")
# Moments alone are in range as long as squares are; `over_ranks` brings values there.
FINITE = st.one_of(
    st.floats(-1e9, 1e9).map(lambda x: x if abs(x) > 1e-90 else 0.0),
    st.floats(0.999, 1.001).map(lambda x: 1e5 * x),
    st.sampled_from([0.0, -0.0, 1.0]),
)
ANY = st.one_of(FINITE, st.sampled_from([math.nan, math.inf, -math.inf]))


def exact(values: Any) -> dict[str, float]:
    """Give the statistics by rational arithmetic, which rounds once, at the end."""
    rational = [Fraction(v) for v in values]
    mean = sum(rational) / len(rational)
    variance = sum((v - mean) ** 2 for v in rational) / len(rational)
    up = 2**1400  # where the squares of subnormals are numbers again
    return {
        "mean": float(mean),
        "std": math.isqrt(int(variance * up**2)) / up if variance else 0.0,
        "min": min(values),
        "max": max(values),
        "min_rank": float(values.index(min(values))),
        "max_rank": float(values.index(max(values))),
    }


def finished(moments: Moments, stats: Any = STATS) -> dict[str, float]:
    """Give every statistic of the moments of single numbers."""
    return {stat: float(moments.finish(stat)) for stat in stats}


def of(values: Any, ranks: Any = None, weights: Any = None) -> Moments:
    """Take the moments of single numbers."""
    ranks = np.arange(len(values)) if ranks is None else np.array(ranks)
    weights = None if weights is None else np.array(weights, float)
    return Moments.of(np.array(values, float), ranks=ranks, weights=weights)


def across(values: Any, *stats: str, weights: Any = None) -> list[float]:
    """Give statistics over ranks of which each holds one number."""
    column = np.array(values, float).reshape(-1, 1, 1)
    weights = None if weights is None else np.array(weights, float).reshape(-1, 1, 1)
    out, _ = over_ranks(column, ranks=np.arange(len(values)), stats=stats, weights=weights)
    return out.ravel().tolist()


@st.composite
def merged_somehow(draw: st.DrawFn, values: Any, weights: Any = None) -> Moments:
    """Split the ranks at random, and merge what is left of the parts in a random order."""
    order = draw(st.permutations(range(len(values))))
    cuts = sorted(draw(st.sets(st.integers(1, len(values) - 1)))) if len(values) > 1 else []
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(values)], strict=True):
        ranks = sorted(order[start:stop])
        some = None if weights is None else [weights[r] for r in ranks]
        parts.append(of([values[r] for r in ranks], ranks, some))
    while len(parts) > 1:
        a = parts.pop(draw(st.integers(0, len(parts) - 1)))
        b = parts.pop(draw(st.integers(0, len(parts) - 1)))
        parts.append(merge(a, b))
    return parts[0]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_law_any_split_and_any_order_of_merging_is_the_whole(data: st.DataObject):
    """Ranks merged in any way give what exact arithmetic gives on all of their values."""
    values = data.draw(st.lists(FINITE, min_size=1, max_size=12))
    merged = finished(data.draw(merged_somehow(values)))
    expected = exact(values)
    spread, size = expected["std"], max(map(abs, values))
    assert merged.pop("mean") == pytest.approx(expected.pop("mean"), rel=1e-14, abs=1e-15 * size)
    assert merged.pop("std") == pytest.approx(spread, rel=1e-12, abs=0.0)
    del expected["std"]
    assert merged == expected


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_law_what_is_not_finite_merges_like_numpy(data: st.DataObject):
    """NaN and infinities come out as numpy has them on all values, by whatever way."""
    values = data.draw(st.lists(ANY, min_size=1, max_size=8))
    moments = data.draw(merged_somehow(values))
    merged = finished(moments)
    with np.errstate(all="ignore"):
        array = np.array(values)
        expected = [array.mean(), array.std(), array.min(), array.max()]
        # numpy sums before it divides; where all are finite the law above is the sharper one.
        assert np.allclose(
            [merged[s] for s in STATS[:4]], expected, rtol=1e-9, atol=1e-3, equal_nan=True
        )
    assert merged["min_rank"] == np.argmin(array)
    assert merged["max_rank"] == np.argmax(array)
    assert moments.nonfinite == np.sum(~np.isfinite(array))
    assert moments.count == len(values)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_law_weighted_means_merge_too(data: st.DataObject):
    """The mean of any split is sum(w x) / sum(w) over all ranks; the rest knows no weights."""
    pairs = data.draw(st.lists(st.tuples(FINITE, st.integers(0, 5)), min_size=1, max_size=8))
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    merged = finished(data.draw(merged_somehow(values, weights)))
    if total := sum(weights):
        mean = sum(Fraction(v) * w for v, w in pairs) / total
        size = max(map(abs, values))
        assert merged["mean"] == pytest.approx(float(mean), rel=1e-14, abs=1e-14 * size)
    else:
        assert math.isnan(merged["mean"])
    assert merged["std"] == pytest.approx(exact(values)["std"], rel=1e-12, abs=0.0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_law_over_ranks_is_every_element_by_itself(data: st.DataObject):
    """A block of steps and metrics gives what each of its elements gives alone."""
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)))
    size = math.prod(shape)
    extremes = st.one_of(ANY, st.sampled_from([1e308, -1e308, 5e-324, 1e-160]))
    values = np.array(data.draw(st.lists(extremes, min_size=size, max_size=size)), float)
    values = values.reshape(shape)
    stats = (*STATS, "p50", "p99.9")
    out, nonfinite = over_ranks(values, ranks=np.arange(shape[0]), stats=stats)
    assert out.shape == (len(stats), *shape[1:])
    for i, j in np.ndindex(shape[1:]):
        np.testing.assert_array_equal(out[:, i, j], across(values[:, i, j], *stats))
        assert nonfinite[i, j] == np.sum(~np.isfinite(values[:, i, j]))


@pytest.mark.parametrize("ranks", [2, 7, 64, 1000])
@pytest.mark.parametrize("around", [1e5, -1e5, 1.0, 0.0])
def test_std_keeps_twelve_digits(ranks: int, around: float):
    """A spread of 1e-3 around 1e5 is exact to 1e-12, also when the first rank is the outlier."""
    values = (around + 1e-3 * np.random.default_rng(ranks).standard_normal(ranks)).tolist()
    for some in (values, [around + 1.0, *values[1:]]):
        mean, std = across(some, "mean", "std")
        assert std == pytest.approx(exact(some)["std"], rel=1e-12, abs=0.0)
        assert mean == pytest.approx(
            exact(some)["mean"], rel=1e-15, abs=1e-15 * max(map(abs, some))
        )


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1e-145, 1e-125, 1e149, 1e200, 4e307])
def test_scale_does_not_matter(scale: float):
    """From subnormals to the end of the range, nothing overflows and nothing vanishes."""
    values = [scale * k for k in (1.0, 2.0, -3.0, 4.0)]
    expected = exact(values)
    found = dict(zip(STATS, across(values, *STATS), strict=True))
    for stat in STATS:
        # A subnormal has few digits: it may be off by its last one, and no more.
        assert found[stat] == pytest.approx(expected[stat], rel=1e-12, abs=5e-324)
    assert across([scale] * 3, *STATS) == [scale, 0.0, scale, scale, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-145, 1e-119, 1e-40, 1.0, 1e140])
def test_differences_in_the_last_place_count(scale: float):
    """Values that differ in their last digits have a spread, however small they are themselves."""
    values = [scale * (1.0 + k * 1e-15) for k in range(5)]
    assert across(values, "std") == pytest.approx([exact(values)["std"]], rel=1e-12, abs=0.0)


def test_huge_and_tiny_metrics_do_not_touch_their_neighbours():
    """Values are brought into range by element: a metric of 1e308 costs none of another's digits."""
    values = np.array([[[1e308, 1e-300, 1.0]], [[-1e308, 3e-300, 2.0]]])
    out, _ = over_ranks(values, ranks=np.arange(2), stats=("mean", "std"))
    np.testing.assert_allclose(out[:, 0], [[0.0, 2e-300, 1.5], [1e308, 1e-300, 0.5]], rtol=1e-12)


def test_one_rank_is_its_own_statistics():
    """Of one value the mean, extremes and quantiles are the value, and the spread is nothing."""
    assert across([2.5], "mean", "max", "min", "std", "p5", "p50") == [2.5, 2.5, 2.5, 0.0, 2.5, 2.5]
    assert across([math.inf], "mean", "max", "min") == [math.inf] * 3
    assert math.isnan(across([math.nan], "std")[0])


def test_a_tie_goes_to_the_lower_rank():
    """Of ranks that hold the same extreme, or a NaN, the lowest is named, whoever merges first."""
    for values in ([1.0, 3.0, 3.0, 1.0], [0.0, math.nan, math.nan, 0.0]):
        whole = finished(of(values), ("min_rank", "max_rank"))
        low, high = of(values[:2], [0, 1]), of(values[2:], [2, 3])
        assert finished(merge(low, high), whole) == whole
        assert finished(merge(high, low), whole) == whole
    assert across([1.0, 3.0, 3.0, 1.0], "min_rank", "max_rank") == [0.0, 1.0]
    assert across([0.0, math.nan, math.nan], "min_rank", "max_rank") == [1.0, 1.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=9), st.integers(0, 99))
def test_law_quantiles_are_numpys(values: list[float], percent: int):
    """A quantile over ranks interpolates as numpy does, and warns of nothing."""
    with np.errstate(all="ignore"):
        expected = np.quantile(values, percent / 100)
    np.testing.assert_array_equal(across(values, f"p{percent}"), [expected])


def test_quantiles_are_finer_than_percents():
    """p99.9 is the quantile at 0.999."""
    values = np.arange(1001.0)
    assert across(values, "p99.9", "p50", "p0") == pytest.approx([999.0, 500.0, 0.0])


def test_a_rank_of_weight_zero_has_nothing_to_say():
    """Its NaN is counted and seen in the extremes, but does not reach the weighted mean."""
    mean, high = across([1.0, 3.0, math.nan], "mean", "max", weights=[1, 3, 0])
    assert mean == 2.5
    assert math.isnan(high)


def test_a_weight_that_is_not_a_number_is_not_swallowed():
    """A NaN among the weights makes the mean NaN, as arithmetic has it."""
    assert math.isnan(across([1.0, 2.0], "mean", weights=[1.0, math.nan])[0])


def test_stats_are_checked_and_given_once():
    """What is asked for twice comes once, in the order in which it was asked for."""
    assert check_stats(DEFAULT_STATS) == ("mean", "max", "min", "std")
    assert check_stats(["p50", "mean", "p50", "max_rank", "p99.9"]) == (
        "p50",
        "mean",
        "max_rank",
        "p99.9",
    )
    assert check_stats([]) == ()


@pytest.mark.parametrize("bad", ["median", "p100", "p", "p5.", "mean ", 5, ["mean"]])
def test_an_unknown_statistic_is_named(bad: Any):
    """The message shows what was asked for, what of it nobody knows, and what there is."""
    with pytest.raises(OptionError) as caught:
        check_stats(("mean", bad))
    assert str(caught.value) == (
        f"stats={('mean', bad)!r}: {bad!r} is not a statistic. Choose from mean, std, min, max, "
        "min_rank, max_rank and quantiles such as 'p50' or 'p99.9'."
    )


def test_a_single_text_is_no_sequence_of_statistics():
    """`stats="mean"` is met with the tuple that was meant."""
    with pytest.raises(OptionError, match=r"stats='mean' is a single text.* stats=\('mean',\)"):
        check_stats("mean")


def test_every_statistic_ends_a_name_that_no_metric_may_have():
    """What can be asked for is what `records` keeps for statistics."""
    for stat in (*STATS, "p5", "p99.9"):
        assert check_stats([stat]) == (stat,)
        assert STATISTIC.search(f"loss/{stat}")
