"""The star over real sockets, several ranks in one process, polled by turns until it is so."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import selectors
import socket
import threading
import time
from typing import Any

import host_programs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank.ranks import Peers, door, hub, meeting
from everyrank.ranks.base import Identity
from everyrank.ranks.end import named
from everyrank.ranks.hub import Hub
from everyrank.ranks.local import in_process
from everyrank.ranks.meeting import Errand, Meeting, Note
from everyrank.ranks.spoke import Spoke
from everyrank.ranks.store import DirectoryStore
from everyrank.ranks.wire import Channel, Kind
from everyrank.records import Batch
from everyrank.testing import Died, run_ranks

KEY = "train.py:1/0"
PATIENT = 60.0  # seconds: a test that gets there hangs
STATS = ("mean", "max", "min", "std")


def rows(steps: Any, **values: Any) -> Batch:
    """Make rows from one list of values per name."""
    return Batch(
        steps=np.array(list(steps), np.int64),
        times=np.arange(len(steps), dtype=float),
        names=tuple(values),
        numbers=np.array(list(values.values()), float).T.reshape(len(steps), len(values)),
        kinds=("float",) * len(values),
    )


class Star:
    """Some ranks and what each was given; `ends` are those that are polled."""

    def __init__(self, directory: Any, n: int, **options: Any) -> None:
        self.directory = directory
        self.store: Any = DirectoryStore(directory)
        self.ranks = tuple(range(n))
        self.options = {"stats": STATS, "timeout": PATIENT, "facts": {}, **options}
        self.ends: dict[int, Hub | Spoke] = {}
        self.given: dict[int, list[Batch]] = {}
        self.selectors: list[selectors.BaseSelector] = []
        self.sockets: list[socket.socket] = []

    def open(self, *ranks: int, **options: Any) -> Any:
        """Open the ends of some ranks, and give the last of them."""
        for rank in ranks:
            n = max(self.ranks) + 1
            me = Identity(rank, n, rank, n, host=f"node{rank}", source="test")
            selector = selectors.DefaultSelector()
            self.selectors.append(selector)
            self.given.setdefault(rank, [])
            end = Hub if rank == self.ranks[0] else Spoke
            peers = Peers(me, self.ranks, lambda: self.store)
            options = {**self.options, **options}
            self.ends[rank] = end(peers, meeting=Meeting((KEY,)), selector=selector, **options)
        return self.ends[ranks[-1]]

    def meet(self, *ranks: int) -> Star:
        """Open ends, and wait until the first rank knows them all."""
        self.open(*ranks)
        here = {str(rank) for rank in self.ends}
        self.until(lambda: self.ranks[0] not in self.ends or self.store.look(KEY) is not None)
        self.until(lambda: self.ends[self.ranks[0]].health()["hosts"].keys() >= here)
        self.until(lambda: all(end.facts is not None for end in self.ends.values()))
        return self

    def poll(self) -> None:
        """Give every rank its turn."""
        for rank, end in self.ends.items():
            self.given[rank] += end.poll()

    def until(self, condition: Any) -> None:
        """Give the ranks their turns until the condition holds."""
        deadline = time.monotonic() + PATIENT
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.poll()
            self.selectors[0].select(0.001)

    def finish(self, *ranks: int) -> None:
        """Wait until every row that was started is answered."""
        ends = [self.ends[rank] for rank in ranks or self.ends]
        self.until(lambda: not any(end.unfinished for end in ends))

    def values(self, rank: int, name: str) -> list[tuple[int, float]]:
        """Give step and value of all that a rank was given under a name, in order."""
        return [
            (record.step, record.values[name])
            for batch in self.given[rank]
            for record in batch
            if name in record.values
        ]

    def steps(self, rank: int) -> list[int]:
        """Give the steps of the rows that a rank was given, in order."""
        return [step for batch in self.given[rank] for step in batch.steps.tolist()]

    def close(self, rank: int) -> None:
        """Close one end while the others have their turns, and poll it no more."""
        end = self.ends.pop(rank)
        closing = threading.Thread(target=end.close)
        closing.start()
        self.until(lambda: not closing.is_alive())

    def cut(self, rank: int) -> None:
        """Take a spoke's connection away, as if its process had been killed."""
        channel = self.ends.pop(rank)._channel
        assert channel is not None
        channel.close()

    def raw(self, rank: int, /, **hello: Any) -> Channel:
        """Connect as a rank that is only as much of a spoke as the test makes it."""
        self.until(lambda: self.store.look(KEY) is not None)
        note = Note.loads(self.store.look(KEY))
        channel = self.connect(note.port)
        channel.say(Kind.HELLO, {"token": note.token, "rank": rank, "host": "raw", **hello})
        channel.push()
        return channel

    def connect(self, port: int) -> Channel:
        """Knock without a word."""
        sock = socket.create_connection(("127.0.0.1", port))
        self.sockets.append(sock)
        return Channel(sock)

    def hear(self, channel: Channel, kind: Kind) -> Any:
        """Wait for a frame of one kind, while the ranks have their turns."""
        heard: list[bytes] = []

        def came() -> bool:
            heard.extend(payload for what, payload in channel.frames() if what is kind)
            return bool(heard)

        self.until(came)
        return heard[0]

    def hangs_up(self, channel: Channel) -> None:
        """Wait until the other side has ended a connection."""

        def ended() -> bool:
            list(channel.frames())
            return channel.closed

        self.until(ended)

    def end(self) -> None:
        """Close everything."""
        for sock in self.sockets:
            sock.close()
        if self.ranks[0] in self.ends:
            self.close(self.ranks[0])
        for rank in list(self.ends):
            self.close(rank)
        for selector in self.selectors:
            selector.close()


