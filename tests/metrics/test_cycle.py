"""The cycle of a window on one process: what belongs to it, when it ends, what `compute` shows."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.errors import MetricError, SyncFailed
from everyrank.metrics import Collection, Last, Max, Mean, Min, Running, Std, Sum, WeightedMean


class Operations(TorchDispatchMode):
    """Count what is asked of torch."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def mean_of(*values):
    metric = Mean()
    for value in values:
        metric.update(torch.tensor(float(value)))
    return metric


def test_before_a_sync_the_value_is_this_rank_s():
    """Nobody has to sync to look."""
    assert mean_of(1, 2, 6).compute() == 3


def test_nothing_accumulated_is_nan():
    """Looking early raises nothing; a sum of nothing is 0."""
    for metric in (Mean(), Max(), Min(), Std(), WeightedMean()):
        assert metric.compute().isnan()
        metric.sync()
        assert metric.compute().isnan()
    assert Sum().compute() == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_sync_keeps_the_value(at_once):
    """Alone, what all ranks have together is what this one has."""
    metric = mean_of(1, 3)
    if at_once:
        metric.sync()
    else:
        metric.trigger_sync()
        metric.wait_sync()
    assert metric.compute() == 2


def test_an_update_between_trigger_and_wait_belongs_to_the_next_window():
    """It is not shown, and a reset begins with it."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.update(100.0)
    metric.wait_sync()
    assert metric.compute() == 2
    metric.reset()
    assert metric.compute() == 100


def test_an_update_between_counts_once_if_no_reset_comes():
    """The next sync of the same window takes it in."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.update(8.0)
    metric.wait_sync()
    metric.sync()
    assert metric.compute() == 4


def test_an_update_after_a_sync_is_shown_and_forgotten_with_its_window():
    """What `compute` shows is what `reset` forgets."""
    metric = mean_of(1, 3)
    metric.sync()
    metric.update(8.0)
    assert metric.compute() == 4
    metric.reset()
    assert metric.compute().isnan()


def test_a_reset_between_trigger_and_wait_does_not_disturb_the_sync():
    """The window's value is there after the wait, and the next window begins without it."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.reset()
    metric.update(50.0)
    metric.wait_sync()
    assert metric.compute() == 2
    metric.sync()
    assert metric.compute() == 50


def test_a_reset_after_a_reset_in_flight_forgets_only_what_is_shown():
    """What came after the first reset belongs to the window after it, wherever it came."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.reset()
    metric.update(50.0)
    metric.wait_sync()
    metric.update(70.0)
    assert metric.compute() == 2
    metric.reset()
    assert metric.compute() == 60


