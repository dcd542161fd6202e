"""The room of JAX on 8 simulated devices, and on two processes: sharded arrays and collectives.

The devices are there from the start of a process or never, so that all of this runs in others.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import jax_programs
import numpy as np
import pytest

from everyrank.errors import MetricError, OptionError
from everyrank.jax import (
    all_gather,
    reduce_max_collective,
    reduce_mean_collective,
    reduce_weighted_mean_collective,
)
from everyrank.testing import run_ranks

PATIENT = 150  # seconds; only there to end a hang


@pytest.fixture(scope="module")
def on_eight():
    """Call a function of jax_programs in a process that has 8 devices."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, context, initializer=jax_programs.simulate_devices, initargs=(8,)
    ) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(PATIENT)


# ---------------------------------------------------------------- whole arrays


def test_fifty_sharded_metrics_are_one_program(on_eight):
    """Compiled once, whatever the values, the names, and what stands beside them."""
    first, again, right, step, phase = on_eight(jax_programs.fifty_metrics)
    assert (first, again) == (1, 0)
    assert right
    assert (step, phase) == (1, "warmup")


@pytest.mark.parametrize(
    ("ways", "count"),
    [(["mean"], 1), (["mean", "sum"], 1), (["max"], 1), (["mean", "sum", "max", "min"], 3)],
    ids=str,
)
def test_fifty_sharded_metrics_are_an_all_reduce_for_each_way_of_combining(on_eight, ways, count):
    """Means and sums are combined alike, NaN travels along; eager, and in a jitted step."""
    assert on_eight(jax_programs.all_reduces_of, ways) == [count, count]


def test_wherever_arrays_lie_the_result_is_that_of_the_whole(on_eight):
    """Cut along any axes of a mesh, copied, on one device or on the host; eager and under jit."""
    assert on_eight(jax_programs.placements) == []


def test_law_eight_devices_equal_one(on_eight):
    """Whole arrays and collectives, on any values and dtypes."""
    on_eight(jax_programs.law_of_eight_devices)


def test_no_device_swallows_a_nan(on_eight):
    """XLA's own all-reduce on CPU does, for max and min."""
    assert on_eight(jax_programs.nan_on_each_device) == {"nan"}


