"""Whole arrays of JAX and numpy, reduced: what becomes a number, which number, and what stays."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import everyrank.jax
from everyrank.errors import MetricError, OptionError
from everyrank.jax import (
    collect_from_devices,
    reduce_custom,
    reduce_max,
    reduce_mean,
    reduce_min,
    reduce_sum,
    reduce_weighted_mean,
)

WAYS = {"mean": reduce_mean, "sum": reduce_sum, "max": reduce_max, "min": reduce_min}

#: Few shapes, since each is compiled; the values are what hypothesis varies.
SHAPES = st.sampled_from([(1,), (5,), (2, 3)])
DTYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "bool"]


class Point(NamedTuple):
    x: Any
    y: Any


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Draw an array of a dtype that JAX has too, NaN and infinities among its floats."""
    shape, dtype = draw(SHAPES), np.dtype(draw(st.sampled_from(DTYPES)))
    if dtype == np.bool_:
        values: st.SearchStrategy[Any] = st.booleans()
    elif dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        values = st.integers(int(bounds.min) // 8, int(bounds.max) // 8)
    else:
        values = st.floats(-100, 100, width=16) | st.sampled_from([np.nan, np.inf, -np.inf])
    size = int(np.prod(shape))
    flat = draw(st.lists(values, min_size=size, max_size=size))
    return np.array(flat).astype(dtype).reshape(shape)


def by_numpy(way: str, x: np.ndarray) -> tuple[float, np.dtype]:
    """Give the number that numpy has for the whole in 64 bits, and the dtype of a result."""
    integers = {"mean": "float32", "sum": "uint32" if x.dtype.kind == "u" else "int32"}
    dtype = integers.get(way, x.dtype) if x.dtype.kind in "iub" else x.dtype
    with np.errstate(all="ignore"):
        return float(getattr(x.astype(np.float64), way)()), np.dtype(dtype)


def close(got: Any, want: float, x: np.ndarray) -> bool:
    """Compare as closely as 32 bits allow on the way, and the result's dtype at its end."""
    inexact = jnp.issubdtype(got.dtype, jnp.inexact)
    rtol = 2 * float(jnp.finfo(got.dtype).eps) if inexact else 0
    wide = x.astype(np.float64)
    atol = 1e-6 * float(np.abs(wide, where=np.isfinite(wide), out=np.zeros_like(wide)).max())
    return bool(
        np.isclose(float(got), want, rtol=rtol, atol=atol if inexact else 0, equal_nan=True)
    )


@settings(max_examples=150, deadline=None)
@given(arrays())
def test_law_a_reduction_is_what_numpy_makes_of_the_whole(x: np.ndarray):
    """Eager and under jit, in every dtype, and NaN wherever numpy has one."""
    for name, way in WAYS.items():
        want, dtype = by_numpy(name, x)
        tree = {"x": jnp.asarray(x)}
        for got in (way(tree)["x"], JITTED[name](tree)["x"]):
            assert got.shape == ()
            assert got.dtype == dtype, (name, got.dtype)
            assert close(got, want, x), (name, got, want)


JITTED = {name: jax.jit(way) for name, way in WAYS.items()}


@settings(max_examples=150, deadline=None)
@given(arrays())
def test_law_arrays_of_numpy_keep_their_bits(x: np.ndarray):
    """They are reduced on the host, where 64 bits are no option, and to the same number."""
    for name, way in WAYS.items():
        want, dtype = by_numpy(name, x)
        if x.dtype.kind in "iub" and name in ("mean", "sum"):
            dtype = np.dtype(dtype.name.replace("32", "64"))
        got = way({"x": x})["x"]
        assert isinstance(got, np.generic)
        assert got.dtype == dtype
        assert close(got, want, x)


@settings(max_examples=100, deadline=None)
@given(arrays(), st.data())
def test_law_a_weighted_mean_is_numpys_average(x: np.ndarray, data: st.DataObject):
    """Of the elements that weigh anything: the others may be NaN."""
    numbers = st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])
    flat = data.draw(st.lists(numbers, min_size=x.size, max_size=x.size))
    weights = np.array(flat, np.float32).reshape(x.shape)
    wide, heavy = x.astype(np.float64), weights > 0
    with np.errstate(all="ignore"):
        want = np.average(wide[heavy], weights=weights[heavy]) if heavy.any() else np.nan
    for given_x in (x, jnp.asarray(x)):
        for given_weights in (weights, jnp.asarray(weights), {"x": weights}):
            got = reduce_weighted_mean({"x": given_x}, given_weights)["x"]
            assert close(got, want, x), (got, want)
    got = jax.jit(reduce_weighted_mean)({"x": jnp.asarray(x)}, weights)["x"]
    assert close(got, want, x)


