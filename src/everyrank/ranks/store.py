"""A place to leave a note: how ranks find each other before they can talk.

The first rank leaves its address and a token, the others look until it is there. torch's and JAX's
own stores serve where they exist; a directory that all ranks see serves where they don't. Any of
them may take its time or raise, if the host it lives on is gone; `str` of it tells where it is.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
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
    """Notes as files of this user alone, in directories of which all ranks see at least one.

    A note is left in each of them, and the newest counts. Other launches may use the same
    directories; `job` tells this one's notes from theirs.
    """

    def __init__(self, *directories: Path, job: str = "") -> None:
        self._directories = directories
        self._job = job

    def __str__(self) -> str:
        return " or ".join(map(str, self._directories))

    def leave(self, key: str, note: str) -> None:
        """Write the note so that nobody ever reads half of it; one directory is enough."""
        errors = []
        for directory in self._directories:
            try:
                self._write(directory, self._name(key), note)
            except OSError as error:
                errors.append(error)
        if len(errors) == len(self._directories):
            raise errors[0]

    def look(self, key: str) -> str | None:
        """Read the note if it is there, and ours."""
        found = [self._read(directory, self._name(key)) for directory in self._directories]
        return max((note for note in found if note is not None), default=(0, None))[1]

    def _write(self, directory: Path, name: str, note: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=directory)  # readable by its owner only
        with os.fdopen(handle, "wb") as file:
            file.write(note.encode())
        os.replace(draft, directory / name)

    def _read(self, directory: Path, name: str) -> tuple[int, str] | None:
        """Give a note of ours and when it was written."""
        try:
            # A network file system may answer for a while that there is no such file, because there
            # was none when it was asked before; to open the directory makes it ask again.
            os.close(os.open(directory, os.O_RDONLY))
            with (directory / name).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid == _user_of_our_files(directory):
                    return status.st_mtime_ns, file.read().decode()
        except (OSError, UnicodeDecodeError):
            pass
        return None

    def _name(self, key: str) -> str:
        name = f"{self._job}/{key}".encode(errors="surrogatepass")  # of any variable or file name
        return f"{hashlib.sha256(name).hexdigest()[:32]}.note"


@cache
def _user_of_our_files(directory: Path) -> int:
    """Say who owns our files there: file systems that map users may see it differently."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
