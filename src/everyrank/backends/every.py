"""Write each n-th step only: `Every(10, to=Background(Jsonl(path)))`."""

from __future__ import annotations

from everyrank.backends.base import Backend
from everyrank.errors import OptionError
from everyrank.records import Record


class Every:
    """Pass on the steps that `n` divides, and at the close the last one, whatever its number."""

    def __init__(self, n: int, *, to: Backend) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(
                f"`n` of Every must be an int of at least 1, but is {n!r}. "
                "Every(1, to=...) passes on every step."
            )
        self.name = to.name
        self._n = n
        self._to = to
        self._last: Record | None = None

    def write(self, record: Record) -> None:
        """Pass the record on if its turn has come."""
        if record.step % self._n:
            self._last = record
        else:
            self._last = None
            self._to.write(record)

    def flush(self) -> None:
        """Flush the backend behind."""
        flush = getattr(self._to, "flush", None)
        if flush is not None:
            flush()

    def close(self) -> None:
        """Pass on the last record if it is still due, and close the backend behind."""
        last, self._last = self._last, None
        try:
            if last is not None:
                self._to.write(last)
        finally:
            self._to.close()
