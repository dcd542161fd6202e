"""What both ends of the star have in common."""

from __future__ import annotations

import contextlib
import json
import selectors
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from everyrank.ranks import Peers
from everyrank.ranks.align import GRACE
from everyrank.ranks.base import Identity
from everyrank.ranks.join import OwnRows
from everyrank.ranks.meeting import Meeting
from everyrank.ranks.wire import Channel
from everyrank.records import Batch

_NAMED = 8  # so many ranks are named in a message, and the others counted


class End:
    """One rank's end of the star; `Hub` and `Spoke` say what becomes of its rows."""

    def __init__(
        self,
        peers: Peers,
        *,
        meeting: Meeting,
        stats: Sequence[str],
        timeout: float,
        facts: Mapping[str, Any],
        selector: selectors.BaseSelector,
    ) -> None:
        assert peers.store is not None
        self.identity: Identity = peers.identity
        self.facts: dict[str, Any] | None = None
        self._peers = peers
        self._meeting = meeting
        self._stats = tuple(stats)
        self._timeout = timeout
        self._patience = min(GRACE, timeout)  # with ranks that have opened no History
        # As the others will see them: plain data.
        self._own_facts: dict[str, Any] = json.loads(json.dumps(dict(facts), default=str))
        self._selector = selector
        # Now, since it is the store of the process group that the program has now.
        self._store = peers.store()
        self._own = OwnRows(peers.identity.rank)
        self._weights: dict[str, str] = {}
        self._flush_asked = False
        self._left = False
        self._closed = False

    @property
    def unfinished(self) -> int:
        """How many rows were started here and are not finished."""
        return self._own.waiting

    def declare_weight(self, name: str, weight: str) -> None:
        """Weigh the means of `name`; the first rank's word counts."""
        self._weights[name] = weight

    def flush_requested(self) -> bool:
        """Say, once, whether another rank asked us to hand over what we have."""
        asked, self._flush_asked = self._flush_asked, False
        return asked

    def _watch(self, channel: Channel, heard: Callable[[], object] | None = None) -> None:
        """Be woken by a channel; `heard` is for whoever looks at what the selector names."""
        self._selector.register(channel.sock, selectors.EVENT_READ, heard)

    def _push(self, channel: Channel) -> None:
        """Send what the socket takes now, and be woken when it takes the rest."""
        channel.push()
        with contextlib.suppress(KeyError, RuntimeError):  # not watched, or nobody watches any more
            key = self._selector.get_key(channel.sock)
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog else 0)
            if key.events != wanted:
                self._selector.modify(channel.sock, wanted, key.data)

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.sock)

    def _drop(self, channel: Channel) -> None:
        self._forget(channel)
        channel.close()

    def _alone(self) -> list[Batch]:
        """Finish what waits with statistics over this rank only."""
        own = self._own.answer_alone(
            stats=self._stats, weights=self._weights, world_size=len(self._peers.ranks)
        )
        return list(own)


def named(ranks: Collection[int], hosts: Mapping[int, str]) -> str:
    """Name some ranks with their hosts, as in `ranks 1 (node7), 2 and 997 more`."""
    first = sorted(ranks)[:_NAMED]
    names = ", ".join(f"{rank} ({hosts[rank]})" if rank in hosts else str(rank) for rank in first)
    more = len(ranks) - len(first)
    return f"rank{'s' * (len(ranks) > 1)} {names}" + (f" and {more} more" if more else "")
