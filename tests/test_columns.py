"""The columns: what is live, what comes out, and what it costs to keep it."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.columns import Columns
from everyrank.records import Batch, Record
from everyrank.series import Series


def a_batch(
    steps: Any, *, generation: int = 0, extras: Any = None, time: float = 0.0, **values: Any
) -> Batch:
    """Make a batch from one list of plain values per name."""
    kinds = {bool: "bool", int: "int", float: "float"}
    return Batch(
        steps=np.array(steps, np.int64),
        times=time + np.arange(len(steps), dtype=float),
        names=tuple(values),
        numbers=np.array(list(values.values()), float).T.reshape(len(steps), len(values)),
        kinds=tuple(kinds[type(column[0])] for column in values.values()),  # type: ignore[misc]
        extras=extras or {},
        generation=generation,
    )


def filled(*batches: Batch) -> Columns:
    """Make columns of some batches."""
    columns = Columns()
    for batch in batches:
        columns.append(batch)
    return columns


class Model:
    """The same promises, kept the slow way: a list of all that happened."""

    def __init__(self) -> None:
        self.rows: list[Record] = []
        self.rewinds: list[tuple[int, int]] = []

    def append(self, batch: Batch) -> None:
        self.rows.extend(batch)

    def rewind(self, after_step: int) -> None:
        self.rewinds.append((len(self.rows), after_step))

    def live(self, name: str) -> list[Record]:
        """Give the rows that hold a live value of the name."""
        mine = [(i, row) for i, row in enumerate(self.rows) if name in row.values]
        return [
            row
            for i, row in mine
            if not any(j > i and later.step <= row.step for j, later in mine)
            and not any(at > i and after < row.step for at, after in self.rewinds)
        ]

    def records(self) -> list[Record]:
        """Give the merged record of each live step."""
        names = dict.fromkeys(name for row in self.rows for name in row.values)
        live = {name: self.live(name) for name in names}
        by_step: dict[int, list[Record]] = {}
        for row in self.rows:
            if any(row is other for rows in live.values() for other in rows):
                by_step.setdefault(row.step, []).append(row)
        return [
            Record(
                step,
                rows[-1].time,
                {
                    name: row.values[name]
                    for name in names
                    for row in live[name]
                    if row.step == step
                },
                max(row.generation for row in rows),
            )
            for step, rows in sorted(by_step.items())
        ]


TEXTS = st.one_of(st.text(max_size=2), st.none(), st.just(2**60 + 1))
NUMBERS = st.floats(-8, 8, width=16)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw some rows with steps in any order, any names, and some texts among the numbers."""
    names = tuple(draw(st.permutations("abcd")))[: draw(st.integers(0, 4))]
    steps = draw(st.lists(st.integers(-2, 12), min_size=1, max_size=6))
    numbers = draw(
        st.lists(NUMBERS, min_size=len(steps) * len(names), max_size=len(steps) * len(names))
    )
    extras = draw(
        st.dictionaries(
            st.integers(0, len(steps) - 1),
            st.dictionaries(st.sampled_from("abcde"), TEXTS, min_size=1, max_size=2),
            max_size=2,
        )
    )
    return Batch(
        steps=np.array(steps, np.int64),
        times=np.array(draw(st.lists(NUMBERS, min_size=len(steps), max_size=len(steps)))),
        names=names,
        numbers=np.array(numbers, float).reshape(len(steps), len(names)),
        kinds=("float",) * len(names),
        extras=extras,
        generation=draw(st.integers(0, 3)),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(batches(), st.integers(-3, 13)), max_size=8))
def test_law_equals_the_model(events: list[Batch | int]):
    """Whatever is appended and rewound, the columns say what a plain list of rows would say."""
    columns, model = Columns(), Model()
    for event in events:
        if isinstance(event, int):
            columns.rewind(event)
            model.rewind(event)
        else:
            columns.append(event)
            model.append(event)
    expected = model.records()
    assert [as_plain(r) for r in columns.records()] == [as_plain(r) for r in expected]
    assert columns.steps.tolist() == [record.step for record in expected]
    assert len(columns) == len(expected)
    latest = columns.latest()
    assert (latest and as_plain(latest)) == (as_plain(expected[-1]) if expected else None)
    for name in columns.names:
        live = model.live(name)
        assert columns.series(name).steps.tolist() == [row.step for row in live]
        assert list(columns.series(name)) == [row.values[name] for row in live]
        steps, values, generations = columns.all_rows(name)
        every = [row for row in model.rows if name in row.values]
        assert steps.tolist() == [row.step for row in every]
        assert list(values) == [row.values[name] for row in every]
        assert generations.tolist() == [row.generation for row in every]
    for name, series in columns.all_series().items():
        assert repr(series) == repr(columns.series(name))


