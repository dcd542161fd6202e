"""Classification: the numbers of scikit-learn and torchmetrics, in each task and at its edges."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from cases_classification import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.errors import MetricError, OptionError
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
from everyrank.metrics.catalogue.confusion import CohenKappa, ConfusionMatrix, MatthewsCorrelation

AVERAGES = ("micro", "macro", "weighted", None)
KINDS = {
    Accuracy: "accuracy",
    Precision: "precision",
    Recall: "recall",
    Specificity: "specificity",
    partial(FBeta, beta=0.5): "fbeta_score",
    F1: "f1_score",
    JaccardIndex: "jaccard_index",
    HammingDistance: "hamming_distance",
}
IN_SKLEARN: dict[Any, Any] = {
    Precision: sk.precision_score,
    Recall: sk.recall_score,
    F1: sk.f1_score,
    partial(FBeta, beta=2.0): partial(sk.fbeta_score, beta=2.0),
    JaccardIndex: sk.jaccard_score,
}


class Reads(TorchDispatchMode):
    """Counts how often a value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def value(metric: Any, predictions: Any, targets: Any, parts: int = 1) -> Any:
    """Give what a metric computes, from some batches."""
    predictions, targets = torch.as_tensor(predictions), torch.as_tensor(targets)
    for batch in zip(predictions.chunk(parts), targets.chunk(parts), strict=True):
        metric.update(*batch)
    return metric.compute().numpy()


def by_torchmetrics(name: str, predictions: Any, targets: Any, **options: Any) -> Any:
    """Give what a function of torchmetrics says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchmetrics.functional.classification as tm

        found = getattr(tm, name)(torch.as_tensor(predictions), torch.as_tensor(targets), **options)
    return found.numpy()


def same(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Compare numbers, of which NaN is one."""
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-7)


