"""The catalogue as pure functions for JAX: the same laws as in torch, inside whatever transforms."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import jax_metric_programs as programs
import jax_programs
import numpy as np
import pytest
from all_cases import CASES
from jax_metric_programs import TEXTS, arrays
from metric_programs import part

import everyrank.jax.metrics as pure_metrics
from everyrank import History, metrics
from everyrank.arrays.jax import ARRAYS
from everyrank.errors import MetricError, OptionError
from everyrank.jax.metrics import pure
from everyrank.metrics import DeclaredMetric, Mean
from everyrank.metrics.handing import made_again
from everyrank.testing import run_ranks

PATIENT = 150  # seconds; only there to end a hang
N = 60


@pytest.fixture(scope="module")
def elsewhere():
    """Call a function of the programs in a process that has 8 devices."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, context, initializer=jax_programs.simulate_devices, initargs=(8,)
    ) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(PATIENT)


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return np.concatenate([plain(entry) for entry in value.values()])
    if isinstance(value, tuple | list):
        return np.concatenate([plain(part) for part in value] or [np.zeros(0)])
    return np.asarray(value, np.float64).reshape(-1)


def by_torch(name: str, seed: int, dtype: Any = None) -> Any:
    """Give the value as the torch side has it, of the same samples."""
    data = CASES[name].data(np.random.default_rng(seed), N)
    if dtype is not None:
        data = tuple(
            x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x
            for x in data
        )
    metric = CASES[name].make()
    metric.update(*data)
    return metric.compute()


# ------------------------------------------------------------------------------- laws


#: One of each class: the other cases are tried in torch, and each takes a second to compile.
CLASSES = list({type(case.make()): name for name, case in reversed(CASES.items())}.values())


@pytest.mark.parametrize("name", CLASSES)
def test_law_batches_and_merges_give_the_value_of_the_whole(name):
    """As torch has it, to what float32 can tell; eager, and compiled where samples are numbers."""
    data = CASES[name].data(np.random.default_rng(7), N)
    metric = pure(CASES[name].make())
    update = metric.update if name.startswith(TEXTS) else jax.jit(metric.update)
    a, b = metric.init(), metric.init()
    a = update(a, *arrays(part(data, np.arange(20))))
    a = metric.update(a, *arrays(part(data, np.arange(20, 20))))
    b = update(b, *arrays(part(data, np.arange(20, 40))))
    b = update(b, *arrays(part(data, np.arange(40, 60))))
    assert jax.tree.structure(a) == jax.tree.structure(metric.init())
    together = metric.merge(a, b)
    wanted = plain(by_torch(name, 7, np.float32))
    np.testing.assert_allclose(plain(metric.read(together)), wanted, rtol=5e-4, atol=2e-5)
    computed = jax.jit(metric.compute)(together)
    np.testing.assert_allclose(plain(computed), wanted, rtol=5e-4, atol=2e-5)


def test_law_in_64_bits_it_is_what_torch_has(elsewhere):
    """Each metric of the catalogue, also where the digits are all at the end."""
    names = CLASSES + [name for name in CASES if "far" in name and name not in CLASSES]
    for name, value in elsewhere(programs.with_64_bits, names, 3).items():
        np.testing.assert_allclose(
            plain(value), plain(by_torch(name, 3)), rtol=1e-8, atol=1e-12, err_msg=name
        )


def test_every_metric_is_there_by_its_name():
    """With the options that it has, and as a page of names."""
    assert repr(pure_metrics.Std(correction=1)) == "Std(correction=1)"
    assert {"Mean", "Accuracy", "Quantile", "Running", "pure"} <= set(dir(pure_metrics))
    with pytest.raises(AttributeError, match="has no attribute 'Accuracies'"):
        _ = pure_metrics.Accuracies


# ------------------------------------------------------------------------------- transforms


def test_a_state_may_be_carried_through_a_scan():
    """And given away to the function that makes the next one."""
    metrics = programs.many()

    @jax.jit
    def epoch(state, values):
        return jax.lax.scan(lambda s, x: (metrics.update(s, x), None), state, values)[0]

    found = metrics.read(epoch(metrics.init(), jnp.arange(6.0)))
    assert found == {
        "loss": 2.5, "high": 5, "low": 0, "n": 6, "last": 5, "running": 9,
        "sd": pytest.approx(np.std(np.arange(6.0)), rel=1e-6),
        "fading": pytest.approx(sum(i * 0.5 ** (5 - i) for i in range(6)) / 1.96875, rel=1e-6),
    }  # fmt: skip


