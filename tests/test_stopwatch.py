"""The stopwatch: what it measures, whom it tells, and that it waits for nobody."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import types

import pytest
import stopwatch_programs

from everyrank.errors import MetricError
from everyrank.stopwatch import StopWatch
from everyrank.testing import run_ranks

SECONDS = r"\d+\.\d{6}"


@pytest.fixture
def said(caplog):
    """Give what was logged so far."""
    caplog.set_level(logging.INFO, "everyrank")
    return lambda: [record.getMessage() for record in caplog.records]


class Notes(list):
    """What a History would take into its next row."""

    def note(self, name, value):
        self.append((name, value))


class Device:
    """A device that passes the marks in its queue when it is told to, each a quarter second on."""

    def __init__(self):
        self.marks = []
        self.error = None

    def event(self):
        return Mark(self)

    def pass_all(self):
        for mark in self.marks:
            mark.passed = True


class Mark:
    def __init__(self, device):
        self.device = device
        self.passed = False
        self.at = None

    def record(self):
        if self.device.error is not None:
            raise self.device.error
        self.at = len(self.device.marks)
        self.device.marks.append(self)

    def query(self):
        if self.device.error is not None:
            raise self.device.error
        return self.passed

    def elapsed_time(self, end):
        return 250.0 * (end.at - self.at)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        threading.Event().wait(0.001)


# ---------------------------------------------------------------- host time


def test_a_block_is_timed_and_logged(said):
    """One line with the seconds, and the same seconds to ask for."""
    with StopWatch("forward pass") as watch:
        pass
    (line,) = said()
    assert re.fullmatch(rf"forward pass took {SECONDS} s", line)
    assert line == f"forward pass took {watch.elapsed:.6f} s"
    assert watch.device_elapsed is None


def test_a_function_is_timed_at_each_call(said):
    """The decorated function keeps its name, arguments and result."""

    @StopWatch("validation")
    def validate(a, *, b):
        """Add."""
        return a + b

    assert validate(1, b=2) == validate(2, b=1) == 3
    assert validate.__name__ == "validate"
    assert len(said()) == 2


def test_before_its_first_use_nothing_has_elapsed():
    """A stopwatch that was not used reads zero."""
    watch = StopWatch("unused")
    assert (watch.elapsed, watch.device_elapsed) == (0.0, None)


def test_what_is_inside_takes_no_longer_than_what_is_around():
    """One stopwatch may be nested in itself; each use has its own time."""
    notes = Notes()
    watch = StopWatch("nested", history=notes, log=False)
    with watch:
        with watch:
            pass
        inner = watch.elapsed
    assert [name for name, _ in notes] == ["timing/nested"] * 2
    assert inner == notes[0][1] <= notes[1][1] == watch.elapsed


def test_a_recursive_function_is_timed_at_each_level():
    """The decorator may be entered again before it is left."""
    notes = Notes()

    @StopWatch("factorial", history=notes, log=False)
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    assert factorial(5) == 120
    times = [seconds for _, seconds in notes]
    assert len(times) == 6
    assert times == sorted(times)


def test_threads_may_share_a_stopwatch():
    """Each thread's begin meets its own end, however they overlap."""
    notes = Notes()
    watch = StopWatch("shared", history=notes, log=False)
    inside = threading.Barrier(4)

    def work():
        with watch:
            inside.wait(60)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(notes) == 4


def test_an_exception_passes_through_and_is_timed():
    """What fails took time, too."""
    notes = Notes()
    with pytest.raises(KeyError), StopWatch("fails", history=notes, log=False):
        raise KeyError("inside")
    assert len(notes) == 1


def test_the_log_may_be_silent_or_of_another_level(said, caplog):
    """`log=False` says nothing, `level` is the logger's."""
    with StopWatch("silent", log=False):
        pass
    with StopWatch("quiet", level=logging.DEBUG):
        pass
    assert said() == []
    with StopWatch("loud", level=logging.WARNING):
        pass
    assert caplog.records[0].levelno == logging.WARNING


# ---------------------------------------------------------------- who is told


@pytest.mark.parametrize(
    ("message", "tag", "name"),
    [
        ("forward pass", "timing/forward", "timing/forward"),
        ("Forward pass, bf16!", None, "timing/forward_pass_bf16"),
        ("...", None, "timing/stopwatch"),
        ("Zeit für Größen", None, "timing/zeit_für_größen"),
    ],
)
def test_a_history_gets_the_seconds_under_a_name(message, tag, name):
    """It is `wbtag`, or made of the message."""
    notes = Notes()
    with StopWatch(message, wbtag=tag, history=notes, log=False) as watch:
        pass
    assert notes == [(name, watch.elapsed)]


def test_a_history_that_refuses_is_said_once(said):
    """A timing never ends the run that it times."""

    class Refuses:
        def note(self, name, value):
            raise MetricError("no such name")

    watch = StopWatch("refused", history=Refuses(), log=False)
    for _ in range(3):
        with watch:
            pass
    (line,) = said()
    assert line.startswith("The time of 'refused' could not be recorded: MetricError(")