@pytest.fixture
def star(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(n: int, **options: Any) -> Star:
            made = Star(tmp_path, n, **options)
            stack.callback(made.end)
            return made

        yield make


@pytest.fixture
def first_rank(tmp_path):
    """Stand in for the first rank: a server whose note is in the store, and nothing else."""
    with contextlib.ExitStack() as stack:

        class First:
            def __init__(self) -> None:
                self.server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                self.note = Note("node0", ("127.0.0.1",), self.server.getsockname()[1], "word")
                DirectoryStore(tmp_path).leave(KEY, self.note.dumps())

            def welcome(self) -> Channel:
                sock, _ = self.server.accept()
                channel = Channel(stack.enter_context(sock))
                channel.say(Kind.WELCOME, {})
                channel.push()
                return channel

        yield First()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------- order, agreement, disagreement

numbers = st.floats(width=64)
windows = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_the_star_gives_what_ranks_in_one_process_give(tmp_path_factory, data):
    """However rows are cut into windows, whatever they hold: the reference's bits on every rank."""
    n, length = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 6))
    star = Star(tmp_path_factory.mktemp("star"), n)
    reference = in_process(n)
    try:
        star.meet(*range(n))
        for rank in range(n):
            at = 0
            while at < length:
                size = min(data.draw(st.integers(1, 4)), length - at)
                values = data.draw(st.lists(numbers, min_size=size, max_size=size))
                name = data.draw(st.sampled_from(["loss", "grad"]))
                batch = rows(range(at, at + size), **{name: values})
                star.ends[rank].start(batch)
                reference[rank].start(batch)
                at += size
            star.poll()
        star.finish()
        star.until(lambda: all(len(star.steps(rank)) == length for rank in range(n)))
        for rank in range(n):
            expected = [record for batch in reference[rank].poll() for record in batch]
            given = [record for batch in star.given[rank] for record in batch]
            assert list(map(repr, given)) == list(map(repr, expected))
    finally:
        star.end()


def test_rows_come_back_in_the_order_in_which_they_were_started(star):
    """A run that goes back is told as it went, on every rank, each row once."""
    ranks = star(3).meet(0, 1, 2)
    for end in ranks.ends.values():
        end.start(rows(range(10), loss=range(10)))
        end.start(rows(range(5, 12), loss=range(7)))
    ranks.finish()
    for rank in range(3):
        assert ranks.steps(rank) == [*range(10), *range(5, 12)]
        assert ranks.values(rank, "loss/mean") == ranks.values(0, "loss/mean")
        assert ranks.values(rank, "loss/ranks") == []


def test_ranks_may_report_other_steps_and_other_names(star):
    """A statistic is over those who reported it, and says how many they were if not all."""
    ranks = star(2).meet(0, 1)
    ranks.ends[0].start(rows([0, 1, 3], loss=[1.0, 2.0, 3.0]))
    ranks.ends[1].start(rows([0, 2, 3], loss=[3.0, 5.0, 5.0], extra=[7.0, 8.0, 9.0]))
    for end in ranks.ends.values():
        end.leave()
    ranks.finish()
    for rank in range(2):
        assert ranks.values(rank, "loss/mean") == [(0, 2.0), (1, 2.0), (2, 5.0), (3, 4.0)]
        assert ranks.values(rank, "loss/ranks") == [(1, 1), (2, 1)]
        assert ranks.values(rank, "extra/ranks") == [(0, 1), (2, 1), (3, 1)]
    assert ranks.values(0, "loss") == [(0, 1.0), (1, 2.0), (3, 3.0)]


def test_no_rows_are_nothing_to_wait_for(star):
    """An empty hand-over is answered by nothing, and nobody waits for more on its account."""
    ranks = star(2).meet(0, 1)
    for end in ranks.ends.values():
        end.start(rows([], loss=[]))
    ranks.poll()
    assert [end.unfinished for end in ranks.ends.values()] == [0, 0]
    assert [end.wait for end in ranks.ends.values()] == [None, None]
    assert ranks.given == {0: [], 1: []}


