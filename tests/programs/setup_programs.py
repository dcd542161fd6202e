"""What ranks of the setup tests run."""

from __future__ import annotations

import os
import random

import numpy as np

import everyrank


def join(rank, seed):
    """Set torch up, and give what came of it on this rank."""
    assert everyrank.setup_torch(seed=seed, timeout=60) == rank
    import torch
    import torch.distributed as dist

    noise = [random.random(), float(np.random.rand()), torch.rand(1).item()]
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    again = everyrank.setup_torch()
    result = {
        "backend": dist.get_backend(),
        "noise": noise,
        "total": total.item(),
        "again": again,
        "master": (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
    }
    dist.destroy_process_group()
    return result


def join_without_an_address(rank):
    """Set torch up where nobody has said where the ranks meet."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return join(rank, 0)
