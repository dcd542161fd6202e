"""The catalogue of metrics as pure functions: a state goes in, a state comes out.

    >>> import jax.numpy as jnp
    >>> from everyrank.jax.metrics import Mean
    >>> loss = Mean()
    >>> state = loss.init()
    >>> state = loss.update(state, jnp.array([1.0, 2.0]))    # also under jit, scan, vmap, shard_map
    >>> state = loss.update(state, 6.0)
    >>> loss.compute(state), loss.read(state)
    (Array(3., dtype=float32), 3.0)

Every metric of `everyrank.metrics` is here by the same name, and it is the same: what a batch
contributes and how it is finished is written once. `Collection(loss=Mean(), ...)` does many at once,
in as few arrays however many metrics there are. One that you declared yourself is
`pure(YourMetric())`.

* **State.** A dict of arrays of fixed shapes and dtypes, which you may donate, scan over and save.
* **Exact.** Sums are kept as two float32 where JAX has no float64: counts are exact to 2**48. `read`
  puts the two together in float64, on the host.
* **Devices.** Where a program sees whole arrays (jit over a mesh), `update` is all there is to it. In
  `shard_map` and `pmap`, where each device has a state of its own, `reduce` brings these together with
  one all-reduce.
* **History.** `history.update({"train/loss": loss.at(state)})` records the value over all processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import everyrank.metrics
from everyrank.arrays.jax import ARRAYS
from everyrank.errors import MetricError, OptionError
from everyrank.handed import Handed
from everyrank.jax.states import REST, State, States, to_host
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.handing import as_plain, told

#: Arguments of `update`.
_Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class Pure:
    """Metrics as functions of a state; see the head of this module.

    One metric takes what its `update` takes. A collection takes a dict, by name, of values, of tuples
    of arguments or of dicts of keyword arguments; or anything else, for all of them.
    """

    def __init__(self, metrics: Mapping[str, DeclaredMetric]) -> None:
        self._states = States(metrics)
        self._alone = list(metrics) == [""]

    def __repr__(self) -> str:
        metrics = self._states.metrics
        if self._alone:
            return repr(metrics[""])
        return f"Collection({', '.join(f'{name}={m!r}' for name, m in metrics.items())})"

    def init(self) -> State:
        """Give the state of metrics that have seen nothing."""
        return self._states.init()

    def update(self, state: State, *args: Any, **kwargs: Any) -> State:
        """Give the state after one batch."""
        self._check(state)
        metrics = self._states.metrics
        calls = {"": (args, kwargs)} if self._alone else dict(self._calls(args, kwargs))
        return self._states.enter(state, {n: _batch(metrics[n], *c) for n, c in calls.items()})

    def merge(self, a: State, b: State) -> State:
        """Give the state of two together, the second of which came later."""
        self._check(a)
        self._check(b)
        return self._states.merge(a, b)

    def reduce(self, state: State, axis_name: str | tuple[str, ...] = "batch") -> State:
        """Give the state of all devices together; call it on each, inside `shard_map` or `pmap`."""
        self._check(state)
        return self._states.reduce(state, axis_name)

    def compute(self, state: State) -> Any:
        """Give the value, also under jit; of a collection a dict of values."""
        self._check(state)
        return self._finished(state)

    def read(self, state: State) -> Any:
        """Give the value as numbers of the host, from float64; waits for the device."""
        self._check(state)
        with np.errstate(all="ignore"):
            return as_plain(self._finished(to_host(state)))

    def at(self, state: State) -> At:
        """Give what `History.update` takes: these metrics as they are in a state."""
        self._check(state)
        return At(self._states, state)

    def _finished(self, state: Mapping[str, Any]) -> Any:
        flat = {name: state[name] for name in self._states.plan.widths}
        if REST in state:
            flat["sum"] = state["sum"] + state[REST]
        states = self._states.by_metric(flat)
        values = {name: m.finish(**states[name]) for name, m in self._states.metrics.items()}
        return values[""] if self._alone else values

    def _calls(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, _Call]]:
        """Say which metric is called with what."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
            for name in self._states.metrics:
                yield name, (args, kwargs)
            return
        for name, value in args[0].items():
            if name not in self._states.metrics:
                raise MetricError(
                    f"{name!r} is no metric of this collection, which has "
                    f"{', '.join(self._states.metrics)}."
                )
            if isinstance(value, tuple):
                yield name, (value, {})
            else:
                yield name, ((), value) if isinstance(value, Mapping) else ((value,), {})

    def _check(self, state: Any) -> None:
        """Refuse what is no state of these metrics, by what can be seen from outside."""
        vectors = self._states.vectors
        sizes = {
            name: self._states.plan.widths["sum" if name == REST else name] for name in vectors
        }
        found = state if isinstance(state, Mapping) else {}
        shapes = {n: getattr(v, "shape", None) for n, v in found.items() if not isinstance(v, dict)}
        if shapes != {name: (size,) for name, size in sizes.items()}:
            raise MetricError(
                f"state={jax.tree.map(lambda x: getattr(x, 'shape', x), state)!r} is none of {self!r}. "
                "Hand over what its init() or update() has given."
            )


