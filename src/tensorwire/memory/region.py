"""Defines Region and Word, the memory of this Node as objects.

All access here is direct. The core serves the peers; a Region only names the memory, lends views of
it, and waits for its words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from sys import modules
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tensorwire import _core
from tensorwire.errors import ClosedError, TimeoutError, UnavailableError

from . import aio
from .arguments import byte_range, check_word_memory, word_offset, word_value
from .buffers import array_over, check_tensor, check_unmasked, describe, is_tensor, shape_in
from .gpu import GpuView, OnStream, current_stream, device_name, tensor_over
from .handle import Handle, access_name
from .open_node import OpenNode
from .peer import Peer
from .private import PrivateMapping


class Region:
    """Memory that this Node allocated and that peers may reach, or a slice of it.

    Made by `Node.allocate`, `Node.adopt` and `Region[a:b]`. All local access is direct: the memory
    belongs to this process. Peers' writes appear in it at any time; what a signal announces is
    complete (see `Word`), anything else may be half written.

    Slices share the memory. Arrays, tensors and memoryviews of it keep the memory alive, also after
    `free` and after the Node was closed; peers then no longer reach it. When the Node is closed,
    the memory of regions that nothing views is given back at once, though Region objects may stay:
    they give no new views. Methods may be called by any thread.

    Attributes:
        size_bytes: length of this slice.
    """

    __slots__ = ("__weakref__", "_core", "_node", "_offset", "size_bytes")

    def __init__(self, node: OpenNode, core: _core.Region, offset: int, size_bytes: int) -> None:
        self._node = node
        self._core = core
        self._offset = offset
        self.size_bytes = size_bytes

    @property
    def name(self) -> str:
        """The name peers can look it up by, "" if it has none."""
        return self._core.name

    @property
    def access(self) -> str:
        """The rights of peers: "rw", "r", "w" or "none"."""
        return access_name(self._core.readable, self._core.writable)

    @property
    def freed(self) -> bool:
        """True once `free` was called, here or by the peer that allocated the region."""
        return self._core.freed

    @property
    def device(self) -> str:
        """The device of the memory: "cpu" or "cuda:N"."""
        return device_name(self._core.on_gpu, self._core.gpu)

    def __repr__(self) -> str:
        end = self._offset + self.size_bytes
        state = ", freed" if self.freed else ""
        state = f", on {self.device}{state}" if self._core.on_gpu else state
        return f"<Region {self.name!r} [{self._offset}:{end}] access {self.access}{state}>"

    def __getitem__(self, piece: slice) -> Region:
        """Returns the bytes [a:b] as a Region that shares the memory.

        Raises:
            TypeError: not a slice of integers.
            ValueError: a step, or not 0 <= a <= b <= size_bytes. Nothing is cut off silently.
        """
        start, stop = byte_range(piece, self.size_bytes)
        return Region(self._node, self._core, self._offset + start, stop - start)

    def handle(self) -> Handle:
        """Returns a small picklable name for this region; give it to the peers that shall use it.

        Raises:
            ValueError: this is a slice. A handle names a whole region; slice it at the other side.
        """
        self._check_whole("handle")
        node, core = self._node, self._core
        return Handle(
            node.address,
            node.core.incarnation,
            core.id,
            core.generation,
            core.size_bytes,
            self.access,
            core.name,
            node.core.name,
        )

    def word(self, offset: int) -> Word:
        """Returns the 64-bit signal word at a byte offset of this slice.

        Raises:
            ValueError: outside the slice, not a multiple of 8 from the region's start, or in memory
                of a GPU, where no word can be.
        """
        check_word_memory(self, self._core.on_gpu)
        return Word(self._node, self._core, word_offset(self._offset, self.size_bytes, offset))

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> NDArray[Any]:
        """Returns a writable numpy array over this memory; nothing is copied.

        Args:
            dtype: any numpy dtype without Python objects.
            shape: starts at the slice's first byte and may be smaller than the slice. None: one
                dimension, the whole slice.

        Raises:
            TypeError: dtype has Python objects, or is none.
            ValueError: the shape does not fit, the slice is no multiple of the dtype's size, or
                that is 0.
            UnavailableError: the memory is on a GPU.
            ClosedError: the Node was closed; or this is a forked child.
        """
        return array_over(self, dtype, shape)

    def tensor(self, dtype: Any = None, shape: int | Sequence[int] | None = None) -> Any:
        """Returns a torch tensor over this memory; nothing is copied.

        Args:
            dtype: a torch dtype; None is torch.uint8.
            shape: as for `array`.

        Raises:
            UnavailableError: torch has not been imported, or the memory is on a GPU and torch
                cannot use CUDA.
            ValueError, ClosedError: as for `array`.
        """
        torch = modules.get("torch")
        if torch is None:
            raise UnavailableError(
                "Region.tensor makes a torch tensor, and nobody has imported torch: "
                "import torch first (pip install 'tensorwire[torch]'), or use Region.array"
            )
        dtype = torch.uint8 if dtype is None else dtype
        shape = shape_in(self, shape, dtype.itemsize, str(dtype))
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=self.device)
        if self._core.on_gpu:
            return tensor_over(self._gpu_view(), self._core.gpu, dtype, shape, count)
        return torch.frombuffer(self.memoryview(), dtype=dtype, count=count).reshape(shape)

    def memoryview(self) -> memoryview:
        """Returns the bytes of this slice, writable.

        Raises:
            UnavailableError, ClosedError: as for `array`.
        """
        view: Any = self._core.view()  # before Python 3.12 stubs cannot say that it is a buffer
        return memoryview(view)[self._offset : self._offset + self.size_bytes]

    def _gpu_view(self) -> GpuView:
        return GpuView(self._core.view(), self._offset, self.size_bytes)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes of a slice that is on a GPU. Keep the Region as long as they are used."""
        if not self._core.on_gpu:
            raise AttributeError(f"{self!r} has no __cuda_array_interface__: it is not on a GPU")
        return self._gpu_view().__cuda_array_interface__

    def __dlpack__(self, **options: Any) -> Any:
        return (self.tensor() if self._core.on_gpu else self.array()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._core.gpu) if self._core.on_gpu else (1, 0)

    def adopt(self, tensor: Any, offset: int = 0) -> Any:
        """Moves an array or tensor into this memory.

        The values are copied in. A torch tensor is then re-pointed (`tensor.data = ...`), so that
        the tensor itself, a parameter for instance, lives in the region from now on; other tensors
        that shared its old memory do not follow. A numpy array cannot be re-pointed: use the
        result instead of it.

        Args:
            tensor: numpy array, or dense contiguous torch tensor, on the CPU or a GPU. Into memory
                of a GPU torch tensors alone can be moved.
            offset: in bytes from the start of this slice; a multiple of the item size.

        Returns:
            The view on this memory, with the dtype and shape of `tensor`.

        Raises:
            TypeError: neither an array nor a tensor, it is masked, or it holds Python objects.
            ValueError: it does not fit, the offset is misaligned, or the tensor is not contiguous,
                or on a device that is neither the CPU nor a GPU of CUDA.
            UnavailableError: as for `tensor`; an array for memory of a GPU.
        """
        size, item_bytes = adoptable(tensor)
        offset = index(offset)
        if offset < 0 or size > self.size_bytes - offset:
            raise ValueError(
                f"{describe(tensor)} has {size} bytes and does not fit at offset {offset} of "
                f"{self!r}"
            )
        if (self._offset + offset) % item_bytes:
            raise ValueError(
                f"{describe(tensor)} would start at byte {self._offset + offset} of the region, "
                f"which is no multiple of its item size {item_bytes}; choose another offset"
            )
        target = self[offset : offset + size]
        if isinstance(tensor, np.ndarray):
            array = target.array(tensor.dtype, tensor.shape)
            np.copyto(array, tensor)
            return array
        view = target.tensor(tensor.dtype, tuple(tensor.shape))
        view.copy_(tensor.detach())
        tensor.data = view
        return view

    def private(self) -> PrivateMapping:
        """Returns the same memory copy-on-write: writes to it stay in this process.

        Raises:
            ValueError: this is a slice.
            UnavailableError: the Node shares no memory (its transports leave out shm), and the
                region was not allocated with mappable=True.
            ClosedError: in a forked child.
            MemoryError: no address space.
        """
        self._check_whole("private")
        return PrivateMapping(self._core.map_private())

    def descriptor(self) -> int:
        """Returns a descriptor of this memory, for a process that takes it over: `Node.restore`.

        It is the caller's, who closes it (`os.close`) and may pass it on. The memory lives as long
        as any descriptor or mapping of it, also beyond this process. Its holder
        can read and, unless access is "r", write all of it, and nobody can take that back.

        Raises:
            ValueError: this is a slice.
            UnavailableError: the region's memory is not shared memory (the Node's transports leave
                out shm).
            BusyError: no descriptor is left.
            ClosedError: the Node was closed; or this is a forked child.
        """
        self._check_whole("descriptor")
        return self._core.descriptor()

    def discard(self) -> None:
        """Gives the pages back to the system; the region stays, and its bytes become zero.

        For memory that is needed now and then: pages come back when they are written.

        Raises:
            ValueError: this is a slice, or a NIC has the memory registered.
            ClosedError: the Node was closed; or this is a forked child.
        """
        self._check_whole("discard")
        self._core.discard()

    def free(self) -> None:
        """Takes the memory away from peers; calling it again does nothing.

        Their next use raises `StaleHandleError`. A peer on the same host that has the memory mapped
        may still complete a write that it has begun. This process keeps the memory as long as a
        view of it lives; then it is returned to the system.

        Raises:
            ValueError: this is a slice; only a whole region can be freed.
        """
        self._check_whole("free")
        if not self._node.core.closed:
            self._node.core.free(self._core)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def _check_whole(self, method: str) -> None:
        if self.size_bytes != self._core.size_bytes:
            raise ValueError(
                f"{method}() is for a whole region and this is {self!r}, a slice of "
                f"{self._core.size_bytes} bytes; keep the region that allocate() returned"
            )

    def _local_buffer(self) -> tuple[_core.Buffer, OnStream | None]:
        core, gpu = self._core, self._core.gpu
        buffer = _core.Buffer(
            core.address + self._offset, self.size_bytes, True, core.view(), gpu, core
        )
        return buffer, current_stream(gpu) if gpu >= 0 else None


