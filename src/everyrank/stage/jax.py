"""JAX arrays: one jitted copy an update, its way to the host started at once, dispatch never blocked.

The copy is an array of our own, so that donating or deleting the caller's arrays later does not
touch it. Readiness is asked, never waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.stage import Part, Place, Staged, check_size

_LOOK = attrgetter("aval", "sharding")


@cache
def _flat() -> Any:
    """Compile the copy on first use: everything that is handed over, as one flat array."""
    # The copy is spelled out, since a result that is the argument itself may share its memory.
    return jax.jit(
        lambda values: jnp.copy(jnp.concatenate([jnp.reshape(v, (-1,)) for v in values]))
    )


class JaxBlock:
    """The values of one update, of one dtype, as one flat array."""

    def __init__(self, array: Any) -> None:
        self._array = array
        array.copy_to_host_async()

    def ready(self) -> bool:
        """Say whether the values are computed."""
        return bool(self._array.is_ready())

    def fetch(self) -> NDArray[Any]:
        """Give the one row as float64, int64, uint64 or bool."""
        values = np.asarray(self._array)[None]
        if values.dtype == np.bool_ or values.dtype == np.uint64:
            return values
        whole = jnp.issubdtype(values.dtype, jnp.integer)
        return values.astype(np.int64 if whole else np.float64)

    def peek(self, slot: int) -> NDArray[Any]:
        """Give that row; waits for the device."""
        row: NDArray[Any] = self.fetch()[slot]
        return row

    def row(self, slot: int) -> Any:
        """Give that row where it lies."""
        del slot  # there is one
        return self._array


class JaxStage:
    """The way from JAX arrays to blocks: every update is a block of its own."""

    def add(self, staged: Staged, values: list[Any]) -> list[Part]:
        """Copy the values of one update: one dispatch for each dtype and sharding."""
        plan: _Plan | None = staged.plan
        if plan is None or list(map(_LOOK, values)) != plan.looks:
            plan = staged.plan = _plan(staged, values)
        if plan.shared:
            values = list(map(_local, values))
        try:
            copies = [_flat()([values[i] for i in picks]) for picks, _ in plan.groups]
        except (RuntimeError, ValueError):
            for name, value in zip(staged.names, values, strict=True):
                _check_alive(name, value)
            raise
        for copy in copies:
            _check_there(staged.names[0], copy)  # within a trace every result is of that trace
        return [
            Part(JaxBlock(copy), 0, places)
            for copy, (_, places) in zip(copies, plan.groups, strict=True)
        ]

    def seal(self) -> None:
        """Do nothing: JAX orders its own work."""


class _Plan(NamedTuple):
    """How the arrays of updates that look alike are copied, worked out once."""

    looks: list[Any]
    groups: list[tuple[list[int], tuple[Place, ...]]]  # those of one dtype and sharding
    shared: bool  # with other processes, so that nothing may be dispatched on the whole


def _plan(staged: Staged, values: list[Any]) -> _Plan:
    for name, value in zip(staged.names, values, strict=True):
        _check(name, value)
    looks = list(map(_LOOK, values))
    members: dict[Any, list[int]] = {}
    for i, value in enumerate(map(_local, values)):
        members.setdefault((value.dtype, value.sharding), []).append(i)
    groups = [(picks, _places(staged.columns, values, picks)) for picks in members.values()]
    return _Plan(looks, groups, not all(value.is_fully_addressable for value in values))


def _places(
    columns: Sequence[int], values: Sequence[Any], picks: Sequence[int]
) -> tuple[Place, ...]:
    places, start = [], 0
    for i in picks:
        value = values[i]
        places.append(Place(columns[i], start, value.shape if value.size != 1 else ()))
        start += value.size
    return tuple(places)


def _local(value: Any) -> Any:
    """Give the part of an array that is here, which of a replicated one is all of it."""
    return value if value.is_fully_addressable else value.addressable_data(0)


def open_stage(slots: int) -> JaxStage:
    """Open a stage; how many updates a window has makes no difference."""
    del slots
    return JaxStage()


def _check(name: str, value: Any) -> None:
    """Refuse what has no value here, with the way out."""
    _check_there(name, value)
    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise MetricError(
            f"{name!r} is a global array of shape {value.shape} that this process holds a part of "
            "only. Reduce it inside the jitted function, or hand over "
            f"{name}.addressable_data(0)."
        )
    if not (jnp.issubdtype(value.dtype, jnp.integer) or _is_real(value.dtype)):
        raise MetricError(
            f"{name!r} is an array of {value.dtype}, which are no real numbers. Hand over numbers, "
            "for example the abs() of complex ones."
        )
    _check_alive(name, value)
    check_size(name, value.shape)


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.bool_))


def _check_there(name: str, value: Any) -> None:
    if isinstance(value, Tracer):
        raise MetricError(
            f"{name!r} is a tracer: update() was called inside a jitted function, where values do "
            "not exist yet. Return the value from the function and hand it over outside."
        )


def _check_alive(name: str, value: Any) -> None:
    if value.is_deleted():
        raise MetricError(
            f"{name!r} was deleted, or donated to a jitted function. Hand over what that function "
            "returned."
        )
