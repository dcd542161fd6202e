"""Metrics of what came lately: over the last n updates, or fading away.

    >>> from everyrank.metrics import Mean
    >>> recent = Running(Mean(), 2)
    >>> for loss in (9.0, 3.0, 1.0):
    ...     recent.update(loss)
    >>> recent.compute()
    tensor(2., dtype=torch.float64)

They have no windows that end: a sync brings together what each rank has of late, `compute` gives that
until the next sync, and only `reset` empties them. In a checkpoint they are one number for each
state; what is loaded counts as one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everyrank.errors import OptionError
from everyrank.metrics.declared import DeclaredMetric
from everyrank.metrics.states import Slot, State

if TYPE_CHECKING:
    from everyrank.metrics.torch.numbers import Numbers
    from everyrank.metrics.torch.ring import Ring


class _Moving(DeclaredMetric):
    """A declared metric around another one."""

    moving = True

    def __init__(self, metric: DeclaredMetric) -> None:
        if not isinstance(metric, DeclaredMetric) or metric.moving or metric._owner:
            raise OptionError(
                f"metric={metric!r} must be a declared metric that is in no collection and does not "
                "move itself, such as Mean()."
            )
        self.metric = metric

    def states(self) -> dict[str, State]:
        """Give the states of the metric inside."""
        return self.metric.states()

    def batch(self, *args: Any, **kwargs: Any) -> Mapping[str, Any]:
        """Take in what the metric inside takes."""
        return self.metric.batch(*args, **kwargs)

    def finish(self, **states: Any) -> Any:
        """Finish as the metric inside."""
        return self.metric.finish(**states)


class Running(_Moving):
    """Any declared metric over the last `n` updates."""

    _ring: Ring | None = None

    def __init__(self, metric: DeclaredMetric, n: int) -> None:
        super().__init__(metric)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise OptionError(f"n={n!r} must be at least 1: the number of updates that count.")
        if any(state.operator == "last" for state in metric.states().values()):
            raise OptionError(f"Running({metric!r}, {n}) would be the last value itself.")
        self.n = n

    def enter(self, numbers: Numbers, slots: Mapping[str, Slot], batch: Mapping[str, Any]) -> None:
        """Let this batch take the place of the oldest."""
        if self._ring is None:
            from everyrank.metrics.torch.ring import Ring

            self._ring = Ring(slots, self.n, numbers.copy(), numbers.device)
        for state, value in self._ring.turn(batch).items():
            numbers.put(slots[state], value)

    def emptied(self) -> None:
        """Begin with whatever the numbers are now."""
        self._ring = None


class Ema(_Moving):
    """Any declared metric that is made of sums, of which each update leaves a share of `decay`.

    An average is one of numerators and denominators apart, so that batches have their weight in it,
    and the first ones are not pulled towards zero.
    """

    def __init__(self, metric: DeclaredMetric, decay: float = 0.9) -> None:
        super().__init__(metric)
        if not 0.0 <= decay < 1.0:
            raise OptionError(f"decay={decay!r} must be at least 0 and below 1, such as 0.99.")
        others = {name for name, state in metric.states().items() if state.operator != "sum"}
        if others:
            raise OptionError(
                f"Ema({metric!r}): {', '.join(sorted(others))} is no sum, and cannot fade. Use "
                "Running(metric, n)."
            )
        self.decay = decay

    def enter(self, numbers: Numbers, slots: Mapping[str, Slot], batch: Mapping[str, Any]) -> None:
        """Let what there is fade, and add this batch."""
        for state, slot in slots.items():
            numbers.fade(slot, self.decay)
            if state in batch:
                numbers.merge(slot, batch[state])
