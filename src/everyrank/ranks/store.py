"""A place to leave a note: how ranks find each other before they can talk.

The first rank leaves its address and a token, the others look until it is there. torch's and JAX's
own stores serve where they exist; a directory that all ranks see serves where they don't. Any of
them may take its time or raise, if the host it lives on is gone; `str` of it tells where it is.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Protocol


class Store(Protocol):
    """Notes that every rank sees."""

    def leave(self, key: str, note: str) -> None:
        """Leave a note under a key, in place of an earlier one."""
        ...

    def look(self, key: str) -> str | None:
        """Give the note, or None if there is none yet; never waits for one."""
        ...


class DirectoryStore:
    """Notes as files of this user alone, in a directory that all ranks see.

    Other launches may use the same directory; `job` tells this one's notes from theirs.
    """

    def __init__(self, directory: Path, job: str = "") -> None:
        self._directory = directory
        self._job = job

    def __str__(self) -> str:
        return str(self._directory)

    def leave(self, key: str, note: str) -> None:
        """Write the note so that nobody ever reads half of it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self._directory)  # readable by its owner only
        with os.fdopen(handle, "wb") as file:
            file.write(note.encode())
        os.replace(name, self._path(key))

    def look(self, key: str) -> str | None:
        """Read the note if it is there, and ours."""
        try:
            # A network file system may answer for a while that there is no such file, because there
            # was none when it was asked before; to open the directory makes it ask again.
            os.close(os.open(self._directory, os.O_RDONLY))
            with self._path(key).open("rb") as file:
                ours = os.fstat(file.fileno()).st_uid == self._user
                return file.read().decode() if ours else None
        except (OSError, UnicodeDecodeError):
            return None

    @cached_property
    def _user(self) -> int:
        """Say who owns our files here, which file systems that map users may see differently."""
        with tempfile.TemporaryFile(dir=self._directory) as probe:
            return os.fstat(probe.fileno()).st_uid

    def _path(self, key: str) -> Path:
        name = f"{self._job}/{key}".encode(errors="surrogatepass")  # of any variable or file name
        return self._directory / f"{hashlib.sha256(name).hexdigest()[:32]}.note"
