"""Ranks over the accelerator's own collectives, for those who ask: `History(transport="device")`.

What the ranks say to each other are the same frames as over sockets, carried by rounds of one
all_gather each, in a process group that only metrics use. Every rank hears everything, and works out
the same statistics for itself.

It asks more of a program than the default does, which is why it is not the default:

* **Together.** Every rank of the group opens its Histories in the same order (that creates the
  process group), and goes on logging: a round is entered by all, or waits.
* **Agreement.** Streams, rules and clock are the same on every rank: what decides about waiting is
  the latest of all ranks' clocks, as they told it in the round. So are the numbers, to the last bit.
* **Bound.** A round is entered when there is something to say, or somebody is waited for, and then
  at most every 5 ms; it carries as many bytes of each rank as the last one showed to be needed.
* **Deadline.** A round that takes longer than `timeout`, or fails, is the last: the ranks that did
  not enter it are named, and each goes on with its own values, which say so.
* **Close.** A rank that closes stays for the rounds of the others until all have closed, or its
  own deadline comes.
* **Device.** A round occupies the device while it waits for the slowest rank, and shares it with
  training's collectives. That is the price of needing no network but the accelerator's.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everyrank.errors import OptionError
from everyrank.messages import log
from everyrank.ranks import Peers
from everyrank.ranks.align import Alignment
from everyrank.ranks.end import named
from everyrank.ranks.join import OwnRows
from everyrank.ranks.torch import device_of
from everyrank.ranks.wire import Frames, Kind
from everyrank.records import Batch
from everyrank.stage.capture import relax_this_thread

_HEAD = struct.Struct("<QQd??")  # bytes here, bytes left behind, clock, flush asked, have left
_SMALLEST, _LARGEST = 1 << 12, 1 << 22  # bytes that a round carries of each rank
_PAUSE = 0.005  # between rounds in which somebody is waited for


class DeviceRanks:
    """One rank among those that reduce by collectives; see the contract above."""

    def __init__(
        self,
        peers: Peers,
        *,
        stats: Sequence[str],
        timeout: float,
        facts: Mapping[str, Any],
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OptionError(
                "transport='device' needs torch.distributed to be initialised first, for example "
                "by everyrank.setup_torch(). The default transport='host' does without."
            )
        self.identity = peers.identity
        self.facts: dict[str, Any] | None = None
        self._ranks = peers.ranks
        self._stats = tuple(stats)
        self._timeout = timeout
        # Its own deadline is out of reach: ours comes first, and does not end the program.
        self._group: Any = dist.new_group(
            list(peers.ranks), timeout=timedelta(days=30), use_local_synchronization=True
        )
        self._device = device_of(self._group)
        assert peers.store is not None
        self._store = peers.store()
        self._align = Alignment(peers.ranks, stats=self._stats, timeout=timeout)
        for rank in peers.ranks:
            self._align.join(rank)
        self._own = OwnRows(self.identity.rank)
        self._out = Frames()
        self._in = {rank: Frames() for rank in peers.ranks}
        self._weights: dict[str, str] = {}
        self._size = _SMALLEST
        self._round: _Round | None = None
        self._rounds = 0
        self._clock = 0.0  # the latest of all ranks', as of the last round
        self._born = time.monotonic()
        self._next = 0.0  # no round before this moment
        self._asking = self._asked = False  # to hand over what is open
        self._left = self._lost = self._noted = False
        self._gone: set[int] = set()  # ranks that have left
        if self.identity.rank == peers.first:
            self.facts = dict(facts)
            self._out.say(Kind.WELCOME, self.facts)

    @property
    def unfinished(self) -> int:
        """How many rows were started here and are not finished."""
        staying = self._left and not self._lost and len(self._gone) < len(self._ranks)
        return max(self._own.waiting, int(staying))

    @property
    def wait(self) -> float | None:
        """Look again soon while a round is under way or due."""
        if self._lost:
            return None
        if self._round is not None:
            return 0.001
        return max(0.001, self._next - time.monotonic()) if self._due() else None

    def start(self, batch: Batch) -> None:
        """Hand over some steps."""
        self._own.add(batch)
        self._out.send_rows(batch)

    def poll(self) -> list[Batch]:
        """Enter or end a round, and give the rows that are finished by it."""
        if self._lost:
            return self._alone()
        try:
            self._go_on()
        except (RuntimeError, ValueError) as error:  # what a broken collective raises
            return self._alone_from_here(f"a collective failed ({error})")
        if self._round is not None and self._overdue(self._round):
            return self._alone_from_here(f"a collective took longer than {self._timeout:g} s")
        reduced = self._align.pop(self._clock)
        return [batch for one in reduced for batch in self._own.answer(one)]

    def declare_weight(self, name: str, weight: str) -> None:
        """Weigh a mean; every rank declares the same."""
        self._weights[name] = weight
        self._align.weights[name] = weight

    def request_flush(self) -> None:
        """Ask the other ranks, with the next round, to hand over what they have."""
        self._asking = True

    def flush_requested(self) -> bool:
        """Say, once, whether another rank asked us to hand over what we have."""
        asked, self._asked = self._asked, False
        return asked

    def give_up(self) -> None:
        """Wait for nobody any longer."""
        self._timeout = 0.0

    def leave(self) -> None:
        """Say that nothing more comes from this rank."""
        self._left = True

    def close(self) -> None:
        """Let go of the group; a round that never ended is left to the end of the process."""
        if self._round is None and not self._lost:
            with contextlib.suppress(RuntimeError, ValueError):  # torch.distributed may be gone
                dist.destroy_process_group(self._group)

    def health(self) -> dict[str, Any]:
        """Say who is missing, and how many collectives there were."""
        # Once we have left ourselves, that others have is as it should be.
        gone = {} if self._left else {str(rank): "closed" for rank in sorted(self._gone)}
        return {"missing_ranks": gone, "late_rows": self._align.late, "collectives": self._rounds}

    # ------------------------------------------------------------------------------- rounds

    def _go_on(self) -> None:
        if self._round is None and self._due() and time.monotonic() >= self._next:
            self._enter()
        if self._round is not None and self._round.done():
            self._take_in(self._round.fetch())

    def _due(self) -> bool:
        """Say whether a round should be entered; all but the first reason are known to all."""
        if len(self._gone) == len(self._ranks):
            return False
        return self._out.backlog > 0 or self._left or self._align.waiting

    def _enter(self) -> None:
        part = self._out.take(self._size - _HEAD.size)
        clock = time.monotonic() - self._born
        head = _HEAD.pack(len(part), self._out.backlog, clock, self._asking, self._left)
        self._asking = False
        self._round = _Round(head + part, self._size, self._group, self._device, len(self._ranks))
        self._rounds += 1

    def _take_in(self, messages: Sequence[bytes]) -> None:
        """Hear what every rank said in a round, in the order of the ranks."""
        self._round = None
        self._next = time.monotonic() + _PAUSE
        most = 0
        for rank, message in zip(self._ranks, messages, strict=True):
            size, behind, clock, asked, left = _HEAD.unpack_from(message)
            self._clock = max(self._clock, clock)
            most = max(most, behind)
            self._asked |= asked and rank != self.identity.rank
            self._hear(rank, message[_HEAD.size : _HEAD.size + size])
            if left and not behind:
                self._gone.add(rank)
                self._align.leave(rank)
        if most:
            self._size = min(_LARGEST, max(self._size, 1 << (most + _HEAD.size).bit_length()))
            self._next = 0.0

    def _hear(self, rank: int, part: bytes) -> None:
        frames = self._in[rank]
        frames.feed(part)
        for kind, payload in frames.frames():
            if kind is Kind.ROWS:
                self._align.add(rank, frames.read_rows(payload), self._clock)
            elif kind is Kind.WELCOME and self.facts is None:
                self.facts = json.loads(payload)

    def _alone(self) -> list[Batch]:
        own = self._own.answer_alone(
            stats=self._stats, weights=self._weights, world_size=len(self._ranks)
        )
        return list(own)

    def _alone_from_here(self, why: str) -> list[Batch]:
        self._lost = True
        if not self._left:
            log.warning(
                "%s: %s. Rank %d records its own values alone from here on.",
                why,
                self._absent(),
                self.identity.rank,
            )
        return self._alone()

    def _overdue(self, current: _Round) -> bool:
        """Say whether a round takes too long; half way there, leave word that we are in it."""
        waited = time.monotonic() - current.began
        if waited > self._timeout / 2 and not self._noted:
            self._noted = True
            self._leave_word()
        return waited > self._timeout

    def _leave_word(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            self._store.leave(self._word(self.identity.rank), "here")

    def _absent(self) -> str:
        """Name the ranks that left no word that they are in this round."""
        try:
            absent = [r for r in self._ranks if self._store.look(self._word(r)) is None]
        except (RuntimeError, ValueError):
            return "the ranks that are missing cannot be named"
        return f"{named(absent, {})} did not take part" if absent else "all ranks were in it"

    def _word(self, rank: int) -> str:
        return f"{self._group.group_name}/{self._rounds}/{rank}"


#: The name it has from torch 2.13 on, or the one before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Round:
    """One all_gather of bytes under way."""

    def __init__(self, message: bytes, size: int, group: Any, device: torch.device, n: int) -> None:
        self.began = time.monotonic()
        self._size = size
        if device.type == "cuda":
            relax_this_thread()
            torch.cuda.set_device(device)  # each thread has a current device of its own
        mine = torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        self._all = torch.empty(n * size, dtype=torch.uint8, device=device)
        self._work = _all_gather(self._all, mine.to(device), group=group, async_op=True)

    def done(self) -> bool:
        """Say whether every rank has been heard."""
        return bool(self._work.is_completed())

    def fetch(self) -> list[bytes]:
        """Give the message of every rank."""
        self._work.wait()
        message = bytes(self._all.cpu().numpy())
        return [message[at : at + self._size] for at in range(0, len(message), self._size)]
