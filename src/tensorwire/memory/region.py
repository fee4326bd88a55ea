"""Memory as objects: Region and Word (mine), RemoteRegion and RemoteWord (a peer's).

They are thin: a slice is three numbers beside the core's object, and every transfer is one call
into the core. They know no connections; a RemoteRegion is handed its Peer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from sys import modules
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray
from numpy.typing import DTypeLike, NDArray

from tensorwire import _core
from tensorwire._core import Transfer
from tensorwire.errors import TimeoutError, UnavailableError

from . import aio
from .aio import inline_limit
from .buffers import as_local, check_tensor, describe, is_tensor
from .handle import Handle, access_name

if TYPE_CHECKING:
    from .node import Node
    from .peer import Peer

WORD_BYTES = 8
_WORD_MAX = (1 << 64) - 1
_SIZE_MAX = (1 << 63) - 1

Signal = tuple["RemoteWord", int]


class Region:
    """Memory that this Node allocated and that peers may reach, or a slice of it.

    Made by `Node.allocate`, `Node.adopt` and `Region[a:b]`. All local access is direct: the memory
    belongs to this process. Peers' writes appear in it at any time; what a signal announces is
    complete (see `Word`), anything else may be half written.

    Slices share the memory. Arrays, tensors and memoryviews of it keep the memory alive, also after
    `free` and after the Node was closed; peers then no longer reach it. Methods may be called by
    any thread.

    Attributes:
        size_bytes: length of this slice.
    """

    __slots__ = ("__weakref__", "_core", "_node", "_offset", "size_bytes")

    def __init__(self, node: Node, core: _core.Region, offset: int, size_bytes: int) -> None:
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
        """What peers may do: "rw", "r", "w" or "none"."""
        return access_name(self._core.readable, self._core.writable)

    @property
    def freed(self) -> bool:
        """True once `free` was called, here or by the peer that allocated the region."""
        return self._core.freed

    def __repr__(self) -> str:
        end = self._offset + self.size_bytes
        state = ", freed" if self.freed else ""
        return f"<Region {self.name!r} [{self._offset}:{end}] access {self.access}{state}>"

    def __getitem__(self, piece: slice) -> Region:
        """The bytes [a:b] as a Region that shares the memory.

        Raises:
            TypeError: not a slice of integers.
            ValueError: a step, or not 0 <= a <= b <= size_bytes. Nothing is cut off silently.
        """
        start, stop = byte_range(piece, self.size_bytes)
        return Region(self._node, self._core, self._offset + start, stop - start)

    def handle(self) -> Handle:
        """A small picklable name for this region; give it to the peers that shall use it.

        Raises:
            ValueError: this is a slice. A handle names a whole region; slice it at the other side.
        """
        self._check_whole("handle")
        node, core = self._node, self._core
        return Handle(
            node.address,
            node.incarnation,
            core.id,
            core.generation,
            core.size_bytes,
            self.access,
            core.name,
            node.name,
        )

    def word(self, offset: int) -> Word:
        """The 64-bit signal word at a byte offset of this slice.

        Raises:
            ValueError: outside the slice, or not a multiple of 8 from the region's start.
        """
        return Word(self._node, self._core, word_offset(self._offset, self.size_bytes, offset))

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> NDArray[Any]:
        """A writable numpy array over this memory; nothing is copied.

        Args:
            dtype: any numpy dtype without Python objects.
            shape: starts at the slice's first byte and may be smaller than the slice. None: one
                dimension, the whole slice.

        Raises:
            TypeError: dtype has Python objects.
            ValueError: the shape does not fit, or the slice is no multiple of the dtype's size.
        """
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"{dtype} holds Python objects, which no other process can use")
        shape = self._shape(shape, dtype.itemsize, str(dtype))
        return np.ndarray(shape, dtype, buffer=self.memoryview())

    def tensor(self, dtype: Any = None, shape: int | Sequence[int] | None = None) -> Any:
        """A torch tensor over this memory; nothing is copied.

        Args:
            dtype: a torch dtype; None is torch.uint8.
            shape: as for `array`.

        Raises:
            UnavailableError: torch has not been imported.
            ValueError: as for `array`.
        """
        torch = modules.get("torch")
        if torch is None:
            raise UnavailableError(
                "Region.tensor makes a torch tensor, and nobody has imported torch: "
                "import torch first (pip install 'tensorwire[torch]'), or use Region.array"
            )
        dtype = torch.uint8 if dtype is None else dtype
        shape = self._shape(shape, dtype.itemsize, str(dtype))
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.memoryview(), dtype=dtype, count=count).reshape(shape)

    def memoryview(self) -> memoryview:
        """The bytes of this slice, writable."""
        core: Any = self._core  # before Python 3.12 stubs cannot say that it is a buffer
        return memoryview(core)[self._offset : self._offset + self.size_bytes]

    def __dlpack__(self, **options: Any) -> Any:
        return self.array().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def adopt(self, tensor: Any, offset: int = 0) -> Any:
        """Moves an array or tensor into this memory.

        The values are copied in. A torch tensor is then re-pointed (`tensor.data = ...`), so that
        the tensor itself, a parameter for instance, lives in the region from now on; other tensors
        that shared its old memory do not follow. A numpy array cannot be re-pointed: use the
        result instead of it.

        Args:
            tensor: numpy array, or dense contiguous torch tensor on the CPU.
            offset: in bytes from the start of this slice; a multiple of the item size.

        Returns:
            The view on this memory, with the dtype and shape of `tensor`.

        Raises:
            TypeError: neither an array nor a tensor, or it holds Python objects.
            ValueError: it does not fit, the offset is misaligned, or the tensor is not contiguous
                or not on the CPU.
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

    def free(self) -> None:
        """Takes the memory away from peers; calling it again does nothing.

        Their next use raises `StaleHandleError`. A peer on the same host that has the memory mapped
        may still complete a write that it has begun. This process keeps the memory as long as a
        view of it lives; then it is returned to the system.

        Raises:
            ValueError: this is a slice; only a whole region can be freed.
        """
        self._check_whole("free")
        if not self._node.closed:
            self._node._core.free(self._core)

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.free()

    def _check_whole(self, method: str) -> None:
        if self.size_bytes != self._core.size_bytes:
            raise ValueError(
                f"{method}() is for a whole region and this is {self!r}, a slice of "
                f"{self._core.size_bytes} bytes; keep the region that allocate() returned"
            )

    def _shape(self, shape: Any, item_bytes: int, dtype: str) -> tuple[int, ...]:
        if shape is None:
            count, rest = divmod(self.size_bytes, item_bytes)
            if rest:
                raise ValueError(
                    f"{self.size_bytes} bytes are no multiple of the {item_bytes} bytes of "
                    f"{dtype}; give a shape, or slice the region"
                )
            return (count,)
        result = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
        if any(size < 0 for size in result):
            raise ValueError(f"a shape has no negative sizes: {result}")
        needed = math.prod(result) * item_bytes
        if needed > self.size_bytes:
            raise ValueError(
                f"shape {result} of {dtype} needs {needed} bytes, {self!r} has {self.size_bytes}"
            )
        return result

    def _local_buffer(self) -> _core.Buffer:
        return _core.Buffer(
            self._core.address + self._offset, self.size_bytes, True, self.memoryview()
        )


