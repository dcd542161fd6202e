"""The log of a run: appended, locked, repaired, and whole also on a full disk."""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import log_programs
import numpy as np
import pytest
from log_programs import until

from everyrank import jsonlines
from everyrank.backends import jsonl
from everyrank.backends.background import Background
from everyrank.backends.base import Backend
from everyrank.backends.jsonl import Jsonl
from everyrank.errors import MetricError, RunDirectoryError
from everyrank.records import Batch, Record
from everyrank.testing import run_ranks

LONG = 60.0  # ends a hang, and is never waited for


def steps_in(path: Path) -> list[int]:
    """Give the steps in a file in which every line is a record."""
    problems: list[jsonlines.Problem] = []
    steps = [record.step for record in jsonlines.read(path, problems=problems)]
    assert problems == []
    assert path.read_bytes().endswith(b"\n") or not steps
    return steps


def write(path: Path, *steps: int, **options: bool) -> None:
    """Write some steps and close."""
    log = Jsonl(path, **options)
    for step in steps:
        log.write(Record(step, 0.0, {"loss": 0.5}))
    log.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "seven" / "history.jsonl"


def test_records_are_appended(path: Path):
    """A log makes its directories, and goes on where the one before it ended."""
    assert isinstance(Jsonl(path), Backend)
    gc.collect()
    write(path, 0, 1)
    write(path, 2)
    assert steps_in(path) == [0, 1, 2]
    assert json.loads(path.read_text().splitlines()[0]) == {"step": 0, "time": 0.0, "loss": 0.5}


def test_overwriting_begins_anew(path: Path):
    """With overwrite=True nothing is left of what was there, whatever it was."""
    write(path, 0, 1)
    write(path, 5, overwrite=True)
    assert steps_in(path) == [5]
    path.write_text("notes\n")
    write(path, 6, overwrite=True)
    assert steps_in(path) == [6]


def test_lines_reach_the_file_with_a_flush_or_when_there_are_many(path: Path):
    """A flush hands everything over; without one at most a quarter of a MiB is held back."""
    log = Jsonl(path)
    log.write(Record(0, 0.0))
    assert steps_in(path) == []
    log.flush()
    assert steps_in(path) == [0]
    for step in range(1, 301):
        log.write(Record(step, 0.0, {"text": "x" * 1000}))
    assert len(steps_in(path)) > 250
    log.close()
    assert steps_in(path) == list(range(301))


def test_a_batch_is_written_behind_the_training_thread(path: Path):
    """In the background a batch becomes its lines, and close waits for them."""
    background = Background(Jsonl(path))
    numbers = np.arange(3.0)[:, None]
    background.write_batch(Batch(np.arange(3), np.zeros(3), ("n",), numbers, ("int",)))
    assert background.close(LONG)
    assert [dict(record.values) for record in jsonlines.read(path)] == [{"n": i} for i in range(3)]


def test_what_no_line_can_hold_costs_itself_only(path: Path):
    """A record that cannot be written is an error, and the ones around it are there."""
    log = Jsonl(path)
    log.write(Record(0, 0.0))
    with pytest.raises(MetricError, match="`x` must be a number"):
        log.write(Record(1, 0.0, {"x": object()}))
    log.write(Record(2, 0.0))
    log.close()
    assert steps_in(path) == [0, 2]


def test_closing_again_and_writing_late_do_nothing(path: Path):
    """After the close nothing is written, nothing raised, and nothing of others is closed."""
    log = Jsonl(path)
    log.close()
    with path.open("rb") as other:  # has the number that was the log's
        log.write(Record(0, 0.0))
        log.flush()
        log.close()
        del log
        gc.collect()
        assert other.read() == b""


def test_a_second_writer_is_told(path: Path):
    """One file has one writer; the second learns it at once, and may come when the first is gone."""
    first = Jsonl(path)
    first.write(Record(0, 0.0))
    for overwrite in (False, True):
        with pytest.raises(RunDirectoryError, match=r"is being written by another process.*Close"):
            Jsonl(path, overwrite=overwrite)
    first.close()
    assert steps_in(path) == [0]
    write(path, 1)


def test_a_log_that_nobody_holds_is_closed(path: Path):
    """What a notebook lost hold of is written and unlocked, so that the cell can run again."""
    log = Jsonl(path)
    log.write(Record(0, 0.0))
    del log
    gc.collect()
    write(path, 1)
    assert steps_in(path) == [0, 1]