def as_plain(record: Record) -> tuple[Any, ...]:
    """Give a record as something that compares by value."""
    return record.step, record.time, dict(record.values), record.generation


def test_a_series_reads_like_an_array():
    """One indexes, iterates, averages and plots a series as if it were the array of its values."""
    loss = filled(a_batch([0, 5, 9], loss=[4.0, 2.0, 0.0])).series("loss")
    assert (loss.name, len(loss), loss[-1], loss[:2].tolist()) == ("loss", 3, 0.0, [4.0, 2.0])
    assert list(loss) == [4.0, 2.0, 0.0]
    assert np.mean(loss) == 2.0
    assert np.array_equal(loss, [4.0, 2.0, 0.0])
    assert (loss == [4.0, 2.0, 1.0]).tolist() == [True, True, False]
    assert (loss == loss).all()
    assert loss.steps.tolist() == [0, 5, 9]


def test_a_series_as_an_array_follows_numpy():
    """As numpy asks, dtype and copy are honoured, and no copy is made unless one is needed."""
    loss = filled(a_batch([0], loss=[4.0])).series("loss")
    assert np.asarray(loss) is loss.values
    assert np.asarray(loss, np.float32).dtype == np.float32
    assert not np.shares_memory(np.array(loss, copy=True), loss.values)


def test_iterating_gives_plain_numbers():
    """A list of a series is Python's own numbers, which JSON can write."""
    series = filled(a_batch([0], n=[3], ok=[True])).all_series()
    assert json.dumps({name: list(each) for name, each in series.items()}) == (
        '{"n": [3], "ok": [true]}'
    )


def test_a_series_says_what_it_is():
    """The repr of a series names the metric, its length, its steps and its last value."""
    columns = filled(a_batch([0, 7], loss=[1.0, 0.5]))
    columns.declare("later")
    assert repr(columns.series("loss")) == (
        "Series(loss: 2 values of float64, steps 0 to 7, last 0.500000)"
    )
    assert repr(columns.series("later")) == "Series(later: no values yet)"


def test_a_shared_step_axis_cannot_be_written():
    """Series that share an axis of steps are safe from one another."""
    loss = filled(a_batch([0], loss=[1.0])).series("loss")
    with pytest.raises(ValueError, match="read-only"):
        loss.steps[0] = 3


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1, 2], np.int64), ([True, False], np.bool_), ([1.0, 2.0], np.float64)],
)
def test_a_column_keeps_its_kind(values: list[Any], dtype: type):
    """What was ints all along is int64, what was bools is bool."""
    assert filled(a_batch([0, 1], x=values)).series("x").values.dtype == dtype


@pytest.mark.parametrize("other", ["same names", "other names"])
def test_mixed_kinds_are_floats(other: str):
    """A name that was an int once and a float later reads as floats."""
    more = {} if other == "same names" else {"y": [1]}
    columns = filled(a_batch([0], x=[1]), a_batch([1], x=[0.5], **more))
    assert columns.series("x").values.dtype == np.float64
    assert list(columns.series("x")) == [1.0, 0.5]


def test_extras_make_an_object_array():
    """With a text or an array among them, the values are the objects that were recorded."""
    vector = np.arange(3)
    columns = filled(
        a_batch([0, 1, 2, 3], n=[1, 2, 3, 4], extras={1: {"n": 2**60}, 2: {"n": None}})
    )
    columns.append(a_batch([4], extras={0: {"n": vector}}))
    assert list(columns.series("n"))[:4] == [1, 2**60, None, 4]
    assert type(columns.series("n")[0]) is int
    assert columns.series("n")[-1] is vector


