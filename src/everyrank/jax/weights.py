"""The weights of a weighted mean: which are whose, and that they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from everyrank.errors import MetricError
from everyrank.jax.leaves import Leaves, Path, describe, is_numeric, name_of
from everyrank.jax.operators import is_complex


def weights_of(leaves: Leaves[Any], weights: Any) -> list[Any]:
    """Give the weights of each array as an array: of the same shape, or without dimensions."""
    if _is_one(weights):
        paths: Sequence[Path] = [()] * len(leaves.arrays)
    else:
        paths = leaves.paths
    found = [_look_up(weights, path) for path in paths]
    for i, (x, weight) in enumerate(zip(leaves.arrays, found, strict=True)):
        _check(leaves, i, x, weight)
    return found


def _is_one(weights: Any) -> bool:
    return isinstance(weights, jax.Array | np.ndarray | np.generic | int | float)


def _look_up(weights: Any, path: Path) -> Any:
    """Follow the path of a metric through a tree of weights, as far as it goes."""
    for step in path:
        if _is_one(weights):
            break
        try:
            has_items = isinstance(weights, Mapping) or isinstance(step, int)
            weights = weights[step] if has_items else getattr(weights, str(step))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise MetricError(
                f"There is no weight for {name_of(path)!r}. `weights` must be an array, a number, or a "
                "tree of these with the names of the metrics."
            ) from None
    if not _is_one(weights):
        raise MetricError(
            f"The weights of {name_of(path)!r} are {weights!r}. They must be an array or a number."
        )
    return weights if isinstance(weights, jax.Array) else np.asarray(weights)


def _check(leaves: Leaves[Any], i: int, x: Any, weight: Any) -> None:
    if not is_numeric(weight.dtype) or is_complex(weight.dtype):
        raise MetricError(
            f"The weights of {leaves.name(i)!r} are {describe(weight)}. They must be real numbers."
        )
    if weight.ndim and weight.shape != x.shape:
        raise MetricError(
            f"The weights of {leaves.name(i)!r} have the shape {weight.shape}, but it has the shape "
            f"{x.shape}. Give one number, or one for each element: bring them to that shape first, for "
            "example with jnp.broadcast_to()."
        )


def beside(x: Any, weight: Any) -> tuple[Any, Any]:
    """Give values and weights as they can be handed to one program: on the same devices."""
    if isinstance(x, Tracer) or isinstance(weight, Tracer):
        return x, weight
    if not isinstance(x, jax.Array):
        if not isinstance(weight, jax.Array):
            return x, weight
        return jax.device_put(_floats(x), weight.sharding), weight
    if not isinstance(weight, jax.Array):
        weight = _floats(weight)
        return x, weight if not weight.ndim else jax.device_put(weight, x.sharding)
    if weight.sharding.device_set != x.sharding.device_set and not weight.ndim:
        weight = jnp.broadcast_to(weight, x.shape)
    if weight.ndim and weight.sharding != x.sharding:
        weight = jax.device_put(weight, x.sharding)
    return x, weight


def _floats(x: Any) -> Any:
    """Take whole numbers of the host as floats: JAX would cut those of 64 bits to their lower half."""
    return x if jnp.issubdtype(x.dtype, np.inexact) else x.astype(np.float64)
