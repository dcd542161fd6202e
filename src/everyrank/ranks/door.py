"""The door of the first rank: who knocks has ten seconds to say that it belongs to us.

Anybody who reaches the host may knock: a port scanner, a rank of an earlier run, thousands of ranks
at the same moment. So strangers are let in a few at a time, told from ours by the token of the note,
sent away if they have nothing to say, and kept waiting outside while no file descriptor is left.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from everyrank.messages import log
from everyrank.ranks import Peers
from everyrank.ranks.meeting import listen, notice_loss
from everyrank.ranks.wire import Channel, Kind

_INTRODUCTION = 10.0  # seconds that a stranger has to say who it is
_AT_ONCE = 256  # strangers let in by one look, so that those who are known are heard in between
_PAUSE = 1.0  # seconds after which a door that had to be shut is opened again

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Door:
    """A socket that listens; `let_in` is called with rank, host and channel of who is known.

    `let_in` says whether the rank may stay; the channel is its own to watch then.
    """

    def __init__(
        self,
        peers: Peers,
        selector: selectors.BaseSelector,
        let_in: Callable[[int, str, Channel], bool],
    ) -> None:
        self.token = secrets.token_hex(16)
        self._peers = peers
        self._selector = selector
        self._let_in = let_in
        self._others = frozenset(peers.ranks) - {peers.identity.rank}
        self._listener: socket.socket | None = None
        self._open_at: float | None = 0.0  # when to open it; None while it is open
        self._strangers: dict[Channel, float] = {}  # and until when they may stay so
        self._said = False

    @property
    def port(self) -> int | None:
        """Give the port that others find us at, once there is one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    @property
    def until(self) -> float:
        """Give the moment at which `tend` has something to do."""
        open_at = [] if self._open_at is None else [self._open_at]
        return min([*self._strangers.values(), *open_at], default=float("inf"))

    def tend(self) -> None:
        """Open the door if it is time for it, and send away who has had time enough."""
        now = time.monotonic()
        if self._open_at is not None and self._open_at <= now:
            self._open()
        for channel in [c for c, until in self._strangers.items() if until <= now]:
            self._send_away(channel)

    def close(self) -> None:
        """Shut the door for good."""
        self._shut()
        self._open_at = None
        for channel in list(self._strangers):
            self._send_away(channel)
        if self._listener is not None:
            self._listener.close()

    def _open(self) -> None:
        try:
            if self._listener is None:
                make_room(len(self._peers.ranks))
                self._listener = listen(self._peers.identity)
                self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._open_at = None
        except OSError as error:
            self._no_room(error)

    def _shut(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._no_room(error)
                return  # or nobody is at the door, or who was there has gone
            notice_loss(sock)
            channel = Channel(sock)
            self._strangers[channel] = time.monotonic() + _INTRODUCTION
            self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, channel))

    def _no_room(self, error: OSError) -> None:
        """Shut the door for a while: who waits before it would wake us again and again."""
        self._shut()
        self._open_at = time.monotonic() + _PAUSE
        if not self._said:
            self._said = True
            log.warning(
                "rank %d cannot let in the other ranks (%s), and tries again every second. Until "
                "then they record their own values alone. Are there enough file descriptors? "
                "`ulimit -n` says how many it may have; it needs one for each of %d ranks.",
                self._peers.identity.rank,
                error.strerror,
                len(self._others),
            )

    def _hear(self, channel: Channel) -> None:
        """Let in who knows the token and is a rank that is not here yet."""
        if channel not in self._strangers:  # sent away a moment ago
            return
        for kind, payload in channel.frames():
            who = self._recognise(payload) if kind is Kind.HELLO else None
            # Who has hung up already was tired of waiting, and will come again.
            if who is None or channel.closed:
                break
            del self._strangers[channel]
            self._selector.unregister(channel.sock)
            if not self._let_in(*who, channel):
                channel.close()
            return
        else:
            if not channel.closed:
                return
        self._send_away(channel)

    def _recognise(self, payload: bytes) -> tuple[int, str] | None:
        """Give rank and host of one of ours; None for a stranger."""
        hello = json.loads(payload)
        rank, token = hello.get("rank"), str(hello.get("token"))
        ours = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if not ours or not isinstance(rank, int) or rank not in self._others:
            return None
        return rank, str(hello.get("host"))

    def _send_away(self, channel: Channel) -> None:
        del self._strangers[channel]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.sock)
        channel.close()


def make_room(ranks: int) -> None:
    """Let this process have a file descriptor for each rank, as far as it may decide that itself.

    Where ranks would take more than a quarter of what the program has, they get theirs on top.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or ranks <= soft // 4:
        return
    wanted = soft + ranks if hard == resource.RLIM_INFINITY else min(soft + ranks, hard)
    with contextlib.suppress(OSError, ValueError):  # the system has a limit beyond its limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
