"""What a destination for records owes, and what it may count on.

A backend has two obligations, `write` and `close`, and two options, `flush` and `describe`.
Everything else (a thread, a guard, an interval) is a wrapper around a backend.

* **Order.** `write` gets each record once, in the order of the run, and never from two threads.
* **Flush.** Called when no further record is waiting: what was written should reach its
  destination now. A backend without `flush` writes through.
* **Describe.** Called once, before the first record, with the descriptions of the metrics by name;
  the mapping fills up as metrics are declared. A backend without `describe` shows numbers plainly.
* **Failure.** Whatever `write`, `flush` or `close` raises is caught around the backend, logged once
  with its cause, and counted. It never reaches training, and never another backend.
* **Close.** Called once, last, also after failures.

    class Printer:
        name = "printer"

        def write(self, record):
            print(record.step, dict(record.values))

        def close(self):
            pass

    history = History(backends=[Printer()])
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from everyrank.records import Record


@runtime_checkable
class Backend(Protocol):
    """A destination for records."""

    @property
    def name(self) -> str:
        """Give the short name that messages and `health()` use."""
        ...

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Deliver what is left and let go of every resource."""
        ...
