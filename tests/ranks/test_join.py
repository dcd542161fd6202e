"""A rank's own rows and the statistics over ranks, put together as its records."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks.align import reduce_rows
from everyrank.ranks.base import Reduced
from everyrank.ranks.join import OwnRows, join
from everyrank.records import Batch, Record

STATS = ("mean", "max_rank")


def a_batch(steps: Any, *, kind: Any = "float", generation: int = 0, **options: Any) -> Batch:
    """Make a batch; what is no option of a batch is a metric, with one number or one a row."""
    about = {k: options.pop(k) for k in ("extras", "skip") if k in options}
    columns = [np.broadcast_to(np.array(v, float), len(steps)) for v in options.values()]
    return Batch(
        steps=np.array(steps, np.int64),
        times=np.array(steps, float) / 10.0,
        names=tuple(options),
        numbers=np.stack(columns, axis=1) if columns else np.empty((len(steps), 0)),
        kinds=(kind,) * len(options),
        generation=generation,
        **about,
    )


def reduced(by_rank: dict[int, Batch], world_size: int = 2, **options: Any) -> Reduced:
    """Reduce the same steps of some ranks."""
    options = {"stats": STATS, "weights": {}, **options}
    return reduce_rows(list(by_rank.items()), world_size=world_size, **options)


def records(batches: Any) -> list[Record]:
    return [record for batch in batches for record in batch]


def values(batches: Any) -> list[list[tuple[str, Any]]]:
    """Give names and values of every row, in order."""
    return [list(record.values.items()) for record in records(batches)]


# ------------------------------------------------------------------------------------------- rows


def test_a_value_is_followed_by_its_statistics():
    """Each own value stands before the statistics of its name; ranks are ints."""
    own = a_batch([0, 1], loss=[1.0, 2.0], acc=0.5)
    other = a_batch([0, 1], loss=[3.0, 6.0], acc=0.25)
    assert values(join(own, reduced({0: own, 1: other}))) == [
        [
            ("loss", 1.0),
            ("loss/mean", 2.0),
            ("loss/max_rank", 1),
            ("acc", 0.5),
            ("acc/mean", 0.375),
            ("acc/max_rank", 0),
        ],
        [
            ("loss", 2.0),
            ("loss/mean", 4.0),
            ("loss/max_rank", 1),
            ("acc", 0.5),
            ("acc/mean", 0.375),
            ("acc/max_rank", 0),
        ],
    ]


def test_how_many_ranks_reported_stands_there_when_it_was_not_all():
    """`/ranks` is for names that some ranks did not have."""
    own = a_batch([0], loss=1.0, acc=0.5)
    (row,) = values(join(own, reduced({0: own, 1: a_batch([0], loss=3.0)})))
    assert dict(row)["acc/ranks"] == 1
    assert type(dict(row)["acc/ranks"]) is int
    assert "loss/ranks" not in dict(row)


def test_what_was_not_finite_is_counted_where_it_was():
    """`/nonfinite` stands in the rows that have some, and in no other."""
    own = a_batch([0, 1, 2, 3], loss=[1.0, math.nan, math.inf, 1.0])
    other = a_batch([0, 1, 2, 3], loss=[1.0, math.nan, 1.0, 1.0])
    batches = list(join(own, reduced({0: own, 1: other})))
    assert [r.values.get("loss/nonfinite") for r in records(batches)] == [None, 2, 1, None]
    assert [len(batch) for batch in batches] == [1, 2, 1]


def test_what_is_no_number_stays_with_its_row():
    """Texts, kinds, times, skips and generations of our own rows come out as they went in."""
    own = a_batch(
        [3, 4],
        kind="int",
        n=[1, 2],
        generation=2,
        skip=frozenset({"wandb"}),
        extras={1: {"note": "hm", "n": 2**60}},
    )
    first, second = records(join(own, reduced({0: own, 1: a_batch([3, 4], n=4.0)})))
    assert (first.step, first.time, first.generation, first.skip) == (3, 0.3, 2, {"wandb"})
    assert (first.values["n"], type(first.values["n"])) == (1, int)
    assert (second.values["n"], second.values["note"]) == (2**60, "hm")
    assert second.values["n/mean"] == 3.0


def test_names_that_only_others_have_come_last():
    """Of those there are statistics, and no value of our own."""
    own = a_batch([0], loss=1.0)
    (row,) = values(join(own, reduced({0: own, 1: a_batch([0], acc=0.5, loss=3.0)})))
    assert [name for name, _ in row] == [
        "loss",
        "loss/mean",
        "loss/max_rank",
        "acc/mean",
        "acc/max_rank",
        "acc/ranks",
    ]


def test_rows_that_only_others_reported_are_not_our_own():
    """They hold statistics alone, take the others' time, and say that they are none of ours."""
    (batch,) = join(None, reduced({1: a_batch([7], loss=3.0)}), generation=4)
    assert (batch.own, batch.generation) == (False, 4)
    (record,) = batch
    assert (record.step, record.time) == (7, 0.7)
    assert dict(record.values) == {"loss/mean": 3.0, "loss/max_rank": 1, "loss/ranks": 1}


