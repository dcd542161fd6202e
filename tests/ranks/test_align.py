"""The alignment: every way in which ranks can disagree, played with a clock of the test's own."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks.align import Alignment, Event, reduce_rows
from everyrank.ranks.base import Reduced
from everyrank.records import Batch

STATS = ("mean", "max", "min", "std", "min_rank", "max_rank", "p50")
TIMEOUT, GRACE = 60.0, 5.0
FOREVER = 1e9


def a_batch(steps: Any, times: float = 0.0, **values: Any) -> Batch:
    """Make a batch from one number, or one list of numbers, per name."""
    steps = np.atleast_1d(np.array(steps, np.int64))
    columns = [np.broadcast_to(np.array(v, float), steps.shape) for v in values.values()]
    numbers = np.stack(columns, axis=1) if columns else np.empty((len(steps), 0))
    return Batch(
        steps, np.full(len(steps), times), tuple(values), numbers, ("float",) * len(values)
    )


def an_alignment(n: int = 2, *, joined: bool = True, **options: Any) -> Alignment:
    """Make an alignment of ranks that have all opened their History."""
    options = {"stats": STATS, "timeout": TIMEOUT, "grace": GRACE, **options}
    alignment = Alignment(range(n), **options)
    for rank in range(n) if joined else ():
        alignment.join(rank)
    return alignment


def say(alignment: Alignment, rank: int, steps: Any, now: float = 0.0, **values: Any) -> None:
    """Have a rank report some steps; its loss is its own number unless it says otherwise."""
    alignment.add(rank, a_batch(steps, **(values or {"loss": float(rank)})), now)


def popped(alignment: Alignment, now: float = 0.0) -> list[tuple[int, set[int]]]:
    """Give what can be reduced by now: of every row its step and who took part."""
    return [row for reduced in alignment.pop(now) for row in rows(reduced)]


def rows(reduced: Reduced) -> Iterator[tuple[int, set[int]]]:
    for step in reduced.steps.tolist():
        yield step, set(reduced.who)


def stat(reduced: Reduced, stat: str, name: str = "loss") -> list[float]:
    """Give one statistic of every row."""
    at = reduced.stats.index(stat), slice(None), reduced.names.index(name)
    return reduced.values[at].tolist()


# ------------------------------------------------------------------------------------- agreement


def test_ranks_that_agree_are_reduced_at_once():
    """In the steady state nothing waits, and one Reduced holds all the rows that all ranks have."""
    alignment = an_alignment(3)
    for rank in range(3):
        assert alignment.pop(0.0) == []
        say(alignment, rank, [4, 5, 6], loss=[rank, 2 * rank, 3 * rank])
    (reduced,) = alignment.pop(0.0)
    assert reduced.steps.tolist() == [4, 5, 6]
    assert stat(reduced, "mean") == [1.0, 2.0, 3.0]
    assert stat(reduced, "max_rank") == [2.0, 2.0, 2.0]
    assert stat(reduced, "p50") == [1.0, 2.0, 3.0]
    assert (reduced.ranks == 3).all()
    assert (reduced.who, reduced.world_size) == ({0, 1, 2}, 3)
    assert not alignment.waiting
    assert alignment.deadline(0.0) is None
    assert alignment.events == []


def test_windows_of_other_lengths_meet():
    """Ranks that hand over a step, five or ten at a time are reduced as far as all of them are."""
    alignment = an_alignment(3)
    say(alignment, 0, range(10))
    say(alignment, 1, range(5))
    for step in range(7):
        say(alignment, 2, [step])
    assert popped(alignment) == [(s, {0, 1, 2}) for s in range(5)]
    say(alignment, 1, range(5, 10))
    assert popped(alignment) == [(5, {0, 1, 2}), (6, {0, 1, 2})]


def test_the_time_of_a_row_is_that_of_the_lowest_rank():
    """Times differ by rank; the row takes the one of the first rank that reported it."""
    alignment = an_alignment(2)
    alignment.add(1, a_batch([0], times=8.0, loss=1.0), 0.0)
    alignment.add(0, a_batch([0], times=7.0, loss=1.0), 0.0)
    (reduced,) = alignment.pop(0.0)
    assert reduced.times.tolist() == [7.0]


# ---------------------------------------------------------------------------- thousands that wait


def test_thousands_of_windows_that_wait_are_reduced_together():
    """When the last of four ranks comes with 2,000 rows, few Reduced hold them all."""
    alignment = an_alignment(4)
    for rank in range(4):
        for step in range(2000):
            say(alignment, rank, [step], loss=rank + step)
            assert rank == 3 or step % 500 or alignment.pop(0.0) == []
    reduced = alignment.pop(0.0)
    assert len(reduced) <= 44
    assert np.concatenate([r.steps for r in reduced]).tolist() == list(range(2000))
    assert [m for r in reduced for m in stat(r, "mean")] == [1.5 + s for s in range(2000)]


def test_a_rank_that_is_behind_is_met_row_by_row():
    """Rows that wait are kept in few pieces, however they came and however they go."""
    alignment = an_alignment(2)
    for step in range(2000):
        say(alignment, 0, [step])
    pieces = alignment._streams[0].queue
    assert len(pieces) <= math.log2(2000) + 1
    for step in range(1000):
        say(alignment, 1, [step])
        assert popped(alignment) == [(step, {0, 1})]
        say(alignment, 0, [2000 + step])
        assert len(pieces) <= 2 * math.log2(2000)
    say(alignment, 1, range(1000, 3000))
    assert len(alignment.pop(0.0)) <= 44
    assert not alignment.waiting


def test_what_is_reduced_at_a_time_is_bounded():
    """However much waits, no Reduced is so large that it could not be held or sent."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, range(10_000))
    assert [len(reduced) for reduced in alignment.pop(0.0)] == [4096, 4096, 1808]
    wide = {f"m{i}": 1.0 for i in range(10_000)}
    for rank in range(2):
        say(alignment, rank, range(10_000, 10_100), **wide)
    assert [len(reduced) for reduced in alignment.pop(0.0)] == [52, 48]