def test_a_window_that_ended_in_flight_is_left_out_of_the_next_sync():
    """Also where the next sync is triggered before the first is waited for."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.reset()
    metric.update(50.0)
    metric.trigger_sync()
    metric.wait_sync()
    assert metric.compute() == 50


def test_syncs_in_a_row_count_nothing_twice():
    """Two syncs, two triggers, and a sync after more updates: each value counts once."""
    metric = mean_of(1, 3)
    metric.sync()
    metric.sync()
    assert metric.compute() == 2
    metric.update(8.0)
    metric.trigger_sync()
    metric.trigger_sync()
    metric.wait_sync()
    assert metric.compute() == 4
    metric.update(0.0)
    metric.sync()
    assert metric.compute() == 3


def test_looking_while_a_sync_is_under_way_waits_for_it():
    """And the wait that comes later is no error."""
    metric = mean_of(1, 3)
    metric.trigger_sync()
    metric.update(100.0)
    assert metric.compute() == 2
    metric.wait_sync()
    assert metric.compute() == 2
    metric.reset()
    assert metric.compute() == 100


@pytest.mark.parametrize("metric", [Mean(), Collection(loss=Mean())], ids=["alone", "collection"])
def test_waiting_without_a_trigger_is_an_error_that_says_so(metric):
    """It would wait for nothing."""
    with pytest.raises(MetricError, match=r"no sync is under way. Call trigger_sync\(\) first"):
        metric.wait_sync()
    metric.sync()
    with pytest.raises(MetricError, match="no sync is under way"):
        metric.wait_sync()


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("kind", [Sum, Mean, Max, Min, Std])
def test_a_value_that_was_handed_out_never_changes(kind, synced):
    """Whatever comes afterwards; and changing it changes no metric."""
    metric = kind()
    metric.update(torch.tensor([1.0, 2.0]))
    if synced:
        metric.sync()
    value = metric.compute()
    kept = value.clone()
    metric.update(torch.tensor([5.0, 100.0]))
    metric.reset()
    metric.update(7.0)
    metric.sync()
    metric.sync()
    assert value == kept
    again = metric.compute()
    again.add_(1000.0)
    assert metric.compute() != again


def test_the_numbers_stay_where_they_are():
    """A captured CUDA graph goes on writing to the right place, whatever becomes of the window."""
    metric = mean_of(1)
    at = metric._cycle._open.there()["sum"].data_ptr()
    metric.sync()
    metric.update(2.0)
    metric.trigger_sync()
    metric.wait_sync()
    metric.reset()
    metric.load_state_dict(metric.state_dict())
    metric.update(5.0)
    assert metric._cycle._open.there()["sum"].data_ptr() == at
    assert metric.compute() == 5


def test_update_reads_nothing_and_sends_nothing():
    """No value of a tensor is asked for on the host."""
    metrics = [Sum(), Mean(), Max(), Min(), Std(), Running(Mean(), 3)]
    weighted = WeightedMean()
    values = torch.rand(7)
    for metric in metrics:
        metric.update(values)
    with Operations() as seen:
        for metric in metrics:
            metric.update(values)
            metric.update(values[0])
        weighted.update(values, torch.rand(7))
        weighted.update(values, 3)
    assert seen.counts
    assert not any("_local_scalar_dense" in name or "c10d" in name for name in seen.counts)


def test_a_value_with_a_graph_is_let_go():
    """Neither a gradient nor the tensors behind it are kept."""
    weight = torch.ones(3, requires_grad=True)
    behind = weight * 2.0
    metric = Mean()
    metric.update(behind.sum())
    metric.update(behind)
    gone = weakref.ref(behind)
    del behind
    gc.collect()
    assert gone() is None
    assert not metric.compute().requires_grad


def test_in_evaluation_as_in_training():
    """Numbers that were opened in inference mode can be written outside of it, and the other way."""
    metric = Mean()
    with torch.inference_mode():
        metric.update(torch.tensor(1.0))
        metric.sync()
    metric.update(torch.tensor(3.0))
    with torch.inference_mode():
        metric.update(torch.tensor(5.0))
    metric.sync()
    assert metric.compute() == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_counts_and_sums_are_exact_where_the_values_dtype_is_not(dtype):
    """Two hundred times 200 is too much for eight bits, and for the digits of a bfloat16."""
    metric = Mean()
    total = Sum()
    for _ in range(200):
        metric.update(torch.full((), 200, dtype=dtype))
        total.update(torch.full((), 200, dtype=dtype))
    assert metric.compute() == 200
    assert total.compute() == 40_000


def test_counting_is_exact_past_the_digits_of_a_float32():
    """2^24 + 1 is no float32; here it is a count."""
    metric, total = Mean(), Sum()
    metric.update(torch.zeros(1).expand(2**24))
    metric.update(1.0)
    total.update(2.0**53 - 1)
    total.update(1.0)
    assert metric.compute() == 1 / (2**24 + 1)
    assert total.compute().item() == 2**53


@pytest.mark.parametrize("kind", [Max, Min])
def test_an_extreme_never_swallows_a_nan(kind):
    """Wherever it comes, alone or among others."""
    for values in ([1.0, np.nan, 2.0], [np.nan, 1.0], [1.0, np.nan]):
        metric = kind()
        for value in values:
            metric.update(value)
        assert metric.compute().isnan()
        metric = kind()
        metric.update(torch.tensor(values))
        metric.sync()
        assert metric.compute().isnan()


def test_an_extreme_of_infinities_is_one():
    """It is told from nothing at all."""
    metric = Max()
    metric.update(float("-inf"))
    assert metric.compute() == float("-inf")


def test_empty_tensors_change_nothing():
    """A batch without a sample is a batch."""
    empty = torch.empty(0)
    metrics = [Mean(), Max(), Min(), Std(), Sum()]
    for metric in metrics:
        metric.update(empty)
        metric.update(torch.tensor([2.0, 2.0]))
        metric.update(empty)
    assert [float(metric.compute()) for metric in metrics] == [2, 2, 2, 0, 4]
    weighted = WeightedMean()
    weighted.update(empty, 1.0)
    assert weighted.compute().isnan()


def test_what_has_weight_zero_says_nothing():
    """Not even NaN; with all weights zero there is no mean."""
    metric = WeightedMean()
    metric.update(torch.tensor([1.0, float("nan"), 4.0]), torch.tensor([1.0, 0.0, 2.0]))
    metric.update(values=float("nan"), weights=0)
    assert metric.compute() == 3
    metric.reset()
    metric.update(5.0, 0.0)
    assert metric.compute().isnan()


def test_one_weight_may_stand_for_many_values():
    """It counts once for each of them."""
    metric = WeightedMean()
    metric.update(torch.tensor([1.0, 3.0]), 2.0)
    metric.update(torch.tensor(6.0), torch.tensor(1))
    assert metric.compute() == 14 / 5


def test_weights_of_another_shape_are_refused():
    """The message names both shapes."""
    with pytest.raises(MetricError, match=r"weights has the shape \(2,\), but values has \(3,\)"):
        WeightedMean().update(torch.ones(3), torch.ones(2))


def test_a_refused_batch_leaves_the_metric_as_it_was():
    """Nothing of it is counted."""
    metric = WeightedMean()
    metric.update(1.0, 1.0)
    with pytest.raises(MetricError):
        metric.update(torch.ones(3), torch.ones(2))
    assert metric.compute() == 1


@pytest.mark.parametrize(
    "value", [3, 3.0, np.float32(3), np.array([3.0, 3.0]), [3, 3], torch.tensor(3), True + 2]
)
def test_numbers_arrays_and_lists_are_values_as_well(value):
    """Whatever is a number on the host needs no conversion."""
    metric = Mean()
    metric.update(value)
    assert metric.compute() == 3


def test_moving_to_another_device_takes_the_numbers_along():
    """The meta device stands for one that this machine has not; back there is nothing to bring."""
    metric = mean_of(1, 3)
    assert metric.to("cpu") is metric
    assert metric.compute() == 2
    with pytest.raises(
        MetricError, match=r"a value is on meta, but the metric's numbers are on cpu"
    ):
        metric.update(torch.ones((), device="meta"))


def test_without_float64_sums_are_kept_in_two_parts(monkeypatch):
    """On a device that has no such numbers counts are exact all the same, to 2^48."""
    monkeypatch.setattr("everyrank.arrays.torch._WIDE", {"cpu": torch.float32})
    metric, total, means = Mean(), Sum(), Collection(a=Mean(), b=Mean())
    assert metric.compute().isnan()
    total.update(torch.tensor(2.0**30))
    metric.update(torch.zeros(1).expand(2**24))
    for _ in range(5):
        metric.update(torch.tensor(1.0))
        total.update(torch.tensor(1.0))
        means.update({"a": torch.tensor(2.0**26), "b": torch.tensor(1.0)})
    means.update({"a": torch.tensor(1.0), "b": torch.tensor(1.0)})
    for each in (metric, total, means):
        each.trigger_sync()
        each.wait_sync()
    assert metric.compute().dtype == torch.float64
    assert metric.compute() == 5 / (2**24 + 5)
    assert total.compute() == 2**30 + 5
    assert means.read() == {"a": (5 * 2**26 + 1) / 6, "b": 1}
    total.load_state_dict(total.state_dict())
    total.update(torch.tensor(1.0))
    assert total.compute() == 2**30 + 6
    large = Sum()
    for value in (
        [2.0**46] + [2.0**20] * 64 + [1.0] * 3
    ):  # what gathers in the rest moves up in time
        large.update(torch.tensor(value))
    assert large.compute() == 2**46 + 2**26 + 3
    large.update(torch.tensor(float("inf")))
    large.update(torch.tensor(1.0))
    assert large.compute() == float("inf")


# ------------------------------------------------------------------------------- what a review found


@pytest.mark.parametrize("make", [Sum, lambda: Running(Sum(), 3), lambda: Collection(a=Sum())])
def test_a_pickle_goes_on_counting(make):
    """Its numbers are where its updates go."""
    metric = make()
    metric.update(torch.tensor(1.0))
    again = pickle.loads(pickle.dumps(metric))
    again.update(torch.tensor(9.0))
    values = [again.compute(), metric.compute()]
    assert [v["a"] if isinstance(v, dict) else v for v in values] == [10, 1]


def test_a_shallow_copy_has_numbers_of_its_own():
    """Two metrics never write to the same place."""
    metric = mean_of(1)
    copy.copy(metric).update(100.0)
    assert metric.compute() == 1


def test_a_failed_sync_does_not_bring_back_what_a_reset_has_ended(monkeypatch):
    """What came since is there, and the next reset forgets it."""
    metric = Sum()
    metric.update(1.0)
    metric.trigger_sync()
    metric.reset()
    metric.update(10.0)
    with monkeypatch.context() as broken:
        broken.setattr("everyrank.metrics.torch.sync.Flight.land", fail)
        with pytest.raises(SyncFailed):
            metric.wait_sync()
    assert metric.compute() == 10
    metric.reset()
    assert metric.compute() == 0


def fail(flight):
    raise SyncFailed("no luck")


def test_the_last_value_is_the_last_also_after_a_sync():
    """Its order goes on whatever becomes of the window, and where it was loaded."""
    metric = Last()
    for value in (1.0, 2.0, 3.0):
        metric.update(value)
    metric.sync()
    metric.update(9.0)
    assert metric.compute() == 9
    metric.sync()
    assert metric.compute() == 9
    again = Last()
    again.load_state_dict(metric.state_dict())
    again.update(4.0)
    assert again.compute() == 4
    metric.update(1.0, order=100)
    metric.update(2.0)
    assert metric.compute() == 2


def test_looking_at_a_loaded_metric_does_not_change_it():
    """What is handed out is a tensor of its own, also before the first update."""
    metric, again = mean_of(3), Mean()
    again.load_state_dict(metric.state_dict())
    again.compute().add_(100)
    assert again.compute() == 3


def test_a_huge_first_value_has_no_spread():
    """Nothing times something huge is nothing."""
    metric = Std()
    metric.update(1e200)
    assert metric.compute() == 0


@pytest.mark.parametrize("value", [1j, torch.tensor(1j), np.array([1j])])
def test_a_complex_value_is_refused(value):
    """It has no order and no one size."""
    with pytest.raises(MetricError, match=r"a value is complex .* for example its abs"):
        Mean().update(value)


def test_an_array_of_jax_is_sent_to_the_metric_of_jax():
    """By name."""
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(MetricError, match=r"an array of JAX. Use .* in everyrank.jax.metrics"):
        Mean().update(jnp.ones(2))


def test_running_goes_on_after_an_evaluation():
    """Its ring was opened in inference mode, and can be written outside of it."""
    metric = Running(Mean(), 2)
    with torch.inference_mode():
        metric.update(torch.tensor(1.0))
    metric.update(torch.tensor(3.0))
    metric.update(torch.tensor(5.0))
    assert metric.compute() == 4
