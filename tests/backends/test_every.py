"""Every n-th step, and the last one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.backends.base import Backend
from everyrank.backends.every import Every
from everyrank.errors import OptionError
from everyrank.records import Description, Record
from everyrank.testing import MemoryBackend


class Full(MemoryBackend):
    """A memory backend with both options, that refuses some steps."""

    def __init__(self, refuses: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.flushed = 0
        self.descriptions: Any = None
        self._refuses = refuses

    def write(self, record: Record) -> None:
        if record.step in self._refuses:
            raise OSError("refused")
        super().write(record)

    def flush(self) -> None:
        self.flushed += 1

    def describe(self, descriptions: Any) -> None:
        self.descriptions = descriptions


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(-9, 30), max_size=20))
def test_law_the_steps_that_n_divides_and_the_last(n: int, steps: list[int]):
    """Exactly the steps that n divides are passed on, in order, and the last step at the close."""
    memory = MemoryBackend()
    every = Every(n, to=memory)
    for i, step in enumerate(steps):
        every.write(Record(step, float(i), {"loss": 1.0}))
    passed = [record.step for record in memory.records]
    assert passed == [step for step in steps if step % n == 0]
    every.close()
    last = [steps[-1]] if steps and steps[-1] % n else []
    assert [record.step for record in memory.records] == passed + last
    assert memory.closed


def test_a_step_is_passed_on_whole_or_not_at_all():
    """The last step keeps its training record beside its evaluation, and the newest of each."""
    memory = MemoryBackend()
    every = Every(10, to=memory)
    for step, values in [(10, "loss"), (10, "eval"), (11, "loss"), (12, "loss"), (12, "eval")]:
        every.write(Record(step, 0.0, {values: 1.0}))
    every.write(Record(12, 1.0, {"loss": 2.0}))
    every.close()
    assert [(r.step, dict(r.values)) for r in memory.records] == [
        (10, {"loss": 1.0}),
        (10, {"eval": 1.0}),
        (12, {"eval": 1.0}),
        (12, {"loss": 2.0}),
    ]


def test_a_backend_behind_closes_also_when_it_refuses_the_last_step():
    """What the last write raises comes out of close, after the backend was closed."""
    full = Full(refuses=(1,))
    every = Every(2, to=full)
    every.write(Record(1, 0.0))
    with pytest.raises(OSError, match="refused"):
        every.close()
    assert full.closed


def test_options_of_the_backend_behind_are_reached():
    """Name, flush and describe are those of the backend, and none of them is asked of it."""
    full = Full()
    every = Every(2, to=full)
    assert isinstance(every, Backend)
    assert every.name == "memory"
    descriptions = {"loss": Description(unit="nats")}
    every.describe(descriptions)
    every.flush()
    assert (full.flushed, full.descriptions) == (1, descriptions)
    plain = Every(2, to=MemoryBackend())
    plain.describe(descriptions)
    plain.flush()


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "3", None])
def test_an_interval_that_is_none_is_refused(n: Any):
    """The interval is a count; the error says what passes everything on."""
    with pytest.raises(
        OptionError, match=r"`n` of Every must be an int of at least 1, but is .*1,"
    ):
        Every(n, to=MemoryBackend())
