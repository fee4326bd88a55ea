"""Converts tensors to bytes and back, without copies unless it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tensorwire.parameters import Bytes, Rows


def tensor_at(memory: Bytes, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over `memory` with the form of `like` and a storage of its own."""
    return in_form(memory, like.dtype, like.size(), like.stride())


def in_form(
    memory: Bytes, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Returns a tensor over `memory` of this form, with a storage of its own."""
    count = math.prod(size)
    if count == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided(size, stride)


class TensorsOver:
    """A maker of tensors over parts of one memory, which share one storage.

    Args:
        memory: of a multiple of 8 bytes, as are the starts of the parts.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._whole: dict[torch.dtype, torch.Tensor] = {}

    def at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor from byte `start` on, with dtype, shape and strides of `like`."""
        whole = self._whole.get(like.dtype)
        if whole is None:
            whole = torch.frombuffer(self._memory, dtype=like.dtype)
            self._whole[like.dtype] = whole
        return whole.as_strided(like.size(), like.stride(), start // whole.itemsize)


def flat_bytes(tensor: torch.Tensor, like: torch.Tensor | None = None) -> Bytes:
    """Returns the bytes of a tensor in the order in which `like` has its elements in memory.

    They are copied only if the tensor's own order is another one, or if it is on a device; the
    caller waits for the copy.
    """
    like = tensor if like is None else like
    is_other = tensor is not like and (
        tensor.stride() != like.stride() or tensor.dtype != like.dtype
    )
    if is_other or not tensor.is_cpu:
        other = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="cpu")
        tensor = other.copy_(tensor)
    count = tensor.numel()
    if count == 0:
        return np.empty(0, np.uint8)
    if tensor.dtype == torch.float32 and tensor.is_contiguous():  # half the calls, twice as fast
        array: np.ndarray[Any, Any] = tensor.numpy()
        return array.reshape(-1).view(np.uint8)
    flat = tensor.as_strided((count,), (1,), tensor.storage_offset())
    result: Bytes = flat.view(torch.uint8).numpy()
    return result


def memory_format_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a tensor whose elements fill one piece of memory.

    Raises:
        ValueError: elements overlap or there are gaps between them.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected and tensor.numel():
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
                "dense; make it contiguous first"
            )
        expected *= size
    return tuple(tensor.stride())


def rows_of(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the rows that a gradient of a table has, rising and each once, and their values.

    Args:
        gradient: on the host, dense or sparse by rows.

    Returns:
        Also how many bytes were copied for it.
    """
    if gradient.layout == torch.strided:
        # Something else than the table's own module has added to it.
        return torch.arange(len(gradient), device="cpu"), gradient, 0
    single = gradient.coalesce()
    rows, values = single._indices()[0], single._values()
    return rows, values, 0 if gradient.is_coalesced() else rows.nbytes + values.nbytes


def bytes_of_rows(
    rows: torch.Tensor, values: torch.Tensor, like: torch.Tensor
) -> tuple[Rows, Bytes, int]:
    """Returns rows and their values, on the host, as a store takes them, in the table's dtype.

    Returns:
        Also how many bytes were copied for it.
    """
    contiguous = values.to(like.dtype).contiguous()
    copied = 0 if contiguous.data_ptr() == values.data_ptr() else contiguous.nbytes
    return rows.contiguous().numpy(), flat_bytes(contiguous), copied


def address_of(gradient: torch.Tensor) -> int:
    """Returns the address of the elements of a gradient, dense or sparse."""
    dense: torch.Tensor = gradient if gradient.layout == torch.strided else gradient._values()
    return int(dense.data_ptr())
