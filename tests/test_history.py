"""The front door on one process: what goes in, what comes out, and what is said when it cannot."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import everyrank
from everyrank import History, MetricError, OptionError, RunDirectoryError
from everyrank.backends.console import Console
from everyrank.backends.every import Every
from everyrank.series import Series
from everyrank.testing import MemoryBackend


def rows(directory: Path) -> list[dict[str, object]]:
    """Read the log of the only run in a directory, as any program would."""
    (log,) = directory.glob("*.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def facts(directory: Path) -> dict[str, object]:
    return json.loads((directory / "run.json").read_text())


# ------------------------------------------------------------------------------ handing over


def test_a_value_can_be_read_as_soon_as_it_was_handed_over(tmp_path):
    """Reading waits for the background, so that nobody has to think of it."""
    with History(outdir=tmp_path) as history:
        for step in range(5):
            history.update({"loss": 1.0 / (step + 1)})
            assert history["loss"][-1] == 1.0 / (step + 1)
        assert list(history.steps) == [0, 1, 2, 3, 4]
        assert len(history) == 5
        assert history.history == {"loss": [1.0, 0.5, 1 / 3, 0.25, 0.2]}


@pytest.mark.parametrize("sync_every", [1, 3, 50])
def test_a_window_that_is_open_is_read_as_well(tmp_path, sync_every):
    """Whatever the window, a reader sees every update so far."""
    with History(outdir=tmp_path, sync_every=sync_every) as history:
        for step in range(7):
            history.update({"loss": float(step)})
        assert list(history["loss"]) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_summary_prints_step_and_values_with_exactly_the_precision(tmp_path):
    """What update returns is a text as soon as somebody wants one."""
    with History(outdir=tmp_path) as history:
        summary = history.update({"step": 42, "loss": 0.1234567, "n": 3, "ok": True})
        assert str(summary) == "step=42 loss=0.123457 n=3 ok=True"
        assert str(history.update({"loss": 2.0}, precision=2)) == "step=43 loss=2.00"
        assert f"{summary:>40}".endswith("ok=True")
        assert summary.startswith("step=42")


def test_a_declared_format_is_used_wherever_the_metric_is_shown(tmp_path):
    """A description is data that the summary reads, too."""
    with History(outdir=tmp_path) as history:
        history.declare("lr", format=".2e", unit="1", better="lower", title="learning rate")
        assert str(history.update({"lr": 3e-4})) == "step=0 lr=3.00e-04"
        assert history.descriptions["lr"].title == "learning rate"
    assert facts(tmp_path)["metrics"]["lr"]["format"] == ".2e"


def test_every_kind_of_value_is_recorded(tmp_path):
    """Numbers, arrays, texts, None and nested dicts come back as what they were."""
    torch = pytest.importorskip("torch")
    values = {
        "float": 0.5,
        "int": 3,
        "large": 2**60 + 1,
        "bool": True,
        "numpy": np.float32(0.25),
        "bfloat": torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True),
        "one": torch.ones(1, 1),
        "vector": np.array([1.0, 2.0]),
        "tensor": torch.arange(3),
        "text": "warmup",
        "none": None,
        "nested": {"a": {"b": 1.0}},
        "nan": math.nan,
        "inf": -math.inf,
    }
    with History(outdir=tmp_path) as history:
        history.update(values)
        record = history.latest
    assert record is not None
    seen = dict(record.values)
    assert seen.pop("vector").tolist() == [1.0, 2.0]
    assert seen.pop("tensor").tolist() == [0, 1, 2]
    assert math.isnan(seen.pop("nan"))
    assert seen == {
        "float": 0.5,
        "int": 3,
        "large": 2**60 + 1,
        "bool": True,
        "numpy": 0.25,
        "bfloat": 2.5,
        "one": 1.0,
        "text": "warmup",
        "none": None,
        "nested/a/b": 1.0,
        "inf": -math.inf,
    }


def test_a_tensor_may_be_overwritten_after_the_call(tmp_path):
    """Values are copied when update is called, not when they are read."""
    torch = pytest.importorskip("torch")
    loss, array = torch.tensor(1.0), np.array([1.0, 1.0])
    with History(outdir=tmp_path, sync_every=4) as history:
        for step in range(8):
            loss.fill_(step)
            array[:] = step
            history.update({"loss": loss, "array": array})
            loss.fill_(-1.0)
            array[:] = -1.0
        assert list(history["loss"]) == [float(step) for step in range(8)]
        assert [a.tolist() for a in history["array"]] == [[s, s] for s in range(8)]


def test_train_and_eval_keep_steps_of_their_own(tmp_path):
    """A metric that is recorded less often has fewer steps, and missing is missing."""
    with History(outdir=tmp_path) as history:
        for step in range(6):
            history.update({"train/loss": 1.0}, step=step)
            if step % 3 == 2:
                history.update({"eval/loss": 2.0}, step=step)
        assert list(history["train/loss"].steps) == [0, 1, 2, 3, 4, 5]
        assert list(history["eval/loss"].steps) == [2, 5]
        assert [sorted(r.values) for r in history][2] == ["eval/loss", "train/loss"]


def test_threads_may_update_at_once(tmp_path):
    """No update of any thread is lost."""
    with History(outdir=tmp_path, sync_every=7) as history:

        def work(name: str) -> None:
            for step in range(200):
                history.update({name: float(step)}, step=step)

        threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in "abc":
            assert list(history[name].values) == [float(step) for step in range(200)]


def test_a_note_travels_with_the_next_update(tmp_path):
    """Timings of another thread find their row."""
    with History(outdir=tmp_path) as history:
        history.note("timing/forward", 0.5)
        history.update({"loss": 1.0})
        history.note("timing/save", 2.0)
    assert rows(tmp_path)[0]["timing/forward"] == 0.5
    assert rows(tmp_path)[1]["timing/save"] == 2.0


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_every": 0}, "sync_every=0 must be an int of at least 1"),
        ({"sync_every": True}, "sync_every=True must be an int"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
        ({"timeout": math.inf}, "nothing waits without a deadline"),
        ({"stats": ("median",)}, "'median' is not a statistic"),
        ({"transport": "carrier pigeon"}, "neither 'host'"),
        ({"group": [0], "mesh": [0]}, "pass one of them"),
        ({"backends": [print]}, "which is no backend: it needs `name`"),
        ({"backends": print}, "must be a list"),
        ({"keys": "loss"}, "Pass a list of names"),
        ({"run_id": "a/b"}, "must be a plain name without '/'"),
        ({"group": [1, 2]}, "the ranks are 0 to 0 by one process"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused_at_the_call(tmp_path, options, message):
    """The error names the option, its value and the way out, and no run is begun."""
    with pytest.raises(OptionError, match=message):
        History(outdir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": object()}, "'loss' is <object .*neither a number, nor an array"),
        ({"big": np.zeros((300, 300))}, r"'big' is an array of shape \(300, 300\), which is too"),
        ({"loss/mean": 1.0}, "ends in '/mean', which is kept for statistics over ranks"),
        ({"time": 1.0}, "'time' is a column of every record already"),
        ({3: 1.0}, "the key 3 is of type int, but names are text"),
        ({"loss": 1.0, "step": "five"}, "step='five' .str. is no whole number"),
        ([("loss", 1.0)], "and no dict"),
    ],
)
def test_a_bad_update_is_refused_and_costs_nothing_that_was_recorded(tmp_path, metrics, message):
    """The error is raised at the call, and the run goes on as if the call had not been."""
    with History(outdir=tmp_path, sync_every=3) as history:
        history.update({"loss": 1.0})
        with pytest.raises(MetricError, match=message):
            history.update(metrics)
        history.update({"loss": 2.0})
        assert list(history["loss"].steps) == [0, 1]
        assert list(history["loss"]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"better": "up"}, "better='up' of 'loss' must be 'lower' or 'higher'"),
        ({"format": "nope"}, "format='nope' of 'loss' does not format a number"),
        ({"weight": "tokens/mean"}, "kept for statistics over ranks"),
    ],
)
def test_a_bad_declaration_is_refused(tmp_path, declaration, message):
    """The error names the metric and what would do."""
    with (
        History(outdir=tmp_path) as history,
        pytest.raises((OptionError, MetricError), match=message),
    ):
        history.declare("loss", **declaration)


def test_an_unwritable_directory_is_said_at_the_call(tmp_path):
    """Nobody finds out at the end of a run that it was recorded nowhere."""
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match=r"cannot be written: .*choose another"):
        History(outdir=tmp_path / "file" / "run")


def test_a_name_that_is_not_there_is_a_key_error_with_a_suggestion(tmp_path):
    """A typo is answered by the name that was meant; a declared name is empty until it comes."""
    with History(keys=["accuracy"], outdir=tmp_path) as history:
        history.update({"loss": 1.0})
        with pytest.raises(KeyError, match="Did you mean 'loss'"):
            history["los"]
        assert len(history["accuracy"]) == 0
        assert "loss" in history
        assert "los" not in history


def test_an_update_after_the_end_is_said_once_and_never_raised(tmp_path, caplog):
    """The last line of a long run must not be what ends it."""
    history = History(outdir=tmp_path)
    history.update({"loss": 1.0})
    history.close()
    for _ in range(3):
        assert "loss=2.0" in str(history.update({"loss": 2.0}))
    assert caplog.text.count("after the history was closed") == 1
    assert list(history["loss"]) == [1.0]


# ------------------------------------------------------------------------------ one process


def test_on_one_process_a_value_is_its_own_statistics(tmp_path):
    """A program that reads loss/mean runs on one process too, and nothing is stored for it."""
    with History(outdir=tmp_path, stats=("mean", "std", "p50", "max_rank")) as history:
        for value in (1.0, 3.0):
            history.update({"loss": value})
        assert list(history["loss/mean"]) == [1.0, 3.0]
        assert list(history["loss/std"]) == [0.0, 0.0]
        assert list(history["loss/max_rank"]) == [0.0, 0.0]
        assert isinstance(history["loss/p50"], Series)
        with pytest.raises(KeyError, match="loss/min"):
            history["loss/min"]
    assert set(rows(tmp_path)[0]) == {"step", "time", "loss"}


# ------------------------------------------------------------------------------ on disk


def test_the_log_is_one_flat_object_a_step(tmp_path):
    """Every line is valid JSON with step and time, also where values are not finite."""
    with History(outdir=tmp_path, sync_every=5) as history:
        for step in range(12):
            history.update({"loss": math.nan if step == 3 else 1.0 * step})
    log = rows(tmp_path)
    assert [row["step"] for row in log] == list(range(12))
    assert log[3]["loss"] is None
    assert json.loads(log[3]["nonfinite"]) == {"loss": "NaN"}


def test_run_facts_stand_beside_the_log(tmp_path):
    """Ids, versions, world size and config are in run.json, and no secret is."""
    config = {"lr": 3e-4, "api_key": "hush"}
    with History(outdir=tmp_path, config=config, run_id="seven") as history:
        assert facts(tmp_path)["status"] == "running"
        history.update({"loss": 1.0})
    known = facts(tmp_path)
    assert known["status"] == "finished"
    assert (known["run_id"], known["world_size"], known["last_step"]) == ("seven", 1, 0)
    assert known["config"] == {"lr": 3e-4, "api_key": "***"}
    assert known["log"] == "seven.jsonl"
    assert known["versions"]["everyrank"] == everyrank.__version__


def test_an_exception_in_training_is_noted_and_passes_through(tmp_path):
    """What was recorded before it is on disk."""

    def train() -> None:
        with History(outdir=tmp_path, sync_every=100) as history:
            history.update({"loss": 1.0})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert facts(tmp_path)["status"] == "failed"
    assert len(rows(tmp_path)) == 1


def test_each_run_without_a_place_gets_one_of_its_own(tmp_path, monkeypatch):
    """Two runs of the same script do not mix."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with History() as history:
            history.update({"loss": 1.0})
    assert len(list(tmp_path.glob("outputs/*/run.json"))) == 2
    for directory in (tmp_path / "outputs").iterdir():
        assert len(rows(directory)) == 1


