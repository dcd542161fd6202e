"""The first rank's end of the star: it aligns, reduces, and tells everybody.

It hears those that the selector names and writes to those that there is news for, so that a look
costs what has come in, however many ranks are connected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from everyrank.messages import log
from everyrank.ranks import Peers
from everyrank.ranks.align import Alignment, Event
from everyrank.ranks.base import Reduced
from everyrank.ranks.door import Door
from everyrank.ranks.end import End, named
from everyrank.ranks.meeting import Errand, Note, addresses, part
from everyrank.ranks.wire import Channel, Kind
from everyrank.records import Batch

#: A spoke that takes in nothing for so many bytes is gone; nobody holds rows for it without bound.
_BACKLOG = 256 << 20


class Hub(End):
    """The first rank: everybody's rows meet here."""

    def __init__(self, peers: Peers, **options: Any) -> None:
        super().__init__(peers, **options)
        self.facts = self._own_facts
        self._align = Alignment(peers.ranks, stats=self._stats, timeout=self._timeout)
        self._align.join(self.identity.rank)
        self._align.weights = self._weights
        self._door = Door(peers, self._selector, self._let_in)
        self._note: Errand[bool] | None = None
        self._spokes: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {self.identity.rank: self.identity.host}
        self._askers: set[int] = set()  # ranks that want the others' rows now
        self._gone: dict[str, list[int]] = {}  # why, and who, since the last report
        self._said_unheard = False
        self._last_sign = time.monotonic()

    @property
    def wait(self) -> float | None:
        """Give the seconds until somebody's patience ends."""
        now = time.monotonic()
        ends = self._door.until - now
        rows = self._align.deadline(now)
        if rows is not None:
            ends = min(ends, rows, self._timeout / 4)
        return None if ends == float("inf") else max(0.0, ends) + 0.001

    def start(self, batch: Batch) -> None:
        """Hand over some steps."""
        self._own.add(batch)
        self._align.add(self.identity.rank, batch, time.monotonic())

    def poll(self) -> list[Batch]:
        """Take in what came, reduce what can be, tell everybody, and finish our own rows."""
        if self._closed:
            return []
        self._door.tend()
        self._leave_note()
        for key, _ in self._selector.select(0):
            if key.data is not None:  # the History watches other things, too
                key.data()
        self._pass_on()
        reduced = self._align.pop(time.monotonic())
        self._tell(reduced)
        self._report()
        return [batch for one in reduced for batch in self._own.answer(one)]

    def request_flush(self) -> None:
        """Ask every rank to hand over what it has."""
        self._askers.add(self.identity.rank)
        self._pass_on()

    def leave(self) -> None:
        """Say that nothing more comes from here, and wait for nobody much longer."""
        self._left = True
        self._align.leave(self.identity.rank)
        self._align.hurry()
        self.request_flush()

    def give_up(self) -> None:
        """Wait for nobody any longer."""
        self._align.give_up()

    def close(self) -> None:
        """Say goodbye and let go; what the sockets still hold has a second to get out."""
        if self._closed:
            return
        self._closed = True
        if self._note is not None:
            self._note.end()
        self._door.close()
        for channel in self._spokes.values():
            self._forget(channel)
            channel.say(Kind.BYE)
        part(list(self._spokes.values()))
        self._spokes.clear()

    def health(self) -> dict[str, Any]:
        """Say who is missing, what came late, and on which hosts the ranks are."""
        # Once we say goodbye ourselves, whoever said so before is not missing.
        fine = "closed" if self._left else None
        missing = {str(r): str(s) for r, s in self._align.missing().items() if s != fine}
        # Of a copy, because the background thread may add to it meanwhile.
        hosts = {str(rank): host for rank, host in sorted(self._hosts.copy().items())}
        return {"missing_ranks": missing, "late_rows": self._align.late, "hosts": hosts}

    def _leave_note(self) -> None:
        """Tell the others where we listen, once we do."""
        if self._note is None and self._door.port is not None:
            self._note = Errand(partial(self._write_note, self._door.port))
            self._note.begin()

    def _write_note(self, port: int) -> bool:
        me = self.identity
        meeting, token = self._meeting, self._door.token
        note = Note(me.host, addresses(me), port, token, meeting.site, dict(meeting.place)).dumps()
        for key in (*meeting.keys, *([meeting.aside] if meeting.aside else [])):
            self._store.leave(key, note)
        return True

    def _let_in(self, rank: int, host: str, channel: Channel) -> bool:
        """Take in a rank, unless its place is taken by one that is alive.

        A process that was started anew comes back under the rank of the one that is gone.
        """
        if rank in self._spokes:
            self._hear(rank, self._spokes[rank])  # it may have hung up a moment ago
        if rank in self._spokes:
            return False
        self._spokes[rank] = channel
        self._hosts[rank] = host
        self._align.join(rank)
        channel.say(Kind.WELCOME, self._own_facts)
        self._watch(channel, partial(self._hear, rank, channel))
        self._push(channel)
        self._hear(rank, channel)  # it may have gone on talking
        return True

    def _hear(self, rank: int, channel: Channel) -> None:
        if self._spokes.get(rank) is not channel:  # lost a moment ago
            return
        for kind, payload in channel.frames():
            if kind is Kind.ROWS:
                self._align.add(rank, channel.read_rows(payload), time.monotonic())
            elif kind is Kind.FLUSH:
                self._flush_asked = True
                self._askers.add(rank)
            elif kind is Kind.BYE:
                self._align.leave(rank)
        if channel.closed:
            self._lost(rank, "its connection ended")
        elif channel.backlog:
            self._push(channel)

    def _pass_on(self) -> None:
        """Ask for the others' rows: once, however many ranks want them."""
        if not self._askers:
            return
        for rank, channel in self._spokes.items():
            if self._askers - {rank}:
                channel.say(Kind.FLUSH)
                self._push(channel)
        self._askers.clear()

    def _tell(self, reduced: Sequence[Reduced]) -> None:
        now = time.monotonic()
        sign = self._align.waiting and now - self._last_sign > self._timeout / 4
        if not reduced and not sign:
            return
        for rank, channel in list(self._spokes.items()):
            for one in reduced:
                channel.send_reduced(one)
            if sign:
                channel.say(Kind.STILL_HERE)
                self._last_sign = now
            self._push(channel)
            if channel.backlog > _BACKLOG:
                self._lost(rank, f"it has not taken in the last {_BACKLOG >> 20} MB")

    def _lost(self, rank: int, why: str) -> None:
        self._drop(self._spokes.pop(rank))
        if self._align.missing().get(rank) != "closed":
            self._align.leave(rank, gone=True)
            self._gone.setdefault(why, []).append(rank)

    def _report(self) -> None:
        """Tell the user what has become of the other ranks."""
        events, self._align.events = self._align.events, []
        for event in events:
            log.warning("%s", self._told(event))
        gone, self._gone = self._gone, {}
        for why, ranks in gone.items():
            if not self._left:
                are = "are" if len(ranks) > 1 else "is"
                log.warning(
                    "%s %s gone: %s. Statistics go on over the others.",
                    named(ranks, self._hosts),
                    are,
                    why,
                )
        if self._note is not None and self._note.failed and not self._said_unheard:
            self._said_unheard = True
            log.warning(
                "rank %d cannot tell the others where it listens: %s does not answer (%s). They "
                "record their own values alone.",
                self.identity.rank,
                self._store,
                self._note.error,
            )

    def _told(self, event: Event) -> str:
        ranks = named(event.ranks, self._hosts)
        if event.what == "back":
            return (
                f"{ranks} reports again from step {event.step} on; by now, {self._align.late} rows "
                "came after their steps were reduced."
            )
        if self._hosts.keys().isdisjoint(event.ranks):
            why = f"opened no History within {self._patience:g} s"
        else:
            why = "did not report it in time"
        return (
            f"step {event.step} is reduced without {ranks}, which {why}. Statistics go on over the "
            "others, and include it again as soon as it reports."
        )
