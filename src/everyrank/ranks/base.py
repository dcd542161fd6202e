"""Who we are, and the narrow protocol by which a rank's numbers meet those of the others.

Two residents keep it: `local` (ranks in one process; the reference for the other) and `host`
(processes, over host memory).

A rank hands over its rows with `start`, which never blocks and never raises, and picks up what has
been finished with `poll`. All of it happens on the History's background thread. The contract:

* **Order.** Reduced rows come in the order of the run, each once. Every row that was started is
  answered, once and in the order of `start`: by the statistics that it is part of, or, if it came
  after its step was reduced without it, by itself.
* **Agreement.** Every rank is given the same reduced numbers, to the last bit.
* **Disagreement.** Ranks need not start the same rows. Statistics are over the ranks that reported
  a step, and a reduced row says which those were.
* **Deadline.** A rank that does not report what others did is waited for at most `timeout` seconds,
  one that never reported anything for a shorter while (see `align`); then the others go on without
  it, and it is named once. Nothing in here waits without a deadline.
* **Failure.** A rank that is gone, or cannot be reached, is one message and statistics without it;
  if it was the one that reduces, the others go on with local statistics that say so.
* **Close.** `leave` says goodbye, `close` lets go; neither hangs, and tearing down in any order is
  quiet.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from everyrank.records import Batch


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is among its peers, and how we know."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    source: str = "one process"  # or "torch.distributed", "torchrun", "slurm" ...
    job: str = ""  # what tells this launch from any other on the same machines


@dataclass(frozen=True, slots=True)
class Reduced:
    """Some steps' statistics over the ranks that reported them; the same on every rank.

    `values` is statistics x steps x names; `ranks` and `nonfinite` are steps x names, `merged` is
    steps x states. Without names
    it answers rows that have no statistics: nothing but texts, or all too late.
    """

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    names: tuple[str, ...]
    stats: tuple[str, ...]
    values: NDArray[np.float64]
    ranks: NDArray[np.int64]
    nonfinite: NDArray[np.int64]
    world_size: int
    who: frozenset[int]  # the ranks whose rows these are
    states: tuple[str, ...] = ()  # columns of metrics, merged rather than made statistics of
    state_ranks: tuple[int, ...] = ()  # over how many ranks
    merged: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, start: int, stop: int) -> Reduced:
        """Give some of the steps."""
        return replace(
            self,
            steps=self.steps[start:stop],
            times=self.times[start:stop],
            values=self.values[:, start:stop],
            ranks=self.ranks[start:stop],
            nonfinite=self.nonfinite[start:stop],
            merged=self.merged[start:stop],
        )


class Ranks(Protocol):
    """How a rank's numbers meet those of the others; see the contract above."""

    @property
    def identity(self) -> Identity:
        """Who this process is among those that reduce together."""
        ...

    @property
    def unfinished(self) -> int:
        """How many rows were started here and are not finished."""
        ...

    @property
    def wait(self) -> float | None:
        """Give the seconds until `poll` should be called again though nothing came, or None."""
        ...

    @property
    def facts(self) -> dict[str, Any] | None:
        """What the first rank said of the run (its id and directory), once it is known."""
        ...

    def start(self, batch: Batch) -> None:
        """Hand over some steps; never blocks, never raises."""
        ...

    def poll(self) -> list[Batch]:
        """Give the rows that are finished since the last call, in order, with their statistics."""
        ...

    def declare_weight(self, name: str, weight: str) -> None:
        """Weigh the means of `name` by the values of `weight`."""
        ...

    def request_flush(self) -> None:
        """Ask the other ranks to hand over what they have collected so far."""
        ...

    def flush_requested(self) -> bool:
        """Say, once, whether another rank asked us to hand over what we have collected."""
        ...

    def leave(self) -> None:
        """Say that nothing more will be started here."""
        ...

    def give_up(self) -> None:
        """Wait for nobody any longer: what is unfinished is finished with whoever reported it."""
        ...

    def close(self) -> None:
        """Let go of every connection; what is unfinished stays so."""
        ...

    def health(self) -> dict[str, Any]:
        """Count what a person may ask: who is missing, what came late."""
        ...