def test_who_waits_keeps_the_moment_of_each_arrival():
    """Rows that wait in one piece do not share one patience: each has its own."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [0])
    alignment.pop(0.0)
    for step in range(1, 5):
        say(alignment, 0, [step], now=10.0 * step)
    assert len(alignment._streams[0].queue) == 1
    assert alignment.deadline(40.0) == 30.0
    say(alignment, 1, [1, 2, 3], now=40.0)
    assert len(alignment.pop(40.0)) == 1
    assert alignment.deadline(40.0) == 60.0
    assert popped(alignment, 99.9) == []
    assert popped(alignment, 100.0) == [(4, {0})]


# ------------------------------------------------------------------------------------- other keys


def test_ranks_with_other_keys_agree_on_the_union():
    """Each name is over the ranks that have it, in whatever order they name them."""
    alignment = an_alignment(3)
    say(alignment, 0, [0, 1], loss=[1.0, 2.0], acc=0.5)
    say(alignment, 1, [0, 1], acc=0.7, loss=[3.0, 4.0])
    say(alignment, 2, [0, 1], lr=0.1)
    (reduced,) = alignment.pop(0.0)
    assert reduced.names == ("loss", "acc", "lr")
    assert reduced.ranks.tolist() == [[2, 2, 1], [2, 2, 1]]
    assert stat(reduced, "mean") == [2.0, 3.0]
    assert stat(reduced, "mean", "acc") == pytest.approx([0.6, 0.6])
    assert stat(reduced, "max_rank", "acc") == [1.0, 1.0]
    assert stat(reduced, "min_rank", "lr") == [2.0, 2.0]
    assert reduced.who == {0, 1, 2}


def test_what_is_not_finite_is_counted_by_name():
    """NaN and infinities reach the statistics, and are counted where they were."""
    alignment = an_alignment(2)
    say(alignment, 0, [0, 1], loss=[math.nan, 1.0], acc=[1.0, math.inf])
    say(alignment, 1, [0, 1], loss=[1.0, 2.0], acc=[1.0, -math.inf])
    (reduced,) = alignment.pop(0.0)
    assert reduced.nonfinite.tolist() == [[1, 0], [0, 2]]
    assert stat(reduced, "max_rank") == [0.0, 1.0]
    assert stat(reduced, "min", "acc") == [1.0, -math.inf]


def test_names_that_change_cut_the_rows():
    """An evaluation every few steps splits what is reduced together, and loses nothing."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [0, 1])
        say(alignment, rank, [2], loss=1.0, acc=0.5)
        say(alignment, rank, [3, 4])
    reduced = alignment.pop(0.0)
    assert [r.steps.tolist() for r in reduced] == [[0, 1], [2], [3, 4]]
    assert [r.names for r in reduced] == [("loss",), ("loss", "acc"), ("loss",)]


