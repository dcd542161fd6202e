"""Torch values: taken where they are, copied by one kernel, read by nobody until they are asked for."""

from __future__ import annotations

import gc
import math
import re
import threading
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

from everyrank.errors import MetricError
from everyrank.intake import Intake
from everyrank.records import Batch, Record
from everyrank.stage.capture import relax_this_thread
from everyrank.window import Window, pack, values_of

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - torch may be missing

# Launching and copying; whatever is beside these in a count is a read, or memory.
READS = {"aten::_local_scalar_dense", "aten::item", "aten::_to_copy", "aten::is_nonzero"}


class Taken:
    """An intake, and the windows that it hands on."""

    def __init__(self, sync_every: int = 1) -> None:
        self.windows: list[Window] = []
        self.intake = Intake(
            self.windows.append, sync_every=sync_every, went_back=lambda last, step: 0
        )
        self.add = self.intake.add

    def batches(self) -> list[Batch]:
        """Give all that was handed over, as the background thread would."""
        self.intake.hand_over()
        assert all(window.ready() for window in self.windows)
        return [batch for window in self.windows for batch in pack(window.rows)]

    def records(self) -> list[Record]:
        return [record for batch in self.batches() for record in batch]

    def values(self, name: str = "x") -> list[Any]:
        return [record.values[name] for record in self.records()]


def through(value: Any) -> Any:
    """Hand over one value, and give what comes out."""
    taken = Taken()
    taken.add({"x": value})
    (out,) = taken.values()
    return out


