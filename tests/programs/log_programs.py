"""What the tests of the background thread and the log run in processes of their own."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from everyrank.backends.jsonl import Jsonl
from everyrank.records import Record
from everyrank.worker import Worker


def until(condition):
    """Wait until something is the case; the deadline only ends a hang."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.001)


def in_child(fn):
    """Fork, and give the exit code: 0 if `fn` returned in the child, 1 if it raised there."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fn()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def fork_beside_a_worker(rank):
    """Fork while a worker has items that it cannot work off; then let the parent's go on."""
    gate, seen, entered = threading.Event(), [], threading.Event()

    def work(items):
        if items:
            entered.set()
            gate.wait()
            seen.extend(items)

    ended = Worker(work, name="ended", capacity=9)
    assert ended.close(60.0)  # one that is still held must not keep the others from knowing
    ours, theirs = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(ours, selectors.EVENT_READ)
    worker = Worker(work, name="forked", capacity=1, selector=selector)
    worker.put("first")
    entered.wait()

    def child():
        for _ in range(3):
            worker.put("child")  # beyond the capacity, and yet it waits for nothing
        worker.ring()
        worker.flush(0.0)
        worker.close(0.0)
        assert worker.forked
        assert not worker.alive
        assert ours.fileno() == -1

    code = in_child(child)
    gate.set()
    worker.put("second")
    delivered = worker.close(60.0)
    theirs.send(b"x")
    return code, worker.forked, delivered, seen, ours.recv(1)


def fork_from_the_thread(rank):
    """Fork in the middle of the work: the child's copy of the thread must come to an end."""
    codes = []

    def work(items):
        if items:
            pid = os.fork()
            if pid:
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    worker = Worker(work, name="forking", capacity=9, at_end=lambda: seen.append(os.getpid()))
    seen = []
    worker.put("x")
    return worker.close(60.0), codes, seen == [os.getpid()], worker.failures


def fork_beside_a_log(rank, path):
    """Fork while a log is open, and open it again while the child lives; give what became of it."""
    log = Jsonl(path)
    log.write(Record(0, 0.0))
    wake, done = os.pipe()
    answer, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(wake, 1)
            log.write(Record(1, 0.0))
            log.flush()
            log.close()
            os.write(say, b"closed" if log._file == -1 else b"open")
        finally:
            os._exit(0)
    log.close()
    try:
        beside = Jsonl(path)  # whether the child has come round to closing its copy or not
        beside.write(Record(2, 0.0))
        os.write(done, b"x")
        os.waitpid(pid, 0)
        beside.flush()
        try:
            Jsonl(path)
        except OSError as error:
            refused = "being written" in str(error)
        beside.close()
    finally:
        os.close(done)
    return os.read(answer, 9), refused, Path(path).read_bytes()


def write_until_killed(rank, path):
    """Write records of some length, a few for each flush, for ever."""
    log, step = Jsonl(path), 0
    while True:
        log.write(Record(step, 0.0, {"text": "x" * (step % 3000), "step again": step}))
        step += 1
        if step % 7 == 0:
            log.flush()


def write_to_a_small_disk(rank, path, size, records):
    """Write to a file that may not grow past `size`, then to one that may, and tell what was."""
    import resource

    # Python ignores SIGXFSZ, so that a write past the limit is an error like a full disk.
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    log, errors = Jsonl(path), []
    for step in range(records):
        log.write(Record(step, 0.0, {"text": "x" * 100}))
        try:
            log.flush()
        except OSError as error:
            errors.append((error.errno, error.filename))
    full = Path(path).read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.flush()
    log.close()
    return full, errors, Path(path).read_bytes()


def write_facts_to_a_full_disk(rank, path):
    """Write run.json while no file may have a single byte; give what was said of it."""
    import resource

    from everyrank.errors import RunDirectoryError
    from everyrank.rundir import RunDirectory

    run = RunDirectory.open(path)
    run.write()
    run.update(more="x" * 10_000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    try:
        run.write()
    except RunDirectoryError as error:
        return str(error)
    return None
