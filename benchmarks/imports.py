"""What `import everyrank` costs, beside bare Python and numpy, and what it leaves unimported.

Called: fresh interpreters that run one statement, in turns; their wall time less that of
`import numpy` (which everyrank needs), or of no statement. The peers' imports show the scale. All of
them find their modules compiled, as an installed package's are, and numpy starts one thread.

Must reach: `import everyrank`, and the import of `History`, under 50 ms above bare Python plus numpy,
with torch, jax, matplotlib and wandb absent from `sys.modules`, also once a History has recorded.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from functools import cache

from benchmarks.harness import Spread, Table, installed

_HEAVY = ("torch", "jax", "matplotlib", "wandb")

_USED = """
import everyrank, tempfile
with tempfile.TemporaryDirectory() as d, everyrank.History(outdir=d) as history:
    history.update({"loss": 0.25})
"""

_OURS = {
    "import everyrank": "import everyrank",
    "from everyrank import History": "from everyrank import History",
    "History() opened, updated, closed": _USED,
}

_OTHERS = {
    "bare Python": ("", "sys"),
    "import numpy": ("import numpy", "numpy"),
    "import trackio": ("import trackio", "trackio"),
    "import wandb": ("import wandb", "wandb"),
    "import torch": ("import torch", "torch"),
}


def run(*, quick: bool) -> list[Table]:
    """Start interpreters in turns."""
    table = Table(
        "import",
        (
            "statement",
            "ms above numpy",
            "ms above bare Python",
            "ms in all",
            "imported of the four",
        ),
        notes=[
            "Above: median less median, and in brackets lowest less lowest; noise only ever adds.",
            f"The four: {', '.join(_HEAVY)}.",
        ],
    )
    others = dict(list(_OTHERS.items())[:2] if quick else _OTHERS)
    statements = {**{name: code for name, (code, _) in others.items()}, **_OURS}
    absent = {name for name, (_, package) in others.items() if not installed(package)}
    took: dict[str, list[float]] = {name: [] for name in statements if name not in absent}
    for i in range(3 if quick else 13):
        for name, found in took.items():
            one = _wall(statements[name])
            found += [one] if i else []  # the first warms the caches
    for name in statements:
        if name in absent:
            table.add(name, "not installed")
        else:
            _add(table, name, took)
    return [table]


def _add(table: Table, name: str, took: dict[str, list[float]]) -> None:
    mine = Spread.of(took[name])
    numpy, bare = (Spread.of(took[base]) for base in ("import numpy", "bare Python"))
    above = [
        f"{mine.median - base.median:.0f} [{mine.low - base.low:.0f}]" for base in (numpy, bare)
    ]
    if name not in _OURS:
        table.add(name, *above, mine)
        return
    heavy = _heavy(_OURS[name])
    if _OURS[name] is _USED:  # it runs a program, and is no import
        table.add(name, *above, mine, heavy or "none", must="none", reached=not heavy)
        return
    light = mine.median - numpy.median < 50
    must = "< 50 ms above numpy; none"
    table.add(name, *above, mine, heavy or "none", must=must, reached=light and not heavy)


def _wall(code: str) -> float:
    """Give the milliseconds of an interpreter that runs this code."""
    start = time.perf_counter()
    _python(code)
    return (time.perf_counter() - start) * 1e3


def _heavy(code: str) -> str:
    """Name the heavy packages that this code has imported."""
    return _python(f"{code}\nimport sys; print(*(n for n in {_HEAVY} if n in sys.modules))").strip()


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(),
        cwd=tempfile.gettempdir(),
    )
    return done.stdout


@cache
def _environment() -> dict[str, str]:
    """Give surroundings in which the first import of a module compiles it for all the later ones."""
    directory = tempfile.TemporaryDirectory(prefix="everyrank-bench-")
    atexit.register(directory.cleanup)
    ours = {"EVERYRANK_LOCAL_HISTORY": "1", "OPENBLAS_NUM_THREADS": "1"}
    ours["PYTHONPYCACHEPREFIX"] = directory.name
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | ours
