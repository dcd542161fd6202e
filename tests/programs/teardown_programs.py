"""What a History meets that is not its own doing: signals, garbage, full disks, other threads."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import everyrank
from everyrank.ranks.local import in_process


def until(condition, seconds=60.0):
    """Wait until something is the case; the deadline only ends a hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.001)


def rows(directory):
    """Read the log of the only run in a directory."""
    (path,) = Path(directory).glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def told_but_lost(directory, told):
    """Give what was recorded twice, or out of order, and how many of `told` are not there."""
    values = [row["x"] for row in rows(directory) if "x" in row]
    return values == sorted(set(values)), len(set(told) - set(values))


class Interrupted(BaseException):
    """What a signal's handler raises, as Ctrl-C does."""


def ticking(handler, seconds=0.0003):
    """Have a handler called again and again, wherever the program is."""
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def quiet():
    signal.setitimer(signal.ITIMER_REAL, 0)


def handlers(rank, outdir, sync_every):
    """Update while signals come, whose handler uses the History in every way there is."""
    uses = {
        "update": lambda history, calls: history.update({"signal": calls}),
        "note": lambda history, calls: history.note("signal", calls),
        "flush": lambda history, calls: history.flush(5),
        "read": lambda history, calls: len(history["x"]),
        "health": lambda history, calls: history.health(),
        "print": lambda history, calls: str(history.update({"signal": calls})),
    }
    return {what: _handled(f"{outdir}/{what}", sync_every, use) for what, use in uses.items()}


def _handled(outdir, sync_every, use):
    history = everyrank.History(outdir=outdir, sync_every=sync_every)
    calls, inside, told = 0, False, 0

    def handler(*_):
        nonlocal calls, inside
        if not inside:
            inside = True
            use(history, calls)
            calls, inside = calls + 1, False

    history.update({"x": told})
    ticking(handler)
    while calls < 100:
        told += 1
        history.update({"x": told})
    quiet()
    delivered = history.close(60)
    x = [row["x"] for row in rows(outdir) if "x" in row]
    return delivered, x == list(range(told + 1)), history.health()["failures"]


def interrupted(rank, outdir, sync_every, wanted):
    """Update while signals come, whose handler raises in the middle of it."""
    history = everyrank.History(outdir=outdir, sync_every=sync_every)
    armed, raised, told, step = False, 0, [], 0

    def handler(*_):
        if armed:
            raise Interrupted

    ticking(handler)
    while raised < wanted:
        step, done = step + 1, False
        try:
            armed = True
            history.update({"x": step})
            done = True
            armed = False
        except Interrupted:
            raised += 1
        finally:
            armed = False
        if done:
            told.append(step)
    quiet()
    delivered = history.flush(60), history.close(60)
    return delivered, told_but_lost(outdir, told), history.health()["failures"]


def stopped_from_outside(rank, outdir, wanted):
    """Update on a thread into which another one raises, as debuggers and notebooks do."""
    history = everyrank.History(outdir=outdir, sync_every=3)
    raised, told, step, over = 0, [], 0, False

    def update():
        nonlocal raised, step
        while not over:
            with suppress(Interrupted):
                while not over:
                    step += 1
                    value = step
                    history.update({"x": value})
                    told.append(value)

    def stubborn():
        while not over:
            with suppress(Interrupted):
                update()

    sys.setswitchinterval(1e-4)  # or the two threads would take turns too rarely
    thread = threading.Thread(target=stubborn)
    thread.start()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for _ in range(wanted):
        raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))
        before = step
        until(lambda before=before: step > before)
    over = True
    thread.join(60)
    delivered = history.flush(60), history.close(60)
    return delivered, told_but_lost(outdir, told), history.health()["failures"]


def closed_by_a_signal(rank, outdir, how):
    """Get a signal while `close` waits for a rank that says nothing more."""
    first, second = in_process(2)
    history = everyrank.History(outdir=outdir, group=first, sync_every=4)
    other = everyrank.History(group=second)
    history.update({"x": 0})
    other.update({"x": 0})
    assert history.flush(60)
    for step in range(1, 10):
        history.update({"x": step})
    inner = []

    def handler(*_):
        if how == "raises":
            raise Interrupted
        inner.append(history.close(0.1))

    def interrupt():
        # It waits once the last row is on its way, and the first rank has said goodbye.
        until(lambda: history._flow.closed and history.health()["unfinished_rows"] == 9)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    signal.signal(signal.SIGUSR1, handler)
    threading.Thread(target=interrupt).start()
    outer = "interrupted"
    with suppress(Interrupted):
        outer = history.close(60)
    again = history.close(0.1)
    other.close(60)
    status = json.loads(Path(outdir, "run.json").read_text())["status"]
    return inner, outer, again, [row["x"] for row in rows(outdir)], status


