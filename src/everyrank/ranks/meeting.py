"""How the ends of the star find each other: a note in the store, and a knock at the door it names.

A store, a name server and a host that is down may each take any time to answer, so all that waits
for them happens on a thread of its own (`Errand`); the History's background thread only asks what
has come of it. A note may be a leftover of another run, and its port may be somebody else's by now:
ranks have met only once the one that was knocked at says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from everyrank.ranks.base import Identity
from everyrank.ranks.store import Store
from everyrank.ranks.wire import Channel, Kind

T = TypeVar("T")

_CONNECT = 3.0  # seconds for one address to accept
_ASIDE_AFTER = 1.0  # seconds at the first place, before the second one is looked at
_WELCOME = 10.0  # seconds for whoever accepted to say that it knows us

#: An errand that failed so often in a row will not succeed: a store that lost its host stays lost.
_MOST_FAILURES = 3
_PAUSE_AFTER_FAILURE = 1.0
_LONGEST_PAUSE = 5.0


class Errand(Generic[T]):
    """Something to try until it gives a result, on a thread of its own.

    The pause between two attempts is a tenth of the time that has passed, so that what comes late
    is noticed late by a tenth, and what never comes costs next to nothing.
    """

    def __init__(self, attempt: Callable[[], T | None], *, pause: float = 0.01) -> None:
        self.result: T | None = None
        self.error: Exception | None = None  # of the last attempt
        self.pause = pause
        self.stop = threading.Event()
        self._attempt = attempt
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="everyrank-meeting", daemon=True)

    def begin(self) -> None:
        """Make the first attempt."""
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether there is a result, or there will be none."""
        return self.result is not None or self.failed

    @property
    def failed(self) -> bool:
        """Whether it was given up."""
        return self._failures >= _MOST_FAILURES

    def end(self) -> None:
        """Make no further attempt; one that is under way may hang, and is left behind then."""
        self.stop.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        began = time.monotonic()
        while not self.stop.is_set():
            pause = self._try()
            if self.over:
                return
            self.stop.wait(pause)
            waited = (time.monotonic() - began) / 10
            self.pause = min(max(self.pause, waited), _LONGEST_PAUSE)

    def _try(self) -> float:
        """Make one attempt, and give the pause after it."""
        try:
            self.result = self._attempt()
        except Exception as error:  # noqa: BLE001 - the border: the store belongs to the program
            self.error = error
            self._failures += 1
            return _PAUSE_AFTER_FAILURE
        self.error, self._failures = None, 0
        return self.pause


@dataclass(frozen=True, slots=True)
class Note:
    """Where the first rank listens, and the word by which it knows the others."""

    host: str
    addresses: tuple[str, ...]
    port: int
    token: str
    site: str = ""  # the line of the program that opened the History
    place: Mapping[str, str] = field(default_factory=dict)  # where it is kept, if that was said

    def dumps(self) -> str:
        """Give the note as text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Note | None:
        """Read a note; None if it is no note of ours."""
        try:
            fields = json.loads(text)
            addresses = tuple(map(str, fields["addresses"]))
            place = {str(key): str(value) for key, value in fields.get("place", {}).items()}
            return cls(
                str(fields["host"]),
                addresses,
                int(fields["port"]),
                str(fields["token"]),
                str(fields.get("site", "")),
                place,
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def doors(self, host: str) -> tuple[str, ...]:
        """Give the addresses to try from a host, the likeliest first."""
        near = ("127.0.0.1",) if host == self.host else ()
        return tuple(dict.fromkeys([*near, *self.addresses]))


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one History meet, among all that a program opens.

    The first rank leaves its note under each of `keys`, and the others look at them in their order:
    places where the run is kept, then the line of the program that opens it. A note of a History
    that is kept elsewhere is none for us.

    Ranks may also open it on different lines, in a branch for each:

        if rank == 0:
            history = History(backends=[Console()])
        else:
            history = History()

    `aside` is the function around these lines. A rank goes there only if nobody comes to the other
    places, and talks only to one that was opened on a line of which this process has opened none,
    and that is the last of that function: two Histories of one function are not taken for each other.
    """

    keys: tuple[str, ...]
    aside: str = ""
    after_aside: str = ""  # the key of the one after it
    site: str = ""
    sites: Collection[str] = ()  # all lines on which this process has opened one, also later ones
    place: Mapping[str, str] = field(default_factory=dict)

    def kept_elsewhere(self, note: Note) -> bool:
        """Say whether a note is of a History that is certainly another one."""
        both = self.place.keys() & note.place.keys()
        return any(self.place[name] != note.place[name] for name in both)


@dataclass(frozen=True, slots=True)
class Met:
    """The first rank as another has met it: the way to it, and what it said of the run."""

    host: str
    channel: Channel
    facts: dict[str, Any]


