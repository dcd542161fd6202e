"""Compiled programs: one call reduces every array of a tree, with one all-reduce for each way.

Arrays are grouped by the devices on which they lie, usually one group, and each group is one call of a
jitted function. It is found by what the tree looks like: operators and shardings; by shapes and dtypes
jit finds its own. Values never count, so that nothing is compiled when they change.

On a mesh each device first reduces the pieces that it holds, packs what is left into one vector for
each way of combining ("sum", "max", "min") and dtype, and the devices reduce these vectors. 50 metrics
on 8 simulated devices are one all-reduce of 50 numbers. Left to XLA they would be one of 50 buffers,
which takes six times as long there (`python -m benchmarks jax_reduce`). And leaf by leaf they are 50
programs at once, which end the process: beyond some 35 that nobody waits for, some of the simulated
devices meet in one all-reduce and the others in another, for good.

Inside a trace the arrays have no devices yet. There each is reduced by itself, and it is XLA that puts
the all-reduces together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from everyrank.jax.operators import OPERATORS, Numpy, Part

#: Trees that look different have programs of their own; of more than this, the oldest are let go.
_PROGRAMS = 256

_ACROSS: dict[str, Callable[..., Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}

_HOST, _TRACED = "host", "traced"

_Spec: Any = PartitionSpec  # which JAX leaves without types


#: An array to reduce to a number, and what else its operator needs.
Operands = tuple[Any, ...]


def reduce_whole(operators: Sequence[str], operands: Sequence[Operands]) -> list[Any]:
    """Reduce each array over all of its elements, by an operator of its own."""
    groups: dict[Any, list[int]] = {}
    for i, some in enumerate(operands):
        groups.setdefault(_place(some), []).append(i)
    results: list[Any] = [None] * len(operands)
    for place, members in groups.items():
        names = tuple([operators[i] for i in members])
        values = _reduce_at(place, names, [operands[i] for i in members])
        for i, value in zip(members, values, strict=True):
            results[i] = value
    return results


def _place(operands: Operands) -> Any:
    """Say where a reduction is done: on the host, in a trace, on a mesh, or on some devices."""
    for x in operands:
        if isinstance(x, Tracer):
            return _TRACED
    sharding = getattr(operands[0], "sharding", None)
    return _HOST if sharding is None else _devices(sharding)


@lru_cache(_PROGRAMS)
def _devices(sharding: Any) -> Any:
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        return sharding.mesh
    return frozenset(sharding.device_set)


def _reduce_at(
    place: Any, operators: tuple[str, ...], operands: Sequence[Operands]
) -> Sequence[Any]:
    if place is _HOST:
        with np.errstate(all="ignore"):  # 0 / 0 is NaN, as it is on a device
            return [_whole(np, *job)[()] for job in zip(operators, operands, strict=True)]
    if place is _TRACED:
        return [_whole(jnp, *job) for job in zip(operators, operands, strict=True)]
    if isinstance(place, Mesh) and _may_map_over(place):
        program = packed(operators, tuple([x.sharding for x, *_ in operands]))
    else:
        program = plain(operators)
    results: Sequence[Any] = program(operands)
    return results


def _may_map_over(mesh: Mesh) -> bool:
    """Say whether shard_map takes this mesh here: another one may have been set by the program."""
    ask = getattr(jax.sharding, "get_abstract_mesh", None)  # versions without it do not mind
    context = ask and ask()
    return not context or context.empty or context == mesh.abstract_mesh


def _whole(xp: Numpy, operator: str, operands: Operands) -> Any:
    """Reduce one array as numpy would, whichever numpy it is."""
    row, x = OPERATORS[operator], operands[0]
    parts = [_fold(xp, part) for part in row.lift(xp, *operands)]
    return row.finish(xp, parts, x.size, x.dtype)


def _fold(xp: Numpy, part: Part) -> Any:
    return getattr(xp, part.how)(part.value)


@lru_cache(_PROGRAMS)
def plain(operators: tuple[str, ...]) -> Any:
    """Compile a program for arrays on one device, or in pieces of which only XLA knows."""

    def program(operands: Sequence[Operands]) -> list[Any]:
        return [_whole(jnp, *job) for job in zip(operators, operands, strict=True)]

    return jax.jit(program)


@lru_cache(_PROGRAMS)
def packed(operators: tuple[str, ...], shardings: tuple[NamedSharding, ...]) -> Any:
    """Compile a program for arrays on one mesh."""
    mesh, specs = shardings[0].mesh, [sharding.spec for sharding in shardings]
    cut = [_axes(spec) for spec in specs]
    axes = tuple(axis for axis in mesh.axis_names if any(axis in some for some in cut))
    if not axes:
        return plain(operators)
    rows = [OPERATORS[operator] for operator in operators]

    def on_each_device(pieces: Sequence[Operands]) -> list[list[Any]]:
        parts = [
            [
                _once(Part(part.how, _fold(jnp, part)), axes, some)
                for part in row.lift(jnp, *operands)
            ]
            for row, operands, some in zip(rows, pieces, cut, strict=True)
        ]
        combined = iter(across([part for some in parts for part in some], axes))
        return [[next(combined) for _ in some] for some in parts]

    def program(operands: Sequence[Operands]) -> list[Any]:
        pieces = [
            tuple(spec if x.ndim else _Spec() for x in some)
            for spec, some in zip(specs, operands, strict=True)
        ]
        parts = _shard_map(on_each_device, mesh=mesh, in_specs=(pieces,), out_specs=_Spec())(
            operands
        )
        return [
            row.finish(jnp, some, x.size, x.dtype)
            for row, some, (x, *_) in zip(rows, parts, operands, strict=True)
        ]

    return jax.jit(program)


def _axes(spec: PartitionSpec) -> set[str]:
    """Give the axes of a mesh along which an array is cut."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return {axis for entry in entries for axis in entry if axis is not None}


