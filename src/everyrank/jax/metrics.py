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
* **Exact.** Sums are kept as two float32 where JAX has no float64: counts are exact to 2**48, and
  `read` puts the two together in float64, on the host. `compute` is a float32, also of these. Means
  and squares about them (`Std`, `R2Score`) are single float32: past 2**24 samples a count of these
  stands still if each update brings one.
* **Devices.** Where a program sees whole arrays (jit over a mesh), `update` is all there is to it. In
  `shard_map` and `pmap`, where each device sees its own part, `reduce` brings these together with one
  all-reduce. Reduce what is new, and merge it to what was there before:

      def step(state, x):  # with in_specs=(P(), P("batch")), out_specs=P()
          return loss.merge(state, loss.reduce(loss.update(loss.init(), x), "batch"))

  `loss.reduce(loss.update(state, x))` would count the old state once for each device.
* **History.** `history.update({"train/loss": loss.at(state)})` records the value over all processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import everyrank.metrics
from everyrank.arrays.jax import ARRAYS
from everyrank.errors import MetricError, OptionError
from everyrank.handed import Handed
from everyrank.jax.states import REST, States, Tree, to_host
from everyrank.metrics.catalogue import aggregate
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.handing import as_plain

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

    def init(self) -> Tree:
        """Give the state of metrics that have seen nothing.

        What a scan inside `shard_map` carries differs from device to device, which JAX wants said:
        `jax.lax.pcast(metrics.init(), "batch", to="varying")`.
        """
        return self._states.init()

    def update(self, state: Tree, *args: Any, **kwargs: Any) -> Tree:
        """Give the state after one batch."""
        state = self._checked(state)
        mesh = _explicit_mesh((args, kwargs, state))
        if mesh is None:
            return self._updated(state, args, kwargs)
        # Shardings are worked out by the compiler: no metric says how each of its arrays is cut.
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        if isinstance(mesh, jax.sharding.Mesh):  # outside of jit
            state = jax.device_put(state, whole)
        updated = jax.sharding.auto_axes(self._updated, out_sharding=whole)
        return updated(state, args, kwargs)  # type: ignore[no-any-return]

    def merge(self, a: Tree, b: Tree) -> Tree:
        """Give the state of two together, the second of which came later."""
        return self._states.merge(self._checked(a), self._checked(b))

    def reduce(self, state: Tree, axis_name: str | tuple[str, ...] = "batch") -> Tree:
        """Give the state of all devices together; call it on each, inside `shard_map` or `pmap`.

        Each state must be of what its device alone has seen: of a state that all devices have, the old
        samples would count once for each. The head of this module shows how to accumulate.
        """
        return self._states.reduce(self._checked(state), axis_name)

    def compute(self, state: Tree) -> Any:
        """Give the value, also under jit; of a collection a dict of values.

        Without 64 bits it is a float32; `read` has all digits.
        """
        return self._finished(self._checked(state))

    def read(self, state: Tree) -> Any:
        """Give the value as numbers of the host, from float64; waits for the device."""
        with np.errstate(all="ignore"):
            return as_plain(self._finished(to_host(self._checked(state))))

    def at(self, state: Tree) -> At:
        """Give what `History.update` takes: these metrics as they are in a state."""
        return At(self._states, self._checked(state))

    def _updated(self, state: Tree, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tree:
        metrics = self._states.metrics
        calls = {"": (args, kwargs)} if self._alone else dict(self._calls(args, kwargs))
        for name, call in calls.items():
            _check_call(metrics[name], *call)
        return self._states.enter(state, {n: _batch(metrics[n], *c) for n, c in calls.items()})

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

    def _checked(self, state: Any) -> Tree:
        """Give the state as dicts; refuse what is none of these metrics, as far as shapes tell."""
        if _shapes(state) != self._states.shapes():
            raise MetricError(
                f"state={jax.tree.map(lambda x: getattr(x, 'shape', x), state)!r} is none of {self!r}. "
                "Hand over what its init() or update() has given."
            )
        return _as_dicts(state)  # type: ignore[no-any-return]


def _explicit_mesh(tree: Any) -> Any:
    """Give the mesh of an array whose type says how it is cut, which only newer versions have."""
    if not hasattr(jax.sharding, "auto_axes"):
        return None
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            mesh = jax.typeof(leaf).sharding.mesh
            if jax.sharding.AxisType.Explicit in mesh.axis_types:
                return getattr(getattr(leaf, "sharding", None), "mesh", mesh)
    return None


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _shapes(value) for name, value in tree.items()}
    return getattr(tree, "shape", None)