class Word:
    """A signal word in a local region: 64 bits, unsigned, raised by one peer, only growing.

    Whoever sees value >= v here, by `wait_until`, `reached` or `value`, sees every byte of the call
    that raised it to v (acquire). Nothing follows about other calls.
    """

    __slots__ = ("_core", "_node", "offset")

    def __init__(self, node: Node, core: _core.Region, offset: int) -> None:
        self._node = node
        self._core = core
        self.offset = offset

    def __repr__(self) -> str:
        return f"<Word at byte {self.offset} of region {self._core.name!r}: {self.value}>"

    @property
    def value(self) -> int:
        """The present value (acquire). Also readable after the region was freed."""
        return self._core.load_word(self.offset)

    def wait_until(
        self, value: int, timeout_s: float | None = None, *, peer: Peer | None = None
    ) -> None:
        """Blocks until the word is at least `value`. Any number of threads may wait.

        Costs under 2 % of a core while it waits. The GIL is released.

        Args:
            value: 0 to 2**64 - 1.
            timeout_s: None waits for ever.
            peer: who is to raise the word. The waiting ends if it is lost.

        Raises:
            TimeoutError: `timeout_s` has passed.
            PeerLostError: `peer` was lost (ClosedError: closed here) before it raised the word.
            ClosedError: the Node was closed.
            StaleHandleError: the region was freed.
            ValueError: the value does not fit.
        """
        self._node._core.wait_word(
            self._core,
            self.offset,
            word_value(value),
            timeout_s,
            None if peer is None else peer._core,
        )

    async def reached(
        self, value: int, timeout_s: float | None = None, *, peer: Peer | None = None
    ) -> None:
        """As `wait_until`, without blocking the running event loop.

        Raises:
            TimeoutError, PeerLostError, ClosedError, StaleHandleError, ValueError: as for
                `wait_until`.
        """
        value = word_value(value)
        node, core, offset = self._node._core, self._core, self.offset
        peer_core = None if peer is None else peer._core

        def ready() -> bool:
            return (
                core.load_word(offset) >= value
                or core.freed
                or node.closed
                or (peer_core is not None and peer_core.lost)
            )

        if await aio.wait_until(node, ready, timeout_s):
            timeout_s = 0  # returns, or raises the reason
        elif timeout_s is not None:
            raise TimeoutError(f"{self!r} did not reach {value} within {timeout_s:g} s")
        node.wait_word(core, offset, value, timeout_s, peer_core)


