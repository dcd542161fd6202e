"""Ranks in one process: the contract of `ranks.base`, kept where nothing can get in the way."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks.base import Identity, Ranks
from everyrank.ranks.local import Alone, InProcess, in_process
from everyrank.records import Batch, Record


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_batch(steps: Any, **values: Any) -> Batch:
    """Make a batch from one number, or one list of numbers, per name."""
    columns = [np.broadcast_to(np.array(v, float), len(steps)) for v in values.values()]
    return Batch(
        np.array(steps, np.int64),
        np.zeros(len(steps)),
        tuple(values),
        np.stack(columns, axis=1),
        ("float",) * len(values),
    )


def polled(rank: Ranks) -> list[Record]:
    return [record for batch in rank.poll() for record in batch]


def own_steps(rank: Ranks) -> list[int]:
    """Give the steps of our own rows that are finished."""
    return [record.step for batch in rank.poll() if batch.own for record in batch]


def test_both_keep_the_protocol():
    """What a History asks of ranks, both residents have."""
    ranks: list[Ranks] = [Alone(), *in_process(1)]
    for rank in ranks:
        rank.declare_weight("loss", "tokens")
        rank.request_flush()
        assert not rank.flush_requested()
        rank.start(a_batch([0, 1], loss=[1.0, 2.0]))
        assert rank.unfinished == 2
        assert [r.step for r in polled(rank)] == [0, 1]
        assert (rank.unfinished, rank.facts) == (0, None)
        assert not any(rank.health().values())
        rank.leave()
        rank.close()


def test_a_world_of_one_gives_rows_back_as_they_are():
    """Without other ranks a value is its own statistics: nothing is added, and nothing waits."""
    alone = Alone(Identity(rank=0, source="torchrun"))
    batch = a_batch([0], loss=1.0)
    alone.start(batch)
    assert alone.poll() == [batch]
    assert alone.poll() == []
    assert (alone.wait, alone.identity.source, Alone().identity.world_size) == (None, "torchrun", 1)


def test_ranks_of_one_process_know_who_they_are():
    """Each has its number, and all know how many they are."""
    ranks = in_process(3)
    assert [r.identity.rank for r in ranks] == [0, 1, 2]
    assert {(r.identity.world_size, r.identity.source) for r in ranks} == {(3, "in process")}


def test_every_rank_is_given_the_same_numbers():
    """Statistics are over all ranks, and agree to the last bit; own values are each rank's own."""
    ranks = in_process(3, stats=("mean", "std", "p50"))
    for rank, noise in zip(ranks, (0.1, 0.2, 0.4), strict=True):
        rank.start(a_batch(range(5), loss=[noise * s for s in range(5)]))
    finished = [polled(rank) for rank in ranks]
    for here in zip(*finished, strict=True):
        assert [r.values["loss"] for r in here] == [n * here[0].step for n in (0.1, 0.2, 0.4)]
        for stat in ("loss/mean", "loss/std", "loss/p50"):
            assert len({r.values[stat] for r in here}) == 1
    assert [rank.unfinished for rank in ranks] == [0, 0, 0]


def test_a_weight_that_any_rank_declares_counts():
    """The mean is weighted for all."""
    first, second = in_process(2)
    second.declare_weight("loss", "tokens")
    first.start(a_batch([0], loss=1.0, tokens=1.0))
    second.start(a_batch([0], loss=5.0, tokens=3.0))
    assert [polled(r)[0].values["loss/mean"] for r in (first, second)] == [4.0, 4.0]


def test_who_waits_looks_again_soon():
    """Nothing wakes a rank of one process, so it looks by itself, more often while rows wait."""
    first, second = in_process(2)
    idle = first.wait
    first.start(a_batch([0], loss=1.0))
    assert 0 < first.wait < idle == second.wait


def test_a_rank_without_a_history_is_waited_for_a_short_while(caplog: pytest.LogCaptureFixture):
    """It was never there: past `grace` the others go on, and it is named once."""
    clock = Clock()
    first, second, _ = in_process(3, clock=clock)
    for rank in (first, second):
        rank.start(a_batch([0, 1], loss=1.0))
        assert polled(rank) == []
    clock.now = 5.0
    with caplog.at_level(logging.WARNING, "everyrank"):
        assert polled(second)[0].values["loss/ranks"] == 2
        assert own_steps(first) == [0, 1]
    assert caplog.messages == [
        "step 0 is reduced without rank 2, which did not report it in time. Statistics go on over "
        "the others, and include it again as soon as it reports."
    ]
    assert first.health() == {"missing_ranks": {"2": "silent"}, "late_rows": 0}


def test_a_late_row_is_answered_by_itself(caplog: pytest.LogCaptureFixture):
    """A rank that comes late has its own values recorded, and is in again from there on."""
    clock = Clock()
    first, second = in_process(2, clock=clock)
    assert polled(second) == []
    first.start(a_batch([0, 1, 2], loss=1.0))
    clock.now = 60.0
    assert own_steps(first) == [0, 1, 2]
    with caplog.at_level(logging.WARNING, "everyrank"):
        second.start(a_batch([0, 1, 2, 3], loss=3.0))
        first.start(a_batch([3], loss=1.0))
        rows = polled(second)
    assert [(r.step, r.values.get("loss"), r.values.get("loss/mean")) for r in rows] == [
        (0, None, 1.0),
        (1, None, 1.0),
        (2, None, 1.0),
        (0, 3.0, None),
        (1, 3.0, None),
        (2, 3.0, None),
        (3, 3.0, 2.0),
    ]
    assert [r.step for r in polled(first)] == [3]
    assert caplog.messages[1:] == ["from step 0 on, rank 1 reports again."]
    assert second.health() == {"missing_ranks": {}, "late_rows": 3}


