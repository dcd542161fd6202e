"""What 10 metrics with statistics of every step over 4 ranks cost the training thread.

Called, in one group of 4 processes (gloo, `everyrank.testing.run_ranks`) and in turns:
`History(outdir=..., sync_every=50 or 1).update(metrics)`; the same with `distributed_history=False`,
which is one process alone under the same load; and what is usually written by hand: four blocking
all-reduces of a tensor of the 10 values, with their reads, for mean, max, min and std. Beside it, one
process with nobody else on the machine. Paced means a sleep of 2 ms and an untimed barrier before
each call, which stands for the all-reduce of the gradients; tight means one call after the other.

Must reach: p50 at most 1.5 times that of one process, and at least 300 times under the baseline; and
at most 3 / sync_every messages a rank and step. everyrank starts no collective: its ranks send frames
over a star of sockets, so frames are what is counted, in the steady state of a paced run: rows from
a rank to the first, and reduced rows from the first to each.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
    time_paced,
)

WORLD = 4
METRICS = 10
_PACE = 0.002
_WINDOWS = (50, 1)

Call = Callable[[dict[str, float]], object]


def four_all_reduces() -> Call:
    """Give the usual way by hand: mean, max, min and std over ranks, read at once."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()

    def reduce(metrics: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        reduced = {}
        for stat, operator in (
            ("mean", dist.ReduceOp.SUM),
            ("max", dist.ReduceOp.MAX),
            ("min", dist.ReduceOp.MIN),
            ("std", dist.ReduceOp.SUM),
        ):
            over = values * values if stat == "std" else values.clone()
            dist.all_reduce(over, op=operator)
            reduced[stat] = over.tolist()
        row = dict(metrics)
        for i, name in enumerate(metrics):
            mean = reduced["mean"][i] / world
            row[f"{name}/mean"] = mean
            row[f"{name}/max"], row[f"{name}/min"] = reduced["max"][i], reduced["min"][i]
            row[f"{name}/std"] = max(reduced["std"][i] / world - mean * mean, 0.0) ** 0.5
        return row

    return reduce


def on_rank(rank: int, directory: str, blocks: int) -> dict[str, dict[str, float]]:
    """Time all ways on one rank of the group; the figures by way and pace."""
    import torch.distributed as dist

    from everyrank import History

    def at_pace() -> None:
        time.sleep(_PACE)
        dist.barrier()

    arguments = metrics(METRICS)
    histories = {
        f"{how} {n}": History(
            outdir=f"{directory}/{how}-{n}-{rank if how == 'local' else 'all'}",
            sync_every=n,
            distributed_history=how == "group",
        )
        for n in _WINDOWS
        for how in ("group", "local")
    }
    ways: dict[str, Call] = {name: history.update for name, history in histories.items()}
    ways["baseline"] = four_all_reduces()

    def settle() -> None:
        for history in histories.values():
            history.flush()
        dist.barrier()

    took: dict[str, list[int]] = {f"{pace} {way}": [] for pace in ("paced", "tight") for way in ways}
    for block in range(blocks + 1):
        for way, call in ways.items():
            settle()
            paced = time_paced([call], arguments, 20 if way == "baseline" else 60, before=at_pace)
            settle()
            tight = time_calls(call, arguments, 20 if way == "baseline" else 1000)
            if block:  # the first warms up
                took[f"paced {way}"] += paced[0]
                took[f"tight {way}"] += tight
    settle()
    for history in histories.values():
        history.close()
    return {name: summary(one) for name, one in took.items()}


def count_frames(rank: int, directory: str, sync_every: int, steps: int) -> dict[str, float]:
    """Count the frames that this rank sends a step, by kind, once everybody has met."""
    import torch.distributed as dist

    from everyrank import History
    from everyrank.ranks.wire import Channel

    counts: Counter[str] = Counter()
    frame = Channel._frame

    def counted(channel: Channel, kind: Any, *parts: Any) -> None:
        counts[kind.name] += 1
        frame(channel, kind, *parts)

    Channel._frame = counted  # type: ignore[method-assign]
    history = History(outdir=directory, sync_every=sync_every)
    arguments = metrics(METRICS)
    for step in range(sync_every):
        history.update(arguments[step % 64])
    history.flush()
    dist.barrier()
    counts.clear()
    for step in range(steps):
        time.sleep(_PACE)
        dist.barrier()
        history.update(arguments[step % 64])
    deadline = time.monotonic() + 60.0
    while history.health()["unfinished_rows"] and time.monotonic() < deadline:
        time.sleep(0.005)  # no flush, which would be a frame of its own
    time.sleep(0.05)
    seen = dict(counts)
    dist.barrier()
    history.close()
    return {kind: count / steps for kind, count in seen.items()}


def one_process(blocks: int) -> dict[str, dict[str, float]]:
    """Time a History of one process on a machine of its own."""
    from everyrank import History

    arguments = metrics(METRICS)
    figures = {}
    for n in _WINDOWS:
        history = History(outdir=scratch() / f"run-{n}", sync_every=n)
        took: dict[str, list[int]] = {"paced": [], "tight": []}
        for block in range(blocks + 1):
            history.flush()
            paced = time_paced([history.update], arguments, 60, before=lambda: time.sleep(_PACE))
            history.flush()
            tight = time_calls(history.update, arguments, 1000)
            if block:
                took["paced"] += paced[0]
                took["tight"] += tight
        history.close()
        figures.update({f"{pace} alone {n}": summary(one) for pace, one in took.items()})
    return figures


def grouped(blocks: int) -> list[dict[str, dict[str, float]]]:
    """Time all ways in a group of processes; the figures of each rank."""
    from everyrank.testing import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(on_rank, WORLD, directory, blocks, timeout=240.0)


def framed(steps: int) -> dict[str, list[dict[str, float]]]:
    """Count frames in a group of processes; by size of window, of each rank."""
    from everyrank.testing import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        return {
            str(n): run_ranks(
                count_frames, WORLD, str(Path(directory) / f"run-{n}"), n, steps, timeout=120.0
            )
            for n in _WINDOWS
        }


def run(*, quick: bool) -> list[Table]:
    """Time groups and one process in turns, then count frames."""
    cost = Table(
        f"update with {METRICS} floats, statistics over {WORLD} ranks (gloo, {_cores()} cores)",
        ("pace", "who", "x one process", "x group's local", "x under baseline", "p50 us", "p99 us"),
        notes=[
            "p50 and p99: the median over ranks, then over rounds (a round is a group of processes).",
            "x one process: the machine to itself; x group's local: no statistics, the same load.",
        ],
    )
    if not installed("torch"):
        cost.add("torch is not installed")
        return [cost]
    groups, alone = [], []
    for _ in range(1 if quick else 3):
        alone.append(fresh("ranks", "one_process", blocks=3 if quick else 8))
        groups.append(fresh("ranks", "grouped", blocks=2 if quick else 6, timeout=300.0))
    failed = [one for one in (*groups, *alone) if isinstance(one, Missing)]
    if failed:
        cost.add("all", failed[0].why)
    else:
        _add_costs(cost, groups, alone)
    return [cost, _frames(200 if quick else 500)]


def _add_costs(table: Table, groups: list[Any], alone: list[Any]) -> None:
    def of(way: str, figure: str = "p50") -> list[float]:
        if "alone" in way:
            return [one[way][figure] for one in alone]
        return [float(np.median([rank[way][figure] for rank in group])) for group in groups]

    for pace in ("paced", "tight"):
        baseline = f"{pace} baseline"
        for n in _WINDOWS:
            ours = f"{pace} group {n}"
            one = ratio(of(ours), of(f"{pace} alone {n}"))
            under = ratio(of(baseline), of(ours))
            table.add(
                pace,
                f"everyrank, {WORLD} ranks, sync_every={n}",
                one,
                ratio(of(ours), of(f"{pace} local {n}")),
                under,
                Spread.of(of(ours)),
                Spread.of(of(ours, "p99")),
                must="<= 1.5x one, >= 300x under",
                reached=one.median <= 1.5 and under.median >= 300,
            )
            for how, label in (("local", "no statistics, in the group"), ("alone", "one process")):
                way = f"{pace} {how} {n}"
                p50, p99 = Spread.of(of(way)), Spread.of(of(way, "p99"))
                table.add(pace, f"everyrank, {label}, sync_every={n}", "", "", "", p50, p99)
        p50, p99 = Spread.of(of(baseline)), Spread.of(of(baseline, "p99"))
        table.add(pace, "four blocking all-reduces, read", "", "", 1, p50, p99)


def _frames(steps: int) -> Table:
    table = Table(
        f"frames sent a rank and step, {WORLD} ranks, {steps} steps of 2 ms",
        ("who", "sync_every", "frames a step", "x 1 / sync_every", "of which"),
        notes=[
            "By hand it is 4 collectives a step. Frames of meeting and parting are left out. "
            f"The first rank answers each of the {WORLD - 1} others.",
        ],
    )
    found = fresh("ranks", "framed", steps=steps, timeout=300.0)
    if isinstance(found, Missing):
        table.add("all", found.why)
        return table
    for n, ranks in found.items():
        totals = [sum(kinds.values()) for kinds in ranks]
        for who, frames, kinds in (
            ("the first rank", totals[0], ranks[0]),
            ("each other rank, at most", max(totals[1:]), ranks[int(np.argmax(totals[1:])) + 1]),
            ("a rank, on average", float(np.mean(totals)), {}),
        ):
            table.add(
                who,
                n,
                f"{frames:.3f}",
                f"{frames * int(n):.2f}",
                ", ".join(f"{kind} {count:.3f}" for kind, count in sorted(kinds.items())),
                must=f"<= 3 / {n}",
                reached=frames <= 3 / int(n) + 1e-9,
            )
    return table


def _cores() -> int:
    import os

    return os.cpu_count() or 1
