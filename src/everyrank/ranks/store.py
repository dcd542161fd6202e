"""A place to leave a note: how ranks find each other before they can talk.

The first rank leaves its address and a token, the others look until it is there. torch's and JAX's
own stores serve where they exist; a directory that all ranks see serves where they don't.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """Notes that every rank sees."""

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key."""
        ...

    def look(self, key: str) -> str | None:
        """Give the note, or None if there is none yet; never waits for one."""
        ...


class DirectoryStore:
    """Notes as files of this user alone, in a directory that all ranks see."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def leave(self, key: str, note: str) -> None:
        """Write the note so that nobody ever reads half of it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._directory)  # readable by its owner only
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(note)
        os.replace(name, self._path(key))

    def look(self, key: str) -> str | None:
        """Read the note if it is there, and ours."""
        path = self._path(key)
        try:
            if path.stat().st_uid != os.getuid():
                return None
            return path.read_text(encoding="utf-8")
        except OSError:
            return None

    def _path(self, key: str) -> Path:
        return self._directory / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.note"
