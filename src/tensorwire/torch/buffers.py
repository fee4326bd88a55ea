"""What happens to a model's buffers (BatchNorm's statistics and the like) in a distributed step.

A worker that computes several slices gives each the buffers that the step began with, so that the
result does not depend on who computes which slice.
"""

from __future__ import annotations

import torch
from torch import nn

from tensorwire.parameters import ITEM_BYTES, Bytes, Store, TensorSpec

from .views import flat_bytes

_KINDS = {"broadcast": "broadcast", "average": "average", "local": "constant"}


class Buffers:
    """The buffers of one model."""

    def __init__(
        self, model: nn.Module, kind: str, first: int, my_slices: range, slices: int
    ) -> None:
        if kind not in _KINDS:
            raise ValueError(f"buffers is {', '.join(map(repr, _KINDS))}, not {kind!r}")
        self._kind = kind
        self._first = first  # index of the first buffer among the store's tensors
        self._slices = my_slices
        self._owners: list[tuple[nn.Module, str, str]] = []
        seen: set[int] = set()
        # One slice agrees with itself.
        for prefix, module in model.named_modules() if slices > 1 else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen and buffer.numel():
                    seen.add(id(buffer))
                    self._owners.append((module, name, f"{prefix}.{name}" if prefix else name))
                    if 0 in buffer.stride():  # expanded: cannot be written to
                        module._buffers[name] = buffer.contiguous()
        self._shapes: dict[str, torch.Size | None] = {}
        self._before: list[torch.Tensor] = []
        self._own: dict[int, list[torch.Tensor]] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers as they are now, also if a module has replaced one."""
        found = []
        for module, name, full in self._owners:
            buffer = module._buffers[name]
            shape = self._shapes.setdefault(full, None if buffer is None else buffer.shape)
            if buffer is None or buffer.shape != shape:
                raise RuntimeError(f"buffer {full!r} was removed or has another shape now")
            found.append(buffer)
        return found

    def specs(self) -> list[TensorSpec]:
        """How they are declared."""
        kind = _KINDS[self._kind]
        specs = []
        for (_, _, full), tensor in zip(self._owners, self.tensors, strict=True):
            name, dtype = f"buffer {full}", str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            if dtype not in ITEM_BYTES:  # bool or complex, for example: travels as bytes
                name, dtype, shape = f"{name} of {dtype} {shape}", "uint8", (tensor.nbytes,)
            specs.append(TensorSpec(name, dtype, shape, kind))
        return specs

    @staticmethod
    def bytes_of(tensor: torch.Tensor) -> Bytes:
        """The elements in the order of the indices, whatever their order in memory."""
        return flat_bytes(tensor.detach().contiguous())

    def push(self, store: Store, slice_index: int) -> None:
        """After a slice's forward and backward."""
        if self._kind == "local" or not self._owners:
            return
        if self._kind == "broadcast" and slice_index != 0:
            return
        for i, tensor in enumerate(self.tensors):
            # Copied: the next forward may change it while it is still on its way.
            store.push(slice_index, self._first + i, self.bytes_of(tensor).copy())

    def take(self, store: Store, published: bool = False) -> None:
        """The version's buffers become the model's."""
        if not self._owners or (self._kind == "local" and not published):
            return
        with torch.no_grad():
            for i, tensor in enumerate(self.tensors):
                place = store.layout.places[self._first + i]
                memory = store.view[place.start : place.end]
                tensor.copy_(torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape))

    def remember(self) -> None:
        """What a step begins with."""
        if len(self._slices) > 1 and self._owners:
            self._before = [tensor.detach().clone() for tensor in self.tensors]

    def after_slice(self, turn: int) -> None:
        """Slice number `turn` of this worker begins; at its end the version's are taken."""
        if len(self._slices) == 1 or not self._owners:
            return
        values = self._before
        if self._kind == "local":
            self._own[turn - 1] = [tensor.detach().clone() for tensor in self.tensors]
            values = self._own.get(turn % len(self._slices), self._before)
        elif turn == len(self._slices):
            return
        with torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)