def test_a_report_directory_may_hold_many_runs(tmp_path):
    """Each run has its own log there, and its facts are kept when the next run begins."""
    ids = []
    for value in (1.0, 2.0):
        with History(report_dir=tmp_path) as history:
            history.update({"loss": value})
            ids.append(history.run_id)
    first, second = ids
    assert first != second
    for run_id, value in zip(ids, (1.0, 2.0), strict=True):
        assert json.loads((tmp_path / f"{run_id}.jsonl").read_text())["loss"] == value
    assert facts(tmp_path)["run_id"] == second
    assert json.loads((tmp_path / f"{first}.run.json").read_text())["status"] == "finished"


def test_a_log_at_a_path_is_appended_to_or_begun_anew(tmp_path):
    """jsonl_path is continued unless jsonl_overwrite says otherwise."""
    path = tmp_path / "metrics.jsonl"
    for overwrite, expected in ((False, 1), (False, 2), (True, 1)):
        with History(jsonl_path=path, jsonl_overwrite=overwrite) as history:
            history.update({"loss": 1.0})
        assert len(path.read_text().splitlines()) == expected


def test_a_run_that_goes_on_keeps_its_config(tmp_path):
    """Unless another one is given."""
    for config, kept in (({"lr": 1}, {"lr": 1}), (None, {"lr": 1}), ({"lr": 2}, {"lr": 2})):
        History(outdir=tmp_path, config=config).close()
        assert facts(tmp_path)["config"] == kept