class Word:
    """A signal word in a local region: 64 bits, unsigned, raised by one peer, only growing.

    A thread that sees value >= v here, by `wait_until`, `reached` or `value`, sees every byte of
    the call that raised it to v (acquire). Nothing follows about other calls.
    """

    __slots__ = ("_core", "_node", "offset")

    def __init__(self, node: OpenNode, core: _core.Region, offset: int) -> None:
        self._node = node
        self._core = core
        self.offset = offset

    def __repr__(self) -> str:
        try:
            value = str(self.value)
        except ClosedError:
            value = "closed"
        return f"<Word at byte {self.offset} of region {self._core.name!r}: {value}>"

    @property
    def value(self) -> int:
        """The present value (acquire). Also readable after the region was freed.

        Raises:
            ClosedError: the Node was closed and the memory given back; or this is a forked child.
        """
        return self._core.load_word(self.offset)

    def set(self, value: int) -> None:
        """Raises this Node's own word and wakes the threads here that wait for it.

        For peers that read it, and for words that this process itself owns: a word has one writer.
        A lower value than the present one changes nothing.

        Raises:
            ClosedError: the Node was closed.
            ValueError: the value does not fit.
        """
        self._node.core.raise_word(self._core, self.offset, word_value(value))

    def wait_until(
        self,
        value: int,
        timeout_s: float | None = None,
        *,
        peer: Peer | None = None,
        pace: _core.Pace | None = None,
    ) -> None:
        """Blocks until the word is at least `value`. Any number of threads may wait.

        Costs under 2 % of a core while it waits. The GIL is released.

        Args:
            value: 0 to 2**64 - 1.
            timeout_s: None waits for ever.
            peer: raises the word. The waiting ends if it is lost.
            pace: remembers how long earlier waits for the same took. If that was as short as a few
                wake-ups at both ends and a core is free, this wait polls somewhat longer than they
                took before it sleeps: at most 1 ms, mostly less than half of that.

        Raises:
            TimeoutError: `timeout_s` has passed.
            PeerLostError: `peer` was lost (ClosedError: closed here) before it raised the word.
            ClosedError: the Node was closed.
            StaleHandleError: the region was freed.
            ValueError: the value does not fit.
        """
        self._node.core.wait_word(
            self._core,
            self.offset,
            word_value(value),
            timeout_s,
            None if peer is None else peer._core,
            pace,
        )

    async def reached(
        self, value: int, timeout_s: float | None = None, *, peer: Peer | None = None
    ) -> None:
        """Waits for a value like `wait_until`, without blocking the running event loop.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError, ValueError: as for
                `wait_until`.
        """
        value = word_value(value)
        node, core, offset = self._node.core, self._core, self.offset
        peer_core = None if peer is None else peer._core

        def ready() -> bool:
            return (
                core.reaches(offset, value)
                or core.freed
                or node.closed
                or (peer_core is not None and peer_core.lost)
            )

        if await aio.wait_until(node, ready, timeout_s):
            timeout_s = 0  # returns, or raises the reason
        elif timeout_s is not None:
            raise TimeoutError(f"{self!r} did not reach {value} within {timeout_s:g} s")
        node.wait_word(core, offset, value, timeout_s, peer_core)


def adoptable(tensor: Any) -> tuple[int, int]:
    """Checks that `adopt` may move a value; returns (bytes, bytes of one item)."""
    if isinstance(tensor, np.ndarray):
        check_unmasked(tensor)
        if tensor.dtype.hasobject:
            raise TypeError(f"{describe(tensor)} holds Python objects, which cannot be adopted")
        return tensor.nbytes, max(tensor.itemsize, 1)
    if is_tensor(tensor):
        check_tensor(tensor)
        return tensor.nbytes, tensor.element_size()
    raise TypeError(f"adopt takes a numpy array or a torch tensor, not {describe(tensor)}")
