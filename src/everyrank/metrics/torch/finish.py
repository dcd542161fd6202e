"""From merged states to values: metrics that are alike all at once, and all values with one copy.

Twenty means are one division of two vectors. That goes for metrics of one class and equal options whose
states are single numbers and whose `finish` works number by number, which `of_number` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everyrank.metrics.states import Plan, Slot
from everyrank.metrics.torch.numbers import Flat

if TYPE_CHECKING:
    from everyrank.metrics.declared import DeclaredMetric


def finished(metric: DeclaredMetric, slots: Mapping[str, Slot], flat: Flat) -> Any:
    """Give the value of one metric."""
    return metric.finish(
        **{name: flat[slot.operator][slot.here].view(slot.shape) for name, slot in slots.items()}
    )


class Finish:
    """How all metrics of a plan are finished, worked out once."""

    def __init__(self, plan: Plan, metrics: Mapping[str, DeclaredMetric]) -> None:
        self._slots = plan.by_owner
        self._metrics = metrics
        alike: dict[Any, list[str]] = {}
        for name, metric in metrics.items():
            alike.setdefault(_look(metric) or name, []).append(name)
        self._groups = [_Group(plan, names) for names in alike.values() if len(names) > 1]
        grouped = {name for group in self._groups for name in group.names}
        self._single = [name for name in metrics if name not in grouped]

    def __call__(self, flat: Flat) -> dict[str, Any]:
        """Give the value of every metric by its name."""
        values: dict[str, Any] = {}
        for group in self._groups:
            states = group.states(flat)
            value = self._metrics[group.names[0]].finish(**states)
            values.update(zip(group.names, value.unbind(0), strict=True))
        for name in self._single:
            values[name] = finished(self._metrics[name], self._slots[name], flat)
        return values


class _Group:
    """Metrics that are finished together."""

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self.names = names
        slots = [plan.by_owner[name] for name in names]
        self._places = {
            state: (slot.operator, [each[state].here.start for each in slots])
            for state, slot in slots[0].items()
        }
        self._indices: dict[str, Tensor] = {}

    def states(self, flat: Flat) -> dict[str, Tensor]:
        """Give each state of all of them as a vector."""
        states = {}
        for state, (operator, places) in self._places.items():
            vector, index = flat[operator], self._indices.get(state)
            if index is None or index.device != vector.device:
                index = torch.tensor(places).to(vector.device, non_blocking=True)
                self._indices[state] = index
            states[state] = vector.index_select(0, index)
        return states


def _look(metric: DeclaredMetric) -> Any:
    """Give what metrics that are finished together have in common; None for those that are not."""
    if metric.of_number is None:
        return None
    args, kwargs = metric._made_of
    options = [*args, *kwargs.values()]
    # Others may look alike and differ, as two tensors do in their last digits.
    plain = all(isinstance(option, bool | int | float | str | None) for option in options)
    return (type(metric), repr(metric)) if plain else None


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give values as numbers and lists of the host, those of one device with one copy."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple):
            parts = on_host({str(i): part for i, part in enumerate(value)}).values()
            make = getattr(value, "_make", tuple)  # a NamedTuple stays one
            found[name] = make(parts)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        flat = torch.cat([tensor.reshape(-1).double() for tensor in here.values()]).tolist()
        for name, tensor in here.items():
            part, flat = flat[: tensor.numel()], flat[tensor.numel() :]
            exact = part if tensor.is_floating_point() else list(map(int, part))
            found[name] = np.reshape(np.array(exact, object), tensor.shape).tolist()
    return found
