"""Who reduces with whom: the first of these that answers.

1. an initialised `torch.distributed` or `jax.distributed`,
2. the launcher's environment (torchrun, SLURM, Open MPI, PMI),
3. one process.
"""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everyrank.errors import OptionError
from everyrank.ranks import jax, torch
from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import from_environment
from everyrank.ranks.store import DirectoryStore, Store


@dataclass(frozen=True, slots=True)
class Peers:
    """This process, the ranks that it reduces with, and how it finds them."""

    identity: Identity = field(default_factory=Identity)
    ranks: tuple[int, ...] = (0,)
    store: Callable[[], Store] | None = None

    @property
    def first(self) -> int:
        """The rank that brings the others' numbers together, and writes."""
        return self.ranks[0]


def discover(*, group: Any = None, directory: Path | None = None) -> Peers:
    """Say who we are and with whom we reduce; `group` restricts it to some of the ranks."""
    me, store = _identity(directory)
    if group is None:
        return Peers(me, tuple(range(me.world_size)), store)
    ranks = torch.members(group)
    if me.rank not in ranks:
        raise OptionError(
            f"group={group!r} holds the ranks {list(ranks)}, and this is rank {me.rank}. "
            "Create the History on the ranks of the group only, or pass the group of this rank."
        )
    return Peers(me, ranks, store)


def _identity(directory: Path | None) -> tuple[Identity, Callable[[], Store] | None]:
    for framework in (torch, jax):
        if framework.initialized():
            return framework.identity(), framework.store
    launched = from_environment()
    if launched is None:
        return Identity(), None
    return launched, lambda: DirectoryStore((directory or _shared_directory()) / ".everyrank")


def _shared_directory() -> Path:
    """Give a directory that at least the ranks of this host share."""
    return Path(tempfile.gettempdir()) / f"everyrank-{getpass.getuser()}"