def test_rows_without_statistics_are_ours_or_nothing():
    """What came late, or is all text, is recorded as it is by its rank, and by no other."""
    own = a_batch([0], loss=1.0, extras={0: {"note": "hm"}})
    late = reduced({0: a_batch([0])})
    assert values(join(own, late)) == [[("loss", 1.0), ("note", "hm")]]
    assert list(join(None, late)) == []


# ---------------------------------------------------------------------------------------- own rows


def test_answers_meet_the_rows_in_the_order_of_start():
    """However rows were handed over, and however they are answered, each has its own statistics."""
    rows = OwnRows(0)
    for steps in ([0, 1, 2], [3], [4, 5]):
        rows.add(a_batch(steps, loss=[float(s) for s in steps]))
    assert (rows.waiting, rows.next_step) == (6, 0)
    whole = reduced({r: a_batch(range(6), loss=[s + 2.0 * r for s in range(6)]) for r in range(2)})
    out = values(rows.answer(whole.part(0, 2)))
    assert (rows.waiting, rows.next_step) == (4, 2)
    assert [b.steps.tolist() for b in rows.batches()] == [[2], [3], [4, 5]]
    out += values(rows.answer(whole.part(2, 6)))
    assert (rows.waiting, rows.next_step) == (0, None)
    assert [dict(row)["loss/mean"] - dict(row)["loss"] for row in out] == [1.0] * 6


def test_many_small_batches_are_answered_together():
    """2,000 rows that were handed over one by one come back as one batch, if they look alike."""
    rows = OwnRows(0)
    for step in range(2000):
        rows.add(a_batch([step], loss=1.0, extras={0: {"note": str(step)}}))
    (batch,) = rows.answer(reduced({0: a_batch(range(2000), loss=1.0)}))
    assert [record.values["note"] for record in batch] == [str(step) for step in range(2000)]


def test_rows_of_others_stand_between_our_own():
    """A step that only others reported is recorded in its place."""
    rows = OwnRows(0)
    rows.add(a_batch([0, 2], loss=1.0))
    out = records(rows.answer(reduced({0: a_batch([0], loss=1.0)})))
    out += records(rows.answer(reduced({1: a_batch([1], loss=1.0)})))
    out += records(rows.answer(reduced({0: a_batch([2], loss=1.0)})))
    out += records(rows.answer(reduced({1: a_batch([3], loss=1.0)})))
    assert [(r.step, "loss" in r.values) for r in out] == [
        (0, True),
        (1, False),
        (2, True),
        (3, False),
    ]


def test_a_step_that_was_reduced_without_us_does_not_answer_our_row():
    """A rank that goes back keeps its row for the statistics that it is part of."""
    rows = OwnRows(0)
    rows.add(a_batch([6], loss=1.0))
    (foreign,) = records(rows.answer(reduced({1: a_batch([6], loss=9.0)})))
    assert "loss" not in foreign.values
    assert rows.waiting == 1
    both = reduced({0: a_batch([6], loss=1.0), 1: a_batch([6], loss=3.0)})
    (own,) = records(rows.answer(both))
    assert (own.values["loss"], own.values["loss/mean"]) == (1.0, 2.0)