class At:
    """Metrics as they are in one state, for `History.update`."""

    framework = "jax"

    def __init__(self, states: States, state: State) -> None:
        self._states = states
        self._state = state

    def hand_over(self, name: str) -> Handed:
        """Give the states as one array."""
        vectors = self._states.vectors
        spec, finish = told(self._states.metrics, rest=REST in vectors)
        state = self._state
        if not all(_is_here(state[vector]) for vector in vectors):
            state = self._own_part(name)
        array = jnp.concatenate([state[vector] for vector in vectors])
        keys = tuple(self._states.metrics)
        return Handed(spec, array, keys, finish, done=lambda: None)

    def _own_part(self, name: str) -> State:
        """Give this process's part of a state that all processes have: the first one hands it over.

        A jitted step over a mesh of several processes has seen the samples of all of them.
        """
        state = {vector: self._state[vector] for vector in self._states.vectors}
        for vector, array in state.items():
            if not array.is_fully_replicated:
                raise MetricError(
                    f"{name!r} is a state of which this process holds a part only ({vector!r} is cut "
                    "along a mesh). Call its reduce() inside the jitted function."
                )
        devices = next(iter(state.values())).sharding.device_set
        first = min(device.process_index for device in devices)
        if jax.process_index() != first:
            return self._states.init()
        return {vector: array.addressable_data(0) for vector, array in state.items()}


def _is_here(array: Any) -> bool:
    """Say whether all of an array can be read from this process; a tracer is refused later."""
    return isinstance(array, Tracer) or bool(array.is_fully_addressable)


def pure(metric: DeclaredMetric) -> Pure:
    """Give a declared metric as functions of a state."""
    if not isinstance(metric, DeclaredMetric):
        raise OptionError(
            f"metric={metric!r} must be a declared metric, an object such as everyrank.metrics.Mean()."
        )
    return Pure({"": metric})


def collection(metrics: Mapping[str, Pure] | None = None, /, **named: Pure) -> Pure:
    """Give many metrics as one: by name, in as few arrays as one of them has."""
    inside = {}
    for name, metric in {**(metrics or {}), **named}.items():
        if not isinstance(metric, Pure) or not metric._alone:
            raise OptionError(
                f"{name!r} is {metric!r}, and no metric of everyrank.jax.metrics. Pass an object of "
                "it, such as Mean()."
            )
        inside[name] = metric._states.metrics[""]
    return Pure(inside)


def _batch(
    metric: DeclaredMetric, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    if not metric.texts:
        args, kwargs = tuple(map(_taken, args)), {n: _taken(arg) for n, arg in kwargs.items()}
    return metric.batch(*args, **kwargs)


def _taken(value: Any) -> Any:
    """Give numbers, numpy arrays and lists of numbers as arrays."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic | list):
        return ARRAYS.array(value)
    return value


def _moving(kind: Any, metric: Any, *args: Any, **kwargs: Any) -> Pure:
    inside = metric._states.metrics[""] if isinstance(metric, Pure) and metric._alone else metric
    return pure(kind(inside, *args, **kwargs))


def _made(kind: Any, *args: Any, **kwargs: Any) -> Pure:
    return pure(kind(*args, **kwargs))


def __getattr__(name: str) -> Any:
    if name == "Collection":
        return collection
    kind = getattr(everyrank.metrics, name, None)
    if not isinstance(kind, type) or not issubclass(kind, DeclaredMetric):
        raise AttributeError(f"module 'everyrank.jax.metrics' has no attribute {name!r}")
    return partial(_moving if kind.moving else _made, kind)


def __dir__() -> list[str]:
    return sorted({*globals(), *everyrank.metrics.__all__})
