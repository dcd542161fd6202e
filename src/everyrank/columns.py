"""Growing columns, aligned by step: the run in memory.

Batches that have the same names share one `Table`: one axis of steps, times and generations beside
a matrix of float64, in chunks that are filled once and never copied or moved. A reader therefore
takes the lock only to note how long each table is, and reads the rows below that without it.

Nothing is deleted. Which rows are *live* is worked out when somebody asks: a value is superseded by
a later value of the same name at the same step or an earlier one (the run went back), and by a
later `rewind` to before its step.

    >>> columns = Columns()
    >>> batch = Batch(
    ...     steps=np.array([0, 1]),
    ...     times=np.array([0.0, 0.5]),
    ...     names=("loss",),
    ...     numbers=np.array([[0.5], [0.25]]),
    ...     kinds=("float",),
    ... )
    >>> columns.append(batch)
    >>> columns.series("loss")
    Series(loss: 2 values of float64, steps 0 to 1, last 0.250000)
"""

from __future__ import annotations

import difflib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from everyrank.moment import Moment
from everyrank.records import Batch, Record
from everyrank.series import Series
from everyrank.tables import Place, Table, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class Columns:
    """Everything a run recorded, by name and by step; one thread appends while others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, ...], Table] = {}
        # Where each name is found, in the order in which the names were first seen.
        self._places: dict[str, tuple[Place, ...]] = {}
        self._declared: set[str] = set()
        self._arrived = 0  # rows so far, over all tables: the order in which they came
        self._rewinds: list[tuple[int, int]] = []  # (rows that had arrived, after_step)
        self._known_steps: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def append(self, batch: Batch) -> None:
        """Add the rows of one batch; nothing of the batch is kept but its texts and arrays."""
        if not len(batch):
            return
        with self._lock:
            table = self._tables.get(batch.names)
            if table is None:
                table = self._tables[batch.names] = Table(batch.names, batch.kinds)
                for column, name in enumerate(batch.names):
                    self._found(name, (table, column))
            # The extras come first: a reader believes that rows below table.rows are complete.
            for row in sorted(batch.extras):
                for name, value in batch.extras[row].items():
                    if table.add_extra(name, table.rows + row, value):
                        self._found(name, (table, None))
            table.append(batch, self._arrived)
            self._arrived += len(batch)

    def rewind(self, after_step: int) -> None:
        """Supersede every row so far whose step is above `after_step`, as a resumed run does."""
        with self._lock:
            self._rewinds.append((self._arrived, after_step))

    def declare(self, name: str) -> None:
        """Let `series(name)` be empty, rather than a KeyError, until the first value comes."""
        with self._lock:
            self._declared.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have, or had, a value, in the order in which they were first seen."""
        with self._lock:
            return tuple(self._places)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps at which any name has a live value: sorted, unique and read-only."""
        version = (self._arrived, len(self._rewinds))
        known = self._known_steps
        if known is None or known[0] != version:
            # Rows may come between the two lines: then the version is merely out of date.
            known = self._known_steps = (version, self._now().timeline().steps)
        return known[1]

    @property
    def nbytes(self) -> int:
        """The bytes set aside for numbers and axes; texts and arrays are not counted."""
        with self._lock:
            return sum(chunk.nbytes for table in self._tables.values() for chunk in table.chunks)

    def __len__(self) -> int:
        return len(self.steps)

    def series(self, name: str) -> Series:
        """Give the live values of one name, in step order."""
        moment = self._now(name)
        if name not in moment.places:
            return Series(name, np.empty(0, np.int64), np.empty(0, np.float64))
        return moment.series(name)

    def all_series(self) -> dict[str, Series]:
        """Give the live values of every name, all as of one moment, by name."""
        moment = self._now()
        return {name: moment.series(name) for name in moment.places}

    def all_rows(self, name: str) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int32]]:
        """Give steps, values and generations of one name as they came, with what was superseded."""
        moment = self._now(name)
        if name not in moment.places:
            return np.empty(0, np.int64), np.empty(0, np.float64), np.empty(0, np.int32)
        axis = moment.axis(name)
        return axis.steps, moment.values(name, axis), axis.generations

    def records(self) -> Iterator[Record]:
        """Give one record for each live step, in step order, as of the moment of the call."""
        return self._now().records()

    def latest(self) -> Record | None:
        """Give the record of the highest live step, or None before there is one."""
        return self._now().latest()

    def _found(self, name: str, place: Place) -> None:
        self._places[name] = (*self._places.get(name, ()), place)

    def _now(self, name: str | None = None) -> Moment:
        """Note under the lock what is there now: of everything, or of one name."""
        with self._lock:
            if name is None:
                places = dict(self._places)
                tables = list(self._tables.values())
            elif name in self._places:
                places = {name: self._places[name]}
                tables = [table for table, _ in places[name]]
            elif name in self._declared:
                places, tables = {}, []
            else:
                raise KeyError(self._unknown(name))
            views = {table: View(table) for table in tables}
            return Moment(places, views, tuple(self._rewinds))

    def _unknown(self, name: str) -> str:
        known = [*self._places, *self._declared]
        if not known:
            return f"There is no metric {name!r}: nothing was recorded so far."
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        if close:
            return f"There is no metric {name!r}. Did you mean {close[0]!r}?"
        some = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
        return f"There is no metric {name!r}. There are {some}."
