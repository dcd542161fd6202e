"""Frames over a socket: what ranks say to each other, as bytes. No pickle, no tensor, no blocking.

A frame is a length, a kind and a payload. Names travel once: the first rows with a new set of names
are preceded by a table that numbers it, and from then on rows are a number, steps, times and floats
as they lie in memory (little-endian, which every machine that trains is).
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from typing import Any

import numpy as np

from everyrank.ranks.base import Reduced
from everyrank.records import Batch

_HEAD = struct.Struct("<IB")
_ROWS = struct.Struct("<III")  # table, steps, names
_REDUCED = struct.Struct("<IIIII")  # table, steps, names, statistics, world size

#: A frame larger than this is no frame of ours.
MAX_FRAME = 1 << 30


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1  # who I am, and the token that says that we belong together
    WELCOME = 2  # the facts of the run
    TABLE = 3  # a number for a set of names
    ROWS = 4
    REDUCED = 5
    FLUSH = 6  # hand over what you have collected so far
    BYE = 7  # I say no more
    STILL_HERE = 8  # nothing to say, but I live


class Channel:
    """One connection: frames in, frames out, and never a wait."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a latency hint, which not every transport knows
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.closed = False
        self.heard = False  # whether anything arrived since somebody reset this
        self._in = bytearray()
        self._out = bytearray()
        self._tables_out: dict[tuple[Any, ...], int] = {}
        self._tables_in: dict[int, Any] = {}

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._out)

    def say(self, kind: Kind, message: Any = None) -> None:
        """Queue a frame that carries JSON."""
        self._frame(kind, b"" if message is None else json.dumps(message).encode())

    def send_rows(self, batch: Batch) -> None:
        """Queue rows."""
        head = _ROWS.pack(self._table(batch.names), len(batch), len(batch.names))
        self._frame(
            Kind.ROWS, head, _bytes(batch.steps), _bytes(batch.times), _bytes(batch.numbers)
        )

    def send_reduced(self, reduced: Reduced) -> None:
        """Queue reduced rows."""
        head = _REDUCED.pack(
            self._table((reduced.names, reduced.stats)),
            len(reduced),
            len(reduced.names),
            len(reduced.stats),
            reduced.world_size,
        )
        arrays = (reduced.steps, reduced.times, reduced.values, reduced.ranks, reduced.nonfinite)
        self._frame(Kind.REDUCED, head, *map(_bytes, arrays))

    def push(self) -> None:
        """Send what the socket takes now."""
        while self._out and not self.closed:
            try:
                sent = self.sock.send(memoryview(self._out)[: 1 << 20])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.closed = True
                return
            del self._out[:sent]

    def frames(self) -> list[tuple[Kind, bytes]]:
        """Give the whole frames that have arrived; `closed` is set at the end of the stream."""
        self._pull()
        out = []
        at = 0
        while len(self._in) - at >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._in, at)
            if size > MAX_FRAME or kind not in Kind._value2member_map_:
                self.closed = True  # not one of us
                return out
            if len(self._in) - at - _HEAD.size < size:
                break
            start = at + _HEAD.size
            out.append((Kind(kind), bytes(self._in[start : start + size])))
            at = start + size
        del self._in[:at]
        return out

    def learn_table(self, payload: bytes) -> None:
        """Remember the names behind a number."""
        number, names = json.loads(payload)
        self._tables_in[number] = names

    def read_rows(self, payload: bytes) -> Batch:
        """Give the rows of a frame."""
        table, n, m = _ROWS.unpack_from(payload)
        at = _ROWS.size
        steps = np.frombuffer(payload, "<i8", n, at)
        times = np.frombuffer(payload, "<f8", n, at + 8 * n)
        numbers = np.frombuffer(payload, "<f8", n * m, at + 16 * n).reshape(n, m)
        names = tuple(self._tables_in[table])
        return Batch(steps, times, names, numbers, ("float",) * m)

    def read_reduced(self, payload: bytes) -> Reduced:
        """Give the reduced rows of a frame."""
        table, n, m, s, world_size = _REDUCED.unpack_from(payload)
        names, stats = self._tables_in[table]
        at = _REDUCED.size
        arrays = []
        for dtype, count in (
            ("<i8", n),
            ("<f8", n),
            ("<f8", s * n * m),
            ("<i8", n * m),
            ("<i8", n * m),
        ):
            arrays.append(np.frombuffer(payload, dtype, count, at))
            at += 8 * count
        steps, times, values, ranks, nonfinite = arrays
        return Reduced(
            steps,
            times,
            tuple(names),
            tuple(stats),
            values.reshape(s, n, m),
            ranks.reshape(n, m),
            nonfinite.reshape(n, m),
            world_size,
        )

    def close(self) -> None:
        """Let go of the socket."""
        self.closed = True
        with contextlib.suppress(OSError):
            self.sock.close()

    def _table(self, names: tuple[Any, ...]) -> int:
        number = self._tables_out.get(names)
        if number is None:
            number = self._tables_out[names] = len(self._tables_out)
            self.say(Kind.TABLE, [number, names])
        return number

    def _frame(self, kind: Kind, *parts: bytes | memoryview) -> None:
        if self.closed:
            return
        self._out += _HEAD.pack(sum(map(len, parts)), kind)
        for part in parts:
            self._out += part

    def _pull(self) -> None:
        while not self.closed:
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self.closed = True
                return
            self.heard = True
            self._in += data


def _bytes(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()