def test_a_state_may_be_mapped_over_and_donated():
    """One for each member of an ensemble; an old state is not needed any more."""
    metrics = programs.many()
    states = jax.vmap(lambda x: metrics.update(metrics.init(), x))(jnp.arange(12.0).reshape(3, 4))
    assert jax.vmap(metrics.compute)(states)["loss"].tolist() == [1.5, 5.5, 9.5]
    step = jax.jit(metrics.update, donate_argnums=0)
    state = metrics.init()
    for _ in range(3):
        state = step(state, jnp.ones(2))
    assert metrics.read(state)["n"] == 6


def test_no_state_is_changed_by_a_later_one():
    """All of it is pure."""
    metric = pure_metrics.Mean()
    first = metric.update(metric.init(), 1.0)
    second = metric.update(first, 5.0)
    assert (metric.read(first), metric.read(second)) == (1, 3)
    assert metric.read(metric.merge(first, second)) == pytest.approx(7 / 3)


def test_nothing_is_compiled_for_other_values(elsewhere):
    """Shapes count, numbers do not."""
    assert elsewhere(programs.compiled_once) == 0


def test_a_state_is_saved_by_orbax(tmp_path):
    """As any tree of arrays."""
    checkpoint = pytest.importorskip("orbax.checkpoint")
    metrics = programs.many()
    state = metrics.update(metrics.init(), jnp.arange(5.0))
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        again = saver.restore(tmp_path / "state", jax.eval_shape(metrics.init))
    assert metrics.read(again) == metrics.read(state)


# ------------------------------------------------------------------------------- exactness


def test_counting_is_exact_past_the_digits_of_a_float32():
    """Without 64 bits: 2**24 and one more, and a number of the host that is larger still."""
    metric = pure_metrics.Collection(count=pure_metrics.Count(), total=pure_metrics.Sum())
    step = jax.jit(metric.update)
    state = metric.update(metric.init(), {"count": np.zeros(2**24, np.float32)})
    for _ in range(5):
        state = step(state, {"count": jnp.ones(()), "total": jnp.float32(2**24)})
        state = step(state, {"total": jnp.float32(1)})
    assert metric.read(state) == {"count": 2**24 + 5, "total": 5 * 2**24 + 5}
    both = metric.merge(state, metric.merge(metric.init(), state))
    assert metric.read(both) == {"count": 2**25 + 10, "total": 10 * 2**24 + 10}


LARGE = 2**40 + 1


@pytest.mark.parametrize(
    ("value", "total", "mean"),
    [
        (LARGE, LARGE, LARGE),
        (2**31, 2**31, 2**31),
        (np.int64(LARGE), LARGE, LARGE),
        (np.array([2**32 + 5]), 2**32 + 5, 2**32 + 5),
        (np.array([LARGE, 1]), LARGE + 1, (LARGE + 1) / 2),
        (jnp.int32(2**24 + 1), 2**24 + 1, 2**24 + 1),
        (jnp.full(3, 2**30 + 1), 3 * (2**30 + 1), 2**30 + 1),
        (jnp.array([-(2**31), 5], jnp.int32), 5 - 2**31, (5 - 2**31) / 2),
        (jnp.full(3, 2**32 - 1, jnp.uint32), 3 * (2**32 - 1), 2**32 - 1),
        (jnp.array([True, False]), 1, 0.5),
    ],
)
def test_integers_keep_their_digits_without_64_bits(value, total, mean):
    """Of the host and of a device, one or many, past int32 and past float32."""
    for metric, wanted in ((pure_metrics.Sum(), total), (pure_metrics.Mean(), mean)):
        assert metric.read(metric.update(metric.init(), value)) == wanted
    if isinstance(value, jax.Array):
        metric = pure_metrics.Sum()
        assert metric.read(jax.jit(metric.update)(metric.init(), value)) == total


