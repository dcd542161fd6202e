"""Metrics in checkpoints: what each rank has, brought back on as many ranks or on others.

A checkpoint of some metrics is a `layout`, which says in JSON what lies where, and `states`, one vector
of what this rank has: of the window by all ranks, of the window here, and of the next window.

* **Alone.** Giving a state asks no other rank anything, so that one of them may `torch.save` it.
* **Every rank.** With `torch.distributed.checkpoint`, each rank writes its `states` as a row of one
  matrix. A rank that loads takes the row of its number, the last one also those of ranks that are no
  more, and what all ranks have in common comes from row 0 for those that had no row. So the value
  over all ranks is the same on more ranks, and on fewer.
* **Other metrics.** States are found by name: one that the checkpoint has not is left empty and named
  in a warning, and so is one that nobody wants. One of another size is an error.
* **Copies.** What is given and what is taken up shares no memory with the metrics.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from everyrank.errors import MetricError
from everyrank.messages import log
from everyrank.metrics.states import Plan, Slot
from everyrank.metrics.torch.numbers import Flat, identity, merged

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

# torch.distributed.checkpoint is imported in what it calls itself, and not before: of programs that had
# imported it and used gloo, a third were ended by SIGABRT at their exit (torch 2.13, CPU).
_PARTS = 3  # of the window by all ranks, of the window here, of the next
_ENDLESS = 1 << 40  # rows or columns that one asks for without knowing how many there are

Parts = tuple[Flat, Flat, Flat]


def saved(slots: Mapping[str, Slot], parts: Parts) -> dict[str, Any]:
    """Give the checkpoint of some states."""
    layout: dict[str, Any] = {}
    at = 0
    for name, slot in slots.items():
        layout[name] = {"operator": slot.operator, "start": at, "size": slot.size}
        at += slot.size
    vectors = [flat[slot.operator][slot.here] for flat in parts for slot in slots.values()]
    return {
        "layout": json.dumps(layout),
        "states": torch.cat(vectors)[None].as_subclass(Row),
    }


def loaded(plan: Plan, slots: Mapping[str, Slot], state_dict: Mapping[str, Any]) -> Parts:
    """Give what a checkpoint has for some states, on the host."""
    try:
        layout, states = json.loads(state_dict["layout"]), state_dict["states"]
    except (KeyError, TypeError, ValueError):
        raise MetricError(
            f"the state with the keys {sorted(map(str, state_dict))} is none that a declared metric "
            "or a collection has given: these have 'layout' and 'states'."
        ) from None
    _check(layout, slots)
    if not isinstance(states, Tensor) or states.ndim != 2:
        raise _strange(states, layout)
    rows, common = _rows(states)
    for row in rows:
        if row.numel() != _width(layout):
            raise _strange(row, layout)
    parts = [_parts(plan, slots, layout, row) for row in rows]
    shown = _parts(plan, slots, layout, common)[0]
    nothing = identity(plan, torch.device("cpu"))
    now, later = nothing, nothing
    for _, its_now, its_later in parts:
        now, later = merged(now, its_now), merged(later, its_later)
    return shown, now, later


def renamed(state_dict: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Give the checkpoint of a metric that was alone as one of a collection."""
    layout = json.loads(state_dict["layout"])
    return {
        **state_dict,
        "layout": json.dumps({f"{owner}/{name}": there for name, there in layout.items()}),
    }


def _width(layout: Mapping[str, Any]) -> int:
    return _PARTS * sum(int(there["size"]) for there in layout.values())


def _strange(states: Any, layout: Mapping[str, Any]) -> MetricError:
    return MetricError(
        f"the 'states' of the checkpoint have the shape {getattr(states, 'shape', states)!r}, but by "
        f"its 'layout' they are rows of {_width(layout)} numbers. One of the two is from elsewhere."
    )


