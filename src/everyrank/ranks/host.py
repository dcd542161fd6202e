"""Ranks over host memory: a star of sockets that no collective of training can feel.

The first rank (`Hub`) listens, leaves its address and a token in the store, and brings the streams
together; every other rank (`Spoke`) connects, sends its rows and is sent what was reduced. For a
window that is one message each way and rank, whatever the number of metrics and steps in it.

Why not a process group of gloo: every rank would have to create it and enter each of its collectives
at the same time and with the same shapes, one that dies breaks the group for all, and a rank that
logs nothing hangs the others. Messages ask none of that. What arrives late or not at all is settled
in `align`, by rules, with deadlines. See `benchmarks/` for what both cost.

Everything here runs on the History's background thread, and nothing in here blocks it for longer
than one attempt to connect (a second).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from everyrank.ranks import Peers
from everyrank.ranks.align import GRACE, Alignment, Event
from everyrank.ranks.base import Identity, Reduced
from everyrank.ranks.join import OwnRows
from everyrank.ranks.store import Store
from everyrank.ranks.wire import Channel, Kind
from everyrank.records import Batch

log = logging.getLogger("everyrank")

#: A spoke that takes in nothing for so many bytes is gone; nobody holds rows for it without bound.
_BACKLOG = 256 << 20

#: How often Histories of one name were opened in this process, so that the n-th meets the n-th.
_opened: Counter[str] = Counter()


def host_ranks(
    peers: Peers,
    *,
    name: str,
    stats: Sequence[str],
    timeout: float,
    facts: Mapping[str, Any],
    selector: selectors.BaseSelector,
) -> Hub | Spoke:
    """Open this rank's end of the star; `name` tells one History of the program from another."""
    scope = f"{peers.identity.job}/{name}/{','.join(map(str, peers.ranks))}"
    key = f"{scope}/{_opened[scope]}"
    _opened[scope] += 1
    end = Hub if peers.identity.rank == peers.first else Spoke
    return end(peers, key=key, stats=stats, timeout=timeout, facts=facts, selector=selector)


class _End:
    """What both ends have in common."""

    def __init__(
        self,
        peers: Peers,
        *,
        key: str,
        stats: Sequence[str],
        timeout: float,
        facts: Mapping[str, Any],
        selector: selectors.BaseSelector,
    ) -> None:
        self.identity: Identity = peers.identity
        self.facts: dict[str, Any] | None = None
        self._peers = peers
        self._key = key
        self._stats = tuple(stats)
        self._timeout = timeout
        self._own_facts = dict(facts)
        self._selector = selector
        self._store: Store | None = None
        self._own = OwnRows()
        self._weights: dict[str, str] = {}
        self._flush_asked = False
        self._left = False

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

    def _open_store(self) -> Store:
        if self._store is None:
            assert self._peers.store is not None
            self._store = self._peers.store()
        return self._store

    def _watch(self, channel: Channel) -> None:
        self._selector.register(channel.sock, selectors.EVENT_READ)

    def _drop(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.sock)
        channel.close()

    def _alone(self) -> list[Batch]:
        """Finish what waits with statistics over this rank only."""
        return list(
            self._own.answer_alone(
                self.identity.rank,
                stats=self._stats,
                weights=self._weights,
                world_size=len(self._peers.ranks),
            )
        )


