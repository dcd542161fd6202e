"""From a leading device axis to lists on the host."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from everyrank.errors import MetricError
from everyrank.jax.leaves import Leaves, describe


def collect_from_devices(metrics: Any) -> Any:
    """Split each array along its first dimension into a list with an entry for each device.

    Call it on what `pmap` or `shard_map` returned. The entries are numbers and arrays of numpy: the
    whole tree comes to the host at once, and this call waits for it.

        >>> import jax.numpy as jnp
        >>> collect_from_devices({"loss": jnp.array([0.5, 1.5]), "phase": "warmup"})
        {'loss': [np.float32(0.5), np.float32(1.5)], 'phase': 'warmup'}
    """
    leaves = Leaves(metrics, scalars=False)
    leaves.check_alive()
    for i, x in enumerate(leaves.arrays):
        _check(leaves, i, x)
    # Every copy is on its way before the first is waited for.
    return leaves.with_arrays([list(x) for x in jax.device_get(leaves.arrays)])


def _check(leaves: Leaves[Any], i: int, x: Any) -> None:
    if isinstance(x, Tracer):
        raise MetricError(
            f"{leaves.name(i)!r} is a tracer: collect_from_devices was called inside a jitted "
            "function, where values do not exist yet. Return the array from the function and collect "
            "it outside."
        )
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        raise MetricError(
            f"{leaves.name(i)!r} is {describe(x)} of which this process holds a part only. Gather it "
            "first, with all_gather inside shard_map."
        )
