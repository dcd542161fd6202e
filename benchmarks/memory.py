"""What a million steps of 20 metrics take in memory, while the whole run can be read at any time.

Called: `History(outdir=..., sync_every=50)`, 1,000,000 updates with the JSON lines on, then close;
and the same with every record and one series read at the end. Measured is the highest resident size
of a fresh process above what it was after the imports. Beside it, what a list of dict copies takes,
measured at a tenth of the steps and scaled.

Must reach: under 400 MB above the imports. The matrix of float64 alone is 160 MB.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

from benchmarks.harness import Missing, Table, fresh, metrics, scratch

_STEPS = 1_000_000


def peak() -> float:
    """Give the highest resident size so far, in MB."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 1e6 if sys.platform == "darwin" else size * 1024 / 1e6


def measure(read: bool, steps: int) -> dict[str, float]:
    """Record a long run in this process."""
    from everyrank import History

    variants = metrics(20)
    history = History(outdir=scratch() / "run", sync_every=50)
    before, began = peak(), time.perf_counter()
    for step in range(steps):
        history.update(variants[step % 64])
    history.close()
    seconds = time.perf_counter() - began
    if read:
        rows = sum(1 for _ in history)
        assert rows == steps == len(history["train/metric_0"])
    log = sum(path.stat().st_size for path in (scratch() / "run").iterdir())
    return {"peak": peak() - before, "seconds": seconds, "log": log / 1e6}


def dict_list(steps: int) -> dict[str, float]:
    """Keep a dict for each step, with values of its own, as a program without a History would."""
    variants = metrics(20)
    before, began = peak(), time.perf_counter()
    kept = []
    for step in range(steps):
        kept.append({name: value + step for name, value in variants[step % 64].items()})
    return {"peak": peak() - before, "seconds": time.perf_counter() - began, "log": 0.0}


def run(*, quick: bool) -> list[Table]:
    """Give each way a fresh process."""
    steps = _STEPS // 10 if quick else _STEPS
    tenth = _STEPS // 10
    table = Table(
        f"memory of {steps:,} steps x 20 metrics, sync_every=50, JSON lines on",
        ("who", "x the bare matrix", "MB above imports", "seconds", "log MB"),
        notes=[f"The bare matrix of float64: {steps * 160 / 1e6:,.0f} MB."],
    )
    if quick:
        table.notes.append("Quickly, it is a tenth of the steps, and nothing is judged.")
    for label, read in (("recorded", False), ("recorded, then every record read", True)):
        found = fresh("memory", "measure", read=read, steps=steps, timeout=400.0)
        _add(table, f"everyrank: {label}", found, steps, judged=not quick)
    found = fresh("memory", "dict_list", steps=tenth)
    if not isinstance(found, Missing):
        found = {name: value * steps / tenth for name, value in found.items()}
    _add(table, f"a list of dicts, from {tenth:,} steps", found, steps, judged=False)
    return [table]


def _add(table: Table, label: str, found: Any, steps: int, *, judged: bool) -> None:
    if isinstance(found, Missing):
        table.add(label, found.why)
        return
    table.add(
        label,
        f"{found['peak'] / (steps * 160 / 1e6):.2f}",
        f"{found['peak']:,.0f}",
        f"{found['seconds']:.1f}",
        f"{found['log']:,.0f}",
        must="< 400 MB" if judged else "",
        reached=found["peak"] < 400 if judged else None,
    )
