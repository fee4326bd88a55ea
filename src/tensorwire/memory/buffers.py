"""Decides which objects of this process a transfer may read or fill, and how.

Everything with the buffer protocol goes to the core as it is. Tensors and DLPack objects are
checked here. torch is never imported: a tensor can only exist if somebody else has imported it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from sys import modules
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from tensorwire._core import Buffer

from .gpu import OnStream, dlpack_buffer, interface_buffer, on_stream, tensor_buffer

_DLPACK_CPU, _DLPACK_CUDA = 1, 2
PLAIN = frozenset({np.ndarray, bytes, bytearray, memoryview})


def as_local(local: Any) -> tuple[object, OnStream | None]:
    """Turns an object into one that the core accepts: a buffer exporter or a `Buffer`.

    The result keeps the memory alive. Whether a buffer is contiguous, free of Python objects and,
    where it is filled, writable, is checked by the core.

    Args:
        local: numpy array, bytes-like object, torch tensor, `Region`, or any object with DLPack
            or, on a GPU, `__cuda_array_interface__`.

    Returns:
        The object, and for memory of a GPU the stream that its values come from, if one is known.

    Raises:
        TypeError: none of these, or a masked array.
        ValueError: a tensor that is not contiguous, not on the CPU or a GPU, or not dense.
        UnavailableError: the driver of its GPU cannot be used.
    """
    if type(local) in PLAIN:
        return local, None
    if isinstance(local, np.ndarray):
        check_unmasked(local)
        return local, None
    if is_tensor(local):
        return _tensor_buffer(local)
    region_buffer = getattr(local, "_local_buffer", None)
    if region_buffer is not None:
        found: tuple[object, OnStream | None] = region_buffer()
        return found
    try:
        memoryview(local)
        return local, None
    except TypeError:
        pass
    if hasattr(local, "__cuda_array_interface__"):
        return interface_buffer(local)
    if hasattr(local, "__dlpack__") and hasattr(local, "__dlpack_device__"):
        return _from_dlpack(local)
    raise TypeError(f"{describe(local)} has no memory to transfer; {_advice(local)}")


def placed(local: Any, stream: Any, gpu_there: int) -> tuple[object, OnStream | None]:
    """Returns the memory of `as_local`, and the stream after whose work the transfer starts.

    Args:
        local: as for `as_local`.
        stream: as the user gave it, None for the one that the values come from.
        gpu_there: of the other side's memory, -1 if it is on none.
    """
    found, order = as_local(local)
    if stream is None:
        return found, order
    gpu = getattr(found, "gpu", -1)
    return found, on_stream(stream, gpu if gpu >= 0 else gpu_there)


def size_bytes(local: Any) -> int:
    """Returns the length of an object that `as_local` returned from or accepts."""
    nbytes = getattr(local, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    size = getattr(local, "size_bytes", None)
    return size if isinstance(size, int) else memoryview(local).nbytes


def is_tensor(value: object) -> bool:
    """Tells whether an object is a torch tensor; never imports torch."""
    tensor_type = getattr(modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)


def check_unmasked(array: Any) -> None:
    """Refuses a masked array, whose mask would not travel.

    Raises:
        TypeError: it is one.
    """
    masked_type = getattr(modules.get("numpy.ma"), "MaskedArray", None)
    if masked_type is not None and isinstance(array, masked_type):
        raise TypeError(
            f"{describe(array)} has a mask, which would not travel: pass array.filled(value), or "
            "array.data and array.mask"
        )


def describe(value: Any) -> str:
    """Returns a few words about an object, for messages: its type, its dtype and its shape."""
    words = type(value).__name__
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        words += f" ({dtype}, shape {tuple(shape)})"
    return words


def check_tensor(tensor: Any) -> None:
    """Refuses a torch tensor whose bytes are not one plain piece of memory of this process.

    Raises:
        ValueError: it is on a device that is no GPU of CUDA, sparse, not contiguous, or a lazy view
            (conjugate, negative).
        TypeError: it has no memory at all (fake or functional tensors).
    """
    if not (tensor.is_cpu or tensor.is_cuda):
        raise ValueError(
            f"{describe(tensor)} is on {tensor.device}; transfers take tensors on the CPU or on a "
            "GPU of CUDA: pass tensor.cpu()"
        )
    if tensor.layout is not modules["torch"].strided:
        raise ValueError(f"{describe(tensor)} is sparse; pass tensor.to_dense() or its parts")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{describe(tensor)} is not contiguous (strides {tensor.stride()}); "
            "pass tensor.contiguous(), or slice the first dimension only"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{describe(tensor)} is a conjugate or negative view; "
            "pass tensor.resolve_conj().resolve_neg()"
        )


def _tensor_buffer(tensor: Any) -> tuple[Buffer, OnStream | None]:
    check_tensor(tensor)
    if tensor.is_cuda:
        return tensor_buffer(tensor)
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes and not address:
        raise TypeError(f"{describe(tensor)} has no memory: it only stands for a tensor")
    return Buffer(address, nbytes, True, tensor), None


def _from_dlpack(local: Any) -> tuple[object, OnStream | None]:
    device, _ = local.__dlpack_device__()
    if device == _DLPACK_CUDA:
        return dlpack_buffer(local)
    if device != _DLPACK_CPU:
        raise ValueError(
            f"{describe(local)} is on DLPack device type {device}; "
            "transfers take memory of the CPU (1) and of CUDA (2): copy it there first"
        )
    try:
        return np.from_dlpack(local), None
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"{describe(local)} cannot be shared by DLPack: {error}") from error


def _advice(local: object) -> str:
    if isinstance(local, str):
        return "encode the text to bytes"
    if isinstance(local, list | tuple):
        return "for a batch pass a sequence of remotes of the same length too"
    return "pass a numpy array, a torch tensor, a bytes-like object or a Region"


def array_over(region: Any, dtype: DTypeLike, shape: int | Sequence[int] | None) -> NDArray[Any]:
    """Returns a numpy array over a Region or RemoteRegion, for their method `array`."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise TypeError(f"{dtype} holds Python objects, which no other process can use")
    if dtype.itemsize == 0:
        raise ValueError(f"items of {dtype!r} have no bytes; name one that has, such as 'S8'")
    shape = shape_in(region, shape, dtype.itemsize, str(dtype))
    return np.ndarray(shape, dtype, buffer=region.memoryview())


