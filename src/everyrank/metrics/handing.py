"""Handing declared metrics over to a History: what they say of themselves, and how they are finished.

    history.update({"train/accuracy": accuracy, "loss": loss})

The states of the metric are copied with the other values of the update, reach the other ranks in the
rows of its window, and the value over all ranks is recorded under the metric's name; the metric begins
its next window. A collection is handed over as one, and its values are `train/loss`, `train/accuracy`.

What a metric says of itself are its class, its options and its states, so that a rank which was handed
nothing, such as the one that writes while another stage of a pipeline has the loss, can finish it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from everyrank.handed import Finish, Floats, Handed
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import Plan, Slot


def hand_over(metrics: Mapping[str, DeclaredMetric], name: str) -> Handed:
    """Hand over one metric, under the name "", or all those of a collection."""
    cycle = next(iter(metrics.values()))._opened()
    owners = tuple([metric._owner for metric in metrics.values()])
    if owners not in cycle.about:  # which takes 0.2 ms for twenty metrics
        cycle.about[owners] = told(metrics, framework="torch")
    spec, finish = cycle.about[owners]
    return Handed(
        spec=spec,
        array=cycle.exported(owners, name),
        keys=tuple(metrics),
        finish=finish,
        done=lambda: cycle.handed_over(owners),
    )


def told(
    metrics: Mapping[str, DeclaredMetric], *, rest: bool = False, framework: str = "numpy"
) -> tuple[str, Finish]:
    """Give what metrics say of themselves, and what makes values of their merged states.

    The states travel by operator, each in the order of the plan; with `rest`, a second vector of sums
    follows, of what the first has lost. They are finished as arrays of `framework`, torch or numpy,
    since a formula may ask for tensors.
    """
    plan = Plan.of({key: metric.states() for key, metric in metrics.items()})
    about = {"metrics": {k: _told(m) for k, m in metrics.items()}, "states": _states(plan, rest)}
    return json.dumps(about, sort_keys=True), _finish(metrics, plan, rest, framework)


def made_again(spec: Mapping[str, Any]) -> Finish | None:
    """Make metrics of what another rank said of them; None if one is not known here."""
    try:
        metrics = {key: _made(one) for key, one in spec["metrics"].items()}
    except _Unknown:
        return None
    plan = Plan.of({key: metric.states() for key, metric in metrics.items()})
    for rest in (False, True):
        if _states(plan, rest) == spec["states"]:
            # Torch where there is torch: the formula was written for it, unless it says otherwise.
            framework = "torch" if sys.modules.get("torch") and not rest else "numpy"
            return _finish(metrics, plan, rest, framework)
    return None


def _states(plan: Plan, rest: bool) -> list[list[Any]]:
    """Give the operators in the order in which the states travel, with how many numbers each has."""
    states = [[operator, width] for operator, width in plan.widths.items()]
    return [*states, ["sum", plan.widths["sum"]]] if rest else states


def _told(value: Any) -> Any:
    """Say what a metric or one of its options is, in what JSON has."""
    if isinstance(value, DeclaredMetric):
        kind, (args, kwargs) = type(value), value._made_of
        return {
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "args": [_told(arg) for arg in args],
            "kwargs": {name: _told(arg) for name, arg in kwargs.items()},
        }
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_told(entry) for entry in value]}
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else {"unknown": repr(value)}


def _made(told: Any) -> Any:
    """Make a metric or an option again; raises `_Unknown` for what cannot be."""
    if not isinstance(told, Mapping):
        return told
    for name, make in (("tuple", tuple), ("list", list)):
        if name in told:
            return make(_made(entry) for entry in told[name])
    if "class" not in told:
        raise _Unknown
    module, _, qualname = told["class"].partition(":")
    if module.startswith("everyrank.metrics."):
        import_module(module)
    # Only what the program itself has imported is looked at: a message of another rank names it.
    kind = getattr(sys.modules.get(module), qualname, None)
    if not (isinstance(kind, type) and issubclass(kind, DeclaredMetric)):
        raise _Unknown
    args, kwargs = map(_made, told["args"]), told["kwargs"]
    return kind(*args, **{name: _made(arg) for name, arg in kwargs.items()})


class _Unknown(Exception):  # noqa: N818 - is caught in here
    """Something that another rank has, and this one does not know."""


def _finish(
    metrics: Mapping[str, DeclaredMetric], plan: Plan, rest: bool, framework: str
) -> Finish:
    """Give what makes values of merged states."""
    starts, at = {}, 0
    for operator, width in plan.widths.items():
        starts[operator], at = at, at + width

    def finish(vector: Floats) -> Any:
        if rest:
            vector = vector.copy()
            vector[starts["sum"] : starts["sum"] + plan.widths["sum"]] += vector[at:]
        values = {}
        for key, metric in metrics.items():
            states = _states_of(plan.by_owner[key], starts, vector, framework)
            with np.errstate(all="ignore"):
                values[key] = as_plain(metric.finish(**states))
        return values if list(values) != [""] else values[""]

    return finish


def _states_of(
    slots: Mapping[str, Slot], starts: Mapping[str, int], vector: Floats, framework: str
) -> dict[str, Any]:
    array: Callable[[Any], Any] = np.array
    if framework == "torch":
        array = import_module("torch").tensor
    states = {}
    for name, slot in slots.items():
        start = starts[slot.operator] + slot.here.start
        states[name] = array(vector[start : start + slot.size].reshape(slot.shape))
    return states


def as_plain(value: Any) -> Any:
    """Give numbers and arrays of the host; what has fields is a dict of them."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        return {str(f): as_plain(entry) for f, entry in zip(fields, value, strict=True)}
    if isinstance(value, Mapping):
        return {str(key): as_plain(entry) for key, entry in value.items()}
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    return array.item() if array.ndim == 0 else array