def test_the_first_rank_says_how_means_are_weighed(star):
    """What the first rank declares holds for all, whatever another says."""
    ranks = star(2).meet(0, 1)
    ranks.ends[0].declare_weight("loss", "tokens")
    ranks.ends[1].declare_weight("loss", "other")
    ranks.ends[0].start(rows([0], loss=[1.0], tokens=[30.0]))
    ranks.ends[1].start(rows([0], loss=[5.0], tokens=[10.0]))
    ranks.finish()
    assert ranks.values(0, "loss/mean") == ranks.values(1, "loss/mean") == [(0, 2.0)]


def test_any_ranks_may_reduce_together(star):
    """A group without rank 0 has its own first rank."""
    ranks = star(4)
    ranks.ranks = (1, 3)
    ranks.meet(1, 3)
    for rank, end in ranks.ends.items():
        end.start(rows([0], loss=[rank]))
    ranks.finish()
    assert ranks.values(1, "loss/mean") == ranks.values(3, "loss/mean") == [(0, 2.0)]
    assert isinstance(ranks.ends[1], Hub)


def test_forty_ranks_meet_at_once(star):
    """All are let in, and each is given the same."""
    ranks = star(40).meet(*range(40))
    for rank, end in ranks.ends.items():
        end.start(rows(range(3), loss=[rank] * 3))
    ranks.finish()
    for rank in range(40):
        assert ranks.values(rank, "loss/mean") == [(step, 19.5) for step in range(3)]


def test_the_facts_of_the_run_reach_every_rank_as_plain_data(star, tmp_path):
    """What the first rank says of the run is the same on all, also if it was not plain before."""
    facts = {"run_id": "a", "directory": tmp_path, "config": {"lr": (1, 2)}}
    ranks = star(2, facts=facts).meet(0, 1)
    plain = {"run_id": "a", "directory": str(tmp_path), "config": {"lr": [1, 2]}}
    assert ranks.ends[0].facts == ranks.ends[1].facts == plain


# ---------------------------------------------------------------- flush


def test_a_request_to_flush_reaches_everybody_else_once(star):
    """Whoever asks, all others are asked to hand over what they have, and the asker is not."""
    ranks = star(3).meet(0, 1, 2)
    for asker in range(3):
        ranks.ends[asker].request_flush()
        asked = set()
        others = {0, 1, 2} - {asker}

        def all_asked(asked=asked, others=others):
            asked |= {rank for rank, end in ranks.ends.items() if end.flush_requested()}
            return asked >= others

        ranks.until(all_asked)
        ranks.poll()
        assert asked == others
        assert not any(end.flush_requested() for end in ranks.ends.values())


def test_what_was_said_before_the_ranks_met_is_not_lost(star):
    """Rows, a request to flush and a goodbye wait for the first rank to be there."""
    ranks = star(2)
    spoke = ranks.open(1)
    spoke.start(rows([0, 1], loss=[1.0, 3.0]))
    spoke.request_flush()
    spoke.leave()
    ranks.poll()
    first = ranks.open(0)
    ranks.until(first.flush_requested)
    first.start(rows([0, 1, 2], loss=[3.0, 5.0, 7.0]))
    ranks.finish()
    assert ranks.values(0, "loss/mean") == [(0, 2.0), (1, 4.0), (2, 7.0)]
    assert ranks.values(1, "loss/mean")[:2] == [(0, 2.0), (1, 4.0)]


# ---------------------------------------------------------------- deadlines


def test_a_rank_that_falls_silent_is_named_once_and_may_come_back(star, caplog):
    """Others go on after `timeout`; its late rows are counted and keep their own values."""
    ranks = star(2, timeout=1.0).meet(0, 1)
    for end in ranks.ends.values():
        end.start(rows([0], loss=[1.0]))
    ranks.finish()
    ranks.ends[0].start(rows([1, 2, 3], loss=[1.0, 2.0, 3.0]))
    ranks.finish(0)
    ranks.ends[1].start(rows([1, 2], loss=[10.0, 20.0]))
    ranks.finish()
    assert messages(caplog) == [
        "step 1 is reduced without rank 1 (node1), which did not report it in time. Statistics "
        "go on over the others, and include it again as soon as it reports.",
        "rank 1 (node1) reports again from step 1 on; by now, 2 rows came after their steps were "
        "reduced.",
    ]
    assert ranks.values(1, "loss") == [(0, 1.0), (1, 10.0), (2, 20.0)]
    for rank, end in ranks.ends.items():
        assert ranks.values(rank, "loss/mean") == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 3.0)]
        assert end.health()["late_rows"] == 2
        assert end.health()["missing_ranks"] == {}


