"""Who reduces with whom: the first of these that answers.

1. an initialised `torch.distributed` or `jax.distributed`,
2. the launcher's environment (torchrun, SLURM, Open MPI, PMI),
3. one process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

from everyrank.errors import OptionError
from everyrank.ranks import jax, torch
from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import from_environment
from everyrank.ranks.store import DirectoryStore, Store


@dataclass(frozen=True, slots=True)
class Peers:
    """Who we are, the ranks that we reduce with, and how we find them."""

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
    ranks = _members(group)
    strange = [rank for rank in ranks if not 0 <= rank < me.world_size]
    if strange:
        raise OptionError(
            f"group={group!r} names rank {strange[0]}, but the ranks are 0 to "
            f"{me.world_size - 1} by {me.source}. Pass ranks of the whole program."
        )
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
    me = from_environment()
    if me is None:
        return Identity(), None
    return me, lambda: _store(directory, me.job)


def _store(directory: Path | None, job: str) -> Store:
    # Ranks may be told different directories, or only the first one any; those of a host share one.
    places = [each / ".everyrank" for each in (directory, _shared_directory()) if each is not None]
    return DirectoryStore(*places, job=job)


def _members(group: Any) -> tuple[int, ...]:
    """Give the ranks that a group names, each once, in order."""
    ranks = torch.members(group)
    if ranks is None:
        if not isinstance(group, Sequence) or not all(isinstance(r, Integral) for r in group):
            raise OptionError(
                f"group={group!r} must be a ProcessGroup, a DeviceMesh or a sequence of ranks; "
                'with a DeviceMesh pass the part to reduce over, for example mesh=mesh["dp"].'
            )
        ranks = tuple(int(rank) for rank in group)
    return tuple(sorted(set(ranks)))


def _shared_directory() -> Path:
    """Give a directory that at least the ranks of this host share."""
    # By number: in a container, the user may have no name.
    return Path(tempfile.gettempdir()) / f"everyrank-{os.getuid()}"
