"""Which step an update belongs to, and whether the run has gone back.

Steps are given, or counted from 0. An update that is given none belongs to the current step if that
step has none of its names yet, and begins the next one otherwise, so that losses and evaluations
that are handed over one after the other share a step.

The run goes back when a name that the last step has comes at an earlier one: the rows of all names
from there on are superseded. A name that comes late, such as an evaluation, does not turn the run
back, and one that counts epochs while others count steps may begin again for itself alone.

    >>> steps = Steps()
    >>> loss, accuracy = frozenset({"loss"}), frozenset({"eval/accuracy"})
    >>> [steps.place(loss, None), steps.place(accuracy, None), steps.place(loss, None)]
    [0, 0, 1]
"""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from everyrank.errors import MetricError
from everyrank.stage import framework_of

Names = frozenset[str]

_INT64 = 2**63

_NOTHING: Names = frozenset()

#: Stands for all names: after a resume no update belongs to the step of the checkpoint.
_EVERYTHING: Names = frozenset({""})


class Steps:
    """The steps of one run so far; sets of names are compared by identity first, so keep them."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.rewinds = 0
        self._reached: dict[Names, int] = {}  # the step that each set of names has come to
        self._here: Names | set[str] = _NOTHING  # the names that the last step has

    def place(self, names: Names, given: int | None) -> int:
        """Give the step of an update with these names, and note whether it goes back."""
        last = self.last
        if given is None and self._here is names and last is not None and last < _INT64 - 1:
            self.last = self._reached[names] = last + 1  # the usual case, 0.1 us faster
            return last + 1
        step = self._count(names) if given is None else given
        if not -_INT64 <= step < _INT64:
            raise _no_step(step)
        if last is None or step > last:
            self.last = step
            self._here = names or set()  # who has no names joins any step, also of its own kind
        elif step < last:
            self._go_back(names, step)
        elif self._here is not names and self._here is not _EVERYTHING:
            self._join(names)
        self._reached[names] = step
        return step

    def resume(self, step: int) -> None:
        """Go on after `step`, as from a checkpoint."""
        self.last = step
        self._reached.clear()
        # Whatever comes next is the next step, unless it says otherwise.
        self._here = _EVERYTHING

    def _join(self, names: Names) -> None:
        if isinstance(self._here, frozenset):  # it is somebody's set of names
            self._here = set(self._here)
        self._here |= names

    def _count(self, names: Names) -> int:
        if self.last is None:
            return 0
        here = self._here
        return self.last + (here is _EVERYTHING or not names.isdisjoint(here))

    def _go_back(self, names: Names, step: int) -> None:
        last = self.last
        if any(reached == last and not names.isdisjoint(o) for o, reached in self._reached.items()):
            self.rewinds += 1
            self.last = step
            self._here = names
            # The rows of all names from here on are superseded: to repeat them is no rewind.
            self._reached = {o: reached for o, reached in self._reached.items() if reached < step}


def as_step(value: Any) -> int:
    """Give a step as an int, or say why it is none; never reads a device."""
    if framework_of(type(value)):
        raise MetricError(
            f"step is of type {type(value).__name__}, which would have to be read from its device. "
            "Count steps on the host, and hand over an int."
        )
    try:
        step = int(value) if isinstance(value, float) else operator.index(value)
    except (TypeError, ValueError, OverflowError):
        step = None
    if step is None or isinstance(value, bool) or step != value:
        raise _no_step(value)
    return step


def _no_step(value: Any) -> MetricError:
    return MetricError(
        f"step={reprlib.repr(value)} ({type(value).__name__}) is no whole number of 64 bits. Hand "
        "over an int, or leave it out to have steps counted."
    )
