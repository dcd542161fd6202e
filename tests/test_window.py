"""The window: what is taken, how it comes out, and what is refused."""

from __future__ import annotations

import enum
import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError
from everyrank.intake import Intake
from everyrank.records import Batch, Record
from everyrank.window import Window, check_name, flatten, learn, pack, values_of


def batches(*updates: dict[str, Any], sync_every: int | None = None) -> list[Batch]:
    """Hand over some updates, and give the batches of all windows."""
    windows: list[Window] = []
    intake = Intake(
        windows.append, sync_every=sync_every or len(updates), went_back=lambda last, step: 0
    )
    for update in updates:
        intake.add(update)
    intake.hand_over()
    return [batch for window in windows for batch in pack(window.rows)]


def records(*updates: dict[str, Any], sync_every: int | None = None) -> list[Record]:
    """Hand over some updates, and give the records that come out."""
    return [record for batch in batches(*updates, sync_every=sync_every) for record in batch]


def through(value: Any) -> Any:
    """Hand over one value, and give what comes out."""
    ((record,),) = batches({"x": value})
    return record.values["x"]


def same(left: Any, right: Any) -> bool:
    """Say whether two values are of one type and equal; a NaN equals a NaN."""
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and np.array_equal(
            left, right, equal_nan=True
        )
    return type(left) is type(right) and (left == right or left != left)


class Color(enum.IntEnum):
    RED = 3


class Key(enum.StrEnum):
    LOSS = "loss"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((True, True), (np.bool_(False), False)),
        *((0, 0), (-7, -7), (Color.RED, 3)),
        *((t(7), 7) for t in (np.int8, np.int16, np.int32, np.int64)),
        *((t(7), 7) for t in (np.uint8, np.uint16, np.uint32, np.uint64)),
        *((n, n) for n in (2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1)),
        *((n, n) for n in (2**63 - 1, 2**63, -(2**63), 2**64 + 1, -(3**50), 10**400)),
        (np.uint64(2**64 - 1), 2**64 - 1),
        *((2.5, 2.5), (-0.0, -0.0), (math.inf, math.inf), (-math.inf, -math.inf)),
        *((t(2.5), 2.5) for t in (np.float16, np.float32, np.float64, np.longdouble)),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.longdouble("1e4000"), math.inf),
        *((math.nan, math.nan), (np.float16("nan"), math.nan)),
        *((Decimal("0.1"), 0.1), (Decimal("1e400"), math.inf), (Decimal("NaN"), math.nan)),
        *((Fraction(1, 3), 1 / 3), (Fraction(-(10**400)), -math.inf)),
        *((None, None), ("warm", "warm"), ("", ""), (np.str_("warm"), "warm")),
    ],
    ids=lambda value: f"{type(value).__name__}-{str(value)[:24]}",
)
def test_a_value_comes_out_as_what_it_was(value: Any, expected: Any):
    """Ints stay ints, however large; bools, texts and None stay what they are; the rest is float."""
    assert through(value) == expected or same(through(value), expected)
    assert isinstance(through(value), type(expected))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_low_floats_of_numpy_are_floats(name: str):
    """What numpy holds as opaque types is a number all the same, alone and in arrays."""
    low = getattr(pytest.importorskip("ml_dtypes"), name)
    assert same(through(low(1.5)), 1.5)
    assert same(through(np.array([1.5], low)), 1.5)
    assert same(through(np.array([1.5, 2.0], low)), np.array([1.5, 2.0]))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.array([True, False]),
        np.array([[1.0, math.nan], [math.inf, -0.0]], np.float16),
        np.array([2**64 - 1, 0], np.uint64),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.zeros((0, 4)),
        np.zeros(65_536, np.int8),
    ],
    ids=lambda value: f"{value.dtype}-{value.shape}",
)
def test_an_array_comes_out_as_it_was(value: np.ndarray):
    """Small arrays of numbers keep shape, dtype and values."""
    assert same(through(value), value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], np.array([1, 2])),
        ((0.5, 1), np.array([0.5, 1.0])),
        ([[True], [False]], np.array([[True], [False]])),
        ([np.float32(1.5), np.float32(2.5)], np.array([1.5, 2.5], np.float32)),
        ([], np.array([])),
        (np.array([], object), np.array([])),
        (np.array(2), 2),
        (np.array([[2.5]]), 2.5),
        ([True], True),
        ([[7]], 7),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
