"""What ranks of the History's tests run: whole small programs, as a user would write them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import everyrank


def value(rank, step, name):
    """Give a number that says where it came from: rank, step and name all show in it."""
    return 1000.0 * rank + step + len(name) / 16


def tell(history, *names):
    """Give what a rank sees of some names."""
    return {name: (history[name].steps.tolist(), list(history[name])) for name in names}


def together(rank, outdir, sync_every, steps, stats):
    """Log the same on every rank, as nearly all programs do."""
    with everyrank.History(outdir=outdir, sync_every=sync_every, stats=stats) as history:
        for step in range(steps):
            history.update({name: value(rank, step, name) for name in ("loss", "lr")})
    return tell(history, "loss", *[f"loss/{stat}" for stat in stats])


def tables(rank, outdir, sync_every, table, weights):
    """Log rows of a table, {step: {name: value}} for each rank, and read everything back."""
    with everyrank.History(outdir=outdir, sync_every=sync_every, timeout=30) as history:
        if weights:
            history.declare("a", weight="w")
        for step, row in table[rank]:
            history.update(row, step=step)
    return [(r.step, dict(r.values)) for r in history]


def other_keys(rank, outdir):
    """Log a key of one's own, in another order than the others, and one that all have."""
    with everyrank.History(outdir=outdir) as history:
        for step in range(8):
            mine = {f"rank{rank}": value(rank, step, "x"), "loss": value(rank, step, "loss")}
            history.update(dict(reversed(mine.items())) if rank % 2 else mine)
    return tell(history, "loss", "loss/mean", "rank0/mean", "rank1/mean", "rank1/ranks")


def other_numbers(rank, outdir):
    """Log the more steps the higher the rank."""
    with everyrank.History(outdir=outdir, timeout=20) as history:
        for step in range(4 + 2 * rank):
            history.update({"loss": value(rank, step, "loss")})
    if rank:
        return None
    return tell(history, "loss", "loss/max", "loss/ranks")


def on_rank_0_only(rank, outdir):
    """Build the History as seed programs do: `if rank == 0`."""
    import torch.distributed as dist

    seen = None
    if rank == 0:
        with everyrank.History(outdir=outdir) as history:
            for step in range(5):
                history.update({"loss": float(step)})
            history.close()
            seen = tell(history, "loss", "loss/mean", "loss/ranks")
    dist.barrier()
    return seen


def nothing_on_rank_1(rank, outdir):
    """Open a History on every rank, but log on rank 0 only."""
    with everyrank.History(outdir=outdir, timeout=2) as history:
        if rank == 0:
            for step in range(5):
                history.update({"loss": float(step)})
    return tell(history, "loss/mean", "loss/ranks") if rank == 0 else None


def finalize_on_rank_0_only(rank, outdir):
    """End as a quick start does, on rank 0 alone; the others go on."""
    import torch.distributed as dist

    history = everyrank.History(outdir=outdir)
    for step in range(10):
        history.update({"loss": value(rank, step, "loss")})
    if rank == 0:
        history.finalize()
    dist.barrier()
    history.update({"loss": -1.0})
    history.close()
    return tell(history, "loss", "loss/max")


def branches(rank, outdir, one_more):
    """Open the History on another line on rank 0, and perhaps one more before it."""
    if rank == 0:
        extra = everyrank.History(outdir=f"{outdir}/extra") if one_more else None
        history = everyrank.History(outdir=outdir)
        history.update({"loss": 1.0})
        if extra is not None:
            extra.update({"loss": -5.0})
            extra.close()
    else:
        history = everyrank.History()
        history.update({"loss": 3.0})
    history.close(30)
    return tell(history, "loss/mean")


def two_at_once(rank, outdir):
    """Open two Histories whose names are the same."""
    with (
        everyrank.History(outdir=f"{outdir}/a") as a,
        everyrank.History(outdir=f"{outdir}/b", timeout=30) as b,
    ):
        for step in range(5):
            a.update({"loss": float(rank)}, step=step)
            b.update({"loss": 10.0 + rank}, step=step)
    return tell(a, "loss/mean"), tell(b, "loss/mean")


def in_other_order(rank, outdir):
    """Open two Histories on one line, on rank 1 in the other order."""
    names = ("a", "b") if rank == 0 else ("b", "a")
    opened = {name: everyrank.History(outdir=f"{outdir}/{name}", timeout=30) for name in names}
    for name, history in opened.items():
        history.update({"loss": rank + 10.0 * (name == "b")})
    for history in opened.values():
        history.flush()
    seen = {name: list(opened[name]["loss/mean"]) for name in "ab"}
    for history in opened.values():
        history.close()
    return seen


def late(rank, outdir):
    """Read on rank 0 before rank 1 has opened its History."""
    import torch.distributed as dist

    seen = None
    if rank == 0:
        history = everyrank.History(outdir=outdir)
        for step in range(3):
            history.update({"loss": float(step)})
        seen = list(history["loss"]), len(history["loss/mean"]), len(history), len(history.history)
    dist.barrier()
    if rank:
        history = everyrank.History(outdir=outdir)
        for _ in range(3):
            history.update({"loss": 1.0})
    history.close()
    return seen


