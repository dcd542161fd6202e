"""The cycle of a window: who belongs to it, when it ends, and what `compute` shows.

A window is what `update` took in since the last `reset`. The rules, for one metric or a collection:

* **Show.** `compute` gives the value of the window by what is known here: of this rank before a sync,
  of all ranks after it, and where updates followed the sync, of both merged. While a sync is under
  way it waits for it.
* **Once.** A sync brings together what no sync has brought together before. Two in a row, a trigger
  after a trigger, or a sync after some more updates count nothing twice.
* **Between.** `trigger_sync` takes a copy of what there is. What comes between it and `wait_sync`
  belongs to the next window, which `reset` begins; if another sync comes first, it belongs to this one.
* **Reset.** It forgets exactly what `compute` would show. Between trigger and wait it ends the window
  without disturbing the sync: the value is there after `wait_sync`, and the next sync begins anew.
* **Failure.** A sync that fails raises `SyncFailed` where it is waited for, and what this rank had
  belongs to the window as if it had not been tried.
* **Moving.** Metrics of what came lately have no windows: what they are on all ranks is what the last
  sync found, a reset empties them, and nothing else does.
* **Handed out.** What `compute` gives is a tensor of its own, and never changes.
* **Alone.** Without a process group the rules are the same, and nothing is sent.

`update` never waits: no value is read on the host, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everyrank.arrays.torch import ARRAYS
from everyrank.errors import MetricError
from everyrank.metrics.states import Plan, Slot
from everyrank.metrics.torch import checkpoint
from everyrank.metrics.torch.finish import Finish, finished
from everyrank.metrics.torch.fused import Fused, are_numbers
from everyrank.metrics.torch.numbers import Flat, Numbers, identity, merged, moved, with_slots
from everyrank.metrics.torch.sync import Flight
from everyrank.operators import OPERATORS
from everyrank.stage import MAX_ELEMENTS, framework_of

if TYPE_CHECKING:
    from everyrank.metrics.declared import DeclaredMetric

_CPU = torch.device("cpu")


class Cycle:
    """The numbers of some declared metrics, through all their windows."""

    def __init__(self, metrics: Mapping[str, DeclaredMetric]) -> None:
        self.metrics = dict(metrics)
        self.plan = Plan.of({name: metric.states() for name, metric in metrics.items()})
        self._slots = self.plan.by_owner
        self._moving = frozenset(name for name, metric in metrics.items() if metric.moving)
        self._open: Numbers | None = None
        self._before: Flat | None = None  # what the open numbers hold, before they are opened
        self._placed = False  # on a device that the user named
        self._shown: Flat | None = None  # of this window, what all ranks have together
        self._synced: set[str] = set()  # metrics that this is of
        self._next: Flat | None = None  # what came between the last trigger and its wait
        self._flights: list[Flight] = []
        self._triggered = False  # and not waited for
        self._ended: set[str] = set()  # metrics whose window was ended between trigger and wait
        self._fused: Fused | None = None
        self._finish: Finish | None = None
        self.about: dict[tuple[str, ...], Any] = {}  # what was told to a History of which metrics

    # ---------------------------------------------------------------------------- taking in

    def update(
        self, metric: DeclaredMetric, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take in a batch of one metric."""
        with torch.no_grad():
            if not metric.texts:
                args = tuple([self._taken(arg) for arg in args])
                kwargs = {name: self._taken(arg) for name, arg in kwargs.items()}
            numbers = self._open or self._open_for([*args, *kwargs.values()])
            metric.enter(numbers, self._slots[metric._owner], metric.batch(*args, **kwargs))

    def update_numbers(self, batch: Mapping[str, Any]) -> bool:
        """Take in single numbers of a device at once; False if these are something else."""
        if torch.compiler.is_compiling():  # which fuses by itself
            return False
        if self._fused is None or not self._fused.fits(batch):
            if not self._can_fuse(batch):
                return False
            contributions = {name: m.of_number for name, m in self.metrics.items() if m.of_number}
            self._fused = Fused(self.plan, contributions, batch)
        with torch.no_grad():
            values = list(batch.values())
            self._fused.merge(self._open or self._open_for(values), values)
        return True

    def adopt(self, name: str, other: Cycle) -> None:
        """Go on with what a metric has that was alone until now."""
        if other._triggered:
            raise MetricError(
                f"{name!r} has a sync under way. Call wait_sync() of it before it joins a collection."
            )
        if other._open is None and other._before is None and other._shown is None:
            return
        state = checkpoint.renamed(other.state_dict([""]), name)
        self.load_state_dict(state, [name])
        if other._open is not None and (self._open is None or other._placed):
            self.to(other._open.device)

    def to(self, device: Any) -> None:
        """Keep the numbers on a device."""
        device = torch.device(device)
        if device.index is None and device.type != "cpu":
            device = torch.empty(0, device=device).device
        self._placed = True
        if self._open is None or self._open.device != device:
            self._open = self._numbers(device)
            self._fused = None
            self._empty_rings(self._moving)

    def _can_fuse(self, batch: Mapping[str, Any]) -> bool:
        if len(batch) < 2 or not are_numbers(batch.values()):
            return False
        if not all(name in self.metrics and self.metrics[name].of_number for name in batch):
            return False
        devices = {value.device for value in batch.values()}
        return len(devices) == 1 and (self._open is None or devices == {self._open.device})

    def _taken(self, value: Any) -> Any:
        """Give a value as a tensor where the numbers are; what is no array stays as it is."""
        if not isinstance(value, Tensor):
            if not isinstance(value, bool | int | float | complex | np.ndarray | np.generic | list):
                _check_no_jax(value)
                return value
            value = ARRAYS.array(value)
        if value.is_complex():
            raise MetricError(
                f"a value is complex ({value.dtype}), and has no order and no one size. Hand over real "
                "numbers, for example its abs()."
            )
        device = self._open.device if self._open is not None else value.device
        if value.device == device or (value.ndim == 0 and value.device == _CPU):
            return value
        if self._placed and value.device == _CPU:
            return value.to(device, non_blocking=True)
        raise MetricError(
            f"a value is on {value.device}, but the metric's numbers are on {device}, where its first "
            f'value was. Call metric.to("{value.device}") first, or move the value.'
        )

    def _open_for(self, values: Collection[Any]) -> Numbers:
        """Open the numbers where the first values are."""
        devices = [value.device for value in values if isinstance(value, Tensor)]
        # A number of the host goes anywhere, so another one decides.
        device = next((d for d in devices if d != _CPU), _CPU)
        self._open = self._numbers(device)
        return self._open

    def _numbers(self, device: torch.device) -> Numbers:
        """Give numbers on a device that go on with what there is."""
        numbers = Numbers(self.plan, device)
        if (now := self._before if self._open is None else self._open.copy()) is not None:
            numbers.fill(now)
        if self._shown is not None:
            numbers.come_after(self._shown)
        return numbers

    # ---------------------------------------------------------------------------- the verbs

    def trigger_sync(self, context: Any) -> None:
        """Send what there is through the ranks, and return."""
        with torch.no_grad():
            own = self._now()
            if self._next is not None:
                own = merged(_beside(self._next, own), own)
            flight = Flight(own, context)
            # From here on nothing fails: what was sent is no longer open.
            for earlier in self._flights:
                earlier.skip |= self._ended
            self._flights.append(flight)
            self._forget_shown(self._ended)
            self._ended.clear()
            self._next = None
            self._triggered = True
            self._empty(own)

    def wait_sync(self) -> None:
        """Wait for every flight."""
        if not self._triggered:
            raise MetricError(
                "wait_sync() was called, but no sync is under way. Call trigger_sync() first, or "
                "sync() for both at once."
            )
        self._triggered = False
        with torch.no_grad():
            now = self._now()
            self._next = self._without(self._moving, now)
            self._empty(now)
            self._land()

    def sync(self, context: Any) -> None:
        """Bring the ranks together at once, with nothing in between."""
        self.trigger_sync(context)
        self._triggered = False
        with torch.no_grad():
            self._land()

    def compute(self, metric: DeclaredMetric) -> Any:
        """Give the value of one metric."""
        with torch.no_grad():
            return finished(metric, self._slots[metric._owner], self._current())

    def compute_all(self) -> dict[str, Any]:
        """Give the value of every metric."""
        with torch.no_grad():
            return self._finisher().values(self._current())

    def read_all(self) -> dict[str, Any]:
        """Give the value of every metric on the host; waits for the device."""
        with torch.no_grad():
            return self._finisher().read(self._current())

    def reset(self, owners: Collection[str]) -> None:
        """End the window of some metrics."""
        with torch.no_grad():
            if moving := self._moving.intersection(owners):
                self._fill(self._without(moving, self._now()))
                self._synced -= moving
                self._empty_rings(moving)
                for flight in self._flights:
                    flight.skip |= moving
            if self._triggered:
                self._ended.update(set(owners) - self._moving)
            else:
                self._begin_next([owner for owner in owners if owner not in moving])

    def _begin_next(self, owners: Collection[str]) -> None:
        """Let the next window of some metrics be the one that is open."""
        if len(owners) == len(self._slots) and not self._ended:
            self._forget_shown(owners)
            self._fill(self._next)
            self._next = None
            return
        now = self._now()
        nothing = identity(self.plan, _device_of(now))
        later = nothing if self._next is None else _beside(self._next, now)
        after = later
        if ended := self._ended.intersection(owners):
            # What came after the end of its window is of the next, before and after the wait.
            after = with_slots(after, self._slots_of(ended), merged(after, now))
        self._forget_shown(owners)
        self._ended.difference_update(owners)
        slots = self._slots_of(owners)
        self._fill(with_slots(now, slots, after))
        if self._next is not None:
            self._next = with_slots(later, slots, nothing)

    # ---------------------------------------------------------------------------- History

    def exported(self, owners: Sequence[str], name: str) -> Tensor:
        """Give the states of some metrics as one vector, by operator and then in their order.

        It may be the open numbers themselves, and is copied by whoever asked for it.
        """
        if self._triggered or not self._synced.isdisjoint(set(owners) - self._moving):
            raise MetricError(
                f"{name!r} was brought together by a sync of its own, and its values would count once "
                "for every rank. Hand it over without calling sync(), or hand over its compute()."
            )
        slots = [slot for owner in owners for slot in self._slots[owner].values()]
        if (size := sum(slot.size for slot in slots)) > MAX_ELEMENTS:
            raise MetricError(
                f"{name!r} has {size:,} numbers, too many to travel with every update (at most "
                f"{MAX_ELEMENTS:,}). Call its sync(), and hand over what you need of its compute()."
            )
        with torch.no_grad():
            flat = self._now() if self._open is None else self._open.there()
            if len(owners) == len(self._slots):
                vectors = [flat[operator] for operator in OPERATORS if operator in flat]
            else:
                slots.sort(key=lambda slot: (list(OPERATORS).index(slot.operator), slot.here.start))
                vectors = [flat[slot.operator][slot.here] for slot in slots]
            return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def handed_over(self, owners: Sequence[str]) -> None:
        """Begin the next window of metrics that were handed over."""
        ending = [owner for owner in owners if owner not in self._moving]
        if self._open is None or self._next is not None or len(ending) == len(self._slots):
            self.reset(ending)
            return
        with torch.no_grad():
            for owner in ending:
                self._open.clear(owner)

    # ---------------------------------------------------------------------------- checkpoints

    def state_dict(self, owners: Collection[str]) -> dict[str, Any]:
        """Give what a checkpoint needs of some metrics, without any other rank."""
        with torch.no_grad():
            nothing = identity(self.plan, _CPU)
            own = moved(self._now(), _CPU)
            now = self._without(self._moving, own)
            later = nothing if self._next is None else moved(self._next, _CPU)
            shown = nothing if self._shown is None else moved(self._shown, _CPU)
            if self._triggered:
                now, later = nothing, now
            for flight in self._flights:
                sent = self._without(flight.skip | self._moving, moved(flight.own, _CPU))
                now = merged(now, sent)
            if ended := self._slots_of(self._ended):  # what is left of these is of the next window
                now = with_slots(now, ended, later if self._triggered else merged(later, now))
                shown, later = (with_slots(flat, ended, nothing) for flat in (shown, later))
            now = with_slots(now, self._slots_of(self._moving), own)
            shown = self._without(self._moving, shown)
            return checkpoint.saved(self._slots_of(owners), (shown, now, later))

    def load_state_dict(self, state_dict: Mapping[str, Any], owners: Collection[str]) -> None:
        """Take up a checkpoint."""
        slots = self._slots_of(owners)
        if self._triggered and len(owners) < len(self._slots):
            raise MetricError(
                "a sync of the collection is under way, which the others are waiting for. Call its "
                "wait_sync() before one of its metrics is loaded."
            )
        shown, now, later = checkpoint.loaded(self.plan, slots, state_dict)
        with torch.no_grad():
            nothing = identity(self.plan, _CPU)
            synced = set() if _same(shown, nothing) else set(owners) - self._moving
            self._synced = self._synced - set(owners) | synced
            if len(owners) < len(self._slots):  # the others keep what they have
                shown = with_slots(moved(self._shown or nothing, _CPU), slots, shown)
                later = with_slots(moved(self._next or nothing, _CPU), slots, later)
                now = with_slots(moved(self._now(), _CPU), slots, now)
            self._fill(now)
            self._shown = shown if self._synced else None
            if self._open is not None:
                self._open.come_after(shown)
            self._next = later
            self._flights.clear()
            self._triggered = False
            self._ended.difference_update(owners)
            self._empty_rings(self._moving.intersection(owners))

    # ---------------------------------------------------------------------------- inside

    def _now(self) -> Flat:
        """Give a copy of the open numbers."""
        if self._open is not None:
            return self._open.copy()
        if self._before is None:
            return identity(self.plan, _CPU)
        return {operator: vector.clone() for operator, vector in self._before.items()}

    def _fill(self, flat: Flat | None) -> None:
        """Have the open numbers hold these; None means those of metrics that saw nothing."""
        if self._open is None:
            self._before = flat
        else:
            self._open.fill(flat)

    def _empty(self, now: Flat) -> None:
        """Empty the open numbers, but for metrics whose windows never end."""
        if not self._moving:
            self._fill(None)
            return
        nothing = identity(self.plan, _device_of(now))
        self._fill(with_slots(nothing, self._slots_of(self._moving), now))

    def _empty_rings(self, owners: Collection[str]) -> None:
        for owner in owners:
            self.metrics[owner].emptied()

    def _finisher(self) -> Finish:
        if self._finish is None:
            self._finish = Finish(self.plan, self.metrics)
        return self._finish

    def _land(self) -> None:
        """Take in the flights under way."""
        if not self._flights:
            return
        flights, self._flights = self._flights, []
        for i, flight in enumerate(flights):
            try:
                landed = self._without(flight.skip, flight.land())
            except Exception:
                self._put_back(flights[i:])
                raise
            both = landed
            if self._shown is not None:
                both = merged(_beside(self._shown, landed), landed)
                both = with_slots(both, self._slots_of(self._moving), landed)
            self._shown = both
            self._synced |= self.metrics.keys() - flight.skip
            if self._open is not None:
                self._open.come_after(both)

    def _put_back(self, flights: Collection[Flight]) -> None:
        """Count what was sent in vain as if it had not been sent."""
        self._triggered = False
        now = self._now()
        if self._next is not None:
            now, self._next = merged(_beside(self._next, now), now), None
        for flight in reversed(list(flights)):
            own = self._without(flight.skip | self._moving | self._ended, flight.own)
            now = merged(_beside(own, now), now)
        self._ended.clear()
        self._fill(now)

    def _current(self) -> Flat:
        """Give the numbers that `compute` shows, as a copy, once every flight has landed."""
        self._land()
        if self._shown is not None and self._open is not None and self._is_simple():
            there = self._open.there()  # merging makes the copy
            return merged(_beside(self._shown, there), there)
        now = self._now()
        if self._shown is None:
            return now
        shown = _beside(self._shown, now)
        if self._triggered:
            both = {operator: vector.clone() for operator, vector in shown.items()}
        else:
            both = with_slots(merged(shown, now), self._slots_of(self._ended), shown)
        for owner in self._moving:
            both = with_slots(both, self._slots[owner], shown if owner in self._synced else now)
        return both

    def _is_simple(self) -> bool:
        return not (self._triggered or self._moving or self._ended)

    def _without(self, owners: Collection[str], flat: Flat) -> Flat:
        """Give numbers without those of some metrics."""
        if not owners:
            return flat
        return with_slots(flat, self._slots_of(owners), identity(self.plan, _device_of(flat)))

    def _forget_shown(self, owners: Collection[str]) -> None:
        self._synced.difference_update(owners)
        if not self._synced:
            self._shown = None
        elif self._shown is not None:
            self._shown = self._without(owners, self._shown)

    def _slots_of(self, owners: Collection[str]) -> dict[str, Slot]:
        return {slot.name: slot for owner in owners for slot in self._slots[owner].values()}


def _beside(flat: Flat, other: Flat) -> Flat:
    """Give numbers on the device where others are."""
    return moved(flat, _device_of(other))


def _check_no_jax(value: Any) -> None:
    if framework_of(type(value)) == "jax":
        raise MetricError(
            "a value is an array of JAX. Use the metric of this name in everyrank.jax.metrics."
        )


def _same(a: Flat, b: Flat) -> bool:
    """Say whether the numbers of the host are the same."""
    return all(torch.allclose(a[o], b[o], rtol=0.0, atol=0.0, equal_nan=True) for o in a)


def _device_of(flat: Flat) -> torch.device:
    return next(iter(flat.values())).device