def test_rows_that_were_finished_elsewhere_are_skipped():
    """An answer that begins with steps which do not wait any longer still answers the rest."""
    rows = OwnRows(0)
    rows.add(a_batch([5, 6], loss=1.0))
    out = records(rows.answer(reduced({0: a_batch([3, 4, 5, 6], loss=1.0)})))
    assert [(r.step, "loss" in r.values) for r in out] == [
        (3, False),
        (4, False),
        (5, True),
        (6, True),
    ]
    assert rows.waiting == 0


def test_rows_of_others_belong_to_the_generation_before_the_next_of_ours():
    """A rewind that still waits for its answer has not begun for what is recorded before it."""
    rows = OwnRows(0)
    other = reduced({1: a_batch([9], loss=1.0)})
    assert records(rows.answer(other))[0].generation == 0
    rows.add(a_batch([8], loss=1.0, generation=3))
    assert records(rows.answer(other))[0].generation == 3
    rows.add(a_batch([2], loss=1.0, generation=4))
    list(rows.answer(reduced({0: a_batch([8], loss=1.0)})))
    assert records(rows.answer(other))[0].generation == 3
    list(rows.answer(reduced({0: a_batch([2], loss=1.0)})))
    assert records(rows.answer(other))[0].generation == 4


def test_left_alone_a_rank_answers_itself():
    """Statistics over one rank say so, weights are honoured, and nothing waits any longer."""
    rows = OwnRows(3)
    for step in range(4):
        rows.add(a_batch([step], loss=2.0, tokens=float(step)))
    list(rows.answer(reduced({3: a_batch([0], loss=2.0)}, world_size=1)))
    options = {"stats": STATS, "weights": {"loss": "tokens"}, "world_size": 4}
    (batch,) = rows.answer_alone(**options)
    assert [(r.step, r.values["loss/ranks"]) for r in batch] == [(1, 1), (2, 1), (3, 1)]
    assert batch[0].values["loss/mean"] == 2.0
    assert batch[0].values["loss/max_rank"] == 3
    assert rows.waiting == 0
    assert list(rows.answer_alone(**options)) == []


def test_nothing_at_all_waits_for_nothing():
    """An empty batch needs no answer, and rows of others come out without any of our own."""
    rows = OwnRows(0)
    rows.add(a_batch([], loss=[]))
    assert (rows.waiting, rows.next_step, list(rows.batches())) == (0, None, [])
    assert [r.step for r in records(rows.answer(reduced({1: a_batch([1], loss=1.0)})))] == [1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_law_any_cut_gives_the_same_records(data: st.DataObject):
    """However rows are handed over and answered, every row comes once, in order, with its own."""
    steps = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    mine = [data.draw(st.booleans()) for _ in steps]
    rows = OwnRows(0)
    ours = [(s, 100.0 * i) for i, s in enumerate(steps) if mine[i]]
    for start, stop in cuts(data, len(ours)):
        part = ours[start:stop]
        rows.add(a_batch([s for s, _ in part], loss=[v for _, v in part]))
    out = []
    for start, stop in cuts(data, len(steps)):
        for own, run in groupby(range(start, stop), key=mine.__getitem__):
            here = list(run)
            both = {1: a_batch([steps[i] for i in here], loss=2.0)}
            if own:
                loss = [100.0 * i for i in here]
                both = {0: a_batch([steps[i] for i in here], loss=loss), **both}
            out += records(rows.answer(reduced(both)))
    assert [(r.step, r.values.get("loss")) for r in out] == [
        (step, 100.0 * i if mine[i] else None) for i, step in enumerate(steps)
    ]
    assert [r.values["loss/mean"] for r in out] == [
        pytest.approx(50.0 * i + 1.0 if mine[i] else 2.0) for i in range(len(steps))
    ]
    assert rows.waiting == 0


def cuts(data: st.DataObject, n: int) -> list[tuple[int, int]]:
    """Cut `n` rows at random places."""
    places = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return list(zip([0, *places], [*places, n], strict=True)) if n else []
