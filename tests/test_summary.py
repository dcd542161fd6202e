"""What `update` returns: a text like any other, which costs nothing until somebody looks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyrank import History
from everyrank.ranks.local import in_process
from everyrank.records import Description
from everyrank.summary import Summary, line


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Open a history of one process."""
    with History(outdir=tmp_path) as history:
        yield history


def test_a_summary_reads_like_the_step(history: History):
    """Step first, then the values in their order, floats with six decimals."""
    summary = history.update({"loss": 0.25, "n": 3, "ok": True, "note": "warm", "none": None})
    assert str(summary) == "step=0 loss=0.250000 n=3 ok=True note=warm none=None"


@pytest.mark.parametrize(
    ("precision", "text"),
    [(0, "step=7 x=0 y=1000000"), (2, "step=7 x=0.12 y=1000000.00"), (8, "x=0.12345679 y=")],
)
def test_floats_have_exactly_the_precision(history: History, precision: int, text: str):
    """However large or small a float is, it has as many decimals as were asked for."""
    summary = history.update({"x": 0.123456789, "y": 1e6}, step=7, precision=precision)
    assert text in str(summary)


def test_a_declared_format_wins(history: History):
    """A metric that was declared with a format is shown in it, whatever the precision."""
    history.declare("lr", format=".1e")
    assert str(history.update({"lr": 3e-4, "x": 1.0}, precision=1)) == "step=0 lr=3.0e-04 x=1.0"


def test_values_that_are_no_numbers_stay_on_the_line(history: History):
    """Infinities, wide ints and arrays are shown, and a matrix does not break the line."""
    summary = history.update({"x": float("nan"), "n": 2**70, "m": np.eye(2)}, precision=1)
    assert str(summary) == f"step=0 x=nan n={2**70} m=[[1. 0.] [0. 1.]]"


@pytest.mark.parametrize("sync_every", [1, 9])
def test_a_summary_shows_the_values_of_its_call(tmp_path: Path, sync_every: int):
    """Also long after, also of a window that is open, and though the tensor was written since."""
    torch = pytest.importorskip("torch")
    loss = torch.tensor(0.5)
    with History(outdir=tmp_path, sync_every=sync_every) as history:
        first = history.update({"loss": loss, "v": [1, 2]})
        loss.fill_(9.0)
        second = history.update({"loss": loss, "v": [1, 2]})
        assert str(second) == "step=1 loss=9.000000 v=[1 2]"
        assert str(first) == "step=0 loss=0.500000 v=[1 2]"


def test_a_summary_does_not_change_once_it_was_read(tmp_path: Path):
    """The text is worked out at the first look, and is the same ever after."""
    with History(outdir=tmp_path, sync_every=9) as history:
        summary = history.update({"loss": 0.5})
        before = str(summary)
        history.declare("loss", format=".1e")
        history.flush()
        assert str(summary) == before


def test_a_summary_can_be_read_after_the_end(tmp_path: Path):
    """A closed history keeps what its last summaries say."""
    with History(outdir=tmp_path) as history:
        summary = history.update({"loss": 0.5})
    assert str(summary) == "step=0 loss=0.500000"


def test_a_summary_shows_statistics_of_other_ranks(tmp_path: Path):
    """Once its window is reduced, the line has the mean over the ranks, as the record does."""
    first, second = in_process(2, stats=("mean", "max_rank"))
    with (
        History(outdir=tmp_path, group=first, stats=("mean", "max_rank")) as a,
        History(outdir=tmp_path, group=second, stats=("mean", "max_rank")) as b,
    ):
        summary = a.update({"loss": 1.0}, precision=2)
        b.update({"loss": 2.0})
        assert a.flush()
        assert str(summary) == "step=0 loss=1.00 loss/mean=1.50 loss/max_rank=1"


@pytest.fixture
def summary(history: History) -> Any:
    """Give a summary that nobody has looked at."""
    return history.update({"loss": 0.5}, precision=1)


TEXT = "step=0 loss=0.5"


@pytest.mark.parametrize(
    "use",
    [
        *(str, repr, len, hash, list, lambda s: f"{s:>20}|", lambda s: f"{s}", lambda s: s[5:9]),
        *(lambda s: s + "!", lambda s: "> " + s, lambda s: s * 2, lambda s: "loss" in s),
        *(lambda s: s.upper(), lambda s: s.split(), lambda s: s.replace("loss", "x")),
        *(lambda s: s.partition("="), lambda s: s == TEXT, lambda s: s < "z", lambda s: s.title()),
        *(lambda s: s.encode(), lambda s: s.startswith("step"), lambda s: s.ljust(30) + "|"),
        *(lambda s: format(s, ".4"), lambda s: s.center(30), lambda s: s.count("s"), bool),
    ],
)
def test_a_summary_does_what_a_str_does(summary: Any, use: Any):
    """Whatever is done with it gives what the text would give."""
    assert use(summary) == use(TEXT)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_summary_is_a_text(summary: Any, way: Any):
    """A summary may travel to another process, where no run is."""
    assert way(summary) == TEXT
    assert type(way(summary)) is str


def test_looking_costs_nothing_until_it_is_done(tmp_path: Path):
    """A summary that nobody prints asks nobody."""

    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

    row: Any = Untouchable()
    unread = Summary(Untouchable(), row, 6)
    with pytest.raises(AssertionError, match="was asked for"):
        str(unread)


def test_a_line_shows_statistics_in_the_format_of_their_metric():
    """The format of a metric is that of its mean, and counts stay counts."""
    text = line(
        3,
        {"loss": 0.5, "loss/mean": 0.25, "loss/ranks": 4, "lossy": 1.0},
        precision=2,
        descriptions={"loss": Description(format=".1e")},
    )
    assert text == "step=3 loss=5.0e-01 loss/mean=2.5e-01 loss/ranks=4 lossy=1.00"
