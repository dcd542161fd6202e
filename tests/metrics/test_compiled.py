"""`update` in compiled training: no graph break, no recompilation a step, the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

import everyrank.metrics
from everyrank.metrics import Collection, Ema, Last, Max, Mean, Min, Running, Std, Sum, WeightedMean

MAKE = {
    "Sum": Sum,
    "Mean": Mean,
    "Max": Max,
    "Min": Min,
    "Std": Std,
    "Last": Last,
    "WeightedMean": WeightedMean,
    "Running": lambda: Running(Mean(), 3),
    "Ema": lambda: Ema(Mean(), 0.5),
    "Collection": lambda: Collection(a=Mean(), b=Max(), c=Std()),
}


def update(metric, values):
    if isinstance(metric, Collection):
        metric.update({"a": values, "b": values, "c": values})
    elif isinstance(metric, WeightedMean):
        metric.update(values, 2.0)
    else:
        metric.update(values)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", MAKE)
def test_a_compiled_step_is_one_graph_that_is_compiled_once(name):
    """The first call opens the numbers; from the second on nothing is compiled any more."""
    metric, eager = MAKE[name](), MAKE[name]()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(values):
        doubled = values * 2.0
        update(metric, doubled)
        return doubled.sum()

    compiled = []
    for i in range(6):
        values = torch.arange(4.0) * i
        step(values)
        update(eager, values * 2.0)
        compiled.append(graphs())
        if i == 3:  # what happens between steps is no reason to compile again
            metric.sync()
            eager.sync()
    assert compiled[1:] == [2] * 5
    found, wanted = metric.compute(), eager.compute()
    if isinstance(metric, Collection):
        assert list(map(float, found.values())) == pytest.approx(
            list(map(float, wanted.values())), rel=1e-12
        )
    else:
        assert float(found) == pytest.approx(float(wanted), rel=1e-12)


def test_the_default_compiler_gives_the_same_numbers():
    """With kernels that are really generated."""
    metrics = Collection(a=Mean(), b=Max(), c=Std())

    @torch.compile(fullgraph=True)
    def step(values):
        metrics.update({"a": values, "b": values, "c": values})

    for i in range(3):
        step(torch.arange(1000.0) + i)
    found = metrics.read()
    assert found["a"] == 500.5
    assert found["b"] == 1001
    assert found["c"] == pytest.approx(288.676, rel=1e-4)


def test_numbers_that_were_opened_before_are_compiled_once_only():
    """`to` opens them ahead, as one has to before a CUDA graph is captured."""
    metric = Mean().to("cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(values):
        metric.update(values)

    for i in range(4):
        step(torch.ones(3) * i)
    assert graphs() == 1
    assert metric.compute() == 1.5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_goes_on_counting():
    """Replayed, it writes to the same numbers, whatever became of the window in between."""
    metrics = Collection(a=Mean(), b=Max()).to("cuda")
    values = torch.zeros((), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        metrics.update({"a": values, "b": values})
    torch.cuda.current_stream().wait_stream(stream)
    metrics.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        metrics.update({"a": values, "b": values})
    for i in range(4):
        values.fill_(float(i))
        graph.replay()
        if i == 1:
            metrics.sync()
            metrics.reset()
    assert metrics.read() == {"a": 2.5, "b": 3.0}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_waits_for_the_device():
    """Neither update, nor the sync of a group of one, nor compute."""
    metrics = Collection(a=Mean(), b=Max(), c=Std(), d=Last()).to("cuda")
    values = {name: torch.ones((), device="cuda") for name in metrics}
    metrics.update(values)
    metrics.sync()
    metrics.compute()
    metrics.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metrics.update(values)
            metrics["c"].update(torch.ones(5, device="cuda"))
            metrics.trigger_sync()
            metrics.wait_sync()
            found = metrics.compute()
            metrics.reset()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found["a"] == 1


def samples(name, n):
    if name in ("NDCG", "HitRate"):
        return torch.randn(n, 6), torch.randint(0, 2, (n, 6))
    if name in ("Running", "Quantile"):
        return (torch.randn(n),)
    return torch.rand(n, 5), torch.randint(0, 5, (n,))


OF_ANY_SIZE = {
    "Accuracy": lambda: everyrank.metrics.Accuracy(classes=5, average="macro", top_k=2),
    "ConfusionMatrix": lambda: everyrank.metrics.ConfusionMatrix(classes=5),
    "CalibrationError": lambda: everyrank.metrics.CalibrationError(classes=5),
    "Perplexity": everyrank.metrics.Perplexity,
    "NDCG": everyrank.metrics.NDCG,
    "HitRate": lambda: everyrank.metrics.HitRate(k=2),
    "Quantile": everyrank.metrics.Quantile,
    "Running": lambda: Running(Mean(), 3),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_batches_of_any_size_are_one_graph(name):
    """Beside that of the first call; nothing is compiled anew for each size."""
    metric = OF_ANY_SIZE[name]()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(*batch):
        metric.update(*batch)

    for n in range(3, 13):
        step(*samples(name, n))
    assert graphs() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda i: LAST.update(torch.tensor(1.0) * i, order=i),
        lambda i: WEIGHTED.update(torch.tensor(1.0), i),
        lambda i: MEAN.update(i),
    ],
    ids=["order", "weight", "value"],
)
def test_numbers_that_count_up_are_one_graph(call):
    """A step or a number of tokens differs each time."""
    step = torch.compile(call, fullgraph=True, backend="aot_eager")
    for i in range(10):
        step(i)
    assert graphs() <= 3


LAST, WEIGHTED, MEAN = Last(), WeightedMean(), Mean()