def test_weights_past_int32_are_floats():
    """Where JAX would take the lower half of their bits."""
    metric = pure_metrics.WeightedMean()
    assert metric.read(metric.update(metric.init(), 2.0, np.int64(2**32))) == 2
    assert metric.read(metric.update(metric.init(), 2.0, 2**40)) == 2
    assert metric.read(metric.update(metric.init(), 2, [2**40][0])) == 2


def test_one_batch_may_count_past_the_digits_of_a_float32():
    """All of them in one bucket, and kept by a mask."""
    metric = pure_metrics.ConfusionMatrix(classes=2)
    many = jnp.zeros(2**24 + 3, jnp.int8)
    assert metric.read(metric.update(metric.init(), many, many))[0, 0] == 2**24 + 3
    total = jax.jit(ARRAYS.total)(many == 0)
    assert (int(total), total.dtype) == (2**24 + 3, jnp.int32)


def test_what_is_not_finite_leaves_no_trace_in_the_rest():
    """An infinite sum is infinite, and a NaN is a NaN."""
    metric = pure_metrics.Sum()
    for value in (np.inf, -np.inf, np.nan):
        state = metric.update(metric.update(metric.init(), 1.0), value)
        np.testing.assert_equal(metric.read(state), value)
        np.testing.assert_equal(float(metric.compute(state)), value)


# ------------------------------------------------------------------------------- devices


VALUES = np.arange(16, dtype=np.float32)
WHOLE = {
    "loss": 7.5, "high": 15, "low": 0, "n": 16, "last": 15, "running": 120, "fading": 7.5,
    "sd": pytest.approx(np.std(VALUES), rel=1e-6),
}  # fmt: skip


def test_states_of_eight_devices_come_together_in_one_all_reduce(elsewhere):
    """However many metrics; what comes out is the same on every device."""
    found, reduces, others = elsewhere(programs.on_each_device, VALUES)
    assert found == WHOLE
    assert (reduces, others) == (1, 0)


def test_a_nan_on_one_device_is_seen_by_all(elsewhere):
    """XLA's own maximum over devices loses it."""
    values = VALUES.copy()
    values[5] = np.nan
    found, *_ = elsewhere(programs.on_each_device, values)
    for name in ("loss", "high", "low", "sd"):
        assert np.isnan(found[name]), name
    assert found["n"] == 16


@pytest.mark.parametrize("how", ["on_two_axes", "under_pmap"])
def test_axes_may_be_several_and_of_pmap(elsewhere, how):
    """As everywhere else in this room."""
    assert elsewhere(getattr(programs, how), VALUES) == WHOLE


def test_whole_arrays_need_no_reduce(elsewhere):
    """In a jitted step over a mesh an update sees all there is."""
    found = elsewhere(programs.over_a_mesh, VALUES)
    assert found == WHOLE | {"n": 32, "running": 240, "loss": 7.5}


def test_new_samples_are_merged_to_a_state_that_all_devices_have(elsewhere):
    """What was there before counts once, however many devices there are."""
    assert elsewhere(programs.accumulated, VALUES) == WHOLE | {"n": 32, "running": 240}


def test_a_scan_on_each_device_carries_a_state(elsewhere):
    """Once it is said that the state differs from device to device."""
    found = elsewhere(programs.scanned_on_each_device, VALUES)
    assert {n: found[n] for n in ("loss", "high", "n")} == {"loss": 7.5, "high": 15, "n": 16}


@pytest.mark.parametrize("jitted", [True, False])
def test_arrays_may_say_in_their_types_how_they_are_cut(elsewhere, jitted):
    """As a mesh of jax.make_mesh has it, within jax.set_mesh and without."""
    found = elsewhere(programs.over_an_explicit_mesh, jitted)
    assert all(inside == outside for inside, outside in found.values())
    assert found["matrix"][0] == [[6, 0, 0], [0, 5, 0], [0, 0, 5]]
    assert (found["f1"][0], found["last"][0], found["recent"][0]) == (1, 0, 15)
    assert found["median"][0] == pytest.approx(1, rel=0.02)


