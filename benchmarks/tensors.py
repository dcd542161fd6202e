"""What one `update` of 20 tensors costs, beside one `torch.stack` of them, and what it runs.

Called: `History(outdir=..., sync_every=50 or 1).update(metrics)` with 20 0-d float32 tensors of the
CPU, in blocks that take turns with `torch.stack(list(metrics.values()))` and with 20 x `.item()`; the
background is idle when a floor's block begins. A dispatch mode on the training thread counts what
`update` asks of torch.

Must reach: p50 at most 2.5 times that of one stack, and no `_local_scalar_dense`, which is what
reads a tensor's value and on a GPU waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.harness import (
    Missing,
    Spread,
    Table,
    fresh,
    installed,
    metrics,
    ratio,
    scratch,
    summary,
    time_calls,
)

_BLOCK = 250


def measure(sync_every: int, blocks: int) -> dict[str, Any]:
    """Time and count in this process."""
    import torch

    from everyrank import History

    torch.set_num_threads(1)
    steps = [{k: torch.tensor(v) for k, v in step.items()} for step in metrics(20)]
    history = History(outdir=scratch() / "run", sync_every=sync_every)
    calls: dict[str, Callable[[Any], object]] = {
        "stack": lambda step: torch.stack(list(step.values())),
        "items": lambda step: [value.item() for value in step.values()],
        "update": history.update,
    }
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name, call in calls.items():
            history.flush()
            some = time_calls(call, steps, _BLOCK)
            took[name] += some if block else []  # the first warms up
    operations = _count(history, steps[:sync_every])
    history.close()
    return {**{name: summary(one) for name, one in took.items()}, "operations": operations}


def _count(history: Any, steps: list[Any]) -> dict[str, float]:
    """Count what one window asks of torch on this thread, by operation and update."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    history.flush()
    with Count():  # type: ignore[no-untyped-call]
        for step in steps:
            history.update(step)
    return {name: count / len(steps) for name, count in counts.items()}


def run(*, quick: bool) -> list[Table]:
    """Give each size of window a fresh process a round, in turns."""
    table = Table(
        "update with 20 tensors (0-d, CPU), tight loop",
        ("who", "sync_every", "x stack, p50", "p50 us", "p99 us", "torch operations an update"),
    )
    if not installed("torch"):
        table.add("torch is not installed")
        return [table]
    rounds: dict[int, list[Any]] = {50: [], 1: []}
    for _ in range(1 if quick else 5):
        for sync_every, found in rounds.items():
            blocks = 8 if quick else 20
            found.append(fresh("tensors", "measure", sync_every=sync_every, blocks=blocks))
    for sync_every, found in rounds.items():
        failed = [one for one in found if isinstance(one, Missing)]
        if failed:
            table.add("everyrank", sync_every, failed[0].why)
        else:
            _add(table, sync_every, found)
    return [table]


def _add(table: Table, sync_every: int, rounds: list[dict[str, Any]]) -> None:
    labels = {"stack": "floor: one torch.stack", "items": "20 x .item()", "update": "everyrank"}
    for name, label in labels.items():
        p50 = [one[name]["p50"] for one in rounds]
        times = ratio(p50, [one["stack"]["p50"] for one in rounds])
        p99 = Spread.of(one[name]["p99"] for one in rounds)
        if name != "update":
            table.add(label, sync_every, times, Spread.of(p50), p99)
            continue
        operations = rounds[-1]["operations"]
        told = ", ".join(f"{n.removeprefix('aten::')} {c:.3g}" for n, c in operations.items())
        table.add(
            label,
            sync_every,
            times,
            Spread.of(p50),
            p99,
            told,
            must="p50 <= 2.5x",
            reached=times.median <= 2.5,
        )
        reads = max(one["operations"].get("aten::_local_scalar_dense", 0) for one in rounds)
        table.add(
            "everyrank: values read from tensors",
            sync_every,
            "",
            "",
            "",
            f"_local_scalar_dense {reads:g}",
            must="0",
            reached=reads == 0,
        )
