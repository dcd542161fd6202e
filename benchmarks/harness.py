"""What every benchmark needs: timed calls, fresh processes, spreads, tables, facts of the machine.

* **In turns.** Contestants take turns, round by round, and each ratio is formed within one round, so
  that a neighbour's load meets all of them alike. What is shown is the median over the rounds, with
  the lowest and the highest in brackets.
* **Fresh.** A contestant with threads or a large import runs in a process of its own, one for each
  round; the floor that it is compared with is taken in that process, or in the same round.
* **As it is.** The garbage collector runs, worst calls are kept, and a total includes the close.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent

#: What the figures depend on besides everyrank itself.
_PACKAGES = (
    "numpy",
    "orjson",
    "torch",
    "jax",
    "wandb",
    "trackio",
    "tensorboard",
    "torchmetrics",
    "torcheval",
)


# --------------------------------------------------------------------------------------- timing


def time_calls(call: Callable[[Any], object], arguments: Sequence[Any], n: int) -> list[int]:
    """Call n times with the arguments in turn, and give the nanoseconds of each call."""
    clock = time.perf_counter_ns
    took = [0] * n
    size = len(arguments)
    for i in range(n):
        argument = arguments[i % size]
        start = clock()
        call(argument)
        took[i] = clock() - start
    return took


def time_paced(
    calls: Sequence[Callable[[Any], object]],
    arguments: Sequence[Any],
    n: int,
    *,
    before: Callable[[], object],
    seed: int = 0,
) -> list[list[int]]:
    """Call each of several functions n times, in a new order each time round, `before` each call."""
    clock = time.perf_counter_ns
    took: list[list[int]] = [[] for _ in calls]
    random = np.random.default_rng(seed)
    # Drawn before: numpy's own code between the calls would take the caches from all of them.
    orders = [random.permutation(len(calls)).tolist() for _ in range(n)]
    for i, order in enumerate(orders):
        argument = arguments[i % len(arguments)]
        for c in order:
            call = calls[c]
            before()
            start = clock()
            call(argument)
            took[c].append(clock() - start)
    return took


def summary(took: Iterable[int]) -> dict[str, float]:
    """Give p50, p99, mean and worst of nanoseconds, in microseconds."""
    us = np.array(list(took)) / 1e3
    p50, p99 = np.percentile(us, [50, 99]).tolist()
    return {"p50": p50, "p99": p99, "mean": float(us.mean()), "worst": float(us.max())}


def clock_cost() -> float:
    """Give the microseconds of an empty timed call, which every figure contains."""
    return summary(time_calls(lambda _: None, [None], 20_000))["p50"]


def metrics(count: int, variants: int = 64) -> list[dict[str, float]]:
    """Give dicts of `count` floats under the same names, with all digits and never twice alike."""
    random = np.random.default_rng(0)
    names = [f"train/metric_{i}" for i in range(count)]
    return [dict(zip(names, random.random(count).tolist(), strict=True)) for _ in range(variants)]


class Spread(NamedTuple):
    """The median of some rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Take the spread of one value a round."""
        rounds = list(values)
        return cls(float(np.median(rounds)), min(rounds), max(rounds))

    def __str__(self) -> str:
        if self.low == self.high:
            return short(self.median)
        return f"{short(self.median)} [{short(self.low)}..{short(self.high)}]"


def short(value: float) -> str:
    """Write three digits, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ratio(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Divide round by round."""
    return Spread.of(a / b for a, b in zip(above, below, strict=True))


# ------------------------------------------------------------------------------- fresh processes


class Missing(NamedTuple):
    """A contestant that could not be measured, and why."""

    why: str


def fresh(module: str, function: str, *, timeout: float = 180.0, **options: Any) -> Any:
    """Call a function of a benchmark in a new process, and give what it returned, or a Missing."""
    with tempfile.TemporaryDirectory(prefix="everyrank-bench-") as directory:
        answer = Path(directory) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.child", module, function]
        work = Path(directory) / "work"
        work.mkdir()
        told = json.dumps({"answer": str(answer), "options": options})
        python_path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
        environment = {**os.environ, "PYTHONPATH": python_path, "EVERYRANK_BENCH_DIR": str(work)}
        try:
            done = subprocess.run(
                [*command, told],
                cwd=work,
                env=environment,
                timeout=timeout,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Missing(f"not done after {timeout:g} s")
        if not answer.exists():
            return Missing((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
        return json.loads(answer.read_text())


def scratch() -> Path:
    """Give the directory of this fresh process; it is removed with everything in it."""
    return Path(os.environ["EVERYRANK_BENCH_DIR"])


def installed(package: str) -> bool:
    """Say whether a package could be imported."""
    return importlib.util.find_spec(package) is not None


# ---------------------------------------------------------------------------------------- tables


class Row(NamedTuple):
    """One line of a table: its cells, what it must reach, and whether it does."""

    cells: Sequence[object]
    must: str = ""
    reached: bool | None = None


@dataclass
class Table:
    """What one question came to."""

    title: str
    head: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object, must: str = "", reached: bool | None = None) -> None:
        """Add a row; cells left out are empty."""
        filled = [*cells, *[""] * (len(self.head) - len(cells))]
        self.rows.append(Row(filled, must, reached))

    def _lines(self) -> list[list[str]]:
        answer = {True: "yes", False: "no", None: ""}
        body = [[*map(str, r.cells), r.must, answer[r.reached]] for r in self.rows]
        return [[*self.head, "must reach", "reached"], *body]

    def text(self) -> str:
        """Give the table for a terminal."""
        lines = self._lines()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in lines]
        rows.insert(1, "  ".join("-" * w for w in widths))
        notes = [f"  {note}" for note in self.notes]
        return "\n".join([self.title, *(row.rstrip() for row in rows), *notes])

    def markdown(self) -> str:
        """Give the table for a file."""
        head, *body = [" | ".join(c.replace("|", "\\|") for c in line) for line in self._lines()]
        rule = "|".join(["---"] * (len(self.head) + 2))
        rows = [f"| {head} |", f"|{rule}|", *(f"| {line} |" for line in body)]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"### {self.title}", "", *rows, *([""] if notes else []), *notes])


def verdict(tables: Iterable[Table]) -> str:
    """Count what was reached, and name what was not."""
    rows = [(table, row) for table in tables for row in table.rows if row.reached is not None]
    missed = [
        f"  no: {table.title}: {_label(row)}: {row.must}" for table, row in rows if not row.reached
    ]
    return "\n".join([f"{len(rows) - len(missed)} of {len(rows)} reached", *missed])


def _label(row: Row) -> str:
    """Name a row by its first cells, as far as they are no figures."""
    words = [str(cell).strip() for cell in row.cells[:2] if isinstance(cell, str | int)]
    return ", ".join(dict.fromkeys(words))


# ----------------------------------------------------------------------------------- the machine


def machine() -> dict[str, str]:
    """Give what a reader must know of where the figures come from."""
    return {
        "machine": f"{os.cpu_count()} cores, {_cpu_model()}, {_memory()}",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "everyrank": f"{_version('everyrank')}, commit {_commit()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
    }


def machine_word() -> str:
    """Give a name for files, such as 2-cores-amd-epyc."""
    words = "".join(c if c.isalnum() else " " for c in _cpu_model().lower()).split()
    return "-".join([f"{os.cpu_count()}-cores", *words])[:60]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.0f} GiB"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            " with changes" if git("status", "--porcelain", "--", "src", "benchmarks") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
