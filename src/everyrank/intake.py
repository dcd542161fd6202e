"""What `update` does on the training thread, and all that it does.

An update is looked up (which layout), placed (which step), copied (where its values lie) and added
to the open window; a full window is sealed and handed on. Nothing here reads a device value, opens a
file, talks to another rank or wakes a thread.

* **Order.** Windows are handed on in the order of the updates, whichever threads made them.
* **Lock.** Updates, notes and `hand_over` exclude one another, but not within a thread: the handler
  of a signal or of a log message may call any of them in the middle of an update. Nobody waits for
  room in the queue while they hold the lock, and the background thread does not wait for the lock.
* **Refusal.** An update that raises leaves everything as it was: no step is used up, no note is lost.
* **Interruption.** Where the handler of a signal raises in the middle, that update may be recorded or
  not, but no other is lost.
* **Rewind.** An update that goes back closes the window first, so that a window is of one generation.
* **Fork.** In a forked child updates go on without waiting for a thread that is not there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import time
from typing import Any

from everyrank.errors import MetricError
from everyrank.forks import let_go_in_child
from everyrank.steps import Steps, as_step
from everyrank.window import Layout, Row, Window, flatten, is_nested, learn

#: What to wait for until there is room again.
Wait = Callable[[], object]

_NOTHING: frozenset[str] = frozenset()
_new = tuple.__new__
_MOST_LAYOUTS = 4096  # a program whose calls never look alike must not fill memory with layouts


class Intake:
    """The open window, and the way into it.

    `hand_on` never waits itself: it gives what the thread should wait for, if there is no room.
    """

    def __init__(
        self,
        hand_on: Callable[[Window], Wait | None],
        *,
        sync_every: int,
        generation: int = 0,
        went_back: Callable[[int, int], int],
    ) -> None:
        self.steps = Steps()
        self.ended = False  # the History is closed
        self.handed: set[str] = set()  # names of metrics, which are finished by all ranks together
        self.generation = generation
        self._hand_on = hand_on
        self._went_back = went_back  # (from, to) -> the generation from here on
        self._sync_every = sync_every
        # Updates until a window closes: by their number alone, so that after a flush in the middle
        # the windows of all ranks end at the same updates again.
        self._due = sync_every
        self._lock = threading.RLock()
        self._leaving: deque[Window] = deque()  # closed, and not known to be handed on
        self._wait: Wait | None = None
        self._window = Window(sync_every)
        self._window.generation = generation
        self._notes: dict[str, Any] = {}
        self._layout = learn({})
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        let_go_in_child(self)

    def add(
        self, metrics: Mapping[str, Any], step: Any = None, skip: frozenset[str] = _NOTHING
    ) -> Row:
        """Copy one update into the open window, and give it as it stands there."""
        row, layout = None, self._layout
        if type(metrics) is dict and layout.usual and not self._notes:
            # Most updates look like the one before: two tuples compared, and nothing is hashed.
            values = tuple(metrics.values())
            if tuple(metrics) == layout.names and tuple(map(type, values)) == layout.types:
                if step is not None and type(step) is not int:
                    step = as_step(step)
                with self._lock:
                    row = self._append(layout, values, step, skip)
        if row is None:
            add = self._add_with_notes if self._notes else self._add
            row = add(metrics, step, skip)
        if self._wait is not None:  # with the lock free again
            wait, self._wait = self._wait, None
            wait()
        return row

    def is_handed(self, name: str) -> bool:
        """Say whether a name is that of a metric, or of one in a collection."""
        return any(name == each or name.startswith(f"{each}/") for each in self.handed.copy())

    def note(self, name: str, value: Any) -> None:
        """Copy a value for the next update; the later of two of one name counts."""
        layout = self._layout_of((name, type(value)), {name: value})
        if layout.step_at is not None:
            raise MetricError(
                "the step is no note: hand it over with an update, as update(metrics, step=...)."
            )
        if layout.handed:
            raise MetricError(
                f"{name!r} is a metric, and no note: hand it over with update(), which resets it."
            )
        if not layout.plain:
            value = _copied(layout, value)
        with self._lock:
            self._notes[name] = value

    def hand_over(self, *, wait: bool = True) -> bool:
        """Hand on what the open window holds; False if the lock was not free at once."""
        if wait:
            with self._lock:
                self._close()
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._close()
        finally:
            self._lock.release()
        return True

    def holds(self, row: Row) -> bool:
        """Say whether a row is still in the open window."""
        return any(row is other for other in self._window.rows.copy())

    def leftover(self) -> None:
        """Give notes that no update followed a row of their own."""
        if self._notes:
            self._add_with_notes({}, None, _NOTHING)  # without waiting for room: this is the end

    def resume(self, step: int, generation: int) -> None:
        """Go on after `step`; what is open belongs to the life before."""
        with self._lock:
            self._close()
            self.steps.resume(step)
            self.generation = self._window.generation = generation

    def after_fork(self) -> None:
        """Replace the lock, which a thread of the parent may have held."""
        self._lock = threading.RLock()

    def _add(self, metrics: Mapping[str, Any], step: Any, skip: frozenset[str]) -> Row:
        if type(metrics) is not dict and not isinstance(metrics, Mapping):
            raise MetricError(
                f"metrics={metrics!r} is of type {type(metrics).__name__}, and no dict. Hand over "
                'names with their values, for example {"loss": loss}.'
            )
        layout, values = self._find(metrics, tuple(metrics.values()))
        if layout.step_at is not None:
            own = values[layout.step_at]
            if own is not None and type(own) is not int:
                own = as_step(own)  # also where it does not count: it stays among the values
            step = own if step is None else step
        if step is not None and type(step) is not int:
            step = as_step(step)
        with self._lock:
            # Copied before it is placed: a value that is refused must not use up a step.
            parts: tuple[Any, ...] = ()
            if not layout.plain:
                values, parts = self._window.capture(layout, list(values))
            row = self._append(layout, values, step, skip, parts)
            for i in layout.handed:  # nothing refuses the update any more
                self.handed.add(layout.names[i])
                if not self.ended:  # or a window would begin of what nobody recorded
                    row.values[i].done()
            return row

    def _append(
        self,
        layout: Layout,
        values: tuple[Any, ...],
        step: int | None,
        skip: frozenset[str],
        parts: tuple[Any, ...] = (),
    ) -> Row:
        """Place a copied update in the open window; the lock is held."""
        steps = self.steps
        before, last = steps.rewinds, steps.last
        step = steps.place(layout.metric_names, step)
        if steps.rewinds != before:
            assert last is not None
            self._go_back(last, step)
        # Past Row's own constructor, which takes 0.15 us of the 1.6 that a usual update does.
        row: Row = _new(Row, (step, time(), layout, values, parts, skip))
        self._window.rows.append(row)
        self._due -= 1
        if not self._due:
            self._due = self._sync_every
            self._close()
        return row

    def _go_back(self, last: int, step: int) -> None:
        """Close the window before a row of the next generation."""
        self.generation = self._went_back(last, step)
        self._close()
        self._window.generation = self.generation

    def _close(self) -> None:
        """Close the open window if it holds anything, and hand on what is closed; the lock is held.

        The handler of a signal runs between any two calls: one that updates or flushes finds every
        row in one window, and what one that raises leaves half done, the next call does again. A
        window that is handed on twice is empty the second time (see `Window.take`).
        """
        window = self._window
        if window.rows:
            after = window.seal()
            after.generation = self.generation
            if self._window is window:
                self._window = after
                self._leaving.append(window)
        while self._leaving:
            window = self._leaving[0]
            self._wait = self._hand_on(window)
            if self._leaving and self._leaving[0] is window:
                self._leaving.popleft()

    def _find(
        self, metrics: Mapping[str, Any], values: tuple[Any, ...]
    ) -> tuple[Layout, tuple[Any, ...]]:
        """Give the layout of a call: that of the one before, nearly always."""
        layout = self._layout
        if tuple(metrics) == layout.names and tuple(map(type, values)) == layout.types:
            return layout, values
        look = (*metrics, *map(type, values))
        if look not in self._layouts and is_nested(values):
            flat = flatten(metrics)
            return self._find(flat, tuple(flat.values()))
        layout = self._layout = self._layout_of(look, metrics)
        return layout, values

    def _layout_of(self, look: tuple[Any, ...], metrics: Mapping[str, Any]) -> Layout:
        layout = self._layouts.get(look)
        if layout is None:
            layout = learn(metrics)
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[look] = layout
        return layout

    def _add_with_notes(self, metrics: Mapping[str, Any], step: Any, skip: frozenset[str]) -> Row:
        if not isinstance(metrics, Mapping):
            return self._add(metrics, step, skip)
        flat = flatten(metrics)
        with self._lock:
            notes = self._notes.copy()
            # Flat, so that the update's value counts where a note has the same name.
            row = self._add({**notes, **flat}, step, skip)
            for name, value in notes.items():  # not earlier: a refused update loses none
                if self._notes.get(name) is value:
                    self._notes.pop(name, None)
        return row


def _copied(layout: Layout, value: Any) -> Any:
    """Copy the one value of a layout where it lies, or say what is wrong with it."""
    values, parts = Window(1).capture(layout, [value])
    if not parts:
        return values[0]
    block, slot, (place,) = parts[0]
    return block.row(slot).reshape(place.shape)
