"""Who we are by `torch.distributed`, and its store as the place where ranks find each other.

Only the store is used: a metric's traffic shares no communicator with training, makes no process
group, and so asks no rank to do anything at the same moment as another.
"""

from __future__ import annotations

import sys
from typing import Any

from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import as_told_by
from everyrank.ranks.store import Store

#: The device on which a backend's collectives run; every other one works on host memory.
_DEVICES = {"nccl": "cuda", "xccl": "xpu", "hccl": "npu"}


def _dist() -> Any | None:
    """Give `torch.distributed` if the program has imported it, and this torch can do it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def initialized() -> bool:
    """Say whether the program has initialised `torch.distributed`."""
    dist = _dist()
    return dist is not None and bool(dist.is_initialized())


def identity() -> Identity:
    """Give who we are in the default group; the launcher knows which rank we are on this host."""
    import torch.distributed as dist

    return as_told_by("torch.distributed", dist.get_rank(), dist.get_world_size())


def members(group: Any) -> tuple[int, ...] | None:
    """Give the global ranks of a ProcessGroup or of a DeviceMesh (or a slice of one), else None.

    The ProcessGroup that `new_group` gives to ranks outside it has no members.
    """
    dist = _dist()
    if dist is None:
        return None
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ()
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    if hasattr(group, "mesh") and hasattr(group, "mesh_dim_names"):
        # The slice of the mesh that holds this rank: `mesh["dp"]` has one row for each group.
        return tuple(int(rank) for rank in group.mesh.flatten().tolist())
    return None


def device_of(group: Any) -> Any:
    """Give the device on which a group's collectives run."""
    import torch
    import torch.distributed as dist

    backend = str(dist.get_backend(group))
    kind = next((kind for name, kind in _DEVICES.items() if name in backend), "cpu")
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind)


def reachable(group: Any, device: Any) -> Any:
    """Give a device if a group's collectives reach it, else the one on which they run."""
    kinds = {each.type for each in getattr(group, "_device_types", ())}
    return device if device.type in kinds else device_of(group)


class TorchStore:
    """The default store of `torch.distributed`, used without ever waiting in it.

    A blocking `get` would hold the store's connection, and with it training's own barriers, so we
    ask first whether the note is there.
    """

    def __init__(self) -> None:
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed.distributed_c10d import _get_default_store

        self._store = PrefixStore("everyrank", _get_default_store())

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key."""
        self._store.set(key, note)

    def look(self, key: str) -> str | None:
        """Give the note if it is there."""
        if not self._store.check([key]):
            return None
        return self._store.get(key).decode()


def store() -> Store:
    """Give the place where the ranks of this program find each other."""
    return TorchStore()
