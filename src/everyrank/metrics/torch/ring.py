"""What the last few updates contributed, and what they are together; all of it on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everyrank.arrays.torch import ARRAYS
from everyrank.metrics.states import Slot
from everyrank.metrics.torch.numbers import Flat, identity_of
from everyrank.operators import OPERATORS


class Ring:
    """The contributions of the last `n` updates; the place of the next one is counted on the device."""

    def __init__(
        self, slots: Mapping[str, Slot], n: int, before: Flat, device: torch.device
    ) -> None:
        self._slots = slots
        self._n = n
        with torch.inference_mode(False):  # or that of an evaluation could not be written later
            self._cursor = torch.ones(1, dtype=torch.int64, device=device).remainder_(n)
            self._parts = {
                name: identity_of(slot.operator, n * slot.size, device).view(n, slot.size)
                for name, slot in slots.items()
            }
        for name, slot in slots.items():  # what there was counts as one update
            self._parts[name][0] = before[slot.operator][slot.here]

    def turn(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Replace the oldest contribution, and give what all of them are together."""
        together = {}
        for name, slot in self._slots.items():
            parts = self._parts[name]
            fresh = identity_of(slot.operator, slot.size, parts.device)
            if name in batch:
                fresh.copy_(ARRAYS.array(batch[name]).reshape(-1), non_blocking=True)
            parts.index_copy_(0, self._cursor, fresh[None])
            together[name] = _together(slot, parts)
        self._cursor.add_(1).remainder_(self._n)
        return together


def _together(slot: Slot, parts: Tensor) -> Tensor:
    """Merge by halves, so that a long ring takes few operations."""
    merge = OPERATORS[slot.operator].merge
    while len(parts) > 1:
        half = len(parts) // 2
        merged = merge(ARRAYS, parts[:half].reshape(-1), parts[half : 2 * half].reshape(-1))
        parts = torch.cat([merged.view(half, -1), parts[2 * half :]])
    return parts.view(slot.shape)
