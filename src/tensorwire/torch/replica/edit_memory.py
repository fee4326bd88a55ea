"""Provides memory for parameters that a script edits; knows stores, and no versions."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import Bytes, Store

from ..devices import is_on_host
from ..views import tensor_at

# Kept for so many steps after an edit: edits in every step need no new pages each time.
_KEPT_STEPS = 8


class EditMemory:
    """The memory of one optimizer's edits; on a device it is new each time.

    It holds nothing before the first edit, and nothing some steps after one.
    """

    def __init__(self) -> None:
        self._raw: Bytes | None = None
        self._unused = 0

    def lend(self, store: Store, parameters: Mapping[int, nn.Parameter]) -> None:
        """Makes parameters, by their index in the store, copies of themselves in this memory."""
        size = store.own.size_bytes + 64
        raw = self._raw
        # Tensors that a script has kept of the last edit hold the memory, and stay as they are.
        if raw is None or raw.nbytes != size or sys.getrefcount(raw) > 3:
            raw = self._raw = np.empty(size, np.uint8)
        self._unused = 0
        offset = -raw.ctypes.data % 64
        memory = raw[offset : offset + store.own.size_bytes]
        copies = [
            tensor_at(memory[store.own.place(i)], p) if is_on_host(p) else torch.empty_like(p.data)
            for i, p in parameters.items()
        ]
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(copies, [each.detach() for each in parameters.values()])
        for parameter, copy in zip(parameters.values(), copies, strict=True):
            parameter.data = copy

    def stepped(self) -> None:
        """Gives the memory back when there was no edit for some steps."""
        self._unused += 1
        if self._unused > _KEPT_STEPS:
            self._raw = None