def test_states_too_large_for_a_place_each_are_summed_up(elsewhere):
    """A matrix of a million numbers on 8 devices; JAX sees that all devices get the same."""
    counts, high = elsewhere(programs.large_states, 1000)
    assert counts[:64] == [1] * 64
    assert high == 63


def test_reduce_outside_of_shard_map_says_what_to_do():
    """There is no axis of that name."""
    metric = pure_metrics.Mean()
    with pytest.raises(OptionError, match=r"axis_name='batch' is no axis here: reduce is called"):
        metric.reduce(metric.init())


def test_it_can_be_followed_without_jit():
    """As one does to find a mistake: one update in a ring, and all of them."""
    with jax.disable_jit():
        for n in (1, 2):
            metric = pure_metrics.Running(pure_metrics.Sum(), n)
            state = metric.update(metric.update(metric.init(), 1.0), 2.0)
            assert metric.read(metric.merge(metric.init(), state)) == (2 if n == 1 else 3)


def test_a_ring_that_was_not_updated_is_not_shared():
    """Giving one state away leaves the other whole."""
    metric = pure_metrics.Collection(
        a=pure_metrics.Sum(), b=pure_metrics.Running(pure_metrics.Sum(), 3)
    )
    first = metric.update(metric.init(), 1.0)
    second = metric.update(first, {"a": 1.0})
    for leaf in jax.tree.leaves(first):
        leaf.delete()
    assert metric.read(metric.update(second, {"b": 4.0})) == {"a": 2, "b": 5}


def test_a_state_may_be_a_mapping_of_another_library():
    """A FrozenDict of flax is no dict."""
    metric = pure_metrics.Running(pure_metrics.Sum(), 2)
    state = metric.update(metric.init(), 3.0)
    state["ring"] = MappingProxyType(state["ring"])
    assert metric.read(metric.update(MappingProxyType(state), 4.0)) == 7


# ------------------------------------------------------------------------------- names


def test_what_makes_a_metric_looks_like_its_class():
    """To help(), to editors and to pickle; always the same object."""
    assert pure_metrics.Std is pure_metrics.Std
    assert pure_metrics.Std.__name__ == "Std"
    assert pure_metrics.Std.__doc__.startswith("The standard deviation")
    assert list(inspect.signature(pure_metrics.Std).parameters) == ["correction"]
    assert not inspect.signature(pure_metrics.Mean).parameters
    assert pickle.loads(pickle.dumps(pure_metrics.Std)) is pure_metrics.Std


def test_a_star_import_gives_metrics_and_no_helpers():
    """And so does dir()."""
    found: dict[str, Any] = {}
    exec("from everyrank.jax.metrics import *", found)
    assert {"Mean", "Accuracy", "Running", "Collection", "Pure", "pure"} <= found.keys()
    assert not {"State", "DeclaredMetric", "At", "jax", "np"} & found.keys()
    assert set(dir(pure_metrics)) == found.keys() - {"__builtins__"}
    assert not hasattr(pure_metrics, "State")


# ------------------------------------------------------------------------------- mistakes


class Misspelt(DeclaredMetric):
    """Contributes to a state that it does not have, or in another shape."""

    total = metrics.State("sum", 3)

    def batch(self, values):
        return {"total": values} if values.ndim else {"totl": values}


def running_of(n, state_of):
    moving = [pure_metrics.Running(pure_metrics.Sum(), k) for k in (n, state_of)]
    return moving[0].update(moving[1].init(), 1.0)


