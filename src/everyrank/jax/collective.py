"""Collective reductions: what each device holds, element by element, over the devices along an axis.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> def step(losses):  # what one device holds
    ...     return reduce_mean_collective({"loss": losses.mean()}, axis_name="batch")
    >>> mesh = Mesh(np.array(jax.devices()), ("batch",))
    >>> mapped = jax.shard_map(step, mesh=mesh, in_specs=P("batch"), out_specs=P())
    >>> mapped(jnp.arange(8.0))
    {'loss': Array(3.5, dtype=float32)}

Call them inside `jax.shard_map` or `pmap`, on every device alike. Arrays keep their shapes; those
without dimensions are reduced as well. A whole tree costs one collective for each operator and dtype.
`axis_name` may be a tuple of names: the devices along all of these.

Dtypes and NaN are as for whole arrays (`everyrank.jax.reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from everyrank.errors import OptionError
from everyrank.jax.leaves import Leaves, Tree
from everyrank.jax.operators import OPERATORS
from everyrank.jax.programs import across, count_along, pack, unpack
from everyrank.jax.reduce import check_extreme
from everyrank.jax.weights import weights_of

Axes = str | tuple[str, ...]


def reduce_mean_collective(metrics: Tree, axis_name: Axes = "batch") -> Tree:
    """Give the mean of each array over the devices."""
    return _reduce("mean", metrics, axis_name)


def reduce_sum_collective(metrics: Tree, axis_name: Axes = "batch") -> Tree:
    """Give the sum of each array over the devices."""
    return _reduce("sum", metrics, axis_name)


def reduce_max_collective(metrics: Tree, axis_name: Axes = "batch") -> Tree:
    """Give the largest of each array's values over the devices, or NaN if one holds it."""
    return _reduce("max", metrics, axis_name)


def reduce_min_collective(metrics: Tree, axis_name: Axes = "batch") -> Tree:
    """Give the smallest of each array's values over the devices, or NaN if one holds it."""
    return _reduce("min", metrics, axis_name)


def reduce_weighted_mean_collective(metrics: Tree, weights: Any, axis_name: Axes = "batch") -> Tree:
    """Give the weighted mean of each array over the devices: sum(weight * value) / sum(weight).

    `weights` is what this device's values weigh: an array for all metrics, a number such as its count
    of tokens, or a tree like `metrics` that holds these. A value of weight zero has nothing to say,
    even if it is NaN; if the weights of all devices are zero, the mean is NaN.
    """
    axes, size = bound(axis_name, "reduce_weighted_mean_collective", "reduce_weighted_mean")
    leaves = Leaves(metrics, scalars=True)
    found = weights_of(leaves, weights)
    operands = [
        (jnp.asarray(x), jnp.asarray(weight))
        for x, weight in zip(leaves.arrays, found, strict=True)
    ]
    return _run(leaves, "weighted mean", operands, axes, size)


def all_gather(metrics: Tree, axis_name: Axes = "batch") -> Tree:
    """Give every device the arrays of all: a new first dimension counts the devices.

    JAX does not see that these are the same on every device. To return them from `jax.shard_map` with
    `out_specs=P()`, map with `check_vma=False`.
    """
    axes, _ = bound(axis_name, "all_gather")
    leaves = Leaves(metrics, scalars=True)
    arrays = list(map(jnp.asarray, leaves.arrays))
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        groups.setdefault(x.dtype, []).append(i)
    gathered = list(arrays)
    for members in groups.values():
        some = [arrays[i] for i in members]
        flat = lax.all_gather(pack(some), axes)
        for i, value in zip(members, unpack(flat, some), strict=True):
            gathered[i] = value
    return leaves.with_arrays(gathered)


def _reduce(operator: str, metrics: Tree, axis_name: Axes) -> Tree:
    axes, size = bound(axis_name, f"reduce_{operator}_collective", f"reduce_{operator}")
    leaves = Leaves(metrics, scalars=True)
    if operator in ("max", "min"):
        for i, x in enumerate(leaves.arrays):
            check_extreme(leaves, i, x, operator, empty=False)
    return _run(leaves, operator, [(jnp.asarray(x),) for x in leaves.arrays], axes, size)


def _run(
    leaves: Leaves[Tree],
    operator: str,
    operands: Sequence[tuple[Any, ...]],
    axes: tuple[str, ...],
    size: int,
) -> Tree:
    row = OPERATORS[operator]
    parts = [row.lift(jnp, *some) for some in operands]
    combined = iter(across([part for some in parts for part in some], axes))
    return leaves.with_arrays(
        [
            row.finish(jnp, [next(combined) for _ in some], size, x.dtype)
            for some, (x, *_) in zip(parts, operands, strict=True)
        ]
    )


def bound(axis_name: Any, caller: str, outside: str | None = None) -> tuple[tuple[str, ...], int]:
    """Give the axes as a tuple, and how many devices there are along them.

    `caller` is who asks, and `outside` what is called instead where there are no axes.
    """
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    try:
        if not all(isinstance(axis, str) for axis in axes):
            raise NameError
        return axes, count_along(axes)
    except NameError:
        raise OptionError(_unbound(axis_name, caller, outside)) from None


def _unbound(axis_name: Any, caller: str, outside: str | None) -> str:
    ask = getattr(jax.sharding, "get_abstract_mesh", None)
    known = getattr(ask(), "manual_axes", ()) if ask else ()
    if known:
        return (
            f"axis_name={axis_name!r} is no axis here. Mapped over: {', '.join(map(repr, known))}. "
            "Pass one of these, or a tuple of several."
        )
    instead = "use collect_from_devices on what they returned"
    if outside is not None:
        instead = f"also under jit, use {outside} on the whole arrays"
    return (
        f"axis_name={axis_name!r} is no axis here: {caller} is called inside jax.shard_map or pmap, "
        f"which name the axes. Outside of them, {instead}."
    )
