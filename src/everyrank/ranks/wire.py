"""Frames: what ranks say to each other, as bytes, over a socket or whatever else carries them.

A frame is a length, a kind and a payload. Names travel once: the first rows with a new set of names
are preceded by a table that numbers it, and from then on rows are a number, steps, times and floats
as they lie in memory (little-endian, which every machine that trains is). There is no pickle.

* **Order.** Frames arrive in the order in which they were queued, each whole, however the socket
  cuts the bytes.
* **Bound.** Rows travel in pieces of a few megabytes, one call of `frames` takes in a few more, and
  who has not said a word that we know may not begin with a large one.
* **Garbage.** Bytes that no rank of ours would send close the connection; they raise nothing.
* **End.** What the other side said before it went is still given; then `closed` is True, what was
  queued is dropped, and whatever is queued from there on.
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from everyrank.ranks.base import Reduced
from everyrank.records import Batch
from everyrank.records import Kind as Number

_HEAD = struct.Struct("<IB")
_ROWS = struct.Struct("<II")  # table, steps
_REDUCED = struct.Struct("<IIII")  # table, steps, world size, nothing (floats lie at eights)

#: A frame larger than this is no frame of ours; nor is a first one larger than that.
MAX_FRAME, MAX_FIRST_FRAME = 1 << 30, 1 << 20

_PIECE = 4 << 20  # bytes of rows in a frame, and a row at least
_MOUTHFUL = 16 << 20  # bytes taken in by one call, so that no rank is heard at others' expense
_MOST_TABLES = 4096  # after so many sets of names, numbers are given anew

_T = TypeVar("_T", Batch, Reduced)


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


_KINDS = frozenset(Kind)


class _Table(NamedTuple):
    """What the rows of a frame are of."""

    names: tuple[str, ...]
    stats: tuple[str, ...] = ()
    who: frozenset[int] = frozenset()
    states: tuple[str, ...] = ()
    state_ranks: tuple[int, ...] = ()

    @property
    def reduced_width(self) -> int:
        """How many numbers a reduced step has, its step and time among them."""
        return 2 + len(self.names) * (2 + len(self.stats)) + len(self.states)


class Frames:
    """What one rank says to another as bytes, and what it hears; somebody else carries them."""

    def __init__(self) -> None:
        self.closed = False
        self._in = bytearray()
        self._out = bytearray()
        self._largest = MAX_FIRST_FRAME
        self._tables_out: dict[_Table, int] = {}
        self._tables_in: dict[int, _Table] = {}

    @property
    def backlog(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._out)

    def say(self, kind: Kind, message: Any = None) -> None:
        """Queue a frame that carries JSON."""
        self._frame(kind, b"" if message is None else json.dumps(message).encode())

    def send_rows(self, batch: Batch) -> None:
        """Queue rows."""
        table = self._table(_Table(batch.names))
        for piece in _pieces(batch, 2 + len(batch.names)):
            head = _ROWS.pack(table, len(piece))
            self._frame(Kind.ROWS, head, *map(_bytes, (piece.steps, piece.times, piece.numbers)))

    def send_reduced(self, reduced: Reduced) -> None:
        """Queue reduced rows."""
        told = _Table(
            reduced.names, reduced.stats, reduced.who, reduced.states, reduced.state_ranks
        )
        table = self._table(told)
        for piece in _pieces(reduced, told.reduced_width):
            head = _REDUCED.pack(table, len(piece), piece.world_size, 0)
            arrays = (
                *(piece.steps, piece.times, piece.values, piece.ranks, piece.nonfinite),
                *([piece.merged] if piece.states else []),
            )
            self._frame(Kind.REDUCED, head, *map(_bytes, arrays))

    def take(self, most: int) -> bytes:
        """Take some of the bytes that wait to be sent."""
        part = bytes(self._out[:most])
        del self._out[:most]
        return part

    def feed(self, part: bytes) -> None:
        """Hear some bytes."""
        self._in += part

    def frames(self) -> Iterator[tuple[Kind, bytes]]:
        """Give the whole frames that were heard, one by one; what is not taken stays.

        Tables are learned in passing. `closed` is set at the end of the stream.
        """
        while (frame := self._next_frame()) is not None:
            kind, payload = frame
            if not self._makes_sense(kind, payload):
                self._give_up()
            elif kind is Kind.TABLE:
                self._learn_table(payload)
            else:
                yield frame

    def read_rows(self, payload: bytes) -> Batch:
        """Give the rows of a frame."""
        table, n = _ROWS.unpack_from(payload)
        names = self._tables_in[table].names
        m = len(names)
        steps, times, numbers = _arrays(payload, _ROWS.size, ("<i8", n), ("<f8", n), ("<f8", n * m))
        kinds: tuple[Number, ...] = ("float",)
        return Batch(steps, times, names, numbers.reshape(n, m), kinds * m)

    def read_reduced(self, payload: bytes) -> Reduced:
        """Give the reduced rows of a frame."""
        table, n, world_size, _ = _REDUCED.unpack_from(payload)
        names, stats, who, states, state_ranks = self._tables_in[table]
        m, s = len(names), len(stats)
        steps, times, values, ranks, nonfinite, merged = _arrays(
            payload,
            _REDUCED.size,
            ("<i8", n),
            ("<f8", n),
            ("<f8", s * n * m),
            ("<i8", n * m),
            ("<i8", n * m),
            ("<f8", n * len(states)),
        )
        return Reduced(
            steps,
            times,
            names,
            stats,
            values.reshape(s, n, m),
            ranks.reshape(n, m),
            nonfinite.reshape(n, m),
            world_size,
            who,
            states,
            state_ranks,
            merged.reshape(n, len(states)),
        )

    def _table(self, table: _Table) -> int:
        number = self._tables_out.get(table)
        if number is None:
            if len(self._tables_out) >= _MOST_TABLES:
                self._tables_out.clear()
            number = self._tables_out[table] = len(self._tables_out)
            self.say(Kind.TABLE, [number, *table._replace(who=sorted(table.who))])  # type: ignore[arg-type]
        return number

    def _learn_table(self, payload: bytes) -> None:
        """Remember what is behind a number."""
        number, names, stats, who, states, ranks = json.loads(payload)
        self._tables_in[number] = _Table(
            tuple(names), tuple(stats), frozenset(who), tuple(states), tuple(ranks)
        )

    def _frame(self, kind: Kind, *parts: bytes) -> None:
        if self.closed:
            return
        self._out += _HEAD.pack(sum(map(len, parts)), kind)
        for part in parts:
            self._out += part

    def _next_frame(self) -> tuple[Kind, bytes] | None:
        """Take the next frame, if it has arrived whole."""
        if len(self._in) < _HEAD.size:
            return None
        size, kind = _HEAD.unpack_from(self._in)
        if kind not in _KINDS or size > self._largest:
            self._give_up()
            return None
        stop = _HEAD.size + size
        if len(self._in) < stop:
            return None
        with memoryview(self._in) as view:
            payload = bytes(view[_HEAD.size : stop])
        del self._in[:stop]
        self._largest = MAX_FRAME
        return Kind(kind), payload

    def _makes_sense(self, kind: Kind, payload: bytes) -> bool:
        """Say whether a frame is what one of its kind should be."""
        if kind in (Kind.HELLO, Kind.WELCOME):
            return isinstance(_parsed(payload), dict)
        if kind is Kind.TABLE:
            return _is_table(_parsed(payload))
        if kind not in (Kind.ROWS, Kind.REDUCED):
            return True
        head = _ROWS if kind is Kind.ROWS else _REDUCED
        if len(payload) < head.size:
            return False
        table, n = head.unpack_from(payload)[:2]
        known = self._tables_in.get(table)
        if known is None:
            return False
        width = 2 + len(known.names) if kind is Kind.ROWS else known.reduced_width
        size: int = head.size + 8 * n * width
        return len(payload) == size

    def _end(self) -> None:
        """Send no more; what has arrived may still be read."""
        self.closed = True
        self._out.clear()

    def _give_up(self) -> None:
        """Send no more, and hear no more."""
        self._end()
        self._in.clear()


class Channel(Frames):
    """Frames over a socket that never waits."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a latency hint, which not every transport knows
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard = False  # whether anything arrived since somebody reset this

    def push(self) -> None:
        """Send what the socket takes now."""
        while self._out:
            try:
                sent = self.sock.send(memoryview(self._out)[: 1 << 20])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._pull()  # the other side may have said goodbye before it went
                self._end()
                return
            del self._out[:sent]

    def frames(self) -> Iterator[tuple[Kind, bytes]]:
        """Give the whole frames that have arrived by now."""
        self._pull()
        yield from super().frames()

    def close(self) -> None:
        """Let go of the socket."""
        self._give_up()
        with contextlib.suppress(OSError):
            self.sock.close()

    def _pull(self) -> None:
        """Take in what has arrived."""
        enough = len(self._in) + _MOUTHFUL
        while not self.closed and len(self._in) < enough:
            try:
                data = self.sock.recv(1 << 18)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            self.heard = True
            self._in += data


def _pieces(whole: _T, width: int) -> Iterator[_T]:
    """Cut rows that have so many numbers each into pieces that a socket takes in little time."""
    most = max(1, _PIECE // (8 * width))
    for start in range(0, len(whole), most):
        yield whole.part(start, start + most)


def _bytes(array: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _arrays(payload: bytes, at: int, *kinds: tuple[str, int]) -> Iterator[np.ndarray[Any, Any]]:
    """Give the arrays that lie one after the other in a payload, without copying them."""
    for dtype, count in kinds:
        yield np.frombuffer(payload, dtype, count, at)
        at += 8 * count


def _parsed(payload: bytes) -> Any:
    """Give what JSON says, or None if it is none."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None


def _is_table(message: Any) -> bool:
    """Say whether this is a number, names, statistics and ranks."""
    if not isinstance(message, list) or len(message) != 6 or not isinstance(message[0], int):
        return False
    kinds = zip(message[1:], (str, str, int, str, int), strict=True)
    return all(isinstance(m, list) and all(isinstance(x, t) for x in m) for m, t in kinds)
