"""Who we are by `jax.distributed`, and its key-value service as the place where ranks meet.

Nothing is dispatched to a device from here: JAX orders a program's collectives by the order of their
dispatch, and a metric's must not come between them.
"""

from __future__ import annotations

import sys
from typing import Any

from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import from_environment
from everyrank.ranks.store import Store


def _client() -> Any:
    distributed = sys.modules.get("jax._src.distributed")
    return None if distributed is None else distributed.global_state.client


def initialized() -> bool:
    """Say whether the program has initialised `jax.distributed`."""
    return _client() is not None


def identity() -> Identity:
    """Give who we are among the processes; needs no device, so that none is initialised for it."""
    state = sys.modules["jax._src.distributed"].global_state
    launched = from_environment() or Identity()
    return Identity(
        rank=state.process_id,
        world_size=state.num_processes,
        local_rank=launched.local_rank,
        local_world_size=launched.local_world_size,
        source="jax.distributed",
        job=launched.job,
    )


class JaxStore:
    """The key-value service that `jax.distributed` runs."""

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key."""
        _client().key_value_set(f"everyrank/{key}", note)

    def look(self, key: str) -> str | None:
        """Give the note if it is there."""
        found = dict(_client().key_value_dir_get(f"everyrank/{key}"))
        return next(iter(found.values()), None)


def store() -> Store:
    """Give the place where the processes of this program find each other."""
    return JaxStore()