class RemoteRegion:
    """Memory of a peer, or a slice of it: where `write` and `read` go.

    Made by `Peer.allocate`, `Peer.region` and `RemoteRegion[a:b]`. Methods may be called by any
    thread. There is no order between transfers, unless one is waited for before the next starts, or
    a signal names it (`RemoteWord.set`).

    Attributes:
        peer: whose memory it is.
        size_bytes: length of this slice.
    """

    __slots__ = ("__weakref__", "_core", "_offset", "_read_one", "_write_one", "peer", "size_bytes")

    def __init__(self, peer: Peer, core: _core.RemoteRegion, offset: int, size_bytes: int) -> None:
        self.peer = peer
        self._core = core
        self._offset = offset
        self.size_bytes = size_bytes
        # Bound once: an 8-byte write should cost little more than the call into the core.
        self._write_one = peer._core.write_one
        self._read_one = peer._core.read_one

    @property
    def name(self) -> str:
        """The region's name at its owner, "" if it has none."""
        return self._core.name

    @property
    def access(self) -> str:
        """What this side may do: "rw", "r", "w" or "none"."""
        return access_name(self._core.readable, self._core.writable)

    def __repr__(self) -> str:
        end = self._offset + self.size_bytes
        return (
            f"<RemoteRegion {self.name!r} [{self._offset}:{end}] at {self.peer.name!r} "
            f"access {self.access}>"
        )

    def __getitem__(self, piece: slice) -> RemoteRegion:
        """The bytes [a:b] of this slice.

        Raises:
            TypeError: not a slice of integers.
            ValueError: a step, or not 0 <= a <= b <= size_bytes. Nothing is cut off silently.
        """
        start, stop = byte_range(piece, self.size_bytes)
        return RemoteRegion(self.peer, self._core, self._offset + start, stop - start)

    def write(self, local: Any, *, signal: Signal | None = None) -> Transfer:
        """Starts to write `local` to the start of this slice.

        The source is kept alive until the transfer is complete and must not change before. It may
        be shorter than the slice.

        Args:
            local: numpy array, bytes-like object, torch tensor on the CPU (also one that requires
                grad), `Region`, or DLPack object; contiguous, without Python objects.
            signal: (word of the same peer, value). The word is raised to the value after every byte
                of this call is in place: whoever sees it sees them.

        Returns:
            The Transfer. It is complete when the bytes (and the signal) are in the peer's memory,
            which tells nothing about whether the peer is awake or has looked.

        Raises:
            TypeError: `local` has no memory, or the signal is no (RemoteWord, int).
            ValueError: `local` is larger than this slice, not contiguous, or not on the CPU.
            PermissionError: the owner does not let peers write here.
            ClosedError: the Peer or Node was closed.
            PeerLostError: the other process or the link is gone.
            StaleHandleError: the region was freed.

            The last two, like every failure after the start, may instead come from the Transfer.
        """
        if type(local) is not ndarray:
            local = as_local(local)
        if signal is None:
            return self._write_one(
                local, self._core, self._offset, self.size_bytes, None, 0, 0, inline_limit()
            )
        word, value = check_signal(signal, self.peer)
        return self._write_one(
            local,
            self._core,
            self._offset,
            self.size_bytes,
            word._core,
            word.offset,
            value,
            inline_limit(),
        )

    def read(self, local: Any) -> Transfer:
        """Starts to fill `local` from the start of this slice.

        `local` is kept alive until the transfer is complete; its content is undefined before, and
        after a failure. It may be shorter than the slice: its length says how much is read.

        Args:
            local: as for `write`, and writable. A torch tensor is filled behind autograd's back.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError:
                as for `write`; also ValueError if `local` is read-only.
        """
        if type(local) is not ndarray:
            local = as_local(local)
        return self._read_one(local, self._core, self._offset, self.size_bytes, inline_limit())

    def word(self, offset: int) -> RemoteWord:
        """The 64-bit word at a byte offset of this slice.

        Raises:
            ValueError: outside the slice, or not a multiple of 8 from the region's start.
        """
        return RemoteWord(self.peer, self._core, word_offset(self._offset, self.size_bytes, offset))

    def handle(self) -> Handle:
        """The handle of the whole region, to pass on to other processes.

        Raises:
            ValueError: this is a slice.
        """
        core, peer = self._core, self.peer
        if self.size_bytes != core.size_bytes:
            raise ValueError(f"a handle names a whole region and this is a slice: {self!r}")
        return Handle(
            peer.address,
            core.incarnation,
            core.id,
            core.generation,
            core.size_bytes,
            self.access,
            core.name,
            peer.name,
        )

    def free(self, timeout_s: float | None = 10.0) -> None:
        """Gives memory that `Peer.allocate` got back to the peer, and waits until that is done.

        Raises:
            PermissionError: this side did not allocate the region.
            StaleHandleError: it was freed before.
            TimeoutError, ClosedError, PeerLostError: as everywhere.
        """
        self.peer._core.free(self._core, timeout_s)


