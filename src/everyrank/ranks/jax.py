"""Who we are by `jax.distributed`, and its key-value service as the place where ranks meet.

Nothing is dispatched to a device from here: JAX orders a program's collectives by the order of their
dispatch, and a metric's must not come between them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import as_told_by
from everyrank.ranks.store import Store


def _state() -> Any:
    """Give what JAX knows of its processes; to import its module would import all of JAX."""
    return getattr(sys.modules.get("jax._src.distributed"), "global_state", None)


def initialized() -> bool:
    """Say whether the program has initialised `jax.distributed`."""
    return getattr(_state(), "client", None) is not None


def identity() -> Identity:
    """Give who we are among the processes; needs no device, so that none is initialised for it."""
    state = _state()
    return as_told_by("jax.distributed", state.process_id, state.num_processes)


class JaxStore:
    """The key-value service that `jax.distributed` runs.

    A key is set once and for all, and a look at one that is not there may wait for it; so a key is
    a directory here, of which a look lists what there is, and the newest entry is the note.
    """

    def __init__(self) -> None:
        self._client = _state().client

    def __str__(self) -> str:
        return "the key-value service of jax.distributed"

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key."""
        self._client.key_value_set(f"everyrank/{key}/{time.time_ns():020d}", note)

    def look(self, key: str) -> str | None:
        """Give the note if it is there."""
        entries: list[tuple[str, str]] = self._client.key_value_dir_get(f"everyrank/{key}/")
        return max(entries)[1] if entries else None


def store() -> Store:
    """Give the place where the processes of this program find each other."""
    return JaxStore()
