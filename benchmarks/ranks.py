"""What 10 metrics with statistics of every step over 4 ranks cost the training thread.

Called, in one group of 4 processes (gloo, `everyrank.testing.run_ranks`) and in turns:
`History(outdir=..., sync_every=50 or 1).update(metrics)`; the same with `distributed_history=False`,
which is one process under the same load; and what is usually written by hand: four blocking
all-reduces of a tensor of the 10 values, with their reads, for mean, max, min and std. Beside it, a
group of one process, which has the machine to itself. Paced means a sleep of 2 ms and an untimed
barrier before each call, which stands for the all-reduce of the gradients; tight means one call
after the other.

Must reach: p50 at most 1.5 times that of one process, and at least 300 times under the baseline; and
at most 3 / sync_every messages a rank and step. everyrank starts no collective: its ranks send frames
over a star of sockets, so frames are what is counted, in the steady state of a paced run: rows from
a rank to the first, and reduced rows from the first to each. What a flush in the middle of a window
makes of the windows after it is shown beside.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    summary,
    time_calls,
    time_paced,
)

WORLD = 4
METRICS = 10
_PACE = 0.002
_WINDOWS = (50, 1)

#: Where frames are counted: the size of the window, and whether everybody flushes in one before.
_COUNTED = ((50, False), (1, False), (50, True))

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


def on_rank(rank: int, directory: str, blocks: int, counted_steps: int) -> dict[str, Any]:
    """Time all ways on one rank of the group, and count its frames."""
    return {
        "took": time_ways(rank, directory, blocks),
        "frames": [
            count_frames(f"{directory}/frames-{i}", n, counted_steps, flush_between=flush)
            for i, (n, flush) in enumerate(_COUNTED if counted_steps else ())
        ],
    }


def time_ways(rank: int, directory: str, blocks: int) -> dict[str, dict[str, float]]:
    """Give the figures of this rank by pace and way."""
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

    took: dict[str, list[int]] = {
        f"{pace} {way}": [] for pace in ("paced", "tight") for way in ways
    }
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


def count_frames(
    directory: str, sync_every: int, steps: int, *, flush_between: bool
) -> dict[str, float]:
    """Count the frames that this rank sends a step, by kind, once everybody has met."""
    import torch.distributed as dist

    from everyrank import History

    history = History(outdir=directory, sync_every=sync_every)
    arguments = metrics(METRICS)

    def train(steps: int) -> None:
        for step in range(steps):
            time.sleep(_PACE)
            dist.barrier()
            history.update(arguments[step % 64])

    def settle() -> None:  # without a flush, which would be frames, and windows cut short
        deadline = time.monotonic() + 60.0
        while history.health()["unfinished_rows"] >= sync_every and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        dist.barrier()

    train(sync_every)
    if flush_between:
        train(sync_every // 2)
        history.flush()  # of each rank: what it asks of the others may reach them a step later
        train(sync_every // 2)
    settle()
    with _counting() as counts:
        train(steps)
        settle()
    history.close()
    return {kind: count / steps for kind, count in counts.items()}


@contextlib.contextmanager
def _counting() -> Iterator[Counter[str]]:
    """Count the frames that leave this process, by kind."""
    from everyrank.ranks.wire import Channel

    counts: Counter[str] = Counter()
    frame = Channel._frame

    def counted(channel: Any, kind: Any, *parts: bytes) -> None:
        counts[kind.name] += 1
        frame(channel, kind, *parts)

    setattr(Channel, "_frame", counted)  # noqa: B010 - mypy minds an assignment
    yield counts
    setattr(Channel, "_frame", frame)  # noqa: B010


def grouped(world: int, blocks: int, counted_steps: int = 0) -> list[dict[str, Any]]:
    """Time and count in a group of processes; the figures of each rank."""
    from everyrank.testing import run_ranks

    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(on_rank, world, directory, blocks, counted_steps, timeout=240.0)


def run(*, quick: bool) -> list[Table]:
    """Time groups and one process in turns, then count frames."""
    cost = Table(
        f"update with {METRICS} floats, statistics over {WORLD} ranks (gloo, {os.cpu_count()} cores)",
        ("pace", "who", f"{WORLD} ranks cost", "p50 us", "p99 us"),
        notes=[
            "p50 and p99: the median over ranks, then over rounds (a round is a group of processes).",
            f"{WORLD} ranks cost: the p50 of everyrank's line above beside that of this line.",
        ],
    )
    if not installed("torch"):
        cost.add("torch is not installed")
        return [cost]
    groups: list[Any] = []
    alone: list[Any] = []
    for _ in range(1 if quick else 3):
        blocks = 2 if quick else 6
        # The figures differ between groups, the frames do not: they are counted in the first.
        counted = 0 if groups else 200 if quick else 500
        alone.append(fresh("ranks", "grouped", world=1, blocks=blocks))
        groups.append(
            fresh(
                "ranks", "grouped", world=WORLD, blocks=blocks, counted_steps=counted, timeout=300
            )
        )
    failed = [one for one in (*groups, *alone) if isinstance(one, Missing)]
    if failed:
        cost.add("all", failed[0].why)
        return [cost]
    for pace in ("paced", "tight"):
        for n in _WINDOWS:
            _add_costs(cost, pace, n, groups, alone)
    return [cost, _frames([rank["frames"] for rank in groups[0]])]


def _add_costs(table: Table, pace: str, n: int, groups: list[Any], alone: list[Any]) -> None:
    def of(rounds: list[Any], way: str, figure: str = "p50") -> list[float]:
        return [
            float(np.median([rank["took"][f"{pace} {way}"][figure] for rank in one]))
            for one in rounds
        ]

    def add(label: str, rounds: list[Any], way: str, cost: str = "", **must: Any) -> None:
        p50, p99 = (Spread.of(of(rounds, way, figure)) for figure in ("p50", "p99"))
        table.add(pace, label, cost, p50, p99, **must)

    ours = of(groups, f"group {n}")
    add(f"everyrank, {WORLD} ranks, sync_every={n}", groups, f"group {n}")
    for label, rounds, way in (
        ("its own values only, same load", groups, f"local {n}"),
        ("one process, alone", alone, f"group {n}"),
    ):
        times = ratio(ours, of(rounds, way))
        add(
            f"  {label}",
            rounds,
            way,
            f"{times}x as much",
            must="<= 1.5x",
            reached=times.median <= 1.5,
        )
    times = ratio(of(groups, "baseline"), ours)
    add(
        "  four blocking all-reduces, read",
        groups,
        "baseline",
        f"{times}x less",
        must=">= 300x less",
        reached=times.median >= 300,
    )


def _frames(ranks: list[list[dict[str, float]]]) -> Table:
    table = Table(
        f"frames sent a rank and step, {WORLD} ranks, steps of 2 ms",
        ("sync_every", "who", "frames a step", "x 1 / sync_every", "of which"),
        notes=[
            "By hand it is 4 collectives a step. Frames of meeting and parting are left out. "
            f"The first rank answers each of the {WORLD - 1} others.",
        ],
    )
    for (n, flush), found in zip(_COUNTED, zip(*ranks, strict=True), strict=True):
        _add_frames(table, n, list(found), flush_between=flush)
    return table


def _add_frames(
    table: Table, n: int, ranks: list[dict[str, float]], *, flush_between: bool
) -> None:
    totals = [sum(kinds.values()) for kinds in ranks]
    busiest = int(np.argmax(totals[1:])) + 1
    for who, frames, kinds in (
        ("the first rank", totals[0], ranks[0]),
        ("each other rank, at most", totals[busiest], ranks[busiest]),
        ("a rank, on average", float(np.mean(totals)), {}),
    ):
        must: dict[str, Any] = {"must": f"<= 3 / {n}", "reached": frames <= 3 / n + 1e-9}
        table.add(
            n,
            f"{who}{', once all have flushed between' if flush_between else ''}",
            f"{frames:.3f}",
            f"{frames * n:.2f}",
            ", ".join(f"{kind} {count:.3f}" for kind, count in sorted(kinds.items())),
            **({} if flush_between else must),
        )
