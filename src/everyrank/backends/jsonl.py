"""The log of a run: one line of JSON for each record, appended and never rewritten.

    history = History(backends=[Jsonl("runs/seven/history.jsonl")])

* **Durable.** Lines are handed to the operating system whole, in one write for each flush; `kill
  -9` leaves at most one torn line at the end, which readers pass over and the next writer removes.
  Nothing is forced to the disk (no fsync), so a power cut may take the last seconds.
* **One writer.** The file is locked while it is open, where the filesystem knows locks.
* **A full disk.** What could not be written is kept, up to 64 MiB, and written by the next flush
  from the byte where the last one stopped, so the file never has a torn middle. Above the bound the
  newest records are dropped and counted in `dropped`.
* **A file that is deleted** is not made anew, since what it held is gone: the next flush says so.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from pathlib import Path

from everyrank import jsonlines
from everyrank.errors import RunDirectoryError
from everyrank.forks import let_go_in_child
from everyrank.records import Record

try:
    import fcntl
except ImportError:  # no such locks on this platform: go on without
    fcntl = None  # type: ignore[assignment]

_FLUSH_ABOVE = 256 * 1024
_CHUNK = 1024 * 1024
_KEEP = 64 * 1024 * 1024


class Jsonl:
    """Append each record to a file of JSON lines; `overwrite=True` begins the file anew.

    A path that cannot be written, that another run is writing, or that holds something else than a
    log is an error here, at the call.
    """

    name = "jsonl"
    _file = -1  # closed, or never open

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.dropped = 0
        self._lines: deque[bytes] = deque()
        self._size = 0
        self._file = _locked(self.path)
        try:
            if overwrite:
                os.ftruncate(self._file, 0)
            jsonlines.repair_open(self._file)
        except jsonlines.NotALog as error:
            self._let_go()  # at once: closed again by __del__, the number may be another file's
            raise RunDirectoryError(
                f"`{self.path}` is not a log of records ({error}). Choose another path, or pass "
                "overwrite=True to replace the file."
            ) from error
        except OSError as error:
            self._let_go()
            raise _unusable(self.path, error) from error
        let_go_in_child(self)  # a child that outlives a killed parent would hold its lock

    def write(self, record: Record) -> None:
        """Take one record; it reaches the file with the next flush."""
        if self._file < 0:
            return
        line = jsonlines.encode(record)
        if self._size + len(line) > _KEEP:
            self.dropped += 1
            raise OSError(errno.ENOBUFS, f"{self.dropped} records dropped so far", str(self.path))
        self._lines.append(line)
        self._size += len(line)
        if self._size > _FLUSH_ABOVE:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the operating system; what it does not take is kept for the next."""
        if self._file >= 0 and self._is_deleted():
            self._lines.clear()
            self._size = 0
            raise FileNotFoundError(errno.ENOENT, "deleted while it was written", str(self.path))
        while self._lines and self._file >= 0:
            rest = memoryview(self._next_chunk())
            size = len(rest)
            try:
                while rest:
                    # A disk that fills up takes a part: the rest of that line stays at the head.
                    rest = rest[os.write(self._file, rest) :]
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            finally:
                self._size -= size - len(rest)
                if rest:
                    self._lines.appendleft(bytes(rest))

    def _is_deleted(self) -> bool:
        # Asked twice, because there are file systems that count no links.
        return os.fstat(self._file).st_nlink == 0 and not self.path.exists()

    def _next_chunk(self) -> bytes:
        """Join the lines that one write takes: all of them, unless a full disk piled them up."""
        if self._size <= _CHUNK:
            chunk = b"".join(self._lines)
            self._lines.clear()
            return chunk
        lines = [self._lines.popleft()]
        size = len(lines[0])
        while self._lines and size + len(self._lines[0]) <= _CHUNK:
            lines.append(self._lines.popleft())
            size += len(lines[-1])
        return b"".join(lines)

    def close(self) -> None:
        """Write what is left, and let go of the file and its lock."""
        if self._file < 0:
            return
        try:
            self.flush()
        finally:
            if fcntl is not None:
                # Closing alone would leave the lock with a child that holds a copy of the file.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            self._let_go()

    def __del__(self) -> None:
        """Unlock a log whose owner failed to be built, so that a notebook can try again."""
        with contextlib.suppress(OSError):
            self.close()

    def after_fork(self) -> None:
        """Close the copy in a forked child, and write nothing."""
        self._let_go()

    def _let_go(self) -> None:
        file, self._file, self._size = self._file, -1, 0
        self._lines.clear()
        if file >= 0:
            os.close(file)


def _locked(path: Path) -> int:
    """Open the file for appending, its directory made, and lock it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unusable(path, error) from error
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise RunDirectoryError(
            f"`{path}` is being written by another process, or by a History of this one that is "
            "still open. Close that one first (history.close()), or choose another path or run "
            "directory."
        ) from error
    except OSError:
        pass  # a filesystem without locks: the promise of one writer is then the user's
    return file


def _unusable(path: Path, error: OSError) -> RunDirectoryError:
    # A directory that is there is no error, so what is there is none.
    reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
    return RunDirectoryError(
        f"`{path}` cannot be written: {reason}. Make its directory writable, or choose another one "
        "with outdir= or jsonl_path=."
    )