class Counting(TorchDispatchMode):
    """Count the operations that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


FLOATS = [
    "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
]
INTS = ["int8 int16 int32 int64 uint8 uint16 uint32 uint64"]


def dtypes(names: list[str]) -> list[Any]:
    """Give the dtypes that this torch has."""
    return [getattr(torch, name) for name in names[0].split() if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", [*dtypes(FLOATS), *dtypes(INTS), torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_number_of_any_dtype_comes_out(dtype: Any, shape: tuple[int, ...]):
    """Floats come out as floats, ints as ints, bools as bools, whatever their width."""
    out = through(torch.full(shape, 1.0).to(dtype))
    kind = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    assert (type(out), out) == (kind, 1)


@pytest.mark.parametrize(
    "value",
    [
        *(torch.tensor(2**63 - 1), torch.tensor(-(2**63)), torch.tensor(2**53 + 1)),
        torch.tensor(2**64 - 1, dtype=torch.uint64),
        *(torch.tensor(0.1), torch.tensor(math.inf), torch.tensor(-math.inf, dtype=torch.half)),
    ],
    ids=str,
)
def test_a_number_keeps_its_value(value: Any):
    """Wide ints stay exact, and floats are those that the tensor held."""
    assert through(value) == value.item()


def test_a_nan_stays_a_nan():
    """A loss that is no number is reported as such."""
    assert math.isnan(through(torch.tensor(math.nan)))


@pytest.mark.parametrize("dtype", [*dtypes(FLOATS), *dtypes(INTS), torch.bool], ids=str)
def test_small_arrays_keep_their_shape(dtype: Any):
    """Vectors and matrices come out as they were, views and empty ones too."""
    value = torch.arange(6.0).reshape(2, 3).to(dtype).t()
    out = through(value)
    kind = "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "iu"
    assert out.dtype.kind in kind
    assert np.array_equal(out, value.double().numpy())
    assert through(torch.empty(0, dtype=dtype)).shape == (0,)
    assert through(torch.empty((2, 0), dtype=dtype)).shape == (2, 0)


def test_parameters_are_numbers():
    """A learned temperature is handed over as it is."""
    assert through(torch.nn.Parameter(torch.tensor(0.5))) == 0.5


@pytest.mark.parametrize("sync_every", [1, 3])
def test_a_tensor_may_be_written_after_the_call(sync_every: int):
    """What is done to a tensor after `update` changes nothing of what was handed over."""
    scalar, vector, wide = torch.tensor(0.0), torch.zeros(3), torch.tensor([0.0], dtype=torch.half)
    taken = Taken(sync_every)
    for step in range(3):
        for value in (scalar, vector, wide):
            value.fill_(step)
        taken.add({"x": scalar, "v": vector, "w": wide})
    for value in (scalar, vector, wide):
        value.fill_(99)
    assert taken.values("x") == taken.values("w") == [0, 1, 2]
    assert [v.tolist() for v in taken.values("v")] == [[0] * 3, [1] * 3, [2] * 3]


@pytest.mark.parametrize("sync_every", [1, 4])
def test_the_graph_is_let_go(sync_every: int):
    """A loss that requires grad does not keep its graph alive, though its row is still open."""
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    gone = weakref.ref(hidden)  # which the graph of its square keeps
    taken = Taken(sync_every)
    row = taken.add({"x": (hidden * hidden).sum(), "y": weight.max()})
    del hidden
    gc.collect()
    assert gone() is None
    assert (values_of(row)["x"], taken.values("y")) == (12.0, [1.0])


@pytest.mark.parametrize("sync_every", [1, 4])
def test_inference_mode_may_begin_and_end_within_a_window(sync_every: int):
    """A window opened in inference mode is written outside it, and the other way round."""
    taken = Taken(sync_every)
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            value = torch.tensor(2.0) * 3
            taken.add({"x": value, "v": torch.stack([value, value])})
    taken.add({"x": value.requires_grad_(), "v": torch.ones(2)})
    assert taken.values() == [6.0] * 5
    assert [v.tolist() for v in taken.values("v")] == [[6.0] * 2] * 4 + [[1.0] * 2]


@pytest.mark.parametrize("sync_every", [1, 50])
def test_an_update_is_one_operation(sync_every: int):
    """Twenty numbers on a device cost one launch, and nothing is read; no memory is taken either."""
    metrics = {f"m{i}": torch.tensor(float(i), requires_grad=i == 7) for i in range(20)}
    taken = Taken(sync_every)
    taken.add(metrics)  # opens the window
    with Counting() as counting:
        for _ in range(10):
            taken.add(metrics)
    (op,) = counting.ops
    assert (op, counting.ops[op]) in {("aten::stack", 10), ("aten::cat", 10)}
    assert len(taken.records()) == 11


def test_an_update_of_several_dtypes_is_one_operation_each():
    """Floats, ints and vectors in one call are a copy each, and nothing is read."""
    metrics = {"loss": torch.tensor(1.0), "n": torch.tensor(3), "v": torch.ones(4), "lr": 0.5}
    taken = Taken(sync_every=50)
    taken.add(metrics)
    with Counting() as counting:
        taken.add(metrics)
    assert not READS & set(counting.ops)
    assert counting.ops["aten::cat"] + counting.ops["aten::stack"] == 2


def test_nothing_is_read_until_the_window_is_packed():
    """From the call to the closed window, also for values that come for the first time."""
    taken = Taken(sync_every=2)
    kinds = (torch.float32, torch.int64, torch.float8_e5m2, torch.bool)
    updates = [{"x": torch.ones(()).to(dtype), "v": torch.ones(3)} for dtype in kinds]
    updates += [{"x": torch.tensor([[1.0]]), "eval": {"v": torch.ones(2, 2)}}]
    with Counting() as counting:
        for update in updates:
            taken.add(update)
        taken.intake.note("late", updates[0]["x"])
    assert not READS & set(counting.ops)
    assert len(taken.windows) == 2


def test_steps_that_look_alike_are_one_batch():
    """However many rows a block has room for, the rows come out in order and undisturbed."""
    taken = Taken(sync_every=150)
    for step in range(150):
        taken.add({"x": torch.tensor(step), "y": torch.tensor(step / 2), "lr": 0.5})
    packed = taken.batches()
    assert len(packed) < 5
    records = [record for batch in packed for record in batch]
    assert [dict(record.values) for record in records] == [
        {"x": step, "y": step / 2, "lr": 0.5} for step in range(150)
    ]


def test_what_changes_its_look_is_looked_at_again():
    """A value may change dtype and shape from step to step, and be of the host in between."""
    values = [
        *(torch.tensor(1.5), torch.tensor(2), torch.tensor([2.5]), torch.arange(2.0)),
        *(torch.arange(3.0), torch.tensor(1.5), 4.5, torch.tensor(True), torch.tensor(2**60)),
    ]
    taken = Taken(sync_every=4)
    for value in values:
        taken.add({"x": value, "y": torch.tensor(0.5)})
    outs = [np.array(out).tolist() for out in taken.values()]
    assert outs == [1.5, 2, 2.5, [0, 1], [0, 1, 2], 1.5, 4.5, True, 2**60]
    assert taken.values("y") == [0.5] * len(values)


def test_one_of_several_numbers_may_become_a_vector():
    """The others of its dtype go on as before."""
    taken = Taken(sync_every=4)
    for second in (torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2.0, 3.0])):
        taken.add({"x": torch.tensor(1.0), "y": second})
    assert taken.values() == [1.0] * 3
    assert [np.array(y).tolist() for y in taken.values("y")] == [2.0, 2.0, [2.0, 3.0]]


def test_large_windows_take_memory_as_they_fill():
    """A window of a million updates reserves none of them ahead."""
    taken = Taken(sync_every=1_000_000)
    row = taken.add({"x": torch.tensor(1.0), "v": torch.ones(60_000, dtype=torch.half)})
    numbers, vector = (part.block for part in row.parts)
    assert 1 < len(numbers.rows) <= 1_000
    assert len(vector.rows) == 1


def test_an_open_row_can_be_read():
    """Who prints an update sees its values though the window is open, and may write on."""
    taken = Taken(sync_every=9)
    x = torch.tensor(1.0)
    row = taken.add({"x": x, "n": torch.tensor(3), "v": torch.ones(2)})
    x.fill_(9)
    values = values_of(row)
    assert (values["x"], values["n"], values["v"].tolist()) == (1.0, 3, [1.0, 1.0])
    assert type(values["n"]) is int


def test_a_refused_update_leaves_the_window_as_it_was():
    """The values that a refused update had copied already are in nobody's way."""
    taken = Taken(sync_every=3)
    for step in range(7):
        good = {"x": torch.tensor(float(step)), "v": torch.ones(2) * step}
        with pytest.raises(MetricError, match="step="):
            taken.add(good, step=2**63)  # seen to be no step after its values were copied
        with pytest.raises(MetricError, match="no plain numbers"):
            taken.add({**good, "z": torch.tensor(1j)})
        assert taken.add(good).step == step
    assert taken.values() == [0, 1, 2, 3, 4, 5, 6]
    assert [v.tolist() for v in taken.values("v")] == [[step, step] for step in range(7)]


