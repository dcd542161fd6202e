"""Two calls that get a training script going: torch.distributed, and a Weights & Biases run.

rank = everyrank.setup_torch(seed=0)
everyrank.setup_wandb("my-project")
history = everyrank.History()
"""

from __future__ import annotations

import logging
import os
import random
import zlib
from datetime import timedelta
from typing import Any

import numpy as np

from everyrank.environment import switched_on
from everyrank.errors import MissingPackage, OptionError
from everyrank.ranks import discover
from everyrank.ranks.base import Identity
from everyrank.ranks.launcher import from_environment, master_address

_log = logging.getLogger("everyrank")


def setup_torch(
    *, backend: str | None = None, seed: int | None = None, timeout: float | None = None
) -> int:
    """Join the other processes of this launch through torch.distributed, and give this one's rank.

    Works under torchrun, SLURM, Open MPI and PMI; MASTER_ADDR and MASTER_PORT are filled in where
    the launcher leaves them open. Each process takes the CUDA device of its local rank. A single
    process initialises nothing and has rank 0; what is initialised already is left as it is.

    `seed` seeds Python, numpy and torch alike on every rank, so that all begin with one model; for
    noise that differs between ranks call torch.manual_seed(seed + rank) once the model is built.
    `timeout` is in seconds, and torch's own if it is None.

        rank = everyrank.setup_torch(seed=0)
    """
    try:
        import torch
    except ImportError as error:
        raise MissingPackage("setup_torch", "torch", "torch") from error
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    me = from_environment()
    if me is None or me.world_size == 1:
        return 0
    _meet_at_master(me)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(me.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"),
        rank=me.rank,
        world_size=me.world_size,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    return me.rank


def _meet_at_master(me: Identity) -> None:
    """Fill in where rank 0 listens, for torch and for whatever else reads it."""
    address = master_address()
    if address is None:
        raise OptionError(
            f"MASTER_ADDR is not set, and the {me.source} environment does not say on which host "
            f"rank 0 of the {me.world_size} ranks is. Set it to that host on every rank, for "
            "example: export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)"
        )
    os.environ["MASTER_ADDR"] = address
    # All ranks derive the same port from the job; it lies below the ephemeral ones, and two jobs on
    # one host seldom share it.
    os.environ.setdefault("MASTER_PORT", str(15000 + zlib.crc32(me.job.encode()) % 15000))


def setup_wandb(project_name: str | None = None, **options: Any) -> Any | None:
    """Start a Weights & Biases run on rank 0, and give it; None where there is none.

    `options` are those of wandb.init. Nothing is raised: where W&B cannot start, a warning says why
    and training goes on. WANDB_DISABLED=1 or WANDB_MODE=disabled switches it off without a word.

        run = everyrank.setup_wandb("my-project", config={"lr": 3e-4})
    """
    if wandb_disabled(options.get("mode")) or discover().identity.rank != 0:
        return None
    try:
        import wandb  # pyright: ignore[reportMissingImports]

        return wandb.init(**{"project": project_name, **options})
    except ImportError as error:
        missing = MissingPackage("setup_wandb", "wandb", "wandb")
        _log.warning("%s W&B is off for this run. (%s)", missing, error)
    except Exception as error:  # noqa: BLE001 - whatever W&B does, training goes on
        _log.warning("W&B is off for this run: wandb.init failed with %r.", error)
    return None


def wandb_disabled(mode: str | None = None) -> bool:
    """Say whether the user has switched W&B off."""
    switched_off = switched_on("WANDB_DISABLED")
    return switched_off or (mode or os.environ.get("WANDB_MODE")) == "disabled"