class RemoteWord:
    """A 64-bit word in a peer's region: a signal that one process raises, or a shared counter.

    Use a word for one of the two. As a signal it has one writer and only grows, so that a repeated
    signal is harmless; as a counter it is changed by `fetch_add` only.
    """

    __slots__ = ("_core", "offset", "peer")

    def __init__(self, peer: Peer, core: _core.RemoteRegion, offset: int) -> None:
        self.peer = peer
        self._core = core
        self.offset = offset

    def __repr__(self) -> str:
        return f"<RemoteWord at byte {self.offset} of {self._core.name!r} at {self.peer.name!r}>"

    def set(self, value: int, after: Sequence[Transfer] = ()) -> Transfer:
        """Raises the word to `value`, once all transfers in `after` are complete.

        A lower value changes nothing. If one of `after` fails, the word is not touched and this
        transfer fails with the same error.

        Args:
            value: 0 to 2**64 - 1.
            after: transfers of the same peer.

        Raises:
            ValueError: the value does not fit, or a transfer belongs to another peer.
            ClosedError, PeerLostError, StaleHandleError, PermissionError: as for
                `RemoteRegion.write`.
        """
        return self.peer._core.signal(self._core, self.offset, word_value(value), after)

    def fetch_add(self, value: int = 1, timeout_s: float | None = None) -> int:
        """Adds to the word, modulo 2**64, in one atomic step, and returns the value before.

        `value` is -2**63 to 2**63 - 1.

        Executed by a CPU of the host that owns the memory, which must be alive. After an error it
        is unknown whether the addition took place; protocols that must count exactly once use
        signals.

        Raises:
            TimeoutError: the answer did not come in time; it may still be added.
            ValueError: the value does not fit.
            ClosedError, PeerLostError, StaleHandleError, PermissionError: as for
                `RemoteRegion.write`.
        """
        transfer = self.peer._core.fetch_add(self._core, self.offset, addend(value))
        transfer.wait(timeout_s)
        return transfer.value


