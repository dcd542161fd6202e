"""What 20 metrics cost to bring together and to update, and a confusion matrix, beside their floors.

Together, in groups of 2 and of 4 processes (gloo, `everyrank.testing.run_ranks`, one thread each):
`sync()` and `compute()` or `read()` of a `Collection` of 20 `Mean`, one bare `dist.all_reduce` of the
same 40 float64, the same by hand with the division and the read, `compute()` of a `MetricCollection`
of 20 `MeanMetric` (torchmetrics, without compute groups), and `sync_and_compute_collection` of 20
`Mean` (torcheval), both with `float()` of every value. Everybody takes turns. Before each call there
are an untimed reset, an untimed update with other values, and an untimed barrier; after it the values
are compared with those that they must be. `trigger_sync()` alone, which is what the training thread
pays when it waits later, is timed beside launching the bare all-reduce with `async_op=True`.

Update: `Collection.update` with 20 0-d float32 tensors of the CPU, for 20 `Mean` and for four each of
`Mean`, `Max`, `Min`, `Sum` and `Count`; one `torch._foreach_add_` of the same tensors onto 20 of
float32, which keeps sums but no counts; one stack and add; and 20 updates of the libraries. A dispatch
mode counts what an update asks of torch.

Matrix: `ConfusionMatrix(classes=1000).update(predictions, targets)` with 1,000,000 random int64 of
each, a bare `torch.bincount(targets * 1000 + predictions, minlength=10**6)`, and torchmetrics', on
one thread. All of them ask for buffers of 8 MB, and whether malloc has these at hand or fetches new
pages is up to the life of the process: the same bincount takes 3 ms in one and 13 ms in another. So
there are processes where it is as it comes, and others where malloc keeps whatever was freed.

Must reach: together at most 1.5 times the bare all-reduce, at least 50 times under torchmetrics and
torcheval, at most 2 collectives; an update at most 3 times the foreach, and no `_local_scalar_dense`,
which is what reads a tensor's value; the matrix at most 1.2 times the bincount, and the size of its
state not dependent on the number of batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
)

_WORLDS = (2, 4)
_COUNT = 20
_NAMES = [f"train/metric_{i}" for i in range(_COUNT)]
_CLASSES = 1_000
_SAMPLES = 1_000_000

_COMES, _KEPT = "as it comes", "kept"  # the memory of a process that counts a matrix
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt

Rounds = list[dict[str, Any]]


# ---------------------------------------------------------------------------------- together


class Way(NamedTuple):
    """A way to bring 20 means together: what comes before the timed call, the call, and after it."""

    take: Callable[[Sequence[Any]], object]  # begin anew with one value of each
    call: Callable[[], Any]
    values: Callable[[Any], Iterable[Any]]  # of what the call gave
    every: int = 1  # takes part in every nth turn


def ours() -> dict[str, Way]:
    """Give the ways of everyrank, which share a collection."""
    from everyrank.metrics import Collection, Mean

    collection = Collection({name: Mean() for name in _NAMES})

    def take(values: Sequence[Any]) -> None:
        collection.reset()
        collection.update(dict(zip(_NAMES, values, strict=True)))

    def compute() -> dict[str, Any]:
        collection.sync()
        return collection.compute()

    def read() -> dict[str, Any]:
        collection.sync()
        return collection.read()

    def landed(_: object) -> Iterable[Any]:
        collection.wait_sync()
        return collection.compute().values()

    return {
        "compute": Way(take, compute, dict.values),
        "read": Way(take, read, dict.values),
        "trigger": Way(take, collection.trigger_sync, landed),
    }


def floors() -> dict[str, Way]:
    """Give the all-reduce of as many bytes: bare, launched only, and with all that is needed."""
    import torch
    import torch.distributed as dist

    sums = torch.ones(2 * _COUNT, dtype=torch.float64)

    def take(values: Sequence[Any]) -> None:
        sums[:_COUNT] = torch.stack(list(values))
        sums[_COUNT:] = 1.0

    def means(_: object = None) -> list[float]:
        return (sums[:_COUNT] / sums[_COUNT:]).tolist()

    def by_hand() -> list[float]:
        both = sums.clone()
        dist.all_reduce(both)
        return (both[:_COUNT] / both[_COUNT:]).tolist()

    def landed(work: Any) -> list[float]:
        work.wait()
        return means()

    return {
        "bare": Way(take, lambda: dist.all_reduce(sums), means),
        "hand": Way(take, by_hand, list),
        "launch": Way(take, lambda: dist.all_reduce(sums, async_op=True), landed),
    }


def torchmetrics_means() -> dict[str, Way]:
    from torchmetrics import MeanMetric, MetricCollection

    means: Any = {name: MeanMetric() for name in _NAMES}
    collection = MetricCollection(means, compute_groups=False)

    def take(values: Sequence[Any]) -> None:
        collection.reset()
        for name, value in zip(_NAMES, values, strict=True):
            means[name].update(value)

    def call() -> list[float]:
        found = collection.compute()  # in an order of its own
        return [float(found[name]) for name in _NAMES]

    return {"torchmetrics": Way(take, call, list, every=10)}


def torcheval_means() -> dict[str, Way]:
    from torcheval.metrics import Mean
    from torcheval.metrics.toolkit import sync_and_compute_collection

    means: Any = {name: Mean() for name in _NAMES}

    def take(values: Sequence[Any]) -> None:
        for mean, value in zip(means.values(), values, strict=True):
            mean.reset()
            mean.update(value)

    def call() -> list[float]:
        return [float(value) for value in sync_and_compute_collection(means).values()]

    return {"torcheval": Way(take, call, list, every=10)}


def on_rank(rank: int, turns: int) -> dict[str, Any]:
    """Time all ways on one rank of the group, and count the collectives of each."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    ways = floors() | ours()
    for package, more in (("torchmetrics", torchmetrics_means), ("torcheval", torcheval_means)):
        ways |= more() if installed(package) else {}
    took: dict[str, list[int]] = {name: [] for name in ways}
    random = np.random.default_rng(0)  # alike on every rank: all take the same turns
    for turn in range(-10, turns):  # the first ones warm up
        values = random.random((world, _COUNT)).astype(np.float32)
        own, expected = list(torch.from_numpy(values[rank].copy())), values.mean(0, np.float64)
        for name in random.permutation([n for n, way in ways.items() if turn % way.every == 0]):
            spent = _turn(ways[name], own, expected)
            took[name] += [spent] if turn >= 0 else []
    counts = {name: _collectives(way, own) for name, way in ways.items()}
    return {"took": {name: summary(one) for name, one in took.items()}, "collectives": counts}


