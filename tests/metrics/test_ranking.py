"""Ranking: the numbers of scikit-learn and torchmetrics, and ties that have no favourites."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError, OptionError
from everyrank.metrics.catalogue.ranking import (
    NDCG,
    HitRate,
    MeanReciprocalRank,
    PrecisionAtK,
    RecallAtK,
)


def value(metric: Any, scores: Any, relevance: Any) -> float:
    """Give what a metric computes from one batch."""
    metric.update(np.asarray(scores), np.asarray(relevance))
    return float(metric.compute())


def untied(rng: np.random.Generator, queries: int, items: int) -> tuple[Any, Any]:
    """Give scores that are all different, and relevance, which some queries have none of."""
    scores = rng.permuted(np.tile(np.arange(1.0, items + 1), (queries, 1)), axis=1)
    return scores, (rng.random((queries, items)) < rng.choice([0.0, 0.3, 0.6], (queries, 1))) * 1


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5), st.integers(2, 9), st.sampled_from([None, 1, 3, 20]), st.integers(0, 1000)
)
def test_law_ndcg_is_that_of_scikit_learn(queries: int, items: int, k: Any, seed: int):
    """With ties and without, with graded gains and with fractions, for any k."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 4, (queries, items)) / 2
    gains = rng.choice([0, 0, 1, 2.5, 7], (queries, items)) * rng.integers(0, 2, (queries, 1))
    expected = np.average(sk._ranking._ndcg_sample_scores(gains, scores, k=k))
    if set(gains.ravel()) <= {0, 1, 7}:  # to scikit-learn, fractions are no gains
        assert expected == pytest.approx(sk.ndcg_score(gains.astype(int), scores, k=k))
    assert value(NDCG(k=k), scores, gains) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("k", [1, 2, 5, 8, 12])
