"""What processes of the stopwatch tests run."""

from __future__ import annotations

import logging
import os
import threading

from everyrank.stopwatch import StopWatch


class Slow:
    """A mark that a device passes only when it is told to."""

    passed = threading.Event()

    def record(self):
        pass

    def query(self):
        return self.passed.is_set()

    def elapsed_time(self, end):
        return 250.0


def lines():
    """Keep what is logged."""
    kept = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    logging.getLogger("everyrank").addHandler(handler)
    logging.getLogger("everyrank").setLevel(logging.INFO)
    return kept


def fork_with_an_open_lap(rank):
    """Time something, fork, and give how often parent and child told of it."""
    said = lines()
    with StopWatch("before the fork", event=Slow):
        pass
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        Slow.passed.set()
        with StopWatch("in the child", event=Slow) as watch:
            pass
        while watch.device_elapsed is None:
            pass
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    in_child = os.read(read, 65536).decode()
    Slow.passed.set()
    with StopWatch("after the fork", event=Slow) as watch:
        pass
    while watch.device_elapsed is None:
        pass
    return [line.partition(" took")[0] for line in said], in_child.partition(" took")[0]


def end_with_an_open_lap(rank, path, passed):
    """End the program while a device is not done; what is told then goes into a file."""

    class ToFile(logging.Handler):
        def emit(self, record):
            with open(path, "a") as file:
                file.write(record.getMessage() + "\n")

    logging.getLogger("everyrank").addHandler(ToFile())
    logging.getLogger("everyrank").setLevel(logging.INFO)
    with StopWatch("the last step", event=Slow):
        pass
    if passed:
        threading.Timer(0.05, Slow.passed.set).start()