def labels_of(seed: int, n: int, classes: int) -> tuple[Any, Any]:
    """Give predictions and targets, in which some classes may be missing."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(classes)[: rng.integers(1, classes + 1)]
    return rng.choice(some, n), np.where(
        rng.random(n) < 0.5, rng.choice(some, n), rng.integers(classes)
    )


# ---------------------------------------------------------------------------- parity


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 6), st.sampled_from(AVERAGES))
def test_law_multiclass_is_that_of_scikit_learn(seed: int, n: int, classes: int, average: Any):
    """For every average, with absent classes, single samples and one class only."""
    predicted, actual = labels_of(seed, n, classes)
    for make, reference in IN_SKLEARN.items():
        which = None if average == "macro" else range(classes)  # the classes that occur, or all
        expected = reference(actual, predicted, labels=which, average=average, zero_division=0)
        same(value(make(classes=classes, average=average), predicted, actual), expected, 1e-12)
    same(value(Accuracy(classes=classes), predicted, actual), np.mean(predicted == actual))
    same(value(HammingDistance(classes=classes), predicted, actual), np.mean(predicted != actual))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 4), st.sampled_from(AVERAGES))
def test_law_multilabel_is_that_of_scikit_learn(seed: int, n: int, labels: int, average: Any):
    """For every average, with labels that never or always occur."""
    rng = np.random.default_rng(seed)
    often = rng.choice([0.0, 0.4, 1.0], (2, 1, labels))
    predicted, actual = (rng.random((2, n, labels)) < often).astype(int)
    if labels > 1:  # to scikit-learn a single column is binary
        for make, reference in IN_SKLEARN.items():
            expected = reference(actual, predicted, average=average, zero_division=0)
            same(value(make(labels=labels, average=average), predicted, actual), expected, 1e-12)
        loss = sk.hamming_loss(actual, predicted)
        same(value(HammingDistance(labels=labels), predicted, actual), loss, 1e-12)
        expected = sk.multilabel_confusion_matrix(actual, predicted)
        np.testing.assert_array_equal(
            value(ConfusionMatrix(labels=labels), predicted, actual), expected
        )
    same(value(Accuracy(labels=labels), predicted, actual), np.mean(predicted == actual), 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_law_binary_is_that_of_scikit_learn(seed: int, n: int):
    """It is about the label 1, whatever the average."""
    predicted, actual = labels_of(seed, n, 2)
    for make, reference in IN_SKLEARN.items():
        expected = reference(actual, predicted, zero_division=0)
        for average in AVERAGES:
            same(value(make(average=average), predicted, actual), expected, 1e-12)
    same(value(Accuracy(), predicted, actual), sk.accuracy_score(actual, predicted))
    flipped = sk.recall_score(1 - actual, 1 - predicted, zero_division=0)
    same(value(Specificity(), predicted, actual), flipped)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(("make", "name"), KINDS.items(), ids=KINDS.values())
def test_torchmetrics_says_the_same(make: Any, name: str, average: Any):
    """In every task, from scores and labels, with inner axes, ignored targets and several batches."""
    rng = np.random.default_rng(3)
    beta = {"beta": 0.5} if name == "fbeta_score" else {}
    scores, flags = rng.random((24, 5)).astype(np.float32), rng.integers(0, 2, (24, 5))
    flags[rng.random((24, 5)) < 0.2] = -100
    found = value(make(labels=5, average=average, ignore=-100), scores, flags, 3)
    options = {"average": average, "ignore_index": -100, **beta}
    same(found, by_torchmetrics(f"multilabel_{name}", scores, flags, num_labels=5, **options))

    found = value(make(threshold=0.3, ignore=-100), scores, flags, 2)
    ours = {"threshold": 0.3, "ignore_index": -100, **beta}
    same(found, by_torchmetrics(f"binary_{name}", scores, flags, **ours))

    inner, classes = rng.normal(size=(24, 5, 2, 3)), rng.integers(0, 4, (24, 2, 3))
    classes[rng.random(classes.shape) < 0.2] = -100
    found = value(make(classes=5, average=average, ignore=-100), inner, classes, 4)
    same(found, by_torchmetrics(f"multiclass_{name}", inner, classes, num_classes=5, **options))
    found = value(make(classes=5, average=average, ignore=-100), inner.argmax(1), classes)
    same(found, by_torchmetrics(f"multiclass_{name}", inner, classes, num_classes=5, **options))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_accuracy_takes_any_of_the_top_k(k: int, average: Any):
    """As torchmetrics and, of all samples, scikit-learn."""
    rng = np.random.default_rng(k)
    scores, targets = rng.random((40, 6)).astype(np.float32), rng.integers(0, 5, 40)
    found = value(Accuracy(classes=6, top_k=k, average=average), scores, targets, 2)
    options = {"num_classes": 6, "top_k": k, "average": average}
    if k < 6:
        same(found, by_torchmetrics("multiclass_accuracy", scores, targets, **options))
        if average == "micro":
            same(found, sk.top_k_accuracy_score(targets, scores, k=k, labels=range(6)))
    else:
        same(found, [1, 1, 1, 1, 1, 0] if average is None else 1.0)


def test_of_equal_scores_the_first_class_counts():
    """Ties are broken alike by the highest score and by the top k."""
    scores, targets = torch.full((4, 4), 0.25), torch.arange(4)
    assert [float(value(Accuracy(classes=4, top_k=k), scores, targets)) for k in (1, 2, 3, 4)] == [
        0.25,
        0.5,
        0.75,
        1.0,
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 5))
def test_law_the_confusion_matrix_and_what_is_made_of_it_are_those_of_scikit_learn(
    seed: int, n: int, classes: int
):
    """Counts and shares, the correlation, and kappa for every weighting."""
    predicted, actual = labels_of(seed, n, classes)
    every = range(classes)
    binary: dict[str, Any] = {} if classes == 2 and seed % 2 else {"classes": classes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where there is nothing to divide by
        for normalize in (None, "true", "pred", "all"):
            expected = sk.confusion_matrix(actual, predicted, labels=every, normalize=normalize)
            found = value(ConfusionMatrix(normalize=normalize, **binary), predicted, actual)
            same(found, expected, 1e-12)
            assert found.dtype == (np.int64 if normalize is None else np.float64)
        expected = sk.matthews_corrcoef(actual, predicted)
        same(value(MatthewsCorrelation(**binary), predicted, actual), expected, 1e-9)
        for weights in (None, "linear", "quadratic"):
            expected = sk.cohen_kappa_score(actual, predicted, labels=every, weights=weights)
            same(value(CohenKappa(weights=weights, **binary), predicted, actual), expected, 1e-9)


def test_matthews_correlation_of_labels_is_that_of_torchmetrics():
    """Several labels are counted together."""
    scores, targets = CASES["MatthewsCorrelation(labels)"].data(np.random.default_rng(1), 60)
    found = value(MatthewsCorrelation(labels=3, ignore=-1), scores, targets)
    name = "multilabel_matthews_corrcoef"
    same(found, by_torchmetrics(name, scores, targets, num_labels=3, ignore_index=-1))


@pytest.mark.parametrize("normalize", [None, "true", "pred", "all"])
def test_a_confusion_matrix_leaves_out_what_is_ignored(normalize: Any):
    """Also a class that exists, and also labels of labels, as torchmetrics."""
    rng = np.random.default_rng(5)
    predicted, actual = rng.integers(0, 4, (2, 50))
    found = value(ConfusionMatrix(classes=4, ignore=2, normalize=normalize), predicted, actual)
    options = {"ignore_index": 2, "normalize": normalize}
    name = "multiclass_confusion_matrix"
    same(found, by_torchmetrics(name, predicted, actual, num_classes=4, **options))
    scores, flags = rng.random((20, 3, 2)), rng.integers(-1, 2, (20, 3, 2))
    found = value(ConfusionMatrix(labels=3, ignore=-1), scores, flags, 4)
    name = "multilabel_confusion_matrix"
    same(found, by_torchmetrics(name, scores, flags, num_labels=3, ignore_index=-1))


# ---------------------------------------------------------------------------- edges


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_nan(name: str):
    """Without a batch, after empty batches, and where all are ignored; counts are zero."""
    predictions, targets = CASES[name].data(np.random.default_rng(0), 8)
    for case in ("no batch", "empty", "ignored"):
        metric = CASES[name].make()
        if case == "empty":
            metric.update(predictions[:0], targets[:0])
        elif case == "ignored" and metric.ignore is not None:
            metric.update(predictions, np.full_like(targets, metric.ignore))
        found = metric.compute().numpy()
        assert (found == 0).all() if found.dtype == np.int64 else np.isnan(found).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrong", [-2, 5, -(2**63)])
def test_a_label_that_is_out_of_range_is_never_counted_as_another(name: str, wrong: int):
    """The value is NaN, and counts are -1, until the next window; what is ignored may be anything."""
    rng = np.random.default_rng(0)
    predictions, targets = CASES[name].data(rng, 12)
    metric = CASES[name].make()
    broken = targets.astype(np.int64).copy()
    broken.reshape(-1)[-1] = wrong
    metric.update(predictions, broken)
    metric.update(predictions, targets)
    found = metric.compute().numpy()
    assert (found == -1).all() if found.dtype == np.int64 else np.isnan(found).all()
    metric.reset()
    metric.update(predictions, targets)
    again = CASES[name].make()
    again.update(predictions, targets)
    np.testing.assert_array_equal(metric.compute(), again.compute())


@pytest.mark.parametrize("name", CASES)
def test_a_prediction_that_is_no_label_is_never_counted_as_another(name: str):
    """Neither a NaN among the scores nor a predicted label out of range, unless it is ignored."""
    predictions, targets = CASES[name].data(np.random.default_rng(0), 12)
    nan = predictions.dtype.kind == "f"
    broken = predictions.astype(np.float32 if nan else np.int64)
    where = (0,) * broken.ndim
    broken[where] = math.nan if nan else 7
    metric = CASES[name].make()
    some = targets.copy()
    some[0] = 0
    metric.update(broken, some)
    found = metric.compute().numpy()
    assert (found == -1).all() if found.dtype == np.int64 else np.isnan(found).all()
    if metric.ignore is not None:
        some[0] = metric.ignore
        metrics = metric, CASES[name].make()
        metric.reset()
        for each, batch in zip(metrics, (broken, predictions), strict=True):
            each.update(batch, some)
        np.testing.assert_array_equal(metric.compute(), metrics[1].compute())


@pytest.mark.parametrize(("p", "t"), [(7, 3), (-1, 3), (-5, 4), (2**62, 0)])
def test_labels_out_of_range_do_not_make_up_for_each_other(p: int, t: int):
    """A prediction of 7 for 3 among five classes would else count as a prediction of 2 for 4."""
    metric = ConfusionMatrix(classes=5)
    assert (value(metric, torch.tensor([0, p]), torch.tensor([0, t])) == -1).all()


@pytest.mark.parametrize("ignore", [None, 3])
def test_a_confusion_matrix_of_many_samples_counts_each_once(ignore: int | None):
    """They are counted in parts, with weights and without, and none is written over."""
    predicted, actual = torch.randint(0, 7, (2, 70_000), generator=torch.Generator().manual_seed(0))
    before = predicted.clone(), actual.clone()
    whole = value(ConfusionMatrix(classes=7, ignore=ignore), predicted, actual)
    parts = value(ConfusionMatrix(classes=7, ignore=ignore), predicted, actual, 20)
    kept = torch.ones(70_000, dtype=torch.bool) if ignore is None else actual != ignore
    expected = sk.confusion_matrix(actual[kept], predicted[kept], labels=range(7))
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(parts, expected)
    assert torch.equal(predicted, before[0])
    assert torch.equal(actual, before[1])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
)
def test_labels_may_be_of_any_integer_type(dtype: torch.dtype):
    """Truth values and small integers count as the numbers that they are."""
    predicted, actual = torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 0, 1])
    for metric in (Accuracy(), Accuracy(classes=100), Accuracy(classes=100, average="weighted")):
        assert value(metric, predicted.to(dtype), actual.to(dtype)) == 0.5
    found = value(ConfusionMatrix(), predicted.to(dtype), actual.to(dtype))
    np.testing.assert_array_equal(found, [[0, 1], [1, 2]])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_scores_may_be_of_any_float_type(dtype: torch.dtype):
    """Labels are made of them as they are."""
    scores = torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.3, 0.1], [0.2, 0.2, 0.6]], dtype=dtype)
    assert value(Accuracy(classes=3), scores, torch.tensor([1, 0, 0])) == pytest.approx(2 / 3)
    flags = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert value(Accuracy(), scores, flags) == pytest.approx(8 / 9)
    assert value(Accuracy(labels=3), scores, flags) == pytest.approx(8 / 9)


def test_the_threshold_is_what_a_score_must_exceed():
    """0.5 of probabilities is not yet 1, and logits are compared with 0."""
    assert value(Recall(), torch.tensor([0.5, 0.6]), torch.tensor([1, 1])) == 0.5
    assert value(Recall(threshold=0.0), torch.tensor([-1.0, 0.1]), torch.tensor([1, 1])) == 0.5


def test_single_samples_need_no_axis():
    """A number is one sample, and so is a vector with the scores of its classes."""
    metric = Accuracy(classes=3)
    metric.update(torch.tensor([0.1, 0.8, 0.1]), torch.tensor(1))
    metric.update(2, 1)
    assert float(metric.compute()) == 0.5


def test_a_prediction_of_a_class_that_is_ignored_as_a_target_counts():
    """Only targets leave samples out."""
    found = value(
        Precision(classes=3, ignore=2, average=None),
        torch.tensor([0, 2, 1]),
        torch.tensor([0, 0, 2]),
    )
    assert found.tolist() == [1.0, 0.0, 0.0]


# ---------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Precision(classes=3, average="mean"),  # type: ignore[arg-type]
            "average='mean' must be one of 'micro', 'macro', 'weighted', None.",
        ),
        (lambda: Accuracy(classes=1), "classes=1 must be at least 2"),
        (lambda: Accuracy(classes=2.5), "classes=2.5 must be a whole number or None"),  # type: ignore[arg-type]
        (lambda: Accuracy(labels=0), "labels=0 must be at least 1"),
        (lambda: Accuracy(classes=3, labels=3), "classes=3 and labels=3 are for different tasks"),
        (lambda: Accuracy(top_k=2), "top_k=2 must be at most classes=None"),
        (lambda: Accuracy(classes=3, top_k=4), "top_k=4 must be at most classes=3"),
        (lambda: Accuracy(classes=3, top_k=0), "top_k=0 must be at least 1"),
        (lambda: Accuracy(threshold="0.5"), "threshold='0.5' must be a number"),  # type: ignore[arg-type]
        (lambda: Accuracy(ignore=True), "ignore=True must be a whole number"),
        (lambda: FBeta(beta=0), "beta=0 must be a number above 0"),
        (
            lambda: ConfusionMatrix(normalize="rows"),  # type: ignore[arg-type]
            "normalize='rows' must be one of 'true', 'pred', 'all', None.",
        ),
        (lambda: CohenKappa(weights="cubic"), "weights='cubic' must be one of 'linear'"),  # type: ignore[arg-type]
        (lambda: CohenKappa(labels=3), "labels=3 is for several labels"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(make: Any, message: str):
    """The message names the option, its value and what is allowed."""
    with pytest.raises(OptionError) as raised:
        make()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("metric", "predictions", "targets", "message"),
    [
        (Accuracy(), (4, 3), (4,), "Set classes=3 if every sample has one of 3 classes."),
        (Accuracy(), (4, 1), (4,), "predictions.reshape((4,))"),
        (Accuracy(classes=3), (4, 2), (4,), "`targets` of shape (4,) have (4, 3)"),
        (Accuracy(classes=3), (4, 7, 3), (4, 7), "movedim(-1, 1)"),
        (Accuracy(classes=3), (5, 3), (4,), "Look at where they are sliced or padded."),
        (Accuracy(labels=3), (4, 2), (4, 2), "Accuracy(labels=3) needs (N, 3, ...)"),
        (Accuracy(labels=3), (0, 2), (0, 2), "Accuracy(labels=3) needs (N, 3, ...)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_belong_together_are_refused(
    metric: Any, predictions: Any, targets: Any, message: str
):
    """By their shapes alone, with a next step; nothing of the batch is counted."""
    with pytest.raises(MetricError, match=r"`predictions` has the shape") as raised:
        metric.update(torch.zeros(predictions), torch.zeros(targets, dtype=torch.int64))
    assert message in str(raised.value)
    assert torch.isnan(metric.compute())


def test_targets_are_labels():
    """Floats are refused as targets, also if they are whole."""
    with pytest.raises(MetricError, match=r"`targets` holds floats \(torch.float32\).*long\(\)"):
        Accuracy().update(torch.tensor([1]), torch.tensor([1.0]))


@pytest.mark.parametrize(
    ("predictions", "targets", "message"),
    [
        ([0, 3], [0, 1], "`predictions` holds the label 3, but Accuracy(classes=3) knows 0 to 2."),
        ([0, 1], [0, -1], "`targets` holds the label -1, but Accuracy(classes=3) knows 0 to 2."),
        ([[0.1, math.nan, 0.2], [1, 0, 0]], [0, 1], "`predictions` holds NaN"),
    ],
)
def test_values_are_checked_on_demand(predictions: Any, targets: Any, message: str):
    """With validate=True what is no label is refused at once, and what is ignored is not looked at."""
    metric = Accuracy(classes=3, ignore=-100, validate=True)
    with pytest.raises(MetricError) as raised:
        metric.update(torch.tensor(predictions), torch.tensor(targets))
    assert message in str(raised.value)
    metric.update(torch.tensor(predictions), torch.tensor([-100, -100]))
    metric.update(torch.tensor([0, 1]), torch.tensor([-100, 1]))
    assert metric.compute() == 1.0


# ---------------------------------------------------------------------------- frameworks


@pytest.mark.parametrize("name", CASES)
def test_the_same_definition_gives_the_same_under_jax_and_numpy(name: str):
    """What batch and finish give, traced by JAX and at once by numpy, is what torch gives."""
    metric, data = CASES[name].make(), CASES[name].data(np.random.default_rng(0), 60)

    def whole(*arrays: Any) -> Any:
        batch, states = metric.batch(*arrays), metric.states()
        return metric.finish(**{n: batch[n].reshape(s.shape) for n, s in states.items()})

    metric.update(*data)
    expected = metric.compute().numpy()
    np.testing.assert_allclose(whole(*data), expected, rtol=1e-12)
    traced = jax.jit(whole)(*[jnp.asarray(x) for x in data])
    np.testing.assert_allclose(traced, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_an_update_reads_nothing(name: str):
    """No value comes to the host while batches are taken in."""
    metric = CASES[name].make()
    data = [torch.as_tensor(x) for x in CASES[name].data(np.random.default_rng(0), 30)]
    with Reads() as reads:
        metric.update(*data)
        metric.update(*data)
    assert reads.count == 0


@pytest.mark.parametrize(
    "name",
    ["Accuracy(classes, top_k)", "F1(labels, macro)", "ConfusionMatrix(classes)", "AUROC(classes)",
     "CalibrationError(classes)"],
)  # fmt: skip
def test_an_update_can_be_compiled(name: str):
    """As one graph, with the same numbers."""
    torch._dynamo.reset()  # the cases are of one code, which is compiled a few times only
    metric, plain = CASES[name].make(), CASES[name].make()
    data = [torch.as_tensor(x) for x in CASES[name].data(np.random.default_rng(0), 30)]
    compiled = torch.compile(metric.update, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        compiled(*data)
        plain.update(*data)
    np.testing.assert_allclose(metric.compute(), plain.compute(), rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_states_do_not_grow(name: str):
    """However many batches there were, the states have the shapes that they had before the first."""
    metric, data = CASES[name].make(), CASES[name].data(np.random.default_rng(0), 30)

    def shapes() -> Any:
        return jax.tree.map(np.shape, metric.state_dict())

    metric.update(*data)
    before = shapes()
    metric.update(*data)
    assert shapes() == before