def test_extras_over_nan_are_no_ints():
    """The place of a text in a column of ints may hold NaN, and reading it warns of nothing."""
    batch = a_batch([0, 1], n=[1, 2], extras={1: {"n": "many"}})
    batch.numbers[1] = np.nan
    assert list(filled(batch).series("n")) == [1, "many"]


def test_superseded_texts_do_not_make_objects():
    """A text that was superseded no longer decides the dtype."""
    columns = filled(a_batch([0, 1], n=[1, 2], extras={1: {"n": None}}), a_batch([1], n=[3]))
    assert columns.series("n").values.dtype == np.int64


def test_a_name_may_have_texts_alone():
    """A name that comes only in the extras is a name like any other."""
    columns = filled(a_batch([0, 1], loss=[1.0, 0.5], extras={1: {"note": "hm"}}))
    assert columns.names == ("loss", "note")
    assert columns.series("note").steps.tolist() == [1]
    assert [dict(r.values) for r in columns.records()] == [
        {"loss": 1.0},
        {"loss": 0.5, "note": "hm"},
    ]


def test_names_of_several_tables_merge_in_order_of_arrival():
    """A name that comes with different companions is still one series."""
    columns = filled(
        a_batch([0, 2], loss=[1.0, 0.8]),
        a_batch([3], loss=[0.7], accuracy=[0.1]),
        a_batch([4], loss=[0.6]),
    )
    assert columns.series("loss").steps.tolist() == [0, 2, 3, 4]
    assert list(columns.series("loss")) == [1.0, 0.8, 0.7, 0.6]
    assert columns.steps.tolist() == [0, 2, 3, 4]


def test_going_back_supersedes_only_the_names_that_go_back():
    """A run that repeats its last steps replaces what it repeats, and keeps the old rows aside."""
    columns = filled(
        a_batch([0, 1, 2, 3], loss=[4.0, 3.0, 2.0, 1.0]),
        a_batch([3], accuracy=[0.5]),
        a_batch([2], loss=[1.5], generation=1, time=9.0),
    )
    assert list(columns.series("loss")) == [4.0, 3.0, 1.5]
    assert list(columns.series("accuracy")) == [0.5]
    assert columns.steps.tolist() == [0, 1, 2, 3]
    steps, values, generations = columns.all_rows("loss")
    assert steps.tolist() == [0, 1, 2, 3, 2]
    assert values.tolist() == [4.0, 3.0, 2.0, 1.0, 1.5]
    assert generations.tolist() == [0, 0, 0, 0, 1]


def test_a_rewind_supersedes_every_name():
    """After a rewind to a checkpoint no name has a value above it, until new ones come."""
    columns = filled(a_batch([0, 1, 2], loss=[3.0, 2.0, 1.0]), a_batch([2], accuracy=[0.5]))
    columns.rewind(1)
    assert columns.steps.tolist() == [0, 1]
    assert len(columns.series("accuracy")) == 0
    columns.append(a_batch([2], loss=[9.0], generation=1))
    assert columns.latest() == Record(2, 0.0, {"loss": 9.0}, 1)


def test_a_merged_record_has_the_latest_time_and_generation():
    """Rows of one step become one record, in which later values win."""
    columns = filled(
        a_batch([5], time=1.0, loss=[1.0], lr=[0.1]),
        a_batch([5], time=2.0, loss=[0.5], generation=2),
    )
    (record,) = columns.records()
    assert record == Record(5, 2.0, {"loss": 0.5, "lr": 0.1}, 2)
    with pytest.raises(TypeError):
        record.values["loss"] = 0  # type: ignore[index]


def test_records_are_of_the_moment_of_the_call():
    """What is appended while records are read is not among them."""
    columns = filled(a_batch([0], loss=[1.0]))
    records = columns.records()
    columns.append(a_batch([1], loss=[0.5]))
    assert [record.step for record in records] == [0]


def test_an_unknown_name_is_a_key_error_with_a_suggestion():
    """Who mistypes a name is told which one may be meant, or which there are."""
    columns = Columns()
    with pytest.raises(KeyError, match="nothing was recorded"):
        columns.series("loss")
    columns.append(a_batch([0], loss=[1.0]))
    with pytest.raises(KeyError, match=r"'los'.*Did you mean 'loss'"):
        columns.series("los")
    with pytest.raises(KeyError, match="There are 'loss'"):
        columns.all_rows("throughput")


