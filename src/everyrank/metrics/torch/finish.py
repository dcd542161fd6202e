"""From merged states to values: metrics that are alike all at once, and all values with one copy.

Twenty means are one division of two vectors. That goes for metrics of one class and equal options whose
states are single numbers and whose `finish` works number by number, which `of_number` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

    def values(self, flat: Flat) -> dict[str, Any]:
        """Give the value of every metric by its name."""
        values: dict[str, Any] = {}
        for group, found in self._finished(flat):
            values.update(zip(group.names, found.unbind(0), strict=True) if group else found)
        return {name: values[name] for name in self._metrics}

    def read(self, flat: Flat) -> dict[str, Any]:
        """Give the values on the host: what is finished together is only taken apart there."""
        whole: dict[Any, Any] = {}
        for i, (group, found) in enumerate(self._finished(flat)):
            whole.update({i: found} if group else found)
        read = on_host(whole)
        for i, group in enumerate(self._groups):
            read.update(zip(group.names, read.pop(i), strict=True))
        return {name: read[name] for name in self._metrics}

    def _finished(self, flat: Flat) -> Iterator[tuple[_Group | None, Any]]:
        """Give the values of each group as a vector, then the others by name."""
        for group in self._groups:
            yield group, self._metrics[group.names[0]].finish(**group.states(flat))
        one_by_one = self._single
        yield None, {n: finished(self._metrics[n], self._slots[n], flat) for n in one_by_one}


class _Group:
    """Metrics that are finished together."""

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        self.names = names
        slots = [plan.by_owner[name] for name in names]
        self._places = {
            state: (slot.operator, [each[state].here.start for each in slots])
            for state, slot in slots[0].items()
        }
        self._slices = {state: _regular(places) for state, (_, places) in self._places.items()}
        self._indices: dict[str, Tensor] = {}

    def states(self, flat: Flat) -> dict[str, Tensor]:
        """Give each state of all of them as a vector."""
        states = {}
        for state, (operator, places) in self._places.items():
            if (regular := self._slices[state]) is not None:
                states[state] = flat[operator][regular]
                continue
            vector, index = flat[operator], self._indices.get(state)
            if index is None or index.device != vector.device:
                index = torch.tensor(places).to(vector.device, non_blocking=True)
                self._indices[state] = index
            states[state] = vector.index_select(0, index)
        return states


def _regular(places: Sequence[int]) -> slice | None:
    """Give places as a slice, which takes no copy, if they are at equal distances."""
    step = places[1] - places[0]
    found = slice(places[0], places[-1] + 1, step)
    return found if step > 0 and list(range(found.stop)[found]) == list(places) else None


def _look(metric: DeclaredMetric) -> Any:
    """Give what metrics that are finished together have in common; None for those that are not."""
    if metric.of_number is None:
        return None
    args, kwargs = metric._made_of
    options = [*args, *kwargs.values()]
    # Others may look alike and differ, as two tensors do in their last digits.
    plain = all(isinstance(option, bool | int | float | str | None) for option in options)
    return (type(metric), repr(metric)) if plain else None


def on_host(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give values as numbers and lists of the host, those of one device with one copy."""
    found = dict(values)
    for name, value in values.items():
        if isinstance(value, tuple):
            entries = on_host(dict(enumerate(value))).values()
            make = getattr(value, "_make", tuple)  # a NamedTuple stays one
            found[name] = make(entries)
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    for device in {tensor.device for tensor in tensors.values()}:
        here = {name: tensor for name, tensor in tensors.items() if tensor.device == device}
        parts = [tensor.reshape(-1).double() for tensor in here.values()]
        flat = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist()
        for name, tensor in here.items():
            part, flat = flat[: tensor.numel()], flat[tensor.numel() :]
            exact = part if tensor.is_floating_point() else list(map(int, part))
            if tensor.ndim > 1:
                exact = np.reshape(np.array(exact, object), tensor.shape).tolist()
            found[name] = exact if tensor.ndim else exact[0]
    return found
