"""Lines on a terminal: aligned, of one line each, and no wider than there is room."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everyrank.backends import console as console_module
from everyrank.backends.background import Guard
from everyrank.backends.base import Backend
from everyrank.backends.console import Console
from everyrank.errors import OptionError
from everyrank.records import Description, Record

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_colour_of_ours(monkeypatch: pytest.MonkeyPatch):
    """Begin every test without what the environment says of colours."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def widths(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let the terminal be so many columns wide."""
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr(console_module.shutil, "get_terminal_size", lambda: size)


def lines(
    rows: list[dict[str, Any]], *, stream: io.StringIO | None = None, **options: Any
) -> list[str]:
    """Print some rows, one for each step from 0 at one step a second, and give the lines."""
    stream = stream or io.StringIO()
    console = Console(stream=stream, **options)
    for step, values in enumerate(rows):
        console.write(Record(step, float(step), values))
    console.close()
    return COLOUR.sub("", stream.getvalue()).splitlines()


def test_fields_stand_where_they_stood():
    """Values that get shorter or longer keep the columns below one another."""
    rows = [{"loss": 10.0, "n": 1, "lr": 0.5}, {"loss": 9.5, "n": 22, "lr": 0.25}]
    assert lines([*rows, rows[0]], precision=2) == [
        "step=0 loss=10.00 n=1 lr=0.50",
        "step=1 loss=9.50  n=22 lr=0.25",
        "step=2 loss=10.00 n=1  lr=0.50",
    ]


def test_the_console_is_a_backend_that_writes_to_stdout(capsys: pytest.CaptureFixture[str]):
    """Without a stream it is the program's standard output, also if that is replaced later."""
    console = Console()
    assert isinstance(console, Backend)
    console.write(Record(3, 0.0, {"loss": 0.25}))
    console.flush()
    console.close()
    assert capsys.readouterr().out == "step=3 loss=0.250000\n"
    assert not sys.stdout.closed


def test_descriptions_say_how_numbers_are_shown():
    """Unit and format are the metric's, also for its statistics, which have no unit."""
    row = {"lr": 3e-4, "lr/mean": 3e-4, "acc": 51.5, "mem": 3.0, "note": None}
    descriptions = {
        "lr": Description(format=".1e"),
        "acc": Description(unit="%", format=".1f"),
        "mem": Description(unit="GB", format=".0f"),
        "note": Description(unit="GB"),
    }
    expected = ["step=0 lr=3.0e-04 lr/mean=3.0e-04 acc=51.5% mem=3 GB note=None"]
    assert lines([row], descriptions=descriptions) == expected
    stream = io.StringIO()
    console = Console(stream=stream)
    console.describe(descriptions)
    console.write(Record(0, 0.0, row))
    assert stream.getvalue().splitlines() == expected


def test_only_what_is_asked_for_is_shown():
    """Names, and patterns of names, choose the fields."""
    row = {"loss": 1.0, "eval/loss": 2.0, "lr": 3.0, "LOSS": 4.0}
    assert lines([row], only=["loss", "eval/*"], precision=0) == ["step=0 loss=1 eval/loss=2"]
    assert lines([row], only="lr", precision=0) == ["step=0 lr=3"]
    assert lines([row], only=[]) == ["step=0"]


def test_progress_shows_rate_and_time_left():
    """With total_steps a line begins with how far the run is; the rate is that of the records."""
    found = lines([{"loss": 1.0}] * 3, total_steps=1000, precision=1)
    assert found == [
        "[   1/1000   0%   -- it/s  eta     --] loss=1.0",
        "[   2/1000   0%  1.0 it/s  eta 16m38s] loss=1.0",
        "[   3/1000   0%  1.0 it/s  eta 16m37s] loss=1.0",
    ]


