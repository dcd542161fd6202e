"""Frames over a real socket: whole, in order, and never a surprise from the other side."""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks import wire
from everyrank.ranks.base import Reduced
from everyrank.ranks.wire import MAX_FIRST_FRAME, MAX_FRAME, Channel, Kind
from everyrank.records import Batch

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
NAMES = st.lists(st.text(max_size=3), max_size=3, unique=True).map(tuple)
STEPS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)


def a_batch(steps: Any, names: tuple[str, ...] = ("loss",), number: float = 1.0) -> Batch:
    steps = np.array(steps, np.int64)
    numbers = np.full((len(steps), len(names)), number)
    return Batch(steps, np.zeros(len(steps)), names, numbers, ("float",) * len(names))


def a_reduced(steps: Any, names: tuple[str, ...] = ("loss",), who: Any = (0, 1)) -> Reduced:
    steps = np.array(steps, np.int64)
    counts = np.full((len(steps), len(names)), 2)
    values = np.arange(2.0 * counts.size).reshape(2, *counts.shape)
    who = frozenset(who)
    times = np.zeros(len(steps))
    merged = np.arange(3.0 * len(steps)).reshape(len(steps), 3)
    return Reduced(
        *(steps, times, names, ("mean", "max"), values, counts, 0 * counts, 2, who),
        states=("a", "b", "c"),
        state_ranks=(1, 1, 2),
        merged=merged,
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    steps, names = np.array(draw(STEPS), np.int64), draw(NAMES)
    return Batch(
        steps,
        draw_floats(draw, len(steps)),
        names,
        draw_floats(draw, len(steps), len(names)),
        ("float",) * len(names),
    )


@st.composite
def many_reduced(draw: st.DrawFn) -> Reduced:
    steps, names = np.array(draw(STEPS), np.int64), draw(NAMES)
    stats = tuple(draw(st.lists(st.sampled_from(["mean", "std", "p50"]), unique=True)))
    states = draw(NAMES)
    counts = st.integers(0, 2**40).map(lambda n: np.full((len(steps), len(names)), n))
    return Reduced(
        steps,
        draw_floats(draw, len(steps)),
        names,
        stats,
        draw_floats(draw, len(stats), len(steps), len(names)),
        draw(counts),
        draw(counts),
        draw(st.integers(1, 2**31)),
        draw(st.frozensets(st.integers(0, 9))),
        states,
        tuple(range(len(states))),
        draw_floats(draw, len(steps), len(states)),
    )


def draw_floats(draw: st.DrawFn, *shape: int) -> Any:
    size = math.prod(shape)
    return np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size)), float).reshape(shape)