class Hub(_End):
    """The first rank: listens, aligns, reduces, tells everybody."""

    def __init__(self, peers: Peers, **options: Any) -> None:
        super().__init__(peers, **options)
        self.facts = self._own_facts
        self._align = Alignment(peers.ranks, stats=self._stats, timeout=self._timeout)
        self._align.join(self.identity.rank)
        self._align.weights = self._weights
        self._token = secrets.token_hex(16)
        self._listener: socket.socket | None = None
        self._strangers: list[Channel] = []  # connected, but not known yet
        self._spokes: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {self.identity.rank: self.identity.host}
        self._last_sign = 0.0

    @property
    def wait(self) -> float | None:
        """Give the seconds until somebody's patience ends."""
        if any(c.backlog for c in self._spokes.values()):
            return 0.002
        ends = self._align.deadline(time.monotonic())
        return None if ends is None else min(ends + 0.001, self._timeout / 4)

    def start(self, batch: Batch) -> None:
        """Hand over some steps."""
        self._own.add(batch)
        self._align.add(self.identity.rank, batch, time.monotonic())

    def poll(self) -> list[Batch]:
        """Take in what came, reduce what can be, tell everybody, and finish our own rows."""
        self._listen()
        self._accept()
        for channel in list(self._strangers):
            self._introduce(channel)
        for rank, channel in list(self._spokes.items()):
            self._hear(rank, channel)
        reduced = self._align.pop(time.monotonic())
        self._report()
        self._tell(reduced)
        return [batch for one in reduced for batch in self._own.answer(one)]

    def request_flush(self) -> None:
        """Ask every rank to hand over what it has."""
        for channel in self._spokes.values():
            channel.say(Kind.FLUSH)
            channel.push()

    def leave(self) -> None:
        """Say that nothing more comes from here, and wait for nobody much longer."""
        self._left = True
        self._align.leave(self.identity.rank)
        self._align.hurry()
        self.request_flush()

    def close(self) -> None:
        """Say goodbye and let go; what the sockets still hold has a second to get out."""
        for channel in self._spokes.values():
            channel.say(Kind.BYE)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(c.backlog for c in self._open_spokes()):
            for channel in self._open_spokes():
                channel.push()
            time.sleep(0.001)
        for channel in [*self._spokes.values(), *self._strangers]:
            channel.push()
            self._drop(channel)
        if self._listener is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)
            self._listener.close()

    def health(self) -> dict[str, Any]:
        """Say who is missing, what came late, and on which hosts the ranks are."""
        missing = {rank: str(state) for rank, state in self._align.missing().items()}
        return {"missing_ranks": missing, "late_rows": self._align.late, "hosts": self._hosts}

    def _open_spokes(self) -> list[Channel]:
        return [c for c in self._spokes.values() if not c.closed]

    def _listen(self) -> None:
        if self._listener is not None:
            return
        everywhere = "" if _spans_hosts(self.identity) else "127.0.0.1"
        self._listener = socket.create_server((everywhere, 0), backlog=4096)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        note = {
            "addresses": _addresses(self.identity),
            "port": self._listener.getsockname()[1],
            "token": self._token,
        }
        self._open_store().leave(self._key, json.dumps(note))

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # nobody is at the door; or no file descriptor is left for them
                return
            channel = Channel(sock)
            self._strangers.append(channel)
            self._watch(channel)

    def _introduce(self, channel: Channel) -> None:
        """Let somebody in who knows the token."""
        for kind, payload in channel.frames():
            hello = json.loads(payload) if kind is Kind.HELLO else {}
            if not hmac.compare_digest(str(hello.get("token")), self._token):
                break
            rank = int(hello["rank"])
            if rank not in self._peers.ranks or rank in self._spokes:
                break
            self._strangers.remove(channel)
            self._spokes[rank] = channel
            self._hosts[rank] = str(hello["host"])
            self._align.join(rank)
            channel.say(Kind.WELCOME, self._own_facts)
            channel.push()
            return
        else:
            if not channel.closed:
                return
        self._strangers.remove(channel)
        self._drop(channel)

    def _hear(self, rank: int, channel: Channel) -> None:
        if channel.sock.fileno() < 0:
            return
        for kind, payload in channel.frames():
            if kind is Kind.TABLE:
                channel.learn_table(payload)
            elif kind is Kind.ROWS:
                self._align.add(rank, channel.read_rows(payload), time.monotonic())
            elif kind is Kind.FLUSH:
                self._flush_asked = True
                self._pass_on(rank)
            elif kind is Kind.BYE:
                self._align.leave(rank)
        if channel.closed or channel.backlog > _BACKLOG:
            self._lost(rank, channel)

    def _pass_on(self, asker: int) -> None:
        for rank, channel in self._spokes.items():
            if rank != asker:
                channel.say(Kind.FLUSH)
                channel.push()

    def _lost(self, rank: int, channel: Channel) -> None:
        self._drop(channel)
        if self._align.missing().get(rank) == "closed":
            return
        self._align.leave(rank, gone=True)
        if not self._left:
            log.warning(
                "rank %d (%s) is gone: its connection ended. Statistics go on over the others.",
                rank,
                self._hosts[rank],
            )

    def _tell(self, reduced: Sequence[Reduced]) -> None:
        now = time.monotonic()
        sign = self._align.waiting and now - self._last_sign > self._timeout / 4
        if sign:
            self._last_sign = now
        for channel in self._spokes.values():
            for one in reduced:
                channel.send_reduced(one)
            if sign:
                channel.say(Kind.STILL_HERE)
            channel.push()

    def _report(self) -> None:
        events, self._align.events = self._align.events, []
        for event in events:
            _tell_user(event, self._hosts, self._align, self._timeout)