def test_ranks_that_open_no_history_are_named_together_once(star, caplog):
    """Nobody waits for them twice, and what they might have held is left out."""
    ranks = star(4, timeout=0.1).meet(0)
    for step in range(3):
        ranks.ends[0].start(rows([step], loss=[step]))
        ranks.finish()
    assert messages(caplog) == [
        "step 0 is reduced without ranks 1, 2, 3, which opened no History within 0.1 s. Statistics "
        "go on over the others, and include it again as soon as it reports."
    ]
    assert ranks.values(0, "loss/ranks") == [(0, 1), (1, 1), (2, 1)]
    assert ranks.ends[0].health()["missing_ranks"] == {"1": "silent", "2": "silent", "3": "silent"}


def test_a_first_rank_that_waits_for_another_is_not_taken_for_gone(star, caplog):
    """While it waits it says that it is there, so that its own patience ends before theirs."""
    ranks = star(3, timeout=1.0).meet(0, 1)
    for rank in (0, 1):
        ranks.ends[rank].start(rows([0], loss=[rank]))
        ranks.ends[rank].start(rows([1], loss=[rank]))
    ranks.finish()
    assert ranks.values(1, "loss/mean") == [(0, 0.5), (1, 0.5)]
    assert not any("gone" in message for message in messages(caplog))


def test_a_first_rank_that_says_nothing_is_given_up_after_the_timeout(star, first_rank, caplog):
    """A connection that lives is not enough: rows are finished alone, which they say."""
    ranks = star(2, timeout=0.2)
    ranks.open(1)
    ranks.poll()
    first_rank.welcome()
    ranks.until(lambda: ranks.ends[1].facts is not None)
    for step in range(3):
        ranks.ends[1].start(rows([step], loss=[step]))
        ranks.finish()
    assert messages(caplog) == [
        "rank 0 (node0) is gone: it said nothing for 0.2 s. Rank 1 records its own values alone "
        "from here on; the run's log, which that rank wrote, ends here (per_rank=True keeps one for "
        "each rank)."
    ]
    assert ranks.values(1, "loss/ranks") == [(0, 1), (1, 1), (2, 1)]
    assert ranks.ends[1].health() == {"missing_ranks": {"0": "gone"}, "late_rows": 0}
    assert ranks.ends[1].wait is None


def test_waiting_says_when_to_look_again(star, tmp_path):
    """Whoever has something to wait for wants to be called within its patience, however long."""
    ranks = star(2, timeout=8.0).meet(0, 1)
    ranks.ends[0].start(rows([0], loss=[1.0]))
    assert 0 < ranks.ends[0].wait <= 8.0
    assert ranks.ends[1].wait is None
    ranks.ends[1].start(rows([1], loss=[1.0]))
    assert 0 < ranks.ends[1].wait <= 8.0


def test_a_first_rank_that_was_found_is_taken_up_without_a_row(star):
    """Between the look that found nothing and the next there is always a next."""
    ranks = star(2)
    spoke = ranks.open(1)
    assert spoke.wait is not None
    spoke.poll()
    assert spoke.wait is not None
    first = ranks.open(0)
    while spoke._search.met() is None:
        first.poll()
        assert spoke.wait is not None
    assert spoke.wait is not None
    spoke.poll()
    assert spoke.facts == {}


# ---------------------------------------------------------------- a first rank that is not there


