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
from jax.core import Tracer

from everyrank.arrays.jax import ARRAYS, split
from everyrank.handed import Finish
from everyrank.jax.collective import bound
from everyrank.metrics.catalogue.moving import Ema, Running
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.handing import told
from everyrank.metrics.states import Plan, Slot, check_contributions
from everyrank.operators import OPERATORS

Tree = dict[str, Any]

#: What batches contribute, by metric and state; to a sum also a number in two parts.
Batches = Mapping[str, Mapping[str, Any]]

REST = "rest"

#: A vector of sums with more numbers than this on all devices is summed up in float32, since a place
#: for each device would take too much memory.
_MOST_PLACES = 1 << 22


class States:
    """The states of some metrics, by the plan that says where each lies."""

    def __init__(self, metrics: Mapping[str, DeclaredMetric]) -> None:
        self.metrics = dict(metrics)
        self.plan = Plan.of({name: metric.states() for name, metric in metrics.items()})
        self._rings = {n: m for n, m in self.metrics.items() if isinstance(m, Running)}
        self._fading = {n: m for n, m in self.metrics.items() if isinstance(m, Ema)}
        self._told: dict[bool, tuple[str, Finish]] = {}

    @property
    def vectors(self) -> list[str]:
        """The flat vectors that a state has."""
        wide = jnp.result_type(float) == np.float64
        has_rest = "sum" in self.plan.widths and not wide
        return [*self.plan.widths, *([REST] if has_rest else [])]

    def told(self) -> tuple[str, Finish]:
        """Give what the metrics say of themselves, and what makes values of their states."""
        rest = REST in self.vectors
        if rest not in self._told:
            self._told[rest] = told(self.metrics, rest=rest)
        return self._told[rest]

    def shapes(self) -> dict[str, Any]:
        """Give the shapes of all arrays in a state."""
        sums = {REST: self.plan.widths.get("sum", 0)}
        shapes: dict[str, Any] = {n: ({**self.plan.widths, **sums}[n],) for n in self.vectors}
        for name, metric in self._rings.items():
            slots = self.plan.by_owner[name].items()
            parts = {key: (metric.n, slot.size) for key, slot in slots}
            shapes[_ring(name)] = {"parts": parts, "cursor": ()}
        return shapes

    def init(self) -> Tree:
        """Give the state of metrics that have seen nothing."""
        state: Tree = {o: _identity(o, width) for o, width in self.plan.widths.items()}
        if REST in self.vectors:
            state[REST] = jnp.zeros_like(state["sum"])
        for name, metric in self._rings.items():
            state[_ring(name)] = _new_ring(metric, self.plan.by_owner[name])
        return state

    def enter(self, state: Tree, batches: Batches) -> Tree:
        """Give the state after what a batch contributes to each metric."""
        for name, batch in batches.items():
            kind, slots = type(self.metrics[name]).__name__, self.plan.by_owner[name]
            check_contributions(kind, slots, batch, (jax.Array, np.ndarray, np.generic))
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
            else:  # of its own, or donating one state would take it from the other
                new[_ring(name)] = jax.tree.map(_copied, state[_ring(name)])
        return new

    def merge(self, a: Tree, b: Tree) -> Tree:
        """Give the state of two together, the second of which came later."""
        merged = self._merged(a, b)
        for name in self._rings:
            merged[_ring(name)] = self._ring_of(name, merged)
        return merged

    def reduce(self, state: Tree, axis_name: Any) -> Tree:
        """Give the state of all devices along some axes together: one all-reduce."""
        axes, size = bound(axis_name, "reduce", "update")
        large = [name for name in _sums(state) if size * state[name].size > _MOST_PLACES]
        merged = {name: lax.psum(state[name], axes) for name in large}
        small = {name: state[name] for name in self.vectors if name not in large}
        if small:
            merged |= self._by_places(small, axes, size)
        for name in self._rings:
            merged[_ring(name)] = self._ring_of(name, merged)
        return merged

    def by_metric(self, flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Give every state of every metric from the flat vectors, of which REST has been added."""
        return {
            owner: {n: flat[s.operator][s.here].reshape(s.shape) for n, s in slots.items()}
            for owner, slots in self.plan.by_owner.items()
        }

    def _by_places(self, vectors: Tree, axes: tuple[str, ...], size: int) -> Tree:
        """Merge the vectors of all devices: exact, whatever the operator."""
        flat = jnp.concatenate(list(vectors.values()))
        places = jnp.zeros((size, flat.size), flat.dtype).at[lax.axis_index(axes)].set(flat)
        # A sum of what each put into a place of its own: so JAX sees that all get the same.
        sizes = {name: vector.size for name, vector in vectors.items()}
        parts = _split(lax.psum(places, axes), sizes)
        merged = {name: part[0] for name, part in parts.items()}
        if size > 1:  # a scan of nothing fails where jit is disabled
            others = {name: part[1:] for name, part in parts.items()}
            merged, _ = lax.scan(lambda a, b: (self._merged(a, b), None), merged, others)
        return merged

    def _merged(self, a: Tree, b: Tree) -> Tree:
        merged = {o: OPERATORS[o].merge(ARRAYS, a[o], b[o]) for o in self.plan.widths if o in a}
        if REST in a:
            merged |= _added(a, (b["sum"], b[REST]))
        return merged

    def _contributed(self, operator: str, state: Tree, batches: Batches) -> Any:
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

    def _faded(self, state: Tree, batches: Batches) -> Tree:
        """Give the sums, of which some fade before anything is added."""
        for name, metric in self._fading.items():
            if name in batches:
                for slot in self.plan.by_owner[name].values():
                    faded = {v: state[v].at[slot.here].multiply(metric.decay) for v in _sums(state)}
                    state = {**state, **faded}
        return state

    def _turned(self, state: Tree, name: str, batch: Mapping[str, Any]) -> Tree:
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

    def _ring_of(self, name: str, flat: Mapping[str, Any]) -> Tree:
        """Give a ring in which what is there counts as one update."""
        ring = _new_ring(self._rings[name], self.plan.by_owner[name])
        for key, slot in self.plan.by_owner[name].items():
            ring["parts"][key] = ring["parts"][key].at[0].set(flat[slot.operator][slot.here])
        return ring


def _identity(operator: str, width: int) -> Any:
    numbers = OPERATORS[operator].identity
    return jnp.asarray(np.tile(np.array(numbers), width // len(numbers)), jnp.result_type(float))


def _sums(state: Tree) -> list[str]:
    return [name for name in ("sum", REST) if name in state]


def _added(state: Tree, more: tuple[Any, Any]) -> Tree:
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
    """Give a contribution as flat floats, and what of a number with more digits does not fit."""
    wide = jnp.result_type(float)
    rest: Any = np.zeros(slot.size)
    if isinstance(value, tuple):
        value, rest = value
    elif isinstance(value, int | float):
        high = np.asarray(value, wide)
        if np.isfinite(high):
            rest += value - (int(high) if isinstance(value, int) else float(high))
        value = high
    elif ARRAYS.is_whole(value) and value.dtype != np.bool_:
        value, rest = split(jnp.asarray(value))
    flat = jnp.asarray(value, wide).reshape(slot.size)
    return flat, jnp.asarray(rest, wide).reshape(slot.size)


def _copied(array: Any) -> Any:
    return array if isinstance(array, Tracer) else jnp.copy(array)


def _next(state: Any, order: Any, value: Any) -> Any:
    """Give order and value of what comes after all others, if it has no order of its own."""
    if order is None:
        order = jnp.maximum(state[0], 0.0) + 1.0
    return jnp.stack([jnp.asarray(x, state.dtype) for x in (order, value)])


def _ring(name: str) -> str:
    return f"ring {name}".rstrip()


def _new_ring(metric: Running, slots: Mapping[str, Slot]) -> Tree:
    parts = {
        key: jnp.tile(_identity(slot.operator, slot.size), (metric.n, 1))
        for key, slot in slots.items()
    }
    return {"parts": parts, "cursor": jnp.asarray(1 % metric.n, jnp.int32)}


def _together(slot: Slot, parts: Any) -> Any:
    """Merge what is in a ring."""
    merge = OPERATORS[slot.operator].merge
    if len(parts) == 1:  # a scan of nothing fails where jit is disabled
        return parts[0]
    merged, _ = lax.scan(lambda a, b: (merge(ARRAYS, a, b), None), parts[0], parts[1:])
    return merged


def _split(flat: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    ends = np.cumsum(list(sizes.values()))[:-1].tolist()
    return dict(zip(sizes, jnp.split(flat, ends, axis=1), strict=True))


def to_host(state: Tree) -> dict[str, np.ndarray[Any, Any]]:
    """Give the flat vectors in float64 on the host, with one transfer."""
    vectors = {name: value for name, value in state.items() if not isinstance(value, dict)}
    return {n: np.asarray(v, np.float64) for n, v in jax.device_get(vectors).items()}