def test_a_declared_name_is_empty_until_it_has_a_value():
    """A declared name can be read before its first value, but is not among the names."""
    columns = Columns()
    columns.declare("loss")
    assert (len(columns.series("loss")), columns.names, len(columns)) == (0, (), 0)
    assert [len(part) for part in columns.all_rows("loss")] == [0, 0, 0]
    columns.append(a_batch([0], loss=[1.0]))
    assert list(columns.series("loss")) == [1.0]


def test_empty_columns_answer():
    """Before the first row, everything is empty and nothing fails."""
    columns = filled(a_batch([]))
    assert (len(columns), columns.names, columns.steps.tolist()) == (0, (), [])
    assert (list(columns.records()), columns.latest(), columns.nbytes) == ([], None, 0)


def test_the_extreme_steps_are_steps_too():
    """The lowest and the highest step of an int64 are live like others."""
    low, high = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    columns = filled(a_batch([low, high], loss=[1.0, 2.0]))
    assert columns.steps.tolist() == [low, high]
    assert [record.step for record in columns.records()] == [low, high]


def test_a_million_steps_of_twenty_numbers_fit_in_190_mb():
    """Twenty metrics cost a tenth more than their float64, however long the run is."""
    columns = Columns()
    names = tuple(f"metric_{i}" for i in range(20))
    steps = 100_000
    for start in range(0, steps, 50):
        columns.append(
            Batch(
                steps=np.arange(start, start + 50),
                times=np.zeros(50),
                names=names,
                numbers=np.full((50, 20), float(start)),
                kinds=("float",) * 20,
            )
        )
    # Only the last chunk has room left, and it does not grow with the run.
    row = 20 * 8 + 28
    assert columns.nbytes <= (steps + 4096) * row
    assert (1_000_000 + 4096) * row <= 190e6
    assert columns.series("metric_7")[51] == 50.0


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_a_short_run_of_many_names_pays_for_what_it_has(rows: int):
    """Ten thousand names at a few steps take at most twice their own bytes."""
    columns = Columns()
    names = tuple(f"weight_{i}" for i in range(10_000))
    for step in range(rows):
        columns.append(
            Batch(np.array([step]), np.zeros(1), names, np.ones((1, 10_000)), ("float",) * 10_000)
        )
    assert columns.nbytes <= 2 * rows * (10_000 * 8 + 28)


def test_a_batch_larger_than_a_chunk_is_split():
    """A batch may be of any length."""
    steps = np.arange(10_000)
    values = steps * 0.5
    batch = Batch(steps, values, ("loss",), values[:, None], ("float",))
    columns = filled(a_batch([-1], loss=[7.0]), batch)
    assert np.array_equal(columns.series("loss").values, [7.0, *values])
    assert [r.values["loss"] for r in columns.records()] == [7.0, *values.tolist()]


def test_a_reader_sees_whole_rows_while_another_thread_appends():
    """Whatever the moment, a reader finds the rows of some prefix, and each row complete."""
    columns = Columns()
    columns.declare("x")
    done = threading.Event()

    def write() -> None:
        for step in range(3000):
            extras = {0: {"note": str(step)}} if step % 3 else None
            more = {"y": [float(step)]} if step % 5 else {}
            columns.append(a_batch([step], extras=extras, x=[float(step)], **more))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = 0
    for _ in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
        every = columns.all_series()
        x = every.get("x", columns.series("x"))
        assert np.array_equal(x.steps, np.arange(len(x)))
        assert np.array_equal(x.values, x.steps)
        for name in ("y", "note"):
            if name in every:
                assert [float(v) for v in every[name]] == every[name].steps.tolist()
        assert len(x) >= seen
        seen = len(x)
    writer.join()
    assert len(columns) == 3000


def test_a_series_can_be_made_by_hand():
    """A Series is plain data: a name, steps and values."""
    series = Series("loss", np.array([1]), np.array([0.5]))
    assert (series.name, series[0]) == ("loss", 0.5)
