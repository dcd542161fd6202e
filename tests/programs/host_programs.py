"""What ranks of the host tests run: ends of the star in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import signal
import socket
import time
from pathlib import Path

import numpy as np

from everyrank.ranks import discover
from everyrank.ranks.door import make_room
from everyrank.ranks.host import host_ranks
from everyrank.records import Batch

PATIENT = 60.0


class End:
    """One end of the star, the rows that it was given, and what was said on the way."""

    def __init__(self, directory, *, timeout=PATIENT, name="train.py:1"):
        self.selector = selectors.DefaultSelector()
        self.end = host_ranks(
            discover(directory=None if directory is None else Path(directory)),
            name=name,
            stats=("mean",),
            timeout=timeout,
            facts={"run_id": "a"},
            selector=self.selector,
        )
        self.given = []
        self.said = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())
        logging.getLogger("everyrank").addHandler(handler)

    def start(self, step, value):
        numbers = np.array([[value]], float)
        self.end.start(Batch(np.array([step]), np.array([0.0]), ("loss",), numbers, ("float",) * 1))
        self.poll()

    def poll(self):
        self.given += [record for batch in self.end.poll() for record in batch]

    def until(self, condition):
        deadline = time.monotonic() + PATIENT
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.poll()
            self.selector.select(0.002)

    def finish(self):
        self.end.leave()
        self.until(lambda: not self.end.unfinished)
        self.end.close()
        self.selector.close()

    def values(self, name):
        return [
            (record.step, record.values[name]) for record in self.given if name in record.values
        ]


def reduce(rank, directory):
    """Reduce over all ranks in two Histories of one name, and give the means."""
    ends = [End(directory), End(directory)]
    for step in range(20):
        for i, end in enumerate(ends):
            end.start(step, step + rank + 100 * i)
    for end in ends:
        # Together, so that nobody's goodbye comes before another has said anything.
        end.until(lambda end=end: not end.end.unfinished)
    for end in ends:
        end.finish()
    return [end.values("loss/mean") for end in ends]


def reduce_until_killed(rank, directory, victim):
    """Reduce over all ranks, one of which dies when half of it is done."""
    end = End(directory)
    for step in range(40):
        if step == 20:
            end.until(lambda: not end.end.unfinished)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
        end.start(step, rank)
    end.until(lambda: not end.end.unfinished)
    end.finish()
    steps = [step for step, _ in end.values("loss")]
    return {"steps": steps, "ranks": end.values("loss/ranks")[-1][1], "said": end.said}


def outlive_the_store(rank):
    """Open an end whose store is the one of a process that is dead."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=2)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    port = int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + PATIENT
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    end = End(None, timeout=0.2)
    for step in range(3):
        end.start(step, 1.0)
    end.until(lambda: end.end._search.wait is None)
    end.until(lambda: end.said)
    end.finish()
    os.write(1, b"")
    return {"steps": [step for step, _ in end.values("loss")], "said": end.said}


def room_for(rank, n):
    """Give the limits of file descriptors after room was made for n ranks, and before."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    make_room(16)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    make_room(n)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], before
