"""Every feature once, on two ranks in one process: read this to see what everyrank does."""

from __future__ import annotations

import json
import math

import numpy as np

from everyrank import History, StopWatch
from everyrank.backends.console import Console
from everyrank.backends.every import Every
from everyrank.ranks.local import in_process
from everyrank.testing import MemoryBackend


def test_everything_once(tmp_path, capsys):
    """Two ranks train, disagree, go back, resume and end."""
    memory = MemoryBackend()
    stats = ("mean", "max", "min", "std", "p50", "max_rank")
    members = in_process(2, stats=stats)
    ranks = [
        History(
            keys=["accuracy"],
            outdir=tmp_path,
            run_id="tiny",
            config={"lr": 0.1, "password": "hush"},
            group=members[0],
            stats=stats,
            per_rank=True,
            backends=[memory, Every(2, to=Console(total_steps=4, only=["loss/mean"]))],
        ),
        History(group=members[1], stats=stats),
    ]

    # Describe a metric once; its mean over ranks is sum(tokens x loss) / sum(tokens).
    for history in ranks:
        history.declare("loss", unit="nats", better="lower", weight="tokens")

    # Hand over numbers, small arrays, texts, and dicts of them. The buffer may be used again.
    buffer = np.zeros(3)
    for step in range(3):
        for rank, history in enumerate(ranks):
            buffer[:] = step
            values = {"loss": 1.0 + 2 * rank, "tokens": 30 if rank else 10, "norms": buffer}
            summary = history.update({**values, "optim": {"lr": 0.1}}, precision=2)
            buffer[:] = -1.0
    assert str(summary).startswith("step=2 loss=3.00 loss/mean=2.50 loss/max=3.00 loss/min=1.00")

    # Ranks may log other keys, at other steps, or nothing.
    with StopWatch("evaluate", history=ranks[0], log=False):
        pass
    ranks[0].update({"eval/accuracy": math.nan, "phase": "warmup"}, step=2)
    ranks[1].close()

    # Look at it, on any rank, at any time.
    assert ranks[0].flush()
    assert list(ranks[0]["loss"]) == [1.0, 1.0, 1.0]
    for history in ranks:
        assert list(history["loss/mean"]) == [2.5, 2.5, 2.5]
        assert list(history["loss/std"]) == [1.0, 1.0, 1.0]
        assert list(history["loss/max_rank"]) == [1, 1, 1]
    assert [norm.tolist() for norm in ranks[0]["norms"]] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert len(ranks[0]["accuracy"]) == 0
    assert ranks[0].latest.values["eval/accuracy/ranks"] == 1
    assert ranks[0].latest.values["phase"] == "warmup"
    assert ranks[0].latest.values["timing/evaluate"] < 60

    # A checkpoint knows the step. A step that goes back supersedes what came after it.
    state = ranks[0].state_dict()
    ranks[0].update({"loss": 0.5}, step=1)
    assert list(ranks[0].steps) == [0, 1]
    ranks[0].close()

    # All of it is in plain files, and a run that is opened again goes on.
    rows = [json.loads(line) for line in (tmp_path / "tiny.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 1]
    assert rows[0]["loss/mean"] == 2.5
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["status"], facts["config"]["password"]) == ("finished", "***")
    assert (tmp_path / "ranks" / "rank-00000.jsonl").exists()
    with History(outdir=tmp_path) as again:
        again.load_state_dict({**state, "step": 0})
        again.update({"loss": 0.75})
        assert list(again["loss"]) == [1.0, 0.75]

    # Backends saw every record, in order, as it came.
    assert [record.step for record in memory.records] == [0, 1, 2, 2, 1]
    assert "loss/mean=2.500000" in capsys.readouterr().out