def test_a_rank_without_a_first_records_alone_and_joins_when_it_comes(star, tmp_path, caplog):
    """Rows are finished alone after a short while, said once; what comes later is together."""
    ranks = star(2, timeout=1.0)
    alone = ranks.open(1)
    for step in range(3):
        alone.start(rows([step], loss=[1.0]))
        ranks.finish()
    assert alone.health()["missing_ranks"] == {"0": "absent"}
    assert messages(caplog) == [
        "rank 0 has not opened this History within 1 s: it has left no address in "
        f"{tmp_path}. Rank 1 records its own values alone until it does."
    ]
    first = ranks.open(0, timeout=PATIENT)
    ranks.until(lambda: alone.facts is not None)
    first.start(rows([0, 1, 2], loss=[5.0] * 3))
    for end in ranks.ends.values():
        end.start(rows([3], loss=[end.identity.rank]))
    ranks.finish()
    assert ranks.values(1, "loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert ranks.values(1, "loss/ranks") == [(0, 1), (1, 1), (2, 1)]
    assert ranks.values(1, "loss/mean")[-1] == ranks.values(0, "loss/mean")[-1] == (3, 0.5)
    assert alone.health()["missing_ranks"] == {}


def test_a_leftover_note_of_an_earlier_run_leads_nowhere(star, tmp_path):
    """Nobody listens there any more; the note of this run takes its place, and ranks meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        note = Note("node1", ("127.0.0.1",), server.getsockname()[1], "an old word")
    DirectoryStore(tmp_path).leave(KEY, note.dumps())
    ranks = star(2)
    ranks.open(1)
    ranks.poll()
    ranks.until(lambda: "does not let us in" in ranks.ends[1]._search.why)
    ranks.meet(0)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"host": "a", "addresses": 3}', "\0"])
def test_a_note_that_cannot_be_read_is_no_note(star, tmp_path, text):
    """Whatever lies in the store under our key, the search goes on."""
    DirectoryStore(tmp_path).leave(KEY, text)
    ranks = star(2)
    ranks.open(1)
    ranks.poll()
    ranks.until(lambda: "cannot be read" in ranks.ends[1]._search.why)
    ranks.meet(0)


def test_a_port_that_is_somebody_elses_by_now_is_no_first_rank(star, first_rank, monkeypatch):
    """Who accepts and says nothing, or something else, is left after a while."""
    monkeypatch.setattr(meeting, "_WELCOME", 0.1)
    ranks = star(2)
    spoke = ranks.open(1)
    ranks.poll()
    sock, _ = first_rank.server.accept()
    with sock:
        sock.sendall(b"220 mail.example.org ESMTP\r\n")
        again, _ = first_rank.server.accept()
    again.close()
    ranks.until(lambda: "port" in spoke._search.why)
    assert spoke.facts is None
    ranks.meet(0)


def test_a_first_rank_of_another_run_lets_nobody_in(star):
    """A spoke that knows another word is turned away, and the first rank hardly notices."""
    ranks = star(2).meet(0)
    ranks.hangs_up(ranks.raw(1, token="another word"))
    assert ranks.ends[0].health()["hosts"] == {"0": "node0"}
    ranks.meet(1)


class BrokenStore:
    """A store whose host is gone."""

    def __str__(self):
        return "the broken store"

    def leave(self, key, note):
        raise ConnectionError("no route")

    def look(self, key):
        raise ConnectionError("no route")


class HangingStore:
    """A store that never answers."""

    def __init__(self):
        self.asked = threading.Event()
        self.answer = threading.Event()

    def leave(self, key, note):
        self.asked.set()
        assert self.answer.wait(PATIENT)

    def look(self, key):
        self.leave(key, "")


def test_a_store_that_is_gone_is_said_and_nothing_is_raised(star, monkeypatch, caplog):
    """Each rank records alone, and says why."""
    monkeypatch.setattr(meeting, "_PAUSE_AFTER_FAILURE", 0.0)
    ranks = star(2, timeout=0.2)
    ranks.store = BrokenStore()
    ranks.open(0, 1)
    ranks.poll()
    ranks.until(lambda: ranks.ends[1]._search.wait is None)
    for end in ranks.ends.values():
        end.start(rows([0], loss=[1.0]))
    ranks.finish()
    ranks.until(lambda: len(messages(caplog)) == 3)
    assert sorted(messages(caplog))[:2] == [
        "rank 0 cannot tell the others where it listens: the broken store does not answer (no "
        "route). They record their own values alone.",
        "rank 0 has not opened this History within 0.2 s: the broken store does not answer (no "
        "route). Rank 1 records its own values alone until it does.",
    ]
    assert ranks.ends[1].wait is None


def test_a_store_that_hangs_holds_up_nobody(star, monkeypatch):
    """Rows are finished, and the ends closed, while somebody still waits for the store."""
    ranks = star(2, timeout=0.2)
    ranks.store = store = HangingStore()
    ranks.open(0, 1)
    ranks.until(store.asked.is_set)
    for end in ranks.ends.values():
        end.start(rows([0], loss=[1.0]))
    ranks.finish()
    ranks.close(0)
    ranks.close(1)
    store.answer.set()


def test_an_errand_is_tried_again_with_longer_and_longer_pauses():
    """What comes after a while is found, and what takes longer is asked for less often."""
    answers = iter([None, None, None, "here"])
    errand = Errand(lambda: next(answers))
    errand.begin()
    deadline = time.monotonic() + PATIENT
    while not errand.over and time.monotonic() < deadline:
        errand.stop.wait(0.001)
    assert errand.result == "here"
    errand.end()


# ---------------------------------------------------------------- ranks that go


@pytest.mark.parametrize("who", [0, 1])
def test_a_goodbye_on_either_side_is_quiet(star, caplog, who):
    """Whoever closes first, the other has what they reduced together, and goes on alone."""
    ranks = star(2).meet(0, 1)
    for end in ranks.ends.values():
        end.start(rows([0], loss=[end.identity.rank]))
    ranks.finish(who)
    ranks.ends[who].leave()
    ranks.close(who)
    other = ranks.ends[1 - who]
    other.start(rows([1], loss=[7.0]))
    ranks.finish()
    assert ranks.values(1 - who, "loss/mean") == [(0, 0.5), (1, 7.0)]
    assert ranks.values(1 - who, "loss/ranks") == [(1, 1)]
    assert other.health()["missing_ranks"] == {str(who): "closed"}
    assert messages(caplog) == []


def test_last_words_are_read_before_the_first_rank_is_gone(star):
    """Rows that are reduced at the very end are with everybody, however full the pipes are."""
    ranks = star(2).meet(0, 1)
    many = rows(range(200_000), loss=np.arange(200_000.0), grad=np.arange(200_000.0))
    for end in ranks.ends.values():
        end.start(many)
    ranks.finish(0)
    ranks.ends[0].leave()
    ranks.close(0)
    ranks.finish()
    assert ranks.values(1, "loss/ranks") == []
    assert len(ranks.steps(1)) == 200_000


def test_closing_lets_go_and_may_be_done_twice(star, caplog):
    """After it nothing is polled, sent or raised, on either end."""
    ranks = star(2).meet(0, 1)
    ends = dict(ranks.ends)
    for rank in (1, 0):
        ranks.close(rank)
    for end in ends.values():
        end.close()
        end.start(rows([0], loss=[1.0]))
        end.request_flush()
        end.leave()
        assert end.poll() == []
        assert end.health()["missing_ranks"] == {}
    assert messages(caplog) == []


@pytest.mark.parametrize("who", [0, 1])
def test_whoever_gives_up_has_all_of_its_rows_at_once(star, caplog, who):
    """At its own deadline a rank that closes waits for nobody, and what it had is not lost."""
    ranks = star(3).meet(0, 1)
    end = ranks.ends[who]
    end.start(rows([0, 1], loss=[1.0, 2.0]))
    end.leave()
    ranks.poll()
    assert end.unfinished == 2
    end.give_up()
    ranks.finish(who)
    assert ranks.values(who, "loss/ranks") == [(0, 1), (1, 1)]
    ranks.close(who)
    assert not any("gone" in message for message in messages(caplog))


def test_ends_that_never_had_a_turn_close_too(star):
    """A History that is closed as soon as it is opened leaves nothing behind."""
    ranks = star(2)
    ranks.open(0, 1)
    for end in ranks.ends.values():
        end.leave()
        end.close()


def test_a_rank_that_is_cut_off_in_the_middle_of_a_frame_is_named(star, caplog):
    """Its whole frames count, the torn one does not, and statistics go on over the others."""
    ranks = star(3).meet(0, 1)
    here, there = socket.socketpair()
    with here, there:
        writer = Channel(here)
        writer.send_rows(rows([0], loss=[4.0]))
        writer.push()
        whole = there.recv(1 << 16)
        writer.send_rows(rows([1], loss=[4.0]))
        writer.push()
        torn = there.recv(1 << 16)[:-5]
    raw = ranks.raw(2)
    ranks.hear(raw, Kind.WELCOME)
    raw.sock.setblocking(True)
    raw.sock.sendall(whole + torn)
    raw.close()
    for rank in (0, 1):
        ranks.ends[rank].start(rows([0, 1], loss=[1.0, 2.0]))
    ranks.finish()
    assert ranks.values(1, "loss/mean") == ranks.values(0, "loss/mean") == [(0, 2.0), (1, 2.0)]
    assert messages(caplog) == [
        "rank 2 (raw) is gone: its connection ended. Statistics go on over the others."
    ]
    assert ranks.ends[0].health()["missing_ranks"] == {"2": "gone"}


def test_ranks_that_are_lost_together_are_named_in_one_line(star, caplog):
    """A node that goes down is one message, not one for each of its ranks."""
    ranks = star(3).meet(0, 1, 2)
    ranks.cut(1)
    ranks.cut(2)
    while len([key for key, _ in ranks.selectors[0].select(0.001) if key.data is not None]) < 2:
        pass  # until the first rank can see both
    ranks.until(lambda: messages(caplog))
    assert messages(caplog) == [
        "ranks 1 (node1), 2 (node2) are gone: its connection ended. Statistics go on over the "
        "others."
    ]


def test_long_lists_of_ranks_are_cut_short():
    """Eight ranks are named with their hosts where they are known, the others counted."""
    assert named([3], {3: "node7"}) == "rank 3 (node7)"
    assert named(range(11), {1: "a"}) == "ranks 0, 1 (a), 2, 3, 4, 5, 6, 7 and 3 more"


def test_a_first_rank_that_is_gone_leaves_the_others_with_local_statistics(
    star, first_rank, caplog
):
    """The connection ends without a goodbye: said once, and nothing waits any longer."""
    ranks = star(2)
    spoke = ranks.open(1)
    ranks.poll()
    channel = first_rank.welcome()
    ranks.until(lambda: spoke.facts is not None)
    spoke.start(rows([0], loss=[1.0]))
    channel.close()
    ranks.finish()
    spoke.start(rows([1], loss=[2.0]))
    ranks.finish()
    assert ranks.values(1, "loss/mean") == [(0, 1.0), (1, 2.0)]
    assert ranks.values(1, "loss/ranks") == [(0, 1), (1, 1)]
    assert messages(caplog) == [
        "rank 0 (node0) is gone: its connection ended. Rank 1 records its own values alone from "
        "here on; the run's log, which that rank wrote, ends here (per_rank=True keeps one for "
        "each rank)."
    ]


def test_a_rank_that_was_started_anew_takes_the_place_of_the_one_that_is_gone(star, caplog):
    """Its connection may be dead before anybody has noticed, but two at a time there are not."""
    ranks = star(2).meet(0, 1)
    ranks.hangs_up(ranks.raw(1))
    ranks.cut(1)
    ranks.open(1)
    ranks.until(lambda: ranks.ends[1].facts is not None)
    ranks.ends[1].start(rows([0], loss=[3.0]))
    ranks.until(lambda: ranks.steps(1) == [0] or ranks.ends[0]._align.waiting)
    ranks.ends[0].start(rows([0], loss=[1.0]))
    ranks.finish()
    assert ranks.values(0, "loss/mean") == ranks.values(1, "loss/mean") == [(0, 2.0)]


def test_a_rank_that_takes_in_nothing_is_let_go(star, monkeypatch, caplog):
    """What is reduced is not held for it without bound, and the others are not kept from it."""
    monkeypatch.setattr(hub, "_BACKLOG", 1 << 20)
    ranks = star(2).meet(0)
    stuck = ranks.raw(1)
    ranks.hear(stuck, Kind.WELCOME)
    stuck.send_rows(rows(range(100_000), a=range(100_000)))
    ranks.until(lambda: stuck.push() is None and not stuck.backlog)
    wide = {f"m{i}": [float(i)] * 500 for i in range(100)}
    while not messages(caplog):
        start = len(ranks.steps(0))
        ranks.ends[0].start(rows(range(start, start + 500), **wide))
        ranks.finish()
    assert messages(caplog) == [
        "rank 1 (raw) is gone: it has not taken in the last 1 MB. Statistics go on over the others."
    ]


# ---------------------------------------------------------------- strangers at the door


def test_garbage_at_the_door_is_sent_away(star):
    """Whatever somebody sends who is no rank of ours, the connection ends, and nothing else."""
    ranks = star(2).meet(0)
    port = Note.loads(ranks.store.look(KEY)).port
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0\0\0\0\x07"):
        stranger = ranks.connect(port)
        stranger.sock.sendall(garbage)
        ranks.hangs_up(stranger)
    ranks.meet(1)


@pytest.mark.parametrize(
    "hello",
    [
        {"token": None},
        {"token": "\N{SNOWMAN}\ud800"},
        {"rank": 0},
        {"rank": 2},
        {"rank": "1"},
        {"rank": [1]},
        {"rank": None},
    ],
)
def test_who_is_no_other_rank_of_ours_is_sent_away(star, hello):
    """A wrong word, the first rank's own number, or none of the group's, opens no door."""
    ranks = star(2).meet(0)
    ranks.hangs_up(ranks.raw(1, **hello))
    assert ranks.ends[0].health()["hosts"] == {"0": "node0"}


def test_a_stranger_that_says_nothing_is_sent_away_after_a_while(star, monkeypatch):
    """A connection without a word does not use up a file descriptor for ever."""
    monkeypatch.setattr(door, "_INTRODUCTION", 0.05)
    ranks = star(2).meet(0)
    ranks.hangs_up(ranks.connect(Note.loads(ranks.store.look(KEY)).port))
    assert ranks.ends[0].wait is None


def test_a_rank_that_hangs_up_before_it_is_known_was_never_there(star, caplog):
    """A spoke that was tired of waiting is not taken in, to be lost a moment later."""
    ranks = star(2).meet(0)
    note = Note.loads(ranks.store.look(KEY))
    tired = ranks.connect(note.port)
    tired.say(Kind.HELLO, {"token": note.token, "rank": 1, "host": "raw"})
    tired.push()
    tired.close()
    ranks.meet(1)
    assert messages(caplog) == []


def test_without_file_descriptors_the_door_is_shut_for_a_while(star, monkeypatch, caplog):
    """Who knocks then wakes nobody again and again, and is let in when there is room."""
    monkeypatch.setattr(door, "_PAUSE", 0.05)
    ranks = star(2).meet(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raw = ranks.raw(1)
    spare = socket.socket()
    spare.close()
    with socket.socket() as last:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 1, hard))
            ranks.until(lambda: messages(caplog))
            assert ranks.selectors[0].select(0) == []
            assert ranks.ends[0].wait is not None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert messages(caplog) == [
        "rank 0 cannot let in the other ranks (Too many open files), and tries again every second. "
        "Until then they record their own values alone. Are there enough file descriptors? "
        "`ulimit -n` says how many it may have; it needs one for each of 1 ranks."
    ]
    ranks.hear(raw, Kind.WELCOME)


def test_many_ranks_get_the_file_descriptors_that_they_need():
    """Where the program may raise its own limit, thousands of ranks do not use up what it has."""
    assert run_ranks(host_programs.room_for, 1, 3000, backend=None, **FORKED) == [(3064, 64)]


# ---------------------------------------------------------------- where it listens


def test_ranks_of_one_host_listen_to_no_other(star):
    """What is on one machine is not open to the network."""
    ranks = star(2).meet(0)
    assert Note.loads(ranks.store.look(KEY)).addresses == ("127.0.0.1",)
    with meeting.listen(Identity(0, 4, local_world_size=4)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_ranks_of_several_hosts_listen_everywhere(monkeypatch):
    """The address that leads to the others comes first; a user may say which it is."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    me = Identity(0, 4, local_world_size=2, host="node7")
    with meeting.listen(me) as listener:
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert meeting.addresses(me)[-1] == "node7"
    monkeypatch.setenv("MASTER_ADDR", "no address at all" * 20)
    assert meeting.addresses(me) == ("node7",)
    monkeypatch.setenv("EVERYRANK_ADDRESS", "10.0.0.7")
    assert meeting.addresses(me) == ("10.0.0.7",)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert not meeting.spans_hosts(me)


def test_a_rank_on_the_first_ones_host_tries_the_loopback_first():
    """Another host's loopback is not asked: somebody else may listen there."""
    note = Note("node0", ("10.0.0.1", "node0"), 1234, "word")
    assert note.doors("node0") == ("127.0.0.1", "10.0.0.1", "node0")
    assert note.doors("node1") == ("10.0.0.1", "node0")


def test_health_is_plain_data(star):
    """It goes into a JSON file as it is, with ranks as strings."""
    ranks = star(3, timeout=0.1).meet(0, 1)
    ranks.ends[0].start(rows([0], loss=[1.0]))
    ranks.ends[1].start(rows([0], loss=[1.0]))
    ranks.finish()
    for end in ranks.ends.values():
        assert json.loads(json.dumps(end.health())) == end.health()
    assert ranks.ends[0].health()["hosts"] == {"0": "node0", "1": "node1"}


# ---------------------------------------------------------------- real processes

FORKED: dict[str, Any] = {"start_method": "forkserver"}


def test_processes_meet_in_a_directory_and_agree_to_the_last_bit(tmp_path):
    """With no framework but the launcher's environment, the n-th History meets the n-th."""
    results = run_ranks(host_programs.reduce, 3, str(tmp_path), backend=None, **FORKED)
    assert all(result == results[0] for result in results)
    first, second = results[0]
    assert first == [(step, step + 1.0) for step in range(20)]
    assert second == [(step, step + 101.0) for step in range(20)]


def test_processes_meet_in_the_store_of_torch():
    """Where torch.distributed is initialised, no directory is needed."""
    results = run_ranks(host_programs.reduce, 2, None, backend="gloo", **FORKED)
    assert results[0] == results[1]
    assert results[0][0] == [(step, step + 0.5) for step in range(20)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_holds_up_nobody(tmp_path, victim):
    """The others finish all of their rows, say who is gone, and end."""
    results = run_ranks(
        host_programs.reduce_until_killed,
        3,
        str(tmp_path),
        victim,
        backend=None,
        may_die=[victim],
        **FORKED,
    )
    assert isinstance(results[victim], Died)
    for result in (r for rank, r in enumerate(results) if rank != victim):
        assert result["steps"] == list(range(40))
        assert result["ranks"] == (1.0 if victim == 0 else 2.0)
    said = "\n".join(line for r in results if isinstance(r, dict) for line in r["said"])
    assert f"rank {victim} (" in said
    assert "is gone: its connection ended" in said


def test_a_process_whose_store_is_gone_goes_on_alone():
    """The process that served torch's store was killed before anybody looked into it."""
    died, result = run_ranks(
        host_programs.outlive_the_store, 2, backend=None, may_die=[0], **FORKED
    )
    assert isinstance(died, Died)
    assert result["steps"] == [0, 1, 2]
    assert "the store of torch.distributed does not answer" in "\n".join(result["said"])


def test_a_rank_that_was_started_anew_is_late_for_what_it_missed(star):
    """Steps that were reduced without it are not reduced again; from the next on it takes part."""
    ranks = star(2).meet(0, 1)
    for end in ranks.ends.values():
        end.start(rows([0], loss=[end.identity.rank]))
    ranks.finish()
    ranks.cut(1)
    ranks.ends[0].start(rows([1, 2, 3], loss=[1.0] * 3))
    ranks.finish()
    ranks.given[1] = []
    ranks.open(1)
    ranks.until(lambda: ranks.ends[1].facts is not None)
    ranks.ends[1].start(rows([2, 3, 4], loss=[3.0] * 3))
    ranks.until(lambda: ranks.ends[1].unfinished == 1)
    ranks.ends[0].start(rows([4], loss=[1.0]))
    ranks.finish()
    assert ranks.values(0, "loss/mean") == [(0, 0.5), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert ranks.values(1, "loss") == [(2, 3.0), (3, 3.0), (4, 3.0)]
    assert ranks.values(1, "loss/mean")[-1] == (4, 2.0)
