"""Take in single numbers for many metrics at once: one kernel to collect them, one to merge.

Twenty losses into twenty means would be twenty calls of `batch` and forty small kernels. But what a
number contributes to a mean is known: itself, and a one. So numbers and constants are stacked in the
order in which the states lie, and added up in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from everyrank.metrics.states import Plan, Slot
from everyrank.metrics.torch.numbers import Numbers
from everyrank.operators import OPERATORS

_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")

#: For each metric, what a number contributes to each state: a constant, or None for the number.
Contributions = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class _Group:
    """Numbers of one dtype, which are stacked as they are: converted, they might be rounded."""

    constants: tuple[Tensor, ...]
    picks: itemgetter[Any]  # of the numbers and the constants, in the order of the states
    operators: tuple[str, ...]  # by which the parts of the stack merge
    sizes: list[int]  # of the parts


class Fused:
    """How numbers that look like these are taken in, worked out once."""

    def __init__(
        self, plan: Plan, contributions: Contributions, metrics: Mapping[str, Any]
    ) -> None:
        values = list(metrics.values())
        self._names = tuple(metrics)
        self._dtypes = list(map(_DTYPE, values))
        self._device = values[0].device
        self._groups = [
            self._group(plan, contributions, dtype) for dtype in dict.fromkeys(self._dtypes)
        ]

    def fits(self, metrics: Mapping[str, Any]) -> bool:
        """Say whether numbers look like those that this was worked out for."""
        if tuple(metrics) != self._names or not are_numbers(metrics.values()):
            return False
        values = metrics.values()
        return list(map(_DTYPE, values)) == self._dtypes and {*map(_DEVICE, values)} == {
            self._device
        }

    def merge(self, numbers: Numbers, values: Sequence[Tensor]) -> None:
        """Take them in."""
        for group in self._groups:
            stack = torch.stack(group.picks((*values, *group.constants)))
            parts = stack.split(group.sizes) if len(group.sizes) > 1 else (stack,)
            for operator, part in zip(group.operators, parts, strict=True):
                numbers.merge_leading(operator, part)

    def _group(self, plan: Plan, contributions: Contributions, dtype: torch.dtype) -> _Group:
        at = {name: i for i, name in enumerate(self._names) if self._dtypes[i] == dtype}
        constants: dict[float, int] = {}
        picks: list[int] = []
        merges = []
        for operator in OPERATORS:
            slots = [s for s in plan.slots if s.operator == operator and s.shape == ()]
            if not any(slot.owner in at for slot in slots):
                continue
            merges.append((operator, len(slots)))
            for slot in slots:
                constant = _constant(slot, contributions, at)
                if constant is None:
                    picks.append(at[slot.owner])
                else:
                    place = constants.setdefault(constant, len(constants))
                    picks.append(len(self._names) + place)
        # Beside integers they are float64, which the stack then is: no identity is an integer.
        own = dtype if dtype.is_floating_point else torch.float64
        tensors = [torch.full((), c, dtype=own, device=self._device) for c in constants]
        operators, sizes = zip(*merges, strict=True)
        return _Group(tuple(tensors), itemgetter(*picks), operators, list(sizes))


def _constant(slot: Slot, contributions: Contributions, at: Mapping[str, int]) -> float | None:
    """Give what a state gets whatever the number is; None if it gets the number."""
    if slot.owner in at:
        return contributions[slot.owner][slot.state]
    return OPERATORS[slot.operator].identity[0]  # a metric that gets none this time


def are_numbers(values: Any) -> bool:
    """Say whether all are tensors without dimensions."""
    return all(type(value) is Tensor and value.ndim == 0 for value in values)
