"""Averages, broadcasts or keeps a model's buffers (BatchNorm's statistics) in each step.

A worker that computes several slices gives each the buffers that the step began with, so that the
result does not depend on which worker computes a slice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import nn

from tensorwire.memory import same_bytes
from tensorwire.parameters import ITEM_BYTES, Bytes, Store, TensorSpec

from ..model_index import ModelIndex
from ..session import Session
from ..views import flat_bytes, tensor_at
from .device_buffers import packed

_KINDS = {"broadcast": "broadcast", "average": "average", "local": "constant"}


class Buffers:
    """The buffers of one model.

    Args:
        model: has them, or this process's part of them.
        kind: one of _KINDS.
        first: index of the first buffer among the store's tensors.
        session: of this worker.
        whole: of a split model.
    """

    def __init__(
        self, model: nn.Module, kind: str, first: int, session: Session, whole: ModelIndex | None
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"buffers is {', '.join(map(repr, _KINDS))}, not {kind!r}")
        # With one slice and a whole model no buffer has to travel: they are not in the store.
        declared = session.slices > 1 or session.pipeline > 1
        self.kind, self._model = kind, model
        self._session = session
        self._owners: list[tuple[nn.Module, str, str]] = []
        self._empty: list[tuple[nn.Module, str, str]] = []  # without a shape that could be declared
        seen: set[int] = set()
        for prefix, module in model.named_modules() if declared else ():
            for name, buffer in module._buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if whole is not None and full not in whole.buffers:
                    continue  # a constant of the trace
                if (buffer is None or not buffer.numel()) and kind != "local":
                    self._empty.append((module, name, full))
                elif buffer is not None and id(buffer) not in seen and buffer.numel():
                    seen.add(id(buffer))
                    self._owners.append((module, name, full))
                    if 0 in buffer.stride():  # expanded: cannot be written to
                        module._buffers[name] = buffer.contiguous()
        self._likes = {owner[2]: owner[0]._buffers[owner[1]] for owner in self._owners}
        if whole is not None and declared:
            self._likes = {name: b for name, b in whole.buffers.items() if b.numel()}
        self.indices = {name: first + i for i, name in enumerate(self._likes)}
        self._sends = {
            name: whole is None or whole.speaks_for(session.stage, name)
            for _, _, name in self._owners
        }
        self._shapes: dict[str, torch.Size | None] = {}
        self._before: list[torch.Tensor] = []
        self._own: dict[int, list[torch.Tensor]] = {}
        # Contiguous copies: the next forward may change a buffer while it is still on its way.
        self._packed = packed(self.tensors)
        self._leaving = [
            torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in self.tensors
        ]
        if self._packed is not None:
            self._leaving = self._packed.leaving
        self._leaving_bytes = [flat_bytes(tensor) for tensor in self._leaving]
        self._arrived: list[torch.Tensor] = []  # where the store has them

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers as they are now, also if a module has replaced one."""
        found = []
        for module, name, full in self._owners:
            buffer = module._buffers[name]
            shape = self._shapes.setdefault(full, None if buffer is None else buffer.shape)
            if buffer is None or buffer.shape != shape:
                raise RuntimeError(
                    f"buffer {full!r} was removed or has another shape now: give it its shape "
                    "before DistributedOptimizer, or close() the optimizer and make another one"
                )
            found.append(buffer)
        return found

    def specs(self) -> list[TensorSpec]:
        """Returns the description of the buffers for the servers."""
        kind = _KINDS[self.kind]
        specs = []
        for full, tensor in self._likes.items():
            assert tensor is not None
            name, dtype = full, str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            if dtype not in ITEM_BYTES:  # bool or complex, for example: travels as bytes
                name, dtype, shape = f"{name} of {dtype} {shape}", "uint8", (tensor.nbytes,)
            specs.append(TensorSpec(name, dtype, shape, kind))
        return specs

    @property
    def mine(self) -> list[int]:
        """The indices of the buffers whose values come from this process."""
        return [self.indices[name] for name, sends in self._sends.items() if sends]

    @property
    def here(self) -> list[int]:
        """The indices of the buffers that this process has."""
        return [self.indices[name] for _, _, name in self._owners]

    def values(self) -> Iterator[tuple[int, Bytes]]:
        """Yields index and bytes, in C order, of each of `mine`; they hold until the next call."""
        if self._packed is not None:
            self._packed.pull(self.tensors)
        elif self._owners:
            with torch.no_grad():
                torch._foreach_copy_(self._leaving, self.tensors)
        for (_, _, name), data in zip(self._owners, self._leaving_bytes, strict=True):
            if self._sends[name]:
                yield self.indices[name], data

    def push(self, store: Store, slice_index: int) -> None:
        """Sends the buffers after a slice's forward and backward."""
        for module, name, full in self._empty:
            if (buffer := module._buffers.get(name)) is not None and buffer.numel():
                self._empty = []
                if self._session.rank == 0:
                    print(
                        f"tensorwire: buffer {full!r} had no elements when its optimizer was made, "
                        "and takes no part: each worker goes on with its own. If that depends on "
                        "the data, give it its shape before DistributedOptimizer, as by one "
                        "forward()",
                        file=sys.stderr,
                        flush=True,
                    )
                break
        if self.kind == "local" or not self._owners:
            return
        if self.kind == "broadcast" and slice_index != 0:
            return
        for index, data in self.values():
            store.push(slice_index, index, data)

    def take(self, store: Store, published: bool = False) -> None:
        """Takes the version's buffers as the model's; the next step begins with them."""
        if not self._owners:
            return
        if self.kind != "local" or published:
            tensors = self.tensors
            if not self._arrived:
                for index, like in zip(self.here, self._leaving, strict=True):
                    flat = torch.frombuffer(store.value(index), dtype=like.dtype)
                    self._arrived.append(flat.view(like.shape))
            if self._packed is not None:
                self._set(tensors, self._packed.push(self._arrived))
            else:
                self._set(tensors, self._arrived)
        if self._session.turns.several:
            self._before = [tensor.detach().clone() for tensor in self.tensors]

    def own(self, steps: bool = False) -> list[tuple[str, Bytes]]:
        """Returns names and bytes of the buffers that differ from the servers' or are not there.

        With `steps`, buffers that the following step sends to the servers are left out.
        """
        if not self._owners:
            found = list(self._model.named_buffers())
        elif steps and self.kind != "local":
            return []
        else:
            names = [name for _, _, name in self._owners]
            found = list(zip(names, self.tensors, strict=True))
            if self.kind != "local" and self._arrived:
                pairs = zip(found, self._arrived, strict=True)
                found = [
                    each
                    for each, there in pairs
                    if not same_bytes(flat_bytes(each[1].detach().contiguous()), flat_bytes(there))
                ]
        return [(name, flat_bytes(tensor.detach())) for name, tensor in found]

    def put(self, store: Store, own: Mapping[str, bytes]) -> None:
        """Restores the buffers from the values saved by `own`."""
        if self.kind != "local":
            self.take(store)
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            for name, data in own.items():
                like = buffers[name]
                like.copy_(tensor_at(np.frombuffer(data, np.uint8).copy(), like))

    def close(self) -> None:
        """Unlocks memory that a device copies from and to; buffers stay where they are."""
        if self._packed is not None:
            self._packed.close()

    def after_slice(self, turn: int) -> None:
        """Loads the buffers for slice number `turn`; at the end the version's are taken."""
        slices = self._session.my_slices
        if len(slices) == 1 or not self._owners:
            return
        values = self._before
        if self.kind == "local":
            self._own[turn - 1] = [tensor.detach().clone() for tensor in self.tensors]
            values = self._own.get(turn % len(slices), self._before)
        elif turn == len(slices):
            return
        self._set(self.tensors, values)

    def begin_again(self) -> None:
        """Restores the version's buffers, with which another slice of the step begins."""
        if self._owners:
            self._set(self.tensors, self._before)

    def _set(self, tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            try:
                torch._foreach_copy_(tensors, values)
            except RuntimeError:
                owned = zip(self._owners, tensors, values, strict=True)
                for (module, name, _), tensor, value in owned:
                    if 0 in tensor.stride() or tensor.is_inference():
                        # Forward has put it there, and it cannot be written to.
                        module._buffers[name] = value.to(tensor.dtype, copy=True)
                    else:
                        tensor.copy_(value)