def test_a_filesystem_without_locks_does_without(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where locks are not known, the log is written all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(jsonl.fcntl, "flock", refuse)
    write(path, 0)
    monkeypatch.setattr(jsonl, "fcntl", None)
    write(path, 1)
    assert steps_in(path) == [0, 1]


def test_a_torn_line_is_removed_when_the_log_is_opened(path: Path):
    """What a killed writer left at the end is gone before the first new line."""
    write(path, 0)
    with path.open("ab") as file:
        file.write(b'{"step":1,"ti')
    write(path, 2)
    assert steps_in(path) == [0, 2]


@pytest.mark.parametrize("content", ["notes\n", '{\n  "run_id": "x"\n}\n'])
def test_a_file_that_is_no_log_is_left_alone(path: Path, content: str):
    """Another file is refused with a way out, stays as it is, and its number is closed once."""
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(RunDirectoryError, match=r"is not a log of records.*overwrite=True"):
        Jsonl(path)
    with path.open() as other:
        gc.collect()
        assert other.read() == content


def test_a_path_that_cannot_be_written_is_an_error_at_the_call(tmp_path: Path):
    """The error names the path, the reason and the options to change."""
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "file" / "history.jsonl", "Not a directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        with pytest.raises(
            RunDirectoryError, match=f"cannot be written: {reason}.*outdir= or json"
        ):
            Jsonl(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunDirectoryError, match="cannot be written: Illegal seek"):
        Jsonl(tmp_path / "pipe")


def test_a_full_disk_is_an_error_and_loses_nothing(tmp_path: Path):
    """What the disk does not take is kept, and written from the very byte where it stopped."""
    path = tmp_path / "history.jsonl"
    size, records = 1000, 20
    ((full, errors, whole),) = run_ranks(
        log_programs.write_to_a_small_disk, 1, str(path), size, records, backend=None
    )
    assert len(full) == size
    assert whole.startswith(full)
    assert errors == [(errno.EFBIG, str(path))] * len(errors)
    assert 0 < len(errors) < records
    assert steps_in(path) == list(range(records))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_on_a_full_disk_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """Above the bound the newest records are dropped, counted, and said with the path."""
    monkeypatch.setattr(jsonl, "_KEEP", 3_000_000)
    log = Jsonl("/dev/full")
    failures = 0
    for step in range(400):
        try:
            log.write(Record(step, 0.0, {"text": "x" * 10_000}))
        except OSError as error:
            failures += 1
            last = error
    assert log.dropped == 400 - 3_000_000 // 10_036
    assert last.errno == errno.ENOBUFS
    assert last.strerror == f"{log.dropped} records dropped so far"
    assert last.filename == "/dev/full"
    assert log._size <= 3_000_000
    kept = b"".join(log._lines)
    assert [json.loads(line)["step"] for line in kept.splitlines()] == list(
        range(400 - log.dropped)
    )
    with pytest.raises(OSError, match="No space left on device"):
        log.flush()
    with pytest.raises(OSError, match="No space left on device"):
        log.close()
    log.close()  # it has let go all the same


def test_a_killed_writer_leaves_one_torn_line_at_most(tmp_path: Path):
    """At whatever moment kill -9 comes, every line but the last is whole and in order."""
    context = multiprocessing.get_context("forkserver")
    path = tmp_path / "history.jsonl"
    for size in (1, 50_000, 400_000):
        path.unlink(missing_ok=True)
        child = context.Process(target=log_programs.write_until_killed, args=(0, str(path)))
        child.start()
        until(lambda size=size: path.exists() and path.stat().st_size >= size)
        os.kill(child.pid, signal.SIGKILL)
        child.join(LONG)
        assert child.exitcode == -signal.SIGKILL
        problems: list[jsonlines.Problem] = []
        steps = [record.step for record in jsonlines.read(path, problems=problems)]
        assert problems == []
        assert steps == list(range(len(steps)))
        write(path, len(steps))
        assert steps_in(path) == list(range(len(steps) + 1))


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path):
    """A child writes nothing, and neither keeps the lock of its parent nor gives it away."""
    path = str(tmp_path / "history.jsonl")
    ((child, refused, content),) = run_ranks(log_programs.fork_beside_a_log, 1, path, backend=None)
    assert (child, refused) == (b"closed", True)
    assert [json.loads(line)["step"] for line in content.splitlines()] == [0, 2]


def test_readers_see_whole_lines_while_it_is_written(path: Path):
    """Who reads along never meets a line that is no record."""
    path.parent.mkdir(parents=True)
    path.touch()
    stop = threading.Event()
    seen: list[int] = []

    def read_along() -> None:
        while not stop.is_set():
            seen.append(len(steps_in_whole_lines(path)))

    reader = threading.Thread(target=read_along)
    reader.start()
    log = Jsonl(path)
    for step in range(2000):
        log.write(Record(step, 0.0, {"text": "x" * 100}))
        if step % 10 == 0:
            log.flush()
    log.close()
    stop.set()
    reader.join(LONG)
    assert seen == sorted(seen)
    assert steps_in(path) == list(range(2000))


def steps_in_whole_lines(path: Path) -> list[int]:
    """Read along: the last line may lack its end, no other may."""
    problems: list[jsonlines.Problem] = []
    steps = [record.step for record in jsonlines.read(path, problems=problems)]
    assert problems == []
    return steps


def test_a_log_that_is_deleted_says_so(path: Path):
    """Nothing is begun anew in its place: half a log would be taken for a whole one."""
    log = Jsonl(path)
    log.write(Record(0, 0.0))
    log.flush()
    path.unlink()
    log.write(Record(1, 0.0))
    with pytest.raises(FileNotFoundError, match="deleted while it was written"):
        log.flush()
    with pytest.raises(FileNotFoundError):
        log.close()
    assert not path.exists()
    write(path, 2)
    assert steps_in(path) == [2]
