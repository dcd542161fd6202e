"""The intake: what an update costs nobody, loses nothing of, and leaves behind when it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import stage_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError
from everyrank.intake import Intake
from everyrank.records import Record
from everyrank.testing import run_ranks
from everyrank.window import Window, pack


class Taken:
    """An intake, and the windows that it hands on."""

    def __init__(self, sync_every: int = 1, generation: int = 0) -> None:
        self.windows: list[Window] = []
        self.back: list[tuple[int, int]] = []
        self.intake = Intake(
            self.windows.append,
            sync_every=sync_every,
            generation=generation,
            went_back=self._went_back,
        )
        self.add = self.intake.add

    def _went_back(self, last: int, step: int) -> int:
        self.back.append((last, step))
        return self.intake.generation + 1

    def records(self) -> list[Record]:
        """Give all that was handed over, as the background thread would."""
        self.intake.hand_over()
        return [
            record._replace(generation=window.generation)
            for window in self.windows
            for batch in pack(window.rows)
            for record in batch
        ]

    def plain(self) -> list[tuple[int, dict[str, Any]]]:
        return [(record.step, dict(record.values)) for record in self.records()]


def test_a_full_window_is_handed_on():
    """A window closes after `sync_every` updates, and what is open stays until it is asked for."""
    taken = Taken(sync_every=3)
    for _ in range(7):
        taken.add({"loss": 1.0})
    assert [len(window.rows) for window in taken.windows] == [3, 3]
    assert taken.intake.hand_over()
    assert [len(window.rows) for window in taken.windows] == [3, 3, 1]


def test_an_empty_window_is_not_handed_on():
    """Handing over when nothing is open does nothing."""
    taken = Taken(sync_every=3)
    assert taken.intake.hand_over()
    assert taken.windows == []


def test_who_does_not_wait_is_told_that_the_lock_is_held():
    """The background thread asks without waiting, and comes back if an update is under way."""
    taken = Taken(sync_every=3)
    taken.add({"loss": 1.0})
    with taken.intake._lock, ThreadPoolExecutor(1) as background:
        assert not background.submit(taken.intake.hand_over, wait=False).result()
        assert taken.windows == []
    assert taken.intake.hand_over(wait=False)
    assert len(taken.windows) == 1


def test_room_is_waited_for_once_others_may_go_on():
    """An update that finds no room waits with the lock free, and its row is handed on by then."""
    handed, seen = [], []

    def hand_on(window: Window) -> Callable[[], None]:
        handed.append(window)
        return wait

    def wait() -> None:
        with ThreadPoolExecutor(1) as background:
            seen.append((len(handed), background.submit(intake.hand_over, wait=False).result()))

    intake = Intake(hand_on, sync_every=2, went_back=lambda last, step: 1)
    for _ in range(5):
        intake.add({"x": 1.0})
    intake.note("n", 1)
    intake.leftover()
    assert seen == [(1, True), (2, True)]
    intake.hand_over()
    assert len(handed) == 3


def test_the_step_is_an_argument_or_a_key_or_counted():
    """The argument counts, else the key, else the count; a key that is None is none."""
    taken = Taken()
    for metrics, step in [
        ({"x": 0}, None),
        ({"x": 1, "step": 10}, None),
        ({"x": 2, "step": 99}, 20),
        ({"x": 3, "step": None}, None),
        ({"x": 4, "step": 30.0}, None),
        ({"x": 5}, np.int32(40)),
    ]:
        taken.add(metrics, step)
    assert taken.plain() == [(step, {"x": i}) for i, step in enumerate((0, 10, 20, 21, 30, 40))]


def test_rows_say_which_backends_to_skip():
    """The backends that an update asks to leave out are in its record, and in no other."""
    taken, skip = Taken(sync_every=3), frozenset({"wandb"})
    taken.add({"x": 1.0})
    taken.add({"x": 2.0}, skip=skip)
    taken.add({"x": 3.0})
    assert [record.skip for record in taken.records()] == [frozenset(), skip, frozenset()]


def test_any_mapping_is_taken():
    """What behaves like a dict is one."""
    from types import MappingProxyType

    taken = Taken()
    taken.add(MappingProxyType({"loss": 1.0, "eval": MappingProxyType({"loss": 2.0})}))
    assert taken.plain() == [(0, {"loss": 1.0, "eval/loss": 2.0})]


@pytest.mark.parametrize("metrics", [None, 0.5, "loss", [("loss", 1.0)], {"loss"}], ids=repr)
@pytest.mark.parametrize("noted", [False, True])
def test_what_is_no_dict_is_refused(metrics: Any, noted: bool):
    """A value alone, or pairs of names and values, are refused with the way to do it."""
    taken = Taken()
    if noted:
        taken.intake.note("x", 1)
    with pytest.raises(MetricError, match=r"metrics=.* and no dict\. Hand over names with their"):
        taken.add(metrics)


def test_types_may_change_from_step_to_step():
    """A value may be a float, then an int, then a text, and comes out as each of them."""
    values = [1.0, 2, None, "hm", True, np.float32(0.5), 2**70, [1, 2], 1.0]
    taken = Taken(sync_every=2)
    for value in values:
        taken.add({"x": value, "y": 1})
    outs = [values["x"] for _, values in taken.plain()]
    assert outs[7].tolist() == values[7]
    assert outs[:7] + outs[8:] == values[:7] + values[8:]


def test_calls_that_look_alike_share_their_layout():
    """A look that was seen before is found again, however many came in between."""
    taken = Taken(sync_every=99)
    updates = [{"loss": 1.0}, {"eval": {"loss": 2.0}}, {"loss": 1}, {"a": 1.0, "b": None}]
    first = [taken.add(update).layout for update in updates]
    again = [taken.add(update).layout for update in updates]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert len({id(layout) for layout in first}) == 4


def test_calls_that_never_look_alike_do_not_fill_memory():
    """The table of layouts is bounded, and a call that fell out of it is taken like any other."""
    taken = Taken(sync_every=10_000)
    for i in range(9_000):
        taken.add({f"weight_{i}": 1.0}, step=i)
    taken.add({"weight_0": 2.0}, step=9_000)
    assert len(taken.intake._layouts) < 5_000
    assert taken.plain()[0::9_000] == [(0, {"weight_0": 1.0}), (9_000, {"weight_0": 2.0})]


@pytest.mark.parametrize(
    ("metrics", "step"),
    [
        ({"x": object()}, None),
        ({"ok": [1.0], "x": np.zeros(70_000)}, None),
        ({"x/mean": 1.0}, None),
        ({"a": {"b": 1}, "a/b": 2}, None),
        ({"x": 1.0}, "3"),
        ({"x": 1.0}, True),
        ({"x": 1.0}, 2**63),
        ({"x": 1.0, "step": "3"}, None),
        ({"x": 1.0, "step": "3"}, 5),
        ({"x": 1.0, "step": [5]}, 5),
        ({"x": 1.0, "v": [1.0]}, -(2**70)),
    ],
)
def test_a_refused_update_leaves_no_trace(metrics: dict[str, Any], step: Any):
    """It uses up no step, loses no note, spoils no window, and the next update goes on."""
    taken = Taken(sync_every=2)
    taken.add({"x": 1.0})
    taken.intake.note("seconds", 0.5)
    with pytest.raises(MetricError):
        taken.add(metrics, step)
    taken.add({"x": 2.0})
    taken.add({"x": 3.0})
    assert taken.plain() == [
        (0, {"x": 1.0}),
        (1, {"seconds": 0.5, "x": 2.0}),
        (2, {"x": 3.0}),
    ]
    assert [len(window.rows) for window in taken.windows] == [2, 1]


def test_a_note_joins_the_next_update():
    """Notes come before the update's own values, the later of one name counts, and once only."""
    taken = Taken()
    for name, value in [("a", 1), ("b", "old"), ("b", "new"), ("v", [1.0])]:
        taken.intake.note(name, value)
    taken.add({"x": 1.0}, step=5)
    taken.add({"x": 2.0})
    assert taken.plain() == [(5, {"a": 1, "b": "new", "v": 1.0, "x": 1.0}), (6, {"x": 2.0})]


