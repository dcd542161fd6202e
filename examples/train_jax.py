"""Train a small flax model on a mesh of devices, and know what all of them saw.

    python examples/train_jax.py                          # one process with 8 simulated devices
    python examples/train_jax.py 127.0.0.1:7777 2 0       # or two with 4 each, of which this is 0

The metrics are pure functions inside the jitted step, and History takes what they have seen.
"""

from __future__ import annotations

import os
import sys

COORDINATOR, PROCESSES, PROCESS = sys.argv[1:] or ["", "1", "0"]
SIMULATED = f"--xla_force_host_platform_device_count={8 // int(PROCESSES)}"
os.environ.setdefault("XLA_FLAGS", SIMULATED)  # before JAX looks at it

import jax  # noqa: E402 - after the environment
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import everyrank  # noqa: E402
from everyrank.jax import metrics as em  # noqa: E402

STEPS, BATCH, CLASSES = 200, 64, 4


def batch_of(step: int, sharding: NamedSharding) -> tuple[jax.Array, jax.Array]:
    """Make points around four centres; each process makes the part that its devices hold."""
    rng = np.random.default_rng(step)
    labels = rng.integers(0, CLASSES, BATCH)
    points = np.stack([labels // 2, labels % 2], 1) * 2.0 - 1.0 + rng.normal(size=(BATCH, 2)) * 0.5
    put = jax.make_array_from_callback
    return (
        put((BATCH, 2), sharding, lambda at: points.astype(np.float32)[at]),
        put((BATCH,), sharding, lambda at: labels[at]),
    )


def main() -> None:
    """Train, and print what came of it."""
    if COORDINATOR:
        jax.distributed.initialize(COORDINATOR, int(PROCESSES), int(PROCESS))
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    sharded = NamedSharding(mesh, PartitionSpec("batch"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    model = nnx.Sequential(nnx.Linear(2, 32, rngs=nnx.Rngs(0)), nnx.relu)
    model = nnx.Sequential(model, nnx.Linear(32, CLASSES, rngs=nnx.Rngs(1)))
    graph, weights = nnx.split(model)
    optimizer = optax.adam(1e-2)
    metrics = em.Collection(accuracy=em.Accuracy(classes=CLASSES), worst=em.Max(), n=em.Count())

    def loss_of(weights: nnx.State, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, weights)(x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), (logits, losses)

    @jax.jit
    def train(weights: nnx.State, opt: optax.OptState, seen: dict, x: jax.Array, y: jax.Array):
        (loss, (logits, losses)), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, x, y)
        updates, opt = optimizer.update(grads, opt)
        seen = metrics.update(seen, {"accuracy": (logits, y), "worst": losses, "n": losses})
        return optax.apply_updates(weights, updates), opt, seen, loss

    state = (weights, optimizer.init(weights), metrics.init())
    weights, opt, seen = jax.device_put(state, everywhere)
    with everyrank.History(outdir="runs/jax", sync_every=20) as history:
        for step in range(STEPS):
            weights, opt, seen, loss = train(weights, opt, seen, *batch_of(step, sharded))
            row = {"loss": loss}
            if step % 20 == 19:  # what the metrics have seen since the last time
                row["train"] = metrics.at(seen)
                seen = jax.device_put(metrics.init(), everywhere)
            history.update(row)
        accuracy, samples = history["train/accuracy"].values, history["train/n"].values
        print(f"{jax.device_count()} devices in {jax.process_count()} processes")
        print(f"accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f} over {sum(samples):.0f} samples")


if __name__ == "__main__":
    main()
