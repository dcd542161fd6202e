"""Write each n-th step only: `Every(10, to=Background(Jsonl(path)))`."""

from __future__ import annotations

from collections.abc import Mapping

from everyrank.backends.base import Backend
from everyrank.errors import OptionError
from everyrank.records import Description, Record


class Every:
    """Pass on the steps that `n` divides, and at the close the last one, whatever its number.

    A step may have several records, such as one of training and one of an evaluation: all of them
    are passed on, or none.
    """

    def __init__(self, n: int, *, to: Backend) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(
                f"`n` of Every must be an int of at least 1, but is {n!r}. "
                "Every(1, to=...) passes on every step."
            )
        self.name = to.name
        self._n = n
        self._to = to
        self._due: list[Record] = []  # of the last step, if it was not passed on

    def describe(self, descriptions: Mapping[str, Description]) -> None:
        """Tell the backend behind how metrics are read."""
        describe = getattr(self._to, "describe", None)
        if describe is not None:
            describe(descriptions)

    def write(self, record: Record) -> None:
        """Pass the record on if its turn has come."""
        if record.step % self._n == 0:
            self._due = []
            self._to.write(record)
            return
        # A later record of a step replaces one whose names it has: this bounds what is kept here.
        names = record.values.keys()
        self._due = [
            each
            for each in self._due
            if each.step == record.step and not each.values.keys() <= names
        ]
        self._due.append(record)

    def flush(self) -> None:
        """Flush the backend behind."""
        flush = getattr(self._to, "flush", None)
        if flush is not None:
            flush()

    def close(self) -> None:
        """Pass on the last step if it is still due, and close the backend behind."""
        due, self._due = self._due, []
        try:
            for record in due:
                self._to.write(record)
        finally:
            self._to.close()
