"""The wrappers that keep a destination from hurting a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from log_programs import until

from everyrank.backends.background import Background, Guard
from everyrank.backends.base import Backend
from everyrank.records import Batch, Description, Record
from everyrank.testing import MemoryBackend

LONG = 60.0  # ends a hang, and is never waited for


class Slow(MemoryBackend):
    """A backend that notes its thread, and stands still in some methods until it may go on."""

    def __init__(self, *hangs_in: str) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.threads: set[int] = set()
        self.calls: list[str] = []
        self._hangs_in = hangs_in

    def write(self, record: Record) -> None:
        self._enter("write")
        super().write(record)

    def flush(self) -> None:
        self._enter("flush")

    def close(self) -> None:
        self._enter("close")
        super().close()

    def _enter(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.get_ident())
        self.entered.set()
        if what in self._hangs_in:
            self.gate.wait(LONG)


class Broken:
    """A backend in which nothing works."""

    name = "broken"

    def write(self, record: Record) -> None:
        raise ValueError(f"no step {record.step}")

    def flush(self) -> None:
        raise OSError("no flush")

    def describe(self, descriptions: Any) -> None:
        raise TypeError("no descriptions")

    def close(self) -> None:
        raise RuntimeError("no end")


@pytest.fixture
def slow() -> Iterator[Slow]:
    """Give a backend that hangs in write, until the test is over at the latest."""
    slow = Slow("write")
    yield slow
    slow.gate.set()


def a_batch(*steps: int, **more: Any) -> Batch:
    """Make a batch of some steps."""
    numbers = np.array(steps, float)[:, None]
    return Batch(np.array(steps), np.zeros(len(steps)), ("x",), numbers, ("float",), **more)


def record(step: int, **more: Any) -> Record:
    """Make a record of one number."""
    return Record(step, 0.0, {"x": float(step)}, **more)


def test_records_and_batches_come_in_order_on_one_thread():
    """Whatever is written arrives once, in order, on one thread that is not the caller's."""
    slow = Slow()
    background = Background(slow)
    assert isinstance(background, Backend)
    for step in range(0, 300, 3):
        background.write(record(step))
        background.write_batch(a_batch(step + 1, step + 2))
    background.write_batch(a_batch())
    assert background.close(LONG)
    assert [r.step for r in slow.records] == list(range(300))
    assert slow.records[5] == record(5)
    assert len(slow.threads) == 1
    assert slow.threads != {threading.get_ident()}
    assert slow.calls[-2:] == ["flush", "close"]


def test_what_names_the_backend_is_left_out():
    """A step that the caller asked this backend to skip does not reach it; others' do."""
    memory = MemoryBackend()
    background = Background(memory)
    background.write(record(0, skip=frozenset({"memory"})))
    background.write(record(1, skip=frozenset({"wandb"})))
    background.write_batch(a_batch(2, 3, skip=frozenset({"wandb", "memory"})))
    assert background.close(LONG)
    assert [r.step for r in memory.records] == [1]


def test_a_backend_may_go_by_another_name():
    """Two backends of one kind are told apart by the name given here."""
    memory = MemoryBackend()
    background = Background(memory, name="second")
    background.write(record(0, skip=frozenset({"memory"})))
    assert background.close(LONG)
    assert (background.name, len(memory.records)) == ("second", 1)


def test_flush_reaches_the_destination():
    """After a flush the backend has every record, and was told that no more is waiting."""
    slow = Slow()
    background = Background(slow)
    background.write(record(0))
    assert background.flush(LONG)
    assert slow.calls == ["write", "flush"]
    assert background.close(LONG)


def test_flush_and_close_are_bounded(slow: Slow, caplog: pytest.LogCaptureFixture):
    """A backend that hangs costs the deadline, a warning that says how much is lost, and no more."""
    background = Background(slow)
    background.write(record(0))
    slow.entered.wait(LONG)
    background.write(record(1))
    assert not background.flush(0.0)
    assert background.health()["waiting"] == 2
    assert not background.close(0.0)
    assert not background.close(LONG)
    (warning,) = caplog.records
    assert warning.getMessage() == (
        "the memory backend was not done within 0 s and is given up: 2 records were still waiting "
        "for it"
    )
    background.write(record(2))
    slow.gate.set()
    until(lambda: slow.closed)  # when it comes back
    assert [r.step for r in slow.records] == [0]


