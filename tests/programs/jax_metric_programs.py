"""What the tests of pure metrics run in processes of their own: 8 devices, 64 bits, several ranks."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_programs import Compiled, a_mesh, spread
from metric_programs import part

import everyrank.jax.metrics as pure_metrics
from everyrank import History
from everyrank.jax.metrics import pure

P = jax.sharding.PartitionSpec

#: Metrics whose samples are texts, which no program can be compiled of.
TEXTS = ("WordErrorRate", "CharacterErrorRate")


def arrays(data):
    return tuple(each if isinstance(each, list) else jnp.asarray(each) for each in data)


def many():
    return pure_metrics.Collection(
        loss=pure_metrics.Mean(),
        high=pure_metrics.Max(),
        low=pure_metrics.Min(),
        sd=pure_metrics.Std(),
        n=pure_metrics.Count(),
        last=pure_metrics.Last(),
        running=pure_metrics.Running(pure_metrics.Sum(), 2),
        fading=pure_metrics.Ema(pure_metrics.Mean(), 0.5),
    )


def on_each_device(values):
    """Update on every device by itself, and bring the states together."""
    metrics = many()

    def each(x):
        return metrics.reduce(metrics.update(metrics.init(), x), "batch")

    mapped = jax.shard_map(each, mesh=a_mesh(), in_specs=P("batch"), out_specs=P())
    program = jax.jit(mapped).lower(values).compile()
    lines = program.as_text().splitlines()
    reduces = sum(" all-reduce(" in line or " all-reduce-start(" in line for line in lines)
    others = sum(" all-gather(" in line or " all-to-all(" in line for line in lines)
    return metrics.read(program(values)), reduces, others


def on_two_axes(values):
    """Do the same over two axes of a mesh at once."""
    metrics = many()
    mesh = a_mesh((4, 2), ("a", "b"))

    def each(x):
        return metrics.reduce(metrics.update(metrics.init(), x), ("a", "b"))

    mapped = jax.shard_map(each, mesh=mesh, in_specs=P(("a", "b")), out_specs=P())
    return metrics.read(jax.jit(mapped)(values))


def under_pmap(values):
    metrics = many()

    def each(x):
        return metrics.reduce(metrics.update(metrics.init(), x))

    states = jax.pmap(each, axis_name="batch")(jnp.reshape(values, (8, -1)))
    return metrics.read(jax.tree.map(lambda x: x[3], states))


def over_a_mesh(values):
    """Update with sharded arrays in a jitted step: no reduce is called for."""
    metrics = many()
    step = jax.jit(metrics.update, donate_argnums=0)
    state = metrics.init()
    for _ in range(2):
        state = step(state, spread(values))
    return metrics.read(state)


def large_states(classes):
    """Bring together states for which a place of every device would be too large."""
    metric = pure_metrics.Collection(
        matrix=pure_metrics.ConfusionMatrix(classes=classes), high=pure_metrics.Max()
    )

    def each(x):
        state = metric.update(metric.init(), {"matrix": (x, x), "high": x.astype(jnp.float32)})
        return metric.reduce(state, "batch")

    mapped = jax.shard_map(each, mesh=a_mesh(), in_specs=P("batch"), out_specs=P())
    values = jnp.arange(64) % classes
    found = metric.read(jax.jit(mapped)(values))
    return np.diag(np.array(found["matrix"])).tolist()[: 2 * classes], found["high"]


def over_an_explicit_mesh(jitted):
    """Update with arrays whose types say how they are cut."""
    metrics: dict[str, Any] = {
        "matrix": (pure_metrics.ConfusionMatrix(classes=3), 2),
        "f1": (pure_metrics.F1(classes=3), 2),
        "last": (pure_metrics.Last(), 1),
        "median": (pure_metrics.Quantile(), 1),
        "recent": (pure_metrics.Running(pure_metrics.Sum(), 2), 1),
    }
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    labels = jax.device_put(jnp.arange(16) % 3, jax.NamedSharding(mesh, P("batch")))
    found = {}
    for name, (metric, n) in metrics.items():
        update = jax.jit(metric.update) if jitted else metric.update
        with jax.set_mesh(mesh):
            inside = metric.read(update(metric.init(), *[labels] * n))
        outside = metric.read(update(metric.init(), *[labels] * n))
        found[name] = np.asarray(inside).tolist(), np.asarray(outside).tolist()
    return found


def accumulated(values):
    """Merge what is new on all devices to a state that each of them has, step by step."""
    metrics = many()

    def step(state, x):
        return metrics.merge(state, metrics.reduce(metrics.update(metrics.init(), x), "batch"))

    specs = (P(), P("batch"))
    mapped = jax.jit(jax.shard_map(step, mesh=a_mesh(), in_specs=specs, out_specs=P()))
    state = metrics.init()
    for _ in range(2):
        state = mapped(state, values)
    return metrics.read(state)


def scanned_on_each_device(values):
    """Carry a state through a scan on every device."""
    metrics = many()

    def each(x):
        state = jax.lax.pcast(metrics.init(), "batch", to="varying")
        state, _ = jax.lax.scan(lambda s, v: (metrics.update(s, v), None), state, x)
        return metrics.reduce(state, "batch")

    mapped = jax.shard_map(each, mesh=a_mesh(), in_specs=P("batch"), out_specs=P())
    return metrics.read(jax.jit(mapped)(values))


def on_other_devices():
    """Say what becomes of a state whose arrays lie on different devices."""
    from everyrank.errors import MetricError

    metrics = many()
    state = jax.device_put(metrics.update(metrics.init(), jnp.ones(3)), jax.devices()[0])
    state["sum"] = jax.device_put(state["sum"], jax.devices()[1])
    try:
        metrics.at(state).hand_over("m")
    except MetricError as error:
        return str(error)
    return ""


def with_64_bits(names, seed):
    """Give every metric of the catalogue over batches, in float64."""
    from all_cases import CASES

    with jax.enable_x64(True):
        values = {}
        for name in names:
            data = CASES[name].data(np.random.default_rng(seed), 60)
            metric = pure(CASES[name].make())
            states = [metric.init(), metric.init()]
            for i, at in enumerate(np.split(np.arange(60), 3)):  # of one shape: compiled once
                states[i > 1] = metric.update(states[i > 1], *arrays(part(data, at)))
            values[name] = metric.read(metric.merge(*states))
        return values


def compiled_once():
    """Count compilations of a step while values change."""
    metrics = many()
    step = jax.jit(metrics.update)
    state = step(metrics.init(), jnp.arange(3.0))
    state = step(state, np.zeros(3, np.float32))
    with Compiled() as seen:
        for i in range(5):
            state = step(state, np.full(3, i, np.float32))
    return seen.count


# ------------------------------------------------------------------------------- processes


def in_history(rank, directory, n):
    """Record arrays and metrics of several processes of jax.distributed."""
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", n, rank)
    history = History(outdir=directory, sync_every=2)
    metrics = many()
    step = jax.jit(metrics.update)
    square = jax.jit(lambda x: x * x)
    state = metrics.init()
    for i in range(4):
        for value in range(rank + 1):
            state = step(state, jnp.float32(10 * rank + value + i))
        row: dict[str, Any] = {"loss": square(jnp.float32(rank + i)), "m": metrics.at(state)}
        if rank == n - 1:
            row["only"] = jnp.arange(3)[rank % 3]
        history.update(row)
        state = metrics.init()
    history.flush()
    found = dict(history.latest.values), {k: list(history[k]) for k in ("loss/mean", "m/loss")}
    history.close()
    jax.distributed.shutdown()
    return found


def same_numbers(rank, directory, framework):
    """Record the same numbers as tensors or as arrays, for statistics that compare to the bit."""
    numbers = np.random.default_rng(rank).normal(size=(20, 4)).astype(np.float32)
    if framework == "torch":
        import torch

        convert: Any = torch.tensor
    else:
        convert = jnp.asarray
    with History(outdir=directory, stats=("mean", "max", "min", "std", "p50")) as history:
        for row in numbers:
            history.update({f"m{i}": convert(x) for i, x in enumerate(row)})
        history.flush()
        return {name: np.array(v).tobytes() for name, v in history.history.items()}


def disagreeing_processes(rank, directory):
    """Log other keys, other steps, fewer of them; one rank leaves early."""
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 3, rank)
    with History(outdir=directory, timeout=20.0) as history:
        for i in range(6 - 3 * (rank == 1)):
            key = "a" if rank != 2 else "b"
            history.update({key: jnp.float32(rank + i), "both": jnp.float32(i)}, step=i)
        history.flush()
        found = {name: list(history[name]) for name in ("both/mean", "a/mean", "b/mean")}
    jax.distributed.shutdown()
    return found


def a_silent_process(rank, directory):
    """Have one of three processes fall silent, until the others have given up on it."""
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 3, rank)
    waited = pathlib.Path(directory) / f"waited-{rank}"
    with History(outdir=f"{directory}/run", timeout=2.0) as history:
        for i in range(1 if rank == 1 else 4):
            history.update({"x": jnp.float32(rank + i)}, step=i)
        if rank == 1:
            while len(list(waited.parent.glob("waited-*"))) < 2:
                time.sleep(0.01)
        else:
            history.flush()
            waited.touch()
        found = list(history["x/mean"])
    jax.distributed.shutdown()
    return found


def dispatch_order(rank):
    """Name the threads that dispatch a program while a History works in the background."""
    import tempfile
    import threading

    from jax._src import pjit
    from jax._src.interpreters import pxla

    pjit._get_fastpath_data = lambda *_: None  # or calls that are known would pass this by
    threads: list[str] = []
    call = pxla.ExecuteReplicated.__call__

    def seen(self, *args):
        threads.append(threading.current_thread().name)
        return call(self, *args)

    with tempfile.TemporaryDirectory() as directory:
        history = History(outdir=directory, sync_every=2)
        metric = pure_metrics.Mean()
        pxla.ExecuteReplicated.__call__ = seen
        try:
            for i in range(10):
                value = jnp.float32(i) + 1
                history.update({"x": value, "m": metric.at(metric.update(metric.init(), value))})
            history.flush()
            list(history["x"])
        finally:
            pxla.ExecuteReplicated.__call__ = call
        history.close()
    return threads


def never_waits():
    """Update with a value that is still being computed, and say whether it was when this returned."""
    import tempfile

    x = jnp.ones((700, 700))
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 300, lambda i, y: (y @ x) / 700.0, x)[0, 0])
    slow(x).block_until_ready()
    with tempfile.TemporaryDirectory() as directory, History(outdir=directory) as history:
        history.update({"warm": slow(x), "up": jnp.float32(1)})
        history.flush()
        value = slow(x)
        before = value.is_ready()
        history.update({"warm": value, "up": jnp.float32(1)})
        return before, value.is_ready(), len(history["warm"])
