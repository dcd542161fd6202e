"""How far the reductions fall behind where they are slower than a step.

Called: `History(outdir=..., sync_every=1)` on 4 ranks, 20 metrics, steps of 1 ms by a clock that the
ranks share, so that none of them is behind in training; 1,500 steps, and twice as many. The lag is
the rows that wait at a rank, from `history.health()` every 25 steps, and the time that `close()`
takes. Beside it, what a program would write itself: one all_gather a step on a background thread of
each rank, with a group of its own and a queue.

Must reach: the lag stays bounded. That is judged twice: at close less than half a second is left,
and a run of twice the length has not twice the lag (at most 1.5 times its largest, or 0.1 s).
"""

from __future__ import annotations

import gc
import math
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import Missing, Table, fresh, installed, metrics, short

WORLD = 4
_METRICS = 20
_STEP = 0.001
_SAMPLE = 25


def _steps(steps: int) -> Iterator[int]:
    """Give the number of each step when its time has come; a late one comes at once."""
    began = time.monotonic()
    for step in range(steps):
        time.sleep(max(0.0, began + (step + 1) * _STEP - time.monotonic()))
        yield step


def everyrank_run(rank: int, directory: str, steps: int) -> dict[str, Any]:
    """Run the loop on one rank, and give the lag as it went."""
    import torch.distributed as dist

    from everyrank import History

    arguments = metrics(_METRICS)
    history = History(outdir=directory, sync_every=1)
    history.update(arguments[0])
    history.flush()
    dist.barrier()
    rows = []
    began = time.perf_counter()
    for step in _steps(steps):
        history.update(arguments[step % 64])
        if step % _SAMPLE == 0:
            health = history.health()
            # What waits is counted in values, also of rows that were not started yet.
            rows.append(max(health["unfinished_rows"], math.ceil(health["waiting"] / _METRICS)))
    ran = time.perf_counter() - began
    began = time.perf_counter()
    assert history.close()
    return {
        "rows": rows,
        "ran": ran,
        "close": time.perf_counter() - began,
        "late": history.health().get("late_rows", 0),
        "recorded": len(history),
    }


def thread_run(rank: int, directory: str, steps: int) -> dict[str, Any]:
    """Run the loop with a thread that gathers step by step, as one would write it."""
    import torch
    import torch.distributed as dist

    arguments = metrics(_METRICS)
    group = dist.new_group(backend="gloo")
    waiting: queue.SimpleQueue[list[float] | None] = queue.SimpleQueue()

    def gather() -> None:
        out = [torch.empty(_METRICS, dtype=torch.float64) for _ in range(WORLD)]
        while (values := waiting.get()) is not None:
            dist.all_gather(out, torch.tensor(values, dtype=torch.float64), group=group)
            torch.stack(out).mean(0).tolist()

    thread = threading.Thread(target=gather)
    thread.start()
    dist.barrier()
    rows = []
    began = time.perf_counter()
    for step in _steps(steps):
        waiting.put(list(arguments[step % 64].values()))
        if step % _SAMPLE == 0:
            rows.append(waiting.qsize())
    ran = time.perf_counter() - began
    began = time.perf_counter()
    waiting.put(None)
    thread.join()
    closed = time.perf_counter() - began
    return {"rows": rows, "ran": ran, "close": closed, "recorded": steps}


def on_rank(rank: int, directory: str, lengths: list[int]) -> dict[str, dict[str, Any]]:
    """Run both ways at each length on one rank, in turns."""
    import torch.distributed as dist

    # A full collection walks all that torch has imported, 85-170 ms during which this rank makes no
    # steps and all others wait for it: that is Python's stall, and no lag of the reductions.
    gc.collect()
    gc.freeze()
    found = {}
    for steps in lengths:
        for who, way in _WAYS.items():
            dist.barrier()
            found[f"{who} {steps}"] = way(rank, f"{directory}/run-{steps}", steps)
    return found


_WAYS = {"everyrank": everyrank_run, "thread": thread_run}


def measure(lengths: list[int]) -> list[dict[str, dict[str, Any]]]:
    """Run both ways on a group of processes; the findings of each rank."""
    from everyrank.testing import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(on_rank, WORLD, directory, lengths, timeout=150.0)


def run(*, quick: bool) -> list[Table]:
    """Run both ways at two lengths, in one group of processes."""
    table = Table(
        f"lag of {WORLD} ranks on {os.cpu_count()} cores, sync_every=1, steps of 1 ms",
        ("who", "steps", "s run", "most rows behind", "s behind", "at the end", "s to close"),
        notes=[
            "Rows behind: on the worst rank. s behind: the same in steps of the run's own pace.",
            "A row that has been handed on and is in no column yet is behind.",
        ],
    )
    if not installed("torch"):
        table.add("torch is not installed")
        return [table]
    steps = 400 if quick else 1500
    lengths = [steps, 2 * steps]
    ranks = fresh("lag", "measure", lengths=lengths, timeout=200.0)
    if isinstance(ranks, Missing):
        table.add("all", lengths, ranks.why)
        return [table]
    for who, label in (
        ("everyrank", "everyrank"),
        ("thread", "one all_gather a step, in a thread"),
    ):
        first: float | None = None
        for steps in lengths:
            found = [rank[f"{who} {steps}"] for rank in ranks]
            first = _add(table, label, steps, found, first, judged=who == "everyrank")
    return [table]


def _add(
    table: Table,
    label: str,
    steps: int,
    ranks: list[dict[str, Any]],
    before: float | None,
    *,
    judged: bool,
) -> float:
    """Add one run; give its largest lag in seconds, for the next to be compared with."""
    pace = max(one["ran"] for one in ranks) / steps
    most = max(max(one["rows"]) for one in ranks)
    closing = max(one["close"] for one in ranks)
    behind: float = most * pace
    bounded = closing < 0.5
    must = "close < 0.5 s"
    if before is not None:
        must += ", most <= 1.5x the shorter's or 0.1 s"
        bounded = bounded and behind <= max(1.5 * before, 0.1)
    table.add(
        label,
        steps,
        f"{pace * steps:.2f}",
        most,
        f"{behind:.3f}",
        max(one["rows"][-1] for one in ranks),
        short(closing),
        must=must if judged else "",
        reached=bounded if judged else None,
    )
    return behind
