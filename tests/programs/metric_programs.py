"""What ranks do in the tests of metrics."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from everyrank import History
from everyrank.errors import EveryrankError, SyncFailed
from everyrank.metrics import (
    Collection,
    DeclaredMetric,
    Ema,
    Last,
    Max,
    Mean,
    Metric,
    Min,
    Running,
    State,
    Std,
    Sum,
    WeightedMeanMetric,
)

# ------------------------------------------------------------------------------- by hand


class MaxMetric(Metric):
    """A metric with its own collective, as somebody would write it who declares nothing."""

    def __init__(self):
        self._max_val = torch.tensor(float("-inf"))
        self._handle = None

    def update(self, value):
        self._max_val = torch.max(self._max_val, value)

    def trigger_sync(self, context=None):
        self._handle = dist.all_reduce(self._max_val, op=dist.ReduceOp.MAX, async_op=True)

    def wait_sync(self, context=None):
        self._handle.wait()
        self._handle = None

    def compute(self):
        return self._max_val

    def reset(self):
        self._max_val.fill_(float("-inf"))
        self._handle = None

    def state_dict(self):
        return {"max_val": self._max_val}

    def load_state_dict(self, state_dict):
        self._max_val = state_dict["max_val"]


def by_hand(rank):
    """Run it alone, and in a collection next to ours."""
    alone = MaxMetric()
    alone.update(torch.tensor(float(rank)))
    alone.sync()
    both = Collection(hand=MaxMetric(), ours=Max())
    both.update({"hand": torch.tensor(float(rank)), "ours": torch.tensor(float(rank))})
    both.trigger_sync()
    both.wait_sync()
    values = both.read()
    state = copy.deepcopy(both.state_dict())  # its own one is the very tensor that a reset fills
    both.reset()
    both.load_state_dict(state)
    return alone.compute().item(), values, both.read(), both["hand"].compute().item()


# ------------------------------------------------------------------------------- lifecycle


def weighted_mean_by_hand(rank):
    """Go through the cycle as its users write it."""
    metric = WeightedMeanMetric()
    for step in range(3):
        loss = torch.tensor(float(rank + step), requires_grad=True)
        metric.update(values=loss, weights=torch.tensor(rank + 1))
    local = metric.compute().item()
    metric.trigger_sync(None)
    metric.wait_sync(None)
    value = metric.compute().item()
    metric.reset()
    return local, value, metric.compute().isnan().item()


def cycle(rank):
    """Give what is shown at each point of a cycle in which everything happens."""
    metrics = Collection(
        total=Sum(), mean=Mean(), high=Max(), low=Min(), std=Std(), last=Last(),
        running=Running(Sum(), 2), fading=Ema(Mean(), 0.5),
    )  # fmt: skip
    shown = []

    def update(value):
        metrics.update({name: torch.tensor(float(value)) for name in metrics})

    def show():
        shown.append(metrics.read())

    update(rank + 1)
    show()  # local
    metrics.trigger_sync()
    update(100)
    show()  # of all ranks, without the hundreds
    metrics.wait_sync()
    show()
    metrics.sync()
    show()  # with them, once
    metrics.reset()
    show()
    if rank == 0:
        update(7)  # ranks without an update are fine
    metrics.sync()
    metrics.sync()
    show()
    metrics.trigger_sync()
    metrics.reset()
    update(5)
    metrics.wait_sync()
    metrics.sync()
    show()
    return shown


def extremes_with_nan(rank):
    """Give extremes where one rank has a NaN, and where one has nothing."""
    metrics = Collection(high=Max(), low=Min(), other=Max())
    if rank == 1:
        metrics.update({"high": torch.tensor(float("nan")), "low": float("nan"), "other": 1.0})
    elif rank == 0:
        metrics.update({"high": torch.tensor(3.0), "low": -3.0, "other": 4.0})
    metrics.sync()
    return metrics.read()


def far_from_zero(rank, parts):
    """Give the spread of numbers that differ in their last digits."""
    metric = Std()
    metric.update(parts[rank])
    metric.sync()
    return metric.compute().item()


def collectives(rank, n):
    """Count what a sync of many metrics sends, as the profiler sees it."""
    metrics = Collection({f"mean {i}": Mean() for i in range(n)})
    mixed = Collection(mean=Mean(), high=Max(), low=Min(), std=Std(), last=Last(), sum=Sum())
    found = []
    for collection in (metrics, mixed):
        collection.update({name: torch.tensor(1.0) for name in collection})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            collection.update({name: torch.tensor(1.0) for name in collection})
            collection.trigger_sync()
            collection.update({name: torch.tensor(1.0) for name in collection})
            collection.wait_sync()
            collection.compute()
            collection.reset()
        counts: Counter[str] = Counter()
        for event in seen.key_averages():
            if event.key.startswith("c10d::"):
                counts[event.key] += event.count
        found.append(dict(counts))
    return found


def broken(rank):
    """Sync on a group that is broken, and go on with what this rank has."""
    group = dist.new_group([0, 1])
    metric = Mean()
    metric.update(float(rank))
    metric.sync(group)
    dist.barrier()
    other = Sum()
    other.update(float(rank))
    if rank == 1:
        return None  # it leaves without a word: the collective of the other fails
    other.trigger_sync(group)
    other.update(10.0)
    try:
        other.wait_sync(group)
    except SyncFailed as error:
        return str(error), other.compute().item(), isinstance(error, EveryrankError)
    return "no error"


# ------------------------------------------------------------------------------- groups


def groups(rank):
    """Reduce over parts of four ranks, in every form in which these can be said."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    found: dict[str, Any] = {}
    contexts = {
        "all": None,
        "group": pair,
        "dp": mesh["dp"],
        "tp": (mesh, "tp"),
        "dp and tp": mesh,
        "dp, tp": (mesh, ("dp", "tp")),
    }
    for name, context in contexts.items():
        metrics = Collection(sum=Sum(), high=Max(), std=Std())
        metrics.update({each: torch.tensor(float(10**rank)) for each in metrics})
        metrics.sync(context)
        found[name] = metrics.read()
    try:
        Sum().trigger_sync("dp")
    except EveryrankError as error:
        found["message"] = str(error)
    return found


