"""Who we are by `torch.distributed`, and its store as the place where ranks find each other.

Only the store is used: a metric's traffic shares no communicator with training, makes no process
group, and so asks no rank to do anything at the same moment as another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from everyrank.errors import OptionError
from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import from_environment
from everyrank.ranks.store import Store


def initialized() -> bool:
    """Say whether the program has initialised `torch.distributed`."""
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def identity() -> Identity:
    """Give who we are in the default group; the launcher knows which rank we are on this host."""
    import torch.distributed as dist

    launched = from_environment() or Identity()
    return Identity(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=launched.local_rank,
        local_world_size=launched.local_world_size,
        source="torch.distributed",
        job=launched.job,
    )


def members(group: Any) -> tuple[int, ...]:
    """Give the global ranks of a ProcessGroup, a DeviceMesh (or a slice of one), or a sequence."""
    import torch.distributed as dist

    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    if hasattr(group, "mesh") and hasattr(group, "mesh_dim_names"):
        # The slice of the mesh that holds this rank: `mesh["dp"]` has one row for each group.
        return tuple(sorted(int(r) for r in group.mesh.flatten().tolist()))
    if isinstance(group, Sequence) and all(isinstance(r, int) for r in group):
        return tuple(sorted(group))
    raise OptionError(
        f"group={group!r} must be a ProcessGroup, a DeviceMesh or a sequence of ranks; "
        'with a DeviceMesh pass the part to reduce over, for example mesh=mesh["dp"].'
    )


class TorchStore:
    """The default store of `torch.distributed`, used without ever waiting in it.

    A blocking `get` would hold the store's connection, and with it training's own barriers, so we
    ask first whether the note is there.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store: Any = dist.PrefixStore("everyrank", dist.distributed_c10d._get_default_store())

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key."""
        self._store.set(key, note)

    def look(self, key: str) -> str | None:
        """Give the note if it is there."""
        if not self._store.check([key]):
            return None
        return str(self._store.get(key).decode())


def store() -> Store:
    """Give the place where the ranks of this program find each other."""
    return TorchStore()