@pytest.mark.parametrize(("first", "shown"), [(0, "3/3"), (1, "2/3"), (2, "2/3")])
def test_progress_ends_at_the_total_whether_steps_count_from_0_or_from_1(first: int, shown: str):
    """The first step that is seen tells which; a resumed run begins at any."""
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=3)
    for step in range(first, 3):
        console.write(Record(step, 1.0 * step))
    assert f"[{shown} " in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("seconds", "speed", "left"),
    [
        (0.01, "100.0 it/s", "9s"),
        (1e-4, "10000 it/s", "0s"),
        (1e-9, "1e+09 it/s", "0s"),
        (8.0, "8.0 s/it", "2h00m"),
        (100.0, "100.0 s/it", "1d01h"),
        (2e5, "200000 s/it", "--"),
        (1e300, "1e+300 s/it", "--"),
        (math.inf, "-- it/s", "--"),
        (math.nan, "-- it/s", "--"),
        (-1.0, "-- it/s", "--"),
    ],
)
def test_a_rate_is_told_as_a_person_says_it(seconds: float, speed: str, left: str):
    """Steps a second or seconds a step, days to seconds, and nothing where a clock tells none."""
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=902)
    console.write(Record(1, 0.0))
    console.write(Record(2, seconds))
    shown = stream.getvalue().splitlines()[1]
    assert f" {speed} " in shown
    assert shown.endswith(f"eta {left:>6}]")


def test_a_run_that_goes_back_begins_its_rate_anew():
    """The way to where a run was before is no part of its rate, and a repeated step no progress."""
    stream = io.StringIO()
    console = Console(stream=stream, total_steps=10)
    for step, time in [(0, 0.0), (5, 1.0), (5, 2.0), (2, 3.0), (4, 4.0), (12, 5.0)]:
        console.write(Record(step, time))
    speeds = [re.search(r"(\S+) it/s", line)[1] for line in stream.getvalue().splitlines()]  # type: ignore[index]
    assert speeds == ["--", "5.0", "5.0", "--", "2.0", "5.0"]
    assert stream.getvalue().splitlines()[-1] == "[13/10 100%  5.0 it/s  eta     0s]"


RANKS = {
    "loss": 2.3,
    "loss/mean": 2.299127,
    "loss/max": 2.30915,
    "loss/min": 2.28842,
    "loss/std": 0.01,
    "lr": 3e-4,
    "acc": 0.5,
    "acc/mean": 0.5,
    "acc/std": 0.125,
    "acc/ranks": 3,
}


def test_a_narrow_terminal_gets_a_metric_and_its_statistics_as_one_field(
    monkeypatch: pytest.MonkeyPatch,
):
    """Where the line is too wide, the mean stands for the metric with its range or its spread."""
    widths(monkeypatch, 80)
    assert lines([RANKS] * 2, stream=Terminal()) == [
        f"step={i} loss=2.299127 (2.288..2.309) lr=0.000300 acc=0.500000 (+-0.125) 3 ranks"
        for i in range(2)
    ]
    assert lines([RANKS])[0].startswith("step=0 loss=2.300000 loss/mean=2.299127 loss/max")


def test_a_narrower_one_counts_the_fields_that_it_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
):
    """The last fields are counted, then all, then the line is cut off."""
    for columns, expected in [
        (77, "step=0 loss=2.299127 (2.288..2.309) lr=0.000300 +1 more"),
        (50, "step=0 loss=2.299127 (2.288..2.309) +2 more"),
        (42, "step=0 +3 more"),
        (14, "step=0 +3 more"),
        (13, "step=0"),
        (3, "ste"),
    ]:
        widths(monkeypatch, columns)
        assert lines([RANKS], stream=Terminal()) == [expected]


def test_thousands_of_fields_are_laid_out_once(monkeypatch: pytest.MonkeyPatch):
    """A record of very many metrics costs a line, and not a line for each that has no room."""
    widths(monkeypatch, 40)
    row = {f"layer{i}/norm": 1.0 for i in range(3000)}
    laid_out: list[int] = []
    really = console_module._laid_out

    def counting(head: str, fields: list[Any], pads: list[int], *, colour: bool) -> str:
        laid_out.append(len(fields))
        return really(head, fields, pads, colour=colour)

    monkeypatch.setattr(console_module, "_laid_out", counting)
    assert lines([row], stream=Terminal()) == ["step=0 layer0/norm=1.000000 +2999 more"]
    assert laid_out == [1]


def test_a_wider_window_gets_the_full_line_again(monkeypatch: pytest.MonkeyPatch):
    """When the window is resized, the line fits it from the next step on."""
    stream = Terminal()
    console = Console(stream=stream)
    for columns in (60, 200):
        widths(monkeypatch, columns)
        console.write(Record(0, 0.0, RANKS))
    narrow, wide = COLOUR.sub("", stream.getvalue()).splitlines()
    assert (len(narrow) <= 60, "loss/std=" in narrow, "loss/std=" in wide) == (True, False, True)


