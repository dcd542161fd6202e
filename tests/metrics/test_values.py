"""What holds for every metric of regression, ranking, text and sketches alike."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases_values import CASES
from torch.utils._python_dispatch import TorchDispatchMode

from everyrank.metrics.declared import DeclaredMetric

ON_ARRAYS = [name for name in CASES if "ErrorRate" not in name]


class Reads(TorchDispatchMode):
    """Counts how often a value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def made(name: str, n: int, seed: int = 0) -> tuple[DeclaredMetric, tuple[Any, ...]]:
    """Give the metric of a case, and samples for it."""
    return CASES[name].make(), CASES[name].data(np.random.default_rng(seed), n)


def flat(value: Any) -> list[float]:
    """Give whatever a metric computes as numbers."""
    parts = value if isinstance(value, tuple) else (value,)
    return [float(number) for part in parts for number in np.asarray(part).reshape(-1)]


def as_tensors(data: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.as_tensor(x) if isinstance(x, np.ndarray) else x for x in data)


@pytest.mark.parametrize("name", CASES)
def test_batches_of_any_size_give_the_value_of_the_whole(name: str):
    """Empty batches, single samples and the rest of them add up to one batch of all."""
    metric, data = made(name, 40)
    whole, _ = made(name, 0)
    whole.update(*data)
    for start, stop in [(0, 0), (0, 1), (1, 17), (17, 17), (17, 40)]:
        metric.update(*(x[start:stop] for x in data))
    assert flat(metric.compute()) == pytest.approx(flat(whole.compute()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_nothing_accumulated_gives_nan(name: str):
    """Neither a fresh metric nor one that saw an empty batch has a value, and none raises."""
    metric, data = made(name, 0)
    for _ in range(2):
        value = metric.compute()
        if name.startswith("Histogram"):
            assert value.counts.sum() == value.nans == 0
        else:
            assert all(map(math.isnan, flat(value)))
        metric.update(*data)


@pytest.mark.parametrize("name", ON_ARRAYS)
def test_jax_and_numpy_give_the_numbers_of_torch(name: str):
    """One definition serves all: under jax.jit to 32 bits, with numpy exactly."""
    metric, data = made(name, 24)
    metric.update(*as_tensors(data))
    expected = flat(metric.compute())
    states = jax.jit(metric.batch)(*map(jnp.asarray, data))
    traced = jax.jit(lambda states: metric.finish(**states))(states)
    assert flat(traced) == pytest.approx(expected, rel=2e-4, abs=1e-5)
    plain = metric.finish(**metric.batch(*data))
    assert flat(plain) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_update_reads_nothing_on_the_host(name: str):
    """A step of training never waits for a metric."""
    metric, data = made(name, 8)
    data = as_tensors(data)
    with Reads() as reads:
        metric.update(*data)
        metric.update(*data)
    assert reads.count == 0


@pytest.mark.parametrize("name", ON_ARRAYS)
def test_a_batch_needs_no_values_at_all(name: str):
    """On a device that has shapes only, contributions have the shapes of their states."""
    metric, data = made(name, 8)
    states = metric.states()
    for state, given in metric.batch(*(x.to("meta") for x in as_tensors(data))).items():
        assert getattr(given, "shape", ()) == states[state].shape


@pytest.mark.parametrize(
    "name",
    [
        "MeanSquaredError(weights)",
        "PearsonCorrelation",
        "NDCG(k)",
        "HitRate",
        "Perplexity",
        "Quantile",
    ],
)
def test_an_update_compiles_as_a_whole(name: str):
    """Under torch.compile(fullgraph=True) an update does what it does without."""
    metric, data = made(name, 8)
    eager, _ = made(name, 0)
    data = as_tensors(data)
    compiled = torch.compile(metric.update, fullgraph=True, backend="aot_eager")
    for each in (metric.update, compiled, eager.update, eager.update):
        each(*data)
    assert flat(metric.compute()) == pytest.approx(flat(eager.compute()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ON_ARRAYS)
def test_narrow_floats_are_widened_before_anything_else(name: str, dtype: torch.dtype):
    """Halves give what the same numbers give in 32 bits."""
    metric, data = made(name, 16)
    wide, _ = made(name, 0)
    cast = [x.to(dtype) if x.is_floating_point() else x for x in as_tensors(data)]
    metric.update(*cast)
    wide.update(*(x.float() if x.is_floating_point() else x for x in cast))
    assert flat(metric.compute()) == pytest.approx(flat(wide.compute()), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("name", [n for n in ON_ARRAYS if "Loss" not in n and n != "BitsPerByte"])
def test_a_nan_is_never_swallowed(name: str):
    """One NaN among the values makes the result NaN; a histogram says how many there were."""
    metric, data = made(name, 8)
    metric.update(*data)
    data[0].flat[3] = np.nan
    data[1 if name == "Perplexity" else 0].flat[0] = 1
    if "weights" in name or name in ("RootMeanSquaredError", "MeanAbsoluteError"):
        data[-1][3] = 1  # a weight of zero would leave it out
    metric.update(*data)
    value = metric.compute()
    assert value.nans == 1 if name.startswith("Histogram") else all(map(math.isnan, flat(value)))