def test_the_update_counts_where_a_note_has_the_same_name():
    """Also if the update gives the name by a dict in the dict."""
    taken = Taken()
    taken.intake.note("eval/loss", 1.0)
    taken.add({"eval": {"loss": 2.0}})
    assert taken.plain() == [(0, {"eval/loss": 2.0})]


def test_a_note_is_copied_when_it_is_noted():
    """What is done to a noted array before the update changes nothing."""
    taken, vector = Taken(), np.ones(2)
    taken.intake.note("v", vector)
    vector[:] = 9
    taken.add({})
    assert taken.plain()[0][1]["v"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("x", object(), "'x' is <object .*neither a number"),
        ("x", {"a": 1}, r"'x' is {'a': 1} \(of type dict\): neither a number"),
        ("x", np.zeros(70_000), "'x' is an array of shape"),
        ("x/mean", 1.0, "kept for statistics"),
        ("step", 3, "the step is no note: hand it over with an update"),
        (3, 1.0, "the key 3 is of type int"),
    ],
)
def test_a_note_is_refused_when_it_is_noted(name: Any, value: Any, pattern: str):
    """Whoever notes what is no metric is told at once, and no update has to pay for it."""
    taken = Taken()
    with pytest.raises(MetricError, match=pattern):
        taken.intake.note(name, value)
    taken.add({"x": 1.0})
    assert taken.plain() == [(0, {"x": 1.0})]


def test_notes_without_an_update_get_a_row_of_their_own():
    """At the end of a run nothing that was noted is lost: it joins the last step if it can."""
    taken = Taken(sync_every=9)
    taken.intake.leftover()
    taken.add({"x": 1.0}, step=5)
    taken.intake.note("seconds", 0.5)
    taken.intake.leftover()
    taken.intake.leftover()
    assert taken.plain() == [(5, {"x": 1.0}), (5, {"seconds": 0.5})]


