"""The law of the whole catalogue: however the data are split, the value is that of the whole.

Over batches, over collections, and over real ranks; the cases are in `tests/programs/cases_*.py`.
"""

from __future__ import annotations

import inspect
from typing import Any

import metric_programs as programs
import numpy as np
import pytest
import torch
from all_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

import everyrank.metrics
from everyrank.metrics import Collection, DeclaredMetric
from everyrank.testing import run_ranks

N = 60


def plain(value: Any) -> Any:
    """Give numbers, arrays, and tuples of them as one flat array."""
    if isinstance(value, tuple | list):
        return np.concatenate([plain(part) for part in value])
    return np.asarray(value, np.float64).reshape(-1)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(plain(found), plain(wanted), rtol=1e-8, atol=1e-12)


def whole(name: str, seed: int) -> Any:
    metric = CASES[name].make()
    metric.update(*CASES[name].data(np.random.default_rng(seed), N))
    return metric.compute()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    cuts=st.lists(st.integers(0, N), max_size=5).map(sorted),
    synced=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_law_any_batches_with_any_syncs_give_the_value_of_the_whole(name, seed, cuts, synced):
    """Empty ones and single samples among them."""
    case = CASES[name]
    data = case.data(np.random.default_rng(seed), N)
    metric = case.make()
    for batch, sync in zip(np.split(np.arange(N), cuts), synced, strict=False):
        metric.update(*programs.part(data, batch))
        if sync:
            metric.sync()
    same(metric.compute(), whole(name, seed))


def test_law_in_a_collection_each_is_as_it_is_alone():
    """All of them in one plan, whatever lies beside them."""
    for seed in range(2):
        metrics = Collection({name: case.make() for name, case in CASES.items()})
        for name, case in CASES.items():
            data = case.data(np.random.default_rng(seed), N)
            metrics.update({name: programs.part(data, np.arange(N // 2))})
            metrics[name].update(*programs.part(data, np.arange(N // 2, N)))
        metrics.sync()
        found = metrics.compute()
        for name in CASES:
            same(found[name], whole(name, seed))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_law_any_ranks_give_the_value_of_the_whole(ranks):
    """Each with another part of the data, in other batches, some of them with nothing."""
    for found in run_ranks(programs.law, ranks, list(CASES), ranks, start_method="forkserver"):
        for name, value in found.items():
            same(value, whole(name, ranks))


def test_every_metric_of_the_catalogue_has_a_case():
    """More than thirty of them; those around others are tried apart."""
    public = {
        getattr(everyrank.metrics, name)
        for name in everyrank.metrics.__all__
        if inspect.isclass(getattr(everyrank.metrics, name))
    }
    catalogue = {kind for kind in public if issubclass(kind, DeclaredMetric)} - {
        everyrank.metrics.DeclaredMetric,
        everyrank.metrics.Running,
        everyrank.metrics.Ema,
    }
    tried = {type(case.make()) for case in CASES.values()}
    assert catalogue == tried
    assert len(catalogue) > 30


@pytest.mark.parametrize("name", CASES)
def test_the_state_does_not_grow(name):
    """However many batches there are."""
    case = CASES[name]
    metric = case.make()
    data = case.data(np.random.default_rng(0), N)
    sizes = set()
    for _ in range(3):
        metric.update(*data)
        sizes.add(metric.state_dict()["states"].numel())
    assert len(sizes) == 1


@pytest.mark.parametrize("name", CASES)
def test_nothing_accumulated_is_no_error(name):
    """Wherever one looks; a count or a sum is 0, whatever divides by one is NaN."""
    metric = CASES[name].make()
    for value in plain(metric.compute()):
        assert np.isnan(value) or name.startswith(("Sum", "Count", "Confusion", "Histogram"))
    metric.sync()
    same(metric.compute(), CASES[name].make().compute())
    assert torch.get_default_dtype() == torch.float32
