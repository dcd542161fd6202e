"""The run directory: facts that are whole, lives that are counted, and no secret in any of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import log_programs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everyrank import jsonlines, rundir
from everyrank.errors import RunDirectoryError
from everyrank.records import Record
from everyrank.rundir import RunDirectory, git_state, mint_run_id, plain, surroundings, versions
from everyrank.testing import run_ranks


def facts_of(path: Path, name: str = "run.json") -> dict[str, Any]:
    """Read the facts that a directory holds."""
    return json.loads((path / name).read_bytes())


def log_rows(path: Path, *generations: int) -> None:
    """Write a log with a row of each generation."""
    path.write_bytes(
        b"".join(jsonlines.encode(Record(i, 0.0, {}, g)) for i, g in enumerate(generations))
    )


def a_run(path: Path, run_id: str | None = None, **options: bool) -> RunDirectory:
    """Open a run and write its facts, as every run does at its start."""
    run = RunDirectory.open(path, run_id, **options)
    run.write()
    return run


def test_a_new_run_is_generation_0(tmp_path: Path):
    """A directory is made, and holds id, time, state and the first life of the run."""
    run = RunDirectory.open(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []  # nothing is written yet
    run.update(world_size=8)
    run.write()
    facts = facts_of(run.path)
    assert facts["run_id"] == run.run_id
    assert (facts["status"], facts["world_size"]) == ("running", 8)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", facts["created"])
    (first,) = facts["generations"]
    assert (first["generation"], first["after_step"], run.generation) == (0, None, 0)
    assert [file.name for file in run.path.iterdir()] == ["run.json"]


def test_reopened_a_run_is_the_next_generation(tmp_path: Path):
    """The same run goes on with its id and facts, and each step back is a generation as well."""
    first = RunDirectory.open(tmp_path, "seven")
    first.update(note="kept", status="finished")
    first.write()
    assert first.begin_generation(5) == 1
    first.write()
    again = RunDirectory.open(tmp_path)
    assert (again.run_id, again.generation) == ("seven", 2)
    assert (again.facts["note"], again.facts["status"]) == ("kept", "running")
    again.resumed(3)
    again.write()
    lives = [(g["generation"], g["after_step"]) for g in facts_of(tmp_path)["generations"]]
    assert lives == [(0, None), (1, 5), (2, 3)]
    assert facts_of(tmp_path)["created"] == first.facts["created"]


def test_a_directory_of_another_run_is_refused(tmp_path: Path):
    """Who names another run than the one that is there is told both names."""
    a_run(tmp_path, "seven")
    with pytest.raises(
        RunDirectoryError, match=r"holds the run 'seven', not 'eight'\. .* go on with 'seven'"
    ):
        RunDirectory.open(tmp_path, "eight")
    assert RunDirectory.open(tmp_path, "seven").generation == 1


def test_rows_may_be_newer_than_the_facts(tmp_path: Path):
    """The generation is past any in the run's own logs, also if the facts were lost."""
    a_run(tmp_path, "seven")
    log_rows(tmp_path / "seven.jsonl", 0, 4)
    log_rows(tmp_path / "seven.rank1.jsonl", 6)
    log_rows(tmp_path / "seventeen.jsonl", 9)
    assert RunDirectory.open(tmp_path).generation == 7
    (tmp_path / "run.json").unlink()
    assert RunDirectory.open(tmp_path, "seven").generation == 7
    assert RunDirectory.open(tmp_path).generation == 10  # whose they are is no longer known


def test_logs_that_cannot_be_read_do_not_matter(tmp_path: Path):
    """A directory called as a log, and one without records, say nothing of generations."""
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "b.jsonl").write_text("notes\n")
    (tmp_path / "c.jsonl").touch()
    assert RunDirectory.open(tmp_path).generation == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"run_id": "x", "gener',
        b"[]",
        b'{"run_id": 7, "generations": [{"generation": 0}]}',
        b'{"run_id": "x", "generations": []}',
        b'{"run_id": "x", "generations": [{}]}',
        b'{"run_id": "x", "generations": {"a": 1}}',
        b'{"run_id": "x", "generations": [{"generation": 1e999}]}',
        b'{"run_id": "x", "generations": [{"generation": NaN}]}',
        b'{"run_id": "../x", "generations": [{"generation": 0}]}',
        b'{"run_id": "..", "generations": [{"generation": 0}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_broken_facts_are_set_aside(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
):
    """A run goes on though its facts are broken; they are kept, and it is said where."""
    (tmp_path / "run.json").write_bytes(content)
    log_rows(tmp_path / "history.jsonl", 2)
    run = a_run(tmp_path)
    assert run.generation == 3
    (aside,) = tmp_path.glob("run.json.broken-*")
    assert aside.read_bytes() == content
    (record,) = caplog.records
    assert "cannot be read" in record.getMessage()
    assert f"it is kept as {aside}, and begun anew." in record.getMessage()