def shape_in(region: Any, shape: Any, item_bytes: int, dtype: str) -> tuple[int, ...]:
    """Returns the shape as a tuple, checked against the size of the region.

    Raises:
        ValueError: it does not fit, or None and the size is no multiple of the item.
    """
    if shape is None:
        count, rest = divmod(region.size_bytes, item_bytes)
        if rest:
            raise ValueError(
                f"{region.size_bytes} bytes are no multiple of the {item_bytes} bytes of "
                f"{dtype}; give a shape, or slice the region"
            )
        return (count,)
    result = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
    if any(size < 0 for size in result):
        raise ValueError(f"a shape has no negative sizes: {result}")
    needed = math.prod(result) * item_bytes
    if needed > region.size_bytes:
        raise ValueError(
            f"shape {result} of {dtype} needs {needed} bytes, {region!r} has {region.size_bytes}"
        )
    return result


def check_batch(local: Any, remote: Any) -> None:
    """Raises TypeError or ValueError unless the sides of a batch are sequences of one length."""
    for side, pieces in (("local", local), ("remote", remote)):
        if not isinstance(pieces, Sequence) or isinstance(pieces, str | bytes | bytearray):
            raise TypeError(
                f"a batch is a list of local objects and a list of RemoteRegions; "
                f"{side} is {describe(pieces)}"
            )
    if len(local) != len(remote):
        raise ValueError(
            f"a batch has as many locals as remotes, not {len(local)} and {len(remote)}"
        )


def index_vector(indices: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Checks the indices of a `Prepared.start`."""
    vector = np.asarray(indices)
    if vector.ndim != 1:
        raise ValueError(f"indices have one dimension, not shape {vector.shape}")
    if vector.size and vector.dtype.kind not in "iu":
        raise TypeError(f"indices are whole numbers, not {vector.dtype}")
    return np.ascontiguousarray(vector, np.int64)
