"""Keeps parameters on a device whose values a store has in host or device memory.

Each version is copied after `step()`, with one copy per stretch of the store and server. A value
that a script writes to a parameter stays on the device and is overwritten by the next version; it
is found by its version counter, or, where that tells nothing (`.data`), by comparing bytes in
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorwire.parameters import WITH_GRADIENT, ModelDevice, Store

from ..devices import CopyStream, PageLocks, device_of, host_tensor, is_on_host, part_of
from ..kernels.share_device import model_device

_GAP_BYTES = 4096  # what lies between two parameters, and is copied with them
_PIECE_BYTES = 1 << 20
_TURNS = 32  # so many steps compare every byte


class _Stretch(NamedTuple):
    """Parameters that lie close to each other in the store.

    Attributes:
        sources: their bytes there, where new versions arrive: each piece with its start and stop.
        device: the same bytes on the device.
        offsets: where each of them is in both, by its index.
        trained: steps change them.
    """

    sources: Sequence[tuple[int, int, torch.Tensor]]
    device: torch.Tensor
    offsets: dict[int, int]
    trained: bool

    def present(self, start: int, stop: int) -> torch.Tensor:
        """Returns bytes [start, stop) of the store on the device, maybe as a view of its memory."""
        parts = [
            source[max(start, begin) - begin : min(stop, end) - begin]
            for begin, end, source in self.sources
            if begin < stop and start < end
        ]
        there = [part.to(self.device.device, non_blocking=True) for part in parts]
        return there[0] if len(there) == 1 else torch.cat(there)


class DeviceParameters:
    """The parameters of one optimizer that are on a device. One thread at a time.

    Args:
        store: has their values.
        parameters: by their index in the store.
        device: where they are.

    Attributes:
        device: as given.
        locks: the memory of the store that is locked.
        bytes_copied: to the device, since the start.
    """

    def __init__(
        self, store: Store, parameters: Mapping[int, nn.Parameter], device: torch.device
    ) -> None:
        self.device = device
        self._store, self._parameters = store, dict(parameters)
        self.locks = PageLocks(device)
        self.locks.lock([store.memory])
        self.bytes_copied = 0
        # Where in the store servers have shares on the device, and their memory.
        self._shares = [(part.start, part.stop, memory) for part, memory in store.on_device()]
        self._stretches: list[_Stretch] = []
        self._stretch_of: dict[int, _Stretch] = {}
        self._stream = CopyStream(device)
        # By the number of each stream that was the current one: an event after its last copy.
        self._under_way: dict[int, Any] = {}
        self._turn = 0
        self._compared: list[tuple[_Stretch, int, int, torch.Tensor]] = []

    def __contains__(self, index: int) -> bool:
        return index in self._parameters

    def release(self, index: int) -> None:
        """Forgets a parameter that is not this optimizer's any more."""
        self._parameters.pop(index, None)

    def adopt(self, part: range | None) -> None:
        """Makes this memory the parameters', with the store's present values; of a part, or all."""
        new = [i for i in self._parameters if part is None or i in part]
        self._make_stretches([i for i in new if i not in self._stretch_of])
        for index in new:
            parameter = self._parameters[index]
            if parameter.data_ptr() != self.address(index) or not parameter.numel():
                parameter.data = self.tensor(index)
        self._copy(self._stretches if part is None else self._stretches_of(new))

    def _make_stretches(self, indices: Sequence[int]) -> None:
        tensors = self._store.layout.spec.tensors
        trained = {i: tensors[i].kind in WITH_GRADIENT for i in indices}
        groups: list[list[int]] = []
        end = 0
        for start, index in sorted((self._store.place(i).start, i) for i in indices):
            is_far = start > end + _GAP_BYTES
            if not groups or is_far or trained[index] != trained[groups[-1][-1]]:
                groups.append([])
            groups[-1].append(index)
            end = self._store.place(index).stop
        for group in groups:
            start, stop = self._store.place(group[0]).start, self._store.place(group[-1]).stop
            sources = self._sources(start, stop, trained[group[0]])
            device = torch.empty(stop - start, dtype=torch.uint8, device=self.device)
            offsets = {i: self._store.place(i).start - start for i in group}
            stretch = _Stretch(sources, device, offsets, trained[group[0]])
            self._stretches.append(stretch)
            self._stretch_of.update(dict.fromkeys(group, stretch))

    def _sources(
        self, start: int, stop: int, trained: bool
    ) -> Sequence[tuple[int, int, torch.Tensor]]:
        """Returns the sources of bytes [start, stop) of the store, counted from `start`."""
        found = []
        for begin, end, memory in self._shares if trained else ():
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found.append((first - start, last - start, memory[first - begin : last - begin]))
        if sum(last - first for first, last, _ in found) == stop - start:
            return found
        return [(0, stop - start, host_tensor(self._store.memory[start:stop]))]

    def _stretches_of(self, indices: Sequence[int]) -> list[_Stretch]:
        found = {id(self._stretch_of[i]): self._stretch_of[i] for i in indices}
        return list(found.values())

    def refresh(self) -> None:
        """Copies a new version, ahead of the device's next work.

        Parameters have to lie in this memory.
        """
        self._copy([each for each in self._stretches if each.trained])

    def _copy(self, stretches: Sequence[_Stretch]) -> None:
        self._go_behind_other_streams()
        for each in stretches:
            for start, stop, source in each.sources:
                each.device[start:stop].copy_(source, non_blocking=True)
            self.bytes_copied += each.device.nbytes
        self._mark()

    def _mark(self) -> None:
        self._under_way[self._stream.current()] = self._stream.mark()

    def _go_behind_other_streams(self) -> None:
        """Makes the current stream wait for copies of other streams; the caller does not wait."""
        current = self._stream.current()
        for number, event in self._under_way.items():
            if number != current:
                event.wait()

    def settle(self) -> None:
        """Returns when the store's memory may change: everything was copied from it."""
        for event in self._under_way.values():
            event.synchronize()
        self._under_way.clear()

    def address(self, index: int) -> int:
        """Returns the address of a parameter that was adopted; 0: it was not."""
        stretch = self._stretch_of.get(index)
        return 0 if stretch is None else stretch.device.data_ptr() + stretch.offsets[index]

    def tensor(self, index: int) -> torch.Tensor:
        """Returns a parameter's values in this memory."""
        stretch, place = self._stretch_of[index], self._store.place(index)
        start = stretch.offsets[index]
        stop = start + place.stop - place.start
        return part_of(stretch.device, start, stop, self._parameters[index])

    # ---- what a script has written

    def begin_check(self) -> None:
        """Starts to compare a part of the values with the store's in the present version.

        Another part each time, so that `_TURNS` of them are all. Later work of the current stream
        waits for the copies of other streams.
        """
        self._go_behind_other_streams()
        pieces = [
            (each, start, min(start + _PIECE_BYTES, each.device.nbytes))
            for each in self._stretches
            for start in range(0, each.device.nbytes, _PIECE_BYTES)
        ]
        turn, self._turn = self._turn, (self._turn + 1) % _TURNS
        for stretch, start, stop in pieces[turn::_TURNS]:
            differs = _differ(stretch.present(start, stop), stretch.device[start:stop])
            self._compared.append((stretch, start, stop, differs))
        if self._compared:
            self._mark()

    def finish_check(self) -> list[int]:
        """Returns the parameters that were found to differ; they have the store's values again."""
        compared, self._compared = self._compared, []
        if not compared or not bool(torch.stack([each[3] for each in compared]).any()):
            return []
        found = []
        for stretch, start, stop, differs in compared:
            if not bool(differs):
                continue
            for index, offset in stretch.offsets.items():
                place = self._store.place(index)
                end = offset + place.stop - place.start
                if index in self._parameters and offset < stop and start < end:
                    there = stretch.present(offset, end)
                    if bool(_differ(there, stretch.device[offset:end])):
                        found.append(index)
        self._copy(self._stretches)
        return found

    def forget_check(self) -> None:
        """Drops a comparison that was begun: values are about to change."""
        self._compared.clear()

    def close(self) -> None:
        """Ends all copies before the store is closed; parameters may stay where they are."""
        self.settle()
        self.forget_check()
        self.locks.release()
        self._stretches.clear()
        self._stretch_of.clear()
        self._shares.clear()


def device_parameters(
    store: Store, parameters: Mapping[int, nn.Parameter]
) -> DeviceParameters | None:
    """Returns the parameters that are on a device; None: all are on the host.

    Raises:
        UnavailableError: they are on several devices.
    """
    device = device_of(parameters.values())
    if device is None:
        return None
    there = {i: p for i, p in parameters.items() if not is_on_host(p)}
    return DeviceParameters(store, there, device)


def shared_device(parameters_on: str, trained: Sequence[torch.Tensor]) -> ModelDevice | None:
    """Returns the device that has all trained parameters, where servers may have their shares too.

    Args:
        parameters_on: as of `DistributedOptimizer`.
        trained: the parameters of one optimizer that get gradients.
    """
    if parameters_on == "host" or any(is_on_host(each) for each in trained):
        return None
    device = device_of(trained)
    return None if device is None else model_device(device)


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the device of both, true where two pieces of memory have other bytes."""
    count = one.numel() // 8 * 8
    whole = one[:count].view(torch.int64) != other[:count].view(torch.int64)
    return whole.any() | (one[count:] != other[count:]).any()