def test_sequences_are_arrays_and_one_element_is_a_number(value: Any, expected: Any):
    """A list is an array, and an array with one element is that element."""
    assert same(through(value), expected)


def test_arrays_and_lists_are_copied_when_handed_over():
    """What is done to an array or a list after the call changes nothing."""
    vector, scalar, plain, nested = np.ones(3), np.array(1.0), [1, 2], [[1.0], [2.0]]
    windows: list[Window] = []
    intake = Intake(windows.append, sync_every=1, went_back=lambda last, step: 0)
    intake.add({"v": vector, "s": scalar, "p": plain, "n": nested})
    vector[:], scalar[...], nested[0][0] = 9, 9, 9
    plain.clear()
    ((record,),) = pack(windows[0].rows)
    assert {name: np.array(value).tolist() for name, value in record.values.items()} == {
        "v": [1, 1, 1],
        "s": 1,
        "p": [1, 2],
        "n": [[1], [2]],
    }


NAMES = st.sampled_from(["loss", "lr", "tokens", "v", "note"])
VALUES = st.one_of(
    st.booleans(),
    st.integers(-9, 9),
    st.integers(2**52, 2**66),
    st.floats(),
    st.none(),
    st.text(max_size=2),
    st.lists(st.floats(-2, 2), max_size=3).map(np.array),
    st.integers(-3, 3).map(np.int16),
    st.floats(width=32).map(np.float32),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), max_size=8), st.integers(1, 8))
def test_law_nothing_is_lost_or_changed(updates: list[dict[str, Any]], sync_every: int):
    """Whatever is handed over comes out at its step, however updates are split into windows."""
    numbered = [{**update, "step": i} for i, update in enumerate(updates)]
    out = records(*numbered, sync_every=sync_every)
    assert [record.step for record in out] == list(range(len(updates)))
    for update, record in zip(updates, out, strict=True):
        assert set(record.values) == set(update)
        for name, value in update.items():
            if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
                value = value.item()
            assert same(record.values[name], value)


def test_names_come_in_the_order_in_which_they_were_handed_over():
    """Numbers of the host, arrays of one element and odd numbers keep their places."""
    update = {"z": 1.0, "b": np.array([2.0]), "step": 4, "y": Fraction(1, 2), "a": True}
    (record,) = records(update)
    assert list(record.values) == ["z", "b", "y", "a"]


def test_nested_dicts_are_joined_with_slashes():
    """A dict in the dict gives its keys a first name, as deep as it goes."""
    update = {"loss": 1.0, "eval": {"loss": 2.0, "top": {"1": 0.5}}, "none": {}}
    (record,) = records(update, sync_every=1)
    assert dict(record.values) == {"loss": 1.0, "eval/loss": 2.0, "eval/top/1": 0.5}


def test_names_are_plain_texts():
    """The member of an enum, or a text of numpy, is kept as the text that it is."""
    assert [type(name) for name in learn({Key.LOSS: 1.0, np.str_("lr"): 2.0}).names] == [str, str]
    assert records({Key.LOSS: 1.0})[0].values == {"loss": 1.0}


def test_an_update_may_be_empty():
    """A step without any value is a step."""
    assert [(r.step, dict(r.values)) for r in records({}, {"step": 3})] == [(0, {}), (3, {})]