def _turn(way: Way, own: Sequence[Any], expected: Any) -> int:
    """Time one call, after which the values must be right."""
    import torch.distributed as dist

    way.take(own)
    dist.barrier()
    start = time.perf_counter_ns()
    result = way.call()
    spent = time.perf_counter_ns() - start
    found = list(map(float, way.values(result)))
    assert np.allclose(found, expected, rtol=1e-6, atol=0.0), (found, expected)
    return spent


def _collectives(way: Way, own: Sequence[Any]) -> dict[str, int]:
    """Count what one call asks of torch.distributed."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    way.take(own)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        list(way.values(way.call()))
        # What a thread of gloo ends after the profiler has, takes the process with it at times.
        time.sleep(0.05)
    events = profiled.key_averages()
    return {e.key: e.count for e in events if e.key.startswith("c10d::")}


def together(world: int, turns: int) -> list[dict[str, Any]]:
    """Time and count in a group of processes; the figures of each rank."""
    from everyrank.testing import run_ranks

    return run_ranks(on_rank, world, turns, timeout=240.0)


_TOGETHER = {
    "bare": "floor: one bare all_reduce",
    "hand": "by hand: all_reduce, divided and read",
    "compute": "everyrank: sync, compute",
    "read": "everyrank: sync, read",
    "torchmetrics": "torchmetrics: compute, read",
    "torcheval": "torcheval: sync_and_compute, read",
    "launch": "floor: bare all_reduce launched, not waited for",
    "trigger": "everyrank: trigger_sync alone",
}


def _together_table(rounds: dict[int, list[Any]]) -> Table:
    table = Table(
        f"{_COUNT} means brought together (gloo, {os.cpu_count()} cores)",
        ("ranks", "who", "x bare", "x sync, read", "p50 us", "p99 us", "collectives"),
        notes=[
            "p50 and p99: the median over ranks, then over rounds (a round is a group of processes).",
            "x bare: of what is only launched, beside the all_reduce that is only launched.",
        ],
    )
    for world, groups in rounds.items():
        if failed := [one for one in groups if isinstance(one, Missing)]:
            table.add(world, "all", failed[0].why)
            continue
        for way, label in _TOGETHER.items():
            if way in groups[0][0]["took"]:
                _add_together(table, world, way, groups)
            else:
                table.add(world, label, f"{way} is not installed")
    return table


def _add_together(table: Table, world: int, way: str, groups: list[Any]) -> None:
    def of(way: str, figure: str = "p50") -> list[float]:
        return [float(np.median([r["took"][way][figure] for r in ranks])) for ranks in groups]

    bare = ratio(of(way), of("launch" if way in ("launch", "trigger") else "bare"))
    read = ratio(of(way), of("read"))
    counts = [rank["collectives"][way] for ranks in groups for rank in ranks]
    most = max(sum(count.values()) for count in counts)
    told = ", ".join(f"{key.removeprefix('c10d::')} {n}" for key, n in counts[0].items())
    must: dict[str, Any] = {}
    if way in ("compute", "read"):
        must = {
            "must": "<= 1.5x bare; <= 2 collectives",
            "reached": bare.median <= 1.5 and most <= 2,
        }
    elif way in ("torchmetrics", "torcheval"):
        must = {"must": ">= 50x sync, read", "reached": read.median >= 50}
    times = "" if way in ("launch", "trigger") else read
    p50, p99 = Spread.of(of(way)), Spread.of(of(way, "p99"))
    table.add(world, _TOGETHER[way], bare, times, p50, p99, told, **must)


# ------------------------------------------------------------------------------------ update


def update(blocks: int) -> dict[str, Any]:
    """Time and count updates in this process."""
    import torch

    torch.set_num_threads(1)
    steps = [{k: torch.tensor(v) for k, v in step.items()} for step in metrics(_COUNT)]
    calls = _updates()
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name, call in calls.items():
            some = time_calls(call, steps, 25 if name.startswith("torch") else 250)
            took[name] += some if block else []  # the first warms up
    counts = {name: _operations(call, steps[0]) for name, call in calls.items()}
    return {"took": {n: summary(one) for n, one in took.items()}, "operations": counts}


def _updates() -> dict[str, Callable[[dict[str, Any]], object]]:
    """Give all ways to take in 20 tensors."""
    import torch

    from everyrank.metrics import Collection, Count, Max, Mean, Min, Sum

    kinds = (Mean, Max, Min, Sum, Count)
    narrow = [torch.zeros(()) for _ in _NAMES]
    wide = [torch.zeros((), dtype=torch.float64) for _ in _NAMES]
    vector = torch.zeros(_COUNT, dtype=torch.float64)
    calls: dict[str, Callable[[dict[str, Any]], object]] = {
        "foreach": lambda step: torch._foreach_add_(narrow, list(step.values())),
        "foreach wide": lambda step: torch._foreach_add_(wide, list(step.values())),
        "stack": lambda step: vector.add_(torch.stack(list(step.values()))),
        "means": Collection({name: Mean() for name in _NAMES}).update,
        "mix": Collection({n: kinds[i % len(kinds)]() for i, n in enumerate(_NAMES)}).update,
    }
    if installed("torchmetrics"):
        from torchmetrics import MeanMetric

        calls["torchmetrics"] = _each({name: MeanMetric() for name in _NAMES})
        calls["torchmetrics unchecked"] = _each(
            {name: MeanMetric(nan_strategy="disable") for name in _NAMES}
        )
    if installed("torcheval"):
        from torcheval.metrics import Mean as TorchevalMean

        calls["torcheval"] = _each({name: TorchevalMean() for name in _NAMES})
    return calls


def _each(means: dict[str, Any]) -> Callable[[dict[str, Any]], object]:
    def call(step: dict[str, Any]) -> None:
        for name, value in step.items():
            means[name].update(value)

    return call


def _operations(call: Callable[[Any], object], step: Any) -> dict[str, int]:
    """Count what one update asks of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            counts[func.name().removeprefix("aten::")] += 1
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        call(step)
    return dict(counts)


