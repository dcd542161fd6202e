"""The numbers of some metrics on one device: one flat vector for each operator.

* **Address.** The open numbers stay where they are for good, so that a captured CUDA graph or a
  compiled step goes on writing to the right place. What leaves is a copy.
* **Exact.** They are float64: counts are exact to 2^53. On a device without float64 a sum is kept as
  two float32, the second of which holds what the first has lost; what leaves is float64 on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everyrank.arrays.torch import ARRAYS, wide_dtype
from everyrank.metrics.states import Plan, Slot, check_contributions
from everyrank.operators import OPERATORS

#: A vector of float64 for each operator of a plan.
Flat = dict[str, Tensor]


def identity(plan: Plan, device: torch.device) -> Flat:
    """Give the numbers of metrics that have seen nothing."""
    return {o: _identity(o, width, torch.float64, device) for o, width in plan.widths.items()}


def identity_of(operator: str, width: int, device: torch.device) -> Tensor:
    """Give numbers that change nothing when they are merged, as wide as the device has them."""
    return _identity(operator, width, wide_dtype(device.type), device)


def _identity(operator: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _filled(operator, torch.empty(width, dtype=dtype, device=device))


def _filled(operator: str, vector: Tensor) -> Tensor:
    """Fill a vector with what changes nothing; by kernels, since a copy from here would wait."""
    numbers = OPERATORS[operator].identity
    if len(set(numbers)) == 1:
        return vector.fill_(numbers[0])
    for i, number in enumerate(numbers):
        vector[i :: len(numbers)].fill_(number)
    return vector


def merged(a: Flat, b: Flat) -> Flat:
    """Merge two, the second of which came later; both stay as they are."""
    return {operator: OPERATORS[operator].merge(ARRAYS, a[operator], b[operator]) for operator in a}


def moved(flat: Flat, device: torch.device) -> Flat:
    """Give the same on a device."""
    return {o: v if v.device == device else v.to(device) for o, v in flat.items()}


def with_slots(flat: Flat, slots: Mapping[str, Slot], source: Flat) -> Flat:
    """Give the numbers with some slots as they are in `source`; a copy, if there are any."""
    if not slots:
        return flat
    flat = {operator: vector.clone() for operator, vector in flat.items()}
    for slot in slots.values():
        flat[slot.operator][slot.here] = source[slot.operator][slot.here]
    return flat


class Numbers:
    """The open numbers, which batches are merged into."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.device = device
        self._plan = plan
        wide = wide_dtype(device.type)
        with torch.inference_mode(False):  # or those of an evaluation could not be written later
            self._flat = {o: identity_of(o, width, device) for o, width in plan.widths.items()}
            self._rest: Tensor | None = None  # what the sums have lost, where they may lose
            if wide is not torch.float64 and "sum" in plan.widths:
                self._rest = torch.zeros_like(self._flat["sum"])
            # The order of the last value, which goes on whatever becomes of the window.
            self._ticks = torch.zeros(plan.widths.get("last", 0) // 2, dtype=wide, device=device)
        self._leading: dict[tuple[str, int], Tensor] = {}
        self._see()

    def _see(self) -> None:
        plan = self._plan
        self._views = {
            owner: {
                name: self._flat[slot.operator][slot.here].view(slot.shape)
                for name, slot in slots.items()
            }
            for owner, slots in plan.by_owner.items()
        }

    def check(self, metric: str, slots: Mapping[str, Slot], batch: Mapping[str, Any]) -> None:
        """Refuse what cannot be merged, before any of it is."""
        check_contributions(metric, slots, batch, (Tensor,))

    def merge(self, slot: Slot, value: Any) -> None:
        """Merge what a batch contributes to one state."""
        if slot.operator == "last":
            self._merge_last(slot, *value)
            return
        if isinstance(value, Tensor) and value.shape != slot.shape:
            value = value.reshape(slot.shape)
        view = self._view(slot)
        if slot.operator != "sum":
            merge = OPERATORS[slot.operator].merge
            view.copy_(merge(ARRAYS, view, self._here(value)))
        elif self._rest is not None:
            self._merge_pair(slot.here, value)
        else:
            view.add_(value)

    def merge_leading(self, operator: str, vector: Tensor) -> None:
        """Merge contributions to the first numbers of an operator, which are single ones, at once."""
        flat = self._leading.get((operator, vector.numel()))
        if flat is None:
            flat = self._flat[operator][: vector.numel()]
            self._leading[operator, vector.numel()] = flat
        if operator == "sum" and self._rest is not None:
            self._merge_pair(slice(vector.numel()), vector)
        elif operator == "sum":
            flat.add_(vector)
        else:
            choose = torch.maximum if operator == "max" else torch.minimum
            choose(flat, vector, out=flat)

    def come_after(self, flat: Flat) -> None:
        """Let values without an order of their own come after these."""
        if "last" in flat:
            orders = flat["last"][::2].to(self._ticks, non_blocking=True)
            torch.maximum(self._ticks, orders, out=self._ticks)

    def __getstate__(self) -> dict[str, Any]:
        return {n: value for n, value in vars(self).items() if n not in ("_views", "_leading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._leading = {}
        self._see()  # parts of the vectors, which a pickle would have made tensors of their own

    def put(self, slot: Slot, value: Tensor) -> None:
        """Replace one state."""
        self._view(slot).copy_(value)
        if self._rest is not None and slot.operator == "sum":
            self._rest[slot.here] = 0.0

    def fade(self, slot: Slot, share: float) -> None:
        """Leave a share of one sum."""
        self._view(slot).mul_(share)
        if self._rest is not None:
            self._rest[slot.here] *= share

    def clear(self, owner: str) -> None:
        """Empty the states of one metric."""
        for name, slot in self._plan.by_owner[owner].items():
            _filled(slot.operator, self._views[owner][name])
            if self._rest is not None and slot.operator == "sum":
                self._rest[slot.here] = 0.0

    def there(self) -> Flat:
        """Give the numbers themselves in float64, or a copy where they are not."""
        return self._flat if wide_dtype(self.device.type) is torch.float64 else self.copy()

    def copy(self) -> Flat:
        """Give a copy in float64, on the device, or on the host if the device has no such numbers."""
        if wide_dtype(self.device.type) is torch.float64:
            return {operator: vector.clone() for operator, vector in self._flat.items()}
        host = {o: vector.cpu().to(torch.float64) for o, vector in self._flat.items()}
        if self._rest is not None:
            host["sum"] += self._rest.cpu()
        return host

    def fill(self, flat: Flat | None = None) -> None:
        """Hold these numbers from now on; none of them means those of metrics that saw nothing."""
        for operator, vector in self._flat.items():
            if flat is None:
                _filled(operator, vector)
            else:
                vector.copy_(flat[operator], non_blocking=True)
        if flat is not None:
            self.come_after(flat)
        if self._rest is not None and flat is None:
            self._rest.zero_()
        elif self._rest is not None and flat is not None:
            exact = flat["sum"].cpu()
            self._rest.copy_(exact - exact.to(torch.float32))

    def _here(self, value: Any) -> Tensor:
        """Give a contribution as wide floats where the numbers are, without waiting for a device."""
        if not isinstance(value, Tensor):
            return torch.full((), value, dtype=wide_dtype(self.device.type), device=self.device)
        return value.to(self.device, wide_dtype(self.device.type), non_blocking=True)

    def _view(self, slot: Slot) -> Tensor:
        if torch.compiler.is_compiling():  # where parts of one tensor are better not handed in
            return self._flat[slot.operator][slot.here].view(slot.shape)
        return self._views[slot.owner][slot.state]

    def _merge_pair(self, here: slice, value: Any) -> None:
        """Add to sums that are kept in two parts, so that nothing is lost (Knuth's two-sum)."""
        assert self._rest is not None
        high, rest = self._flat["sum"][here], self._rest[here]
        if isinstance(value, Tensor):
            value = value.reshape(-1).to(high.dtype)
        total = high + value
        part = total - high
        lost = rest + ((high - (total - part)) + (value - part))
        lost = torch.where(total.isfinite(), lost, 0.0)  # what is not finite has no rest
        # What has gathered in the rest moves up, or it would reach the end of its own digits.
        high.copy_(total + lost)
        rest.copy_(torch.where(high.isfinite(), lost - (high - total), 0.0))

    def _merge_last(self, slot: Slot, order: Any, value: Any) -> None:
        view = self._view(slot)
        tick = self._ticks[slot.here.start // 2]
        if order is None:  # after all others: it need not be compared
            tick.add_(1.0)
            view[0].copy_(tick)
            view[1].copy_(self._here(value))
            return
        new = [self._here(order), self._here(value)]
        tick.copy_(torch.maximum(tick, new[0]))
        later = new[0] >= view[0]
        view.copy_(torch.where(later, torch.stack(new), view))
