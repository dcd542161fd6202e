"""States: the few numbers that a metric is, each with the operator that merges them.

The states of some metrics lie in one flat vector for each operator, and a `Plan` says where:

    >>> plan = Plan.of({"loss": {"total": State("sum"), "count": State("sum")}})
    >>> plan.widths["sum"], plan.slots[1].name, plan.slots[1].here.start
    (2, 'loss/count', 1)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everyrank.errors import MetricError
from everyrank.operators import OPERATORS


@dataclass(frozen=True, init=False)
class State:
    """Declare one state of a metric: how it merges, and its shape.

    A dimension is a number, or the name of the metric's attribute that holds it:

        matrix = State("sum", "classes", "classes")
    """

    operator: str
    shape: tuple[int | str, ...]

    def __init__(self, operator: str, *shape: int | str) -> None:
        """Check the operator; what merges as a whole has the shape of that whole."""
        if operator not in OPERATORS:
            mean = str(operator).lower() in ("avg", "average", "mean")
            why = " A mean is two sums, which `finish` divides." if mean else ""
            raise MetricError(
                f"operator={operator!r} of a state must be one of {', '.join(OPERATORS)}.{why}"
            )
        width = OPERATORS[operator].width
        object.__setattr__(self, "operator", operator)
        object.__setattr__(self, "shape", shape if width == 1 else (width,))

    def of(self, metric: Any) -> State:
        """Give the same with every dimension a number."""
        shape = [getattr(metric, d) if isinstance(d, str) else d for d in self.shape]
        return State(self.operator, *shape)


@dataclass(frozen=True, eq=False)
class Slot:
    """Where one state lies in the flat vector of its operator."""

    owner: str
    state: str
    operator: str
    shape: tuple[int, ...]
    size: int
    here: slice

    @property
    def name(self) -> str:
        """The name of the state among those of all metrics of a plan."""
        return f"{self.owner}/{self.state}" if self.owner else self.state


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every state of some metrics lies.

    `widths` says how many numbers merge by each operator that occurs, and `by_owner` has the slots of
    each metric by the name of the state.
    """

    slots: tuple[Slot, ...]
    widths: dict[str, int]
    by_owner: dict[str, dict[str, Slot]]

    @classmethod
    def of(cls, metrics: Mapping[str, Mapping[str, State]]) -> Plan:
        """Lay out the states of metrics by name.

        Single numbers come first, so that those of many metrics can be merged at once.
        """
        slots: list[Slot] = []
        ends = dict.fromkeys(OPERATORS, 0)
        # By name, so that ranks which made a collection in another order agree.
        flat = [(owner, *item) for owner in sorted(metrics) for item in metrics[owner].items()]
        for owner, name, state in sorted(flat, key=lambda one: one[2].shape != ()):
            shape: Any = state.shape  # numbers, by `State.of`
            start = ends[state.operator]
            ends[state.operator] += math.prod(shape)
            here = slice(start, ends[state.operator])
            slots.append(Slot(owner, name, state.operator, shape, math.prod(shape), here))
        by_owner: dict[str, dict[str, Slot]] = {owner: {} for owner in metrics}
        for slot in slots:
            by_owner[slot.owner][slot.state] = slot
        widths = {operator: width for operator, width in ends.items() if width}
        return cls(tuple(slots), widths, by_owner)


def check_contributions(
    metric: str, slots: Mapping[str, Slot], batch: Mapping[str, Any], kinds: tuple[Any, ...]
) -> None:
    """Refuse what cannot be merged, by what can be seen from outside; arrays are of `kinds`."""
    for state, value in batch.items():
        if state not in slots:
            raise MetricError(
                f"{metric}.batch gave a contribution to {state!r}, which is none of its states "
                f"{', '.join(slots)}."
            )
        slot = slots[state]
        if slot.operator == "last" or isinstance(value, tuple):  # a number in two parts
            continue
        if not isinstance(value, (int, float, *kinds)):
            raise MetricError(
                f"a batch contributed {value!r} to the state {slot.name!r}. `batch` must give a number "
                "or an array for each state."
            )
        shape = tuple(value.shape) if isinstance(value, kinds) else ()
        if math.prod(shape) != slot.size:
            raise MetricError(
                f"the state {slot.name!r} has the shape {slot.shape}, but a batch contributed one of "
                f"{shape}. `batch` must reduce it to the shape of the state."
            )
