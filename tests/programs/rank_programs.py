"""What ranks of the tests run: plain functions, so that a new process imports little else."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time


def who(rank):
    """Give what the launcher's environment says."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {name: os.environ[name] for name in names}


def job(rank):
    return os.environ["TORCHELASTIC_RUN_ID"]


def variable(rank, name):
    return os.environ.get(name)


def imported(rank, name):
    return name in sys.modules


def total(rank, addend):
    import torch

    value = torch.tensor(float(rank + addend))
    torch.distributed.all_reduce(value)
    return value.item()


def threads(rank):
    import torch

    return torch.get_num_threads()


def fail_on(rank, bad):
    if rank in bad:
        raise ValueError(f"rank {rank} has had enough")
    return rank


def fail_and_hang(rank):
    """Fail on rank 0, while the others wait for it in a collective."""
    import torch

    if rank == 0:
        raise ValueError("rank 0 has had enough")
    torch.distributed.all_reduce(torch.ones(1))


def kill_on(rank, bad):
    if rank in bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def exit_on(rank, bad, code):
    if rank in bad:
        os._exit(code)
    return rank


def hang_on(rank, bad):
    if rank in bad:
        a_place_to_hang()
    return rank


def a_place_to_hang():
    threading.Event().wait()


def unpicklable(rank):
    return threading.Lock()


def large(rank, size):
    return bytes(size)


def leave_a_thread_behind(rank):
    """Return, but never exit."""
    threading.Thread(target=time.sleep, args=(3600,), name="left behind").start()
    return rank


def pid_then_hang(rank, path):
    with open(f"{path}/{rank}", "w") as file:
        file.write(str(os.getpid()))
    a_place_to_hang()
