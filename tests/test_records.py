"""The border: what a record is, how batches are cut and joined, how a number is shown."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.records import STATISTIC, Batch, Record, merged, show

NUMBERS = st.floats(-8, 8, width=16)
TEXTS = st.one_of(st.text(max_size=2), st.none(), st.just(2**60 + 1))


def a_batch(steps: Any, *, kind: Any = "float", extras: Any = None, **values: Any) -> Batch:
    """Make a batch from one list of numbers per name."""
    return Batch(
        steps=np.array(steps, np.int64),
        times=np.arange(len(steps), dtype=float),
        names=tuple(values),
        numbers=np.array(list(values.values()), float).T.reshape(len(steps), len(values)),
        kinds=(kind,) * len(values),
        extras=extras or {},
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw some rows, often none, that look like one of very few others."""
    n = draw(st.integers(0, 4))
    names = draw(st.sampled_from([(), ("loss",), ("loss", "n")]))
    extras = st.dictionaries(
        st.integers(0, max(0, n - 1)), st.dictionaries(st.sampled_from("nt"), TEXTS), max_size=n
    )
    return Batch(
        steps=np.array(draw(st.lists(st.integers(-2, 9), min_size=n, max_size=n)), np.int64),
        times=np.array(draw(st.lists(NUMBERS, min_size=n, max_size=n)), float),
        names=names,
        numbers=np.array(
            draw(st.lists(NUMBERS, min_size=n * len(names), max_size=n * len(names))), float
        ).reshape(n, len(names)),
        kinds=tuple(draw(st.sampled_from(["float", "bool"])) for _ in names),
        extras=draw(extras) if n else {},
        generation=draw(st.integers(0, 1)),
        skip=draw(st.sampled_from([frozenset(), frozenset({"wandb"})])),
        own=draw(st.booleans()),
    )


def rows(*some: Batch) -> list[tuple[Any, ...]]:
    """Give all that the rows of batches say, as something that compares by value."""
    return [
        (r.step, r.time, list(r.values.items()), r.generation, r.skip, batch.own)
        for batch in some
        for r in batch
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(batches(), max_size=6))
def test_law_merged_batches_hold_the_same_rows(some: list[Batch]):
    """Joining neighbours that look alike changes no row, and leaves no two that look alike."""
    fewer = merged(iter(some))
    assert rows(*fewer) == rows(*some)
    looks = [(b.names, b.kinds, b.generation, b.skip, b.own) for b in fewer]
    assert all(a != b for a, b in pairwise(looks))


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(0, 4), st.integers(0, 6))
def test_law_a_part_holds_its_rows(batch: Batch, start: int, stop: int):
    """A part is what a slice of the list of rows would be, also where it reaches past the end."""
    assert rows(batch.part(start, max(start, stop))) == rows(batch)[start : max(start, stop)]
    assert list(batch[start:stop]) == list(batch)[start:stop]


def test_merged_takes_extras_along():
    """A text stays with its row when batches become one, and the parts of that one still know."""
    one = a_batch([0, 1], loss=[1.0, 2.0], extras={1: {"note": "a"}})
    two = a_batch([2, 3], loss=[3.0, 4.0], extras={0: {"note": "b"}, 1: {"loss": None}})
    (whole,) = merged([one, two])
    assert [dict(r.values) for r in whole] == [
        {"loss": 1.0},
        {"loss": 2.0, "note": "a"},
        {"loss": 3.0, "note": "b"},
        {"loss": None},
    ]
    assert dict(whole.part(2, 3)[0].values) == {"loss": 3.0, "note": "b"}


def test_merged_copies_nothing_where_there_is_nothing_to_join():
    """Batches that differ come back as they are."""
    some = [a_batch([0], loss=[1.0]), a_batch([1], accuracy=[0.5]), a_batch([2], loss=[1.0])]
    assert [a is b for a, b in zip(merged(some), some, strict=True)] == [True] * 3
    assert merged([]) == []


def test_a_batch_reads_as_its_records():
    """A batch is a sequence of records: it has a length, an order, and places to look at."""
    batch = a_batch([3, 5, 7], loss=[1.0, 0.5, 0.25])
    assert len(batch) == 3
    assert [record.step for record in batch] == [3, 5, 7]
    assert batch[0] == Record(3, 0.0, {"loss": 1.0})
    assert batch[-1].values["loss"] == 0.25
    assert batch.index(batch[1]) == 1
    with pytest.raises(IndexError):
        batch[3]


def test_the_values_of_a_record_cannot_be_changed():
    """A record is shared by columns and backends, and none of them can write into it."""
    record = a_batch([0], loss=[1.0])[0]
    with pytest.raises(TypeError):
        record.values["loss"] = 2.0


def test_numbers_come_back_as_what_they_were():
    """Ints are ints, bools are bools, and neither is a number of numpy's."""
    for kind, expected in (("int", 3), ("bool", True), ("float", 3.0)):
        (value,) = a_batch([0], kind=kind, x=[3.0])[0].values.values()
        assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize("huge", [10**400, -(10**400), 2**63, 2**53 + 1])
def test_an_int_that_no_float_holds_comes_back_exactly(huge: int):
    """What stands in the matrix may be infinite then, and reading it warns of nothing."""
    try:
        near = float(huge)
    except OverflowError:
        near = math.inf
    batch = a_batch([0, 1], kind="int", n=[near, 7.0], extras={0: {"n": huge}})
    assert [record.values["n"] for record in batch] == [huge, 7]


def test_a_step_may_hold_texts_alone():
    """Without a single number there are still rows."""
    batch = a_batch([4, 5], extras={1: {"note": "hm"}})
    assert [dict(r.values) for r in batch] == [{}, {"note": "hm"}]


def test_floats_are_shown_with_exactly_so_many_decimals():
    """Precision counts decimals, a declared format wins, and what is no float is left alone."""
    assert show(0.5) == "0.500000"
    assert show(1e-9, precision=2) == "0.00"
    assert show(1234.5, format=".3e") == "1.234e+03"
    assert show(float("nan")) == "nan"
    assert [show(v, precision=1) for v in (3, True, None, "hm")] == ["3", "True", "None", "hm"]


def test_an_array_is_shown_on_one_line():
    """A matrix has its place in the line of its step, and a long vector is cut short."""
    assert show(np.array([[0.5, 1.0], [2.0, 3.0]]), precision=1) == "[[0.5 1. ] [2. 3. ]]"
    assert show(np.arange(9.0)) == "[0. 1. 2. ... 6. 7. 8.]"


def test_names_that_statistics_own_are_known_by_their_end():
    """The statistics over ranks, and no metric that merely sounds like one, end a name."""
    for end in ("mean", "max", "min", "std", "ranks", "nonfinite", "max_rank", "p5", "p99.9"):
        assert STATISTIC.search(f"a/loss/{end}")
    for name in ("mean", "loss_mean", "loss/meanest", "loss/p100", "loss/mean/x"):
        assert not STATISTIC.search(name)
