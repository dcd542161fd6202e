"""The background thread: every promise of its contract, and what breaks when it hangs or forks."""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

import log_programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_programs import until

from everyrank.testing import run_ranks
from everyrank.worker import Worker, on_worker_thread

LONG = 60.0  # ends a hang, and is never waited for


class Work:
    """Work that notes what it is given, and stands still while its gate is closed."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def __call__(self, items: list[Any]) -> float | None:
        self.entered.set()
        self.gate.wait()
        self.calls.append(items)
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return None

    @property
    def items(self) -> list[Any]:
        return [item for call in self.calls for item in call]


@pytest.fixture
def work() -> Iterator[Work]:
    """Give work whose gate opens at the end of the test, whatever happened in it."""
    work = Work()
    yield work
    work.gate.set()


class Counting(Worker[Any]):
    """A worker that counts how often it was woken."""

    rings = 0

    def ring(self) -> None:
        self.rings += 1
        super().ring()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 9))
def test_law_every_item_comes_once_and_in_order(sizes: list[int], capacity: int):
    """Whatever the sizes and the bound, the work sees each item once, in the order of put."""
    work = Work()
    worker = Worker(work, name="w", capacity=capacity)
    for item in enumerate(sizes):
        worker.put(item, item[1])
    assert worker.close(LONG)
    assert work.items == list(enumerate(sizes))
    assert (worker.waiting, worker.idle, worker.failures) == (0, True, 0)


def test_several_threads_may_put(work: Work):
    """Each thread's items keep their order, and none is lost or counted twice."""
    worker = Worker(work, name="w", capacity=50)

    def put(name: str) -> None:
        for i in range(500):
            worker.put((name, i))

    threads = [threading.Thread(target=put, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert worker.close(LONG)
    for name in "abc":
        assert [i for who, i in work.items if who == name] == list(range(500))
    assert worker.waiting == 0


def test_putting_wakes_a_thread_that_sleeps_deeply_only(work: Work):
    """While the thread is at work no put rings; after a quiet while the next one does."""
    worker = Counting(work, name="w", capacity=99)
    until(lambda: worker._asleep)
    work.gate.clear()
    work.entered.clear()
    worker.put("a")
    assert worker.rings == 1
    assert work.entered.wait(LONG)
    for i in range(50):
        worker.put(i)
    work.gate.set()
    until(lambda: work.items == ["a", *range(50)])  # it looks by itself, without a bell
    assert worker.rings == 1
    assert worker.close(LONG)


def test_above_capacity_put_waits_and_says_so_once(work: Work, caplog: pytest.LogCaptureFixture):
    """A full queue is met by waiting, with one warning, and nothing is dropped."""
    work.gate.clear()
    worker = Worker(work, name="w", capacity=4)
    worker.put("plug")
    until(work.entered.is_set)
    waits: list[int] = []

    def put() -> None:
        for i in range(40):
            worker.put(i)
            waits.append(worker.waiting)

    putter = threading.Thread(target=put)
    putter.start()
    until(lambda: caplog.records)
    assert waits == [2, 3, 4]  # the put that made it five has not returned
    work.gate.set()
    putter.join(LONG)
    assert max(waits) <= 4
    assert worker.close(LONG)
    assert work.items == ["plug", *range(40)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "w is behind: 5 values wait, the bound is 4" in record.getMessage()
    assert "a larger sync_every makes each step cheaper" in record.getMessage()


def test_who_may_not_wait_is_told_that_the_queue_is_full(work: Work):
    """What is put without waiting is queued all the same, and the wait can be made good."""
    work.gate.clear()
    worker = Worker(work, name="w", capacity=2)
    assert [worker.put(i, wait=False) for i in range(4)] == [False, False, True, True]
    waiting = threading.Thread(target=worker.wait_for_room)
    waiting.start()
    work.gate.set()
    waiting.join(LONG)
    assert not waiting.is_alive()
    assert worker.close(LONG)
    assert work.items == [0, 1, 2, 3]
    assert not worker.put(4, wait=False)


def test_a_thread_knows_whether_it_is_a_worker_s():
    """Whoever might have to wait for a worker can ask whether that would be for itself."""
    answers: list[bool] = []
    worker = Worker(lambda items: answers.append(on_worker_thread()), name="w", capacity=2)
    assert worker.close(LONG)
    assert answers == [True] * len(answers) != []
    assert not on_worker_thread()


def test_a_deadline_may_be_never():
    """An infinite patience is one that no clock can hold, and no error."""
    worker = Worker(lambda items: None, name="w", capacity=2)
    worker.put("x")
    assert worker.flush(math.inf)
    assert worker.close(math.inf)


def test_what_is_unfinished_counts_towards_the_bound(work: Work, caplog: pytest.LogCaptureFixture):
    """Values that were handed over, but wait for somebody else, take their room."""
    unfinished = [3]
    worker = Worker(work, name="w", capacity=4, unfinished=lambda: unfinished[0])
    worker.put("a")
    until(lambda: work.items)
    until(lambda: worker.waiting == 3)
    assert not worker.idle
    putter = threading.Thread(target=worker.put, args=("b", 2))
    putter.start()
    until(lambda: caplog.records)
    unfinished[0] = 0
    worker.ring()
    putter.join(LONG)
    assert not putter.is_alive()
    assert worker.close(LONG)


def test_an_item_larger_than_the_bound_passes(work: Work):
    """What could never fit is waited for alone, and is not a deadlock."""
    worker = Worker(work, name="w", capacity=1)
    worker.put("huge", 1000)
    assert worker.close(LONG)
    assert work.items == ["huge"]


def test_a_failure_is_logged_once_for_each_kind_and_counted(
    work: Work, caplog: pytest.LogCaptureFixture
):
    """Whatever work raises, the next items are worked off, and put never sees it."""
    worker = Worker(work, name="w", capacity=9)
    errors = [ValueError("one"), ValueError("two"), asyncio.CancelledError(), SystemExit(3)]
    for error in errors:
        worker.put(error)
        assert worker.flush(LONG)
    worker.put("after")
    assert worker.close(LONG)
    assert work.items == [*errors, "after"]
    assert worker.failures == 4
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "w failed and goes on without these values: ValueError: one",
        "w failed and goes on without these values: CancelledError: ",
        "w failed and goes on without these values: SystemExit: 3",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_after_a_failure_unfinished_work_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """Work that failed with something unfinished is called again, though nobody wakes the thread."""
    monkeypatch.setattr("everyrank.worker._RETRY", 0.01)
    broken, unfinished = threading.Event(), threading.Event()
    broken.set()
    unfinished.set()

    def work(items: list[Any]) -> None:
        if broken.is_set():
            raise ValueError
        unfinished.clear()

    worker = Worker(work, name="w", capacity=9, unfinished=unfinished.is_set)
    until(lambda: worker.failures and worker._asleep)  # it no longer looks by itself
    broken.clear()
    until(lambda: not unfinished.is_set())
    assert worker.close(LONG)


def test_an_unfinished_that_fails_is_a_failure_like_any_other(caplog: pytest.LogCaptureFixture):
    """The thread survives also a question that raises."""
    worker = Worker(lambda items: None, name="w", capacity=9, unfinished=lambda: 1 // 0)
    worker.put("x")
    assert worker.close(LONG)
    assert worker.failures > 0
    assert len(caplog.records) == 1


def test_flush_tells_whether_everything_was_worked_off(work: Work):
    """False at the deadline, True when all that was put before it is done."""
    worker = Worker(work, name="w", capacity=9)
    assert worker.flush(LONG)
    work.gate.clear()
    worker.put("x")
    assert not worker.flush(0.0)
    work.gate.set()
    assert worker.flush(LONG)
    assert work.items == ["x"]
    assert worker.close(LONG)


def test_work_that_asks_for_another_call_is_unfinished():
    """A flush waits for work that wants to be called again, and it is called without a put."""
    left = [3]

    def work(items: list[Any]) -> float | None:
        left[0] -= 1
        return 0.001 if left[0] > 0 else None

    worker = Worker(work, name="w", capacity=9)
    assert worker.flush(LONG)
    assert left[0] <= 0
    assert worker.idle
    assert worker.close(LONG)


def test_work_may_flush_and_close_its_own_worker(caplog: pytest.LogCaptureFixture):
    """On the thread itself neither waits for the thread, nor does a put above capacity."""
    answers: list[bool] = []

    def work(items: list[Any]) -> None:
        if items == ["x"]:
            worker.put("y", 5)
            answers.extend([worker.flush(LONG), worker.close(LONG)])

    worker = Worker(work, name="w", capacity=1)
    worker.put("x")
    until(lambda: not worker.alive)
    assert answers == [False, False]
    assert not caplog.records


def test_a_socket_in_the_selector_wakes_the_thread(work: Work):
    """News of a socket are worked off at once, and the socket stays its owner's to close."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        selector = selectors.DefaultSelector()
        selector.register(ours, selectors.EVENT_READ)
        heard: list[bytes] = []

        def listen(items: list[Any]) -> None:
            if selector.get_map() and any(key.fileobj is ours for key, _ in selector.select(0)):
                heard.append(ours.recv(9))

        worker = Worker(listen, name="w", capacity=9, selector=selector)
        until(lambda: worker._asleep)
        theirs.send(b"news")
        until(lambda: heard == [b"news"])
        assert worker.close(LONG)
        theirs.send(b"more")
        assert ours.recv(9) == b"more"


def test_close_ends_the_thread_and_is_idempotent(work: Work):
    """Closed once or three times, everything put before is done, and what is put later is not."""
    ends: list[str] = []
    worker = Worker(work, name="w", capacity=9, at_end=lambda: ends.append(str(work.items)))
    worker.put("x")
    assert worker.close(LONG)
    assert not worker.alive
    worker.put("late")
    worker.ring()
    assert worker.close(LONG)
    assert worker.flush(LONG)
    assert work.items == ["x"]
    assert ends == ["['x']"]


def test_an_end_that_fails_is_a_failure_like_any_other(caplog: pytest.LogCaptureFixture):
    """What at_end raises is logged and counted, and close returns."""
    worker = Worker(lambda items: None, name="w", capacity=9, at_end=lambda: 1 // 0)
    assert worker.close(LONG)
    assert worker.failures == 1
    assert "ZeroDivisionError" in caplog.text


def test_close_does_not_wait_for_work_that_hangs(work: Work):
    """At its deadline close gives up and says so; the thread ends when the work comes back."""
    ends: list[int] = []
    work.gate.clear()
    worker = Worker(work, name="w", capacity=9, at_end=lambda: ends.append(1))
    worker.put("x")
    until(work.entered.is_set)
    assert not worker.close(0.0)
    assert not worker.close(0.0)
    assert worker.alive
    assert ends == []
    work.gate.set()
    until(lambda: not worker.alive)
    assert ends == [1]


def test_close_does_not_wait_for_an_end_that_hangs():
    """An end that hangs costs a second past the deadline, and makes the answer False."""
    gate = threading.Event()
    worker = Worker(lambda items: None, name="w", capacity=9, at_end=lambda: gate.wait() and None)
    assert not worker.close(0.0)
    gate.set()
    until(lambda: not worker.alive)


def test_close_frees_whoever_waits(work: Work):
    """A put that waits for room, and a flush, end when the worker is closed from elsewhere."""
    work.gate.clear()
    worker = Worker(work, name="w", capacity=1)
    worker.put("x")
    answers: list[bool] = []
    waiters = [
        threading.Thread(target=worker.put, args=("y", 5)),
        threading.Thread(target=lambda: answers.append(worker.flush(LONG))),
    ]
    for waiter in waiters:
        waiter.start()
    until(lambda: len(worker._room._waiters) == 2)  # type: ignore[attr-defined]
    assert not worker.close(0.0)
    for waiter in waiters:
        waiter.join(LONG)
        assert not waiter.is_alive()
    assert answers == [False]


def test_a_forked_child_has_an_inert_copy():
    """In a child put, flush and close do nothing at once, and the parent's worker goes on."""
    ((code, forked, delivered, seen, received),) = run_ranks(
        log_programs.fork_beside_a_worker, 1, backend=None
    )
    assert code == 0
    assert (forked, delivered, seen) == (False, True, ["first", "second"])
    assert received == b"x"


def test_a_fork_from_the_thread_itself_ends_in_the_child():
    """The child of a fork in the middle of the work comes to its end, and closes nothing."""
    assert run_ranks(log_programs.fork_from_the_thread, 1, backend=None) == [(True, [0], True, 0)]


def test_no_thread_and_no_descriptor_is_left(work: Work):
    """A closed worker leaves nothing behind in the process."""
    worker = Worker(work, name="one of a kind", capacity=9)
    sockets = [worker._ear, worker._doorbell]
    assert worker.close(LONG)
    assert "one of a kind" not in [thread.name for thread in threading.enumerate()]
    assert [end.fileno() for end in sockets] == [-1, -1]
