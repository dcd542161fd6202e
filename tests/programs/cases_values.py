"""Cases of the metrics of regression, ranking, text and sketches."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from metric_cases import Case

from everyrank.metrics.catalogue import ranking, regression, sketch, text

Rng = np.random.Generator


def numbers(rng: Rng, n: int, *, at: float = 0.0, weighted: bool = False) -> tuple[Any, ...]:
    """Give predictions, targets that they have to do with, and perhaps weights, some of them 0."""
    targets = at + rng.normal(size=n)
    predictions = at + 0.7 * (targets - at) + rng.normal(size=n) / 3
    weights = (rng.integers(0, 4, n).astype(np.float32),) if weighted else ()
    return predictions.astype(np.float32), targets.astype(np.float32), *weights


def vectors(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give rows of predictions and targets."""
    predictions, targets = rng.normal(size=(2, n, 5)).astype(np.float32)
    return predictions, targets


def ranked(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give scores of which some are tied, and graded relevance; some queries have none."""
    scores = rng.integers(0, 8, (n, 12)).astype(np.float32) / 4
    return scores, rng.integers(0, 4, (n, 12)) * rng.integers(0, 2, (n, 1))


def tokens(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give logits and targets, some of them padding."""
    targets = np.where(rng.random((n, 6)) < 0.2, -100, rng.integers(0, 11, (n, 6)))
    return rng.normal(size=(n, 6, 11)), targets


def losses(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give mean losses and their numbers of tokens, NaN where there are none."""
    counts = rng.integers(0, 50, n)
    loss = rng.gamma(2.0, size=n).astype(np.float32)
    return np.where(counts == 0, np.float32(np.nan), loss), counts


def losses_and_bytes(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give mean losses and their numbers of tokens and bytes."""
    loss, counts = losses(rng, n)
    return loss, counts, 4 * counts + rng.integers(0, 4, n)


def sentences(rng: Rng, n: int) -> tuple[Any, ...]:
    """Give texts and references of a few words; some are empty."""
    words = np.array(["a", "rank", "of", "metrics", "every"])
    return tuple(
        [" ".join(rng.choice(words, rng.integers(0, 7))) for _ in range(n)] for _ in range(2)
    )


def magnitudes(rng: Rng, n: int, *, weighted: bool = False) -> tuple[Any, ...]:
    """Give values of many magnitudes and both signs, zero among them, and perhaps weights."""
    values = rng.choice([-1.0, 0.0, 1.0, 1.0], n) * np.exp(5 * rng.normal(size=n))
    return values.astype(np.float32), *((rng.integers(0, 4, n),) if weighted else ())


_WEIGHTED = partial(numbers, weighted=True)

CASES: dict[str, Case] = {
    "MeanSquaredError": Case(regression.MeanSquaredError, numbers),
    "MeanSquaredError(weights)": Case(regression.MeanSquaredError, _WEIGHTED),
    "RootMeanSquaredError": Case(regression.RootMeanSquaredError, _WEIGHTED),
    "MeanAbsoluteError": Case(regression.MeanAbsoluteError, _WEIGHTED),
    "MeanAbsolutePercentageError": Case(regression.MeanAbsolutePercentageError, numbers),
    "SymmetricMeanAbsolutePercentageError": Case(
        regression.SymmetricMeanAbsolutePercentageError, numbers
    ),
    "MaxError": Case(regression.MaxError, numbers),
    "R2Score": Case(regression.R2Score, numbers),
    "R2Score(offset)": Case(regression.R2Score, partial(numbers, at=1e4)),
    "ExplainedVariance": Case(regression.ExplainedVariance, numbers),
    "PearsonCorrelation": Case(regression.PearsonCorrelation, numbers),
    "PearsonCorrelation(offset)": Case(regression.PearsonCorrelation, partial(numbers, at=1e4)),
    "CosineSimilarity": Case(regression.CosineSimilarity, vectors),
    "MeanReciprocalRank": Case(ranking.MeanReciprocalRank, ranked),
    "MeanReciprocalRank(k)": Case(partial(ranking.MeanReciprocalRank, k=3), ranked),
    "NDCG": Case(ranking.NDCG, ranked),
    "NDCG(k)": Case(partial(ranking.NDCG, k=4), ranked),
    "HitRate": Case(partial(ranking.HitRate, k=2), ranked),
    "PrecisionAtK": Case(partial(ranking.PrecisionAtK, k=5), ranked),
    "RecallAtK": Case(partial(ranking.RecallAtK, k=5), ranked),
    "Perplexity": Case(partial(text.Perplexity, ignore=-100), tokens),
    "PerplexityOfLoss": Case(text.PerplexityOfLoss, losses),
    "BitsPerByte": Case(text.BitsPerByte, losses_and_bytes),
    "WordErrorRate": Case(text.WordErrorRate, sentences),
    "CharacterErrorRate": Case(text.CharacterErrorRate, sentences),
    "Histogram": Case(sketch.Histogram, magnitudes),
    "Histogram(weights)": Case(
        partial(sketch.Histogram, error=0.1), partial(magnitudes, weighted=True)
    ),
    "Quantile": Case(sketch.Quantile, magnitudes),
    "Quantile(several)": Case(partial(sketch.Quantile, q=(0.0, 0.25, 0.9, 1.0)), magnitudes),
}