# ---------------------------------------------------------------- what is reduced, and what stays


@pytest.mark.parametrize("way", [*WAYS.values(), lambda tree: reduce_weighted_mean(tree, 2.0)])
def test_what_is_no_array_with_dimensions_passes_through(way):
    """Numbers, texts, None, truth values, 0-d arrays and foreign objects come out as they went in."""
    others = {
        "float": 0.5,
        "int": 7,
        "bool": True,
        "complex": 1j,
        "text": "warmup",
        "bytes": b"raw",
        "none": None,
        "object": object(),
        "numpy": np.float64(2.0),
        "host": np.array(3),
        "word": np.array("words"),
        "device": jnp.float32(4.0),
        "key": jax.random.key(0),
    }
    got = way({**others, "x": jnp.ones(3)})
    assert got.pop("x").shape == ()
    assert got.keys() == others.keys()
    assert all(got[name] is value for name, value in others.items())


def test_trees_keep_their_structure():
    """Dicts in lists in tuples, named tuples and empty ones too; also a bare array is a tree."""
    x = jnp.arange(4.0)
    tree = {"a": [x, (x, "t")], "b": Point(x, {"c": None}), "d": {}}
    got = reduce_sum(tree)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert got == {"a": [6, (6, "t")], "b": Point(6, {"c": None}), "d": {}}
    assert reduce_sum(x) == 6
    assert reduce_sum({}) == {}
    assert reduce_mean({"text": "nothing to reduce"}) == {"text": "nothing to reduce"}


def test_values_and_names_are_no_reason_to_compile():
    """Other values, other names, other texts beside them: the program is the one that there is."""
    traced = []

    def hear(event, _seconds, **_):
        traced.append(event)

    def reduce(offset, names):
        return reduce_custom(
            {**{name: jnp.arange(7.0) + offset for name in names}, "lr": offset, "t": str(offset)},
            {names[0]: "max"},
        )

    reduce(0.5, "ab")
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        assert float(reduce(1.5, "ab")["a"]) == 7.5
        assert float(reduce(2.5, "cd")["c"]) == 8.5
        assert not [name for name in traced if "compile" in name or "trace" in name]
        reduce_mean({"a": jnp.arange(11.0)})
        assert [name for name in traced if "backend_compile" in name]
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


# ---------------------------------------------------------------- numbers


def test_integers_have_means_that_are_no_integers():
    """Neither rounded down nor overflown on the way."""
    assert reduce_mean({"i": jnp.array([1, 2])})["i"] == 1.5
    assert reduce_mean({"i": jnp.full(300, 127, jnp.int8)})["i"] == 127
    assert reduce_sum({"i": jnp.full(300, 127, jnp.int8)})["i"] == 300 * 127
    assert reduce_mean({"correct": jnp.array([True, True, False, False])})["correct"] == 0.5
    assert reduce_mean({"i": jnp.full(4, 2**30)})["i"] == 2**30


def test_narrow_floats_are_summed_up_in_32_bits():
    """In bfloat16 itself, a sum of ones ends at 256."""
    ones = jnp.ones(4096, jnp.bfloat16)
    assert reduce_sum({"x": ones})["x"] == 4096
    assert reduce_mean({"x": ones})["x"].dtype == jnp.bfloat16
    assert reduce_mean({"x": np.ones(4096, ml_dtypes.bfloat16)})["x"] == 1
    assert reduce_mean({"x": jnp.full(4, 60000.0, jnp.float16)})["x"] == 60000
    assert float(reduce_max({"x": jnp.array([1, 3], jnp.float8_e4m3fn)})["x"]) == 3


def test_with_64_bits_sums_of_integers_and_means_have_64():
    """As numpy's have."""
    with jax.enable_x64(True):
        x = jnp.array([2**40, 2**40 + 1])
        assert reduce_sum({"x": x})["x"].item() == 2**41 + 1
        assert reduce_mean({"x": x})["x"].dtype == jnp.float64
        assert reduce_max({"x": x})["x"].item() == 2**40 + 1
        assert reduce_sum({"x": x.astype(jnp.uint8)})["x"].dtype == jnp.uint64