def validated_in_jit():
    metric = pure_metrics.Accuracy(classes=3, validate=True)
    return jax.jit(metric.update)(metric.init(), jnp.zeros(3, int), jnp.zeros(3, int))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (
            lambda: pure_metrics.Mean().update({}, 1.0),
            MetricError,
            r"state=\{\} is none of Mean\(\)",
        ),
        (
            lambda: programs.many().compute(pure_metrics.Mean().init()),
            MetricError,
            r"'sum': \(2,\).* is none of Collection\(loss=Mean\(\)",
        ),
        (
            lambda: programs.many().update(programs.many().init(), {"los": 1.0}),
            MetricError,
            "'los' is no metric of this collection, which has loss, high",
        ),
        (
            lambda: pure(Misspelt()).update(pure(Misspelt()).init(), jnp.ones(())),
            MetricError,
            "Misspelt.batch gave a contribution to 'totl', which is none of its states total",
        ),
        (
            lambda: pure(Misspelt()).update(pure(Misspelt()).init(), jnp.ones(2)),
            MetricError,
            r"'total' has the shape \(3,\), but a batch contributed one of \(2,\)",
        ),
        (lambda: running_of(3, 2), MetricError, r"is none of Running\(Sum\(\), 3\)"),
        (lambda: running_of(2, 3), MetricError, r"is none of Running\(Sum\(\), 2\)"),
        (validated_in_jit, MetricError, "validate reads values, which do not exist yet inside"),
        (
            lambda: pure_metrics.Mean().update(pure_metrics.Mean().init(), jnp.ones(2) * 1j),
            MetricError,
            r"`values` of Mean\(\) is complex64.* abs\(values\)",
        ),
        (
            lambda: pure_metrics.Mean().update(pure_metrics.Mean().init(), 1j),
            MetricError,
            r"`values` of Mean\(\) is complex64",
        ),
        (
            lambda: pure_metrics.Mean().update(pure_metrics.Mean().init()),
            TypeError,
            r"update\(\) of Mean\(\): missing a required argument: 'values'",
        ),
        (
            lambda: pure_metrics.Collection(pure_metrics.Mean()),
            OptionError,
            r"metrics=Mean\(\) must be a dict of metrics by name",
        ),
        (
            lambda: pure_metrics.Collection({"": pure_metrics.Mean()}),
            OptionError,
            "'' is no name of a metric",
        ),
        (lambda: pure(Mean), OptionError, "must be a declared metric"),
        (
            lambda: pure_metrics.Collection(a=Mean()),
            OptionError,
            r"'a' is Mean\(\), and no metric of",
        ),
        (
            lambda: pure_metrics.Mean().update(pure_metrics.Mean().init(), "text"),
            MetricError,
            "str is no array of torch, JAX or numpy",
        ),
    ],
)
def test_a_mistake_is_named_with_what_would_do(use, error, message):
    """Also inside a trace, since shapes tell."""
    with pytest.raises(error, match=message):
        use()


# ------------------------------------------------------------------------------- History


@pytest.fixture
def history(tmp_path):
    with History(outdir=tmp_path / "run") as history:
        yield history


def test_metrics_are_recorded_as_they_are_in_a_state(history):
    """One or a collection, exact past the digits of a float32; the state may be given away."""
    metrics, count = programs.many(), pure_metrics.Count()
    state = metrics.update(metrics.init(), jnp.arange(4.0))
    counted = count.update(count.update(count.init(), np.zeros(2**24)), 1.0)
    history.update({"train": metrics.at(state), "n": count.at(counted)})
    jax.jit(metrics.update, donate_argnums=0)(state, 1.0)
    record = history.latest.values
    assert record["train/loss"] == 1.5
    assert record["train/running"] == 6
    assert record["n"] == 2**24 + 1


def test_a_state_that_was_given_away_is_named(history):
    """With what would do."""
    metric = pure_metrics.Mean()
    state = metric.init()
    jax.tree.map(lambda x: x.delete(), state)
    with pytest.raises(MetricError, match="'m' is a state that was deleted, or donated"):
        history.update({"m": metric.at(state)})


def test_a_state_of_the_host_is_recorded(history):
    """As jax.device_get gives it."""
    metric = pure_metrics.Mean()
    state = metric.update(metric.init(), jnp.arange(4.0))
    history.update({"m": metric.at(jax.device_get(state))})
    assert history.latest.values["m"] == 1.5


def test_a_state_on_different_devices_is_named(elsewhere):
    """It would have to be copied between them first."""
    said = elsewhere(programs.on_other_devices)
    assert said.startswith("'m' is a state whose arrays cannot be brought together")
    assert "jax.device_put(state, device)" in said


def test_what_metrics_say_of_themselves_is_made_once():
    """And not at every update of a History."""
    metric = pure_metrics.Mean()
    state = metric.init()
    first, second = (metric.at(state).hand_over("m") for _ in range(2))
    assert first.spec is second.spec
    assert first.finish is second.finish


