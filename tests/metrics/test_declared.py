"""Declaring a metric: ten lines, and what goes wrong in them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import everyrank.metrics
from everyrank.errors import MetricError, OptionError
from everyrank.metrics import (
    DeclaredMetric,
    Ema,
    Mean,
    Metric,
    Running,
    State,
    Std,
    Sum,
    arrays_of,
)


def example():
    """Give the class that the head of `declared` shows, run as it stands there."""
    text = everyrank.metrics.declared.__doc__
    block = text[text.index("    class Mean") : text.index("That is all.")]
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) <= 10
    names = {"DeclaredMetric": DeclaredMetric, "State": State, "arrays_of": arrays_of}
    exec(re.sub("^    ", "", block, flags=re.MULTILINE), names)
    return names["MeanAbsoluteError"]


def test_the_example_of_the_documentation_works():
    """In ten lines or fewer."""
    import everyrank.metrics.declared  # noqa: F401 - so that its head can be read

    metric = example()()
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0]))
    metric.update(np.array([3.0]), [3.0])
    assert metric.compute() == pytest.approx(4 / 3)
    metric.reset()
    metric.update(torch.full((1000,), 100.0, dtype=torch.float16), torch.zeros(1000))
    assert metric.compute() == 100


def test_there_is_no_average_of_averages():
    """The message says what a mean is instead."""
    with pytest.raises(MetricError, match="operator='avg' of a state must be one of sum, max, min"):
        State("avg")
    with pytest.raises(MetricError, match="A mean is two sums, which `finish` divides"):
        State("mean")


def test_a_shape_may_name_an_attribute():
    """So that an option sets the size of a state."""

    class Counts(DeclaredMetric):
        seen = State("sum", "classes", 2)

        def __init__(self, classes):
            self.classes = classes

        def batch(self, values):
            return {"seen": values.expand(self.classes, 2)}

        def finish(self, seen):
            return seen

    metric = Counts(3)
    metric.update(torch.tensor(2.0))
    assert metric.compute().tolist() == [[2, 2]] * 3
    assert repr(metric) == "Counts(3)"


class Incomplete(DeclaredMetric):
    total = State("sum")


class Strange(DeclaredMetric):
    total = State("sum")

    def batch(self, values):
        return {"totl": values}

    def finish(self, total):
        return total


class TooLarge(Strange):
    def batch(self, values):
        return {"total": values}


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: Incomplete().update(1.0), NotImplementedError, r"must define batch\(...\)"),
        (lambda: Incomplete().compute(), NotImplementedError, r"must define finish\(total\)"),
        (lambda: Strange().update(1.0), MetricError, "'totl', which is none of its states total"),
        (
            lambda: TooLarge().update(torch.ones(3)),
            MetricError,
            r"the state 'total' has the shape \(\), but a batch contributed one of \(3,\)",
        ),
        (
            lambda: type("Stateless", (DeclaredMetric,), {})(),
            MetricError,
            "Stateless declares no state",
        ),
        (lambda: Std(correction=-1), OptionError, "correction=-1 must be 0 or larger"),
        (lambda: Running(Mean(), 0), OptionError, "n=0 must be at least 1"),
        (lambda: Running(Running(Mean(), 2), 2), OptionError, "does not move itself"),
        (lambda: Running(Mean, 2), OptionError, "must be a declared metric"),
        (lambda: Running(everyrank.metrics.Last(), 2), OptionError, "the last value itself"),
        (lambda: Ema(Mean(), 1.0), OptionError, "decay=1.0 must be at least 0 and below 1"),
        (lambda: Ema(Std()), OptionError, "moments is no sum, and cannot fade"),
    ],
)
def test_a_mistake_is_named_with_what_would_do(use, error, message):
    """At the call that made it."""
    with pytest.raises(error, match=message):
        use()


def test_the_interface_is_nothing_but_its_verbs():
    """Who writes them has a metric, without calling anything of ours."""

    class Nothing(Metric):
        def update(self):
            self.done = ["update"]

        def trigger_sync(self, context=None):
            self.done.append(("trigger", context))

        def wait_sync(self, context=None):
            self.done.append(("wait", context))

        def compute(self):
            return self.done

        def reset(self):
            self.done.clear()

    metric = Nothing()
    metric.update()
    metric.sync("somewhere")
    assert metric.compute() == ["update", ("trigger", "somewhere"), ("wait", "somewhere")]
    assert metric.to("cpu") is metric
    assert metric.state_dict() == {}
    metric.load_state_dict({})


@pytest.mark.parametrize("kind", [Mean, Sum, Std])
def test_it_is_not_changed_by_a_copy_of_it(kind):
    """A copy has numbers of its own."""
    import copy

    metric = kind()
    metric.update(torch.tensor([1.0, 3.0]))
    other = copy.deepcopy(metric)
    other.update(100.0)
    assert metric.compute() == {Mean: 2, Sum: 4, Std: 1}[kind]
    assert other.compute() != metric.compute()
