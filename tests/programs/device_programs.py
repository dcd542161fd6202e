"""What ranks of the device transport's tests run."""

from __future__ import annotations

import os
import signal

import everyrank


def value(rank, step):
    return 1000.0 * rank + step


def together(rank, outdir, sync_every, steps, metrics=1):
    """Log the same on every rank, and count the collectives."""
    with everyrank.History(outdir=outdir, sync_every=sync_every, transport="device") as history:
        for step in range(steps):
            history.update({f"loss{m}": value(rank, step) for m in range(metrics)})
    collectives = history.health()["collectives"]
    return list(history["loss0/mean"]), list(history["loss0/std"]), collectives, history.run_id


def disagree(rank, outdir):
    """Log other keys and more steps on one rank than on the other."""
    with everyrank.History(outdir=outdir, transport="device") as history:
        for step in range(5 + 3 * rank):
            history.update({f"rank{rank}": 1.0, "loss": value(rank, step)})
    return list(history["loss/mean"]), list(history["loss/ranks"]), list(history["rank1/mean"])


def flushed(rank, outdir):
    """Ask for the others' open windows in the middle."""
    import torch.distributed as dist

    history = everyrank.History(outdir=outdir, transport="device", sync_every=100)
    for step in range(7):
        history.update({"loss": value(rank, step)})
    dist.barrier()
    done = history.flush(60)
    dist.barrier()
    seen = list(history["loss/mean"])
    history.close()
    return done, seen


def absent(rank, outdir):
    """Log nothing on rank 1, which lives on for longer than anybody waits."""
    import torch.distributed as dist

    history = everyrank.History(outdir=outdir, transport="device", timeout=2)
    if rank == 0:
        history.update({"loss": 1.0}, step=0)
        history.flush(30)
        history.update({"loss": 2.0}, step=1)
        history.close()
    dist.barrier()
    os._exit(0) if rank else None
    return list(history["loss"]), list(history["loss/ranks"])


def killed(rank, outdir):
    """Log for as long as the other does; rank 1 is killed by the system."""
    history = everyrank.History(outdir=outdir, transport="device", timeout=10)
    for step in range(20):
        history.update({"loss": value(rank, step)}, step=step)
        if step == 9:
            history.flush(20)
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
    history.close()
    return list(history["loss"]), list(history["loss/ranks"])


def without_torch_distributed(rank, outdir):
    try:
        everyrank.History(outdir=outdir, transport="device")
    except everyrank.OptionError as error:
        return str(error)