def test_what_json_lacks_in_facts_does_not_stop_the_next_life(tmp_path: Path):
    """A NaN that another program put into run.json is a text when it is written again."""
    a_run(tmp_path, "seven")
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(
        text.replace('"running"', "NaN", 1).replace("{", '{"n": NaN,', 1)
    )
    a_run(tmp_path)
    assert facts_of(tmp_path)["n"] == "NaN"


# ----------------------------------------------------------------------------- many runs, one place


def test_a_fresh_run_keeps_the_facts_of_the_one_before(tmp_path: Path):
    """In a shared place a new run begins at generation 0, and the other's facts move aside."""
    old = a_run(tmp_path, "old")
    log_rows(tmp_path / "old.jsonl", 0, 5)
    new = RunDirectory.open(tmp_path, fresh=True)
    assert facts_of(tmp_path) == old.facts  # until the new one writes
    new.write()
    assert new.run_id != "old"
    assert new.generation == 0
    assert facts_of(tmp_path)["run_id"] == new.run_id
    assert facts_of(tmp_path, "old.run.json") == old.facts
    named = a_run(tmp_path, "named", fresh=True)
    assert (named.run_id, named.generation) == ("named", 0)
    assert facts_of(tmp_path, f"{new.run_id}.run.json") == new.facts


def test_a_run_that_is_named_goes_on_wherever_its_facts_are(tmp_path: Path):
    """In a shared place `run_id` finds the run in run.json, and one that was set aside."""
    first = a_run(tmp_path, "first", fresh=True)
    first.update(note="kept")
    first.write()
    assert a_run(tmp_path, "first", fresh=True).generation == 1
    a_run(tmp_path, "second", fresh=True)
    again = a_run(tmp_path, "first", fresh=True)
    assert (again.generation, again.facts["note"]) == (2, "kept")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.json", "second.run.json"]
    log_rows(tmp_path / "third.jsonl", 7)
    assert RunDirectory.open(tmp_path, "third", fresh=True).generation == 8  # its facts were lost


def test_runs_of_one_place_at_the_same_time_keep_their_facts_apart(tmp_path: Path):
    """The run that began last has run.json; what the others write later goes beside it."""
    first, second = a_run(tmp_path, "1", fresh=True), RunDirectory.open(tmp_path, "2", fresh=True)
    second.write()
    first.update(status="finished")
    first.write()
    second.update(status="failed")
    second.write()
    assert (facts_of(tmp_path)["run_id"], facts_of(tmp_path)["status"]) == ("2", "failed")
    assert facts_of(tmp_path, "1.run.json")["status"] == "finished"


def test_a_fresh_run_needs_no_run_before_it(tmp_path: Path):
    """In an empty place, and over broken facts, a fresh run begins like any other."""
    run = a_run(tmp_path / "new", fresh=True)
    assert [file.name for file in run.path.iterdir()] == ["run.json"]
    (tmp_path / "new" / "run.json").write_text("[]")
    run.write()
    assert facts_of(run.path)["run_id"] == run.run_id


# ------------------------------------------------------------------------------------------ writing


def test_a_directory_that_cannot_be_written_is_an_error_at_the_call(tmp_path: Path):
    """The error names the directory, the reason and the option to change."""
    (tmp_path / "file").touch()
    for path, reason in [
        (tmp_path / "file", "Not a directory"),
        (tmp_path / ("x" * 300), "File name"),
    ]:
        with pytest.raises(RunDirectoryError, match=rf"cannot be written: {reason}.*outdir="):
            RunDirectory.open(path)
    (tmp_path / "run.json").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written: Is a directory"):
        RunDirectory.open(tmp_path)