def test_rows_of_texts_alone_are_answered():
    """A step without a number has no statistics, but it is a step."""
    alignment = an_alignment(2)
    for rank in range(2):
        alignment.add(rank, a_batch([7]), 0.0)
    (reduced,) = alignment.pop(0.0)
    assert (reduced.names, reduced.steps.tolist(), reduced.who) == ((), [7], {0, 1})
    assert reduced.values.shape == (len(STATS), 1, 0)


# ---------------------------------------------------------------------------------------- weights


def test_a_declared_weight_weighs_the_mean():
    """The mean is sum(w x) / sum(w) over ranks, and the weight's own mean is plain."""
    alignment = an_alignment(2)
    alignment.weights["loss"] = "tokens"
    say(alignment, 0, [0, 1], loss=[1.0, 2.0], tokens=[1.0, 0.0])
    say(alignment, 1, [0, 1], loss=[5.0, 4.0], tokens=3.0)
    (reduced,) = alignment.pop(0.0)
    assert stat(reduced, "mean") == [4.0, 4.0]
    assert stat(reduced, "mean", "tokens") == [2.0, 1.5]
    assert stat(reduced, "std") == [2.0, 1.0]


def test_a_rank_without_the_weight_has_no_part_in_the_mean():
    """If no rank has the weight the mean is plain; if some have, it is theirs."""
    weights = {"loss": "tokens", "lr": "nothing"}
    some = reduce_rows(
        [(0, a_batch([0], loss=1.0, tokens=2.0, lr=1.0)), (1, a_batch([0], loss=9.0, lr=2.0))],
        stats=STATS,
        weights=weights,
        world_size=2,
    )
    none = reduce_rows(
        [(0, a_batch([0], loss=1.0)), (1, a_batch([0], loss=9.0))],
        stats=STATS,
        weights=weights,
        world_size=2,
    )
    assert (stat(some, "mean"), stat(some, "max"), stat(some, "mean", "lr")) == (
        [1.0],
        [9.0],
        [1.5],
    )
    assert stat(none, "mean") == [5.0]


# -------------------------------------------------------------------------- other steps and orders


def test_a_rank_that_skips_steps_is_not_waited_for():
    """Who is at a later step has passed the ones before it."""
    alignment = an_alignment(2)
    say(alignment, 0, range(6))
    say(alignment, 1, [0, 2, 5])
    assert popped(alignment) == [
        (0, {0, 1}),
        (1, {0}),
        (2, {0, 1}),
        (3, {0}),
        (4, {0}),
        (5, {0, 1}),
    ]


