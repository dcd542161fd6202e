"""Steps: which one an update belongs to, and when the run goes back."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.errors import MetricError
from everyrank.steps import Steps, as_step


def names(text: str) -> frozenset[str]:
    """Make a set of one-letter names."""
    return frozenset(text)


class Model:
    """The same promises, kept the slow way: a list of all that is not superseded."""

    def __init__(self) -> None:
        self.rows: list[tuple[frozenset[str], int]] = []
        self.last: int | None = None
        self.resumed = False
        self.rewinds = 0
        self.here: list[frozenset[str]] = []  # what the last step has

    def place(self, names: frozenset[str], given: int | None) -> int:
        step = self.count(names) if given is None else given
        front = [others for others, reached in self.reached() if reached == self.last]
        if self.last is not None and step < self.last and any(names & o for o in front):
            self.rewinds += 1
            self.rows = [row for row in self.rows if row[1] < step]
            self.last, self.resumed, self.here = step, False, [names]
        elif self.last is None or step > self.last:
            self.last, self.resumed, self.here = step, False, [names]
        elif step == self.last:
            self.here.append(names)
        self.rows.append((names, step))
        return step

    def reached(self) -> list[tuple[frozenset[str], int]]:
        """Say of each set of names where it was placed last."""
        return list(dict(self.rows).items())

    def count(self, names: frozenset[str]) -> int:
        if self.last is None:
            return 0
        taken = any(names & others for others in self.here)
        return self.last + (taken or self.resumed)

    def resume(self, step: int) -> None:
        self.rows.clear()
        self.last, self.resumed, self.here = step, True, []


SETS = st.sets(st.sampled_from("abc")).map(frozenset)
UPDATES = st.tuples(SETS, st.none() | st.integers(-3, 9))
RESUMES = st.integers(0, 9)


@settings(max_examples=300, deadline=None)
@given(st.lists(UPDATES | RESUMES, max_size=12))
def test_law_equals_the_model(events):
    """Whatever is placed and resumed, steps and rewinds are what a list of rows would give."""
    steps, model = Steps(), Model()
    for event in events:
        if isinstance(event, int):
            steps.resume(event)
            model.resume(event)
        else:
            assert steps.place(*event) == model.place(*event)
        assert (steps.last, steps.rewinds) == (model.last, model.rewinds)


def test_steps_are_counted_from_zero():
    """Updates with the same names and no step are steps 0, 1, 2."""
    steps = Steps()
    assert [steps.place(names("ab"), None) for _ in range(3)] == [0, 1, 2]


def test_names_that_the_step_lacks_join_it():
    """Losses and an evaluation that come one after the other share their step."""
    steps = Steps()
    assert [steps.place(names(n), None) for n in ("a", "b", "c", "ad")] == [0, 0, 0, 1]


def test_counting_goes_on_from_a_given_step():
    """After step 100 was given, the next count is 101."""
    steps = Steps()
    assert [steps.place(names("a"), given) for given in (100, None, 7_000, None)] == [
        *(100, 101),
        *(7_000, 7_001),
    ]


def test_a_late_evaluation_is_no_rewind():
    """A name that comes late, at a step past its last one, leaves the run where it is."""
    steps = Steps()
    for step in range(10):
        steps.place(names("a"), step)
    assert [steps.place(names("e"), step) for step in (4, 8)] == [4, 8]
    assert (steps.last, steps.rewinds) == (9, 0)


def test_a_metric_with_steps_of_its_own_may_begin_again():
    """Epochs beside steps: that a second evaluation starts at 0 supersedes no training."""
    steps = Steps()
    for step in range(100):
        steps.place(names("a"), step)
    for epoch in (0, 1, 2, 0, 1):
        assert steps.place(names("e"), epoch) == epoch
    assert (steps.last, steps.rewinds) == (99, 0)
    assert steps.place(names("a"), None) == 100


def test_repeating_what_a_rewind_superseded_is_no_second_rewind():
    """After the run went back, a rarer name follows at its own pace, late as it may be."""
    steps = Steps()
    for step in range(10):
        steps.place(names("a"), step)
    steps.place(names("e"), 9)
    for step in (3, 4, 5):
        steps.place(names("a"), step)
    steps.place(names("e"), 4)
    assert (steps.last, steps.rewinds) == (5, 1)


def test_what_a_rewind_superseded_turns_nothing_back():
    """A name whose rows are gone may come late, as if it had never been there."""
    steps = Steps()
    placed = [steps.place(names(name), step) for name, step in (("a", 5), ("b", 5), ("a", 3))]
    placed.append(steps.place(names("b"), 2))
    assert placed == [5, 5, 3, 2]
    assert (steps.last, steps.rewinds) == (3, 1)


def test_an_update_without_names_has_a_place_in_any_step():
    """It takes up none, however many there are, and wherever the run is."""
    steps = Steps()
    assert [steps.place(names(text), None) for text in ("", "", "a", "", "a", "")] == [
        *(0, 0, 0),
        *(0, 1, 1),
    ]


def test_many_names_at_one_step_cost_no_more_each():
    """Ten thousand updates that share one step are placed, each looked at once."""
    steps = Steps()
    for i in range(10_000):
        assert steps.place(frozenset({f"weight_{i}"}), None) == 0
    assert steps.place(frozenset({"weight_0"}), None) == 1


def test_somebody_elses_set_of_names_is_not_changed():
    """Names that join a step are kept apart from the sets that were handed over."""
    steps = Steps()
    first = names("a")
    steps.place(first, 0)
    steps.place(names("b"), 0)
    assert first == {"a"}


@pytest.mark.parametrize("step", [2**63, -(2**63) - 1])
def test_a_step_past_64_bits_is_refused(step):
    """A step that no int64 holds is refused, and the steps go on as if it had not come."""
    steps = Steps()
    steps.place(names("a"), 5)
    with pytest.raises(MetricError, match=rf"step={step} \(int\) is no whole number of 64 bits"):
        steps.place(names("a"), step)
    assert steps.place(names("a"), None) == 6


def test_counting_past_64_bits_is_refused():
    """After the last step that there can be, counting on says so."""
    steps = Steps()
    steps.place(names("a"), 2**63 - 1)
    with pytest.raises(MetricError, match="no whole number of 64 bits"):
        steps.place(names("a"), None)
    assert (steps.last, steps.rewinds) == (2**63 - 1, 0)


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), 7.0, np.float64(7), np.array(7)])
def test_a_whole_number_is_a_step(value):
    """Ints of any kind and floats without a fraction are steps, as Python's int."""
    step = as_step(value)
    assert (type(step), step) == (int, 7)


@pytest.mark.parametrize(
    "value",
    [True, np.bool_(True), 1.5, float("nan"), float("inf"), "3", [3], np.array([3]), Decimal(3)],
    ids=repr,
)
def test_what_is_no_whole_number_is_no_step(value):
    """A bool, a fraction, a text or an array is refused by name of its type."""
    with pytest.raises(MetricError, match=rf"\({type(value).__name__}\) is no whole number of 64"):
        as_step(value)


def test_a_step_on_a_device_is_not_read():
    """A tensor is refused as a step, since it would have to be waited for."""
    torch = pytest.importorskip("torch")
    with pytest.raises(MetricError, match="step is of type Tensor, which would have to be read"):
        as_step(torch.tensor(3))
