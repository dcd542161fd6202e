"""A bounded queue and the one background thread that empties it.

Training puts items in; the thread takes all that wait and hands them, in order, to `work`.

* **Order.** Items are handed over in the order of `put`, each once, in lists.
* **Cost.** `put` appends to a list and never wakes the thread unless it sleeps deeply: a wake-up
  costs the caller more than the work (5-14 us where the append takes 0.2). While items come, the
  thread looks every `tick` seconds by itself; after a quiet while it waits for the doorbell.
* **Bound.** `put` counts sizes, of at least 1 each, and what `unfinished` says is still on its way.
  Above `capacity` it waits until the thread has made room, or with `wait=False` says that somebody
  should; nothing is dropped, and unless `say_full` is False this is said once.
* **Failure.** What `work` raises is logged once for each kind, counted in `failures`, and the
  thread goes on with the next items; if something is unfinished, a second later even without any.
  Nothing is ever raised into the caller of `put`.
* **Interruption.** The handler of a signal may run, put, flush, close or raise in the middle of any
  call: an item is put whole or not at all.
* **Flush.** `flush(seconds)` returns True once everything put before it is handed over and `work`
  has nothing unfinished (it returned None), False at the deadline.
* **Close.** `close(seconds)` flushes, has the thread call `at_end` and end, and is idempotent. It is
  over a second past its deadline at the latest, even if `work` hangs. After it, and in a process
  forked from this one, `put` does nothing.

`work(items)` returns the seconds after which it wants to be called again though nothing was put, or
None. Where wanting to be called and having something unfinished are two things, `unfinished` tells
the size of the latter. Sockets registered in `selector` wake the thread too; they stay their
owner's to close, but in a forked child, which must not hold them, they are closed.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from everyrank.forks import holds_nothing, let_go_in_child
from everyrank.messages import log

T = TypeVar("T")

#: How long the thread goes on looking by itself after the last item, before it sleeps deeply.
_ATTENTIVE = 0.1

#: How long a failure is left alone before work that is unfinished is tried again.
_RETRY = 1.0


class _Thread(threading.Thread):
    """The thread of a worker."""


def on_worker_thread() -> bool:
    """Say whether this is the thread of a worker, where waiting for another may be for itself."""
    return isinstance(threading.current_thread(), _Thread)


class Worker(Generic[T]):
    """Hand everything that is put to `work`, in order, on one background thread."""

    def __init__(
        self,
        work: Callable[[list[T]], float | None],
        *,
        name: str,
        capacity: int,
        tick: float = 0.01,
        unfinished: Callable[[], int] | None = None,
        selector: selectors.BaseSelector | None = None,
        at_end: Callable[[], None] | None = None,
        say_full: bool = True,
    ) -> None:
        self.name = name
        self.failures = 0
        self.forked = False  # whether this is the copy in a forked child, where nothing runs
        self.selector = selector or selectors.DefaultSelector()
        self._work = work
        self._capacity = capacity
        self._tick = tick
        self._items: deque[tuple[T, int]] = deque()
        self._put = 0  # sizes put and sizes worked off: the difference is what waits
        self._done = 0
        self._ask_unfinished = unfinished
        self._unfinished = 0
        self._at_end = at_end
        self._say_full = say_full
        self._asleep = False
        self._closed = False
        self._stop = False
        self._said: set[str] = set()
        self._putting = threading.RLock()  # of the thread, or a signal's handler would hang
        self._room = threading.Condition()
        self._doorbell, self._ear = socket.socketpair()
        for end in (self._doorbell, self._ear):
            end.setblocking(False)
        self.selector.register(self._ear, selectors.EVENT_READ)
        let_go_in_child(self)
        self._thread = _Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How much was put and is not finished yet."""
        return self._put - self._done + self._unfinished

    @property
    def alive(self) -> bool:
        """Whether the thread runs, so that what it works on is not ours to touch."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether nothing waits and `work` has nothing unfinished."""
        return self._put == self._done and not self._unfinished

    def put(self, item: T, size: int = 1, *, wait: bool = True) -> bool:
        """Queue one item; above capacity wait for room, or give True without having waited."""
        if self._closed:
            return False
        size = max(1, size)  # or a flush would not wait for an item without any
        with self._putting:  # `+=` of two threads at once would lose one
            self._put += size
            self._items.append((item, size))  # no handler of a signal runs between these lines
        if self._asleep:
            self.ring()
        full = self._put - self._done + self._unfinished > self._capacity
        if full and wait:
            self.wait_for_room()
        return full

    def ring(self) -> None:
        """Wake the thread now."""
        with contextlib.suppress(OSError):  # full means that it is ringing; closed, that we end
            self._doorbell.send(b"\0")

    def flush(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Wait until everything put so far is worked off; False at the deadline.

        `until` says when that is, if not only once nothing is unfinished.
        """
        if self._closed or threading.current_thread() is self._thread:
            return self.idle
        target = self._put
        enough = until or (lambda: not self._unfinished)
        self.ring()
        with self._room:
            self._room.wait_for(
                lambda: (self._done >= target and enough()) or self._stop,
                timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)),
            )
            # Not what wait_for says: ended by `close` at its deadline is not the same as done.
            return self._done >= target and enough()

    def close(self, seconds: float) -> bool:
        """Flush, end the thread, and let go of everything; True if nothing was left behind."""
        if self._closed:
            return self.idle
        deadline = time.monotonic() + seconds
        flushed = self.flush(seconds)
        with self._room:
            self._closed = self._stop = True
            self._room.notify_all()  # whoever waits for room, or in a flush, would wait on
        self.ring()
        # A work function that hangs must not hang us: the thread is a daemon and ends with us.
        if threading.current_thread() is not self._thread:
            left = max(1.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))
            self._thread.join(timeout=left)
        return flushed and (self._at_end is None or not self.alive)

    def wait_for_room(self) -> None:
        """Wait until half of the capacity is free."""
        if threading.current_thread() is self._thread:
            return
        if self._say_full:
            self._say(
                "full",
                logging.WARNING,
                "%s is behind: %d values wait, the bound is %d. Updates wait for room from here "
                "on; a larger sync_every makes each step cheaper.",
                self.name,
                self.waiting,
                self._capacity,
            )
        self.ring()
        with self._room:
            # Half empty, so that the caller does not come back for the very next item.
            self._room.wait_for(lambda: self.waiting <= self._capacity // 2 or self._stop)

    def _run(self) -> None:
        try:
            self._loop()
            if self._at_end is not None and not self.forked:
                self._at_end()
        except BaseException as error:  # noqa: BLE001 - the border: as for `work`
            self._failed(error)
        finally:
            with self._room:  # whatever ended the thread, nobody may wait for it any longer
                self._stop = True
                self._room.notify_all()
            self._release()

    def _loop(self) -> None:
        last_item = time.monotonic()
        while not self._stop:
            items, size = self._take()
            wait, unfinished = self._guarded(items)
            with self._room:
                self._done += size
                self._unfinished = unfinished
                self._room.notify_all()
            now = time.monotonic()
            if items:
                last_item = now
            if not self._stop:
                self._sleep(wait, attentive=now - last_item < _ATTENTIVE)

    def _take(self) -> tuple[list[T], int]:
        items: list[T] = []
        size = 0
        while self._items:
            item, one = self._items.popleft()
            items.append(item)
            size += one
        return items, size

    def _guarded(self, items: list[T]) -> tuple[float | None, int]:
        """Call `work`; say when it wants to be called again, and how much it has unfinished."""
        wait, failures = None, self.failures
        try:
            wait = self._work(items)
        except BaseException as error:  # noqa: BLE001 - the border: training sees no failure here
            self._failed(error)
        if self._ask_unfinished is None:
            return wait, int(wait is not None)
        try:
            unfinished = self._ask_unfinished()
        except BaseException as error:  # noqa: BLE001 - the border, as above
            self._failed(error)
            unfinished = 0
        return _RETRY if unfinished and self.failures > failures else wait, unfinished

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self._say(
            type(error).__name__,
            logging.ERROR,
            "%s failed and goes on without these values: %s: %s",
            self.name,
            type(error).__name__,
            error,
            trace=True,
        )

    def _sleep(self, wait: float | None, *, attentive: bool) -> None:
        if attentive:
            wait = self._tick if wait is None else min(wait, self._tick)
        else:
            self._asleep = True
            if self._items:  # put between our last look and the line above rang no bell
                self._asleep = False
                return
        self.selector.select(wait)
        self._asleep = False
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def _say(self, key: str, level: int, message: str, *args: object, trace: bool = False) -> None:
        if key not in self._said:
            self._said.add(key)
            log.log(level, message, *args, exc_info=trace)

    def _release(self) -> None:
        holds_nothing(self)
        self.selector.close()
        self._ear.close()
        self._doorbell.close()

    def after_fork(self) -> None:
        """Become inert in a forked child: the thread is not here, and the sockets are not ours."""
        self._closed = self._stop = self.forked = True
        self._room = threading.Condition()  # the old one may be held by a thread that is not here
        for key in list((self.selector.get_map() or {}).values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._release()