class Search:
    """A rank's search for the first one."""

    def __init__(self, store: Store, meeting: Meeting, identity: Identity, ranks: int) -> None:
        self._why = f"it has left no address in {store}"
        self._store = store
        self._meeting = meeting
        self._began = time.monotonic()
        self._identity = identity
        # A store that serves thousands is asked by each of them less often.
        self._errand = Errand(self._look, pause=max(0.01, ranks / 20_000))
        self._errand.begin()

    @property
    def wait(self) -> float | None:
        """Give the seconds until it is worth asking again; None once nothing more will come."""
        if self._errand.result is not None:
            return 0.0
        return None if self._errand.failed else self._errand.pause

    @property
    def why(self) -> str:
        """Say what has come of it so far."""
        error = self._errand.error
        return f"{self._store} does not answer ({error})" if error is not None else self._why

    def met(self) -> Met | None:
        """Give the first rank once it is found."""
        return self._errand.result

    def end(self) -> None:
        """Look no further, and let go of whom we met and did not talk to."""
        self._errand.end()
        if self._errand.result is not None:
            self._errand.result.channel.close()

    def _look(self) -> Met | None:
        note = self._note() or self._note_aside()
        if note is None:
            return None
        doors = note.doors(self._identity.host)
        for address in doors:
            met = self._knock(note, address)
            if met is not None:
                return met
        self._why = f"it does not let us in at {' or '.join(doors)}, port {note.port}"
        return None

    def _note(self) -> Note | None:
        """Give the first note that is ours."""
        for key in self._meeting.keys:
            text = self._store.look(key)
            if text is None:
                continue
            note = Note.loads(text)
            if note is None:
                self._why = f"what {self._store} holds of it cannot be read"
            elif not self._meeting.kept_elsewhere(note):
                return note
        return None

    def _note_aside(self) -> Note | None:
        """Give the note of the last place, once nobody has come to the others for a while."""
        meeting = self._meeting
        if not meeting.aside or time.monotonic() - self._began < _ASIDE_AFTER:
            return None
        text = self._store.look(meeting.aside)
        if text is None or self._store.look(meeting.after_aside) is not None:
            return None
        note = Note.loads(text)
        if note is None or note.site in meeting.sites or meeting.kept_elsewhere(note):
            return None
        return note

    def _knock(self, note: Note, address: str) -> Met | None:
        """Go to one address, and wait until somebody there says that we belong together."""
        try:
            sock = socket.create_connection((address, note.port), timeout=_CONNECT)
        except (OSError, ValueError, OverflowError):  # nobody, or no address and port at all
            return None
        notice_loss(sock)
        channel = Channel(sock)
        me = self._identity
        channel.say(Kind.HELLO, {"token": note.token, "rank": me.rank, "host": me.host})
        channel.push()
        kind, payload = self._first_frame(channel)
        if kind is Kind.WELCOME:
            return Met(note.host, channel, json.loads(payload))
        channel.close()
        return None

    def _first_frame(self, channel: Channel) -> tuple[Kind | None, bytes]:
        """Wait for a first word; what follows it stays in the channel."""
        deadline = time.monotonic() + _WELCOME
        with selectors.DefaultSelector() as selector:
            selector.register(channel.sock, selectors.EVENT_READ)
            while not self._errand.stop.is_set() and time.monotonic() < deadline:
                selector.select(0.1)  # short, since the end of a search does not wake it
                for frame in channel.frames():
                    return frame
                if channel.closed:
                    break
        return None, b""


def listen(identity: Identity) -> socket.socket:
    """Open the door of the first rank: to this host only if all ranks are on it."""
    if not spans_hosts(identity):
        return socket.create_server(("127.0.0.1", 0), backlog=4096)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel knows IPv6, but it is switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=4096)


def spans_hosts(identity: Identity) -> bool:
    """Say whether the ranks may be on several hosts."""
    if os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1", "::1"):
        return False
    return identity.local_world_size < identity.world_size


def addresses(identity: Identity) -> tuple[str, ...]:
    """Give the addresses under which other hosts may reach us, the likeliest first.

    It may have to ask a name server.
    """
    if chosen := os.environ.get("EVERYRANK_ADDRESS"):
        return (chosen,)
    if not spans_hosts(identity):
        return ("127.0.0.1",)
    found = [identity.host]
    # The interface that leads to the rendezvous host is the one that the cluster's network uses.
    # Connecting a datagram socket sends nothing: it asks the kernel for the way.
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe, contextlib.suppress(OSError, ValueError):
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 9))
        found.insert(0, probe.getsockname()[0])
    return tuple(dict.fromkeys(found))


def notice_loss(sock: socket.socket) -> None:
    """Have the kernel end a connection whose other host is gone without a word, in half a minute."""
    with contextlib.suppress(OSError):  # it is lost already, which reading it will tell
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):  # not every system has all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def part(channels: Sequence[Channel], *, seconds: float = 1.0) -> None:
    """Get out what the channels still hold, and close them once the other ends have read it.

    A socket that is closed while bytes in it are unread resets the connection, and the other end
    may lose our last words. So we say that we are done, and read until it is done, too.
    """
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            _say_done(channel)
            if not channel.closed:
                selector.register(channel.sock, _events(channel), channel)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                channel = key.data
                for _ in channel.frames():
                    pass  # what it says now, nobody waits for
                if channel.closed:
                    selector.unregister(channel.sock)
                elif key.events & selectors.EVENT_WRITE:
                    _say_done(channel)
                    selector.modify(channel.sock, _events(channel), channel)
    for channel in channels:
        channel.close()


def _events(channel: Channel) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.backlog else 0)


def _say_done(channel: Channel) -> None:
    channel.push()
    if not channel.backlog:
        with contextlib.suppress(OSError):
            channel.sock.shutdown(socket.SHUT_WR)
