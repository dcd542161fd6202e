"""What ranks of the discovery tests run: frameworks initialised in processes of their own."""

from __future__ import annotations

import os
import threading
import time

from host_programs import PATIENT, End

from everyrank.ranks import discover


def notes_of(store, rank, barrier):
    """Leave notes on the first rank, and give what there was before and after."""
    before = store.look("a/key")
    barrier()
    if rank == 0:
        store.leave("a/key", "old")
        store.leave("a/key", "new")
    deadline = time.monotonic() + PATIENT
    while (after := store.look("a/key")) != "new" and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    return [before, after]


def notes_in_torch(rank):
    import torch.distributed as dist

    store = discover().store()
    return [*notes_of(store, rank, dist.barrier), str(store)]


def meet_in_jax(rank):
    """Initialise jax.distributed, and reduce over its processes."""
    import jax

    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", 2, rank)
    me = discover().identity
    client = discover().store()._client
    notes = notes_of(
        discover().store(), rank, lambda: client.wait_at_barrier("notes", int(PATIENT * 1000))
    )
    end = End(None)
    for step in range(2):
        end.start(step, step + rank)
    end.until(lambda: not end.end.unfinished)
    end.finish()
    jax.distributed.shutdown()
    who = (me.source, me.rank, me.world_size, me.local_rank, me.local_world_size)
    return {"who": who, "notes": notes, "means": end.values("loss/mean")}
