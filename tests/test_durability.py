"""What is left of a run that was killed, and how the next life goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import history_programs as programs
import pandas as pd
import polars as pl
import pytest

from everyrank import History, OptionError, jsonlines
from everyrank.columns import Columns
from everyrank.replay import fill


def kill_after(directory: Path, sync_every: int, lines: int) -> int:
    """Have a process log until so many updates are told, kill it, and give the last one told."""
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=programs.until_killed, args=(str(directory), sync_every))
    child.start()
    told = directory / "told"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if told.exists() and told.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    return int(told.read_text().split()[-1])


def log_of(directory: Path) -> Path:
    (path,) = directory.glob("*.jsonl")
    return path


@pytest.mark.parametrize("sync_every", [1, 20])
def test_a_kill_loses_no_more_than_promised_and_no_written_line(tmp_path, sync_every):
    """At random moments: the open window, and what the last second held; never one before it."""
    seed = random.randrange(10_000)
    chance = random.Random(seed)
    for life in range(4):
        directory = tmp_path / str(life)
        directory.mkdir()
        last = kill_after(directory, sync_every, chance.randint(100, 800))
        problems: list[jsonlines.Problem] = []
        records = list(jsonlines.read(log_of(directory), problems=problems))
        steps = [record.step for record in records]
        assert problems == [], seed
        assert steps == list(range(len(steps))), seed
        assert all(r.values["loss"] == float(r.step) for r in records)
        # An update takes at least half a millisecond in that program.
        assert last - len(steps) < sync_every + 2000, seed


def test_a_killed_run_goes_on_where_it_is_opened_again(tmp_path):
    """The torn line is repaired, earlier rows are there, and the facts tell of both lives."""
    kill_after(tmp_path, 1, 200)
    with log_of(tmp_path).open("ab") as log:
        log.write(b'{"step":9999,"time":1.0,"lo')
    written = sum(1 for _ in jsonlines.read(log_of(tmp_path)))
    with History(outdir=tmp_path) as history:
        assert list(history.steps) == list(range(written))
        history.update({"loss": -1.0}, step=written)
        assert list(history.steps) == list(range(written + 1))
    lines = log_of(tmp_path).read_bytes().splitlines()
    assert len([json.loads(line) for line in lines]) == written + 1
    facts = json.loads((tmp_path / "run.json").read_text())
    assert [g["generation"] for g in facts["generations"]] == [0, 1]


def test_a_resumed_run_shows_one_value_a_step_to_every_reader(tmp_path):
    """From a checkpoint at step 4, what an earlier life wrote past it is superseded and kept."""
    with History(outdir=tmp_path) as history:
        for step in range(10):
            history.update({"loss": float(step)})
            if step == 8:
                history.update({"eval/loss": 8.0}, step=8)
            if step == 4:
                checkpoint = history.state_dict()
    with History(outdir=tmp_path) as history:
        history.load_state_dict(checkpoint)
        assert list(history["loss"].steps) == [0, 1, 2, 3, 4]
        for _ in range(3):
            history.update({"loss": -1.0})
        assert list(history["loss"]) == [0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0, -1.0]
        assert len(history["eval/loss"]) == 0, "it was recorded past the checkpoint"
        assert [record.generation for record in history] == [0] * 5 + [1] * 3
    columns = Columns()
    facts = json.loads((tmp_path / "run.json").read_text())
    fill(columns, log_of(tmp_path), generations=facts["generations"])
    assert list(columns.series("loss")) == [0.0, 1.0, 2.0, 3.0, 4.0, -1.0, -1.0, -1.0]
    assert len(columns.series("eval/loss")) == 0
    assert [r.values["loss"] for r in jsonlines.read(log_of(tmp_path)) if "loss" in r.values] == [
        *[float(step) for step in range(10)],
        *[-1.0] * 3,
    ]


def test_going_back_within_a_life_is_a_rewind(tmp_path, caplog):
    """A loss spike is rolled back in place: nothing is raised, it is said once, rows are kept."""
    with History(outdir=tmp_path) as history:
        for step in (0, 1, 2, 3, 2, 3, 1):
            history.update({"loss": float(step)}, step=step)
        assert list(history.steps) == [0, 1]
    assert caplog.text.count("went back from step 3 to step 2") == 1
    assert caplog.text.count("went back") == 1
    assert [r.generation for r in jsonlines.read(log_of(tmp_path))] == [0, 0, 0, 0, 1, 1, 2]


def test_a_checkpoint_may_be_loaded_in_the_middle_of_a_life(tmp_path):
    """The steps after it are counted on from there."""
    with History(outdir=tmp_path, sync_every=4) as history:
        for step in range(3):
            history.update({"loss": float(step)})
        checkpoint = history.state_dict()
        for _ in range(5):
            history.update({"loss": 99.0})
        history.load_state_dict(checkpoint)
        history.update({"loss": 3.0})
        assert list(history["loss"]) == [0.0, 1.0, 2.0, 3.0]


def test_a_run_may_go_on_in_another_directory(tmp_path):
    """Its facts name the run that it continues."""
    with History(outdir=tmp_path / "a") as first:
        first.update({"loss": 1.0}, step=7)
        state = first.state_dict()
    with History(outdir=tmp_path / "b") as second:
        second.load_state_dict(state)
        second.update({"loss": 2.0})
        assert list(second.steps) == [8]
    facts = json.loads((tmp_path / "b" / "run.json").read_text())
    assert facts["continues"] == first.run_id


@pytest.mark.parametrize(
    ("state", "message"),
    [({}, "is not what History.state_dict"), ({"version": 9, "step": 1}, "has version 9")],
)
def test_a_state_that_is_none_of_ours_is_refused(tmp_path, state, message):
    """The error says what was expected."""
    with History(outdir=tmp_path) as history, pytest.raises(OptionError, match=message):
        history.load_state_dict(state)


def test_pandas_polars_and_json_read_the_log_as_it_is(tmp_path):
    """Also with values that are not finite, a late name and a text."""
    with History(outdir=tmp_path) as history:
        for step in range(6):
            late = {"late": 1.0, "text": "x"} if step > 3 else {}
            history.update({"loss": float("inf") if step == 2 else 1.0 * step, **late})
    path = log_of(tmp_path)
    frame = pd.read_json(path, lines=True)
    assert frame["step"].tolist() == list(range(6))
    assert frame["loss"].isna().tolist() == [False, False, True, False, False, False]
    assert pl.read_ndjson(path, infer_schema_length=None)["late"].null_count() == 4