def test_a_window_is_of_one_generation():
    """An update that goes back closes the window before it, and is the first of the next."""
    taken = Taken(sync_every=4, generation=2)
    for step in (0, 1, 2, 1, 2, 3, 0):
        taken.add({"x": float(step)}, step)
    assert [(r.step, r.generation) for r in taken.records()] == [
        *((0, 2), (1, 2), (2, 2)),
        *((1, 3), (2, 3), (3, 3)),
        (0, 4),
    ]
    assert taken.back == [(2, 1), (3, 0)]
    assert [len(window.rows) for window in taken.windows] == [3, 1, 2, 1]


def test_going_back_at_the_edge_of_a_window_closes_no_empty_one():
    """When the window was full just before, there is nothing to close."""
    taken = Taken(sync_every=2)
    for step in (0, 1, 0, 1):
        taken.add({"x": 1.0}, step)
    assert [(w.generation, len(w.rows)) for w in taken.windows] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_resumed_run_goes_on_in_its_generation(begun: int):
    """What is open belongs to the life before; from the first row on, the rest to the next."""
    taken = Taken(sync_every=2)
    for _ in range(begun):
        taken.add({"x": 1.0})
    taken.intake.resume(100, 7)
    for _ in range(3):
        taken.add({"x": 2.0})
    assert [(r.step, r.generation) for r in taken.records()] == [
        *((step, 0) for step in range(begun)),
        *((101, 7), (102, 7), (103, 7)),
    ]
    assert taken.back == []


def test_a_row_is_held_until_its_window_closes():
    """Whoever prints a row can ask whether it is on its way yet."""
    taken = Taken(sync_every=2)
    row, twin = taken.add({"x": 1.0}), Taken().add({"x": 1.0})
    assert taken.intake.holds(row)
    assert not taken.intake.holds(twin)
    taken.add({"x": 1.0})
    assert not taken.intake.holds(row)


@pytest.mark.parametrize("sync_every", [1, 7])
def test_threads_may_update_at_once(sync_every: int):
    """No update and no note of any thread is lost, and the steps of the run are one sequence."""
    taken, threads, each = Taken(sync_every), 4, 300
    ready = threading.Barrier(threads)

    def work(me: int) -> None:
        ready.wait()
        for i in range(each):
            taken.intake.note(f"note{me}", i)
            taken.add({"thread": me, "i": i, **({"v": [i, i]} if i % 3 else {})})

    workers = [threading.Thread(target=work, args=(me,)) for me in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken.intake.leftover()
    records = taken.records()
    steps = [record.step for record in records]
    assert steps == sorted(steps)
    assert steps[: threads * each] == list(range(threads * each))
    for me in range(threads):
        mine = [r.values["i"] for r in records if r.values.get("thread") == me]
        assert mine == list(range(each))
        noted = [r.values[f"note{me}"] for r in records if f"note{me}" in r.values]
        assert sorted(noted) == list(range(each))
    assert all(len(window.rows) <= sync_every for window in taken.windows)


def test_a_forked_child_does_not_wait_for_threads_that_it_lacks():
    """An update in a child goes on, though a thread of the parent was in the middle of one."""
    assert run_ranks(
        stage_programs.fork_while_locked, 1, backend=None, start_method="forkserver", timeout=60
    ) == [(7, 0)]


def test_values_of_the_host_import_no_framework():
    """Nobody pays for a framework that they do not use."""
    program = stage_programs.frameworks_of_floats
    assert run_ranks(program, 1, backend=None, start_method="spawn") == [[]]


UPDATES = st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9), max_size=3)
EVENTS = st.one_of(
    st.tuples(st.just("update"), UPDATES, st.none() | st.integers(0, 6)),
    st.tuples(st.just("note"), st.sampled_from("nm"), st.integers(-9, 9)),
    st.tuples(st.just("hand over")),
    st.tuples(st.just("refused")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=14), st.integers(1, 5))
def test_law_windows_hold_what_windows_of_one_would(events: list[Any], sync_every: int):
    """However updates are split into windows, rows, steps and generations are the same."""
    several, single = Taken(sync_every), Taken(1)
    for taken in (several, single):
        for what, *event in events:
            if what == "update":
                taken.add(*event)
            elif what == "note":
                taken.intake.note(*event)
            elif what == "refused":
                with pytest.raises(MetricError):
                    taken.add({"x": object()})
            else:
                taken.intake.hand_over()
        taken.intake.leftover()
    assert [(r.step, r.generation, dict(r.values)) for r in several.records()] == [
        (r.step, r.generation, dict(r.values)) for r in single.records()
    ]
    assert all(0 < len(window.rows) <= sync_every for window in several.windows)


def test_windows_end_at_the_same_updates_again_after_a_flush():
    """Ranks that were flushed at different moments close their windows together again."""
    windows: list[Window] = []
    intake = Intake(windows.append, sync_every=5, went_back=lambda a, b: 0)
    for update in range(20):
        intake.add({"a": 1.0})
        if update in (2, 11, 14):
            intake.hand_over()
    assert [window.rows[-1].step for window in windows] == [2, 4, 9, 11, 14, 19]
