"""Shows a peer's memory in this process: the view of a RemoteRegion, without its peer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from sys import modules
from typing import Any

from numpy.typing import DTypeLike, NDArray

from tensorwire import _core
from tensorwire.errors import UnavailableError

from .buffers import array_over, shape_in
from .gpu import GpuView, device_name, tensor_over


class MappedView:
    """The base of `RemoteRegion`, which documents it."""

    __slots__ = ("_core", "_offset", "size_bytes")

    def __init__(self, core: _core.RemoteRegion, offset: int, size_bytes: int) -> None:
        self._core = core
        self._offset = offset
        self.size_bytes = size_bytes

    @property
    def device(self) -> str:
        """The device of the memory: "cpu", "cuda:N" as this process counts GPUs, or "cuda".

        "cuda" is a GPU of the peer, reached over a network.
        """
        return device_name(self._core.on_gpu, self._core.gpu)

    @property
    def mapped(self) -> bool:
        """True if this process sees the memory itself: on shm it does, on a network it cannot."""
        return self._core.mapped

    def memoryview(self) -> memoryview:
        """Returns the bytes of this slice where they are, at the peer; nothing is copied.

        Only on one host (`mapped`). Both processes then use the same memory: nothing orders their
        loads and stores but signals. The view keeps the memory alive, also after the owner freed
        the region, ended or was lost, when nobody else looks at it any more. It is read-only where
        the owner does not let peers write.

        Raises:
            UnavailableError: the path to the peer maps nothing, or the memory is on a GPU; use
                `read` and `write`, or `tensor`.
            ClosedError: this side's Node was closed; or this process was forked from the one that
                has the grant.
        """
        view: Any = self._view()  # before Python 3.12 stubs cannot say that it is a buffer
        return memoryview(view)[self._offset : self._offset + self.size_bytes]

    def _view(self) -> _core.View:
        if not self.mapped:
            raise UnavailableError(
                f"{self!r} is on another host or was reached by {self._transport()}: its memory "
                "cannot be mapped here; use read() and write()"
            )
        return self._core.view()

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> NDArray[Any]:
        """Returns a numpy array over `memoryview()`, with its conditions.

        Args:
            dtype: as for `Region.array`.
            shape: as for `Region.array`.

        Raises:
            TypeError, ValueError: as for `Region.array`.
            UnavailableError, ClosedError: as for `memoryview`.
        """
        return array_over(self, dtype, shape)

    def _transport(self) -> str:
        raise NotImplementedError

    def tensor(self, dtype: Any = None, shape: int | Sequence[int] | None = None) -> Any:
        """Returns a torch tensor over this slice where it is, at the peer; nothing is copied.

        Under the conditions of `memoryview`, on a GPU too: kernels of this process then work on the
        peer's memory, and nothing orders them with the peer but signals that are raised when they
        are through.

        Args:
            dtype: a torch dtype; None is torch.uint8.
            shape: as for `Region.array`.

        Raises:
            UnavailableError: torch has not been imported or cannot use CUDA, or the path to the
                peer maps nothing.
            PermissionError: the owner does not let peers write, which torch has no tensors for.
            ValueError, ClosedError: as for `array`.
        """
        torch = modules.get("torch")
        if torch is None:
            raise UnavailableError(
                "RemoteRegion.tensor makes a torch tensor, and nobody has imported torch: import "
                "torch first (pip install 'tensorwire[torch]')"
            )
        dtype = torch.uint8 if dtype is None else dtype
        shape = shape_in(self, shape, dtype.itemsize, str(dtype))
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self._core.on_gpu:
            return tensor_over(self._gpu_view(), self._core.gpu, dtype, shape, count)
        if not self._core.writable:
            raise PermissionError(
                f"{self!r} was granted read-only, and a torch tensor can always be written: use "
                "array()"
            )
        return torch.frombuffer(self.memoryview(), dtype=dtype, count=count).reshape(shape)

    def _gpu_view(self) -> GpuView:
        return GpuView(self._view(), self._offset, self.size_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes of a slice on a GPU that is mapped here. Keep the RemoteRegion meanwhile."""
        if not self._core.on_gpu or not self._core.mapped:
            raise AttributeError(
                f"{self!r} has no __cuda_array_interface__: it is not memory of a GPU that is "
                "mapped here"
            )
        return self._gpu_view().__cuda_array_interface__
