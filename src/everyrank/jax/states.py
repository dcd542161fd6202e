"""States of metrics as trees of JAX arrays: what is in them, and how they change.

A state is a dict with a flat vector for each operator. Where JAX has no float64, "rest" holds what the
sums have lost: two float32 together keep 48 bits. A metric over the last n updates has a ring of its
own beside these.

Everything here is pure, and gives arrays of the shapes and dtypes that it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from everyrank.arrays.jax import ARRAYS
from everyrank.jax.collective import bound
from everyrank.metrics.catalogue.moving import Ema, Running
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import Plan, Slot
from everyrank.operators import OPERATORS

State = dict[str, Any]

#: What batches contribute, by metric and state.
Batches = Mapping[str, Mapping[str, Any]]

REST = "rest"

#: With more numbers than this on all devices, sums are only summed up, and not kept to the last bit.
_MOST_PLACES = 1 << 22


class States:
    """The states of some metrics, by the plan that says where each lies."""

    def __init__(self, metrics: Mapping[str, DeclaredMetric]) -> None:
        self.metrics = dict(metrics)
        self.plan = Plan.of({name: metric.states() for name, metric in metrics.items()})
        self._rings = {n: m for n, m in self.metrics.items() if isinstance(m, Running)}
        self._fading = {n: m for n, m in self.metrics.items() if isinstance(m, Ema)}

    @property
    def vectors(self) -> list[str]:
        """The flat vectors that a state has."""
        wide = jnp.result_type(float) == np.float64
        has_rest = "sum" in self.plan.widths and not wide
        return [*self.plan.widths, *([REST] if has_rest else [])]

    def init(self) -> State:
        """Give the state of metrics that have seen nothing."""
        state: State = {o: _identity(o, width) for o, width in self.plan.widths.items()}
        if REST in self.vectors:
            state[REST] = jnp.zeros_like(state["sum"])
        for name, metric in self._rings.items():
            state[_ring(name)] = _new_ring(metric, self.plan.by_owner[name])
        return state

    def enter(self, state: State, batches: Batches) -> State:
        """Give the state after what a batch contributes to each metric."""
        new = dict(state)
        for operator in self.plan.widths:
            vector = self._contributed(operator, state, batches)
            if operator == "sum":
                new |= _added(self._faded(state, batches), vector)
            else:
                new[operator] = OPERATORS[operator].merge(ARRAYS, state[operator], vector)
        for name in self._rings:
            if name in batches:
                new = self._turned(new, name, batches[name])
        return new

    def merge(self, a: State, b: State) -> State:
        """Give the state of two together, the second of which came later."""
        merged = self._merged(a, b)
        for name in self._rings:
            merged[_ring(name)] = self._ring_of(name, merged)
        return merged

    def reduce(self, state: State, axis_name: Any) -> State:
        """Give the state of all devices along some axes together: one all-reduce."""
        axes, size = bound(axis_name, "reduce", "update")
        sizes = {name: state[name].size for name in self.vectors}
        if size * sum(sizes.values()) > _MOST_PLACES:
            merged = self._reduced_loosely(state, axes)
        else:
            flat = jnp.concatenate([state[name] for name in sizes])
            places = jnp.zeros((size, flat.size), flat.dtype).at[lax.axis_index(axes)].set(flat)
            # A sum of what each put into a place of its own: so JAX sees that all get the same.
            parts = _split(lax.psum(places, axes), sizes)
            first = {name: part[0] for name, part in parts.items()}
            others = {name: part[1:] for name, part in parts.items()}
            merged, _ = lax.scan(lambda a, b: (self._merged(a, b), None), first, others)
        for name in self._rings:
            merged[_ring(name)] = self._ring_of(name, merged)
        return merged

    def by_metric(self, flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Give every state of every metric from the flat vectors, of which REST has been added."""
        return {
            owner: {n: flat[s.operator][s.here].reshape(s.shape) for n, s in slots.items()}
            for owner, slots in self.plan.by_owner.items()
        }

    def _merged(self, a: State, b: State) -> State:
        merged = {o: OPERATORS[o].merge(ARRAYS, a[o], b[o]) for o in self.plan.widths}
        if REST in a:
            merged |= _added(a, (b["sum"], b[REST]))
        return merged

    def _reduced_loosely(self, state: State, axes: tuple[str, ...]) -> State:
        """Reduce states too large for a place of each device: sums lose what a sum of floats does."""
        merged: State = {}
        for operator in self.plan.widths:
            if operator == "sum":
                merged["sum"] = lax.psum(state["sum"], axes)
                continue
            every = lax.all_gather(state[operator], axes)
            merged[operator] = every[0]
            for i in range(1, every.shape[0]):
                merge = OPERATORS[operator].merge
                merged[operator] = merge(ARRAYS, merged[operator], every[i])
        if REST in state:
            merged[REST] = lax.psum(state[REST], axes)
        return merged

    def _contributed(self, operator: str, state: State, batches: Batches) -> Any:
        """Give all contributions to an operator as a vector; those to sums with what they lose."""
        parts, rests = [], []
        for slot in self.plan.slots:
            if slot.operator != operator:
                continue
            value = batches.get(slot.owner, {}).get(slot.state)
            if value is None or slot.owner in self._rings:
                parts.append(_identity(operator, slot.size))
                rests.append(jnp.zeros(slot.size))
                continue
            if operator == "last":
                value = _next(state[operator][slot.here], *value)
            part, rest = _two_parts(value, slot)
            parts.append(part)
            rests.append(rest)
        vector = jnp.concatenate(parts)
        return (vector, jnp.concatenate(rests)) if operator == "sum" else vector

    def _faded(self, state: State, batches: Batches) -> State:
        """Give the sums, of which some fade before anything is added."""
        for name, metric in self._fading.items():
            if name in batches:
                for slot in self.plan.by_owner[name].values():
                    faded = {v: state[v].at[slot.here].multiply(metric.decay) for v in _sums(state)}
                    state = {**state, **faded}
        return state

    def _turned(self, state: State, name: str, batch: Mapping[str, Any]) -> State:
        """Let a batch take the place of the oldest in a ring, and its states be those of the ring."""
        ring, n = state[_ring(name)], self._rings[name].n
        parts = {}
        new = dict(state)
        for key, slot in self.plan.by_owner[name].items():
            fresh = _identity(slot.operator, slot.size)
            if key in batch:
                fresh, _ = _two_parts(batch[key], slot)
            parts[key] = ring["parts"][key].at[ring["cursor"]].set(fresh)
            new[slot.operator] = new[slot.operator].at[slot.here].set(_together(slot, parts[key]))
            if slot.operator == "sum" and REST in new:
                new[REST] = new[REST].at[slot.here].set(0.0)
        new[_ring(name)] = {"parts": parts, "cursor": (ring["cursor"] + 1) % n}
        return new

    def _ring_of(self, name: str, flat: Mapping[str, Any]) -> State:
        """Give a ring in which what is there counts as one update."""
        ring = _new_ring(self._rings[name], self.plan.by_owner[name])
        for key, slot in self.plan.by_owner[name].items():
            ring["parts"][key] = ring["parts"][key].at[0].set(flat[slot.operator][slot.here])
        return ring