def test_torchmetrics_says_the_same_without_ties(k: int):
    """Each metric is the mean of what torchmetrics has for single queries, 0 with nothing relevant."""
    from torchmetrics.functional import retrieval as tm

    scores, relevance = untied(np.random.default_rng(k), 40, 8)
    pairs = [(torch.tensor(s), torch.tensor(r)) for s, r in zip(scores, relevance, strict=True)]
    assert any(not r.any() for _, r in pairs)
    references: dict[Any, Any] = {
        MeanReciprocalRank(k=k): tm.retrieval_reciprocal_rank,
        HitRate(k=k): tm.retrieval_hit_rate,
        PrecisionAtK(k=k): tm.retrieval_precision,
        RecallAtK(k=k): tm.retrieval_recall,
    }
    for metric, reference in references.items():
        expected = np.mean([float(reference(s, r, top_k=k)) for s, r in pairs])
        assert value(metric, scores, relevance) == pytest.approx(expected, rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_law_ties_are_the_mean_over_every_order(items: list[tuple[int, int]], k: int):
    """Tied items count as they would on average if ties were broken at random."""
    scores, relevance = zip(*items, strict=True)
    orders = np.array(list(itertools.permutations(range(len(items)))))
    broken = np.array(scores) + orders * 0.01
    many = np.tile(relevance, (len(orders), 1))
    for make in (MeanReciprocalRank, HitRate, PrecisionAtK, RecallAtK, NDCG):
        expected = value(make(k=k), broken, many)
        assert value(make(k=k), scores, relevance) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_model_that_knows_nothing_gets_what_chance_gets():
    """Equal scores do not win because the relevant item happens to be listed first."""
    scores, relevance = np.zeros((1, 10)), np.eye(1, 10)
    assert value(HitRate(k=1), scores, relevance) == pytest.approx(0.1)
    assert value(RecallAtK(k=3), scores, relevance) == pytest.approx(0.3)
    chance = np.mean(1 / np.arange(1, 11))
    assert value(MeanReciprocalRank(), scores, relevance) == pytest.approx(chance)


def test_without_ties_the_numbers_are_exact():
    """Places are whole: a first relevant item in third place has exactly one third."""
    scores, relevance = [[0.9, 0.8, 0.7, 0.1]], [[0, 0, 1, 1]]
    assert value(MeanReciprocalRank(), scores, relevance) == 1 / 3
    assert value(MeanReciprocalRank(k=2), scores, relevance) == 0.0
    assert value(HitRate(k=3), scores, relevance) == 1.0
    assert value(HitRate(k=2), scores, relevance) == 0.0
    assert value(PrecisionAtK(k=3), scores, relevance) == 1 / 3
    assert value(RecallAtK(k=3), scores, relevance) == 1 / 2


def all_of(k: int = 3) -> list[Any]:
    return [MeanReciprocalRank(k=k), NDCG(k=k), HitRate(k=k), PrecisionAtK(k=k), RecallAtK(k=k)]


@pytest.mark.parametrize("place", [0, 1])
def test_a_nan_in_any_query_makes_the_mean_nan(place: int):
    """A NaN among scores or relevance is not ranked somewhere, not even with all of them NaN."""
    for metric, other in zip(all_of(), all_of(), strict=True):
        pair = [np.array([[1.0, 2.0, 3.0]] * 2), np.array([[0.0, 1.0, 0.0]] * 2)]
        pair[place][0, 1] = np.nan
        assert math.isnan(value(metric, *pair))
        pair[place][:] = np.nan
        assert math.isnan(value(other, *pair))


def test_masked_items_rank_last():
    """Minus infinity is a score like any other, as masks have it."""
    scores, relevance = [[-np.inf, 0.5, -np.inf, np.inf]], [[0, 1, 0, 0]]
    assert value(MeanReciprocalRank(), scores, relevance) == 0.5


def test_one_query_may_come_alone_and_many_in_any_shape():
    """A vector is one query, and all leading axes are queries."""
    rng = np.random.default_rng(0)
    scores, relevance = untied(rng, 6, 5)
    for metric, shaped, single in zip(all_of(), all_of(), all_of(), strict=True):
        expected = value(metric, scores, relevance)
        assert value(shaped, scores.reshape(2, 3, 5), relevance.reshape(2, 3, 5)) == expected
        for row in zip(scores, relevance, strict=True):
            single.update(*row)
        assert float(single.compute()) == pytest.approx(expected, rel=1e-12)


def test_without_items_nothing_is_relevant():
    """Queries without items count as 0, and one item ranks first."""
    for metric in all_of():
        assert value(metric, np.ones((2, 0)), np.ones((2, 0))) == 0.0
    assert [value(m, [[0.3]], [[1]]) for m in all_of(1)] == [1.0] * 5


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, bool])
def test_whole_scores_and_truth_values_are_taken_too(dtype: Any):
    """Unsigned scores do not wrap around when they are sorted."""
    scores, relevance = np.array([[1, 0, 1, 0]], dtype), np.array([[True, False, False, True]])
    for metric, other in zip(all_of(), all_of(), strict=True):
        assert value(metric, scores, relevance) == value(other, scores * 1.0, relevance * 1)


def test_wrong_options_and_shapes_say_what_is_right():
    """A k that counts nothing, other shapes and negative gains are refused with the next step."""
    for make in (MeanReciprocalRank, NDCG, HitRate, PrecisionAtK, RecallAtK):
        for k in (0, -1, 2.5, True):
            with pytest.raises(OptionError, match=rf"k={k}.* must be a whole number of at least 1"):
                make(k=k)
    with pytest.raises(OptionError, match="k=None"):
        HitRate(k=None)  # type: ignore[arg-type]
    with pytest.raises(
        MetricError, match=r"`scores` has the shape \(2, 3\), but `relevance` \(2,\)"
    ):
        NDCG().update(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(MetricError, match=r"must be \(queries, items\)"):
        NDCG().update(1.0, 1.0)
    with pytest.raises(MetricError, match=r"`relevance` is -1\.5 somewhere"):
        NDCG(validate=True).update(torch.ones(1, 2), torch.tensor([[1.0, -1.5]]))
    assert value(NDCG(validate=True), np.array([[2, 1]]), np.array([[1, 0]])) == 1.0