def _most(operations: dict[str, int]) -> str:
    """Name the operations that are asked for most."""
    most = sorted(operations.items(), key=lambda item: -item[1])[:6]
    return ", ".join(f"{name} {n}" for name, n in most)


_UPDATES = {
    "foreach": "floor: one _foreach_add_ onto float32",
    "foreach wide": "one _foreach_add_ onto float64",
    "stack": "one stack, one add onto float64",
    "means": f"everyrank: {_COUNT} means",
    "mix": "everyrank: means, extremes, sums, counts",
    "torchmetrics": f"torchmetrics: {_COUNT} means",
    "torchmetrics unchecked": '  with nan_strategy="disable"',
    "torcheval": f"torcheval: {_COUNT} means",
}


def _update_table(rounds: list[Any]) -> Table:
    table = Table(
        f"update of {_COUNT} metrics with {_COUNT} tensors (0-d, CPU), tight loop",
        ("who", "x foreach", "x everyrank", "p50 us", "p99 us", "operations", "of which"),
        notes=["x everyrank: how many times the update of its 20 means."],
    )
    if failed := [one for one in rounds if isinstance(one, Missing)]:
        table.add("all", failed[0].why)
        return table
    for way, label in _UPDATES.items():
        if way in rounds[0]["took"]:
            _add_update(table, way, rounds)
        else:
            table.add(label, f"{way.split()[0]} is not installed")
    return table


