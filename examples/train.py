"""Train a small language model on several processes, and record every rank.

    torchrun --nproc-per-node 4 examples/train.py

It learns to write Python from the standard library's own source. Each rank draws texts of other
lengths, so its loss counts by its number of tokens.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everyrank
from everyrank.backends.console import Console
from everyrank.backends.every import Every

STEPS, BATCH, CONTEXT = 200, 16, 64
SHOWN = ["loss/mean", "loss/max", "loss/min", "loss/max_rank", "ms/max", "ms/max_rank"]


class Model(nn.Module):
    """Predict each byte of a text from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        n = text.shape[1]
        x = self.token(text) + self.place[:n]
        return self.head(self.layers(x, mask=self.mask[:n, :n], is_causal=True))


def main(outdir: str | None) -> None:
    rank = everyrank.setup_torch(seed=0)
    source = b"".join(p.read_bytes() for p in sorted(library().glob("*.py"))[:40])
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)

    console = Every(20, to=Console(total_steps=STEPS, precision=3, only=SHOWN))
    stats = ("mean", "max", "min", "std", "max_rank")
    with everyrank.History(outdir=outdir, stats=stats, backends=[console]) as history:
        history.declare("loss", unit="nats", better="lower", weight="tokens")
        history.declare("ms", unit="ms", better="lower", format=".0f")
        for step in range(1, STEPS + 1):
            start = time.perf_counter()
            length = int(torch.randint(CONTEXT // 2, CONTEXT, ()))
            at = torch.randint(len(data) - CONTEXT, (BATCH, 1)) + torch.arange(length)
            loss = nn.functional.cross_entropy(
                model(data[at]).flatten(0, 1), data[at + 1].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ms = (time.perf_counter() - start) * 1e3
            history.update({"loss": loss, "tokens": at.numel(), "ms": ms}, step=step)
    if rank == 0:
        tell(history)
    torch.distributed.destroy_process_group()


def tell(history: everyrank.History) -> None:
    """Say what was learned, who was slow, and where to look."""
    loss, slowest = history["loss/mean"], history["ms/max_rank"].values
    rank = int(torch.tensor(slowest).mode().values)
    print(f"\nloss over all ranks: {loss[0]:.3f} -> {loss[-1]:.3f} nats a byte")
    print(f"rank {rank} was the slowest in {(slowest == rank).sum()} of {len(slowest)} steps")
    print(f"every step of every rank: {history.outdir}/{history.run_id}.jsonl")
    print(f"what is known of the run: {history.outdir}/run.json")


def library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
