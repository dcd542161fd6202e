"""Torch tensors: one copy kernel an update, one copy to the host a window, no synchronisation.

The values of an update are stacked straight into the next row of a buffer beside them. At the end of
the window an event is recorded; the background thread lets a stream of its own wait for it, copies
the buffer to pinned memory, and asks the copy's event until it has come. Training's streams wait for
nothing, and a later write to the tensors, also by a CUDA graph's replay, comes after our copy of
them in stream order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from everyrank.errors import MetricError
from everyrank.stage import Part, Place, check_size
from everyrank.stage.capture import relax_this_thread

_copy_streams: dict[torch.device, torch.cuda.Stream] = {}  # used by background threads only


class TorchBlock:
    """Rows of equal dtype on one device."""

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # or an evaluation's block could not be written later
            self.buffer = torch.empty((slots, size), dtype=dtype, device=device)
            self.rows = self.buffer.unbind(0)
        self.used = 0
        self._streams: set[torch.cuda.Stream] = set()
        self._sealed: list[torch.cuda.Event] = []
        self._copied: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None if device.type == "cuda" else self.buffer

    def take(self) -> int:
        """Give the next free row."""
        if self.buffer.is_cuda:
            _refuse_capture()
            self._streams.add(torch.cuda.current_stream(self.buffer.device))
        self.used += 1
        return self.used - 1

    def seal(self) -> None:
        """Record that the copies are launched, on every stream that launched one."""
        for stream in self._streams:
            event = torch.cuda.Event()
            event.record(stream)
            self._sealed.append(event)

    def ready(self) -> bool:
        """Say whether the values have reached the host; starts the copy when first asked."""
        if self._host is None:
            self._start_copy()
        return self._copied is None or self._copied.query()

    def fetch(self) -> NDArray[Any]:
        """Give the values as float64, int64 or bool."""
        if self._host is None:
            self._start_copy()
        if self._copied is not None:
            self._copied.synchronize()
        assert self._host is not None
        return _as_numpy(self._host[: self.used])

    def peek(self, slot: int) -> NDArray[Any]:
        """Read one row now, also of a window that is still open; waits for the device."""
        # A copy of its own: the window's copy belongs to the background thread.
        return _as_numpy(self.rows[slot].cpu())

    def _start_copy(self) -> None:
        relax_this_thread()  # the program may be capturing a graph just now
        device = self.buffer.device
        stream = _copy_streams.get(device)
        if stream is None:
            stream = _copy_streams[device] = torch.cuda.Stream(device)
        for event in self._sealed:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            used = self.buffer[: self.used]
            host = torch.empty(used.shape, dtype=used.dtype, device="cpu", pin_memory=True)
            host.copy_(used, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        self._host = host


class TorchStage:
    """The torch values of one open window."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._blocks: dict[Any, TorchBlock] = {}
        self._opened: list[TorchBlock] = []
        self._places: dict[Any, tuple[Place, ...]] = {}

    def add(self, columns: Sequence[int], names: Sequence[str], values: list[Any]) -> list[Part]:
        """Copy the values of one update."""
        first = values[0]
        with torch.no_grad():
            # The common case first: numbers of one dtype on one device are one kernel.
            if {(v.dtype, v.ndim) for v in values} == {(first.dtype, 0)} and _plain(values):
                key = (first.device, first.dtype, columns)
                block = self._block(key, len(values), first)
                slot = block.take()
                torch.stack(values, out=block.rows[slot])
                return [Part(block, slot, self._scalar_places(columns))]
            return self._add_mixed(columns, names, values)

    def seal(self) -> None:
        """Record the end of the window on the streams that made the values."""
        for block in self._opened:
            block.seal()

    def _scalar_places(self, columns: Sequence[int]) -> tuple[Place, ...]:
        places = self._places.get(columns)
        if places is None:
            places = tuple(Place(column, i, ()) for i, column in enumerate(columns))
            self._places[columns] = places
        return places

    def _add_mixed(
        self, columns: Sequence[int], names: Sequence[str], values: list[Any]
    ) -> list[Part]:
        """Copy values of several dtypes, devices or shapes: one kernel for each dtype and device."""
        groups: dict[Any, list[tuple[int, torch.Tensor]]] = {}
        for column, name, raw in zip(columns, names, values, strict=True):
            value = _usable(name, raw)
            groups.setdefault((value.device, value.dtype), []).append((column, value))
        parts = []
        for (device, dtype), members in groups.items():
            places, flat, start = [], [], 0
            for column, value in members:
                shape = tuple(value.shape) if value.numel() != 1 else ()
                places.append(Place(column, start, shape))
                flat.append(value.reshape(-1))
                start += value.numel()
            key = (device, dtype, tuple(places))
            block = self._block(key, start, flat[0])
            slot = block.take()
            torch.cat(flat, out=block.rows[slot])
            parts.append(Part(block, slot, self._places.setdefault(key, tuple(places))))
        return parts

    def _block(self, key: Any, size: int, like: torch.Tensor) -> TorchBlock:
        block = self._blocks.get(key)
        # A block is full early when updates were refused after their copy; the next one takes over.
        if block is None or block.used == self._slots:
            block = TorchBlock(self._slots, size, like.dtype, like.device)
            self._blocks[key] = block
            self._opened.append(block)
        return block


def open_stage(slots: int) -> TorchStage:
    """Open a stage for a window of `slots` updates."""
    return TorchStage(slots)


def _as_numpy(host: torch.Tensor) -> NDArray[Any]:
    if host.is_floating_point():
        host = host.to(torch.float64)
    elif host.dtype not in (torch.bool, torch.uint64):
        host = host.to(torch.int64)
    values: NDArray[Any] = host.cpu().numpy()
    return values.astype(np.float64) if values.dtype == np.uint64 else values


def _plain(values: list[Any]) -> bool:
    """Say whether stacking may go ahead: real tensors on one device, of a dtype that we read."""
    first = values[0]
    if first.dtype.is_complex or first.is_quantized or first.is_meta:
        return False
    device = first.device
    return all(
        (type(v) is torch.Tensor or type(v) is torch.nn.Parameter) and v.device == device
        for v in values
    )


def _usable(name: str, value: torch.Tensor) -> torch.Tensor:
    """Give the dense local tensor that we can copy, or say what to do instead."""
    if hasattr(value, "to_local") and hasattr(value, "placements"):  # a DTensor
        if not all(p.is_replicate() for p in value.placements):
            raise MetricError(
                f"{name!r} is a DTensor with placements {tuple(value.placements)}: this rank holds "
                f"a part of it only. Hand over {name}.full_tensor(), on every rank."
            )
        value = value.to_local()
    if (
        value.dtype.is_complex
        or value.is_quantized
        or value.is_meta
        or value.layout != torch.strided
    ):
        raise MetricError(
            f"{name!r} is a tensor of dtype {value.dtype}, layout {value.layout} on "
            f"{value.device}, which has no plain numbers. Hand over a dense real tensor."
        )
    check_size(name, value.shape)
    return value


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise MetricError(
            "update() was called while a CUDA graph is being captured, where a value does not "
            "exist yet. Call it after graph.replay(), with the graph's static output tensors."
        )
