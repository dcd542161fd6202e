"""Training metrics from every rank, without stalling one.

    import everyrank

    history = everyrank.History()
    for step in range(100):
        history.update({"loss": train_step()})
    history.finalize()

A value is copied into the open window where it lies; a closed window is reduced over all ranks in
the background, becomes records, and these go to the columns in memory and to the backends:

    values -> stage -> window -> ranks -> records -> columns -> backends, reports

`import everyrank` imports neither torch nor jax: the value that is handed over says which is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everyrank.backends.console import Console
    from everyrank.backends.every import Every
    from everyrank.errors import (
        EveryrankError,
        MetricError,
        MissingPackage,
        OptionError,
        RunDirectoryError,
        SyncFailed,
    )
    from everyrank.history import History
    from everyrank.records import Record
    from everyrank.setup import setup_torch, setup_wandb
    from everyrank.stopwatch import StopWatch

__version__ = "0.1.0"

#: Where each public name lives; it is imported when somebody asks for it.
_HOMES = {
    "Console": "backends.console",
    "Every": "backends.every",
    "EveryrankError": "errors",
    "History": "history",
    "MetricError": "errors",
    "MissingPackage": "errors",
    "OptionError": "errors",
    "Record": "records",
    "RunDirectoryError": "errors",
    "StopWatch": "stopwatch",
    "SyncFailed": "errors",
    "setup_torch": "setup",
    "setup_wandb": "setup",
}

__all__ = [
    "Console",
    "Every",
    "EveryrankError",
    "History",
    "MetricError",
    "MissingPackage",
    "OptionError",
    "Record",
    "RunDirectoryError",
    "StopWatch",
    "SyncFailed",
    "setup_torch",
    "setup_wandb",
]


def lazily(package: str, homes: Mapping[str, str], names: dict[str, Any]) -> Callable[[str], Any]:
    """Give a package's `__getattr__`: it imports a public name from its home when somebody asks."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"everyrank.{homes[name]}"), name)
        names[name] = value  # the next access does not come here
        return value

    return find


_find = lazily(__name__, _HOMES, globals())


def __getattr__(name: str) -> Any:
    # For programs that say everyrank.testing or everyrank.metrics without importing it.
    return import_module(f"everyrank.{name}") if name in ("testing", "metrics") else _find(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
