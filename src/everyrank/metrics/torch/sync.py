"""One sync of some metrics: what they have is packed, reduced over the ranks, and unpacked.

* **Count.** A sync is one all_reduce of the sums, and one more of the extremes if there are any,
  however many metrics there are. Over several dimensions of a mesh that is not the whole world, it is
  as many for each.
* **Start.** All are launched when the flight begins, and nothing waits for the last of them before
  `land`. (Of several dimensions, each needs what the one before has given.)
* **Group.** The collectives run on the group that was given, in the order of the program, like those
  of training: every rank of the group begins its flights in the same order.
* **Wholes.** What merges as a whole has a place for each rank in the vector of the sums, and is merged
  by every rank for itself.
* **NaN.** Extremes travel without NaN, with a flag beside each, since not every backend's maximum
  keeps it.
* **Failure.** What a broken collective raises becomes `SyncFailed` in `land`; `own` is still there.
* **Deadline.** That of the group: `land` waits as long as its backend does.
* **Alone.** Without torch.distributed, or in a group of one, nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.errors import OptionError, SyncFailed
from everyrank.metrics.torch.numbers import Flat, merged
from everyrank.operators import OPERATORS
from everyrank.ranks.torch import reachable


class Flight:
    """The numbers of a window on their way through the ranks."""

    def __init__(self, own: Flat, context: Any) -> None:
        self.own = own
        self.skip: set[str] = set()  # metrics whose window ended before another flight began
        self._packed: _Packed | None = None
        for group in groups_of(context):
            # Not in `land`, which is no collective: ranks look at their metrics when they like.
            self._packed = _Packed(own if self._packed is None else self._packed.land(), group)

    def land(self) -> Flat:
        """Wait for the ranks, and give what they have together."""
        if self._packed is None:
            return self.own
        try:
            return self._packed.land()
        except RuntimeError as error:
            raise SyncFailed(
                f"metrics could not be brought together: {str(error).strip() or repr(error)}. What "
                "this rank has is kept, and compute() gives it."
            ) from error


class _Packed:
    """Numbers as they travel over one group."""

    def __init__(self, flat: Flat, group: Any) -> None:
        self._flat = flat
        self._size = group.size()
        self._device = next(iter(flat.values())).device
        sums = [flat["sum"]] if "sum" in flat else []
        for whole in self._wholes().values():
            # A place for each rank: the sum of all is what each has put into its own.
            places = whole.new_zeros(self._size, whole.numel())
            places[dist.get_rank(group)] = whole
            sums.append(places.view(-1))
        extremes = [flat[o] if o == "max" else -flat[o] for o in ("max", "min") if o in flat]
        self._vectors: dict[str, Tensor] = {}
        if sums:
            self._vectors["sum"] = torch.cat(sums) if len(sums) > 1 else sums[0].clone()
        if extremes:
            high = torch.cat(extremes)
            nan = high.isnan()
            self._vectors["max"] = torch.cat([high.masked_fill(nan, -math.inf), nan.to(high.dtype)])
        self._works = [self._start(name, group) for name in self._vectors]

    def land(self) -> Flat:
        """Wait for the other ranks, and give what all have."""
        for work in self._works:
            work.wait()
        vectors = {name: vector.to(self._device) for name, vector in self._vectors.items()}
        if list(self._flat) == ["sum"]:  # nothing has to be taken apart
            return vectors
        flat: Flat = {}
        if "sum" in vectors:
            flat |= self._unpacked_sums(vectors["sum"])
        if "max" in vectors:
            high, nan = vectors["max"].chunk(2)
            high = high.masked_fill(nan > 0, math.nan)
            width = self._flat["max"].numel() if "max" in self._flat else 0
            flat["max"], flat["min"] = high[:width], -high[width:]
        return {operator: flat[operator] for operator in self._flat}

    def _start(self, name: str, group: Any) -> Any:
        vector = self._vectors[name]
        vector = self._vectors[name] = vector.to(reachable(group, vector.device))
        operator = dist.ReduceOp.SUM if name == "sum" else dist.ReduceOp.MAX
        return dist.all_reduce(vector, op=operator, group=group, async_op=True)

    def _unpacked_sums(self, sums: Tensor) -> Flat:
        flat: Flat = {}
        at = self._flat["sum"].numel() if "sum" in self._flat else 0
        flat["sum"] = sums[:at]
        for operator, whole in self._wholes().items():
            places = sums[at : at + self._size * whole.numel()].view(self._size, -1)
            at += places.numel()
            flat[operator] = places[0]
            for place in places[1:]:  # in the order of the ranks
                flat |= merged({operator: flat[operator]}, {operator: place})
        return flat

    def _wholes(self) -> Flat:
        return {o: vector for o, vector in self._flat.items() if OPERATORS[o].width > 1}


def groups_of(context: Any) -> Sequence[Any]:
    """Give the process groups that a context stands for, one after the other."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if context is None:
        return _larger([dist.group.WORLD])
    if context is dist.GroupMember.NON_GROUP_MEMBER:  # as torch's own collectives take it
        return []
    mesh: Any = context
    dims: Any = None
    if isinstance(context, tuple) and len(context) == 2:
        mesh, dims = context
    if hasattr(mesh, "get_group") and hasattr(mesh, "mesh_dim_names"):
        mesh = mesh if dims is None else mesh[dims]
        if mesh.size() == dist.get_world_size():
            return _larger([dist.group.WORLD])
        return _larger([mesh.get_group(i) for i in range(mesh.ndim)])
    if isinstance(context, dist.ProcessGroup):
        return _larger([context])
    raise OptionError(
        f"context={context!r} must be a ProcessGroup, a DeviceMesh slice such as mesh['dp'], a pair "
        "(mesh, 'dp'), or None for all ranks."
    )


def _larger(groups: Sequence[Any]) -> Sequence[Any]:
    """Leave out groups of one, over which there is nothing to reduce."""
    return [group for group in groups if group.size() > 1]
