"""What reducing 50 sharded JAX metrics costs, beside reducing them leaf by leaf.

Called: `everyrank.jax.reduce_mean(metrics)` outside of jit, with 50 float32 arrays of 64 elements that
are cut over 8 simulated CPU devices, until all 50 results are there. Blocks of calls take turns with

* `jnp.mean` of each array, waited for one by one: not waited for, more than some 35 end the process,
* `jax.jit` of `jnp.mean` over the whole tree, where it is XLA that puts the all-reduces together,
* and, as floors, compiled programs that take the same arrays and give one vector of 50 means, or
  these one by one. Results lie on all devices, as those of `jnp.mean` do, and JAX needs 8 to 10 us to
  hand over each of them, whatever was computed.

Must reach: leaf by leaf takes at least 20 times as long; one all-reduce in the compiled program;
nothing compiled when values change.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness import (
    Missing,
    Spread,
    Table,
    fresh,
    installed,
    ratio,
    summary,
    time_calls,
)

_METRICS, _ELEMENTS, _DEVICES = 50, 64, 8
_BLOCK = 25


def measure(blocks: int) -> dict[str, Any]:
    """Time and count in this process, which must not have used JAX before."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    steps = [_sharded(seed) for seed in range(4)]
    calls = _contestants(steps[0])
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name, call in calls.items():
            some = time_calls(
                lambda step, call=call: jax.block_until_ready(call(step)), steps, _BLOCK
            )
            took[name] += some if block else []  # the first warms up, and compiles
    return {**{name: summary(one) for name, one in took.items()}, **_count(steps)}


def _sharded(seed: int) -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    sharding = NamedSharding(mesh, PartitionSpec("batch"))
    random = np.random.default_rng(seed)
    values = random.random((_METRICS, _ELEMENTS), np.float32)
    return {f"metric_{i}": jax.device_put(row, sharding) for i, row in enumerate(values)}


def _contestants(metrics: dict[str, Any]) -> dict[str, Callable[[Any], object]]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from everyrank.jax import reduce_mean

    def one_vector(*pieces: Any) -> Any:
        sums = jnp.stack([piece.sum() for piece in pieces])
        return jax.lax.psum(sums, "batch") / _ELEMENTS

    sharding = next(iter(metrics.values())).sharding
    options = {"mesh": sharding.mesh, "in_specs": sharding.spec, "out_specs": PartitionSpec()}
    vector = jax.shard_map(one_vector, **options)
    floor = jax.jit(vector)
    one_by_one = jax.jit(lambda *arrays: tuple(vector(*arrays)))
    whole = jax.jit(lambda step: jax.tree.map(jnp.mean, step))
    return {
        "floor": lambda step: floor(*step.values()),
        "results": lambda step: one_by_one(*step.values()),
        "everyrank": reduce_mean,
        "jit": whole,
        "leaves": lambda step: {k: jnp.mean(x).block_until_ready() for k, x in step.items()},
    }


def _count(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Count the all-reduces of the program, and what other values have JAX compile."""
    import jax

    from everyrank.jax import reduce_mean
    from everyrank.jax.programs import packed

    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _seconds, **_: compiled.append(event) if "compile" in event else None
    )
    for step in steps:
        jax.block_until_ready(reduce_mean({**step, "step": id(step), "phase": str(id(step))}))
    count = len(compiled)
    arrays = list(steps[0].values())
    program = packed(("mean",) * len(arrays), tuple(x.sharding for x in arrays))
    text = program.lower([(x,) for x in arrays]).compile().as_text()
    return {"all_reduces": text.count(" all-reduce("), "compiled": count}


def run(*, quick: bool) -> list[Table]:
    """Give each round a fresh process."""
    table = Table(
        f"reduce_mean of {_METRICS} arrays on {_DEVICES} simulated devices",
        ("who", "leaf by leaf takes x", "p50 us", "p99 us", "counted"),
    )
    if not installed("jax"):
        table.add("jax is not installed")
        return [table]
    rounds = [
        fresh("jax_reduce", "measure", blocks=4 if quick else 8) for _ in range(1 if quick else 5)
    ]
    failed = [one for one in rounds if isinstance(one, Missing)]
    if failed:
        table.add("everyrank", failed[0].why)
    else:
        _add(table, rounds)
    return [table]


def _add(table: Table, rounds: list[dict[str, Any]]) -> None:
    labels = {
        "floor": "floor: one program, one vector",
        "results": "floor: one program, 50 results",
        "everyrank": "everyrank",
        "jit": "jax.jit of jnp.mean over the tree",
        "leaves": "jnp.mean leaf by leaf",
    }
    leaves = [one["leaves"]["p50"] for one in rounds]
    for name, label in labels.items():
        p50 = [one[name]["p50"] for one in rounds]
        times = ratio(leaves, p50)
        p99 = Spread.of(one[name]["p99"] for one in rounds)
        goal = {"must": ">= 20x", "reached": times.median >= 20} if name == "everyrank" else {}
        table.add(label, times, Spread.of(p50), p99, **goal)
    all_reduces = max(one["all_reduces"] for one in rounds)
    compiled = max(one["compiled"] for one in rounds)
    table.add(
        "everyrank: all-reduces in the program",
        *("", "", "", all_reduces),
        must="1",
        reached=all_reduces == 1,
    )
    table.add(
        "everyrank: compiled for other values",
        *("", "", "", compiled),
        must="0",
        reached=compiled == 0,
    )