def killed(rank, outdir, victim, at):
    """Log for as long as others do; one rank is killed by the system."""
    history = everyrank.History(outdir=outdir, timeout=20)
    for step in range(30):
        history.update({"loss": value(rank, step, "loss")}, step=step)
        if step == at:
            history.flush(20)
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
    history.close()
    seen = tell(history, "loss", "loss/mean")
    return seen, history["loss/ranks"].values.tolist()


def groups(rank, outdir, kind):
    """Restrict statistics to this rank's half of four."""
    import torch.distributed as dist

    if kind == "mesh":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        options = {"mesh": mesh["dp"]}
    elif kind == "group":
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        options = {"group": halves[rank // 2]}
    else:
        options = {"group": [0, 1] if rank < 2 else [2, 3]}
    with everyrank.History(outdir=outdir, **options) as history:
        for step in range(3):
            history.update({"loss": float(rank)}, step=step)
    return list(history["loss/mean"])


def environment_off(rank, outdir):
    with everyrank.History(outdir=outdir) as history:
        history.update({"loss": float(rank)})
    return list(history["loss/mean"]), history.health().get("missing_ranks")


def per_rank(rank, outdir):
    """Let every rank keep its own log; rank 1 is not told where."""
    options = {"outdir": outdir} if rank == 0 else {}
    with everyrank.History(per_rank=True, sync_every=4, **options) as history:
        for step in range(10):
            history.update({"loss": value(rank, step, "loss")})
    return history.run_id, str(history.outdir)


def quickstart(rank, outdir):
    """Run the quick start of the documentation that the library grew from, imports changed."""
    os.chdir(outdir)
    lines = []

    class logger:  # noqa: N801 - the name in that program
        @staticmethod
        def info(message):
            lines.append(str(message))  # as a handler does, at once

    def train_step(step):
        import torch

        return torch.tensor(1.0 / (step + 1) + rank)

    rank = everyrank.setup_torch()
    history = everyrank.History()

    for step in range(100):
        loss = train_step(step)
        # update() returns a summary string suitable for logging
        summary = history.update({"step": step, "loss": loss.item()})
        logger.info(summary)  # e.g. "step=42 loss=0.123456"

    if rank == 0:
        history.finalize(outdir="./outputs")
    return lines[:2], history.run_id


def interleaved(rank, outdir, sync_every, steps):
    """Log while training's own collectives run, and count those."""
    import torch
    import torch.distributed as dist

    sums = []
    with everyrank.History(outdir=outdir, sync_every=sync_every) as history:
        for step in range(steps):
            gradient = torch.full((8,), float(rank + step))
            history.update({"loss": gradient[0]})
            dist.all_reduce(gradient)
            sums.append(gradient[0].item())
    return sums, list(history["loss/mean"])


def destroyed_first(rank, outdir):
    """Tear down torch.distributed before the history."""
    import torch.distributed as dist

    history = everyrank.History(outdir=outdir)
    for step in range(5):
        history.update({"loss": float(rank)}, step=step)
    dist.destroy_process_group()
    delivered = history.close(30)
    return delivered, list(history["loss/mean"])


def slow_rank(rank, outdir, steps):
    """Let rank 1 be behind the others all the time, so that windows pile up."""
    with everyrank.History(outdir=outdir, timeout=60) as history:
        for step in range(steps):
            history.update({"loss": value(rank, step, "loss")})
            if rank == 1 and step % 100 == 0:
                time.sleep(0.05)
    return list(history["loss/min"]) == [value(0, step, "loss") for step in range(steps)]


def life(rank, outdir, first, last, checkpoint, generation_value):
    """Train from a checkpoint for some steps, and give the next checkpoint's state."""
    history = everyrank.History(outdir=outdir, sync_every=3)
    if checkpoint is not None:
        history.load_state_dict(checkpoint)
    for step in range(first, last):
        history.update({"loss": generation_value + rank}, step=step)
        if step % 10 == 9:
            history.update({"eval/loss": generation_value}, step=step)
    state = history.state_dict()
    history.close()
    return state, tell(history, "loss", "eval/loss")


def until_killed(outdir, sync_every):
    """Log for ever, telling the step after each update; the test kills this process."""
    history = everyrank.History(outdir=outdir, sync_every=sync_every)
    step = 0
    with Path(outdir, "told").open("ab", buffering=0) as told:
        while True:
            history.update({"loss": float(step), "other": step * 0.5}, step=step)
            told.write(b"%d\n" % step)
            step += 1
            time.sleep(0.0005)


def frames_sent(rank, outdir, sync_every, steps):
    """Count the frames that this rank sends, by kind."""
    from collections import Counter

    from everyrank.ranks.wire import Channel

    counts, send = Counter(), Channel._frame

    def counting(channel, kind, *parts):
        counts[kind.name] += 1
        return send(channel, kind, *parts)

    Channel._frame = counting
    with everyrank.History(outdir=outdir, sync_every=sync_every) as history:
        for step in range(steps):
            history.update({f"m{i}": value(rank, step, "m") for i in range(40)})
            time.sleep(0.001)
    return dict(counts)
