"""Ranks over host memory: a star of sockets that no collective of training can feel.

The first rank (`Hub`) listens, leaves its address and a token in the store, and brings the streams
together; every other rank (`Spoke`) connects, sends its rows and is sent what was reduced. For a
window that is one message each way and rank, whatever the number of metrics and steps in it.

Why not a process group of gloo: every rank would have to create it and enter each of its collectives
at the same time and with the same shapes, one that dies breaks the group for all, and a rank that
logs nothing hangs the others. Messages ask none of that. What arrives late or not at all is settled
in `align`, by rules, with deadlines. See `benchmarks/` for what both cost.

Everything here runs on the History's background thread and nothing blocks it; only `close` does, for
a second at most, so that last words are read. What has to wait for a store or a name server has a
thread of its own (see `meeting`).
"""

from __future__ import annotations

import hashlib
import selectors
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from everyrank.ranks import Peers
from everyrank.ranks.hub import Hub
from everyrank.ranks.meeting import Meeting
from everyrank.ranks.spoke import Spoke

#: How often Histories of one name were opened in this process, so that the n-th meets the n-th.
_opened: Counter[str] = Counter()

#: The lines of the program that opened one.
_sites: set[str] = set()


def host_ranks(
    peers: Peers,
    *,
    name: str,
    place: Mapping[str, str] | None = None,
    stats: Sequence[str],
    timeout: float,
    facts: Mapping[str, Any],
    selector: selectors.BaseSelector,
) -> Hub | Spoke:
    """Open this rank's end of the star; what is known of a History tells it from others.

    `place` is where it is kept, as far as this rank was told: ranks that were told the same belong
    together, and ranks that were told otherwise do not. Else `name` tells, the line that opens it,
    as in `train.py:main:12`. Ranks that open it on different lines of one function, each in a branch
    of its own, meet a little later (see `meeting.Meeting`).
    """
    _sites.add(name)
    place = place or {}
    told = [f"{key}={place[key]}" for key in ("outdir", "jsonl_path", "run_id") if key in place]
    where = ["/".join(map(str, _counted(one, peers))) for one in told]
    around, n = _counted(name.rpartition(":")[0], peers)
    line, nth = _counted(name, peers)
    return (Hub if peers.identity.rank == peers.first else Spoke)(
        peers,
        meeting=Meeting(
            keys=(*where, f"{line}/{nth}"),
            aside=f"{around}/{n}",
            after_aside=f"{around}/{n + 1}",
            site=name,
            sites=_sites,
            place=place,
        ),
        stats=stats,
        timeout=timeout,
        facts=facts,
        selector=selector,
    )


def _counted(name: str, peers: Peers) -> tuple[str, int]:
    """Give a name as a key, and how often it was used in this process by now."""
    # A digest, since thousands of ranks would make a key of kilobytes for each of them to ask for.
    key = hashlib.sha256(repr((name, peers.ranks)).encode()).hexdigest()[:32]
    _opened[key] += 1
    return key, _opened[key]