def _check(layout: Mapping[str, Any], slots: Mapping[str, Slot]) -> None:
    missing = [name for name in slots if name not in layout]
    unknown = [name for name in layout if name not in slots]
    for name, slot in slots.items():
        there = layout.get(name)
        if there is not None and (there["operator"], there["size"]) != (slot.operator, slot.size):
            raise MetricError(
                f"the checkpoint has {there['size']} numbers merged by {there['operator']} for "
                f"{name!r}, but the metric has {slot.size} by {slot.operator}. Create it with the "
                "options that it had."
            )
    if missing:
        log.warning("the checkpoint has nothing for %s: they begin empty.", ", ".join(missing))
    if unknown:
        log.warning("the checkpoint has %s, which no metric here takes up.", ", ".join(unknown))


def _parts(
    plan: Plan, slots: Mapping[str, Slot], layout: Mapping[str, Any], row: Tensor | None
) -> Parts:
    """Take the states that are wanted from a row."""
    parts = tuple(identity(plan, torch.device("cpu")) for _ in range(_PARTS))
    if row is not None:
        for flat, part in zip(parts, row.view(_PARTS, -1), strict=True):
            for name, slot in slots.items():
                if there := layout.get(name):
                    here = slice(there["start"], there["start"] + slot.size)
                    flat[slot.operator][slot.here] = part[here]
    return parts[0], parts[1], parts[2]


def _rows(states: Tensor) -> tuple[Sequence[Tensor], Tensor | None]:
    """Give the rows that are this rank's to take up, and the one that has what is common."""
    read = states.read if isinstance(states, Row) else None
    if read is None:  # saved and loaded as a plain tensor, or taken up as it was given
        rows = list(states.detach().cpu().as_subclass(Tensor))
        if len(rows) == 1:
            return rows, rows[0]
        read = dict(enumerate(rows))  # of every rank, as torch's own converters write them
    rank, size = _place()
    last = rank == size - 1
    mine = [row for at, row in sorted(read.items()) if at == rank or (last and at >= size)]
    return mine, read.get(rank, read.get(0))


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Row(Tensor):
    """What one rank has, which torch.distributed.checkpoint takes for a row of a matrix.

    To everybody else it is a tensor like any other; pickled, it becomes a plain one.
    """

    #: What was read for this rank from a checkpoint, by row; None if nothing was.
    read: dict[int, Tensor] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)
        if self.read:  # loaded, and written on before anybody took it up
            plain = torch.stack(list(_rows(self)[0]) or [plain.flatten()])
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Row:
        other = self.clone().as_subclass(Row)
        other.read = copy.deepcopy(self.read, memo)
        return other

    def size(self, *dim: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Give the size, which the checkpoint's reader need not find equal to the saved one."""
        return super().size(*dim) if dim else tuple(map(_AnyNumber, super().size()))

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        rank, size = _place()
        offsets = torch.Size([rank, 0])
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, torch.Size([1, self.numel()])),
                    properties=TensorProperties.create_from_tensor(self.as_subclass(Tensor)),
                    size=torch.Size([size, self.numel()]),
                ),
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        rank, size = _place()
        self.read = {}
        one = torch.Size([1, _ENDLESS])
        chunks = [ChunkStorageMetadata(torch.Size([rank, 0]), one)]
        if rank:
            chunks.append(ChunkStorageMetadata(torch.Size([0, 0]), one))
        if rank == size - 1:
            rest = torch.Size([_ENDLESS, _ENDLESS])
            chunks.append(ChunkStorageMetadata(torch.Size([size, 0]), rest))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        if self.read is None:  # to be written
            return self.as_subclass(Tensor)
        assert index.offset is not None
        return _Rows(self.read, index.offset[0])


class _AnyNumber(int):
    """A size that differs from none: how many ranks have saved is known to the checkpoint alone."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class _Rows:
    """The rows from one on, of which the reader narrows down to those that there are."""

    def __init__(self, read: dict[int, Tensor], first: int) -> None:
        self._read = read
        self._first = first

    def size(self, dim: int) -> int:
        """Give more than there can be, so that the reader narrows in every dimension."""
        return _ENDLESS

    def narrow(self, dim: int, start: int, length: int) -> Any:
        """Go to a row, or open it with the columns that were found."""
        if dim == 0:
            return _Rows(self._read, self._first + start)
        return self._read.setdefault(self._first, torch.empty(length, dtype=torch.float64)).view(
            1, -1
        )
