"""Declare a metric: its states, what a batch contributes to each, and how to finish.

    class MeanAbsoluteError(DeclaredMetric):
        error = State("sum")
        count = State("sum")

        def batch(self, predictions, targets):
            xp = arrays_of(targets)     # wide: sums of half precision overflow
            error = abs(xp.wide(predictions) - xp.wide(targets))
            return {"error": xp.total(error), "count": targets.numel()}

        def finish(self, error, count):
            return error / count

That is all. Accumulating on the device, bringing ranks together, checkpoints, and History follow from
it; the laws that make them right are tested once, for every declared metric.

* `batch` gets what `update` got, with numbers, lists and numpy arrays as tensors, and gives a number
  or a tensor of the state's shape for each state. What it leaves out gets nothing from this batch.
* `finish` gets every state, merged over all batches and ranks, and gives the value. Where nothing was
  accumulated a sum is 0, and 0 / 0 is NaN, as it should be.
* `of_number`, if given, says what a single number contributes without calling `batch`: a number for
  each state, or None for the number itself. A collection takes in twenty of these with one kernel.

Written with the functions of `arrays_of(x)`, the same metric also serves JAX (`everyrank.jax`).
"""

from __future__ import annotations

import copy
import sys
from abc import ABCMeta
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from everyrank.errors import MetricError
from everyrank.metrics.base import Metric
from everyrank.metrics.states import Slot, State

if TYPE_CHECKING:
    from everyrank.handed import Handed
    from everyrank.metrics.torch.cycle import Cycle
    from everyrank.metrics.torch.numbers import Numbers

_D = TypeVar("_D", bound="DeclaredMetric")


class _Opened(ABCMeta):
    """Remember of what a metric was made, and open its cycle: a compiled step could not."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        metric = super().__call__(*args, **kwargs)
        metric._made_of = (args, kwargs)
        if sys.modules.get("torch") is not None:
            metric._opened()
        return metric


class DeclaredMetric(Metric, metaclass=_Opened):
    """A metric that is made of declared states; see the head of this module.

    `update`, `trigger_sync`, `wait_sync`, `compute` and `reset` keep to the rules of `Cycle`.
    """

    of_number: ClassVar[Mapping[str, float | None] | None] = None

    #: Whether its samples are texts, which stay as they are.
    texts: ClassVar[bool] = False

    #: Whether it is of what came lately, so that no window of it ends.
    moving: ClassVar[bool] = False

    #: Where the numbers are, and under which name: one's own, or those of a collection.
    _cycle: Cycle | None = None
    _owner = ""

    #: The arguments that it was made with, by which another rank makes it again.
    _made_of: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "of_number" not in vars(cls) and {"batch", "enter", "finish"} & vars(cls).keys():
            cls.of_number = None  # what is true of the class above need not be of this one

    # ---------------------------------------------------------------------------- to declare

    def states(self) -> dict[str, State]:
        """Give the declared states by name, every dimension a number."""
        found: dict[str, State] = {}
        for kind in reversed(type(self).__mro__):
            found |= {n: state for n, state in vars(kind).items() if isinstance(state, State)}
        if not found:
            raise MetricError(
                f'{type(self).__name__} declares no state. Give it one, such as total = State("sum").'
            )
        return {name: state.of(self) for name, state in found.items()}

    def batch(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Say what one batch contributes to each state."""
        raise NotImplementedError(
            f"{type(self).__name__} must define batch(...), which gives what a batch contributes to "
            "each state."
        )

    def finish(self, *args: Any, **states: Any) -> Any:
        """Give the value from the merged states."""
        raise NotImplementedError(
            f"{type(self).__name__} must define finish({', '.join(self.states())}), which gives the "
            "value."
        )

    def enter(self, numbers: Numbers, slots: Mapping[str, Slot], batch: Mapping[str, Any]) -> None:
        """Merge what a batch contributes into the open numbers."""
        numbers.check(type(self).__name__, slots, batch)  # all of it, before anything is counted
        for state, value in batch.items():
            numbers.merge(slots[state], value)

    def emptied(self) -> None:
        """Let go of whatever is kept beside the states."""

    # ---------------------------------------------------------------------------- to use

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Take in one batch; never communicates, never waits for a device."""
        self._opened().update(self, args, kwargs)

    def trigger_sync(self, context: Any = None) -> None:
        """Start bringing the ranks of `context` together, and return.

        `context` is a ProcessGroup, a DeviceMesh slice such as mesh["dp"], or None for all ranks.
        """
        self._whole("trigger_sync").trigger_sync(context)

    def wait_sync(self, context: Any = None) -> None:
        """Wait until the ranks have been brought together."""
        del context
        self._whole("wait_sync").wait_sync()

    def compute(self) -> Any:
        """Give the value of the window: over all ranks after a sync, of this rank before it."""
        return self._opened().compute(self)

    def reset(self) -> None:
        """Begin the next window."""
        self._opened().reset([self._owner])

    def to(self: _D, device: Any) -> _D:
        """Keep the numbers on a device, from now on also where values come from another."""
        self._opened().to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint needs; waits for no other rank."""
        return self._opened().state_dict([self._owner])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, here or on more or fewer ranks."""
        self._opened().load_state_dict(state_dict, [self._owner])

    framework = "torch"

    def hand_over(self, name: str) -> Handed:
        """Give the states to a History, which asks for them when `update` gets this metric."""
        from everyrank.metrics.handing import hand_over

        return hand_over({"": self}, name)

    def __copy__(self) -> Any:
        return copy.deepcopy(self)  # or both would write to the same numbers

    def __repr__(self) -> str:
        args, kwargs = self._made_of
        options = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{type(self).__name__}({', '.join(options)})"

    def _opened(self) -> Cycle:
        """Give the cycle that this metric is part of, opened by whoever asks first."""
        if self._cycle is None:
            from everyrank.metrics.torch.cycle import Cycle

            self._cycle = Cycle({"": self})
        return self._cycle

    def _whole(self, verb: str) -> Cycle:
        """Give the cycle if it is this metric's alone."""
        if self._owner:
            raise MetricError(
                f"{self._owner!r} is in a collection, whose metrics are brought together as one. "
                f"Call {verb}() of the collection."
            )
        return self._opened()
