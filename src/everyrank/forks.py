"""What a forked child must let go of: it has copies of locks, files and sockets, and no threads.

Whoever holds such things says so once with `let_go_in_child`, and is told in the child. Nothing is
registered at import, and nothing is kept alive by it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Holder(Protocol):
    """Something that holds what belongs to the parent."""

    def after_fork(self) -> None:
        """Let go of it; called in the child, before anything else runs there."""
        ...


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()
_watching = False


def let_go_in_child(holder: Holder) -> None:
    """Have `after_fork` called in every process that is forked from this one."""
    global _watching
    if not _watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_in_child)
        _watching = True
    _holders.add(holder)


def holds_nothing(holder: Holder) -> None:
    """Note that there is nothing left to let go of."""
    _holders.discard(holder)


def _in_child() -> None:
    for holder in list(_holders):
        # One that fails must not keep the next from letting go; an error here would only be printed.
        with contextlib.suppress(OSError):
            holder.after_fork()
