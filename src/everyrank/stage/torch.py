"""Torch tensors: one copy kernel an update, one copy to the host a window, no synchronisation.

The values of an update are stacked straight into the next row of a buffer beside them. At the end of
the window an event is recorded; the background thread lets a stream of its own wait for it, copies
the buffer to pinned memory, and asks the copy's event until it has come. Training's streams wait for
nothing, and a later write to the tensors, also by a CUDA graph's replay, comes after our copy of
them in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.stage import Part, Place, Staged, check_size
from everyrank.stage.capture import relax_this_thread

# A block has at most so many rows, for each is a tensor that is made ahead (0.35 us), and so many
# numbers, for a vector whose length changes opens a block each time.
_MOST_ROWS = 64
_MOST_NUMBERS = 16_384

_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")

#: What can be converted to float64, int64 or bool; older versions of torch lack some of them.
_READABLE = {
    getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"),
        *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bool", "int64", "int32", "int16"),
        *("int8", "uint64", "uint32", "uint16", "uint8"),
    )
    if hasattr(torch, name)
}

#: Whether a tensor is one that torch.func follows through a function: it has no value of its own.
_wrapped: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda tensor: False
)

_copy_streams: dict[torch.device, torch.cuda.Stream] = {}  # used by background threads only


class TorchBlock:
    """Rows of equal dtype on one device, each copied there on the same stream."""

    def __init__(
        self,
        rows: Sequence[torch.Tensor],
        buffer: torch.Tensor | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.rows = rows
        self.used = 0
        self._buffer = buffer  # what the rows are parts of; a single row is a tensor of its own
        self._stream = stream
        self._sealed: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None

    @classmethod
    def empty(cls, rows: int, group: _Group, stream: torch.cuda.Stream | None) -> TorchBlock:
        """Open a block with room for so many rows."""
        with torch.inference_mode(False):  # or an evaluation's block could not be written later
            buffer = torch.empty((rows, group.size), dtype=group.dtype, device=group.device)
            return cls(buffer.unbind(0), buffer, stream)

    def take(self) -> int:
        """Give the next free row."""
        self.used += 1
        return self.used - 1

    def seal(self) -> None:
        """Record that the copies are launched."""
        if self._stream is not None:
            self._sealed = torch.cuda.Event()
            self._sealed.record(self._stream)

    def ready(self) -> bool:
        """Say whether the values have reached the host; starts the copy when first asked."""
        if self._host is None:
            self._start_copy()
        return self._copied is None or self._copied.query()

    def fetch(self) -> NDArray[Any]:
        """Give the values as float64, int64, uint64 or bool."""
        if self._host is None:
            self._start_copy()
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        return _as_numpy(self._host)

    def peek(self, slot: int) -> NDArray[Any]:
        """Read one row now, also of a window that is still open; waits for the device."""
        # Apart from the window's copy to the host, which belongs to the background thread.
        if self._stream is not None:
            self._stream.synchronize()
        return _as_numpy(self.rows[slot])

    def row(self, slot: int) -> torch.Tensor:
        """Give one row where it lies."""
        return self.rows[slot]

    def _start_copy(self) -> None:
        filled = self.rows[0][None] if self._buffer is None else self._buffer[: self.used]
        if self._stream is None:
            self._host = filled
            return
        relax_this_thread()  # the program may be capturing a graph just now
        torch.cuda.set_device(filled.device)  # or asking would open a context on device 0
        stream = _copy_streams.get(filled.device)
        if stream is None:
            stream = _copy_streams[filled.device] = torch.cuda.Stream(filled.device)
        if self._sealed is not None:
            stream.wait_event(self._sealed)
        with torch.cuda.stream(stream):
            host = torch.empty(filled.shape, dtype=filled.dtype, device="cpu", pin_memory=True)
            host.copy_(filled, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._host = host


class TorchStage:
    """The way from tensors to blocks."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # A block for each stream: what another stream writes into its memory would be in no order.
        self._blocks: dict[tuple[_Group, torch.cuda.Stream | None], TorchBlock] = {}
        self._opened: list[TorchBlock] = []

    def add(self, staged: Staged, values: list[Any]) -> list[Part]:
        """Copy the values of one update."""
        plan: _Plan | None = staged.plan
        with torch.no_grad():
            try:
                if plan is not None and plan.fits(values):
                    return self._copy(plan, values)
            except RuntimeError:  # on another device than before, or sparse: look at each of them
                pass
            usable = list(map(_usable, staged.names, values))
            plan = _Plan(staged.columns, usable)
            if all(map(is_, usable, values)):
                staged.plan = plan
            return self._copy(plan, usable)

    def seal(self) -> None:
        """Record the end of the window on the streams that made the values."""
        for block in self._opened:
            block.seal()
        self._opened.clear()
        self._blocks.clear()

    def _copy(self, plan: _Plan, values: list[Any]) -> list[Part]:
        parts = []
        for group in plan.groups:
            stream = _current_stream(group.device) if group.on_cuda else None
            if self._slots == 1 or group.most_rows == 1:
                block = TorchBlock((group.join(values),), None, stream)
                self._opened.append(block)
                slot = block.take()
            else:
                block = self._block(group, stream)
                slot = block.take()
                group.join(values, out=block.rows[slot])
            parts.append(Part(block, slot, group.places))
        return parts

    def _block(self, group: _Group, stream: torch.cuda.Stream | None) -> TorchBlock:
        """Give the block that has room for the next row of a group."""
        block = self._blocks.get((group, stream))
        # A refused update may have taken a row, so that a window may need one more than its slots.
        if block is None or block.used == len(block.rows):
            block = TorchBlock.empty(min(self._slots, group.most_rows), group, stream)
            self._blocks[group, stream] = block
            self._opened.append(block)
        return block


