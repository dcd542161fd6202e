"""What one `update` of 20 floats costs the training thread, beside what one would use instead.

Called: `History(outdir=..., sync_every=50 or 1).update(metrics)` in a tight loop, its JSON lines
written; `run.log(metrics)` of wandb offline; `trackio.log(metrics)`, local; TensorBoard's
`SummaryWriter.add_scalar` x 20; and two floors: a dict copy appended to a list, and orjson with one
write(2) a step. Each runs in a fresh process, one a round, in turns.

Must reach: p50 at most 3 us with windows of 50 steps and 12 us with windows of one; windows of 50 at
least 50x under wandb, 5x under trackio, 100x under TensorBoard (p50 against p50 of the same round).

The total is the honest figure for who works in the background: steps a second, the close included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.harness import (
    Missing,
    Spread,
    Table,
    clock_cost,
    fresh,
    installed,
    metrics,
    ratio,
    scratch,
    summary,
    time_calls,
)

Metrics = dict[str, float]
Opened = tuple[Callable[[Metrics], object], Callable[[], object]]


def everyrank_windows(sync_every: int) -> Opened:
    from everyrank import History

    history = History(outdir=scratch() / "run", sync_every=sync_every)
    return history.update, history.close


def dict_copy() -> Opened:
    kept: list[Metrics] = []

    def log(metrics: Metrics) -> None:
        kept.append(metrics.copy())

    return log, kept.clear


def orjson_write() -> Opened:
    import orjson

    file = os.open(scratch() / "log.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0

    def log(metrics: Metrics) -> None:
        nonlocal step
        row = {"step": step, "time": time.time(), **metrics}
        os.write(file, orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        step += 1

    return log, lambda: os.close(file)


def wandb_offline() -> Opened:
    directory = str(scratch())
    names = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    os.environ.update({"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    os.environ.update(dict.fromkeys(names, directory))
    import wandb

    run = wandb.init(project="benchmark", dir=directory)
    return run.log, run.finish


def trackio_local() -> Opened:
    os.environ.update({"TRACKIO_DIR": str(scratch()), "HF_HUB_OFFLINE": "1"})
    import trackio  # type: ignore[import-not-found,unused-ignore]

    trackio.init(project="benchmark")
    return trackio.log, trackio.finish


def tensorboard() -> Opened:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(scratch()))
    step = 0

    def log(metrics: Metrics) -> None:
        nonlocal step
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        step += 1

    return log, writer.close


class Contestant(NamedTuple):
    """Who is measured: how it is opened, and how many steps it is given."""

    label: str
    opened: Callable[[], Opened]
    steps: int
    package: str = ""
    must: float = 0.0  # how many times the cost of windows of 50 it must have


CONTESTANTS = {
    "windows": Contestant("everyrank, sync_every=50", lambda: everyrank_windows(50), 20_000),
    "single": Contestant("everyrank, sync_every=1", lambda: everyrank_windows(1), 20_000),
    "copy": Contestant("floor: dict copy, list append", dict_copy, 20_000),
    "write": Contestant("floor: orjson, one write a step", orjson_write, 20_000, "orjson"),
    "wandb": Contestant("wandb offline", wandb_offline, 4_000, "wandb", 50),
    "trackio": Contestant("trackio, local", trackio_local, 10_000, "trackio", 5),
    "tensorboard": Contestant(
        "TensorBoard add_scalar x 20", tensorboard, 1_500, "tensorboard", 100
    ),
}


def measure(who: str, share: float) -> dict[str, float]:
    """Time one contestant in this process."""
    contestant = CONTESTANTS[who]
    steps = int(contestant.steps * share)
    arguments = metrics(20)
    log, close = contestant.opened()
    time_calls(log, arguments, 200)
    began = time.perf_counter()
    took = time_calls(log, arguments, steps)
    close()
    total = time.perf_counter() - began
    return {**summary(took), "rate": steps / total}


def run(*, quick: bool) -> list[Table]:
    """Give each contestant a fresh process a round, in turns."""
    rounds: dict[str, list[dict[str, float]]] = {who: [] for who in CONTESTANTS}
    absent: dict[str, str] = {}
    for _ in range(1 if quick else 5):
        for who, contestant in CONTESTANTS.items():
            if contestant.package and not installed(contestant.package):
                absent[who] = f"{contestant.package} is not installed"
                continue
            found = fresh("update_cost", "measure", who=who, share=0.5 if quick else 1.0)
            if isinstance(found, Missing):
                absent[who] = found.why
            else:
                rounds[who].append(found)
    return [_table(rounds, absent)]


def _table(rounds: dict[str, list[dict[str, float]]], absent: dict[str, str]) -> Table:
    table = Table(
        "update with 20 floats, tight loop",
        ("who", "x by p50", "x by total", "p50 us", "p99 us", "mean us", "worst ms", "steps/s"),
        notes=[
            "x: how many times everyrank's with sync_every=50, in the same round; "
            "total: time with close.",
            f"An empty call timed in the same way: {clock_cost():.2f} us.",
        ],
    )
    base = rounds["windows"]
    for who, contestant in CONTESTANTS.items():
        if who in absent:
            table.add(contestant.label, absent[who])
            continue
        _add(table, contestant, rounds[who], base, limit={"windows": 3.0, "single": 12.0}.get(who))
    return table


def _add(
    table: Table,
    contestant: Contestant,
    mine: list[dict[str, float]],
    base: list[dict[str, float]],
    *,
    limit: float | None,
) -> None:
    def of(rounds: list[dict[str, float]], name: str) -> list[float]:
        return [one[name] for one in rounds]

    times = by_total = None
    if len(mine) == len(base):
        times = ratio(of(mine, "p50"), of(base, "p50"))
        by_total = ratio(of(base, "rate"), of(mine, "rate"))
    p50 = Spread.of(of(mine, "p50"))
    must: dict[str, Any] = {}
    if limit is not None:
        must = {"must": f"p50 <= {limit:g} us", "reached": p50.median <= limit}
    elif contestant.must and times:
        must = {"must": f">= {contestant.must:g}x", "reached": times.median >= contestant.must}
    table.add(
        contestant.label,
        times,
        by_total,
        p50,
        *(Spread.of(of(mine, name)) for name in ("p99", "mean")),
        Spread.of(worst / 1e3 for worst in of(mine, "worst")),
        Spread.of(of(mine, "rate")),
        **must,
    )
