"""Many metrics as one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.errors import MetricError, OptionError
from everyrank.metrics import (
    Collection,
    Count,
    Ema,
    Last,
    Max,
    Mean,
    Min,
    Running,
    Std,
    Sum,
    WeightedMean,
)
from everyrank.metrics.catalogue.sketch import Histogram


class Operations(TorchDispatchMode):
    """Count what is asked of torch, but for views."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def numbers(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


def test_twenty_numbers_are_taken_in_by_two_operations():
    """One collects the numbers, one adds them up; nothing is read."""
    metrics = Collection({f"loss {i}": Mean() for i in range(20)})
    batch = {name: torch.tensor(float(i)) for i, name in enumerate(metrics)}
    metrics.update(batch)
    with Operations() as seen:
        metrics.update(batch)
    assert seen.counts == {"stack": 1, "add_.Tensor": 1}
    assert metrics.read() == {f"loss {i}": i for i in range(20)}


def test_other_operators_take_one_operation_more_each():
    """However many metrics there are of each."""
    metrics = Collection(a=Mean(), b=Max(), c=Min(), d=Max(), e=Sum(), f=Count())
    batch = {name: torch.tensor(2.0) for name in metrics}
    metrics.update(batch)
    with Operations() as seen:
        metrics.update(batch)
    assert seen.counts == {"stack": 1, "add_.Tensor": 1, "maximum.out": 1, "minimum.out": 1} | (
        {"_to_copy": 2} if "_to_copy" in seen.counts else {}
    )
    assert metrics.read() == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 4, "f": 2}


@pytest.mark.parametrize("synced", [False, True])
def test_numbers_taken_in_together_are_as_if_taken_in_alone(synced):
    """Also where only some get one, dtypes differ, and a NaN is among them."""
    kinds = {"a": Mean, "b": Max, "c": Min, "d": Std, "e": Sum, "f": Count, "g": Last}
    together = Collection({name: kind() for name, kind in kinds.items()}, big=Histogram())
    alone = {name: kind() for name, kind in kinds.items()}
    batches = [
        numbers(a=1.0, b=2.0, c=3.0, e=2**40, f=7),
        numbers(a=5.0, b=float("nan"), c=-1.0),
        numbers(b=3, c=2, a=1, e=1),
        numbers(a=1.0, e=0.5),
        {"a": torch.tensor(1.0), "b": 2.0, "g": torch.tensor([1.0, 5.0])},
        {"d": torch.tensor(1.0), "a": torch.tensor(4.0)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(-1.0)},
        {"a": torch.tensor(1.0, dtype=torch.float64), "b": torch.tensor(0.1, dtype=torch.bfloat16)},
    ]
    for batch in batches:
        together.update(batch)
        for name, value in batch.items():
            alone[name].update(value)
    if synced:
        together.sync()
    found = together.compute()
    for name, metric in alone.items():
        assert torch.equal(found[name].nan_to_num(-7), metric.compute().nan_to_num(-7)), name


def test_a_batch_says_by_name_who_gets_what():
    """One value, a tuple of arguments, or a dict of keyword arguments."""
    metrics = Collection(loss=Mean(), weighted=WeightedMean(), last=Last())
    metrics.update({"loss": 1.0, "weighted": (2.0, 3), "last": {"values": 5.0, "order": 2}})
    metrics.update({"weighted": {"values": torch.tensor(4.0), "weights": 1}})
    assert metrics.read() == {"loss": 1, "weighted": 2.5, "last": 5}


def test_anything_else_is_handed_to_all_alike():
    """As predictions and targets are to twenty metrics of them."""
    metrics = Collection(mean=Mean(), high=Max())
    metrics.update(torch.tensor([1.0, 5.0]))
    assert metrics.read() == {"mean": 3, "high": 5}


def test_it_is_a_mapping_of_its_metrics():
    """Each can be updated, looked at and reset by itself."""
    metrics = Collection({"a/b": Mean()}, c=Sum())
    assert list(metrics) == ["a/b", "c"]
    assert len(metrics) == 2
    metrics["a/b"].update(3.0)
    metrics["c"].update(4.0)
    assert metrics["a/b"].compute() == 3
    metrics["c"].reset()
    assert metrics.read() == {"a/b": 3, "c": 0}
    assert repr(metrics) == "Collection(a/b=Mean(), c=Sum())"


def test_a_member_is_reset_by_itself_at_any_point_of_the_cycle():
    """The others go on as if nothing had happened."""
    metrics = Collection(a=Sum(), b=Sum(), r=Running(Sum(), 2), e=Ema(Sum(), 0.5))

    def update(value):
        metrics.update({name: torch.tensor(float(value)) for name in metrics})

    update(1)
    metrics.trigger_sync()
    metrics["a"].reset()
    metrics["r"].reset()
    update(10)
    metrics.wait_sync()
    assert metrics.read() == {"a": 1, "b": 1, "r": 10, "e": 1}
    metrics["a"].reset()
    assert metrics.read() == {"a": 10, "b": 1, "r": 10, "e": 1}
    metrics["b"].reset()
    assert metrics.read() == {"a": 10, "b": 10, "r": 10, "e": 1}
    update(100)
    metrics.sync()
    metrics["b"].reset()
    metrics["e"].reset()
    assert metrics.read() == {"a": 110, "b": 0, "r": 110, "e": 0}


def test_members_are_brought_together_as_one():
    """The message says which call does it."""
    metrics = Collection(a=Mean())
    with pytest.raises(MetricError, match=r"'a' is in a collection.*Call trigger_sync\(\) of the"):
        metrics["a"].trigger_sync()
    with pytest.raises(MetricError, match=r"Call wait_sync\(\) of the collection"):
        metrics["a"].wait_sync()