# ------------------------------------------------------------------------------- laws


def part(data, at):
    """Take some of the samples of each argument."""
    return tuple([each[i] for i in at] if isinstance(each, list) else each[at] for each in data)


def law(rank, names, seed):
    """Take in a random part of everything in random batches, and give the values over all ranks."""
    from all_cases import CASES

    world = dist.get_world_size()
    values = {}
    for name in names:
        case = CASES[name]
        rng = np.random.default_rng(seed)
        data = case.data(rng, 60)
        cuts = np.sort(rng.integers(0, 61, world - 1)).tolist()
        mine = np.arange(60)[slice(*[0, *cuts, 60][rank : rank + 2])]
        metric = case.make()
        for batch in np.split(mine, np.sort(rng.integers(0, len(mine) + 1, 3))):
            metric.update(*part(data, batch))
        metric.sync()
        values[name] = metric.compute()
    return values


# ------------------------------------------------------------------------------- checkpoints


class Spread(DeclaredMetric):
    """A metric of one's own."""

    high = State("max")
    low = State("min")

    def batch(self, values):
        return {"high": values.max(), "low": values.min()}

    def finish(self, high, low):
        return high - low


def make():
    return Collection(mean=Mean(), high=Max(), std=Std(), last=Last(), spread=Spread())


def fill(metrics, rank):
    values = torch.tensor([float(rank), 3.0 * rank + 1.0])
    metrics.update(dict.fromkeys(metrics, values))


def save(rank, directory, synced):
    """Save metrics that differ on every rank; some of it was brought together before."""
    import torch.distributed.checkpoint as dcp

    metrics, alone = make(), Sum()
    fill(metrics, rank)
    alone.update(2.0**rank)
    if synced:
        metrics.sync()
        alone.sync()
        fill(metrics, rank + 10)
        alone.update(100.0)
    dcp.save({"metrics": metrics, "alone": alone, "step": rank * 0}, checkpoint_id=directory)
    metrics.sync()
    alone.sync()
    return metrics.read(), alone.compute().item()


def load(rank, directory):
    """Load them, look, and bring them together."""
    import torch.distributed.checkpoint as dcp

    metrics, alone = make(), Sum()
    alone.update(12345.0)  # is replaced
    dcp.load({"metrics": metrics, "alone": alone}, checkpoint_id=directory)
    local = alone.compute().item()
    metrics.sync()
    alone.sync()
    return metrics.read(), alone.compute().item(), local


