"""What one `update` of 20 floats costs at the pace of real steps: one call every 5 ms.

Called: `History(outdir=..., sync_every=50 or 1).update(metrics)`, an empty function, and a dict copy
appended to a list, in one loop with a sleep of 5 ms before each call and in a new order each time
round. Caches are cold then, and the processor clocks down, so even the empty function costs some
microseconds. The same loop without a History says what these two cost where nobody works in the
background.

Must reach: p50 at most twice that of the dict copy of the same loop, p99 at most five times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import (
    Missing,
    Spread,
    Table,
    fresh,
    metrics,
    ratio,
    scratch,
    summary,
    time_calls,
    time_paced,
)

_PACE = 0.005

#: What runs beside the two floors: a label, and the options of its History.
_BESIDE: dict[str, tuple[str, dict[str, Any] | None]] = {
    "nothing": ("nothing", None),
    "windows": ("everyrank, sync_every=50", {"sync_every": 50}),
    "single": ("everyrank, sync_every=1", {"sync_every": 1}),
}


def measure(beside: str, n: int) -> dict[str, dict[str, float]]:
    """Time the floors, and what is beside them, in this process."""
    _, options = _BESIDE[beside]
    kept: list[Any] = []
    calls: dict[str, Callable[[Any], object]] = {
        "empty": lambda _: None,
        "copy": lambda metrics: kept.append(metrics.copy()),
    }
    if options is not None:
        from everyrank import History

        history = History(outdir=scratch() / "run", **options)
        calls["update"] = history.update
    arguments = metrics(20)
    for call in calls.values():
        time_calls(call, arguments, 200)
    took = time_paced(list(calls.values()), arguments, n, before=partial(time.sleep, _PACE))
    if options is not None:
        history.close()
    return {name: summary(one) for name, one in zip(calls, took, strict=True)}


def run(*, quick: bool) -> list[Table]:
    """Give each loop a fresh process a round, in turns."""
    rounds: dict[str, list[Any]] = {beside: [] for beside in _BESIDE}
    for _ in range(1 if quick else 3):
        for beside, found in rounds.items():
            found.append(fresh("paced", "measure", beside=beside, n=150 if quick else 500))
    table = Table(
        "update with 20 floats, one call every 5 ms",
        ("who", "beside", "x copy, p50", "x copy, p99", "p50 us", "p99 us"),
        notes=["x copy: how many times the dict copy's, in the same loop."],
    )
    for beside, found in rounds.items():
        failed = [one for one in found if isinstance(one, Missing)]
        if failed:
            table.add(_BESIDE[beside][0], failed[0].why)
        else:
            _add(table, _BESIDE[beside][0], found)
    return [table]


def _add(table: Table, label: str, rounds: list[dict[str, dict[str, float]]]) -> None:
    who = {"empty": "empty function", "copy": "dict copy, list append", "update": label}
    for name in rounds[0]:
        p50, p99 = ([one[name][p] for one in rounds] for p in ("p50", "p99"))
        times = [
            ratio(mine, [one["copy"][p] for one in rounds])
            for mine, p in ((p50, "p50"), (p99, "p99"))
        ]
        must: dict[str, Any] = {}
        if name == "update":
            must["must"] = "p50 <= 2x, p99 <= 5x"
            must["reached"] = times[0].median <= 2 and times[1].median <= 5
        table.add(who[name], label, *times, Spread.of(p50), Spread.of(p99), **must)
