"""Names devices, streams and views of memory of GPUs in Python.

torch is never imported: a program that has tensors on a GPU, or wants one, has imported it. The
core drives the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from operator import index
from sys import modules
from typing import Any

from tensorwire import _core
from tensorwire.errors import UnavailableError

OnStream = tuple[int, int]
"""A stream as the core takes it: the driver's handle, and the number of the GPU."""

_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")
_HOST = -1
_LEGACY_STREAM = 0


def gpu_number(device: Any) -> int:
    """Returns the GPU that `device=` names, by its number in this process; -1 for the host.

    Args:
        device: None or "cpu", "cuda", "cuda:N", or a torch.device. "cuda" is torch's current
            device, or 0 where torch has not started CUDA.

    Raises:
        TypeError, ValueError: anything else.
    """
    if device is None:
        return _HOST
    kind, number = getattr(device, "type", None), getattr(device, "index", None)
    text = device if isinstance(device, str) else str(device) if isinstance(kind, str) else None
    if text is None:
        raise TypeError(f"a device is named by a str such as 'cuda:0', not {device!r}")
    if text == "cpu":
        return _HOST
    found = _DEVICE.fullmatch(text)
    if found is None:
        raise ValueError(f"a device is 'cpu', 'cuda' or 'cuda:N', not {text!r}")
    if found[1] is None and number is None:
        cuda = _started_torch_cuda()
        return 0 if cuda is None else int(cuda.current_device())
    return int(found[1])


def device_name(on_gpu: bool, gpu: int) -> str:
    """Returns "cpu", "cuda:N", or "cuda" for a GPU of another process that is not seen here."""
    return "cpu" if not on_gpu else "cuda" if gpu < 0 else f"cuda:{gpu}"


def _started_torch_cuda() -> Any:
    cuda = getattr(modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


@cache
def _current_stream_of() -> Callable[[int], int]:
    """Returns a function from a GPU's number to torch's current stream, once CUDA was started.

    The public function makes an object of Python, which takes longer than a small copy does.
    """
    torch: Any = modules["torch"]
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda gpu: int(torch.cuda.current_stream(gpu).cuda_stream))


def current_stream(gpu: int) -> OnStream | None:
    """Returns the stream on which torch's operators run now in this thread; None without torch."""
    return None if _started_torch_cuda() is None else (_current_stream_of()(gpu), gpu)


def on_stream(stream: Any, gpu: int) -> OnStream:
    """Turns a `stream=` argument into the core's form.

    Args:
        stream: a torch.cuda.Stream, an object with `__cuda_stream__` (cuda.core), or the driver's
            handle as an int (0 is the legacy default stream).
        gpu: of the memory of the call, -1 if it is on none; a stream that names its own GPU is
            on that one.

    Raises:
        TypeError: none of these.
        ValueError: a handle alone, where no memory of the call is on a GPU; or it is out of range.
    """
    device = getattr(getattr(stream, "device", None), "index", None)
    handle = getattr(stream, "cuda_stream", None)
    if handle is None and (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        handle = protocol()[1] if callable(protocol) else protocol[1]
    if handle is None:
        try:
            handle = index(stream)
        except TypeError as error:
            raise TypeError(
                "stream is a torch.cuda.Stream, an object with __cuda_stream__ or the handle of a "
                f"stream as an int, not {type(stream).__name__}"
            ) from error
    number = device if isinstance(device, int) else gpu
    if number < 0:
        raise ValueError(
            "no memory of the transfer is on a GPU, so it is not clear whose stream this is: pass "
            "a torch.cuda.Stream"
        )
    if not 0 <= handle < 1 << 64:
        raise ValueError(f"the handle of a stream is 0 to 2**64 - 1, not {handle}")
    return handle, number


def tensor_buffer(tensor: Any) -> tuple[_core.Buffer, OnStream | None]:
    """Returns the memory of a dense torch tensor on a GPU, and the stream that made its values."""
    gpu = tensor.device.index
    buffer = _core.Buffer(tensor.data_ptr(), tensor.nbytes, True, tensor, gpu)
    return buffer, (_current_stream_of()(gpu), gpu)


def interface_buffer(local: Any) -> tuple[_core.Buffer, OnStream | None]:
    """Returns the memory of an object with `__cuda_array_interface__`, and its stream.

    Raises:
        ValueError: it is not contiguous, masked, or no memory of a GPU.
    """
    found = local.__cuda_array_interface__
    shape, item_bytes = tuple(found["shape"]), int(found["typestr"][2:])
    strides, size_bytes = found.get("strides"), item_bytes
    for extent in reversed(shape):
        if strides is not None and extent > 1 and strides[-1] != size_bytes:
            raise ValueError(f"the {type(local).__name__} on a GPU is not contiguous in memory")
        strides = None if strides is None else strides[:-1]
        size_bytes *= extent
    if found.get("mask") is not None:
        raise ValueError(f"the {type(local).__name__} has a mask, which would not travel")
    address, read_only = found["data"]
    gpu = _core.gpu_of(address) if size_bytes else _HOST
    buffer = _core.Buffer(address, size_bytes, not read_only, local, gpu, None, True)
    stream = found.get("stream")
    return buffer, (stream, gpu) if stream is not None and size_bytes else None


def dlpack_buffer(local: Any) -> tuple[_core.Buffer, OnStream | None]:
    """Returns the memory of a DLPack object on a GPU, ready after the default stream's work.

    Raises:
        TypeError: it cannot be shared so.
    """
    try:
        address, size_bytes, gpu, owner = _core.gpu_dlpack(local)
    except TypeError as error:
        raise TypeError(
            f"the {type(local).__name__} on a GPU cannot be shared by DLPack: it is not "
            "contiguous, or not there"
        ) from error
    return _core.Buffer(address, size_bytes, True, owner, gpu), (_LEGACY_STREAM, gpu)


class GpuView:
    """Bytes of a region on a GPU, for users of `__cuda_array_interface__`: torch, CuPy, Numba.

    It keeps the memory.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__", "_view")

    def __init__(self, view: _core.View, offset: int, size_bytes: int) -> None:
        self._view = view
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (view.address + offset, not view.writable),
            "version": 3,
        }


def tensor_over(view: GpuView, gpu: int, dtype: Any, shape: tuple[int, ...], count: int) -> Any:
    """Returns a torch tensor of a shape over the first bytes of a view, `count` items in all.

    Raises:
     PermissionError: the view is read-only.
     UnavailableError: this torch cannot use CUDA.
    """
    torch: Any = modules["torch"]
    if view.__cuda_array_interface__["data"][1]:
        raise PermissionError(
            "the region was granted read-only, and a torch tensor can always be written: use "
            "read(), or a library that knows read-only arrays by __cuda_array_interface__"
        )
    if not torch.cuda.is_available():
        raise UnavailableError(
            f"this torch ({torch.__version__}) cannot use CUDA, so it has no tensors on cuda:{gpu}"
        )
    flat = torch.as_tensor(view, device=f"cuda:{gpu}")
    return flat[: count * dtype.itemsize].view(dtype).reshape(shape)