def test_whole_numbers_of_numpy_are_never_cut():
    """JAX would take the lower half of them."""
    x = np.array([2**40, 2**40 + 2])
    assert reduce_mean({"x": x})["x"] == 2**40 + 1
    assert reduce_max({"x": x})["x"] == 2**40 + 2
    assert float(reduce_weighted_mean({"x": x}, jnp.ones(2))["x"]) == 2**40
    assert reduce_weighted_mean({"x": jnp.ones(2)}, x)["x"] == 1


def test_complex_numbers_have_means_and_sums():
    """And these keep their imaginary parts."""
    x = jnp.array([1 + 1j, 3 - 2j])
    assert reduce_mean({"x": x})["x"] == 2 - 0.5j
    assert reduce_sum({"x": x})["x"] == 4 - 1j
    assert reduce_weighted_mean({"x": x}, jnp.array([0, 2]))["x"] == 3 - 2j


@pytest.mark.parametrize("empty", [jnp.zeros((0, 3)), np.zeros(0)], ids=["jax", "numpy"])
def test_of_nothing_the_mean_is_nan_and_the_sum_zero(empty):
    """And nobody is warned."""
    assert np.isnan(reduce_mean({"x": empty})["x"])
    assert reduce_sum({"x": empty})["x"] == 0
    assert np.isnan(reduce_weighted_mean({"x": empty}, 1.0)["x"])


@pytest.mark.parametrize("way", [reduce_max, reduce_min])
@pytest.mark.parametrize("place", range(3))
def test_nan_is_the_largest_and_the_smallest(way, place):
    """Wherever it stands; infinities are numbers like others."""
    x = np.array([1.0, np.inf, -np.inf], np.float32)
    assert np.isinf(way({"x": jnp.asarray(x)})["x"])
    x[place] = np.nan
    assert np.isnan(way({"x": jnp.asarray(x)})["x"])
    assert np.isnan(way({"x": x})["x"])


def test_reductions_go_through_vmap_and_grad():
    """A tracer is an array like any other."""
    x = jnp.arange(6.0).reshape(2, 3)
    assert jax.vmap(reduce_mean)({"x": x})["x"].tolist() == [1.0, 4.0]
    assert jax.grad(lambda x: reduce_weighted_mean(x, x[0]))(x[0]).shape == (3,)


# ---------------------------------------------------------------- an operator for each


def test_an_operator_of_its_own_for_each_metric():
    """One without is reduced by its mean, one with None stays."""
    x = jnp.arange(4.0)
    operators = {"a": "max", "b": "min", "c": "sum", "d": None, "unused": "sum", "text": "max"}
    got = reduce_custom({**dict.fromkeys("abcde", x), "text": "t"}, operators)
    assert got["d"] is x
    assert {name: got[name] for name in "abce"} == {"a": 3, "b": 0, "c": 6, "e": 1.5}
    assert got["text"] == "t"


@pytest.mark.parametrize("nothing", [None, {}])
def test_without_operators_everything_is_reduced_by_its_mean(nothing):
    """As by reduce_mean."""
    assert reduce_custom({"a": jnp.arange(4.0), "b": {"c": jnp.ones(2)}}, nothing) == {
        "a": 1.5,
        "b": {"c": 1.0},
    }


def test_nested_metrics_are_named_by_their_path_or_by_what_they_lie_in():
    """The longest name counts."""
    x = jnp.arange(4.0)
    tree = {"train": {"loss": x, "acc": x, "all": [x, x]}, "eval": x}
    operators = {"train": "max", "train/acc": "min", "train/all/1": "sum"}
    got = reduce_custom(tree, operators)
    assert got == {"train": {"loss": 3, "acc": 0, "all": [3, 6]}, "eval": 1.5}


def test_an_operator_that_does_not_exist_is_refused():
    """With those that do, and the one that was perhaps meant; also if its metric is not there."""
    x = {"loss": jnp.ones(2)}
    with pytest.raises(
        OptionError,
        match=r"reduce_fn\['loss'\]='maxx' is no operator. Use one of 'mean', 'sum', 'max', 'min'; "
        "did you mean 'max'",
    ):
        reduce_custom(x, {"loss": "maxx"})
    with pytest.raises(
        OptionError, match=r"'harmonic' is no .* or None to leave the array as it is"
    ):
        reduce_custom(x, {"other": "harmonic"})
    with pytest.raises(OptionError, match=r"reduce_fn\['loss'\]=3 is no operator"):
        reduce_custom(x, {"loss": 3})  # type: ignore[dict-item]