def addend(value: Any) -> int:
    """Checks what is to be added to a word."""
    try:
        result = index(value)
    except TypeError as error:
        raise TypeError(f"an int is added to a word, not {type(value).__name__}") from error
    if not -(1 << 63) <= result < 1 << 63:
        raise ValueError(f"what is added to a word is -2**63 to 2**63 - 1, not {result}")
    return result


def byte_count(size_bytes: Any) -> int:
    """Checks the size of a new region."""
    try:
        result = index(size_bytes)
    except TypeError as error:
        raise TypeError(f"a region's size is a number of bytes, not {size_bytes!r}") from error
    if not 1 <= result <= _SIZE_MAX:
        raise ValueError(f"a region has 1 to 2**63 - 1 bytes, not {result}")
    return result


def byte_range(piece: Any, size_bytes: int) -> tuple[int, int]:
    """Checks a slice of bytes and returns (start, stop)."""
    if not isinstance(piece, slice):
        raise TypeError(f"regions are sliced by bytes, region[a:b], not indexed with {piece!r}")
    if piece.step is not None and piece.step != 1:
        raise ValueError(f"a slice of a region is one piece, without a step of {piece.step}")
    try:
        start = 0 if piece.start is None else index(piece.start)
        stop = size_bytes if piece.stop is None else index(piece.stop)
    except TypeError as error:
        raise TypeError(f"a slice of a region has integer bounds, not {piece!r}") from error
    if not 0 <= start <= stop <= size_bytes:
        raise ValueError(
            f"[{start}:{stop}] is outside of [0:{size_bytes}]; bounds count bytes from the start "
            "and are never cut off"
        )
    return start, stop


def word_offset(base: int, size_bytes: int, offset: int) -> int:
    """Checks a word's offset in a slice and returns its offset in the region."""
    offset = index(offset)
    if offset < 0 or offset + WORD_BYTES > size_bytes:
        raise ValueError(f"a word of 8 bytes at {offset} is outside of [0:{size_bytes}]")
    if (base + offset) % WORD_BYTES:
        raise ValueError(
            f"a word starts at a multiple of 8 bytes from the region's start, not at "
            f"{base + offset}"
        )
    return base + offset


def word_value(value: Any) -> int:
    """Checks a word's value."""
    try:
        result = index(value)
    except TypeError as error:
        raise TypeError(
            f"a word's value is an int, not {type(value).__name__} ({value!r})"
        ) from error
    if not 0 <= result <= _WORD_MAX:
        raise ValueError(f"a word holds 0 to 2**64 - 1, not {result}")
    return result


def check_signal(signal: Any, peer: Peer) -> Signal:
    """Checks a `signal=` argument and returns (word, value)."""
    try:
        word, value = signal
    except (TypeError, ValueError) as error:
        raise TypeError(f"signal is (RemoteWord, value), not {signal!r}") from error
    if type(word) is not RemoteWord:
        raise TypeError(
            f"signal is (RemoteWord, value), and its first part is {type(word).__name__}; "
            "get one by remote.word(offset)"
        )
    if word.peer._core is not peer._core:
        raise ValueError(
            f"the signal's word is at {word.peer.name!r} and the transfer goes to {peer.name!r}; "
            "they must be at the same peer"
        )
    return word, word_value(value)


def adoptable(tensor: Any) -> tuple[int, int]:
    """Checks what `adopt` may move and returns (bytes, bytes of one item)."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise TypeError(f"{describe(tensor)} holds Python objects, which cannot be adopted")
        return tensor.nbytes, max(tensor.itemsize, 1)
    if is_tensor(tensor):
        check_tensor(tensor)
        return tensor.nbytes, tensor.element_size()
    raise TypeError(f"adopt takes a numpy array or a torch tensor, not {describe(tensor)}")