def test_a_rank_that_was_already_past_a_step_is_not_waited_for():
    """Rule 3: what another rank logs at steps that we have passed is reduced at once."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [0, 10])
    alignment.pop(0.0)
    say(alignment, 0, [10], now=0.0)
    assert popped(alignment) == []  # at the same step once more: that we may do too
    say(alignment, 1, [10])
    assert popped(alignment) == [(10, {0, 1})]
    alignment = an_alignment(2)
    say(alignment, 0, [0])
    say(alignment, 1, [0, 10])
    assert popped(alignment) == [(0, {0, 1})]
    alignment.leave(0)
    assert popped(alignment) == [(10, {1})]
    say(alignment, 0, [4, 5])
    assert popped(alignment) == [(4, {0}), (5, {0})]


def test_even_and_odd_steps_interleave():
    """Ranks that never log the same step are put in order, and nothing waits for more than one."""
    alignment = an_alignment(2)
    say(alignment, 0, range(0, 4000, 2))
    say(alignment, 1, range(1, 4000, 2))
    out = popped(alignment)
    assert out == [(s, {s % 2}) for s in range(3999)]
    alignment.leave(0)
    assert popped(alignment) == [(3999, {1})]


def test_two_rows_at_one_step_stay_two():
    """A step that is logged twice is two rows, also where another rank logged it once."""
    alignment = an_alignment(2)
    for step in range(3):
        say(alignment, 0, [step, step])
        say(alignment, 1, [step])
    alignment.leave(0)
    alignment.leave(1)
    assert popped(alignment) == [row for step in range(3) for row in ((step, {0, 1}), (step, {0}))]


def test_a_rewind_that_all_ranks_make_is_in_step():
    """Ranks that go back together stay together, with one Reduced up to it and one from it on."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [5, 6, 7, 5, 6, 7, 8])
    assert [r.steps.tolist() for r in alignment.pop(0.0)] == [[5, 6, 7], [5, 6, 7, 8]]


def test_a_rewind_is_met_at_different_moments():
    """Rule 1: what stands before the rewind in one stream goes first, and they meet behind it."""
    alignment = an_alignment(2)
    say(alignment, 0, [5, 6, 3, 4, 5])
    say(alignment, 1, [5, 6, 7, 8, 3, 4, 5])
    assert popped(alignment) == [
        (5, {0, 1}),
        (6, {0, 1}),
        (7, {1}),
        (8, {1}),
        (3, {0, 1}),
        (4, {0, 1}),
        (5, {0, 1}),
    ]


def test_rows_behind_a_rewind_do_not_slip_past_it():
    """A run of rows ends where another stream has the same step further behind."""
    alignment = an_alignment(2)
    say(alignment, 0, [2, 3, 4])
    say(alignment, 1, [9, 3, 4])
    assert popped(alignment) == [(2, {0}), (9, {1}), (3, {0, 1}), (4, {0, 1})]


def test_a_rewind_of_one_rank_waits_for_the_others():
    """A row that goes back is no late one: others may still go back too, and are waited for."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [8])
    alignment.pop(0.0)
    say(alignment, 0, [3])
    assert popped(alignment, 59.0) == []
    say(alignment, 1, [3], now=59.0)
    assert popped(alignment, 59.0) == [(3, {0, 1})]


# ------------------------------------------------------------------------------------- late ranks


def test_a_rank_that_reports_no_more_is_waited_for_so_long():
    """Patience is `timeout` from the arrival of the row; then the rank is named, once."""
    alignment = an_alignment(3)
    for rank in range(3):
        say(alignment, rank, [0])
    alignment.pop(0.0)
    say(alignment, 0, [1], now=10.0)
    say(alignment, 1, [1], now=20.0)
    assert alignment.deadline(30.0) == 40.0
    assert popped(alignment, 69.9) == []
    assert popped(alignment, 70.0) == [(1, {0, 1})]
    assert alignment.events == [Event("silent", (2,), 1)]
    assert alignment.missing() == {2: "silent"}
    for rank in range(2):
        say(alignment, rank, [2, 3], now=71.0)
    assert popped(alignment, 71.0) == [(2, {0, 1}), (3, {0, 1})]
    assert len(alignment.events) == 1


def test_a_rewind_that_a_silent_rank_missed_is_late_for_it():
    """Rule 5, where the others went back at the very moment at which it fell silent."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [3, 4])
    say(alignment, 0, [2, 3])
    alignment.pop(0.0)
    alignment.pop(FOREVER)
    say(alignment, 1, [2, 3, 4], now=FOREVER)
    say(alignment, 0, [4], now=FOREVER)
    assert popped(alignment, FOREVER) == [(2, {1}), (3, {1}), (4, {0, 1})]


