"""What a run meets that is not its own doing: signals, garbage, full disks, odd ends."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import teardown_programs as programs

from everyrank import History, flow
from everyrank.backends.console import Console
from everyrank.ranks.local import in_process
from everyrank.testing import MemoryBackend, run_ranks


def alone(fn: Any, *args: Any) -> Any:
    """Run something in a process of its own, where signals and limits are nobody else's."""
    (result,) = run_ranks(fn, 1, *args, backend=None, start_method="forkserver")
    return result


def facts(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


# ------------------------------------------------------------------------------ signals


@pytest.mark.parametrize("sync_every", [1, 3])
def test_the_handler_of_a_signal_may_use_the_history(tmp_path, sync_every):
    """It may update, note, flush, read and print in the middle of an update: nothing is lost."""
    seen = alone(programs.handlers, str(tmp_path), sync_every)
    assert seen == dict.fromkeys(seen, (True, True, 0))


@pytest.mark.parametrize("sync_every", [1, 7])
def test_an_interrupted_update_costs_nothing_but_itself(tmp_path, sync_every):
    """Wherever Ctrl-C strikes: no lock is left held, no row of another update lost or doubled."""
    seen = alone(programs.interrupted, str(tmp_path), sync_every, 60)
    assert seen == ((True, True), (True, 0), 0)


def test_a_thread_may_be_stopped_in_the_middle_of_an_update(tmp_path):
    """An exception that another thread raises in it does no more harm than a signal."""
    seen = alone(programs.stopped_from_outside, str(tmp_path), 150)
    assert seen == ((True, True), (True, 0), 0)


def test_the_handler_of_a_signal_may_close_what_is_being_closed(tmp_path):
    """A job that is told to go while it waits for others goes at once, with all that it had."""
    seen = alone(programs.closed_by_a_signal, str(tmp_path), "closes")
    assert seen == ([True], True, True, list(range(10)), "finished")


def test_a_close_that_was_interrupted_can_be_made_good(tmp_path):
    """Ctrl-C while it waits for others leaves the rest to the next close."""
    seen = alone(programs.closed_by_a_signal, str(tmp_path), "raises")
    assert seen == ([], "interrupted", True, list(range(10)), "finished")


# ------------------------------------------------------------------------------ messages


@pytest.fixture
def handler():
    """Attach a handler of log messages to the root, for as long as a test runs."""
    attached: list[logging.Handler] = []

    def attach(emit: Any) -> None:
        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                emit(record)

        attached.append(Handler())
        logging.getLogger().addHandler(attached[0])

    yield attach
    for each in attached:
        logging.getLogger().removeHandler(each)


def within(work: Any) -> Any:
    """Do something on a thread of its own, so that a hang is the end of the test only."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert results, "it hangs, or raised"
    return results[0]


def test_a_handler_of_messages_may_log_to_the_history(tmp_path, handler, monkeypatch):
    """Also where the message says that the queue is full, or that the run went back."""
    monkeypatch.setattr(flow, "_CAPACITY", 50)
    history = History(outdir=tmp_path)
    said: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        history.note("message", said[-1])
        history.update({"messages": len(said)})
        history.flush(0.01)

    handler(emit)

    def train() -> bool:
        for step in [*range(2000), *range(1000, 1010)]:
            history.update({"x": step}, step=step)
        return history.close(60)

    assert within(train)
    assert any("is behind" in each for each in said)
    assert any("went back" in each for each in said)
    assert [row["x"] for row in programs.rows(tmp_path) if "x" in row] == [
        *range(2000),
        *range(1000, 1010),
    ]


def test_a_handler_of_messages_that_raises_costs_no_row(tmp_path, handler):
    """What is said about one rank must not keep the others' numbers from anybody."""
    said: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        raise RuntimeError("the handler is broken")

    handler(emit)
    first, second = in_process(2, timeout=0.05, grace=0.05)
    with History(outdir=tmp_path, group=first) as history, History(group=second) as other:
        for step in (0, 1, 2, 1):
            history.update({"x": step}, step=step)
        assert history.flush(60)
        other.update({"x": 9}, step=0)
        assert other.flush(60)
    assert any("is reduced without rank 1" in each for each in said)
    assert [row["x"] for row in programs.rows(tmp_path)] == [0, 1, 2, 1]
    assert history.health()["failures"] == other.health()["failures"] == 0


# ------------------------------------------------------------------------------ threads


def test_threads_may_update_read_flush_and_close_at_once(tmp_path):
    """Whoever closes first: what every thread told before is there, in its order."""
    first, second = in_process(2, timeout=0.2, grace=0.05)
    histories = [
        History(outdir=tmp_path / str(i), group=group, sync_every=3, backends=[MemoryBackend()])
        for i, group in enumerate((first, second))
    ]
    over = threading.Event()
    failures: list[BaseException] = []

    def update(history: History, name: str) -> None:
        for step in range(300):
            line = history.update({name: step})
            if step % 100 == 0:
                str(line)
            if step == 200 and name == "b":
                history.close(30)

    def look(history: History) -> None:
        while not over.is_set():
            history.flush(0.01)
            len(history), history.latest, list(history), history.health(), history.state_dict()

    def guarded(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:
            failures.append(error)

    updating, looking = [], []
    for history in histories:
        for name in "ab":
            updating.append(threading.Thread(target=guarded, args=(update, history, name)))
        looking += [threading.Thread(target=guarded, args=(look, history)) for _ in range(2)]
    for thread in [*updating, *looking]:
        thread.daemon = True
        thread.start()
    for thread in updating:
        thread.join(60)
    over.set()
    for thread in looking:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in [*updating, *looking])
    for history in histories:
        assert history.close(30)
        assert history.health()["failures"] == 0
        assert list(history["b"])[:201] == list(range(201))
        assert list(history["a"]) == list(range(len(history["a"])))


def test_a_backend_may_flush_and_close_the_history(tmp_path):
    """From its own thread it cannot wait for itself, and nobody waits for it in vain."""
    answers: list[bool] = []

    class Stopper(MemoryBackend):
        def write(self, record: Any) -> None:
            if record.step == 5:
                answers.extend([history.flush(1), history.close(1)])
            super().write(record)

    history = History(outdir=tmp_path, backends=[Stopper()])

    def train() -> bool:
        for step in range(10):
            history.update({"x": step})
        programs.until(lambda: len(answers) == 2)
        return history.close(30)

    within(train)
    assert answers == [False, False], "not all was delivered by then"
    assert [row["x"] for row in programs.rows(tmp_path)][:6] == list(range(6))
    assert facts(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("where", ["flow", "backend"])
def test_a_history_that_its_own_thread_collects_loses_nothing(tmp_path, where):
    """Garbage is found by any thread, and the thread of the History cannot wait for itself."""
    seen = alone(programs.garbage, str(tmp_path), where)
    assert seen == (list(range(30)), "abandoned")


def test_histories_leave_nothing_behind(tmp_path):
    """After 150 in a row and 50 at once there are as many threads and descriptors as before."""
    before, in_a_row, after, closed = alone(programs.many, str(tmp_path))
    assert before == in_a_row == after
    assert closed == [5] * 50


# ------------------------------------------------------------------------------ the exit

_OPEN = "history = everyrank.History(outdir=sys.argv[1], sync_every=50)\n"
_LOG = "for step in range(30): history.update({'x': step})\n"
_ENDS = {
    "a thread exits": (
        _OPEN + "def work():\n    " + _LOG + "    sys.exit(3)\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n"
    ),
    "a thread goes on after the main one": (
        _OPEN + "def work():\n    threading.main_thread().join()\n    " + _LOG + "\n"
        "threading.Thread(target=work).start()\n"
    ),
    "a daemon goes on updating": (
        _OPEN + _LOG + "def work():\n    while True: history.update({'y': 1.0}, step=99)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
    ),
    "daemons go on reading": (
        _OPEN + _LOG + "def work():\n    while True: len(history), history.flush(1)\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
    ),
    "an exit handler closes": "atexit.register(lambda: history.close())\n" + _OPEN + _LOG,
    "exit handlers update": (
        "atexit.register(lambda: history.update({'late': 1.0}))\n" + _OPEN + _LOG.replace("30", "29")
        + "atexit.register(lambda: history.update({'x': 29}))\n"
    ),
    "a signal asks it to exit": (
        _OPEN + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + _LOG
        + "os.kill(os.getpid(), signal.SIGTERM)\n"
    ),
    "it ends without an exit": _OPEN + _LOG + "assert history.flush(60)\nos._exit(0)\n",
}  # fmt: skip


@pytest.mark.parametrize("end", _ENDS)
def test_however_a_program_ends_its_rows_are_there(tmp_path, end):
    """And nothing is said about it, on no stream."""
    program = "import atexit, os, signal, sys, threading\nimport everyrank\n" + _ENDS[end]
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if "is behind" not in line]
    assert (done.returncode, done.stdout, said) == (0, "", [])
    assert [row["x"] for row in programs.rows(tmp_path) if "x" in row] == list(range(30))
    assert facts(tmp_path)["status"] in ("abandoned", "finished", "running")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_of_multiprocessing_may_forget_to_close(tmp_path):
    """One that is forked ends without the interpreter's exit, and its open window is there."""
    assert alone(programs.forked_by_multiprocessing, str(tmp_path)) == (0, 30)


@pytest.mark.parametrize("alive", [True, False])
def test_ranks_that_forget_to_close_lose_nothing(tmp_path, alive):
    """Whether torch.distributed still stands or not, their last window is reduced over all."""
    pytest.importorskip("torch")
    run_ranks(programs.forgetful_ranks, 2, str(tmp_path), alive, start_method="forkserver")
    rows = programs.rows(tmp_path)
    assert [row["x/mean"] for row in rows] == [step + 0.5 for step in range(30)]
    assert facts(tmp_path)["status"] == "abandoned"


def test_a_rank_that_stands_still_is_left_out_and_comes_back(tmp_path):
    """Suspended for longer than the others wait, and continued: it loses none of its own rows."""
    seen = run_ranks(
        programs.stops_for_a_while, 2, str(tmp_path), backend=None, start_method="forkserver"
    )
    assert seen == [(True, True, True, 0)] * 2


# ------------------------------------------------------------------------------ files


def test_a_disk_that_is_full_for_a_while_costs_no_row(tmp_path):
    """Until there is room a flush says that not all is delivered; then all is."""
    answers, x = alone(programs.full_disk, str(tmp_path))
    assert answers == (True, False, True, True)
    assert x == [*range(200), 100]


def test_a_history_that_could_not_begin_leaves_nothing_open(tmp_path):
    """Whoever makes room and tries again finds neither a lock nor a thread in the way."""
    error, threads, lines = alone(programs.full_from_the_start, str(tmp_path))
    assert "cannot be written" in error
    assert (threads, lines) == (0, 1)


def test_a_run_directory_that_vanishes_ends_no_training(tmp_path, caplog):
    """What can still be read is read, what is lost is said, and close does not claim otherwise."""
    history = History(outdir=tmp_path / "run", per_rank=True)
    history.update({"x": 0})
    assert history.flush(60)
    shutil.rmtree(tmp_path / "run")
    for step in (1, 2, 1):
        history.update({"x": step}, step=step)
    assert not history.close(60)
    assert list(history["x"]) == [0, 1]
    assert history.health()["failures"] == 0
    assert "deleted while it was written" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_program_may_change_its_directory(tmp_path, monkeypatch):
    """A run stays where it was opened, whatever relative path it was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    options = [{"outdir": "a"}, {"report_dir": "b"}, {"jsonl_path": "c/log.jsonl"}]
    histories = [History(per_rank=True, **each) for each in options]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for history in histories:
        history.update({"x": 0})
        assert history.close(60)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    for name in "abc":
        assert facts(tmp_path / name)["status"] == "finished"
        assert len((tmp_path / name / "ranks" / "rank-00000.jsonl").read_text()) > 0
    histories[2].finalize(outdir="copy")
    assert (tmp_path / "elsewhere" / "copy" / "run.json").exists()


def test_two_runs_may_share_a_report_directory_at_once(tmp_path):
    """Each has its own rows and its own facts, however they take turns."""
    runs = [History(report_dir=tmp_path, sync_every=2) for _ in range(2)]
    for step in range(5):
        for i, history in enumerate(runs):
            history.update({"x": 10 * i + step})
    for i, history in enumerate(reversed(runs)):
        assert history.close(60)
        rows = (tmp_path / f"{history.run_id}.jsonl").read_text().splitlines()
        assert [json.loads(row)["x"] for row in rows] == [10 * (1 - i) + s for s in range(5)]
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("*run.json")]
    assert sorted(each["run_id"] for each in kept) == sorted(h.run_id for h in runs)
    assert {each["status"] for each in kept} == {"finished"}


def test_a_closed_stdout_costs_its_own_lines_only(tmp_path, capsys):
    """A console that has lost its stream is counted, and the log is whole."""
    stream = (tmp_path / "out").open("w")
    history = History(outdir=tmp_path / "run", backends=[Console(stream=stream)])
    history.update({"x": 0})
    assert history.flush(60)
    stream.close()
    for step in range(1, 5):
        history.update({"x": step})
    assert not history.close(60)
    assert history.health()["backends"]["console"]["failures"] >= 4
    assert [row["x"] for row in programs.rows(tmp_path / "run")] == list(range(5))


def test_any_text_is_a_name(tmp_path, capsys):
    """Line ends, quotes, control codes, 10 kB: shown on one line, read back as they were."""
    names = [
        "a\nb",
        '"',
        "'",
        "\\",
        "\t",
        "\0",
        "\u2028",
        "é",
        "/",
        "a/",
        "%s",
        "{}",
        " ",
        "x" * 10_000,
    ]
    with History(outdir=tmp_path, sync_every=2, backends=[Console()]) as history:
        for step in range(4):
            history.update(dict.fromkeys(names, step))
    with History(outdir=tmp_path) as again:
        assert again.history == {name: [0, 1, 2, 3] for name in names}
    assert len(capsys.readouterr().out.split("\n")) == 5


def test_a_clock_that_goes_back_changes_nothing_but_the_times(tmp_path, monkeypatch, capsys):
    """Rows keep their order and their values, and whoever prints one finds it."""
    times = iter(range(10_000, 0, -7))
    monkeypatch.setattr("everyrank.intake.time", lambda: float(next(times)))
    with History(outdir=tmp_path, backends=[Console(total_steps=20)]) as history:
        lines = [str(history.update({"x": step})) for step in range(20)]
    assert lines == [f"step={step} x={step}" for step in range(20)]
    assert list(history["x"]) == list(range(20))
    assert history.health()["backends"]["console"]["failures"] == 0


def test_thousands_of_metrics_are_reduced_like_a_few(tmp_path):
    """2,000 names on two ranks: every mean is there, exactly."""
    with (
        History(outdir=tmp_path, group=(pair := in_process(2))[0], sync_every=4) as history,
        History(group=pair[1], sync_every=3) as other,
    ):
        for step in range(12):
            for rank, each in enumerate((history, other)):
                each.update({f"m{i}": float(i + step + 2 * rank) for i in range(2000)})
    for name in ("m0", "m999", "m1999"):
        expected = int(name[1:]) + np.arange(12) + 1.0
        np.testing.assert_array_equal(history[f"{name}/mean"].values, expected)
        np.testing.assert_array_equal(other[f"{name}/mean"].values, expected)