def _as_dicts(tree: Any) -> Any:
    """Give plain dicts of what may be mappings of another library's."""
    if isinstance(tree, Mapping):
        return {name: _as_dicts(value) for name, value in tree.items()}
    return tree


class At:
    """Metrics as they are in one state, for `History.update`."""

    framework = "jax"

    def __init__(self, states: States, state: Tree) -> None:
        self._states = states
        self._state = state

    def hand_over(self, name: str) -> Handed:
        """Give the states as one array."""
        vectors = self._states.vectors
        spec, finish = self._states.told()
        state = {vector: self._state[vector] for vector in vectors}
        for array in state.values():
            _check_alive(name, array)
        if not all(map(_is_here, state.values())):
            state = self._own_part(name)
        array = _joined(name, list(state.values()))
        return Handed(spec, array, tuple(self._states.metrics), finish, done=lambda: None)

    def _own_part(self, name: str) -> Tree:
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
    if isinstance(array, Tracer) or not isinstance(array, jax.Array):
        return True
    return bool(array.is_fully_addressable)


def _check_alive(name: str, array: Any) -> None:
    if isinstance(array, jax.Array) and not isinstance(array, Tracer) and array.is_deleted():
        raise MetricError(
            f"{name!r} is a state that was deleted, or donated to a jitted function. Hand over the "
            "state which that function returned."
        )


def _joined(name: str, arrays: list[Any]) -> Any:
    try:
        return jnp.concatenate(list(map(jnp.asarray, arrays)))
    except ValueError as error:
        raise MetricError(
            f"{name!r} is a state whose arrays cannot be brought together: {error}. Put them on one "
            "device first, with jax.device_put(state, device)."
        ) from error


def pure(metric: DeclaredMetric) -> Pure:
    """Give a declared metric as functions of a state."""
    if not isinstance(metric, DeclaredMetric):
        raise OptionError(
            f"metric={metric!r} must be a declared metric, an object such as everyrank.metrics.Mean()."
        )
    return Pure({"": metric})


def Collection(metrics: Mapping[str, Pure] | None = None, /, **named: Pure) -> Pure:  # noqa: N802
    """Give many metrics as one: by name, in as few arrays as one of them has."""
    if not isinstance(metrics, Mapping | None):
        raise OptionError(
            f"metrics={metrics!r} must be a dict of metrics by name. Pass one, such as "
            "Collection(loss=Mean())."
        )
    inside = {}
    for name, metric in {**(metrics or {}), **named}.items():
        if not name or not isinstance(name, str):
            raise OptionError(f"{name!r} is no name of a metric: it must be a str with characters.")
        if not isinstance(metric, Pure) or not metric._alone:
            raise OptionError(
                f"{name!r} is {metric!r}, and no metric of everyrank.jax.metrics. Pass an object of "
                "it, such as Mean()."
            )
        inside[name] = metric._states.metrics[""]
    return Pure(inside)