def _add_update(table: Table, way: str, rounds: Rounds) -> None:
    def of(way: str, figure: str = "p50") -> list[float]:
        return [one["took"][way][figure] for one in rounds]

    times = ratio(of(way), of("foreach"))
    operations = rounds[-1]["operations"][way]
    reads = max(one["operations"][way].get("_local_scalar_dense", 0) for one in rounds)
    must: dict[str, Any] = {}
    if way in ("means", "mix"):
        reached = times.median <= 3 and not reads
        must = {"must": "<= 3x; reads 0", "reached": reached}
    table.add(
        _UPDATES[way],
        times,
        ratio(of(way), of("means")),
        Spread.of(of(way)),
        Spread.of(of(way, "p99")),
        sum(operations.values()),
        f"reads {reads}; {_most(operations)}",
        **must,
    )


# ------------------------------------------------------------------------------------ matrix


def matrix(turns: int, memory: str) -> dict[str, Any]:
    """Time updates of a confusion matrix in this process, and weigh its state."""
    import torch

    if memory == _KEPT:
        _keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [torch.randint(_CLASSES, (2, _SAMPLES)).unbind() for _ in range(2)]
    calls = _matrices()
    took: dict[str, list[int]] = {name: [] for name in calls}
    order = np.random.default_rng(0)
    for turn in range(-1, turns):  # the first warms up
        for name in order.permutation(list(calls)):
            some = time_calls(calls[name], batches, 2)
            took[name] += some if turn >= 0 else []
    return {
        "took": {name: summary(one) for name, one in took.items()},
        "operations": {name: _operations(call, batches[0]) for name, call in calls.items()},
        "bytes": [_state_bytes(batches[:1]), _state_bytes(batches * 5)],
    }


def _keep_memory() -> None:
    """Have malloc keep what is freed, so that large buffers are not made of new pages each time."""
    with contextlib.suppress(OSError, AttributeError):  # it is only glibc that can be told
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _matrices() -> dict[str, Callable[[Any], object]]:
    """Give all ways to count pairs."""
    import torch

    from everyrank.metrics import ConfusionMatrix

    def bare(batch: Any) -> Any:
        predictions, targets = batch
        return torch.bincount(targets * _CLASSES + predictions, minlength=_CLASSES**2)

    mine = ConfusionMatrix(classes=_CLASSES)
    calls: dict[str, Callable[[Any], object]] = {
        "bincount": bare,
        "everyrank": lambda batch: mine.update(*batch),
    }
    if installed("torchmetrics"):
        from torchmetrics.classification import MulticlassConfusionMatrix

        theirs = MulticlassConfusionMatrix(_CLASSES, validate_args=False)
        calls["torchmetrics"] = lambda batch: theirs.update(*batch)
    return calls