class Spoke(_End):
    """Every other rank: connects to the first, sends its rows, takes in what was reduced."""

    def __init__(self, peers: Peers, **options: Any) -> None:
        super().__init__(peers, **options)
        self._channel: Channel | None = None
        self._lost = False
        self._note: str | None = None
        self._refused: str | None = None  # a note that led nowhere: a leftover of another run
        self._first_row: float | None = None
        self._opened = time.monotonic()
        self._heard = self._opened
        self._next_try = 0.0
        self._pause = 0.01
        self._in_step = True

    @property
    def wait(self) -> float | None:
        """Give the seconds until there is something to try again."""
        if self._lost:
            return None
        if self._channel is None:
            return max(0.001, self._next_try - time.monotonic())
        if self._channel.backlog:
            return 0.002
        return self._timeout / 4 if self._own.waiting else None

    def start(self, batch: Batch) -> None:
        """Hand over some steps."""
        if not self._own.waiting:
            # Patience with the first rank counts from the first row that waits for it.
            self._heard = time.monotonic()
        self._own.add(batch)
        if self._first_row is None:
            self._first_row = time.monotonic()
        if self._channel is not None:
            self._channel.send_rows(batch)

    def poll(self) -> list[Batch]:
        """Take in what was reduced; past a deadline, finish our own rows alone."""
        if self._lost:
            return self._alone()
        if self._channel is None:
            self._connect()
        if self._channel is None:
            return self._unmet()
        out = self._hear(self._channel)
        self._channel.push()
        if self._channel.heard:
            self._heard, self._channel.heard = time.monotonic(), False
        if self._channel.closed and self.facts is None:
            # Turned away: the note was a leftover of an earlier run on these machines.
            self._drop(self._channel)
            self._refused, self._channel = self._note, None
        elif self._channel.closed:
            out += self._alone_from_here("rank %d (%s) is gone: its connection ended")
        elif self._own.waiting and time.monotonic() - self._heard > self._timeout:
            out += self._alone_from_here(f"rank %d (%s) said nothing for {self._timeout:g} s")
        return out

    def request_flush(self) -> None:
        """Ask every rank to hand over what it has."""
        if self._channel is not None:
            self._channel.say(Kind.FLUSH)
            self._channel.push()

    def leave(self) -> None:
        """Say that nothing more comes from here."""
        self._left = True
        if self._channel is not None:
            self._channel.say(Kind.BYE)
            self._channel.push()

    def close(self) -> None:
        """Let go; what the socket still holds has a second to get out."""
        if self._channel is None:
            return
        deadline = time.monotonic() + 1.0
        while self._channel.backlog and not self._channel.closed and time.monotonic() < deadline:
            self._channel.push()
            time.sleep(0.001)
        self._drop(self._channel)

    def health(self) -> dict[str, Any]:
        """Say whether the first rank is there."""
        met = self._channel is not None and not self._lost
        return {"missing_ranks": {} if met else {self._peers.first: "gone"}, "late_rows": 0}

    def _connect(self) -> None:
        now = time.monotonic()
        if now < self._next_try:
            return
        self._next_try = now + self._pause
        self._pause = min(self._pause * 1.3, 0.5)
        try:
            note = self._open_store().look(self._key)
        except Exception as error:  # noqa: BLE001 - the border: the store belongs to the program
            log.debug("the store does not answer: %s", error)
            return
        if note is None or note == self._refused:
            return
        channel = _dial(json.loads(note), self.identity)
        if channel is None:
            # Try again: a first rank that is only slow to listen has left the same note.
            self._refused = note if self._pause >= 0.5 else None
            return
        self._channel, self._note = channel, note
        self._watch(channel)
        for batch in self._own.batches():
            channel.send_rows(batch)

    def _hear(self, channel: Channel) -> list[Batch]:
        out: list[Batch] = []
        for kind, payload in channel.frames():
            if kind is Kind.TABLE:
                channel.learn_table(payload)
            elif kind is Kind.REDUCED:
                out += self._answered(channel.read_reduced(payload))
            elif kind is Kind.FLUSH:
                self._flush_asked = True
            elif kind is Kind.WELCOME:
                self.facts = json.loads(payload)
            elif kind is Kind.BYE:
                # The first rank closed its History and this one goes on: no fault, nothing to say.
                self._lost = True
                out += self._alone()
                self._drop(channel)
                break
        return out

    def _answered(self, reduced: Reduced) -> list[Batch]:
        if not self._in_step:
            # We came late and finished earlier steps alone: what others say of those is past.
            steps = reduced.steps.tolist()
            if self._own.next_step not in steps:
                return []
            reduced = reduced.part(steps.index(self._own.next_step), len(reduced))
            self._in_step = True
        return list(self._own.answer(reduced))

    def _unmet(self) -> list[Batch]:
        """Finish rows alone while the first rank has opened no History."""
        since = self._first_row
        if since is None or time.monotonic() - since < min(GRACE, self._timeout):
            return []
        if self._in_step:
            log.warning(
                "rank %d has not opened this History within %g s: rank %d records its own values "
                "alone until it does.",
                self._peers.first,
                min(GRACE, self._timeout),
                self.identity.rank,
            )
            self._in_step = False
        return self._alone()

    def _alone_from_here(self, why: str) -> list[Batch]:
        self._lost = True
        if self._channel is not None:
            self._drop(self._channel)
        if not self._left:
            host = (self.facts or {}).get("host", "host unknown")
            log.warning(
                why + ". Rank %d records its own values alone from here on.",
                self._peers.first,
                host,
                self.identity.rank,
            )
        return self._alone()