@pytest.mark.parametrize(("joined", "patience"), [(False, GRACE), (True, 3 * GRACE)])
def test_a_rank_that_never_reported_is_waited_for_less(joined: bool, patience: float):
    """It is `grace` for one that opened no History, three times that for one that did."""
    alignment = an_alignment(2, joined=joined)
    say(alignment, 0, [0], now=1.0)
    assert alignment.deadline(1.0) == patience
    assert popped(alignment, 0.9 + patience) == []
    assert popped(alignment, 1.0 + patience) == [(0, {0})]
    assert alignment.events == [Event("silent", (1,), 0)]


def test_no_patience_is_longer_than_the_timeout():
    """With a timeout of two seconds, a rank that never reported has two seconds as well."""
    alignment = an_alignment(2, timeout=2.0)
    say(alignment, 0, [0])
    assert alignment.deadline(0.0) == 2.0
    assert popped(alignment, 2.0) == [(0, {0})]


@pytest.mark.parametrize(("timeout", "patience"), [(TIMEOUT, GRACE), (4.0, 2.0)])
def test_at_the_end_of_a_run_everybody_hurries(timeout: float, patience: float):
    """After `hurry` nobody is waited for longer than `grace`, or half a timeout that is short."""
    alignment = an_alignment(2, timeout=timeout)
    for rank in range(2):
        say(alignment, rank, [0])
    alignment.pop(0.0)
    say(alignment, 0, [1])
    alignment.hurry()
    assert alignment.deadline(0.0) == patience
    assert popped(alignment, patience) == [(1, {0})]


def test_what_was_reduced_without_a_rank_comes_late():
    """A silent rank that speaks again is named, its late rows are counted, and it is in again."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [0])
    say(alignment, 0, [1, 2, 3])
    alignment.pop(0.0)
    alignment.pop(TIMEOUT)
    say(alignment, 0, [4], now=61.0)
    assert popped(alignment, 61.0) == [(4, {0})]
    say(alignment, 1, [1, 2, 3, 4, 5], now=62.0)
    say(alignment, 0, [5], now=62.0)
    late, joined = alignment.pop(62.0)
    assert alignment.events == [Event("silent", (1,), 1), Event("back", (1,), 1)]
    assert (alignment.late, alignment.missing()) == (4, {})
    assert (late.steps.tolist(), late.names, late.who) == ([1, 2, 3, 4], (), {1})
    assert (joined.steps.tolist(), joined.names, joined.who) == ([5], ("loss",), {0, 1})


def test_late_rows_are_answered_though_nothing_else_waits():
    """Who asks for the deadline is told to come at once."""
    alignment = an_alignment(2)
    say(alignment, 0, [0])
    alignment.pop(FOREVER)
    say(alignment, 1, [0])
    assert (alignment.waiting, alignment.deadline(0.0)) == (False, 0.0)
    assert popped(alignment) == [(0, {1})]
    assert alignment.deadline(0.0) is None


def test_a_rank_that_comes_back_further_on_is_in_at_once():
    """A rank that did not log what it missed has nothing that is late."""
    alignment = an_alignment(2)
    say(alignment, 0, [0, 1])
    alignment.pop(FOREVER)
    say(alignment, 1, [2])
    say(alignment, 0, [2])
    assert popped(alignment) == [(2, {0, 1})]
    assert alignment.late == 0


def test_a_rank_that_comes_back_late_may_go_back_as_the_others_did():
    """Rule 5: what it repeats of a rewind that it missed is late too, and then it has caught up."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [0, 1])
    say(alignment, 0, [2, 3, 4, 2, 3])
    assert popped(alignment, 0.0) == [(0, {0, 1}), (1, {0, 1})]
    assert len(popped(alignment, FOREVER)) == 5
    say(alignment, 1, [2, 3, 4, 2], now=FOREVER)
    say(alignment, 1, [3, 4, 5], now=FOREVER)
    say(alignment, 0, [4, 5], now=FOREVER)
    assert popped(alignment, FOREVER) == [
        *((s, {1}) for s in (2, 3, 4, 2, 3)),
        (4, {0, 1}),
        (5, {0, 1}),
    ]
    assert alignment.late == 5