def _state_bytes(batches: Sequence[Any]) -> int:
    """Weigh the state after some batches, which must have been counted right."""
    import torch

    from everyrank.metrics import ConfusionMatrix

    metric = ConfusionMatrix(classes=_CLASSES)
    expected = torch.zeros(_CLASSES**2, dtype=torch.int64)
    for predictions, targets in batches:
        metric.update(predictions, targets)
        expected += torch.bincount(targets * _CLASSES + predictions, minlength=_CLASSES**2)
    assert torch.equal(metric.compute().reshape(-1).to(torch.int64), expected)
    return _bytes(metric.state_dict())


def _bytes(state: Any) -> int:
    """Add up what the tensors in a state take."""
    if isinstance(state, dict):
        return sum(map(_bytes, state.values()))
    return math.prod(state.shape) * state.itemsize if hasattr(state, "itemsize") else 0


_MATRICES = {
    "bincount": "floor: one bare bincount",
    "everyrank": "everyrank: ConfusionMatrix",
    "torchmetrics": "torchmetrics: MulticlassConfusionMatrix",
}


def _matrix_table(rounds: dict[str, list[Any]]) -> Table:
    table = Table(
        f"confusion matrix, {_CLASSES:,} classes, {_SAMPLES:,} predictions (int64, CPU)",
        ("memory", "who", "x bincount", "p50 ms", "p99 ms", "operations", "of which"),
    )
    for memory, found in rounds.items():
        if failed := [one for one in found if isinstance(one, Missing)]:
            table.add(memory, "all", failed[0].why)
            continue
        for way in _MATRICES:
            _add_matrix(table, memory, way, found)
    for found in rounds[_KEPT][-1:]:
        if not isinstance(found, Missing):
            once, often = found["bytes"]
            told = f"{once:,} bytes after 1 update, {often:,} after 10"
            table.add("", "everyrank: its state", told, must="the same", reached=once == often)
    return table


def _add_matrix(table: Table, memory: str, way: str, rounds: Rounds) -> None:
    if way not in rounds[0]["took"]:
        table.add(memory, _MATRICES[way], f"{way} is not installed")
        return
    p50 = [one["took"][way]["p50"] / 1e3 for one in rounds]
    times = ratio(p50, [one["took"]["bincount"]["p50"] / 1e3 for one in rounds])
    p99 = Spread.of(one["took"][way]["p99"] / 1e3 for one in rounds)
    operations = rounds[-1]["operations"][way]
    must: dict[str, Any] = {}
    if way == "everyrank":
        must = {"must": "<= 1.2x", "reached": times.median <= 1.2}
    table.add(
        memory,
        _MATRICES[way],
        times,
        Spread.of(p50),
        p99,
        sum(operations.values()),
        _most(operations),
        **must,
    )


# --------------------------------------------------------------------------------------- run


def run(*, quick: bool) -> list[Table]:
    """Give each question fresh processes a round, in turns."""
    if not installed("torch"):
        table = Table("metrics", ("who",))
        table.add("torch is not installed")
        return [table]
    groups: dict[int, list[Any]] = {world: [] for world in _WORLDS}
    matrices: dict[str, list[Any]] = {_COMES: [], _KEPT: []}
    updates = []
    for _ in range(1 if quick else 5):
        for world, found in groups.items():
            found.append(fresh("metrics", "together", world=world, turns=80 if quick else 120))
        updates.append(fresh("metrics", "update", blocks=4 if quick else 6))
        for memory, found in matrices.items():
            found.append(fresh("metrics", "matrix", turns=8 if quick else 15, memory=memory))
    return [_together_table(groups), _update_table(updates), _matrix_table(matrices)]