def test_if_not_strict_an_unknown_operator_lets_its_metric_through():
    """With strict=False its metric comes back as it was, and the others are reduced."""
    x = jnp.arange(4.0)
    got = reduce_custom({"a": x, "b": x}, {"a": "median", "b": "max"}, strict=False)
    assert got["a"] is x
    assert got["b"] == 3


def test_operators_are_told_in_a_dict():
    """One for all of them is a function of its own."""
    with pytest.raises(OptionError, match=r"reduce_fn='max' must be a dict from names of metrics"):
        reduce_custom({"x": jnp.ones(2)}, "max")  # type: ignore[arg-type]


# ---------------------------------------------------------------- weights


def test_weights_may_be_one_for_all_or_a_tree():
    """An array, a number, or a tree of these, as deep as it needs to be."""
    x, w = jnp.array([1.0, 3.0]), jnp.array([3.0, 1.0])
    tree = {"a": x, "deep": {"b": x, "c": [x, "t"]}, "lr": 0.1}
    assert reduce_weighted_mean(tree, w)["deep"]["c"] == [1.5, "t"]
    got = reduce_weighted_mean(tree, {"a": 2, "deep": {"b": w, "c": [np.array([0, 1])]}})
    assert got == {"a": 2.0, "deep": {"b": 1.5, "c": [3.0, "t"]}, "lr": 0.1}
    assert reduce_weighted_mean(Point(x, 1), Point(w, None)) == Point(1.5, 1)
    assert reduce_weighted_mean({"a": x}, jnp.array([True, False])) == {"a": 1.0}
    assert reduce_weighted_mean({"a": x}, jnp.float32(0.1)) == {"a": 2.0}


def test_weights_of_a_dataclass_are_its_fields():
    """Where a tree has attributes, the weights are looked up by these."""

    @jax.tree_util.register_dataclass
    @__import__("dataclasses").dataclass
    class Metrics:
        loss: Any

    got = reduce_weighted_mean(Metrics(jnp.array([1.0, 3.0])), Metrics(jnp.array([1.0, 0.0])))
    assert got.loss == 1.0


@pytest.mark.parametrize("weights", [jnp.zeros(2), 0, {"x": 0.0}], ids=repr)
def test_if_nothing_weighs_anything_the_mean_is_nan(weights):
    """Also of integers."""
    assert np.isnan(reduce_weighted_mean({"x": jnp.array([1, 2])}, weights)["x"])