def load_other_metrics(rank, directory):
    """Load into a collection that has one metric more and one less."""
    import torch.distributed.checkpoint as dcp

    metrics = Collection(new=Mean(), mean=Mean(), high=Max(), std=Std(), last=Last())
    dcp.load({"metrics": metrics}, checkpoint_id=directory)
    metrics.sync()
    return metrics.read()


def save_async(rank, directory):
    """Save in the background while training goes on."""
    import torch.distributed.checkpoint as dcp

    group = dist.new_group(backend="gloo")
    alone = Sum()
    alone.update(2.0**rank)
    future = dcp.async_save({"alone": alone}, checkpoint_id=directory, process_group=group)
    alone.update(1000.0)
    future.result()


def torch_save_on_one(rank, path):
    """Save on one rank, while the other never does."""
    if rank == 1:
        torch.save(Mean().state_dict(), path)
    dist.barrier()


# ------------------------------------------------------------------------------- History


def in_history(rank, directory):
    """Hand over metrics of which ranks have different ones, more or fewer updates, or none."""
    history = History(outdir=directory)
    train = Collection(loss=Mean(), high=Max(), sd=Std())
    weighted, running = WeightedMeanMetric(), Running(Mean(), 2)
    for step in range(3):
        for i in range(rank + 1):
            train.update({name: torch.tensor(float(10 * rank + i + step)) for name in train})
            weighted.update(float(rank), i + 1)
        running.update(float(step))
        row: dict[str, Any] = {"train": train, "weighted": weighted, "running": running}
        if rank == 1:
            row["spread"] = Spread()
            row["spread"].update(torch.tensor([1.0, 5.0]))
        row["plain"] = float(rank)
        summary = history.update(row)
        if step == 2:
            text = str(summary)
    history.flush()
    record = history.latest
    with history:
        pass
    return text, dict(record.values), {k: list(history[k]) for k in ("train/loss", "spread")}


def collectives_in_history(rank, directory):
    """Count what metrics in a History send over the program's own groups."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        with History(outdir=directory) as history:
            metric = Mean()
            for step in range(5):
                metric.update(float(step + rank))
                history.update({"loss": metric})
        values = list(history["loss"])
    return values, [e.key for e in seen.key_averages() if e.key.startswith("c10d::")]


def disagreeing_metrics(rank, directory):
    """Hand over metrics that have nothing but the name in common."""
    with History(outdir=directory) as history:
        metric = Mean() if rank == 0 else Max()
        metric.update(float(rank + 1))
        history.update({"loss": metric})
        history.flush()
        return dict(history.latest.values)


def metric_on_the_last_rank(rank, directory):
    """Hand over metrics on the last rank only, while the first, which writes, logs something else."""
    from everyrank.metrics import Quantile

    with History(outdir=directory) as history:
        row: dict[str, Any] = {"x": float(rank)}
        if rank == 1:
            loss, quantile = Mean(), Quantile(q=[0.25, 0.75])
            loss.update(2.0)
            quantile.update([1.0, 1.0])
            row |= {"loss": loss, "q": quantile}
        history.update(row)
        history.flush()
        record = history.latest.values
        values = {name: record.get(name) for name in ("loss", "loss/ranks")}
        return values, np.round(record["q"], 1).tolist(), history.health()["late_rows"]


def metric_and_number(rank, directory):
    """Hand over a metric on one rank, and a number by the same name on the other."""
    with History(outdir=directory) as history:
        for _ in range(2):
            metric = Mean()
            metric.update(2.0)
            history.update({"loss": metric if rank == 0 else 5.0, "x": float(rank)})
        history.flush()
        return {name: list(history[name]) for name in ("x/mean", "loss/ranks")}


def a_look_in_flight(rank):
    """Look on one rank only, while a sync over a mesh of two dimensions is under way."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    metric = Sum()
    metric.update(10.0**rank)
    part = mesh["dp", "tp"]
    metric.trigger_sync(part)
    if rank == 0:
        metric.compute()
    grad = torch.tensor(1.0)
    dist.all_reduce(grad, group=mesh["tp"].get_group())
    metric.wait_sync(part)
    return metric.compute().item(), grad.item()


def outside_of_the_group(rank):
    """Sync with a group that this rank is not in."""
    group = dist.new_group([0])
    metric = Sum()
    metric.update(1.0)
    metric.sync(group)
    return metric.compute().item()
