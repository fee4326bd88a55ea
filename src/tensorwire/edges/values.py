"""Represents the tensors of a plan as numpy arrays, and a run as a block that describes it.

Pure. Blocks come from other processes: everything in one is checked against the plan.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory.buffers import check_unmasked
from tensorwire.placement import ALIGN_BYTES, BLOCK_BYTES, DTYPES, Slot, Tensor

_UNKNOWN = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
_NUMPY = {name: np.dtype(_UNKNOWN.get(name, name)) for name in DTYPES}
"""Elements as numpy has them; those that it does not know are unsigned integers."""

# Magic, number of sizes, bytes of the values, number of the memory they are in, sizes.
_BLOCK = struct.Struct("<8sQQQ16Q")
_MAGIC = b"TWBLOCK1"
_MOST = (1 << 63) - 1


class Rows(NamedTuple):
    """Some rows of a table.

    Attributes:
        indices: int64, one dimension: the number of each row, in any order, repeats allowed.
        values: the rows.
    """

    indices: NDArray[np.int64]
    values: NDArray[Any]


Value = NDArray[Any] | Rows


def size_bytes(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Bytes of one run; of rows with their numbers."""
    values = DTYPES[tensor.dtype] * math.prod(shape)
    return values + (indices_bytes(shape[0]) if tensor.rows else 0)


def indices_bytes(count: int) -> int:
    """Room for so many numbers of rows; the values begin behind it."""
    return 8 * count + -8 * count % ALIGN_BYTES


def check(tensor: Tensor, value: Any) -> tuple[int, ...]:
    """Checks what a run made and returns its shape.

    Raises:
        TypeError: no numpy array, or a masked one, or for rows no `Rows`.
        ValueError: another dtype or shape than planned, or not contiguous.
    """
    parts = [("values", value, _NUMPY[tensor.dtype])]
    if tensor.rows:
        if not isinstance(value, Rows):
            raise TypeError(f"{tensor.name!r} is {tensor}: put Rows, not {type(value).__name__}")
        parts = [("values", value.values, _NUMPY[tensor.dtype]), ("indices", value.indices, _INT64)]
    for what, array, dtype in parts:
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"{what} of {tensor.name!r} are a numpy array, not {type(array).__name__}"
            )
        check_unmasked(array)
        if array.dtype != dtype:
            raise ValueError(f"{what} of {tensor.name!r} are planned as {dtype}, not {array.dtype}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{what} of {tensor.name!r} are not contiguous: copy them first")
    array = value.values if tensor.rows else value
    shape: tuple[int, ...] = array.shape
    check_shape(tensor, shape)
    if tensor.rows and value.indices.shape != shape[:1]:
        raise ValueError(
            f"{tensor.name!r} has {shape[0]} rows and indices of shape {value.indices.shape}"
        )
    return shape


_INT64 = np.dtype(np.int64)


def check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError if a run must not make this shape."""
    if not tensor.takes(shape):
        raise ValueError(f"{tensor.name!r} is planned as {tensor}; shape {shape} is not possible")


def values_in(tensor: Tensor, shape: tuple[int, ...], memory: Any) -> Value:
    """A run's value over writable memory of `size_bytes` or more."""
    start = indices_bytes(shape[0]) if tensor.rows else 0
    values: NDArray[Any] = np.ndarray(shape, _NUMPY[tensor.dtype], memory, start)
    if not tensor.rows:
        return values
    return Rows(np.ndarray(shape[:1], _INT64, memory), values)


def copy_into(target: Value, value: Value) -> None:
    """Copies all of a value."""
    if isinstance(target, Rows) and isinstance(value, Rows):
        np.copyto(target.indices, value.indices)
        np.copyto(target.values, value.values)
    else:
        assert isinstance(target, np.ndarray)
        assert isinstance(value, np.ndarray)
        np.copyto(target, value)


def write_block(tensor: Tensor, shape: tuple[int, ...], memory: int = 0) -> NDArray[np.uint8]:
    """The block of a run; `memory` is the number of the sender's memory that holds the values."""
    dims = shape + (0,) * (16 - len(shape))
    text = _BLOCK.pack(_MAGIC, len(shape), size_bytes(tensor, shape), memory, *dims)
    return np.frombuffer(text.ljust(BLOCK_BYTES, b"\0"), np.uint8)


def read_block(slot: Slot, block: bytes) -> tuple[tuple[int, ...], int]:
    """(shape, number of the memory).

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
            f"the block of {tensor.name!r} makes no sense: {rank} sizes {dims}, {size} bytes; "
            f"planned is {tensor}"
        )
    return shape, memory
