"""What `import everyrank` costs, beside bare Python and numpy, and what it leaves unimported.

Called: fresh interpreters that run one statement, in turns; the wall time of each round less that of
`import numpy` (which everyrank needs), or of no statement. The peers' imports show the scale.

Must reach: `import everyrank`, and the import of `History`, under 50 ms above bare Python plus numpy,
with torch, jax, matplotlib and wandb absent from `sys.modules`, also once a History has recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

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
        ("statement", "ms above bare Python", "ms above numpy", "of torch, jax, matplotlib, wandb"),
    )
    statements = {**{name: code for name, (code, _) in _OTHERS.items()}, **_OURS}
    absent = {name for name, (_, package) in _OTHERS.items() if not installed(package)}
    took: dict[str, list[float]] = {name: [] for name in statements if name not in absent}
    for i in range(4 if quick else 11):
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
    above = {
        base: Spread.of(a - b for a, b in zip(took[name], took[base], strict=True))
        for base in ("bare Python", "import numpy")
    }
    if name not in _OURS:
        table.add(name, above["bare Python"], above["import numpy"])
        return
    heavy = _heavy(_OURS[name])
    light = above["import numpy"].median < 50
    timed = _OURS[name] is not _USED  # the third runs a program, which is no import
    table.add(
        name,
        above["bare Python"],
        above["import numpy"],
        heavy or "none",
        must="< 50 ms above numpy; none" if timed else "none",
        reached=not heavy and (light or not timed),
    )


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
        env={**os.environ, "EVERYRANK_LOCAL_HISTORY": "1"},
        cwd=tempfile.gettempdir(),
    )
    return done.stdout