def test_results_lie_where_their_arrays_did(on_eight):
    """So that a step that takes both takes a result, too."""
    differences, replicated = on_eight(jax_programs.where_results_lie)
    assert differences == [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert replicated


def test_one_dict_may_hold_arrays_of_different_devices(on_eight):
    """Each set of devices reduces its own; weights follow their values."""
    sums, means = on_eight(jax_programs.other_devices)
    assert sums == {"mesh": 28, "half": 6, "last": 1, "anywhere": 3, "host": 36}
    assert means == {"mesh": 5, "half": 1.5, "last": 0.5, "anywhere": 1, "host": 4}


def test_another_mesh_may_be_set(on_eight):
    """Or a device's own part be at work; then it is the part that is reduced."""
    under_another, under_its_own, captured, local = on_eight(jax_programs.another_mesh_is_set)
    assert under_another == under_its_own == 3.5
    assert captured == [3.5 + i for i in range(8)]
    assert local == [0.5 + 2 * i for i in range(8)]


def test_in_flax_under_a_mesh_the_results_are_the_eager_ones(on_eight):
    """With numbers, None and nested leaves among the metrics."""
    assert on_eight(jax_programs.in_flax) == (True, True, True)


# ---------------------------------------------------------------- collectives


NUMPY = {name: partial(getattr(np, name), axis=0) for name in jax_programs.COLLECTIVES}


@pytest.mark.parametrize("names", ["a", ("a", "b"), ["b"]], ids=str)
def test_collectives_reduce_each_element_over_the_devices_of_some_axes(on_eight, names):
    """Every array of a tree, in its own shape and dtype; what is no array passes through."""
    got, held, weights = on_eight(jax_programs.collectives_of_a_tree, names)
    assert str(got["mean"]["number"].dtype) == "float32"
    assert str(got["max"]["truth"].dtype) == "bool"
    assert str(got["sum"]["truth"].dtype) == "int32"
    assert str(got["mean"]["nested"]["matrix"].dtype) == "bfloat16"
    assert got["sum"]["nested"]["none"] is None
    got, held = [jax.tree.map(lambda x: x.astype(float), tree) for tree in (got, held)]
    devices = np.arange(8).reshape(4, 2)
    for group in {"a": devices.T, "['b']": devices}.get(str(names), devices.reshape(1, 8)):
        of_group = jax.tree.map(lambda *x: np.stack(x), *[held[device] for device in group])
        want = {name: jax.tree.map(way, of_group) for name, way in NUMPY.items()}
        average = partial(np.average, axis=0, weights=weights[group])
        want["weighted"] = jax.tree.map(average, of_group)
        for device in group:
            of_device = jax.tree.map(itemgetter(device), got)
            close = jax.tree.map(partial(np.allclose, rtol=1e-2), of_device, want)
            assert jax.tree.all(close), (names, device)


def test_a_tree_is_a_collective_for_each_dtype_that_is_combined(on_eight):
    """20 metrics of three dtypes: a mean combines floats only, and a gather keeps each dtype."""
    reduces, gathers = on_eight(jax_programs.collectives_in_the_program)
    assert reduces == {"mean": 1, "sum": 2, "max": 2, "min": 2}
    assert gathers == 3


def test_all_gather_gives_every_device_what_all_hold(on_eight):
    """In the order of the devices, behind a new first dimension; also over several axes."""
    got, both, everywhere = on_eight(jax_programs.gathered)
    rows = np.arange(16.0).reshape(8, 2)
    assert got["none"] is None
    for device in range(8):
        assert (got["row"][device] == rows).all()
        assert (got["number"][device] == rows.sum(axis=1)).all()
        assert (got["true"][device] == (rows.sum(axis=1) > 3)).all()
    assert got["true"].dtype == bool
    assert (both == np.arange(8.0)).all()
    assert everywhere.tolist() == np.arange(8.0).tolist()


def test_collectives_work_in_pmap(on_eight):
    """By the axis that is called "batch", as it is where nothing else is said."""
    got = on_eight(jax_programs.under_pmap)
    assert {name: set(values.tolist()) for name, values in got.items()} == {
        "mean": {3.5},
        "sum": {28},
        "max": {7},
        "min": {0},
    }


def test_an_axis_that_does_not_exist_is_refused_with_those_that_do(on_eight):
    """Also if it is one of several, a number, or an axis of the mesh that is not mapped over."""
    told = on_eight(jax_programs.refusals)
    assert {kind for kind, _ in told.values()} == {"OptionError"}
    assert told["unknown"][1] == (
        "axis_name='rows' is no axis here. Mapped over: 'a', 'b'. Pass one of these, or a tuple of "
        "several."
    )
    assert told["one of two"][1].startswith("axis_name=('a', 'rows') is no axis here. Mapped over")
    assert told["default"][1].startswith(
        "axis_name='batch' is no axis here. Mapped over: 'a', 'b'."
    )
    assert told["not mapped"][1].startswith("axis_name='b' is no axis here. Mapped over: 'a'. Pass")
    assert told["a number"][1].startswith("axis_name=1 is no axis here")


def test_a_whole_tree_comes_to_the_host_at_once(on_eight):
    """One explicit transfer, and none besides; then it is lists with an entry for each device."""
    got, transfers = on_eight(jax_programs.collected)
    assert transfers == [3]  # arrays with dimensions, in one call
    assert got["pmap"]["x"] == got["sharded"] == list(range(8))
    assert [row.tolist() for row in got["pmap"]["row"]] == [[i, -i] for i in range(8)]
    assert (got["one"], got["text"]) == (1, "t")


# ---------------------------------------------------------------- processes


def test_two_processes_reduce_arrays_that_neither_holds_alone():
    """Both get the same numbers, eager, under jit and by collectives; what is their own stays so."""
    ranks = run_ranks(
        jax_programs.two_processes,
        2,
        backend=None,
        start_method="forkserver",
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
    )
    want = {"mean": 3.5, "sum": 28, "max": 7, "min": 0, "jit": 3.5}
    for rank, (devices, got) in enumerate(ranks):
        assert devices == 2
        for name, number in want.items():
            assert got[name]["x"] == got[name]["nested"]["i"] == number
        assert [got[name]["own"] for name in ("mean", "sum")] == [rank, 3 * rank]
        assert got["weighted"]["x"] == 5
        assert got["collective"]["x"] == pytest.approx((0 * 1 + 2 * 5 + 4 * 9 + 6 * 13) / 12)
        assert np.isnan(got["nan"]["x"])
        assert got["refused"] == (
            "'nested/i' is an array of int32 and shape (8,) of which this process holds a part "
            "only. Gather it first, with all_gather inside shard_map."
        )


# ---------------------------------------------------------------- outside of shard_map


@pytest.mark.parametrize("name", ["mean", "sum", "max", "min"])
def test_a_collective_outside_of_shard_map_says_what_to_use_instead(name):
    """Eagerly and under jit, where no axis has a name."""
    collective = jax_programs.COLLECTIVES[name]
    message = (
        rf"axis_name='batch' is no axis here: reduce_{name}_collective is called inside "
        rf"jax.shard_map or pmap, which name the axes. Outside of them, also under jit, use "
        rf"reduce_{name} on the whole arrays."
    )
    for call in (collective, jax.jit(collective)):
        with pytest.raises(OptionError, match=message):
            call({"x": np.ones(2)})


def test_the_other_collectives_say_what_to_use_instead():
    """A weighted mean of the whole, and lists on the host."""
    x = {"x": np.ones(2)}
    with pytest.raises(OptionError, match=r"under jit, use reduce_weighted_mean on the whole"):
        reduce_weighted_mean_collective(x, 1.0, "rows")
    with pytest.raises(
        OptionError, match=r"all_gather is .* Outside of them, use collect_from_dev"
    ):
        all_gather(x)


def test_collectives_work_under_vmap_with_a_named_axis():
    """There is an axis, if no device; and complex numbers have no largest there, either."""

    def over(function):
        return jax.vmap(function, axis_name="v")(jnp.arange(4))

    got = over(lambda x: reduce_mean_collective({"x": x, "text": "t"}, "v")["x"])
    assert got.tolist() == [1.5] * 4
    with pytest.raises(MetricError, match=r"'z' is .* complex64 .* complex numbers have no max"):
        over(lambda x: reduce_max_collective({"z": x * 1j}, "v"))


def test_weights_of_a_collective_fit_their_values():
    """As those of whole arrays do."""
    with pytest.raises(
        MetricError, match=r"weights of 'x' have the shape \(3,\), but it has the sh"
    ):
        jax.vmap(
            lambda x: reduce_weighted_mean_collective({"x": x}, jnp.ones(3), "v"), axis_name="v"
        )(jnp.ones((4, 2)))