def test_a_nan_among_the_weights_is_not_swallowed():
    """Only values may be NaN unnoticed, where they weigh nothing."""
    weights = jnp.array([1.0, jnp.nan])
    assert np.isnan(reduce_weighted_mean({"x": jnp.ones(2)}, weights)["x"])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (jnp.ones(4), r"weights of 'a/b' have the shape \(4,\), but it has the shape \(2, 3\)"),
        (np.ones((3, 2)), r"one for each element: bring them to that shape first, for example"),
        (
            {"a": {"c": 1.0}},
            r"no weight for 'a/b'. `weights` must be an array, a number, or a tree",
        ),
        ({"a": [1.0]}, r"There is no weight for 'a/b'"),
        (
            {"a": {"b": "heavy"}},
            r"The weights of 'a/b' are 'heavy'. They must be an array or a num",
        ),
        (None, r"There is no weight for 'a/b'"),
        ({"a": {"b": {"c": 1}}}, r"The weights of 'a/b' are {'c': 1}"),
        (np.array(["heavy"]), r"weights of 'a/b' are a numpy.ndarray of <U5 .* real numbers"),
        (jnp.ones((2, 3)) * 1j, r"are an array of complex64 and shape \(2, 3\). They must be real"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    """The message names the metric, says what was given, and how to go on."""
    with pytest.raises(MetricError, match=message):
        reduce_weighted_mean({"a": {"b": jnp.ones((2, 3))}}, weights)


# ---------------------------------------------------------------- what cannot be reduced


class Foreign:
    """An array of a framework that is neither."""

    ndim = 1
    shape = (3,)
    dtype = "float7"


@pytest.mark.parametrize("way", [*WAYS.values(), collect_from_devices])
def test_arrays_that_hold_no_numbers_are_refused(way):
    """To let them through would look like having reduced them."""
    with pytest.raises(
        MetricError,
        match=r"'a/0' is an array of key<fry> and shape \(2,\), which holds no numbers. Leave it out",
    ):
        way({"a": [jax.random.split(jax.random.key(0))]})
    with pytest.raises(MetricError, match=r"'names' is a numpy.ndarray of <U1 and shape \(2,\)"):
        way({"names": np.array(["a", "b"])})
    with pytest.raises(MetricError, match=r"'metrics' is a numpy.ndarray of object"):
        way(np.array([None, 1]))


@pytest.mark.parametrize("way", WAYS.values())
def test_arrays_of_other_frameworks_are_refused(way):
    """And what would make them ours is said."""
    message = r"'x' is a test_jax_reduce.Foreign of float7 and shape \(3,\), and no array of JAX or"
    with pytest.raises(
        MetricError, match=message.replace("test_jax", ".*test_jax") + " numpy. Conv"
    ):
        way({"x": Foreign()})


@pytest.mark.parametrize("way", [reduce_max, reduce_min, jax.jit(reduce_max)])
def test_what_has_no_extreme_is_refused(way):
    """Nothing has none, and complex numbers have no order."""
    with pytest.raises(
        MetricError,
        match=r"'x' is .* of float32 and shape \(0,\), and of no elements there is no m",
    ):
        way({"x": jnp.zeros(0)})
    with pytest.raises(MetricError, match=r"complex numbers have no m.* for example their abs"):
        way({"z": jnp.ones(2) * 1j})
    assert way({"z": jnp.complex64(1j)})["z"] == 1j


def test_an_array_that_was_donated_is_named():
    """And where its values are now."""
    x = jnp.ones(3)
    x.delete()
    for reduce in (reduce_mean, collect_from_devices):
        with pytest.raises(
            MetricError, match=r"'a/x' was deleted, or donated to a jitted function"
        ):
            reduce({"a": {"x": x, "y": jnp.ones(2)}})


def test_errors_of_jax_that_are_not_ours_stay_what_they_are():
    """A tree that JAX cannot take apart is not renamed."""
    with pytest.raises(ValueError, match="Comparator raised"):
        reduce_mean({1: jnp.ones(2), "a": jnp.ones(2)})


# ---------------------------------------------------------------- to the host


def test_a_leading_axis_becomes_a_list_for_each_device():
    """Of numbers or arrays of numpy, in any dtype; what has no axis passes through."""
    rows = jnp.arange(6).reshape(3, 2)
    tree = {"x": jnp.array([0.5, 1.5]), "deep": [rows, np.arange(2)], "lr": 0.1, "s": "t"}
    got = collect_from_devices({**tree, "none": None, "number": jnp.float32(1)})
    assert got["x"] == [0.5, 1.5]
    assert [type(value) for value in got["x"]] == [np.float32] * 2
    assert [row.tolist() for row in got["deep"][0]] == [[0, 1], [2, 3], [4, 5]]
    assert got["deep"][1] == [0, 1]
    assert (got["lr"], got["s"], got["none"], got["number"]) == (0.1, "t", None, 1)
    assert collect_from_devices({"x": jnp.zeros((0, 2))}) == {"x": []}


def test_inside_a_jitted_function_there_is_nothing_to_collect():
    """The message says where to call it instead."""
    with pytest.raises(
        MetricError, match=r"'x' is a tracer: .* Return the array from the function"
    ):
        jax.jit(collect_from_devices)({"x": jnp.ones(2)})


# ---------------------------------------------------------------- the room


@pytest.mark.parametrize("name", everyrank.jax.__all__)
def test_every_exported_name_is_there_and_says_what_it_is(name):
    """From a home of its own, looked up when it is used."""
    assert getattr(everyrank.jax, name).__doc__
    assert name in dir(everyrank.jax)


def test_the_table_of_homes_is_the_list_of_names():
    """Nothing is exported twice or by accident; what is not there is an AttributeError."""
    assert sorted(everyrank.jax.__all__) == sorted(everyrank.jax._HOMES) == everyrank.jax.__all__
    with pytest.raises(
        AttributeError, match=r"module 'everyrank.jax' has no attribute 'reduce_al'"
    ):
        _ = everyrank.jax.reduce_al


def test_the_room_can_be_entered_without_jax():
    """It is imported when a name is used, and then it is the real one."""
    program = (
        "import sys, everyrank.jax\n"
        "assert 'jax' not in sys.modules\n"
        "everyrank.jax.reduce_mean\n"
        "assert hasattr(sys.modules['jax'], 'jit')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