@dataclass(eq=False, slots=True)
class _Group:
    """The values of an update that are copied together: of one dtype, on one device."""

    device: torch.device
    on_cuda: bool
    dtype: torch.dtype
    picks: tuple[int, ...] | None  # where they are among the values; None if they are all
    places: tuple[Place, ...]
    scalars: bool  # none has a dimension
    size: int
    most_rows: int

    def join(self, values: list[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy them into one flat tensor, with one kernel."""
        if self.picks is not None:
            values = [values[i] for i in self.picks]
        if self.scalars:
            joined = torch.stack(values, out=out)
        else:
            joined = torch.cat([value.reshape(-1) for value in values], out=out)
        if type(joined) is not torch.Tensor or _wrapped(joined):
            raise MetricError(
                "update() was called inside a transformation of torch (vmap, grad, fake tensors), "
                "where values do not exist yet. Return them from it, and hand them over outside."
            )
        return joined


class _Plan:
    """How the values of updates that look alike are copied, worked out once."""

    def __init__(self, columns: Sequence[int], values: Sequence[torch.Tensor]) -> None:
        self._dtypes = list(map(_DTYPE, values))
        scalars = all(value.ndim == 0 for value in values)
        self._shapes = None if scalars else list(map(_SHAPE, values))
        members: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, value in enumerate(values):
            members.setdefault((value.device, value.dtype), []).append(i)
        self._firsts = [picks[0] for picks in members.values()]
        self.groups = [_group(columns, values, picks) for picks in members.values()]

    def fits(self, values: list[Any]) -> bool:
        """Say whether values look like those that this was worked out for, but for the device."""
        if list(map(_DTYPE, values)) != self._dtypes:
            return False
        if self._shapes is not None:
            return list(map(_SHAPE, values)) == self._shapes
        # Stacking fails unless all have the same shape, so the first tells for its group.
        return not any(values[i].ndim for i in self._firsts)


def _group(columns: Sequence[int], values: Sequence[torch.Tensor], picks: list[int]) -> _Group:
    places, size = [], 0
    for i in picks:
        count = values[i].numel()
        places.append(Place(columns[i], size, tuple(values[i].shape) if count != 1 else ()))
        size += count
    return _Group(
        device=values[picks[0]].device,
        on_cuda=values[picks[0]].is_cuda,
        dtype=values[picks[0]].dtype,
        picks=tuple(picks) if len(picks) < len(values) else None,
        places=tuple(places),
        scalars=all(values[i].ndim == 0 for i in picks),
        size=size,
        most_rows=min(_MOST_ROWS, max(1, _MOST_NUMBERS // max(1, size))),
    )


def open_stage(slots: int) -> TorchStage:
    """Open a stage for windows of `slots` updates."""
    return TorchStage(slots)


def _as_numpy(values: torch.Tensor) -> NDArray[Any]:
    values = values.cpu()  # before it is converted: some devices have no float64
    if values.is_floating_point():
        values = values.to(torch.float64)
    elif values.dtype not in (torch.bool, torch.uint64):
        values = values.to(torch.int64)
    array: NDArray[Any] = values.numpy()
    return array


def _usable(name: str, value: Any) -> torch.Tensor:
    """Give the dense local tensor that we can copy, or say what to do instead."""
    if hasattr(value, "to_local") and hasattr(value, "placements"):  # a DTensor
        if not all(p.is_replicate() for p in value.placements):
            raise MetricError(
                f"{name!r} is a DTensor with placements {tuple(value.placements)}: this rank holds "
                f"a part of it only. Hand over {name}.full_tensor(), on every rank."
            )
        value = value.to_local()
    tensor: torch.Tensor = value
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    if not dense or tensor.dtype not in _READABLE:
        raise MetricError(
            f"{name!r} is a tensor of dtype {tensor.dtype}, layout {tensor.layout} on "
            f"{tensor.device}, which has no plain numbers. Hand over a dense real tensor."
        )
    check_size(name, tensor.shape)
    return tensor


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """Give the stream that a copy goes to now."""
    if torch.cuda.is_current_stream_capturing():
        raise MetricError(
            "update() was called while a CUDA graph is being captured, where a value does not "
            "exist yet. Call it after graph.replay(), with the graph's static output tensors."
        )
    return torch.cuda.current_stream(device)