@pytest.fixture
def wandb(monkeypatch):
    """Stand in for the package with an active run that keeps what it is given."""
    calls = []
    run = types.SimpleNamespace(log=lambda values, commit: calls.append((values, commit)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_DISABLED", raising=False)
    return calls


def test_a_tag_alone_goes_to_the_active_run_of_wandb(wandb):
    """With the row that comes next, since a row of its own would use up a step."""
    with StopWatch("forward", wbtag="timing/forward", log=False) as watch:
        pass
    assert wandb == [({"timing/forward": watch.elapsed}, False)]


def test_wandb_gets_nothing_it_was_not_asked_for(wandb, monkeypatch):
    """Not without a tag, not what a history records, not when it is switched off."""
    with StopWatch("no tag", log=False):
        pass
    with StopWatch("history", wbtag="a", history=Notes(), log=False):
        pass
    monkeypatch.setenv("WANDB_DISABLED", "true")
    with StopWatch("off", wbtag="a", log=False):
        pass
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    monkeypatch.delenv("WANDB_DISABLED")
    with StopWatch("no run", wbtag="a", log=False):
        pass
    assert wandb == []


# ---------------------------------------------------------------- device time


def test_nothing_waits_for_the_device(said):
    """The block ends at once, and the line comes once the device is done, with both times."""
    device, notes = Device(), Notes()
    with StopWatch("forward", history=notes, event=device.event) as watch:
        pass
    assert watch.device_elapsed is None
    assert watch.elapsed > 0
    assert said() == notes == []
    device.pass_all()
    wait_for(lambda: notes)
    assert watch.device_elapsed == 0.25
    assert notes == [("timing/forward", 0.25)]
    line = rf"forward took 0\.250000 s on the device, {SECONDS} s on the host"
    assert [bool(re.fullmatch(line, each)) for each in said()] == [True]


def test_asking_for_the_time_on_the_device_is_enough_to_have_it():
    """Nobody has to end another stopwatch, nor wait for the thread, once the device is done."""
    device = Device()
    with StopWatch("asked", event=device.event, log=False) as watch:
        pass
    device.pass_all()
    wait_for(lambda: watch.device_elapsed == 0.25)


def test_laps_are_told_once_each_in_their_order():
    """However many are open at a time, and whoever looks first."""
    device, notes = Device(), Notes()
    watch = StopWatch("lap", history=notes, event=device.event, log=False)
    for _ in range(20):
        with watch:
            pass
    with watch, watch:
        device.pass_all()
    device.pass_all()
    wait_for(lambda: len(notes) >= 22)
    assert [seconds for _, seconds in notes] == [0.25] * 21 + [0.75]


def test_the_last_lap_to_end_is_the_one_that_is_shown():
    """An earlier one that the device finishes later does not take its place."""
    first, second = Device(), Device()
    devices = iter([first, first, second, second])
    watch = StopWatch("laps", event=lambda: next(devices).event(), log=False)
    with watch:
        pass
    with watch:
        pass
    first.pass_all()
    assert watch.device_elapsed is None
    second.pass_all()
    wait_for(lambda: watch.device_elapsed == 0.25)


@pytest.mark.parametrize("when", ["begin", "end", "look"])
def test_a_device_that_fails_leaves_the_time_of_the_host(when, said):
    """It is for training to report a lost device; here it is one warning."""
    device, notes = Device(), Notes()
    error = RuntimeError(f"lost at {when}")
    for _ in range(2):
        device.error = error if when == "begin" else None
        with StopWatch("lost", history=notes, event=device.event, log=False) as watch:
            device.error = error if when == "end" else device.error
        device.error = error
    wait_for(lambda: len(notes) == 2)
    assert watch.device_elapsed is None
    assert watch.elapsed == notes[1][1]
    assert said() == [
        f"The device's clock could not be read: RuntimeError('lost at {when}'). Host time is shown."
    ]


def test_without_a_device_in_use_the_host_is_timed():
    """A CUDA device that nobody uses is not woken for a stopwatch, nor is torch imported."""
    with StopWatch("host", device="cpu", log=False) as watch:
        pass
    assert watch.device_elapsed is None
    assert watch.elapsed > 0


@pytest.mark.cuda
def test_a_cuda_device_is_timed_by_its_own_clock():
    """Marks go into the current stream, and are read without waiting for it."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.ones(1, device="cuda")
    with StopWatch("kernel", log=False) as watch:
        torch.cuda._sleep(10_000_000)
    assert watch.device_elapsed is None
    wait_for(lambda: watch.device_elapsed is not None)
    assert watch.device_elapsed > watch.elapsed


def test_a_forked_child_tells_its_own_laps_only():
    """What was open when it was forked is told by the parent, and once."""
    ((parent, child),) = run_ranks(
        stopwatch_programs.fork_with_an_open_lap, 1, backend=None, start_method="forkserver"
    )
    assert parent == ["before the fork", "after the fork"]
    assert child == "in the child"


@pytest.mark.parametrize(
    ("passed", "line"),
    [
        (True, rf"the last step took 0\.250000 s on the device, {SECONDS} s on the host\n"),
        (False, rf"the last step took {SECONDS} s\n"),
    ],
)
def test_a_program_that_ends_tells_what_is_open(tmp_path, passed, line):
    """It gives the device a moment, and then the host's time will do."""
    path = tmp_path / "log"
    run_ranks(stopwatch_programs.end_with_an_open_lap, 1, str(path), passed, backend=None)
    assert re.fullmatch(line, path.read_text())
