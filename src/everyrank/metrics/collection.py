"""Many metrics as one: updated by name, brought together in one or two collectives, read at once.

    >>> import torch
    >>> from everyrank.metrics import Accuracy, Collection, Mean
    >>> metrics = Collection(loss=Mean(), accuracy=Accuracy(classes=3))
    >>> predictions, targets = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2, 1])
    >>> metrics.update({"loss": torch.tensor(0.5), "accuracy": (predictions, targets)})
    >>> metrics.sync()
    >>> metrics.read()
    {'loss': 0.5, 'accuracy': 0.75}

The states of all declared metrics lie in one flat vector for each operator. A metric that somebody
wrote by hand has a place here as well, and brings its ranks together by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from everyrank.errors import MetricError, OptionError
from everyrank.metrics.base import Metric
from everyrank.metrics.declared import DeclaredMetric

if TYPE_CHECKING:
    from everyrank.handed import Handed
    from everyrank.metrics.torch.cycle import Cycle


class Collection(Metric, Mapping[str, Metric]):
    """Metrics by name, which go through their windows together.

    `update` takes a dict of what each metric gets: one value, a tuple of arguments, or a dict of
    keyword arguments. Anything else is handed to every metric alike.

        metrics = Collection({"train/loss": Mean(), "train/accuracy": Accuracy(classes=10)})
        metrics.update({"train/loss": loss, "train/accuracy": (logits, targets)})
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None, /, **named: Metric) -> None:
        self._metrics = {**(metrics or {}), **named}
        for name, metric in self._metrics.items():
            _check(name, metric)
        if len(set(map(id, self._metrics.values()))) < len(self._metrics):
            raise OptionError(
                f"metrics={self._metrics!r} holds one object under two names. Make one for each."
            )
        declared = {n: m for n, m in self._metrics.items() if isinstance(m, DeclaredMetric)}
        self._others = {n: m for n, m in self._metrics.items() if n not in declared}
        self._cycle = _cycle_of(declared) if declared else None

    def __getitem__(self, name: str) -> Metric:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def __repr__(self) -> str:
        return f"Collection({', '.join(f'{n}={m!r}' for n, m in self._metrics.items())})"

    def __eq__(self, other: object) -> bool:
        return self is other  # not, as other mappings, by what is in it

    def __hash__(self) -> int:
        return id(self)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in a batch: by name, or the same arguments for all."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
            for metric in self._metrics.values():
                metric.update(*args, **kwargs)
            return
        (batch,) = args
        if self._cycle is not None and self._cycle.update_numbers(batch):
            return
        for name, metric in [(name, self._named(name)) for name in batch]:
            value = batch[name]
            if isinstance(value, tuple):
                metric.update(*value)
            elif isinstance(value, Mapping):
                metric.update(**value)
            else:
                metric.update(value)

    def trigger_sync(self, context: Any = None) -> None:
        """Start bringing the ranks of `context` together for all metrics, and return."""
        if self._cycle is not None:
            self._cycle.trigger_sync(context)
        for metric in self._others.values():
            metric.trigger_sync(context)

    def wait_sync(self, context: Any = None) -> None:
        """Wait until the ranks have been brought together."""
        if self._cycle is not None:
            self._cycle.wait_sync()
        for metric in self._others.values():
            metric.wait_sync(context)

    def sync(self, context: Any = None) -> None:
        """Bring the ranks together, and wait for it."""
        if self._cycle is not None:
            self._cycle.sync(context)
        for metric in self._others.values():
            metric.sync(context)

    def compute(self) -> dict[str, Any]:
        """Give the value of each metric by its name."""
        values = self._cycle.compute_all() if self._cycle is not None else {}
        if not self._others:
            return values
        return {n: values[n] if n in values else m.compute() for n, m in self._metrics.items()}

    def read(self) -> dict[str, Any]:
        """Give the values as numbers of the host, with one copy; waits for the device.

        A value of several numbers is a list.
        """
        from everyrank.metrics.torch.finish import on_host

        if self._cycle is not None and not self._others:
            return self._cycle.read_all()
        return on_host(self.compute())

    def reset(self) -> None:
        """Begin the next window of all metrics."""
        if self._cycle is not None:
            self._cycle.reset(list(self._cycle.metrics))
        for metric in self._others.values():
            metric.reset()

    def to(self, device: Any) -> Collection:
        """Keep the numbers of all metrics on a device."""
        if self._cycle is not None:
            self._cycle.to(device)
        for metric in self._others.values():
            metric.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs; waits for no other rank."""
        state = self._cycle.state_dict(list(self._cycle.metrics)) if self._cycle is not None else {}
        if self._others:
            state["others"] = {name: m.state_dict() for name, m in self._others.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, here or on more or fewer ranks."""
        if self._cycle is not None:
            self._cycle.load_state_dict(state_dict, list(self._cycle.metrics))
        for name, state in state_dict.get("others", {}).items():
            if name in self._others:
                self._others[name].load_state_dict(state)

    framework = "torch"

    def hand_over(self, name: str) -> Handed:
        """Give all states to a History, which asks for them when `update` gets this collection."""
        from everyrank.metrics.handing import hand_over

        if self._others or self._cycle is None:
            raise MetricError(
                f"{name!r} holds metrics that do not declare their states "
                f"({', '.join(self._others) or 'it is empty'}). Call its sync(), and hand over what "
                "compute() gives."
            )
        return hand_over(self._cycle.metrics, name)

    def _named(self, name: str) -> Metric:
        metric = self._metrics.get(name)
        if metric is None:
            raise MetricError(
                f"{name!r} is no metric of this collection, which has {', '.join(self._metrics)}."
            )
        return metric


def _check(name: str, metric: Any) -> None:
    if not isinstance(name, str) or not name:
        raise OptionError(f"the name {name!r} of a metric must be a text, such as 'train/loss'.")
    if not isinstance(metric, Metric):
        what = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
        raise OptionError(f"{name!r} is {what}, and no metric. Pass an object, such as Mean().")
    if isinstance(metric, DeclaredMetric) and metric._owner:
        raise OptionError(
            f"{name!r} is in a collection already, as {metric._owner!r}. A metric is in one only."
        )


def _cycle_of(metrics: Mapping[str, DeclaredMetric]) -> Cycle:
    """Open one cycle for all, which goes on with what each of them has."""
    from everyrank.metrics.torch.cycle import Cycle

    cycle = Cycle(metrics)
    for name, metric in metrics.items():
        cycle.adopt(name, metric._opened())
    for name, metric in metrics.items():
        metric._cycle, metric._owner = cycle, name
    return cycle