def _check_call(metric: DeclaredMetric, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the metric could only stumble over."""
    inside: Any = metric.metric if metric.moving else metric  # type: ignore[attr-defined]
    try:
        given = _signature(inside.__class__).bind(inside, *args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"update() of {metric!r}: {error}") from None
    for name, value in given.items():
        if _is_complex(value):
            raise MetricError(
                f"`{name}` of {metric!r} is {jnp.result_type(value)}, of which there are no metrics. "
                f"Give real numbers, such as abs({name})."
            )
    leaves = jax.tree.leaves((args, dict(kwargs)))
    if getattr(inside, "validate", False) and any(isinstance(leaf, Tracer) for leaf in leaves):
        raise MetricError(
            f"{metric!r}: validate reads values, which do not exist yet inside a jitted function. Call "
            "update() outside, or leave it off: what is no label makes the result NaN."
        )


def _is_complex(value: Any) -> bool:
    dtype = getattr(value, "dtype", type(value))
    return dtype is complex or (
        dtype is not type(value) and bool(jnp.issubdtype(dtype, jnp.complexfloating))
    )


@cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.batch)


def _batch(
    metric: DeclaredMetric, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    if metric.texts:
        return metric.batch(*args, **kwargs)
    given = [*args, *kwargs.values()]
    if metric.of_number is not None and len(given) == 1:
        number = _number(given[0])
        if number is not None:
            return {n: number if s is None else s for n, s in metric.of_number.items()}
    if type(metric) in (aggregate.Sum, aggregate.Mean) and _is_whole(given[0]):
        return _of_integers(metric, given[0])
    return metric.batch(*map(_taken, args), **{n: _taken(arg) for n, arg in kwargs.items()})


def _number(value: Any) -> int | float | None:
    """Give a single number of the host with all its digits."""
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    return value if isinstance(value, int | float) else None


def _is_whole(value: Any) -> bool:
    """Say whether it is an array of integers that a float may not hold."""
    return isinstance(value, jax.Array | np.ndarray) and (
        value.dtype.kind in "iu" and ARRAYS.is_whole(value)
    )


def _of_integers(metric: DeclaredMetric, values: Any) -> Mapping[str, Any]:
    """Say what integers contribute to a sum or a mean, to the last digit of what sums keep."""
    host = isinstance(values, np.ndarray)
    total = int(values.sum()) if host else ARRAYS.exact_total(values)
    return (
        {"total": total}
        if type(metric) is aggregate.Sum
        else {"total": total, "count": values.size}
    )


def _taken(value: Any) -> Any:
    """Give numbers, numpy arrays and lists of numbers as arrays."""
    if isinstance(value, bool | int | float | np.ndarray | np.generic | list):
        return ARRAYS.array(value)
    return value


@cache
def _maker(kind: type[DeclaredMetric]) -> Callable[..., Pure]:
    """Give what makes a metric of a class, and looks like it to help() and to editors."""

    def make(*args: Any, **kwargs: Any) -> Pure:
        if kind.moving:
            args = tuple(map(_inside, args))
            kwargs = {name: _inside(arg) for name, arg in kwargs.items()}
        return pure(kind(*args, **kwargs))

    parameters: list[inspect.Parameter] = []
    if inspect.isfunction(kind.__init__):
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    make.__name__ = make.__qualname__ = kind.__name__
    make.__doc__ = kind.__doc__
    make.__signature__ = inspect.Signature(parameters, return_annotation=Pure)  # type: ignore[attr-defined]
    return make


def _inside(arg: Any) -> Any:
    return arg._states.metrics[""] if isinstance(arg, Pure) and arg._alone else arg


def _kind(name: str) -> type[DeclaredMetric] | None:
    kind = getattr(everyrank.metrics, name, None)
    declared = isinstance(kind, type) and issubclass(kind, DeclaredMetric)
    return kind if declared and kind is not DeclaredMetric else None


def __getattr__(name: str) -> Any:
    if name == "__all__":
        kinds = [name for name in everyrank.metrics.__all__ if _kind(name)]
        return sorted([*kinds, "Collection", "Pure", "pure"])
    kind = None if name.startswith("_") else _kind(name)
    if kind is None:
        raise AttributeError(f"module 'everyrank.jax.metrics' has no attribute {name!r}")
    return _maker(kind)


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names
