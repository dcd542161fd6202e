"""What a metric is to whoever runs one: seven verbs, and no state that you have to know of.

A metric goes round in windows:

1. `update`: take in a batch. Nothing is communicated, nothing is read from a device.
2. `trigger_sync`: start bringing the ranks together, and return.
3. `wait_sync`: wait until that is done.
4. `compute`: give the value.
5. `reset`: begin the next window.

Every rank of a group calls 2 and 3 at the same points of its program, as it does for any collective.
A class that has these verbs is a metric, however it keeps its numbers:

    class MaxMetric(Metric):
        def __init__(self):
            self._max, self._work = torch.tensor(float("-inf")), None
        def update(self, value):
            self._max = torch.maximum(self._max, value)
        def trigger_sync(self, context=None):
            self._work = dist.all_reduce(self._max, op=dist.ReduceOp.MAX, async_op=True)
        def wait_sync(self, context=None):
            self._work.wait()
        def compute(self):
            return self._max
        def reset(self):
            self._max.fill_(float("-inf"))

Most metrics need none of that by hand: see `declared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

_M = TypeVar("_M", bound="Metric")


class Metric(ABC):
    """The interface; it is also a `Stateful` of torch.distributed.checkpoint."""

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in one batch; never communicates, never waits for a device."""

    @abstractmethod
    def trigger_sync(self, context: Any = None) -> None:
        """Start bringing the ranks of `context` together, and return.

        `context` is a ProcessGroup, a DeviceMesh slice such as mesh["dp"], or None for all ranks.
        """

    @abstractmethod
    def wait_sync(self, context: Any = None) -> None:
        """Wait until the ranks have been brought together."""

    def sync(self, context: Any = None) -> None:
        """Bring the ranks together, and wait for it."""
        self.trigger_sync(context)
        self.wait_sync(context)

    @abstractmethod
    def compute(self) -> Any:
        """Give the value of the window."""

    @abstractmethod
    def reset(self) -> None:
        """Begin the next window."""

    def to(self: _M, device: Any) -> _M:
        """Keep the numbers on a device; metrics that follow their values need not do anything."""
        del device
        return self

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs; waits for no other rank."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        del state_dict
