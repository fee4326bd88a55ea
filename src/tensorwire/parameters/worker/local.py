"""Keeps a store in the process of a worker that is alone: the same shard and the same bits."""
# ruff: noqa: D102 - the methods are described in Store

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.history import NoteKind
from tensorwire.memory import local_memory

from ..contributions import Contribution
from ..device import DeviceBytes, ModelDevice, suits_device
from ..kernel import Kernel, Rows
from ..layout import Layout, Selection, Spec
from ..messages import Bytes, Commit, Result
from ..regions import AVERAGE
from ..rows import Gradient, heads_bytes, part_of, tables_of, take_meant
from ..shard import Shard
from ..shard_memory import ShardMemory
from ..snapshot import AVERAGED, COUNTS, MOST_SNAPSHOTS, SCALARS, VALUES, busy, state
from .interface import Place
from .snapshot import LocalSnapshot, Snapshot
from .view import ScriptView

_NOTHING = np.empty(0, np.uint8)
_ALONE = "nobody takes the place of a worker that is alone"


class LocalStore:
    """See `Store`. Its memory is private to this process."""

    path = "local"
    asynchronous = False
    notes_bytes = 0

    def __init__(self, spec: Spec, kernel: Kernel, device: ModelDevice | None = None) -> None:
        self.layout = Layout(spec)
        self.own = Selection(self.layout)
        self.version = 1
        self.bytes_pushed = 0
        (share,) = self.layout.deal(1)
        size, heads, slices = self.layout.size_bytes, heads_bytes(share), range(spec.slices)
        view, private = local_memory(size)
        self._seen = seen = ScriptView(self.layout, self.own, view, private)
        self.value, self.differs, self.take_back = seen.value, seen.differs, seen.take_back
        self.compares, self.memory, self.place = seen.compares, seen.memory, seen.place
        on_device = device is not None and not kernel.changes_kept and suits_device(spec)
        self._device = kernel.device(device.name) if device and on_device else None
        worked_on = _zeros if self._device is None else self._device.empty
        self._memory = [
            Contribution(
                _zeros(size), worked_on(size), None if on_device else _zeros(size), _zeros(heads)
            )
            for _ in slices
        ]
        states = {name: worked_on(size) for name in kernel.states}
        self._states = dict(states)
        self._counts = np.zeros(len(spec.tensors), np.int64)
        self._scalars = np.zeros((len(spec.tensors), len(spec.scalars)))
        self._averaged = np.zeros(len(spec.tensors), np.int64)
        if spec.ema:
            self._states[AVERAGE] = worked_on(size)
        self._shard_memory = ShardMemory(
            view, self._memory, states, self._counts, self._scalars, self._states.get(AVERAGE),
            self._averaged, device=self._device,
            on_device=None if self._device is None else self._device.empty(size),
        )  # fmt: skip
        self._shard = Shard(share, kernel, self._shard_memory)
        self._tables = tables_of(share)
        self._gradients: list[dict[int, Gradient]] = [{} for _ in slices]
        self._commits: dict[int, Commit] = {}
        self._held: list[int] = []  # versions of which there are snapshots; any thread

    def places(self, slice_index: int) -> Sequence[Place | str]:
        produced, pool = self._memory[slice_index].produced, self._memory[slice_index].pool
        assert produced is not None
        parts = [slice(place.start, place.end) for place in self.layout.places]
        if pool is None:
            return [Place(_NOTHING, True, None, 0, [produced[part]]) for part in parts]
        return [Place(produced[part], True, pool[part], 0) for part in parts]

    def on_device(self) -> Sequence[tuple[range, DeviceBytes]]:
        memory = self._shard_memory.on_device
        return () if memory is None else [(range(self.layout.size_bytes), memory)]

    def slot(self, slice_index: int) -> Bytes:
        """Returns a slice's gradients in place: writing here is a push."""
        return self._memory[slice_index].slot

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        place = self.layout.places[tensor]
        self._memory[slice_index].slot[place.start : place.end] = data
        return place.end - place.start

    def push_reduced(self, tensor: int, data: Any) -> int:
        return self.push(0, tensor, data)

    def push_rows(self, slice_index: int, tensor: int, rows: Rows, values: Bytes) -> int:
        self._gradients[slice_index][tensor] = rows, values
        return rows.nbytes + values.nbytes

    def settle(self) -> None:
        pass

    def commit(self, slice_index: int, commit: Commit) -> None:
        memory = self._memory[slice_index]
        gradients = take_meant(self._gradients[slice_index], commit)
        for table in self._tables:
            if gradients.keys().isdisjoint(table.tensors):
                continue
            head, values = part_of(table, gradients)
            memory.heads[table.head : table.head + head.nbytes].view(np.int64)[:] = head
            at = table.start
            for each in values:
                memory.slot[at : at + each.nbytes] = each
                at += each.nbytes
        self._commits[slice_index] = commit

    def missing(self) -> Sequence[int]:
        return range(len(self._memory))

    def due(self, again: Callable[[int], None] | None = None) -> Sequence[int]:
        return ()

    def written(self) -> Bytes:
        return np.zeros(len(self.layout.spec.tensors), np.uint8)  # no other process reaches it

    def last_commit(self, slice_index: int) -> Commit:
        return self._commits[slice_index]

    def is_committed(self, slice_index: int) -> bool:
        return False

    def take_or_note(
        self, kind: NoteKind, slice_index: int, data: bytes
    ) -> tuple[bool, bytes | None]:
        raise RuntimeError(_ALONE)

    def lies_ahead(self, kind: NoteKind, slice_index: int | None = None) -> bool:
        return False

    def read_gradient(self, slice_index: int, tensor: int, how: int, block: int) -> Bytes:
        raise RuntimeError(_ALONE)

    def go_on(self, version: int) -> None:
        raise RuntimeError(_ALONE)

    def wait(self) -> Result:
        self.version += 1
        commits = [self._commits[i] for i in range(len(self._memory))]
        self._commits.clear()
        for each in commits[1:]:
            if different := commits[0].difference(each):
                raise ValueError(f"the slices of one step disagree: {different}")
        finite, norm = self._shard.advance(commits, lambda sums: sums.tolist())
        return Result(self.version, finite, norm)

    def read_reduced(self, target: Bytes) -> None:
        target[:] = self._memory[0].slot

    def read_values(self, target: Bytes) -> None:
        self._seen.read(target)

    def read_state(self, name: str, target: Bytes) -> None:
        self._shard_memory.bring(target, self._states[name])

    def write_state(self, name: str, source: Bytes) -> None:
        if self._device is None:
            self._states[name][:] = source
        else:
            self._device.copy(self._states[name], source)
            self._device.synchronize()

    def snapshot(self) -> Snapshot:
        if len(self._held) == MOST_SNAPSHOTS:
            listed = " and ".join(f"version {each}" for each in self._held)
            raise busy(
                f"this process holds {MOST_SNAPSHOTS} snapshots of one optimizer's store, the most "
                f"at a time: {listed}"
            )
        parts: dict[str, NDArray[Any]] = {AVERAGED: self._averaged}
        memory = self._shard_memory
        parts |= {VALUES: memory.master, COUNTS: self._counts, SCALARS: self._scalars}
        parts |= {state(name): memory.on_host(array) for name, array in self._states.items()}
        made = LocalSnapshot(self.version, parts, self._held.pop)
        self._held.append(self.version)
        return made

    def still(self) -> AbstractContextManager[None]:
        return nullcontext()

    def counts(self, averaged: bool = False) -> NDArray[np.int64]:
        return (self._averaged if averaged else self._counts).copy()

    def set_counts(self, counts: NDArray[np.int64], averaged: bool = False) -> None:
        (self._averaged if averaged else self._counts)[:] = counts

    def scalars(self) -> NDArray[np.float64]:
        return self._scalars.copy()

    def set_scalars(self, scalars: NDArray[np.float64]) -> None:
        self._scalars[:] = scalars

    def reason(self) -> str:
        return ""

    def release(self) -> None:
        self.close()

    def close(self) -> None:
        self._shard.close()
        if self._device is not None:
            self._device.close()


def _zeros(size: int) -> Bytes:
    """Returns zeroed bytes that start on a page, as in a region, and share it with nothing else."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
