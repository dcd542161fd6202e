"""A rank's own log, which waits until it is known where the run is kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from everyrank.backends.per_rank import PerRank
from everyrank.records import Batch


def rows(*steps: int) -> Batch:
    numbers = np.array([[float(step)] for step in steps])
    return Batch(np.array(steps), np.zeros(len(steps)), ("loss",), numbers, ("float",))


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_wait_until_the_directory_is_known(tmp_path):
    """What came before that is in the file, too, and in order."""
    known: list[Path] = []
    log = PerRank(3, lambda: known[0] if known else None)
    log.write_batch(rows(0, 1))
    assert log.health()["waiting"] == 2
    assert not log.flush(0.0)
    known.append(tmp_path)
    log.write_batch(rows(2))
    assert log.flush(60)
    assert steps_in(tmp_path / "ranks" / "rank-00003.jsonl") == [0, 1, 2]
    assert log.close(60)
    assert log.health()["failures"] == 0


def test_a_directory_that_becomes_known_at_the_end_is_in_time(tmp_path):
    """Closing looks once more."""
    log = PerRank(0, lambda: tmp_path)
    log._pending.append(rows(5))
    assert log.close(60)
    assert steps_in(tmp_path / "ranks" / "rank-00000.jsonl") == [5]


def test_a_directory_that_never_becomes_known_is_said(caplog):
    """The rows that were not written are counted, with the way out."""
    log = PerRank(2, lambda: None)
    log.write_batch(rows(0, 1, 2))
    assert not log.close(60)
    assert "the 3 rows of rank 2 alone were not written" in caplog.text
    assert "Give outdir= on every rank" in caplog.text


def test_what_waits_is_bounded(monkeypatch):
    """A first rank that never speaks does not fill memory."""
    monkeypatch.setattr("everyrank.backends.per_rank._PENDING", 2)
    log = PerRank(2, lambda: None)
    for step in range(5):
        log.write_batch(rows(step))
    assert (log.health()["waiting"], log.dropped) == (2, 3)


def test_a_file_that_cannot_be_written_costs_itself_only(tmp_path, caplog):
    """It is said once, and nothing is raised."""
    (tmp_path / "ranks").touch()
    log = PerRank(1, lambda: tmp_path)
    for step in range(3):
        log.write_batch(rows(step))
    assert not log.close(60)
    assert caplog.text.count("the rows of rank 1 alone are not written") == 1
    assert log.health() == {"waiting": 0, "failures": 1, "dropped": 3}
