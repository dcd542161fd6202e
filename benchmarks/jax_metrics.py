"""What JAX arrays and metrics cost a training step, beside what anybody would have to do, and clu.

Called, in blocks that take turns:

* `History(outdir=..., sync_every=50).update(metrics)` with 20 scalars of JAX that are computed, beside
  20 x `copy_to_host_async()` and an append of the arrays, which is what keeping them takes. And once
  with scalars that are still being computed: are they still, when `update` has returned?
* A jitted training step of an MLP (CPU, some 30 ms), without metrics and with a `Collection` of 20
  `Mean` that is updated inside of it, until all results are there.
* Metrics of 20 numbers by themselves: `jax.jit(collection.update)`, beside `Collection.merge` of clu
  with 20 `Average`, under jit and as its users call it, outside. What JAX is asked to run is counted
  with its shortcuts switched off.

Must reach: `update` at most 3 times the floor, and back before the values are there; a step with 20
metrics at most 1.02 times the step without; at least as fast as clu under jit, and at least 5 times
fewer dispatches than outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness import (
    Missing,
    Spread,
    Table,
    fresh,
    installed,
    ratio,
    scratch,
    summary,
    time_calls,
)

_METRICS = 20


def measure_update(blocks: int) -> dict[str, Any]:
    """Time `update` and what is under it."""
    import jax
    import jax.numpy as jnp

    from everyrank import History

    names = [f"metric_{i}" for i in range(_METRICS)]
    make = jax.jit(lambda x: [x * i for i in range(_METRICS)])
    kept: list[Any] = []

    def floor(step: dict[str, Any]) -> None:
        for value in step.values():
            value.copy_to_host_async()
        kept.append(list(step.values()))

    history = History(outdir=scratch() / "run", sync_every=50)
    calls: dict[str, Callable[[Any], object]] = {"floor": floor, "everyrank": history.update}
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name, call in calls.items():
            # New arrays for each call: one that has a copy on the host needs no other.
            steps = [dict(zip(names, make(jnp.float32(i)), strict=True)) for i in range(150)]
            jax.block_until_ready(steps)
            history.flush()
            some = time_calls(call, steps, len(steps))
            took[name] += some if block else []
            kept.clear()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: (y @ x) / 700.0, x)[0, 0])
    x = jnp.ones((700, 700))
    history.update({"slow": slow(x)})
    history.flush()
    value = slow(x)
    history.update({"slow": value})
    pending = not value.is_ready()
    history.close()
    return {**{name: summary(one) for name, one in took.items()}, "pending": pending}


def measure_step(blocks: int) -> dict[str, Any]:
    """Time a training step without metrics and with 20 inside."""
    import jax
    import jax.numpy as jnp

    from everyrank.jax import metrics as em

    names = [f"metric_{i}" for i in range(_METRICS)]
    metrics = em.Collection({name: em.Mean() for name in names})
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(key, (512, 512)) / 23.0 for key in keys]
    x = jax.random.normal(jax.random.key(1), (1024, 512))

    def loss_of(weights: list[Any], x: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return (x * x).mean()

    def step(weights: list[Any], x: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(loss_of)(weights, x)
        return [w - 0.01 * g for w, g in zip(weights, grads, strict=True)], (loss, grads)

    def with_metrics(weights: list[Any], state: Any, x: Any) -> tuple[Any, Any, Any]:
        weights, (loss, grads) = step(weights, x)
        norms = [jnp.sqrt((g * g).sum()) for g in grads]
        values = dict(zip(names, [loss * i for i in range(_METRICS - 4)] + norms, strict=True))
        return weights, metrics.update(state, values), loss

    def without(weights: list[Any], x: Any) -> tuple[Any, Any, Any]:
        # The norms are those that are looked at anyway: what is compared is keeping them.
        weights, (loss, grads) = step(weights, x)
        return (
            weights,
            [loss * i for i in range(_METRICS - 4)],
            [jnp.sqrt((g * g).sum()) for g in grads],
        )

    plain, kept = jax.jit(without), jax.jit(with_metrics)
    state = metrics.init()

    def run_kept(_: Any) -> None:
        nonlocal state
        _, state, _ = jax.block_until_ready(kept(weights, state, x))

    calls: dict[str, Callable[[Any], object]] = {
        "plain": lambda _: jax.block_until_ready(plain(weights, x)),
        "metrics": run_kept,
    }
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name in calls if block % 2 else reversed(calls):
            some = time_calls(calls[name], [None], 5)
            took[name] += some if block else []
    return {name: summary(one) for name, one in took.items()}


def measure_clu(blocks: int) -> dict[str, Any]:
    """Time and count the metrics by themselves, beside those of clu."""
    import flax
    import jax
    import jax.numpy as jnp
    from clu import metrics as clu

    from everyrank.jax import metrics as em

    names = [f"metric_{i}" for i in range(_METRICS)]
    ours = em.Collection({name: em.Mean() for name in names})
    fields = {name: clu.Average.from_output(name) for name in names}
    kind = flax.struct.dataclass(type("Kept", (clu.Collection,), {"__annotations__": fields}))
    batch = {name: jnp.float32(i) for i, name in enumerate(names)}

    def merged(state: Any, batch: Any) -> Any:
        return state.merge(kind.single_from_model_output(**batch))

    update, merge = jax.jit(ours.update), jax.jit(merged)
    states = {"everyrank": ours.init(), "clu, jit": kind.empty(), "clu": kind.empty()}

    def call(name: str, function: Callable[[Any, Any], Any]) -> Callable[[Any], object]:
        def one(batch: Any) -> None:
            states[name] = jax.block_until_ready(function(states[name], batch))

        return one

    calls = {
        "everyrank": call("everyrank", update),
        "clu, jit": call("clu, jit", merge),
        "clu": call("clu", merged),
    }
    took: dict[str, list[int]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name, one in calls.items():
            some = time_calls(one, [batch], 20 if name == "clu" else 200)
            took[name] += some if block else []
    states |= {"everyrank": ours.init(), "clu, jit": kind.empty(), "clu": kind.empty()}
    counts = {name: _dispatches(one, batch) for name, one in calls.items()}
    return {**{name: summary(one) for name, one in took.items()}, "dispatches": counts}


def _dispatches(call: Callable[[Any], object], batch: Any) -> int:
    """Count the programs that a call has JAX run."""
    import jax
    from jax._src import pjit
    from jax._src.interpreters import pxla

    count = 0
    run = pxla.ExecuteReplicated.__call__

    def counted(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return run(self, *args)

    shortcut = pjit._get_fastpath_data
    setattr(pjit, "_get_fastpath_data", lambda *_: None)  # noqa: B010 - it passes our counter by
    jax.clear_caches()
    call(batch)
    setattr(pxla.ExecuteReplicated, "__call__", counted)  # noqa: B010 - mypy minds an assignment
    try:
        call(batch)
    finally:
        setattr(pxla.ExecuteReplicated, "__call__", run)  # noqa: B010
        setattr(pjit, "_get_fastpath_data", shortcut)  # noqa: B010
    return count


def run(*, quick: bool) -> list[Table]:
    """Give each question a fresh process a round."""
    tables = [
        Table(
            f"update with {_METRICS} scalars of JAX", ("who", "x floor, p50", "p50 us", "p99 us")
        ),
        Table(
            f"a jitted step of an MLP with {_METRICS} metrics inside",
            ("who", "x without, p50", "p50 us", "p99 us"),
        ),
        Table(
            f"{_METRICS} means of JAX by themselves",
            ("who", "x everyrank, p50", "p50 us", "p99 us", "dispatches"),
        ),
    ]
    if not installed("jax"):
        tables[0].add("jax is not installed")
        return tables[:1]
    count, blocks = (1, 4) if quick else (5, 10)
    questions = [("measure_update", blocks), ("measure_step", 3 * blocks), ("measure_clu", blocks)]
    rounds: dict[str, list[Any]] = {name: [] for name, _ in questions}
    for _ in range(count):
        for name, blocks in questions:
            if name != "measure_clu" or installed("clu"):
                rounds[name].append(fresh("jax_metrics", name, blocks=blocks))
    for table, found, add in zip(tables, rounds.values(), (_updates, _steps, _clu), strict=True):
        failed = [one for one in found if isinstance(one, Missing)]
        if failed or not found:
            table.add(failed[0].why if failed else "clu is not installed")
        else:
            add(table, found)
    return tables


def _p50(rounds: list[dict[str, Any]], name: str) -> list[float]:
    return [one[name]["p50"] for one in rounds]


def _add(
    table: Table, rounds: list[Any], name: str, label: str, beside: str, *more: Any, **goal: Any
) -> None:
    times = ratio(_p50(rounds, name), _p50(rounds, beside))
    if "most" in goal:
        goal = {"must": f"p50 <= {goal['most']}x", "reached": times.median <= goal["most"]}
    p99 = Spread.of(one[name]["p99"] for one in rounds)
    table.add(label, times, Spread.of(_p50(rounds, name)), p99, *more, **goal)


def _updates(table: Table, rounds: list[Any]) -> None:
    _add(table, rounds, "floor", "floor: copy_to_host_async x 20, append", "floor")
    _add(table, rounds, "everyrank", "everyrank", "floor", most=3)
    pending = sum(one["pending"] for one in rounds)
    told = f"{pending} of {len(rounds)} times"
    table.add(
        "everyrank: back before the value is there", *("", told, ""),
        must="always", reached=pending == len(rounds),
    )  # fmt: skip


def _steps(table: Table, rounds: list[Any]) -> None:
    _add(table, rounds, "plain", "the step, giving the 20 numbers", "plain")
    _add(table, rounds, "metrics", "everyrank: keeping their means", "plain", most=1.02)


def _clu(table: Table, rounds: list[Any]) -> None:
    counts = rounds[-1]["dispatches"]
    _add(table, rounds, "everyrank", "everyrank, jit", "everyrank", counts["everyrank"])
    goals = {
        "clu, jit": ("as fast", lambda times: times >= 1),
        "clu": ("5x fewer dispatches", lambda _: counts["clu"] >= 5 * counts["everyrank"]),
    }
    for name, (must, holds) in goals.items():
        times = ratio(_p50(rounds, name), _p50(rounds, "everyrank"))
        label = "clu, jit" if name == "clu, jit" else "clu, as its users call merge"
        _add(
            table, rounds, name, label, "everyrank", counts[name],
            must=must, reached=holds(times.median),
        )  # fmt: skip