def test_a_state_inside_jit_has_no_value_yet(history):
    """The message says to hand it over outside."""
    metric = pure_metrics.Mean()

    @jax.jit
    def step(x):
        history.update({"m": metric.at(metric.update(metric.init(), x))})
        return x

    with pytest.raises(
        MetricError, match=r"'m' is a tracer: update\(\) was called inside a jitted"
    ):
        step(jnp.ones(3))


def test_update_returns_while_the_values_are_still_being_computed(elsewhere):
    """It dispatches a copy behind them, and waits for nothing."""
    before, after, n = elsewhere(programs.never_waits)
    assert (before, after) == (False, False)
    assert n == 2


@pytest.mark.parametrize("n", [2, 4])
def test_processes_of_jax_record_over_all_of_them(tmp_path, n):
    """Arrays, metrics, and what only one of them has."""
    ranks = run_ranks(
        programs.in_history,
        n,
        str(tmp_path / "run"),
        n,
        backend=None,
        start_method="forkserver",
        env={"JAX_PLATFORMS": "cpu"},
    )
    samples = [10.0 * rank + value + 3 for rank in range(n) for value in range(rank + 1)]
    for rank, (record, series) in enumerate(ranks):
        assert record["loss"] == (rank + 3) ** 2
        assert record["loss/mean"] == np.mean([(r + 3) ** 2 for r in range(n)])
        assert series["loss/mean"] == [np.mean([(r + i) ** 2 for r in range(n)]) for i in range(4)]
        assert record["m/loss"] == pytest.approx(np.mean(samples), rel=1e-6)
        assert record["m/n"] == len(samples)
        assert record["m/sd"] == pytest.approx(np.std(samples), rel=1e-6)
        assert record["only/max"] == (n - 1) % 3
        assert record["only/ranks"] == 1


def test_statistics_are_those_of_torch_to_the_last_bit(tmp_path):
    """The same numbers, as arrays and as tensors."""
    found = [
        run_ranks(
            programs.same_numbers,
            2,
            str(tmp_path / framework),
            framework,
            backend=None,
            start_method="forkserver",
            env={"JAX_PLATFORMS": "cpu"},
        )
        for framework in ("torch", "jax")
    ]
    assert found[0] == found[1]
    assert len(found[0][0]) == 4 * 6


def test_processes_of_jax_may_disagree(tmp_path):
    """Other keys, fewer steps: statistics are over those who reported."""
    ranks = run_ranks(
        programs.disagreeing_processes,
        3,
        str(tmp_path / "run"),
        backend=None,
        start_method="forkserver",
        env={"JAX_PLATFORMS": "cpu"},
    )
    whole = {
        "both/mean": [0, 1, 2, 3, 4, 5],
        "a/mean": [0.5, 1.5, 2.5, 3, 4, 5],
        "b/mean": [2, 3, 4, 5, 6, 7],
    }
    assert ranks[0] == ranks[2] == whole
    assert ranks[1] == {name: values[:3] for name, values in whole.items()}


def test_a_process_of_jax_that_falls_silent_is_not_waited_for(tmp_path):
    """Past the deadline the others go on without it."""
    first, _, third = run_ranks(
        programs.a_silent_process,
        3,
        str(tmp_path),
        backend=None,
        start_method="forkserver",
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert first == third == [1, 2, 3, 4]


def test_nothing_is_dispatched_from_a_background_thread():
    """It could reorder the program's own collectives."""
    (threads,) = run_ranks(
        programs.dispatch_order,
        1,
        backend=None,
        start_method="forkserver",
        env={"JAX_PLATFORMS": "cpu"},
    )
    assert len(threads) >= 30  # ten steps of a sum, an update, and two copies
    assert set(threads) == {"MainThread"}


def test_what_a_metric_says_of_itself_is_understood_by_the_other_framework(history):
    """The writing rank may have torch, or JAX, or neither."""
    metric = pure_metrics.Accuracy(classes=3)
    state = metric.update(metric.init(), jnp.array([0, 1]), jnp.array([0, 2]))
    handed = metric.at(state).hand_over("accuracy")
    made = made_again(json.loads(handed.spec))
    assert made is not None
    assert made(np.asarray(handed.array, np.float64)) == 0.5