def test_a_rewind_of_its_own_ends_lateness():
    """A silent rank that comes back before its last step has begun anew, and is in again."""
    alignment = an_alignment(2)
    for rank in range(2):
        say(alignment, rank, [5])
    say(alignment, 0, [6])
    alignment.pop(0.0)
    alignment.pop(FOREVER)
    say(alignment, 1, [2], now=FOREVER)
    assert popped(alignment, FOREVER) == []  # rank 0 may go back too
    say(alignment, 0, [2], now=FOREVER)
    assert popped(alignment, FOREVER) == [(2, {0, 1})]
    assert alignment.late == 0


def test_a_rank_may_fall_silent_again():
    """It is named each time, and never in between."""
    alignment = an_alignment(2)
    now = 0.0
    for step in range(3):
        say(alignment, 0, [step], now=now)
        now += TIMEOUT
        assert popped(alignment, now) == [(step, {0})]
        say(alignment, 1, [step], now=now)
        assert popped(alignment, now) == [(step, {1})]
    assert [event.what for event in alignment.events] == ["silent", "back"] * 3


# ------------------------------------------------------------------------- closed, gone, and nothing


@pytest.mark.parametrize(("gone", "state"), [(False, "closed"), (True, "gone")])
def test_nobody_waits_for_a_rank_that_left(gone: bool, state: str):
    """What it said before still counts; what it did not say is not waited for."""
    alignment = an_alignment(2)
    say(alignment, 1, [0])
    alignment.leave(1, gone=gone)
    say(alignment, 0, [0, 1])
    assert popped(alignment) == [(0, {0, 1}), (1, {0})]
    assert alignment.missing() == {1: state}
    assert alignment.events == []


def test_when_all_have_left_everything_is_reduced():
    """What waits for nobody does not wait."""
    alignment = an_alignment(3)
    say(alignment, 0, [0, 1, 2])
    say(alignment, 2, [1])
    for rank in range(3):
        alignment.leave(rank)
    assert popped(alignment) == [(0, {0}), (1, {0, 2}), (2, {0})]


def test_nothing_at_all_is_no_disagreement():
    """Without rows nobody waits and nobody is named; an empty batch is nothing too."""
    alignment = an_alignment(2)
    alignment.add(0, a_batch([], loss=[]), 0.0)
    assert alignment.pop(FOREVER) == []
    assert (alignment.deadline(0.0), alignment.waiting) == (None, False)
    assert (alignment.missing(), alignment.late, alignment.events) == ({}, 0, [])


def test_an_empty_batch_of_a_silent_rank_is_no_sign_of_life():
    """Only rows bring a rank back."""
    alignment = an_alignment(2)
    say(alignment, 0, [0])
    alignment.pop(FOREVER)
    alignment.add(1, a_batch([], loss=[]), 0.0)
    assert alignment.missing() == {1: "silent"}


def test_one_rank_waits_for_nobody():
    """An alignment of one answers at once."""
    alignment = an_alignment(1)
    say(alignment, 0, [3, 1, 1])
    assert popped(alignment) == [(3, {0}), (1, {0}), (1, {0})]


def test_ranks_need_not_begin_at_zero():
    """The ranks of a group are named by their numbers in the program."""
    alignment = Alignment([2, 5], stats=STATS, timeout=TIMEOUT)
    say(alignment, 5, [0])
    say(alignment, 2, [0])
    (reduced,) = alignment.pop(0.0)
    assert (stat(reduced, "max_rank"), reduced.world_size) == ([5.0], 2)


# -------------------------------------------------------------------------------------------- laws

Say = tuple[int, Batch]


