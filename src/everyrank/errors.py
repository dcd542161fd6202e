"""What everyrank raises, and only ever at the call that caused it.

    EveryrankError
    ├── MetricError         a value, a key or a step that cannot be recorded  (also a ValueError)
    ├── OptionError         an option that cannot be honoured                 (also a ValueError)
    ├── MissingPackage      an optional package is not installed              (also an ImportError)
    ├── SyncFailed          metrics could not be brought together             (also a RuntimeError)
    └── RunDirectoryError   the run directory cannot be used                  (also an OSError)

Nothing is raised into training from the background: a failure there is logged once, counted, and
shown by ``history.health()``.
"""

from __future__ import annotations

from typing import Any


class EveryrankError(Exception):
    """Anything that everyrank raises on purpose."""


class MetricError(EveryrankError, ValueError):
    """A value, a key or a step that cannot be recorded; nothing recorded before it is lost."""


class OptionError(EveryrankError, ValueError):
    """An option that cannot be honoured; the message says what would be."""


class MissingPackage(EveryrankError, ImportError):  # noqa: N818 - reads as what it says
    """An optional package that this call needs is not installed."""

    def __init__(self, what: str, package: str, extra: str | None = None) -> None:
        """Say that `what` needs `package`, and how to get it."""
        install = f'"everyrank[{extra}]"' if extra else package
        super().__init__(f"{what} needs the package {package}: pip install {install}.")
        self._made_of = what, package, extra

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception that does not survive the way out of a worker process takes its pool along.
        return type(self), self._made_of


class SyncFailed(EveryrankError, RuntimeError):  # noqa: N818 - reads as what it says
    """Metrics could not be brought together over the ranks; what this rank has is kept."""


class RunDirectoryError(EveryrankError, OSError):
    """The run directory cannot be written, or belongs to another run that is being written."""