def test_a_rewind_moves_its_row_to_the_next_window():
    """A row whose values were copied before the run was seen to go back keeps them."""
    taken = Taken(sync_every=3)
    for step in (0, 1, 0, 1):
        taken.add({"x": torch.tensor(10.0 * step + len(taken.windows))}, step=step)
    assert taken.values() == [0.0, 10.0, 0.0, 12.0]
    assert [len(window.rows) for window in taken.windows] == [2, 1, 1]


def test_a_noted_tensor_is_copied_when_it_is_noted():
    """A tensor that is noted for the next update may be written in the meantime."""
    taken = Taken()
    number, vector = torch.tensor(1.0, requires_grad=True), torch.ones(2)
    taken.intake.note("number", number)
    taken.intake.note("vector", vector)
    vector.fill_(9)
    with torch.no_grad():
        number.fill_(9)
    taken.add({"x": 0.5})
    (record,) = taken.records()
    assert (record.values["number"], record.values["vector"].tolist()) == (1.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: torch.tensor(1j), "dtype torch.complex64"),
        (lambda: torch.tensor(1.0, device="meta"), "on meta"),
        (lambda: torch.tensor(1.0).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.ones(2, 2).to_sparse_csr(), "layout torch.sparse_csr"),
        (lambda: torch.empty((), dtype=torch.bits8), "dtype torch.bits8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "dtype torch.float32"),
    ],
    ids=["complex", "meta", "sparse", "sparse matrix", "bits", "nested"],
)
@pytest.mark.parametrize("before", ["nothing", "a number"])
@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*")
def test_a_tensor_without_plain_numbers_is_refused(make: Any, what: str, before: str):
    """What has no numbers to copy is named, also where a number came before it."""
    taken = Taken(sync_every=9)
    if before == "a number":
        taken.add({"x": torch.tensor(1.0)})
    with pytest.raises(MetricError, match=f"'x' is a tensor of.*{what}.*Hand over a dense real"):
        taken.add({"x": make()})
    taken.add({"x": torch.tensor(2.0)})
    assert taken.values()[-1] == 2.0