def test_rows_that_look_alike_are_one_batch():
    """Neighbours with the same names and types are one matrix; others are batches of their own."""
    loss, both = {"loss": 1.0}, {"loss": 1.0, "n": 3}
    packed = batches(loss, loss, both, both, both, loss)
    assert [len(batch) for batch in packed] == [2, 3, 1]
    assert packed[1].kinds == ("float", "int")
    assert packed[1].numbers.tolist() == [[1.0, 3.0]] * 3


def test_an_array_may_be_a_number_for_a_while():
    """A list of one element is a number, so that its rows lie apart from those of longer ones."""
    updates = [{"v": list(range(n)), "loss": 1.0} for n in (1, 1, 2, 3, 1)]
    packed = batches(*updates)
    assert [len(batch) for batch in packed] == [2, 2, 1]
    assert [batch.names for batch in packed] == [("v", "loss"), ("loss",), ("v", "loss")]
    assert packed[1].extras[1]["v"].tolist() == [0, 1, 2]


def test_a_number_in_a_list_may_change_its_kind():
    """An int in one step and a float in the next are each what they were."""
    values = [record.values["v"] for record in records({"v": [1]}, {"v": [0.5]}, {"v": [2]})]
    assert [(type(value), value) for value in values] == [(int, 1), (float, 0.5), (int, 2)]


def test_an_int_past_all_floats_leaves_its_neighbours_alone():
    """Only the value that no float64 holds is infinite in the matrix, and exact beside it."""
    (batch,) = batches({"n": 10**400, "x": 0.5}, {"n": 3, "x": 1.5})
    assert batch.numbers.tolist() == [[math.inf, 0.5], [3, 1.5]]
    assert batch.extras == {0: {"n": 10**400}}


def test_the_step_is_no_value():
    """A step among the metrics is left out of the numbers, also where texts are."""
    for extra in ({}, {"note": "hm"}):
        (record,) = records({"loss": 0.5, "step": np.int64(7), **extra})
        assert (record.step, dict(record.values)) == (7, {"loss": 0.5, **extra})


def test_a_row_can_be_read_while_its_window_is_open():
    """The values of a row are those that its record will have."""
    intake = Intake(lambda window: None, sync_every=9, went_back=lambda last, step: 0)
    row = intake.add({"loss": 0.5, "v": [1, 2], "note": None, "n": 2**60})
    values = values_of(row)
    assert values.pop("v").tolist() == [1, 2]
    assert values == {"loss": 0.5, "note": None, "n": 2**60}


def test_a_window_of_the_host_is_ready_at_once():
    """Without device values there is nothing to wait for, and the next window is of the same run."""
    window = Window(4)
    window.generation = 2
    assert window.seal().generation == 2
    assert window.ready()


class Opaque:
    def __repr__(self) -> str:
        return "Opaque(" + "x" * 999 + ")"


