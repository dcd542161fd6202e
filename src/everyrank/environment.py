"""Switches that a user sets in the environment: read when somebody asks, never at import."""

from __future__ import annotations

import os

_NO = ("", "0", "false", "no", "off", "n", "f")


def switched_on(name: str) -> bool:
    """Say whether an environment variable is set to anything but a no."""
    return os.environ.get(name, "").strip().lower() not in _NO