def test_when_a_rank_leaves_the_others_go_on_without_it():
    """What it said before still counts, and its own rows are still answered."""
    first, second = in_process(2, timeout=1e9)
    for rank in (first, second):
        rank.start(a_batch([0], loss=1.0))
    second.start(a_batch([1], loss=1.0))
    second.leave()
    first.start(a_batch([1, 2], loss=3.0))
    assert [r.values["loss/mean"] for r in polled(first)] == [1.0, 2.0, 3.0]
    assert first.health()["missing_ranks"] == {"1": "closed"}
    assert own_steps(second) == [0, 1]


def test_the_first_rank_waits_for_nobody_much_longer_when_it_leaves():
    """As over sockets, the others are asked for what they have, and then have `grace` seconds."""
    clock = Clock()
    first, second = in_process(2, clock=clock)
    for rank in (first, second):
        rank.start(a_batch([0], loss=1.0))
        rank.poll()
    first.start(a_batch([1], loss=1.0))
    first.leave()
    assert second.flush_requested()
    clock.now = 5.0
    first.poll()
    assert first.unfinished == 0


def test_a_flush_reaches_every_rank_that_is_there_but_the_one_that_asked():
    """Each is told once."""
    ranks = in_process(3)
    for rank in ranks:
        rank.poll()
    ranks[1].request_flush()
    assert [rank.flush_requested() for rank in ranks] == [True, False, True]
    assert [rank.flush_requested() for rank in ranks] == [False] * 3


def test_two_flushes_at_a_time_reach_each_other():
    """Who asks may be asked too."""
    ranks = in_process(2)
    for rank in ranks:
        rank.poll()
    for rank in ranks:
        rank.request_flush()
    assert [rank.flush_requested() for rank in ranks] == [True, True]


def test_nothing_is_kept_for_a_rank_that_closed():
    """A rank that takes nothing in any more costs no memory, however long the others go on."""
    first, second = in_process(2)
    second.start(a_batch([0], loss=1.0))
    first.start(a_batch([0], loss=1.0))
    second.leave()
    second.close()
    answered = []
    for step in range(1, 4):
        batch = a_batch([step], loss=1.0)
        answered.append(weakref.ref(batch.steps))
        first.start(batch)
        del batch
        assert polled(first)
    gc.collect()
    assert [steps() for steps in answered] == [None] * 3
    second.start(a_batch([9], loss=1.0))
    assert second.poll() == []
    second.close()


def test_a_rank_is_free_to_live_on_a_thread_of_its_own():
    """Ranks that start and poll at the same time lose no row and mix none up."""
    ranks = in_process(4, timeout=1e9)
    finished: list[list[Record]] = [[] for _ in ranks]

    def live(rank: InProcess) -> None:
        mine = finished[rank.identity.rank]
        for step in range(300):
            rank.start(a_batch([step], loss=float(rank.identity.rank * step)))
            if step % (2 + rank.identity.rank) == 0:
                mine.extend(polled(rank))
        rank.leave()
        while rank.unfinished:
            mine.extend(polled(rank))

    threads = [threading.Thread(target=live, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    for rank, rows in enumerate(finished):
        assert [(r.step, r.values["loss"]) for r in rows] == [(s, rank * s) for s in range(300)]
        assert all(r.values["loss/mean"] == 1.5 * r.step for r in rows)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_law_each_own_row_is_finished_once_and_in_order(data: st.DataObject):
    """Whatever ranks start, whoever leaves, however late: no own row is lost, doubled or swapped."""
    clock = Clock()
    n = data.draw(st.integers(1, 3))
    ranks = in_process(n, clock=clock)
    started: list[list[tuple[int, float]]] = [[] for _ in ranks]
    finished: list[list[tuple[int, float]]] = [[] for _ in ranks]
    means: list[list[tuple[int, float]]] = [[] for _ in ranks]

    def look(r: int) -> None:
        for batch in ranks[r].poll():
            assert batch.own == ("loss" in batch.names)
            for record in batch:
                if batch.own:
                    finished[r].append((record.step, record.values["loss"]))
                if "loss/mean" in record.values:
                    means[r].append((record.step, record.values["loss/mean"]))

    events = st.tuples(
        st.integers(0, n - 1),
        st.one_of(
            st.lists(st.integers(0, 5), min_size=1, max_size=5),
            st.just("look"),
            st.sampled_from([1.0, 10.0, 100.0]),
        ),
    )
    for r in range(n):
        look(r)
    for r, what in data.draw(st.lists(events, max_size=20)):
        if what == "look":
            look(r)
        elif isinstance(what, float):
            clock.now += what
        else:
            loss = [100.0 * r + len(started[r]) + i for i in range(len(what))]
            started[r] += list(zip(what, loss, strict=True))
            ranks[r].start(a_batch(what, loss=loss))
    for rank in ranks:
        rank.leave()
    for r in range(n):
        look(r)
        assert finished[r] == started[r]
        assert ranks[r].unfinished == 0
        assert means[r] == means[0]