def _identity(operator: str, width: int) -> Any:
    numbers = OPERATORS[operator].identity
    return jnp.asarray(np.tile(np.array(numbers), width // len(numbers)), jnp.result_type(float))


def _sums(state: State) -> list[str]:
    return [name for name in ("sum", REST) if name in state]


def _added(state: State, more: tuple[Any, Any]) -> State:
    """Add to sums; what they lose goes to the rest, and what gathers there moves up (two-sum)."""
    if REST not in state:
        return {"sum": state["sum"] + more[0] + more[1]}
    high, value = state["sum"], more[0]
    total = high + value
    part = total - high
    rest = state[REST] + more[1] + ((high - (total - part)) + (value - part))
    rest = jnp.where(jnp.isfinite(total), rest, 0.0)  # what is not finite has none; it would be NaN
    sums = total + rest
    return {"sum": sums, REST: jnp.where(jnp.isfinite(sums), rest - (sums - total), 0.0)}


def _two_parts(value: Any, slot: Slot) -> tuple[Any, Any]:
    """Give a contribution as flat floats, and what of a number of the host does not fit into them."""
    wide = jnp.result_type(float)
    rest = np.zeros(slot.size)
    if isinstance(value, int | float):
        high = np.asarray(value, wide)
        if np.isfinite(high):
            rest += value - (int(high) if isinstance(value, int) else float(high))
        value = high
    flat = jnp.broadcast_to(jnp.asarray(value, wide).reshape(-1), (slot.size,))
    return flat, jnp.asarray(rest, wide)


def _next(state: Any, order: Any, value: Any) -> Any:
    """Give order and value of what comes after all others, if it has no order of its own."""
    if order is None:
        order = jnp.maximum(state[0], 0.0) + 1.0
    return jnp.stack([jnp.asarray(x, state.dtype) for x in (order, value)])


def _ring(name: str) -> str:
    return f"ring {name}".rstrip()


def _new_ring(metric: Running, slots: Mapping[str, Slot]) -> State:
    parts = {
        key: jnp.tile(_identity(slot.operator, slot.size), (metric.n, 1))
        for key, slot in slots.items()
    }
    return {"parts": parts, "cursor": jnp.asarray(1 % metric.n, jnp.int32)}


def _together(slot: Slot, parts: Any) -> Any:
    """Merge what is in a ring."""
    merge = OPERATORS[slot.operator].merge
    merged, _ = lax.scan(lambda a, b: (merge(ARRAYS, a, b), None), parts[0], parts[1:])
    return merged


def _split(flat: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    ends = np.cumsum(list(sizes.values()))[:-1].tolist()
    return dict(zip(sizes, jnp.split(flat, ends, axis=1), strict=True))


def to_host(state: State) -> dict[str, np.ndarray[Any, Any]]:
    """Give the flat vectors in float64 on the host, with one transfer."""
    vectors = {name: value for name, value in state.items() if not isinstance(value, dict)}
    return {n: np.asarray(v, np.float64) for n, v in jax.device_get(vectors).items()}
