"""Reduce whole dictionaries of JAX arrays: under jit, over a mesh, inside shard_map, or as they are.

    >>> import jax.numpy as jnp
    >>> from everyrank.jax import reduce_custom, reduce_mean
    >>> metrics = {"loss": jnp.arange(8.0), "grad": {"norm": jnp.ones((8, 2))}, "lr": 0.1}
    >>> reduce_mean(metrics)
    {'grad': {'norm': Array(1., dtype=float32)}, 'loss': Array(3.5, dtype=float32), 'lr': 0.1}
    >>> reduce_custom(metrics, {"loss": "max"})["loss"]
    Array(7., dtype=float32)

There are two kinds, by where they are called:

* `reduce_mean`, `reduce_sum`, `reduce_max`, `reduce_min`, `reduce_custom` and `reduce_weighted_mean`
  take arrays as the whole program sees them. An array with dimensions becomes one number over all of
  its elements, on whatever devices these lie. Call them anywhere; outside jit a dictionary is one
  compiled call.
* Their namesakes that end in `_collective`, and `all_gather`, take what each device holds, element by
  element, and are called inside `jax.shard_map` or `pmap`, on every device.

`collect_from_devices` brings what lies along a leading device axis to the host, as lists.

Everywhere, trees keep their structure. Python numbers, text, None and whatever else is no array
passes through; so do arrays without dimensions, where there is nothing to reduce. On several
processes, call on every one of them with trees that look alike, as JAX asks for all that it runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everyrank import lazily

if TYPE_CHECKING:
    from everyrank.jax.collect import collect_from_devices
    from everyrank.jax.collective import (
        all_gather,
        reduce_max_collective,
        reduce_mean_collective,
        reduce_min_collective,
        reduce_sum_collective,
        reduce_weighted_mean_collective,
    )
    from everyrank.jax.reduce import (
        reduce_custom,
        reduce_max,
        reduce_mean,
        reduce_min,
        reduce_sum,
        reduce_weighted_mean,
    )

#: Where each public name lives; it is imported when somebody asks for it.
_HOMES = {
    "all_gather": "jax.collective",
    "collect_from_devices": "jax.collect",
    "reduce_custom": "jax.reduce",
    "reduce_max": "jax.reduce",
    "reduce_max_collective": "jax.collective",
    "reduce_mean": "jax.reduce",
    "reduce_mean_collective": "jax.collective",
    "reduce_min": "jax.reduce",
    "reduce_min_collective": "jax.collective",
    "reduce_sum": "jax.reduce",
    "reduce_sum_collective": "jax.collective",
    "reduce_weighted_mean": "jax.reduce",
    "reduce_weighted_mean_collective": "jax.collective",
}

__all__ = [
    "all_gather",
    "collect_from_devices",
    "reduce_custom",
    "reduce_max",
    "reduce_max_collective",
    "reduce_mean",
    "reduce_mean_collective",
    "reduce_min",
    "reduce_min_collective",
    "reduce_sum",
    "reduce_sum_collective",
    "reduce_weighted_mean",
    "reduce_weighted_mean_collective",
]


__getattr__ = lazily(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