def garbage(rank, outdir, where):
    """Let the last reference to a History be one that a thread of its own collects."""

    class Collector:
        name = "collector"

        def write(self, record):
            if where == "backend" and record.step == 0:
                ready.wait(60)
                gc.collect()

        def close(self):
            pass

    class Ring:
        """Garbage that only the collector finds."""

    gc.disable()
    ready = threading.Event()

    def train():
        ring = Ring()
        ring.itself = ring
        history = ring.history = everyrank.History(
            outdir=outdir, sync_every=20, backends=[Collector()]
        )

        def collect():
            ready.wait(60)
            if where == "flow":
                gc.collect()

        history._flow.order(collect)
        for step in range(30):
            history.update({"x": step})

    train()
    ready.set()
    facts = Path(outdir, "run.json")
    until(lambda: gc.isenabled() or json.loads(facts.read_text())["status"] != "running")
    return [row["x"] for row in rows(outdir)], json.loads(facts.read_text())["status"]


def count():
    """Count the threads and the file descriptors of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def many(rank, outdir):
    """Open and close many Histories one after the other, then many at once."""

    def one(name):
        with everyrank.History(outdir=f"{outdir}/{name}", per_rank=True) as history:
            for _ in range(3):
                str(history.update({"x": 1.0}))

    one("first")
    before = count()
    for i in range(150):
        one(f"in a row {i}")
    in_a_row = count()
    at_once = [everyrank.History(outdir=f"{outdir}/at once {i}") for i in range(50)]
    for _ in range(5):
        for history in at_once:
            history.update({"x": 1.0})
    closed = [history.close(60) and len(history) for history in at_once]
    del at_once, history
    return before, in_a_row, count(), closed


def full_disk(rank, outdir):
    """Run into a full disk and out of it again, as files that may not grow."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    history = everyrank.History(outdir=outdir, per_rank=True)
    history.update({"x": 0})
    before = history.flush(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    for step in range(1, 200):
        history.update({"x": step})
    history.update({"x": 100}, step=100)
    full = history.flush(60)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    after = history.flush(60)
    closed = history.close(60)
    return (before, full, after, closed), [row["x"] for row in rows(outdir)]


def full_from_the_start(rank, outdir):
    """Open a History where not even its facts can be written, and again once they can."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    threads = threading.active_count()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    held = None
    try:
        everyrank.History(outdir=outdir, run_id="again")
    except everyrank.RunDirectoryError as error:
        held = error  # and with it all frames of the call, as a notebook does
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    began = threading.active_count() - threads
    with everyrank.History(outdir=outdir, run_id="again") as history:
        history.update({"x": 1})
    return str(held), began, len(rows(outdir))


def stops_for_a_while(rank, outdir):
    """Stand still for longer than others wait, as a suspended job does, and go on."""
    history = everyrank.History(outdir=outdir, timeout=0.5)
    Path(outdir, f"pid-{rank}").write_text(str(os.getpid()))
    over = Path(outdir, "over")
    history.update({"x": float(rank)}, step=0)
    together = history.flush(60)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    step = 0

    def missing():
        nonlocal step
        step += 1
        history.update({"x": float(rank)}, step=step)
        history.flush(0.05)
        return history.health()["missing_ranks"]

    if rank == 0:
        until(lambda: missing() == {"1": "silent"})
        os.kill(int(Path(outdir, "pid-1").read_text()), signal.SIGCONT)
        until(lambda: not missing())
        over.touch()
    else:
        until(lambda: missing() is not None and over.exists())
    closed = history.close(60)
    return together, closed, len(history["x"]) == step + 1, history.health()["failures"]


def forked_by_multiprocessing(rank, outdir):
    """Train in a process that is forked, and that ends without closing its History."""
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=_forget, args=(outdir,))
    child.start()
    child.join(60)
    return child.exitcode, len(rows(outdir))


def _forget(outdir):
    history = everyrank.History(outdir=outdir, sync_every=50)
    sys.modules[__name__].kept = history
    for step in range(30):
        history.update({"x": step})


def forgetful_ranks(rank, outdir, alive):
    """Train on several ranks, and end without closing; torch.distributed may be alive then."""
    import torch.distributed as dist

    history = everyrank.History(outdir=outdir, sync_every=50, timeout=20)
    sys.modules[__name__].kept = history
    for step in range(30):
        history.update({"x": float(rank + step)})
    dist.barrier()
    if alive:
        dist.is_initialized = lambda: False  # so that whoever called us destroys nothing