def _tell_user(event: Event, hosts: Mapping[int, str], align: Alignment, timeout: float) -> None:
    named = ", ".join(f"{r} ({hosts[r]})" if r in hosts else str(r) for r in event.ranks)
    if event.what == "back":
        log.warning(
            "rank %s reports again from step %d on; %d of its rows came late.",
            named,
            event.step,
            align.late,
        )
        return
    never = [r for r in event.ranks if r not in hosts]
    reason = (
        f"opened no History within {min(GRACE, timeout):g} s"
        if len(never) == len(event.ranks)
        else "did not report it in time"
    )
    log.warning(
        "step %d is reduced without rank %s, which %s. Statistics go on over the others, and "
        "include it again as soon as it reports.",
        event.step,
        named,
        reason,
    )


def _spans_hosts(identity: Identity) -> bool:
    """Say whether the ranks may be on several hosts."""
    if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        return False
    return identity.local_world_size < identity.world_size


def _addresses(identity: Identity) -> list[str]:
    """Give the addresses under which the others may reach us, the likeliest first."""
    if chosen := os.environ.get("EVERYRANK_ADDRESS"):
        return [chosen]
    if not _spans_hosts(identity):
        return ["127.0.0.1"]
    found = [identity.host]
    # The interface that leads to the rendezvous host is the one that the cluster's network uses.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 9))
        found.insert(0, probe.getsockname()[0])
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _dial(note: Mapping[str, Any], identity: Identity) -> Channel | None:
    """Connect to the first rank by any of its addresses and introduce ourselves."""
    for address in note["addresses"]:
        try:
            sock = socket.create_connection((address, note["port"]), timeout=1.0)
        except OSError:
            continue
        channel = Channel(sock)
        hello = {"token": note["token"], "rank": identity.rank, "host": identity.host}
        channel.say(Kind.HELLO, hello)
        channel.push()
        return channel
    return None