@pytest.mark.parametrize(
    ("ending", "status"),
    [(SystemExit(0), "finished"), (SystemExit(3), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_how_a_run_ended_is_noted(tmp_path, ending, status):
    """A program that exits in the middle of its run may have meant to."""

    def train() -> None:
        with History(outdir=tmp_path):
            raise ending

    with pytest.raises(type(ending)):
        train()
    assert facts(tmp_path)["status"] == status


def test_a_value_that_cannot_be_read_costs_its_row_only(tmp_path, caplog):
    """What comes before and after it is recorded, the row is counted, and close says so."""

    class Odd(float):
        def __float__(self) -> float:
            raise RuntimeError("no number today")

    history = History(outdir=tmp_path, sync_every=5)
    for step in range(12):
        history.update({"loss": Odd(1.0) if step == 7 else 1.0 * step})
    assert history.close() is False
    assert [row["step"] for row in rows(tmp_path)] == [s for s in range(12) if s != 7]
    assert history.health()["lost_rows"] == 1
    assert caplog.text.count("a value could not be read") == 1


@pytest.mark.parametrize("inside", ["vmap", "fake"])
def test_a_tensor_without_a_value_is_refused_at_the_call(tmp_path, inside):
    """Inside a transformation there is nothing to copy yet, and the run goes on."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    def transformed(history: History) -> None:
        if inside == "vmap":
            torch.func.vmap(lambda x: history.update({"c": x}) and x)(torch.ones(3))
        else:
            with FakeTensorMode():
                history.update({"c": torch.ones(())})

    with History(outdir=tmp_path) as history:
        history.update({"loss": 1.0})
        with pytest.raises(MetricError, match="inside a transformation of torch"):
            transformed(history)
        history.update({"loss": 2.0})
    assert [row["loss"] for row in rows(tmp_path)] == [1.0, 2.0]


def test_a_run_directory_has_one_writer(tmp_path):
    """The second History on an open directory is told, and mixes nothing in."""
    with History(outdir=tmp_path) as history:
        history.update({"loss": 1.0})
        with pytest.raises(RunDirectoryError, match="is being written"):
            History(outdir=tmp_path)
    assert len(rows(tmp_path)) == 1


def test_per_rank_adds_a_log_of_this_rank_alone(tmp_path):
    """It holds the rank's own values."""
    with History(outdir=tmp_path, per_rank=True) as history:
        history.update({"loss": 1.0})
    (row,) = (tmp_path / "ranks" / "rank-00000.jsonl").read_text().splitlines()
    assert json.loads(row)["loss"] == 1.0


# ------------------------------------------------------------------------------ the end


def test_finalize_gives_a_dataset_and_leaves_log_and_facts_where_asked(tmp_path, monkeypatch):
    """The call with every option works, and the directory that was asked for is complete."""
    pytest.importorskip("xarray")
    monkeypatch.chdir(tmp_path)
    history = History()
    for step in range(20):
        history.update({"step": step, "loss": 1.0 * step})
    dataset = history.finalize(
        outdir="./outputs", run_name="my-experiment", warmup=0.05, num_chains=128
    )
    assert dataset is not None
    assert dataset["loss"].values.tolist() == [1.0 * step for step in range(1, 20)]
    assert dataset.attrs["run_name"] == "my-experiment"
    assert (tmp_path / "outputs" / f"{history.run_id}.jsonl").exists()
    assert facts(tmp_path / "outputs")["status"] == "finished"


def test_finalize_without_xarray_says_what_to_install(tmp_path, monkeypatch, caplog):
    """A missing optional package costs its own output only."""
    monkeypatch.setitem(sys.modules, "xarray", None)
    history = History(outdir=tmp_path)
    history.update({"loss": 1.0})
    assert history.finalize() is None
    assert 'pip install "everyrank[xarray]"' in caplog.text
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize("warmup", [-0.5, math.nan])
def test_a_warmup_that_makes_no_sense_is_refused(tmp_path, warmup):
    """Nothing is lost by it: the run is closed and on disk."""
    pytest.importorskip("xarray")
    history = History(outdir=tmp_path)
    history.update({"loss": 1.0})
    with pytest.raises(OptionError, match="must be a fraction below 1"):
        history.finalize(warmup=warmup)
    assert len(rows(tmp_path)) == 1


def test_closing_twice_is_closing_once(tmp_path):
    """The second close changes nothing and says the same."""
    history = History(outdir=tmp_path)
    history.update({"loss": 1.0})
    assert history.close() is True
    before = (tmp_path / "run.json").read_text()
    assert history.close() is True
    assert (tmp_path / "run.json").read_text() == before


def test_a_history_that_nobody_holds_is_closed(tmp_path):
    """A notebook that makes a new one does not leave threads and locks behind."""
    history = History(outdir=tmp_path, sync_every=10)
    history.update({"loss": 1.0})
    del history
    gc.collect()
    assert facts(tmp_path)["status"] == "abandoned"
    with History(outdir=tmp_path) as again:
        assert list(again["loss"]) == [1.0]


def test_a_program_that_never_closes_loses_nothing(tmp_path):
    """The open window is written at the exit of the interpreter."""
    program = (
        "import sys, everyrank\n"
        "history = everyrank.History(outdir=sys.argv[1], sync_every=1000)\n"
        "for step in range(25):\n"
        "    history.update({'loss': 0.5})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert len(rows(tmp_path)) == 25
    assert facts(tmp_path)["status"] == "abandoned"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_records_nothing_and_ends_quietly(tmp_path):
    """Worker processes of a data loader hold a copy of the history, and must not touch the run."""
    program = (
        "import os, sys, everyrank\n"
        "history = everyrank.History(outdir=sys.argv[1], sync_every=2)\n"
        "history.update({'loss': 0.0})\n"
        "pid = os.fork()\n"
        "for step in range(5):\n"
        "    history.update({'loss': 1.0})\n"
        "history.close()\n"
        "if pid:\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], timeout=120, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows(tmp_path)) == 6
    assert facts(tmp_path)["status"] == "finished"


# ------------------------------------------------------------------------------ backends


def test_backends_get_every_record_in_order_and_are_closed(tmp_path):
    """A destination is two methods, and sees the run as it is written."""
    memory = MemoryBackend()
    with History(outdir=tmp_path, sync_every=4, backends=[memory]) as history:
        for step in range(10):
            history.update({"loss": 1.0 * step})
    assert [record.step for record in memory.records] == list(range(10))
    assert memory.closed


def test_use_wandb_false_leaves_out_wandb_and_nobody_else(tmp_path):
    """The flag of one update speaks of the backend of that name."""

    class Wandb(MemoryBackend):
        name = "wandb"

    memory, wandb = MemoryBackend(), Wandb()
    with History(outdir=tmp_path, backends=[memory, wandb]) as history:
        for step in range(4):
            history.update({"loss": 1.0}, use_wandb=step % 2 == 0)
    assert [record.step for record in wandb.records] == [0, 2]
    assert [record.step for record in memory.records] == [0, 1, 2, 3]


def test_a_backend_that_fails_costs_its_own_output_only(tmp_path, caplog):
    """Its cause is said once, it is counted, and training and the log go on."""

    class Broken:
        name = "broken"

        def write(self, record):
            raise OSError("no route to host")

        def close(self):
            raise OSError("still no route")

    with History(outdir=tmp_path, backends=[Broken()]) as history:
        for _ in range(20):
            history.update({"loss": 1.0})
        history.flush()
    assert len(rows(tmp_path)) == 20
    assert caplog.text.count("no route to host") == 1
    assert history.health()["backends"]["broken"]["failures"] == 21


def test_a_console_reads_what_was_declared(tmp_path, capsys):
    """Descriptions reach a backend without being repeated there."""
    with History(outdir=tmp_path, backends=[Every(2, to=Console())]) as history:
        history.declare("loss", unit="nats", format=".2f")
        for step in range(3):
            history.update({"loss": 1.0 * step})
    assert capsys.readouterr().out.splitlines() == [
        "step=0 loss=0.00 nats",
        "step=2 loss=2.00 nats",
    ]


def test_health_counts_what_a_person_may_ask(tmp_path):
    """It can be written as JSON, and says of every backend how it is."""
    with History(outdir=tmp_path, backends=[MemoryBackend()]) as history:
        history.update({"loss": 1.0})
        history.flush()
        health = json.loads(json.dumps(history.health()))
    assert health["failures"] == 0
    assert health["waiting"] == 0
    assert set(health["backends"]) == {"jsonl", "memory"}


def test_a_failure_in_the_background_is_logged_once_and_counted(tmp_path, caplog, monkeypatch):
    """Training never sees it, and health does."""
    with History(outdir=tmp_path) as history:

        def broken(batch: object) -> None:
            raise RuntimeError("columns are out")

        monkeypatch.setattr(history._run.columns, "append", broken)
        with caplog.at_level(logging.ERROR, "everyrank"):
            for _ in range(3):
                history.update({"loss": 1.0})
                history.flush()
        assert history.health()["failures"] >= 1
        monkeypatch.undo()
        history.update({"loss": 2.0})
        assert list(history["loss"]) == [2.0]
    assert caplog.text.count("failed and goes on") == 1
    assert "columns are out" in caplog.text


# ------------------------------------------------------------------------------ frames


def test_frames_are_aligned_by_step(tmp_path):
    """Both pandas and xarray see the same numbers, and missing is missing."""
    pytest.importorskip("pandas")
    pytest.importorskip("xarray")
    with History(outdir=tmp_path) as history:
        for step in range(4):
            history.update({"loss": 1.0 * step}, step=step)
        history.update({"eval/loss": 5.0}, step=2)
        frame, dataset = history.to_pandas(), history.to_xarray()
    assert frame["loss"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert frame["eval/loss"].isna().tolist() == [True, True, False, True]
    assert dataset["eval.loss"].values.tolist() == [5.0]