def test_a_metric_brings_along_what_it_has():
    """Joining a collection loses nothing."""
    a, b = Mean(), Running(Sum(), 2)
    a.update(4.0)
    a.sync()
    a.update(8.0)
    b.update(1.0)
    metrics = Collection(a=a, b=b, c=Max())
    assert metrics["a"] is a
    assert a.compute() == 6
    a.update(0.0)
    b.update(5.0)
    assert metrics["b"].compute() == 6
    assert metrics["a"].compute() == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Collection({"": Mean()}), "the name '' of a metric must be a text"),
        (lambda: Collection({3: Mean()}), "the name 3 of a metric must be a text"),
        (lambda: Collection(a=Mean), "'a' is the class Mean, and no metric. Pass an object"),
        (lambda: Collection(b=Collection(a=Mean())["a"]), "'b' is in a collection already, as 'a'"),
    ],
)
def test_what_cannot_be_in_a_collection_is_refused(make, message):
    """Each with what would do."""
    with pytest.raises(OptionError, match=message):
        make()


def test_a_metric_with_a_sync_under_way_cannot_join():
    """Its flight would land nowhere."""
    metric = Mean()
    metric.trigger_sync()
    with pytest.raises(MetricError, match="'a' has a sync under way"):
        Collection(a=metric)


def test_an_unknown_name_is_refused_with_those_there_are():
    """Nothing of the batch is counted."""
    metrics = Collection(a=Mean(), b=Mean())
    with pytest.raises(MetricError, match="'c' is no metric of this collection, which has a, b"):
        metrics.update({"a": 5.0, "c": 1.0})
    assert metrics["a"].compute().isnan()


def test_values_are_read_with_one_copy():
    """Whatever their number, dtype and shape."""
    metrics = Collection({f"mean {i}": Mean() for i in range(9)}, n=Count(), sketch=Histogram())
    metrics.update(torch.tensor([1.0, 2.0]))
    with Operations() as seen:
        found = metrics.read()
    assert seen.counts["_local_scalar_dense"] == 0
    assert found["mean 3"] == 1.5
    assert found["n"] == 2
    assert isinstance(found["n"], int)
    assert sum(found["sketch"].counts) == 2


def test_an_empty_collection_does_nothing():
    """And raises nothing."""
    metrics = Collection()
    metrics.sync()
    metrics.reset()
    metrics.load_state_dict(metrics.to("cpu").state_dict())
    assert metrics.read() == {}


# ------------------------------------------------------------------------------- what a review found


class LogMean(Mean):
    """A mean of something else."""

    def batch(self, values):
        return super().batch(values.log())


class Both(Mean):
    """A mean that says more."""

    def finish(self, total, count):
        return total / count, count


def test_a_subclass_is_what_it_says_also_among_others():
    """The way that is short for its base is not taken for it."""
    logs = Collection(a=LogMean(), b=LogMean())
    logs.update({"a": torch.tensor(1.0), "b": torch.tensor(1.0)})
    assert logs.read() == {"a": 0, "b": 0}
    both = Collection(a=Both(), b=Both())
    both.update({"a": torch.tensor(3.0), "b": torch.tensor(5.0)})
    assert both.read() == {"a": (3, 1), "b": (5, 1)}


@pytest.mark.parametrize("kind", [Max, Min, Sum])
def test_integers_and_truth_values_are_taken_in_as_they_are(kind):
    """Also where others get none."""
    metrics = Collection(a=kind(), b=kind(), c=kind())
    metrics.update({"a": torch.tensor(1.5), "b": torch.tensor(7)})
    metrics.update({"c": torch.tensor(-5.0), "b": torch.tensor(2**40)})
    metrics.update({"a": torch.tensor(True), "b": torch.tensor(False)})
    alone = {name: kind() for name in "abc"}
    for name, values in {"a": [1.5, True], "b": [7, 2**40, False], "c": [-5.0]}.items():
        for value in values:
            alone[name].update(value)
    assert metrics.read() == {name: metric.compute().item() for name, metric in alone.items()}


def test_one_object_under_two_names_is_refused():
    """Its numbers would have two places."""
    metric = Mean()
    with pytest.raises(OptionError, match="holds one object under two names"):
        Collection(a=metric, b=metric)


def test_a_member_is_not_loaded_while_a_sync_is_under_way():
    """The others wait for it."""
    metrics = Collection(a=Sum(), b=Sum())
    state = metrics["a"].state_dict()
    metrics.trigger_sync()
    with pytest.raises(MetricError, match=r"under way.*Call its wait_sync\(\) before"):
        metrics["a"].load_state_dict(state)


def test_a_batch_of_a_wrong_shape_counts_in_no_part():
    """All of it is looked at first."""

    class Two(Mean):
        def batch(self, values):
            return {"total": values.sum(), "count": values}

    metric = Two()
    with pytest.raises(MetricError, match=r"the state 'count' has the shape \(\)"):
        metric.update(torch.ones(3))
    assert metric.compute().isnan()


def test_loading_one_member_says_nothing_of_the_others():
    """One that no sync has brought together can still be handed over."""
    metrics, other = Collection(a=Sum(), b=Sum()), Sum()
    other.update(5.0)
    other.sync()
    state = {**other.state_dict()}
    state["layout"] = state["layout"].replace('"total"', '"a/total"')
    metrics["b"].update(2.0)
    metrics["a"].load_state_dict(state)
    assert metrics.read() == {"a": 5, "b": 2}
    metrics["b"].hand_over("b")
    with pytest.raises(MetricError, match="'a' was brought together by a sync of its own"):
        metrics["a"].hand_over("a")