HOSTILE = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([10**5000, -(2**70)]),
    st.booleans(),
    st.none(),
    st.text(max_size=60),
    st.sampled_from(["a\nb", "\x1b[2J", "\ud800", "", " ", "é" * 50]),
    st.lists(st.floats(), max_size=7).map(np.array),
    st.lists(st.text(max_size=3), min_size=1, max_size=7).map(np.array),
    st.just(np.zeros((3, 3), bool)),
    st.just([1, {"a": "\n"}]),
)
KEYS = st.one_of(
    st.text(min_size=1, max_size=4), st.sampled_from(["a", "a/mean", "a/min", "a/max"])
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the width is set anew
)
@given(
    st.lists(st.dictionaries(KEYS, HOSTILE, max_size=6), min_size=1, max_size=3),
    st.integers(1, 120),
    st.booleans(),
)
def test_law_one_line_a_record_and_never_too_wide(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], columns: int, progress: bool
):
    """Whatever a record holds, it is one printable line within the width of the terminal."""
    widths(monkeypatch, columns)
    stream = Terminal()
    guard = Guard(Console(stream=stream, total_steps=99 if progress else None))
    for step, values in enumerate(rows):
        guard.write(Record(step, float(step), values))
    assert guard.last_failure is None
    found = COLOUR.sub("", stream.getvalue()).split("\n")
    assert found.pop() == ""
    assert len(found) == len(rows)
    assert all(len(line) <= columns for line in found)
    assert all(line.isprintable() for line in found)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        (7, "7"),
        (-0.0, "-0.000000"),
        (math.nan, "nan"),
        (None, "None"),
        ("plain", "plain"),
        ("two words", "'two words'"),
        ("", "''"),
        ("a\nb", "'a\\nb'"),
        ("x" * 50, "x" * 37 + "..."),
        (10**5000, hex(10**5000)[:37] + "..."),
        (np.array([1.0, 0.25]), "[1 0.25]"),
        (np.array([]), "[]"),
        (np.arange(9.0), "[9: 0..8]"),
        (np.zeros((3, 4)), "[3x4: 0..0]"),
        (np.array([True] * 5), "[5: True..True]"),
        (np.array(["a b"]), "['a b']"),
        (np.array(["a"] * 5), "[a a a a ...]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_value_has_its_form(value: Any, shown: str):
    """Numbers, texts and arrays are shown in one word, or as good as one."""
    assert lines([{"x": value}]) == [f"step=0 x={shown}"]


def test_a_name_has_no_second_line_either():
    """A control code in a name is shown as its escape."""
    assert lines([{"a\nb": 1}]) == ["step=0 a\\nb=1"]


@pytest.mark.parametrize(
    ("terminal", "environment", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": "0"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "0"}, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], coloured: bool
):
    """Only a terminal gets colours; NO_COLOR takes them away, FORCE_COLOR gives them elsewhere."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    widths(monkeypatch, 80)
    stream = Terminal() if terminal else io.StringIO()
    lines([{"loss": 1.0}], stream=stream)
    assert bool(COLOUR.search(stream.getvalue())) == coloured


def test_what_is_not_finite_catches_the_eye(monkeypatch: pytest.MonkeyPatch):
    """A NaN in a metric or in its statistics is red, in the wide form and in the narrow one."""
    for columns in (80, 30):
        widths(monkeypatch, columns)
        stream = Terminal()
        lines([{"a": math.nan}, {"a": 1.0, "a/max": math.inf, "a/min": 0.0}], stream=stream)
        assert [line.count("\x1b[31m") for line in stream.getvalue().splitlines()] == [1, 1]


def test_a_stream_of_ascii_gets_escapes():
    """What a stream cannot encode is shown as its escape, and nothing fails."""
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    lines_of = Console(stream=stream)
    lines_of.write(Record(0, 0.0, {"é": 1}))
    lines_of.close()
    assert buffer.getvalue() == b"step=0 \\xe9=1\n"


@pytest.mark.parametrize("total", [0, -3])
def test_a_total_that_is_none_is_refused(total: int):
    """The error says to leave it out where it is not known."""
    with pytest.raises(
        OptionError, match=rf"`total_steps` must be at least 1, but is {total}. Leave"
    ):
        Console(total_steps=total)


def test_a_negative_precision_is_refused():
    """A number has no fewer than 0 decimals."""
    with pytest.raises(OptionError, match="`precision` must be at least 0 decimals, but is -1"):
        Console(precision=-1)