@pytest.mark.parametrize(
    "value",
    [
        *(object(), Opaque(), b"raw", {1, 2}, range(3), 1j, np.complex64(1j), lambda: 1),
        *(np.datetime64("2024-01-01"), np.timedelta64(1, "s"), np.void(b"ab"), Decimal("sNaN")),
        *(np.array([1j]), np.array(["a"]), np.array([object()]), np.array(["2024"], "M8[Y]")),
        *(["a"], [1.0, None], [[1], [1, 2]], [2**70], [{}]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_metric_is_named(value: Any):
    """What is neither number, array nor text is refused with key, value, type and a way out."""
    kind = re.escape(type(value).__name__)
    what = "neither a number, nor an array of numbers, nor a text"
    pattern = rf"^'x' is .* \(of type {kind}\): {what}\. Hand"
    with pytest.raises(MetricError, match=pattern) as caught:
        records({"ok": 1.0, "x": value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [np.zeros((256, 257)), [0.0] * 65_537], ids=["array", "list"])
def test_what_is_too_large_is_data(value: Any):
    """An array with more elements than a metric has is refused with its shape and a way out."""
    shape = re.escape(str(np.shape(value)))
    with pytest.raises(MetricError, match=rf"'x' is an array of shape {shape}.*x\.mean\(\)"):
        records({"x": value})


@pytest.mark.parametrize("key", [3, None, ("a", "b"), b"loss"], ids=repr)
def test_a_key_is_a_text(key: Any):
    """A key of another type is refused, also in a dict in the dict, and shown as a text."""
    pattern = re.escape(
        f"the key {key!r} is of type {type(key).__name__}, but names are text: use "
    )
    for update in ({key: 1.0}, {"a": {key: 1.0}}):
        with pytest.raises(MetricError, match=pattern):
            records(update)


def test_a_key_is_not_empty():
    """An empty key is refused."""
    with pytest.raises(MetricError, match="a key is empty: every metric needs a name"):
        records({"": 1.0})


@pytest.mark.parametrize("key", ["time", "generation", "nonfinite"])
def test_the_columns_of_every_record_are_no_metrics(key: str):
    """A name that every record has already is refused, with another one."""
    with pytest.raises(MetricError, match=rf"'{key}' is a column of every record.*'my_{key}'"):
        records({key: 1.0})


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        *((f"loss/{s}", f"loss_{s}") for s in ("mean", "max", "min", "std", "ranks", "nonfinite")),
        *((f"loss/{s}", f"loss_{s}") for s in ("max_rank", "min_rank", "p50", "p99.9")),
        *(("a/mean/b/mean", "a/mean/b_mean"), ("/mean", "_mean")),
    ],
)
def test_the_names_of_statistics_are_kept(key: str, instead: str):
    """A name that a statistic over ranks would have is refused, with another one."""
    pattern = rf"'{re.escape(key)}' ends in '/.*kept for statistics.*for example '{instead}'"
    with pytest.raises(MetricError, match=pattern):
        check_name(key)


def test_names_like_those_of_statistics_are_free():
    """What only resembles a reserved name is a name."""
    for name in ("mean", "loss_mean", "loss/means", "mean/loss", "p50", "loss/p1000", "Time"):
        check_name(name)


@pytest.mark.parametrize(
    "update",
    [{"a/b": 1, "a": {"b": 2}}, {"a": {"b": 1}, "a/b": 2}, {"a": {"b": {}, "b/c": 1}, "a/b/c": 2}],
)
def test_a_name_comes_once(update: dict[str, Any]):
    """Two values of one name, whichever way it is written, are refused, and none is lost."""
    with pytest.raises(MetricError, match=r"the key 'a/b(/c)?' comes twice.*Rename one of the two"):
        records(update)


def test_flat_dicts_stay_as_they_are():
    """Flattening what is flat changes neither names nor their order."""
    assert list(flatten({"b": 1, "a": 2}).items()) == [("b", 1), ("a", 2)]


def test_a_window_knows_how_many_numbers_it_holds():
    """Vectors of the host and of a device count by their elements, so that the queue is bounded."""
    torch = pytest.importorskip("torch")
    intake = Intake(lambda window: None, sync_every=9, went_back=lambda a, b: 0)
    assert intake._window.size == 0
    intake.add({"a": 1.0, "b": 2})
    assert intake._window.size == 2
    intake.add({"v": np.zeros(1000), "t": torch.zeros(500), "x": torch.tensor(1.0)})
    assert intake._window.size == 2 * (3 + 1000 + 501)


def test_what_is_masked_is_nan():
    """A masked number is not the number that lies under the mask."""
    row = learn_and_read({"a": np.ma.masked, "b": np.ma.array([1, 2], mask=[False, True])})
    assert math.isnan(row["a"])
    assert row["b"][0] == 1.0
    assert math.isnan(row["b"][1])


def learn_and_read(metrics: dict[str, Any]) -> dict[str, Any]:
    """Give what a record has of one update."""
    windows: list[Window] = []
    intake = Intake(windows.append, sync_every=1, went_back=lambda a, b: 0)
    intake.add(metrics)
    (batch,) = pack(windows[0].rows)
    return dict(next(iter(batch)).values)