def as_plain(said: Batch | Reduced) -> tuple[Any, ...]:
    """Give what a message holds, as something that compares to the bit."""
    fields = [f for f in said.__dataclass_fields__ if f != "extras"]
    found = [getattr(said, field) for field in fields]
    return tuple((v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v for v in found)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Give both ends of a connection."""
    channels = [Channel(sock) for sock in socket.socketpair()]
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, Channel]]:
    """Give a bare socket, through which a test says any bytes, and the channel that hears them."""
    here, there = socket.socketpair()
    channel = Channel(there)
    yield here, channel
    here.close()
    channel.close()


def heard(channel: Channel) -> list[Any]:
    """Give all that has arrived, read."""
    out: list[Any] = []
    for kind, payload in channel.frames():
        if kind is Kind.ROWS:
            out.append(channel.read_rows(payload))
        elif kind is Kind.REDUCED:
            out.append(channel.read_reduced(payload))
        else:
            out.append((kind, json.loads(payload) if payload else None))
    return out


def a_frame(kind: int, payload: bytes = b"", *, size: int | None = None) -> bytes:
    return struct.pack("<IB", len(payload) if size is None else size, kind) + payload


def until(done: Callable[[], Any]) -> Any:
    """Try again until there is an answer; the deadline is only there to end a hang."""
    deadline = time.monotonic() + 60.0
    while not (found := done()):
        assert time.monotonic() < deadline, "nothing came"
    return found


# ------------------------------------------------------------------------------------------- said


def test_what_is_said_arrives_in_order(pair: tuple[Channel, Channel]):
    """Words, rows and reduced rows come out of the other end as they went in."""
    here, there = pair
    here.say(Kind.HELLO, {"rank": 3, "token": "ä"})
    here.send_rows(a_batch([1, 2]))
    here.say(Kind.FLUSH)
    here.send_reduced(a_reduced([1, 2], who=(0, 5)))
    here.say(Kind.BYE)
    assert heard(there) == []  # nothing is sent before a push
    here.push()
    assert here.backlog == 0
    hello, rows, flush, reduced, bye = heard(there)
    assert (hello, flush, bye) == (
        (Kind.HELLO, {"rank": 3, "token": "ä"}),
        (Kind.FLUSH, None),
        (Kind.BYE, None),
    )
    assert as_plain(rows) == as_plain(a_batch([1, 2]))
    assert as_plain(reduced) == as_plain(a_reduced([1, 2], who=(0, 5)))
    assert not there.closed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_law_any_cut_of_the_bytes_gives_the_same_frames(data: st.DataObject):
    """Wherever the socket cuts, every frame arrives once, whole, to the bit, and in order."""
    message = st.one_of(batches(), many_reduced(), st.dictionaries(st.text(), st.integers()))
    said = data.draw(st.lists(message, max_size=6))
    middle, end = socket.socketpair()
    with middle, end:
        writer, reader = Channel(middle), Channel(end)
        for one in said:
            if isinstance(one, dict):
                writer.say(Kind.WELCOME, one)
            else:
                (writer.send_rows if isinstance(one, Batch) else writer.send_reduced)(one)
        stream = bytes(writer._out)
        cuts = data.draw(st.sets(st.integers(0, len(stream)), max_size=8))
        found, at = [], 0
        for cut in [*sorted(cuts), len(stream)]:
            middle.sendall(stream[at:cut])
            at = cut
            found += heard(reader)
    expected = [one for one in said if isinstance(one, dict) or len(one)]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, dict):
            assert one == (Kind.WELCOME, other)
        else:
            assert as_plain(one) == as_plain(other)
    assert not reader.closed


def test_frames_that_nobody_takes_stay(pair: tuple[Channel, Channel]):
    """Who stops after the first frame finds the others at the next call, tables included."""
    here, there = pair
    here.say(Kind.HELLO, {})
    here.send_rows(a_batch([1], ("a",)))
    here.send_rows(a_batch([2], ("b",)))
    here.push()
    for kind, _ in there.frames():
        assert kind is Kind.HELLO
        break
    assert [rows.names for rows in heard(there)] == [("a",), ("b",)]


def test_names_travel_once(pair: tuple[Channel, Channel]):
    """The second rows of the same names are little more than their numbers."""
    here, there = pair
    names = tuple(f"a/rather/long/name/{i}" for i in range(100))
    sizes = []
    for step in range(3):
        here.send_rows(a_batch([step], names))
        here.send_reduced(a_reduced([step], names))
        sizes.append(here.backlog)
        here.push()
        assert len(heard(there)) == 2
    assert sizes[0] > 5_000 + sizes[1]
    assert sizes[1] == sizes[2] < 8 * (102 + 402) + 100


def test_names_without_end_cost_no_memory_without_end(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
):
    """A program whose every step has names of its own is understood, and not remembered."""
    monkeypatch.setattr(wire, "_MOST_TABLES", 8)
    here, there = pair
    for step in range(50):
        for name in (f"loss/{step}", "loss"):
            here.send_rows(a_batch([step], (name,)))
    here.push()
    assert [r.names[0] for r in heard(there)] == [
        name for step in range(50) for name in (f"loss/{step}", "loss")
    ]
    assert len(here._tables_out) <= 8
    assert len(there._tables_in) <= 8


def test_rows_travel_in_pieces(pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch):
    """Rows of any number are never one frame that is too large for the other side."""
    monkeypatch.setattr(wire, "_PIECE", 240)
    here, there = pair
    here.send_rows(a_batch(range(25)))
    here.send_reduced(a_reduced(range(10)))
    here.push()
    found = heard(there)
    rows, reduced = found[:3], found[3:]
    assert [len(r) for r in rows] == [10, 10, 5]
    assert np.concatenate([r.steps for r in rows]).tolist() == list(range(25))
    assert [len(r) for r in reduced] == [3, 3, 3, 1]
    whole = np.concatenate([r.values for r in reduced], axis=1)
    assert whole.tolist() == a_reduced(range(10)).values.tolist()
    merged = np.concatenate([r.merged for r in reduced])
    assert merged.tolist() == a_reduced(range(10)).merged.tolist()
    here.send_rows(a_batch([0], tuple(map(str, range(100)))))  # a row is a frame at least
    here.push()
    assert [len(r) for r in heard(there)] == [1]


def test_whether_anything_was_heard_is_noted(pair: tuple[Channel, Channel]):
    """Any byte is a sign of life, until somebody resets it."""
    here, there = pair
    heard(there)
    assert not there.heard
    here.say(Kind.STILL_HERE)
    here.push()
    assert heard(there) == [(Kind.STILL_HERE, None)]
    assert there.heard


# -------------------------------------------------------------------------------------- much of it


def test_what_the_socket_does_not_take_waits(pair: tuple[Channel, Channel]):
    """A slow reader never blocks the writer: the rest is backlog, and arrives by and by."""
    here, there = pair
    batch = a_batch(range(1 << 20), number=0.5)
    here.send_rows(batch)
    here.push()
    assert 0 < here.backlog < 24 << 20
    found: list[Batch] = []

    def arrived() -> bool:
        here.push()
        found.extend(heard(there))
        return sum(map(len, found)) == len(batch)

    until(arrived)
    assert here.backlog == 0
    assert np.array_equal(np.concatenate([r.steps for r in found]), batch.steps)


def test_one_call_takes_in_a_bounded_amount(line: tuple[socket.socket, Channel], monkeypatch):
    """A rank that never stops talking does not keep us from hearing the others."""
    monkeypatch.setattr(wire, "_MOUTHFUL", 1)
    here, channel = line
    here.setblocking(False)
    said = 0
    word = a_frame(Kind.STILL_HERE)
    try:
        while True:
            said += here.send(word * 10_000)
    except BlockingIOError:
        pass
    first = len(heard(channel))
    assert 0 < first <= (1 << 18) // len(word) + 1
    total = first
    while more := len(heard(channel)):
        total += more
    assert total == said // len(word)


# --------------------------------------------------------------------------------------- garbage

TABLE = a_frame(Kind.TABLE, b'[0, ["loss"], [], [], [], []]')


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(a_frame(0), id="no kind"),
        pytest.param(a_frame(99), id="an unknown kind"),
        pytest.param(TABLE + a_frame(Kind.ROWS, size=MAX_FRAME + 1), id="too large a frame"),
        pytest.param(a_frame(Kind.HELLO, b"{"), id="no JSON"),
        pytest.param(a_frame(Kind.HELLO, b"\xff\xfe"), id="no text"),
        pytest.param(a_frame(Kind.HELLO), id="an empty hello"),
        pytest.param(a_frame(Kind.WELCOME, b"[1]"), id="facts that are a list"),
        pytest.param(a_frame(Kind.HELLO, b"[" * 100_000), id="a deep hello"),
        pytest.param(a_frame(Kind.TABLE, b"7"), id="a table of nothing"),
        pytest.param(
            a_frame(Kind.TABLE, b'["0", [], [], [], [], []]'), id="a table without a number"
        ),
        pytest.param(a_frame(Kind.TABLE, b"[0, [1], [], [], [], []]"), id="names that are numbers"),
        pytest.param(
            a_frame(Kind.TABLE, b'[0, "loss", [], [], [], []]'), id="names that are a text"
        ),
        pytest.param(a_frame(Kind.TABLE, b'[0, [], [], ["1"], [], []]'), id="ranks that are texts"),
        pytest.param(a_frame(Kind.ROWS, b"\0" * 8), id="rows of no table"),
        pytest.param(TABLE + a_frame(Kind.ROWS, b"\0" * 3), id="rows without a head"),
        pytest.param(
            TABLE + a_frame(Kind.ROWS, struct.pack("<II", 0, 2) + bytes(24)), id="too few numbers"
        ),
        pytest.param(
            TABLE + a_frame(Kind.ROWS, struct.pack("<II", 0, 1) + bytes(32)), id="too many numbers"
        ),
        pytest.param(
            TABLE + a_frame(Kind.REDUCED, struct.pack("<IIII", 0, 2**31, 2, 0) + bytes(64)),
            id="statistics that are not there",
        ),
    ],
)
def test_garbage_closes(line: tuple[socket.socket, Channel], garbage: bytes):
    """What no rank would say ends the connection: nothing is raised, nothing after it is heard."""
    here, channel = line
    here.sendall(garbage + a_frame(Kind.BYE))
    assert Kind.BYE not in [kind for kind, _ in channel.frames()]
    assert channel.closed
    assert heard(channel) == []
    channel.say(Kind.FLUSH)
    assert channel.backlog == 0


def test_a_stranger_may_not_begin_with_a_large_frame(line: tuple[socket.socket, Channel]):
    """A first frame is a few words; only who has said them is trusted with more."""
    here, channel = line
    here.sendall(a_frame(Kind.STILL_HERE) + a_frame(Kind.HELLO, size=MAX_FIRST_FRAME + 1))
    assert heard(channel) == [(Kind.STILL_HERE, None)]
    assert not channel.closed
    here, there = socket.socketpair()
    with here:
        stranger = Channel(there)
        here.sendall(a_frame(Kind.HELLO, size=MAX_FIRST_FRAME + 1))
        assert heard(stranger) == []
        assert stranger.closed
        stranger.close()


def test_what_was_said_before_the_garbage_is_heard_once(line: tuple[socket.socket, Channel]):
    """Whole frames are given, once, though what follows them is none."""
    here, channel = line
    here.sendall(a_frame(Kind.FLUSH) * 2 + a_frame(77))
    assert heard(channel) == [(Kind.FLUSH, None)] * 2
    assert channel.closed
    assert heard(channel) == []


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 9))
def test_law_no_bytes_raise(junk: bytes, kind: int):
    """Whatever arrives, as bytes or as a frame, is heard, waited for, or closes."""
    here, there = socket.socketpair()
    channel = Channel(there)
    here.sendall(TABLE + a_frame(kind, junk) + junk)
    here.close()
    for word, payload in channel.frames():
        if word in (Kind.HELLO, Kind.WELCOME):
            assert isinstance(json.loads(payload), dict)
        elif word is Kind.ROWS:
            channel.read_rows(payload)
        elif word is Kind.REDUCED:
            channel.read_reduced(payload)
    assert channel.closed
    channel.close()


# -------------------------------------------------------------------------------------------- end


def test_what_was_said_before_the_end_is_heard(pair: tuple[Channel, Channel]):
    """A goodbye arrives though the connection is gone; half a frame is nothing."""
    here, there = pair
    here.send_rows(a_batch([1]))
    here.say(Kind.BYE)
    here.push()
    here.sock.send(a_frame(Kind.FLUSH)[:3])
    here.close()
    rows, bye = heard(there)
    assert (len(rows), bye) == (1, (Kind.BYE, None))
    assert there.closed
    assert heard(there) == []


def test_a_goodbye_is_heard_though_we_learn_of_the_end_by_sending():
    """When the other side is gone while we push, what it said before is still given."""
    server = socket.create_server(("127.0.0.1", 0))
    here = Channel(socket.create_connection(server.getsockname()))
    sock, _ = server.accept()
    there = Channel(sock)
    there.say(Kind.BYE)
    there.push()
    there.close()
    server.close()

    def ended() -> bool:
        here.say(Kind.STILL_HERE)
        here.push()
        return here.closed

    until(ended)
    assert heard(here) == [(Kind.BYE, None)]
    here.close()


def test_nothing_is_queued_for_one_who_is_gone(pair: tuple[Channel, Channel]):
    """After the end there is no backlog, so nobody waits for it and nobody holds it."""
    here, there = pair
    here.send_rows(a_batch(range(1 << 19)))
    here.push()
    assert here.backlog
    there.close()
    here.push()
    assert here.closed
    assert here.backlog == 0
    here.send_rows(a_batch([1]))
    here.send_reduced(a_reduced([1]))
    here.push()
    assert here.backlog == 0


def test_close_is_quiet_and_may_come_twice(pair: tuple[Channel, Channel]):
    """Closing drops what was queued, and what follows it does nothing."""
    here, _ = pair
    here.send_rows(a_batch([1]))
    for _ in range(2):
        here.close()
        assert (here.closed, here.backlog) == (True, 0)
    here.push()
    assert heard(here) == []
