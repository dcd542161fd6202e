"""Every other rank's end of the star: it finds the first, sends its rows, takes in what was reduced."""

from __future__ import annotations

import time
from typing import Any, Literal

from everyrank.messages import log
from everyrank.ranks import Peers
from everyrank.ranks.base import Reduced
from everyrank.ranks.end import End, named
from everyrank.ranks.meeting import Search, part
from everyrank.ranks.wire import Channel, Kind
from everyrank.records import Batch


class Spoke(End):
    """A rank that is not the first."""

    def __init__(self, peers: Peers, **options: Any) -> None:
        super().__init__(peers, **options)
        self._search: Search | None = None
        self._channel: Channel | None = None
        self._over: Literal["closed", "gone"] | None = None  # what became of the first rank
        self._host: dict[int, str] = {}  # of the first rank, once we have met it
        self._first_row: float | None = None
        self._heard = 0.0
        self._flush_wanted = False
        self._late = 0
        self._in_step = True  # False if rows of ours went their own way while we were alone

    @property
    def wait(self) -> float | None:
        """Give the seconds until there is something to try again."""
        if self._over is not None:
            return None
        if self._channel is not None:
            return self._timeout / 4 if self._own.waiting else None
        ends = [0.0] if self._search is None else [self._search.wait]
        if self._own.waiting and self._first_row is not None:
            ends.append(self._first_row + self._patience - time.monotonic())
        times = [end for end in ends if end is not None]
        return max(0.0, min(times)) + 0.001 if times else None

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
        if self._closed:
            return []
        if self._over is None and self._channel is None:
            self._meet()
        if self._over is not None:
            return self._alone()
        if self._channel is None:
            return self._unmet()
        return self._hear(self._channel)

    def request_flush(self) -> None:
        """Ask every rank to hand over what it has."""
        self._flush_wanted = True
        if self._channel is not None:
            self._channel.say(Kind.FLUSH)
            self._push(self._channel)

    def leave(self) -> None:
        """Say that nothing more comes from here."""
        self._left = True
        if self._channel is not None:
            self._channel.say(Kind.BYE)
            self._push(self._channel)

    def give_up(self) -> None:
        """Finish what waits alone, and hear no more."""
        self._over = self._over or "gone"
        if self._channel is not None:
            self._forget(self._channel)  # `close` has its last words

    def close(self) -> None:
        """Let go; what the socket still holds has a second to get out."""
        if self._closed:
            return
        if not self._left:
            self.leave()
        self._closed = True
        if self._search is not None:
            self._search.end()
        if self._channel is not None:
            self._forget(self._channel)
            part([self._channel])
            self._channel = None

    def health(self) -> dict[str, Any]:
        """Say what became of the first rank, if it is not there, and what came late."""
        state = self._over or (None if self._in_step or self._channel else "absent")
        # Once we have said goodbye ourselves, that it has closed is as it should be.
        missed = state == "gone" or (state and not self._left)
        missing = {str(self._peers.first): state} if missed else {}
        return {"missing_ranks": missing, "late_rows": self._late}

    def _meet(self) -> None:
        """Take up the connection if the first rank has been found."""
        if self._search is None:
            self._search = Search(self._store, self._meeting, self.identity, len(self._peers.ranks))
        met = self._search.met()
        if met is None:
            return
        self._search, self._channel = None, met.channel
        self.facts, self._host = met.facts, {self._peers.first: met.host}
        self._heard = time.monotonic()
        self._watch(met.channel)
        for batch in self._own.batches():
            met.channel.send_rows(batch)
        # What was said while nobody could hear it.
        if self._flush_wanted:
            self.request_flush()
        if self._left:
            self.leave()

    def _hear(self, channel: Channel) -> list[Batch]:
        out: list[Batch] = []
        for kind, payload in channel.frames():
            if kind is Kind.REDUCED:
                out += self._answered(channel.read_reduced(payload))
            elif kind is Kind.FLUSH:
                self._flush_asked = True
            elif kind is Kind.BYE:
                # The first rank closed its History and this one goes on: no fault, nothing to say.
                self._over = "closed"
        if channel.heard:
            self._heard, channel.heard = time.monotonic(), False
        if self._over is None:
            self._push(channel)
            self._check(channel)
        if self._over is not None:
            self._drop(channel)
            self._channel = None
            out += self._alone()
        return out

    def _answered(self, reduced: Reduced) -> list[Batch]:
        mine = self.identity.rank in reduced.who
        if not self._in_step and not mine:
            return []  # we came late and finished such steps alone: what others say of them is past
        self._in_step = True
        ours = next(self._own.batches(), None)
        nothing = not reduced.names and not reduced.states
        if mine and nothing and ours is not None and ours.names:
            self._late += len(reduced)
        return list(self._own.answer(reduced))

    def _check(self, channel: Channel) -> None:
        """See whether the first rank is still there."""
        if channel.closed:
            why = "its connection ended"
        elif self._own.waiting and time.monotonic() - self._heard > self._timeout:
            why = f"it said nothing for {self._timeout:g} s"
        else:
            return
        self._over = "gone"
        if not self._left:
            log.warning(
                "%s is gone: %s. Rank %d records its own values alone from here on; the run's log, "
                "which that rank wrote, ends here (per_rank=True keeps one for each rank).",
                named(self._host, self._host),
                why,
                self.identity.rank,
            )

    def _unmet(self) -> list[Batch]:
        """Finish rows alone while the first rank has opened no History."""
        since = self._first_row
        if since is None or time.monotonic() - since < self._patience:
            return []
        if self._in_step:
            self._in_step = False
            assert self._search is not None
            log.warning(
                "rank %d has not opened this History within %g s: %s. Rank %d records its own "
                "values alone until it does.",
                self._peers.first,
                self._patience,
                self._search.why,
                self.identity.rank,
            )
        return self._alone()
