"""Metrics that live on the device: accumulate, start a sync, wait, compute, reset.

    >>> import torch
    >>> from everyrank.metrics import Mean
    >>> loss = Mean()
    >>> for value in (1.0, 2.0, 6.0):
    ...     loss.update(torch.tensor(value))    # on the device; nothing is read, nothing is sent
    >>> loss.trigger_sync()                     # one collective, started and not waited for
    >>> loss.wait_sync()
    >>> loss.compute()
    tensor(3., dtype=torch.float64)
    >>> loss.reset()

A metric is a few numbers, operators that merge them, and a formula for the end. Declare these
(`DeclaredMetric`), take one of the catalogue, or write the verbs yourself (`Metric`). A `Collection`
does all of it for many metrics in one or two collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everyrank import lazily

if TYPE_CHECKING:
    from everyrank.arrays import arrays_of
    from everyrank.metrics.base import Metric
    from everyrank.metrics.catalogue.aggregate import (
        Count,
        Last,
        Max,
        Mean,
        Min,
        Std,
        Sum,
        WeightedMean,
        WeightedMeanMetric,
    )
    from everyrank.metrics.catalogue.classification import (
        F1,
        Accuracy,
        FBeta,
        HammingDistance,
        JaccardIndex,
        Precision,
        Recall,
        Specificity,
    )
    from everyrank.metrics.catalogue.confusion import (
        CohenKappa,
        ConfusionMatrix,
        MatthewsCorrelation,
    )
    from everyrank.metrics.catalogue.curves import (
        AUROC,
        AveragePrecision,
        CalibrationError,
    )
    from everyrank.metrics.catalogue.moving import (
        Ema,
        Running,
    )
    from everyrank.metrics.catalogue.ranking import (
        NDCG,
        HitRate,
        MeanReciprocalRank,
        PrecisionAtK,
        RecallAtK,
    )
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
    from everyrank.metrics.catalogue.sketch import (
        Histogram,
        Quantile,
    )
    from everyrank.metrics.catalogue.text import (
        BitsPerByte,
        CharacterErrorRate,
        Perplexity,
        PerplexityOfLoss,
        WordErrorRate,
    )
    from everyrank.metrics.collection import Collection
    from everyrank.metrics.declared import DeclaredMetric
    from everyrank.metrics.states import State

#: Where each public name lives; it is imported when somebody asks for it.
_HOMES = {
    "AUROC": "metrics.catalogue.curves",
    "Accuracy": "metrics.catalogue.classification",
    "AveragePrecision": "metrics.catalogue.curves",
    "BitsPerByte": "metrics.catalogue.text",
    "CalibrationError": "metrics.catalogue.curves",
    "CharacterErrorRate": "metrics.catalogue.text",
    "CohenKappa": "metrics.catalogue.confusion",
    "Collection": "metrics.collection",
    "ConfusionMatrix": "metrics.catalogue.confusion",
    "CosineSimilarity": "metrics.catalogue.regression",
    "Count": "metrics.catalogue.aggregate",
    "DeclaredMetric": "metrics.declared",
    "Ema": "metrics.catalogue.moving",
    "ExplainedVariance": "metrics.catalogue.regression",
    "F1": "metrics.catalogue.classification",
    "FBeta": "metrics.catalogue.classification",
    "HammingDistance": "metrics.catalogue.classification",
    "Histogram": "metrics.catalogue.sketch",
    "HitRate": "metrics.catalogue.ranking",
    "JaccardIndex": "metrics.catalogue.classification",
    "Last": "metrics.catalogue.aggregate",
    "MatthewsCorrelation": "metrics.catalogue.confusion",
    "Max": "metrics.catalogue.aggregate",
    "MaxError": "metrics.catalogue.regression",
    "Mean": "metrics.catalogue.aggregate",
    "MeanAbsoluteError": "metrics.catalogue.regression",
    "MeanAbsolutePercentageError": "metrics.catalogue.regression",
    "MeanReciprocalRank": "metrics.catalogue.ranking",
    "MeanSquaredError": "metrics.catalogue.regression",
    "Metric": "metrics.base",
    "Min": "metrics.catalogue.aggregate",
    "NDCG": "metrics.catalogue.ranking",
    "PearsonCorrelation": "metrics.catalogue.regression",
    "Perplexity": "metrics.catalogue.text",
    "PerplexityOfLoss": "metrics.catalogue.text",
    "Precision": "metrics.catalogue.classification",
    "PrecisionAtK": "metrics.catalogue.ranking",
    "Quantile": "metrics.catalogue.sketch",
    "R2Score": "metrics.catalogue.regression",
    "Recall": "metrics.catalogue.classification",
    "RecallAtK": "metrics.catalogue.ranking",
    "RootMeanSquaredError": "metrics.catalogue.regression",
    "Running": "metrics.catalogue.moving",
    "Specificity": "metrics.catalogue.classification",
    "State": "metrics.states",
    "Std": "metrics.catalogue.aggregate",
    "Sum": "metrics.catalogue.aggregate",
    "SymmetricMeanAbsolutePercentageError": "metrics.catalogue.regression",
    "WeightedMean": "metrics.catalogue.aggregate",
    "WeightedMeanMetric": "metrics.catalogue.aggregate",
    "WordErrorRate": "metrics.catalogue.text",
    "arrays_of": "arrays",
}

__all__ = [
    "AUROC",
    "F1",
    "NDCG",
    "Accuracy",
    "AveragePrecision",
    "BitsPerByte",
    "CalibrationError",
    "CharacterErrorRate",
    "CohenKappa",
    "Collection",
    "ConfusionMatrix",
    "CosineSimilarity",
    "Count",
    "DeclaredMetric",
    "Ema",
    "ExplainedVariance",
    "FBeta",
    "HammingDistance",
    "Histogram",
    "HitRate",
    "JaccardIndex",
    "Last",
    "MatthewsCorrelation",
    "Max",
    "MaxError",
    "Mean",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanReciprocalRank",
    "MeanSquaredError",
    "Metric",
    "Min",
    "PearsonCorrelation",
    "Perplexity",
    "PerplexityOfLoss",
    "Precision",
    "PrecisionAtK",
    "Quantile",
    "R2Score",
    "Recall",
    "RecallAtK",
    "RootMeanSquaredError",
    "Running",
    "Specificity",
    "State",
    "Std",
    "Sum",
    "SymmetricMeanAbsolutePercentageError",
    "WeightedMean",
    "WeightedMeanMetric",
    "WordErrorRate",
    "arrays_of",
]


__getattr__ = lazily(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
