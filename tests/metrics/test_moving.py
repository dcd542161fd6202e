"""Metrics of what came lately."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.metrics import Count, Ema, Max, Mean, Min, Running, Std, Sum, WeightedMean

FINITE = st.floats(-1e6, 1e6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(FINITE, max_size=4), max_size=12), st.integers(1, 5))
def test_law_running_is_the_metric_over_the_last_updates(batches, n):
    """Whatever the metric; an empty batch is an update as well."""
    for kind in (Mean, Sum, Max, Min, Std, Count):
        running, fresh = Running(kind(), n), kind()
        for batch in batches:
            running.update(torch.tensor(batch, dtype=torch.float64))
        for batch in batches[-n:]:
            fresh.update(torch.tensor(batch, dtype=torch.float64))
        found, wanted = float(running.compute()), float(fresh.compute())
        assert found == pytest.approx(
            wanted, rel=1e-9, abs=1e-3 if kind is Std else 1e-9, nan_ok=True
        )


@settings(deadline=None, max_examples=40)
@given(st.lists(FINITE, min_size=1, max_size=12), st.floats(0, 0.99))
def test_law_an_average_that_fades_weighs_each_update_by_its_age(values, decay):
    """The newest counts as one, the one before as `decay`, and so on; nothing pulls towards zero."""
    metric = Ema(Mean(), decay)
    for value in values:
        metric.update(value)
    weights = decay ** np.arange(len(values))[::-1]
    wanted = float((weights * values).sum() / weights.sum())
    assert float(metric.compute()) == pytest.approx(wanted, rel=1e-9, abs=1e-6)


def test_a_batch_has_its_weight_in_an_average_that_fades():
    """Three tokens count three times one."""
    metric = Ema(WeightedMean(), 0.5)
    metric.update(1.0, 1)
    metric.update(5.0, 3)
    assert metric.compute() == (0.5 * 1 + 3 * 5) / (0.5 + 3)


def test_a_sync_ends_no_window_of_it():
    """It goes on from the same numbers, and shows what the sync found until the next one."""
    metric = Running(Sum(), 2)
    for value in (1.0, 2.0, 3.0):
        metric.update(value)
    metric.sync()
    assert metric.compute() == 5
    metric.update(10.0)
    assert metric.compute() == 5
    metric.sync()
    assert metric.compute() == 13
    metric.reset()
    assert metric.compute() == 0
    metric.update(1.0)
    assert metric.compute() == 1


def test_a_nan_leaves_with_its_update():
    """It is seen as long as it counts, and not for ever."""
    metric = Running(Max(), 2)
    seen = []
    for value in (1.0, float("nan"), 2.0, 3.0):
        metric.update(value)
        seen.append(float(metric.compute()))
    assert np.isnan(seen).tolist() == [False, True, True, False]