def _once(part: Part, axes: Sequence[str], cut: set[str]) -> Part:
    """Let one device of those that hold the same piece speak for it, where copies would count."""
    copied = [axis for axis in axes if axis not in cut]
    if part.how != "sum" or not copied:
        return part
    first = jnp.all(jnp.array([lax.axis_index(axis) == 0 for axis in copied]))
    return Part(part.how, jnp.where(first, part.value, 0))


def across(parts: Sequence[Part], axes: Any) -> list[Any]:
    """Combine parts over the devices along some axes: a collective for each way and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        groups.setdefault((part.how, part.value.dtype), []).append(i)
    combined: list[Any] = [None] * len(parts)
    for (how, _), members in groups.items():
        values = [parts[i].value for i in members]
        flat = _ACROSS[how](pack(values), axes)
        for i, value in zip(members, unpack(flat, values), strict=True):
            combined[i] = value
    return combined


def count_along(axes: Any) -> int:
    """Count the devices along some axes; a NameError says that there is no such axis."""
    count: int = _ACROSS["sum"](1, axes)  # worked out while tracing
    return count


def pack(values: Sequence[Any]) -> Any:
    """Lay arrays of one dtype behind each other."""
    return jnp.concatenate([jnp.ravel(value) for value in values])


def unpack(flat: Any, like: Sequence[Any]) -> list[Any]:
    """Take apart what was packed along the last axis; dimensions in front of it stay."""
    ends = list(accumulate(value.size for value in like))
    pieces = jnp.split(flat, ends[:-1], axis=-1)
    return [
        piece.reshape(*flat.shape[:-1], *value.shape)
        for piece, value in zip(pieces, like, strict=True)
    ]


def _shard_map(function: Callable[..., Any], **options: Any) -> Any:
    """Map over shards, wherever this version of JAX keeps that."""
    mapper: Any = getattr(jax, "shard_map", None)
    if mapper is None:  # before 0.6
        mapper = import_module("jax.experimental.shard_map").shard_map
    return mapper(function, **options)