def test_a_tensor_that_is_data_is_refused():
    """A tensor with more elements than a metric has is refused with its shape and a way out."""
    with pytest.raises(MetricError, match=r"'x' is an array of shape \(256, 257\).*x\.mean\(\)"):
        through(torch.zeros(256, 257))


@pytest.mark.parametrize(
    "value", [torch.Size([1]), torch.float32, torch.device("cpu"), torch.nn.Linear(1, 1)], ids=str
)
def test_what_torch_has_beside_tensors_is_no_metric(value: Any):
    """A dtype or a module is no value, though it is torch's; a shape is a tuple of ints."""
    if isinstance(value, tuple):
        assert through(value) == 1
        return
    with pytest.raises(MetricError, match="neither a number, nor an array"):
        through(value)


@pytest.mark.parametrize("value", [[torch.tensor(1.0)], ([0.5], [torch.tensor(1)])], ids=repr)
def test_a_list_of_tensors_is_not_read(value: Any):
    """A list of tensors would have to be read one by one, and the message says what to do."""
    taken = Taken()
    pattern = re.escape("torch values, which would have to be read one by one. Hand over one array")
    with Counting() as counting, pytest.raises(MetricError, match=pattern):
        taken.add({"x": value})
    assert not counting.ops


@pytest.fixture(scope="module")
def mesh():
    """Give a mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_replicated_dtensor_is_a_number(mesh: Any):
    """A loss that every rank of a mesh holds is taken from this rank's copy."""
    from torch.distributed.tensor import DTensor, Replicate

    value = DTensor.from_local(torch.tensor(2.5), mesh, [Replicate()])
    taken = Taken(sync_every=2)
    for _ in range(2):
        taken.add({"x": value, "y": torch.tensor(1.0)})
    assert (taken.values(), taken.values("y")) == ([2.5, 2.5], [1.0, 1.0])


def test_a_part_of_a_dtensor_is_refused(mesh: Any):
    """A loss of which this rank holds a part only is refused with the way to the whole."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    for local, placement in ((torch.ones(2), Shard(0)), (torch.tensor(1.0), Partial())):
        value = DTensor.from_local(local, mesh, [placement])
        with pytest.raises(MetricError, match=r"DTensor with placements.*x\.full_tensor\(\)"):
            through(value)


def test_a_machine_without_the_driver_has_no_capture_to_mind():
    """A background thread may always say that it has nothing to do with a capture, and often."""
    answers: list[None] = []
    thread = threading.Thread(target=lambda: answers.extend(relax_this_thread() for _ in range(2)))
    thread.start()
    thread.join()
    assert answers == [None, None]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_on_a_gpu_come_out_in_stream_order():
    """What a graph or a stream writes later is not what was handed over."""
    x, taken = torch.zeros((), device="cuda"), Taken(sync_every=8)
    for step in range(8):
        with torch.cuda.stream(torch.cuda.Stream() if step % 2 else torch.cuda.current_stream()):
            x.fill_(step)
            taken.add({"x": x, "host": torch.tensor(step)})
            torch.cuda.current_stream().synchronize()
    for window in taken.windows:
        while not window.ready():
            pass
    assert taken.values() == taken.values("host") == list(range(8))
