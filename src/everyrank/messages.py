"""What the library says to a person: by the standard library's logging, under the name `everyrank`.

Handlers belong to the program, and one of them may raise. Most of what is said is said in the
background, in the middle of work that others wait for, and a message must not cost them their rows.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any


class _Messages(logging.LoggerAdapter[logging.Logger]):
    """A logger whose handlers may fail."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Say something; whether it was heard is not ours to care for."""
        options["stacklevel"] = options.get("stacklevel", 1) + 1  # the line that says it, not ours
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **options)


log = _Messages(logging.getLogger("everyrank"), {})
