"""What the documents show is run: every block of Python in them, as a reader would paste it."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import everyrank

ROOT = Path(__file__).parents[1]
SOURCE = Path(everyrank.__file__).parent

#: What the first block of the README takes from its reader.
PRELUDE = """
import everyrank
model = batches = None
train_step = lambda model, batches: (0.5, 128, 12.0)
"""


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(blocks(ROOT / "README.md"))))
def test_each_block_of_the_readme_runs(tmp_path, index):
    """In an interpreter of its own, in an empty directory, with warnings as errors."""
    program = PRELUDE + blocks(ROOT / "README.md")[index]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_s_comments_are_what_is_printed(tmp_path, monkeypatch):
    """The outputs that stand behind the print statements are the real ones."""
    monkeypatch.chdir(tmp_path)
    with everyrank.History(outdir="run") as history:
        for _ in range(100):
            history.update({"train": {"loss": 0.5}})
        assert repr(history["train/loss"]).startswith("Series(train/loss: 100 values of float64, ")


MODULES = sorted(
    str(path.relative_to(SOURCE.parent).with_suffix("")).replace("/", ".")
    for path in SOURCE.rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name, tmp_path, monkeypatch):
    """A docstring's example shows what really comes out."""
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name.removesuffix(".__init__"))
    names = {
        "np": importlib.import_module("numpy"),
        "Columns": importlib.import_module("everyrank.columns").Columns,
        "History": everyrank.History,
        "StopWatch": everyrank.StopWatch,
    }
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in finder.find(module, extraglobs=names):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_the_documents_keep_their_lengths():
    """A person in a hurry reads them whole."""
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50


def test_every_room_is_in_the_architecture():
    """A module that nobody can place is in the wrong place."""
    told = (ROOT / "ARCHITECTURE.md").read_text()
    for path in SOURCE.glob("*.py"):
        if path.name not in ("__init__.py", "errors.py", "environment.py"):
            assert path.name in told, path.name
    for room in (p for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"):
        assert f"{room.name}/" in told, room.name
