"""Represents the tensors of a plan as numpy arrays, and a turn as a block that describes it.

Pure. Blocks come from other processes: everything in one is checked against the plan.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory.buffers import check_unmasked
from tensorwire.placement import BLOCK_BYTES, DTYPES, Slot, Tensor

_UNKNOWN = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_NUMPY = {name: np.dtype(_UNKNOWN.get(name, name)) for name in DTYPES}
"""Elements as numpy has them; a dtype that numpy lacks is an unsigned integer."""

# Magic, number of sizes, bytes of the values, number of the memory they are in, sizes.
_BLOCK = struct.Struct("<8sQQQ16Q")
_MAGIC = b"TWBLOCK1"
_MOST = (1 << 63) - 1


Value = NDArray[Any]


def size_bytes(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Returns the bytes of the values of one turn."""
    return DTYPES[tensor.dtype] * math.prod(shape)


def check(tensor: Tensor, value: Any) -> tuple[int, ...]:
    """Checks the value of a turn and returns its shape.

    Raises:
        TypeError: no numpy array, or a masked one.
        ValueError: another dtype or shape than planned, or not contiguous.
    """
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{tensor.name!r} is a numpy array, not {type(value).__name__}")
    check_unmasked(value)
    if value.dtype != (dtype := _NUMPY[tensor.dtype]):
        raise ValueError(f"{tensor.name!r} is planned as {dtype}, not {value.dtype}")
    if not value.flags.c_contiguous:
        raise ValueError(f"{tensor.name!r} is not contiguous: copy it first")
    shape: tuple[int, ...] = value.shape
    check_shape(tensor, shape)
    return shape


def check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError if a turn must not have this shape."""
    if not tensor.takes(shape):
        raise ValueError(f"{tensor.name!r} is planned as {tensor}; shape {shape} is not possible")


def values_in(tensor: Tensor, shape: tuple[int, ...], memory: Any) -> Value:
    """Returns the values of a turn as an array over writable memory of `size_bytes` or more."""
    return np.ndarray(shape, _NUMPY[tensor.dtype], memory)


def write_block(tensor: Tensor, shape: tuple[int, ...], memory: int = 0) -> NDArray[np.uint8]:
    """Returns the block of a turn; `memory` is the number of the memory that has its values."""
    dims = shape + (0,) * (16 - len(shape))
    text = _BLOCK.pack(_MAGIC, len(shape), size_bytes(tensor, shape), memory, *dims)
    return np.frombuffer(text.ljust(BLOCK_BYTES, b"\0"), np.uint8)


def read_block(slot: Slot, block: bytes) -> tuple[tuple[int, ...], int]:
    """Returns (shape, number of the memory).

    Raises:
        ValueError: it contradicts the plan or itself.
    """
    tensor = slot.tensor
    magic, rank, size, memory, *dims = _BLOCK.unpack_from(block)
    shape = tuple(dims[:rank]) if rank <= len(dims) else ()
    if (
        magic != _MAGIC
        or len(shape) != rank
        or not tensor.takes(shape)
        or any(dims[rank:])
        or size != size_bytes(tensor, shape)
        or size > _MOST
    ):
        raise ValueError(
            f"the header of {tensor.name!r} says {rank} dimensions {dims} and {size} bytes, and "
            f"the plan says {tensor}"
        )
    return shape, memory
