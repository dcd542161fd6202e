"""Metrics of ranked items: how early the relevant ones come, averaged over queries.

    ndcg = NDCG(k=10)
    ndcg.update(scores, relevance)    # both (queries, items), or (items) for one query
    ndcg.compute()

An item is relevant where its relevance is above 0; `NDCG` takes it as the gain.

* **Ties.** Items of one score are taken in every order, and averaged: a model that gives all items the
  same score gets what chance gets, wherever its data has the relevant ones. Without ties this is what
  everybody computes; with ties scikit-learn's ndcg_score does the same, and torchmetrics takes items
  as they come.
* **Nothing relevant.** A query without a relevant item counts as 0, as in scikit-learn and in
  torchmetrics.
* **Too few items.** Where there are fewer than k, those that are missing are not relevant.
* **NaN.** One in a query's scores or relevance makes its value NaN, and so the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everyrank.arrays import Arrays
from everyrank.errors import MetricError
from everyrank.metrics.catalogue.pairs import pair_of, positive_int
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import State


@dataclass(frozen=True)
class _Ranking:
    """The groups of tied items, shown at every place of every query, best first."""

    xp: Arrays
    size: Any  # of the group that this place is in
    gain: Any  # of all items of the group
    before: Any  # how many places of the group come before this one

    @property
    def expected(self) -> Any:
        """The mean gain at each place."""
        return self.gain / self.size

    @property
    def missed(self) -> Any:
        """How likely it is that none up to and with this place is relevant."""
        left = self.size - self.before
        return self.xp.cumprod(self.xp.clip(left - self.gain, 0.0, None) / left)


class _MeanOverQueries(DeclaredMetric):
    """The mean of what every query has."""

    total = State("sum")
    queries = State("sum")

    def __init__(self, *, k: int | None) -> None:
        self.k = k if k is None else positive_int("k", k)

    def batch(self, scores: Any, relevance: Any) -> Mapping[str, Any]:
        """Take in the scores and the relevance of items, a query in each row."""
        xp, scores, relevance = pair_of(scores=scores, relevance=relevance)
        if not scores.ndim:
            raise MetricError(
                "`scores` is a single number, but must be (queries, items) or (items)."
            )
        *queries, items = scores.shape
        if 0 in scores.shape:  # no items: nothing is relevant
            return {"queries": math.prod(queries)}
        scores, relevance = scores.reshape(-1, items), relevance.reshape(-1, items)
        nan = xp.isnan(scores) | xp.isnan(relevance)
        values = self._values(xp, xp.where(nan, 0.0, scores), xp.where(nan, 0.0, relevance))
        values = xp.where(xp.total(nan, axis=-1) > 0, math.nan, values)
        return {"total": xp.total(values), "queries": math.prod(queries)}

    def finish(self, total: Any, queries: Any) -> Any:
        """Divide."""
        return total / queries

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        raise NotImplementedError


class MeanReciprocalRank(_MeanOverQueries):
    """The mean of 1 / the place of the first relevant item, 0 if it is not among the first k."""

    def __init__(self, *, k: int | None = None) -> None:
        super().__init__(k=k)

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        missed = _ranking(xp, scores, _relevant(xp, relevance)).missed
        earlier = xp.concatenate([missed[:, :1] * 0 + 1, missed[:, :-1]], axis=1)
        places = xp.arange(missed.shape[1], missed) + 1
        return xp.total(((earlier - missed) / places)[:, : self.k], axis=-1)


class NDCG(_MeanOverQueries):
    """The normalized discounted cumulative gain of the first k items, as scikit-learn has it.

    The gain of an item is its relevance, discounted by log2(1 + place), and the best order has 1. With
    `validate=True` negative relevance is refused, which waits for the device at every update.
    """

    def __init__(self, *, k: int | None = None, validate: bool = False) -> None:
        super().__init__(k=k)
        self.validate = validate

    def batch(self, scores: Any, relevance: Any) -> Mapping[str, Any]:
        """Take in the scores and the gains of items, a query in each row."""
        if self.validate and (relevance < 0).any():
            raise MetricError(
                f"`relevance` is {relevance[relevance < 0][0]} somewhere, but is a gain, and must be 0 "
                "or more. Shift it, for example by its minimum."
            )
        return super().batch(scores, relevance)

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        discounts = math.log(2) / xp.log(xp.wide(xp.arange(scores.shape[1], scores)) + 2)
        best = xp.take(relevance, xp.argsort(-relevance))
        gain, most = (
            xp.total((gains * discounts)[:, : self.k], axis=-1)
            for gains in (_ranking(xp, scores, relevance).expected, best)
        )
        return xp.where(most == 0, 0.0, gain / xp.where(most == 0, 1.0, most))


class HitRate(_MeanOverQueries):
    """The share of queries that have a relevant item among the first k."""

    def __init__(self, *, k: int) -> None:
        super().__init__(k=positive_int("k", k))

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        missed = _ranking(xp, scores, _relevant(xp, relevance)).missed
        return 1 - missed[:, : self.k][:, -1]


class PrecisionAtK(_MeanOverQueries):
    """How many of the first k items are relevant, as a share of k."""

    def __init__(self, *, k: int) -> None:
        super().__init__(k=positive_int("k", k))

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        expected = _ranking(xp, scores, _relevant(xp, relevance)).expected
        return xp.total(expected[:, : self.k], axis=-1) / self.k


class RecallAtK(_MeanOverQueries):
    """How many of the relevant items are among the first k, as a share of all relevant ones."""

    def __init__(self, *, k: int) -> None:
        super().__init__(k=positive_int("k", k))

    def _values(self, xp: Arrays, scores: Any, relevance: Any) -> Any:
        relevant = _relevant(xp, relevance)
        found = xp.total(_ranking(xp, scores, relevant).expected[:, : self.k], axis=-1)
        return found / xp.clip(xp.total(relevant, axis=-1), 1.0, None)


def _relevant(xp: Arrays, relevance: Any) -> Any:
    return xp.wide(relevance > 0)


def _ranking(xp: Arrays, scores: Any, gains: Any) -> _Ranking:
    """Sort the items of each row, and gather what is tied."""
    rows, items = scores.shape
    order = xp.argsort(-scores)
    scores, gains = xp.take(scores, order), xp.take(gains, order)
    changes = scores[:, 1:] != scores[:, :-1]
    begins = xp.concatenate([scores[:, :1] == scores[:, :1], changes], axis=1)
    # Groups are numbered from the first place of their row, so that no two rows share one.
    first = (xp.arange(rows, scores) * items).reshape(-1, 1) - 1
    group = (xp.cumsum(begins, axis=1) + first).reshape(-1)
    places = xp.wide(xp.arange(items, scores)) + 0 * gains
    size, gain, begin = (
        xp.counts(group, rows * items, weights)[group].reshape(rows, items)
        for weights in (None, gains.reshape(-1), xp.where(begins, places, 0.0).reshape(-1))
    )
    return _Ranking(xp, size, gain, places - begin)