def test_a_backend_that_hangs_in_its_close_hangs_nobody():
    """Also the backend's own close has a deadline."""
    slow = Slow("close")
    background = Background(slow)
    background.write(record(0))
    assert not background.close(0.0)
    slow.gate.set()


def test_a_full_queue_is_met_by_waiting(slow: Slow):
    """Above the capacity the writer waits, and nothing is dropped."""
    background = Background(slow, capacity=2)
    writer = threading.Thread(target=lambda: [background.write(record(i)) for i in range(9)])
    writer.start()
    until(lambda: background.health()["waiting"] >= 3)  # one more than may wait: that one blocks
    slow.gate.set()
    writer.join(LONG)
    assert background.close(LONG)
    assert [r.step for r in slow.records] == list(range(9))


def test_a_destination_that_may_drop_never_blocks(slow: Slow, caplog: pytest.LogCaptureFixture):
    """Intermediate records are left out, counted and said once; the last one still comes."""
    background = Background(slow, capacity=3, drop=True)
    for step in range(50):  # while the backend hangs
        background.write(record(step))
    assert caplog.text.count("some are left out there") == 1
    slow.gate.set()
    assert background.close(LONG)
    steps = [r.step for r in slow.records]
    assert steps == sorted(set(steps))
    assert steps[-1] == 49
    assert len(steps) + background.health()["dropped"] == 50
    assert 3 <= len(steps) <= 6


def test_a_destination_that_keeps_up_again_gets_everything_again(slow: Slow):
    """What was left out stays out, the last of it comes, and what follows is whole."""
    background = Background(slow, capacity=2, drop=True)
    for step in range(10):
        background.write(record(step))
    slow.gate.set()
    assert background.flush(LONG)
    for step in range(10, 12):
        background.write(record(step))
    assert background.close(LONG)
    assert [r.step for r in slow.records][-3:] == [9, 10, 11]


def test_a_failing_backend_is_said_once_and_counted(caplog: pytest.LogCaptureFixture):
    """One warning with its cause, every failure counted, and nothing raised into the caller."""
    background = Background(Broken())
    background.describe({})
    for step in range(3):
        background.write(record(step))
        assert not background.flush(LONG)
    assert not background.close(LONG)
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        "the broken backend failed and training goes on without it: describe: TypeError: no "
        "descriptions (said once; history.health() counts the rest)"
    )
    health = background.health()
    assert health.pop("failures") >= 8  # a flush tries again what the one before it could not
    assert health == {"waiting": 0, "dropped": 0, "last_failure": "close: RuntimeError: no end"}


def test_a_flush_tries_again_what_failed():
    """What a disk did not take is not delivered, and a later flush may deliver it."""

    class Moody(MemoryBackend):
        full = True

        def flush(self) -> None:
            if self.full:
                raise OSError("no room")

    moody = Moody()
    background = Background(moody)
    background.write(record(0))
    assert not background.flush(LONG)
    moody.full = False
    assert background.flush(LONG)
    assert background.close(LONG)


def test_a_guard_goes_on_after_a_failure():
    """A guarded backend that recovers gets the records that come then."""

    class Moody(MemoryBackend):
        def write(self, record: Record) -> None:
            if record.step == 1:
                raise OSError("not now")
            super().write(record)

    moody = Moody()
    guard = Guard(moody)
    assert isinstance(guard, Backend)
    for step in range(3):
        guard.write(record(step))
    guard.flush()  # of a backend that has no flush
    guard.describe({})
    guard.close()
    assert [r.step for r in moody.records] == [0, 2]
    assert (guard.failures, guard.last_failure) == (1, "write: OSError: not now")
    assert moody.closed


def test_descriptions_reach_a_backend_that_wants_them():
    """A backend is told how metrics are read before it gets a record."""
    told: list[Any] = []

    class Curious(MemoryBackend):
        def describe(self, descriptions: Any) -> None:
            told.append(descriptions)

    descriptions = {"x": Description(unit="nats")}
    background = Background(Guard(Curious()))
    background.describe(descriptions)
    assert told == [descriptions]
    assert background.close(LONG)
