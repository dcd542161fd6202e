"""A rank's own values, in a file of its own, as soon as it is known where the run is kept.

The first rank chooses the run directory, and the others hear of it a moment after they started.
What they record until then waits here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everyrank.backends.background import Background
from everyrank.backends.jsonl import Jsonl
from everyrank.errors import RunDirectoryError
from everyrank.messages import log
from everyrank.records import Batch

#: So many batches may wait for a first rank that does not say where the run is kept.
_PENDING = 10_000


class PerRank:
    """Write batches to `ranks/rank-00003.jsonl` in the run directory, and nothing until it is known.

    `where` gives the run directory, or None while it is not known.
    """

    name = "per_rank"

    def __init__(self, rank: int, where: Callable[[], Path | None]) -> None:
        self._rank = rank
        self._where = where
        self._pending: list[Batch] = []
        self._to: Background | None = None
        self._refused = False
        self.dropped = 0

    def write_batch(self, batch: Batch) -> None:
        """Write a batch, or keep it until it can be."""
        self._open()
        if self._to is not None:
            self._to.write_batch(batch)
        elif self._refused or len(self._pending) >= _PENDING:
            self.dropped += len(batch)
        else:
            self._pending.append(batch)

    def flush(self, seconds: float) -> bool:
        """Wait until what was written is in the file; False while there is none."""
        return self._to.flush(seconds) if self._to is not None else not self._pending

    def close(self, seconds: float) -> bool:
        """Write what is left; False if some of it could not be."""
        self._open()
        if self._to is not None:
            return self._to.close(seconds)
        self.dropped += sum(map(len, self._pending))
        self._pending.clear()
        if self.dropped and not self._refused:
            log.warning(
                "the %d rows of rank %d alone were not written: the first rank never said where "
                "the run is kept. Give outdir= on every rank to do without it.",
                self.dropped,
                self._rank,
            )
        return not self.dropped

    def health(self) -> dict[str, int | str | None]:
        """Count what waits and what failed."""
        if self._to is not None:
            return self._to.health()
        waiting = sum(map(len, self._pending))
        return {"waiting": waiting, "failures": int(self._refused), "dropped": self.dropped}

    def _open(self) -> None:
        if self._to is not None or self._refused or (directory := self._where()) is None:
            return
        path = directory / "ranks" / f"rank-{self._rank:05d}.jsonl"
        try:
            self._to = Background(Jsonl(path), name=self.name)
        except RunDirectoryError as error:
            self._refused = True
            log.warning("the rows of rank %d alone are not written: %s", self._rank, error)
            return
        for batch in self._pending:
            self._to.write_batch(batch)
        self._pending.clear()