@st.composite
def programs(draw: st.DrawFn) -> list[list[Batch]]:
    """Draw what each rank reports: about the same steps, in windows of its own.

    Each rank names its rows: `from<rank>` holds the number of the row, so that what comes out says
    which rows went in.
    """
    n = draw(st.integers(1, 4))
    common = draw(st.lists(st.integers(0, 6), max_size=12))
    if draw(st.booleans()):
        common = sorted(common)
    out = []
    for rank in range(n):
        steps = draw(
            st.one_of(
                st.just(common),
                st.just(sorted(set(common))),
                st.just(common[: len(common) // 2]),
                st.lists(st.integers(0, 6), max_size=12),
            )
        )
        windows = []
        at = 0
        while at < len(steps):
            size = draw(st.integers(1, 5))
            some = steps[at : at + size]
            more = {"acc": 0.5 * rank} if draw(st.integers(0, 4)) == 0 else {}
            number = np.arange(at, at + len(some), dtype=float)
            mine = {"loss": 10.0 * rank + number, f"from{rank}": number, **more}
            windows.append(a_batch(some, **mine))
            at += size
        out.append(windows)
    return out


def played(draw: Any, program: list[list[Batch]], alignment: Alignment) -> list[Reduced]:
    """Play the ranks' reports in some order, with leaves, losses and a clock that runs at will."""
    out: list[Reduced] = []
    now = 0.0
    left = {rank: list(windows) for rank, windows in enumerate(program)}
    while any(left.values()):
        rank = draw(st.sampled_from([r for r, windows in left.items() if windows]))
        alignment.add(rank, left[rank].pop(0), now)
        if not left[rank] and draw(st.booleans()):
            alignment.leave(rank, gone=draw(st.booleans()))
        now += draw(st.sampled_from([0.0, 0.0, 1.0, 2 * GRACE, 2 * TIMEOUT]))
        if draw(st.booleans()):
            out += alignment.pop(now)
    while (seconds := alignment.deadline(now)) is not None:
        now += seconds
        found = alignment.pop(now)
        assert found, "a deadline that has come reduces something"
        out += found
    return out


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_law_every_row_is_answered_once_and_by_its_own_step(data: st.DataObject):
    """Whatever ranks say and whenever: once clocks run out, each row has had one answer, in order.

    Every statistic is that of the rows that took part, and those are all of the same step.
    """
    program = data.draw(programs())
    alignment = an_alignment(len(program), joined=data.draw(st.booleans()))
    out = played(data.draw, program, alignment)
    assert not alignment.waiting
    said = [[row for batch in windows for row in batch] for windows in program]
    answered: dict[int, list[int]] = defaultdict(list)
    late = Counter[int]()
    for reduced in out:
        assert len(reduced) > 0
        for i, step in enumerate(reduced.steps.tolist()):
            for rank in reduced.who:
                here = len(answered[rank])
                answered[rank].append(here)
                assert said[rank][here].step == step
            if not reduced.names:
                late.update(reduced.who)
                continue
            took_part = {rank: said[rank][len(answered[rank]) - 1] for rank in reduced.who}
            check_row(reduced, i, {rank: row.values for rank, row in took_part.items()})
    assert {rank: len(rows) for rank, rows in enumerate(said) if rows} == {
        rank: len(numbers) for rank, numbers in answered.items()
    }
    assert alignment.late == late.total()


def check_row(reduced: Reduced, i: int, values: dict[int, Any]) -> None:
    """Compute every statistic of one row again, from the rows that took part in it."""
    assert set(reduced.names) == {name for row in values.values() for name in row}
    for u, name in enumerate(reduced.names):
        held = {rank: row[name] for rank, row in sorted(values.items()) if name in row}
        array = np.array(list(held.values()))
        expected = {
            "mean": array.mean(),
            "max": array.max(),
            "min": array.min(),
            "std": array.std(),
            "min_rank": list(held)[array.argmin()],
            "max_rank": list(held)[array.argmax()],
            "p50": np.quantile(array, 0.5),
        }
        found = dict(zip(reduced.stats, reduced.values[:, i, u].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert reduced.ranks[i, u] == len(held)
        assert reduced.nonfinite[i, u] == 0


class Plain:
    """The rules, kept the slow way: lists of rows, each looked at alone."""

    def __init__(self, n: int) -> None:
        self.rows: dict[int, list[tuple[int, float]]] = {rank: [] for rank in range(n)}
        self.state = dict.fromkeys(range(n), "live")
        self.last: dict[int, int] = {}
        self.without: dict[int, list[int]] = {rank: [] for rank in range(n)}
        self.late: list[tuple[int, set[int]]] = []

    def add(self, rank: int, steps: list[int], now: float) -> None:
        if self.state[rank] == "silent":
            self.state[rank] = "live"
        for step in steps:
            if not self.is_late(rank, step):
                self.rows[rank].append((step, now))

    def is_late(self, rank: int, step: int) -> bool:
        """Look for the step in what the rank missed, which is forgotten up to there."""
        missed = self.without[rank]
        if missed and step < self.last.get(rank, step):
            del missed[: one_way(missed)]
        if not missed or step > max(missed[: one_way(missed)]):
            missed.clear()
            return False
        self.last[rank] = step
        self.late.append((step, {rank}))
        return True

    def pop(self, now: float) -> list[tuple[int, set[int]]]:
        out, self.late = self.late, []
        while (row := self.next_row(now)) is not None:
            step, parts = row
            out.append(row)
            for rank in parts:
                self.rows[rank].pop(0)
                self.last[rank] = step
            for rank, state in self.state.items():
                if state == "silent" and not self.rows[rank]:
                    self.without[rank].append(step)
        return out

    def next_row(self, now: float) -> tuple[int, set[int]] | None:
        heads = {rank: rows[0] for rank, rows in self.rows.items() if rows}
        steps = sorted({step for step, _ in heads.values()})
        if not steps:
            return None
        step = next((s for s in steps if not self.further_behind(s)), steps[0])
        parts = {rank for rank, (head, _) in heads.items() if head == step}
        back = all(step <= self.last.get(rank, step - 1) for rank in parts)
        awaited = {
            rank
            for rank, state in self.state.items()
            if not self.rows[rank] and state == "live"
            if back or self.last.get(rank, step) <= step
        }
        arrived = min(heads[rank][1] for rank in parts)
        patience = {r: TIMEOUT if r in self.last else 3 * GRACE for r in awaited}
        if any(arrived + patience[rank] > now for rank in awaited):
            return None
        for rank in awaited:
            self.state[rank] = "silent"
            if rank in self.last and not self.without[rank]:
                self.without[rank] = [self.last[rank]]
        return step, parts

    def further_behind(self, step: int) -> bool:
        return any(
            rows[0][0] != step and step in [s for s, _ in rows]
            for rows in self.rows.values()
            if rows
        )


def one_way(steps: list[int]) -> int:
    """Count the steps before the first that goes back."""
    return next((i for i in range(1, len(steps)) if steps[i] < steps[i - 1]), len(steps))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_law_rows_that_are_reduced_together_are_those_that_the_rules_give_alone(
    data: st.DataObject,
):
    """Windows, pieces and runs of rows change nothing about who meets whom, and in which order."""
    n = data.draw(st.integers(2, 3))
    alignment, plain = an_alignment(n), Plain(n)
    windows = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(
        lambda steps: steps if steps[0] % 2 else sorted(steps)
    )
    now = 0.0
    for rank, steps, seconds, look in data.draw(
        st.lists(
            st.tuples(
                st.integers(0, n - 1),
                windows,
                st.sampled_from([0.0, 0.0, 0.0, 3 * GRACE, TIMEOUT]),
                st.booleans(),
            ),
            max_size=12,
        )
    ):
        say(alignment, rank, steps, now=now)
        plain.add(rank, steps, now)
        now += seconds
        if look:
            assert popped(alignment, now) == plain.pop(now)
    assert popped(alignment, FOREVER) == plain.pop(FOREVER)
