"""JAX arrays: one jitted stack an update, its way to the host started at once, dispatch never blocked.

The stack is an array of our own, so that donating or deleting the caller's arrays later does not
touch it. Readiness is asked, never waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.stage import Part, Place, check_size


@cache
def _flat() -> Any:
    """Compile the copy on first use: everything that is handed over, as one flat array."""
    return jax.jit(lambda values: jnp.concatenate([jnp.reshape(v, (-1,)) for v in values]))


class JaxBlock:
    """The values of one update, of one dtype, as one flat array."""

    def __init__(self, array: Any) -> None:
        self._array = array
        array.copy_to_host_async()

    def ready(self) -> bool:
        """Say whether the values are computed."""
        return bool(self._array.is_ready())

    def fetch(self) -> NDArray[Any]:
        """Give the one row as float64, int64 or bool."""
        values = np.asarray(self._array)[None]
        if values.dtype == np.bool_:
            return values
        whole = np.issubdtype(values.dtype, np.integer) and values.dtype != np.uint64
        return values.astype(np.int64 if whole else np.float64)

    def peek(self, slot: int) -> NDArray[Any]:
        """Give that row; waits for the device."""
        row: NDArray[Any] = self.fetch()[slot]
        return row


class JaxStage:
    """The JAX values of one open window."""

    def __init__(self, slots: int) -> None:
        del slots  # every update is a block of its own

    def add(self, columns: Sequence[int], names: Sequence[str], values: list[Any]) -> list[Part]:
        """Copy the values of one update: one dispatch for each dtype and set of devices."""
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for column, name, value in zip(columns, names, values, strict=True):
            _check(name, value)
            if not value.is_fully_addressable:
                value = value.addressable_data(0)  # replicated: nothing global may be dispatched
            groups.setdefault((value.dtype, value.sharding.device_set), []).append((column, value))
        parts = []
        for members in groups.values():
            places, start = [], 0
            for column, value in members:
                places.append(Place(column, start, value.shape if value.size != 1 else ()))
                start += value.size
            block = JaxBlock(_flat()([value for _, value in members]))
            parts.append(Part(block, 0, tuple(places)))
        return parts

    def seal(self) -> None:
        """Do nothing: JAX orders its own work."""


def open_stage(slots: int) -> JaxStage:
    """Open a stage for a window of `slots` updates."""
    return JaxStage(slots)


def _check(name: str, value: Any) -> None:
    """Refuse what has no value here, with the way out."""
    if isinstance(value, jax.core.Tracer):
        raise MetricError(
            f"{name!r} is a tracer: update() was called inside a jitted function, where values do "
            "not exist yet. Return the value from the function and hand it over outside."
        )
    if not value.is_fully_addressable and not value.is_fully_replicated:
        raise MetricError(
            f"{name!r} is a global array of shape {value.shape} that this process holds a part of "
            "only. Reduce it inside the jitted function, or hand over "
            f"{name}.addressable_data(0)."
        )
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise MetricError(f"{name!r} is complex ({value.dtype}). Hand over its real part or abs().")
    check_size(name, value.shape)