def test_a_full_disk_leaves_the_facts_of_before(tmp_path: Path):
    """Facts that cannot be written are an error, and what was there is whole."""
    (said,) = run_ranks(log_programs.write_facts_to_a_full_disk, 1, str(tmp_path), backend=None)
    assert "cannot be written: File too large" in said
    assert facts_of(tmp_path)["status"] == "running"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_training_may_step_back_while_the_facts_are_written(tmp_path: Path):
    """Facts that change in one thread while others write are whole on disk at every moment."""
    run = a_run(tmp_path, "seven")
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set():
                run.write()
                facts_of(tmp_path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(100):
        run.begin_generation(step)
        run.update(**{f"fact {step}": step})
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    run.write()
    assert [g["generation"] for g in facts_of(tmp_path)["generations"]] == list(range(101))


# ------------------------------------------------------------------------------------------- facts


def test_ids_sort_by_time_and_differ():
    """The runs of a job array begin in one second, and are told apart all the same."""
    ids = [mint_run_id() for _ in range(300)]
    assert len(set(ids)) == 300
    assert [run_id[:17] for run_id in ids] == sorted(run_id[:17] for run_id in ids)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d-\d{6}-[0-9a-f]{8}", run_id) for run_id in ids)


def test_surroundings_tell_where_a_run_was(monkeypatch: pytest.MonkeyPatch):
    """Host, process, platform and versions are told, and nothing is imported for it."""
    monkeypatch.setitem(sys.modules, "jax", None)
    found = surroundings()
    assert set(found) == {"hosts", "pid", "platform", "versions", "git"}
    assert found["pid"] == os.getpid()
    assert found["versions"]["numpy"] == np.__version__
    json.dumps(found)
    monkeypatch.setattr(rundir, "_installed", lambda name: None)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch" not in versions()


def test_git_is_told_by_commit_branch_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A changed file makes a checkout dirty, and an untracked one does not."""
    monkeypatch.setattr(rundir, "_GIT_PATIENCE", 60.0)
    assert git_state(tmp_path / "nowhere") == {}

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=trunk"]
        command = ["git", *who, *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    (tmp_path / "untracked").touch()
    expected = {"commit": git("rev-parse", "HEAD"), "branch": "trunk", "dirty": False}
    assert git_state(tmp_path) == expected
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {**expected, "dirty": True}


def test_without_git_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Outside a checkout, and without the program, there is no state and no error."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert git_state(tmp_path) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == {}


# ---------------------------------------------------------------------------------- plain and safe


@dataclasses.dataclass
class Optimizer:
    name: str = "adam"
    hf_token: str = "s3cret"
    parent: Any = None


class Opaque:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        if not self._text:
            raise RuntimeError
        return self._text


@pytest.mark.parametrize(
    "name",
    ["password", "api_key", "apiKey", "OPENAI_API_KEY", "my-secret", "db.passwd", "accessTokens"],
)
def test_what_is_named_as_a_secret_is_hidden(tmp_path: Path, name: str):
    """Whatever stands under such a name in a config is three stars, at any depth."""
    run = RunDirectory.open(tmp_path)
    run.update(config={"deep": [{name: {"a": "s3cret"}}], name: "s3cret", "lr": 0.1})
    run.write()
    text = (tmp_path / "run.json").read_text()
    assert "s3cret" not in text
    assert facts_of(tmp_path)["config"] == {"deep": [{name: "***"}], name: "***", "lr": 0.1}


def test_what_only_sounds_like_a_secret_is_kept():
    """Numbers of tokens and keys are settings, and so are metrics of any name."""
    config = {"eos_token_id": 2, "num_key_value_heads": 8, "max_tokens": 99, "monkey": "george"}
    assert plain(config) == config
    assert plain({"token": "abc", "key": ["a"], "password": None}) == {
        "token": "***",
        "key": "***",
        "password": None,
    }
    assert plain({"token": "shown"}, hide=False) == {"token": "shown"}


def test_configs_of_all_kinds_become_json():
    """Dataclasses, namespaces, arrays and paths become what JSON has, the rest its repr."""
    assert plain(Optimizer()) == {"name": "adam", "hf_token": "***", "parent": None}
    assert plain(argparse.Namespace(lr=0.1, out=Path("a"))) == {"lr": 0.1, "out": "a"}
    assert plain([np.float32(0.5), np.int64(3), np.bool_(True), (1,), None]) == [
        0.5,
        3,
        True,
        [1],
        None,
    ]
    assert plain([float("nan"), 2**70, "\ud800", {1: 2}]) == [
        "nan",
        hex(2**70),
        "\\ud800",
        {"1": 2},
    ]
    assert plain({3}) == [3]
    assert plain(np.datetime64("2026")).startswith("np.datetime64")
    assert plain(Optimizer) == repr(Optimizer)


def test_a_repr_is_cut_and_shows_no_secret_and_may_fail():
    """What is neither data nor short is shown as far as it is safe."""
    text = "Client(url='x', api_key='s3cret', \"token\": \"s3cret\")"
    assert plain(Opaque(text)) == "Client(url='x', api_key='***', \"token\": '***')"
    assert len(plain(Opaque("x" * 10_000_000))) == 500
    cut = plain(Opaque(f"secret='{'s3cret' * 1000}'"))
    assert cut == "secret='***'"
    assert plain(Opaque("")) == "<Opaque, whose repr raises RuntimeError>"


def test_a_config_that_holds_itself_ends():
    """A tree whose nodes know their parents, and a list in itself, are written once."""
    root = Optimizer(name="root")
    root.parent = [Optimizer(name=str(i), parent=root) for i in range(50)]
    found = plain(root)
    assert [child["name"] for child in found["parent"]] == [str(i) for i in range(50)]
    assert len(json.dumps(found)) < 100_000
    assert "s3cret" not in json.dumps(found)
    circle: list[Any] = [1]
    circle.append(circle)
    assert plain(circle) == [1, "[1, [...]]"]
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert json.dumps(plain(deep)).count("[") == 12 + 88


DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=3),
        st.builds(Opaque, st.text(max_size=3)),
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(DATA)
def test_law_anything_becomes_valid_json(value: Any):
    """Whatever a config holds, the facts with it are JSON, and again the same."""
    found = plain(value)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert plain(found) == found
