"""Defines Peer, another process seen as a device: names of its memory, slices, transfers.

The objects are thin: a slice is three numbers beside the core's object, and every transfer is one
call into the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy import ndarray
from numpy.typing import ArrayLike, NDArray

from tensorwire import _core
from tensorwire._core import Transfer
from tensorwire.errors import UnavailableError

from .arguments import (
    addend,
    byte_count,
    byte_range,
    check_word_memory,
    name_text,
    word_offset,
    word_value,
)
from .buffers import as_local, check_batch, describe, index_vector, placed, size_bytes
from .connection import Connection
from .gpu import OnStream, current_stream, on_stream
from .handle import Handle, access_name
from .mapped_view import MappedView
from .private import PrivateMapping

Signal = tuple["RemoteWord", int]


class Peer(Connection):
    """A connection to another process, whose memory can be allocated, written, read and signalled.

    Made by `Node.connect` and `Node.accept`. Any thread may use it. When the process dies or the
    link breaks, `lost` becomes true and every transfer in flight fails with `PeerLostError`; the
    object stays lost, and connecting again gives a new one. Only where another process goes on as
    the same Node, with the same memory, can that new one take this one's place: see `succeed`.
    """

    __slots__ = ("__weakref__",)

    def region(self, name_or_handle: str | Handle, timeout_s: float | None = 10.0) -> RemoteRegion:
        """Gets access to a region that the peer has allocated.

        Args:
            name_or_handle: its name, if it exists already (see `wait_region`), or its `Handle`.
            timeout_s: for the peer's answer; None waits for ever.

        Raises:
            LookupError: the peer has no region of that name.
            StaleHandleError: the handle is of an earlier incarnation of the peer, or of a region
                that was freed.
            TypeError: neither a str nor a Handle.
            TimeoutError, ClosedError, PeerLostError: as everywhere.
        """
        if isinstance(name_or_handle, str):
            core = self._core.lookup(name_text(name_or_handle, "region"), timeout_s)
        elif isinstance(name_or_handle, Handle):
            name_or_handle.check_incarnation(self.incarnation, self.name, self.address)
            core = self._core.attach(name_or_handle.id, name_or_handle.generation, timeout_s)
        else:
            raise TypeError(
                f"a region is found by name (str) or Handle, not {describe(name_or_handle)}"
            )
        return RemoteRegion(self, core, 0, core.size_bytes)

    def wait_region(self, name: str, timeout_s: float | None = 10.0) -> RemoteRegion:
        """Gets access to a region as soon as the peer has allocated one of that name.

        The peer answers when it is there; nothing is asked again and again.

        Raises:
            TimeoutError: the peer has not allocated it within `timeout_s`; None waits for ever.
            BusyError: 1024 other names are awaited, or were until a call gave up.
            TypeError, ValueError, ClosedError, PeerLostError: as everywhere.
        """
        core = self._core.lookup(name_text(name, "region"), timeout_s, True)
        return RemoteRegion(self, core, 0, core.size_bytes)

    def allocate(
        self, size_bytes: int, name: str | None = None, timeout_s: float | None = 10.0
    ) -> RemoteRegion:
        """Allocates zeroed memory in the other process, for this side to use.

        It counts against the quota that the other Node set, and belongs to this connection: the
        other Node frees it when the connection ends, if `RemoteRegion.free` did not. With a name,
        the other process finds it by `Node.region(name)`.

        Raises:
            BusyError: the quota is reached.
            ValueError: the size is not positive, or the name is taken or too long.
            MemoryError: the other host has no memory left.
            TimeoutError, ClosedError, PeerLostError: as everywhere.
        """
        core = self._core.allocate(
            byte_count(size_bytes), name_text(name or "", "region"), timeout_s
        )
        return RemoteRegion(self, core, 0, core.size_bytes)

    def write(
        self, local: Any, remote: Any, *, signal: Signal | None = None, stream: Any = None
    ) -> Transfer:
        """Starts to write one local object, or a batch of them as one transfer.

        Args:
            local: an object as in `RemoteRegion.write`, or a sequence of them.
            remote: a RemoteRegion (slice), or a sequence of the same length. Pieces of one batch
                must not overlap at the target.
            signal: as in `RemoteRegion.write`: raised after every piece is in place.
            stream: as in `RemoteRegion.write`, one for the whole batch.

        Raises:
            TypeError, ValueError: as for `RemoteRegion.write`; also if the lengths differ, a
                remote belongs to another peer, or locals come from several streams. Nothing was
                written then.
            PermissionError, ClosedError, PeerLostError, StaleHandleError: as for
                `RemoteRegion.write`.
        """
        if isinstance(remote, RemoteRegion):
            self._check_mine(remote)
            return remote.write(local, signal=signal, stream=stream)
        pieces, order = self._pieces(local, remote, stream)
        return self._core.write(*pieces, _checked_signal(signal, self), order)

    def read(self, local: Any, remote: Any, *, stream: Any = None) -> Transfer:
        """Starts to fill one local object, or a batch of them as one transfer.

        Args:
            local: an object as in `RemoteRegion.read`, or a sequence of them.
            remote: a RemoteRegion (slice), or a sequence of the same length.
            stream: as in `write`.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError:
                as for `write`.
        """
        if isinstance(remote, RemoteRegion):
            self._check_mine(remote)
            return remote.read(local, stream=stream)
        pieces, order = self._pieces(local, remote, stream)
        return self._core.read(*pieces, order)

    def signal(self, word: RemoteWord, value: int, after: Sequence[Transfer] = ()) -> Transfer:
        """Raises a word of this peer; see `RemoteWord.set`."""
        _checked_signal((word, value), self)
        return word.set(value, after)

    def fetch_add(self, word: RemoteWord, value: int = 1) -> Transfer:
        """Starts an atomic addition; `Transfer.value` is the old value once it is complete.

        See `RemoteWord.fetch_add`, which also waits.
        """
        _checked_signal((word, 0), self)
        return self._core.fetch_add(word._core, word.offset, addend(value))

    def prepare_write(self, local: Any, remote: Any) -> Prepared:
        """Checks and resolves a batch once, to be written many times; see `Prepared`.

        Args:
            local: a sequence of objects as in `RemoteRegion.write`. They stay alive, and must stay
                where they are, as long as the Prepared lives.
            remote: a sequence of RemoteRegions of the same length.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError:
                as for `write`.
        """
        return self._prepare(True, local, remote)

    def prepare_read(self, local: Any, remote: Any) -> Prepared:
        """Prepares a batch of reads; otherwise like `prepare_write`."""
        return self._prepare(False, local, remote)

    def _prepare(self, is_write: bool, local: Any, remote: Any) -> Prepared:
        pieces, order = self._pieces(local, remote, None)
        gpu = -1 if order is None else order[1]
        return Prepared(self, is_write, self._core.prepare(is_write, *pieces), gpu)

    def _check_mine(self, remote: RemoteRegion) -> None:
        owner = remote.peer
        if owner._core is not self._core and not owner._core.follows(self._core):
            raise ValueError(f"{remote!r} belongs to peer {owner.name!r}, not to {self.name!r}")

    def _pieces(
        self, local: Any, remote: Any, stream: Any
    ) -> tuple[tuple[list[object], list[_core.RemoteRegion], list[int]], OnStream | None]:
        if type(local) is not list or type(remote) is not list or len(local) != len(remote):
            check_batch(local, remote)
        locals_, remotes, offsets = [], [], []
        order: OnStream | None = None
        gpu = -1
        for position, (source, target) in enumerate(zip(local, remote, strict=True)):
            if type(target) is not RemoteRegion:
                raise TypeError(f"remote {position} is {describe(target)}, not a RemoteRegion")
            if target.peer is not self:
                self._check_mine(target)
            if type(source) is not ndarray:
                source, behind = as_local(source)
                gpu = max(gpu, getattr(source, "gpu", -1))
                if behind is not None and stream is None:
                    if order is not None and order != behind:
                        raise ValueError(
                            f"local {position} comes from another stream than those before it: "
                            "name one that is after all of them by stream="
                        )
                    order = behind
            # The core knows the region's end, not the slice's.
            if (size := size_bytes(source)) > target.size_bytes:
                raise ValueError(f"local {position} has {size} bytes, more than {target!r}")
            locals_.append(source)
            remotes.append(target._core)
            offsets.append(target._offset)
        if stream is not None:
            order = on_stream(stream, max([gpu, *(each.gpu for each in remotes)]))
        return (locals_, remotes, offsets), order


class RemoteRegion(MappedView):
    """Memory of a peer, or a slice of it: where `write` and `read` go.

    Made by `Peer.allocate`, `Peer.region` and `RemoteRegion[a:b]`. Methods may be called by any
    thread. There is no order between transfers, unless one is waited for before the next starts, or
    a signal names it (`RemoteWord.set`).

    Attributes:
        peer: whose memory it is.
        size_bytes: length of this slice.
    """

    __slots__ = ("__weakref__", "peer")

    def __init__(self, peer: Peer, core: _core.RemoteRegion, offset: int, size_bytes: int) -> None:
        MappedView.__init__(self, core, offset, size_bytes)
        self.peer = peer

    @property
    def name(self) -> str:
        """The region's name at its owner, "" if it has none."""
        return self._core.name

    @property
    def access(self) -> str:
        """The rights of this side: "rw", "r", "w" or "none"."""
        return access_name(self._core.readable, self._core.writable)

    def __repr__(self) -> str:
        end = self._offset + self.size_bytes
        return (
            f"<RemoteRegion {self.name!r} [{self._offset}:{end}] at {self.peer.name!r} "
            f"access {self.access}>"
        )

    def __getitem__(self, piece: slice) -> RemoteRegion:
        """Returns the bytes [a:b] of this slice.

        Raises:
            TypeError: not a slice of integers.
            ValueError: a step, or not 0 <= a <= b <= size_bytes. Nothing is cut off silently.
        """
        start, stop = byte_range(piece, self.size_bytes)
        return RemoteRegion(self.peer, self._core, self._offset + start, stop - start)

    def write(self, local: Any, *, signal: Signal | None = None, stream: Any = None) -> Transfer:
        """Starts to write `local` to the start of this slice.

        The source is kept alive until the transfer is complete and must not change before. It may
        be shorter than the slice.

        Args:
            local: numpy array, bytes-like object, torch tensor on the CPU or a GPU (also one that
                requires grad), `Region`, or object with DLPack or `__cuda_array_interface__`;
                contiguous, without Python objects.
            signal: (word of the same peer, value). The word is raised to the value after every byte
                of this call is in place: a reader that sees it sees them.
            stream: the transfer starts after all present work of this stream of a GPU, a
                torch.cuda.Stream, an object with `__cuda_stream__` or a handle. None: for memory
                of a GPU the stream that its values come from (torch's current one, or what the
                object tells), else nothing is waited for. What the stream does later may change
                the source when the transfer is complete: see `Transfer.block_stream`.

        Returns:
            The Transfer. It is complete when the bytes (and the signal) are in the peer's memory,
            which tells nothing about whether the peer is awake or has looked.

        Raises:
            TypeError: `local` has no memory, or the signal is no (RemoteWord, int).
            ValueError: `local` is larger than this slice, not contiguous, or on a device that is
                neither the CPU nor a GPU of CUDA; the stream is being captured into a graph.
            UnavailableError: a GPU has a part in it, and its driver cannot be used, or the
                transport moves none of its memory (rdma).
            PermissionError: the owner does not let peers write here.
            ClosedError: the Peer or Node was closed.
            PeerLostError: the other process or the link is gone.
            StaleHandleError: the region was freed.

            The last two, like every failure after the start, may instead come from the Transfer.
        """
        core = self.peer._core
        if type(local) is ndarray and signal is None and stream is None:  # the least work
            return core.write_one(local, self._core, self._offset, self.size_bytes)
        local, order = placed(local, stream, self._core.gpu)
        raised = _checked_signal(signal, self.peer)
        return core.write_one(local, self._core, self._offset, self.size_bytes, raised, order)

    def write_at(
        self,
        local: Sequence[NDArray[Any]],
        offsets: Sequence[int],
        *,
        signal: Signal | None = None,
    ) -> Transfer:
        """Starts to write numpy arrays to places in this slice, as one transfer.

        Does what `Peer.write` does with a slice for each array, and makes no slices.

        Args:
            local: the arrays, C-contiguous and without Python objects. Each is kept alive until the
                transfer is complete and must not change before.
            offsets: where each begins, in bytes from the start of this slice. Arrays must not
             overlap there.
            signal: as in `write`: raised after all of them are in place.

        Raises:
            TypeError: not all are numpy arrays, or the signal is no (RemoteWord, int).
            ValueError: not as many offsets as arrays, or an array does not fit at its offset.
                Nothing was written then.
            PermissionError, ClosedError, PeerLostError, StaleHandleError: as for `write`.
        """
        if len(local) != len(offsets):
            raise ValueError(
                f"write_at takes one offset for each array, not {len(offsets)} offsets for "
                f"{len(local)} arrays"
            )
        first, size_bytes, places = self._offset, self.size_bytes, []
        for array, offset in zip(local, offsets, strict=True):
            if type(array) is not ndarray:
                raise TypeError(f"write_at takes numpy arrays, not {describe(array)}")
            if not 0 <= offset <= size_bytes - array.nbytes:
                raise ValueError(
                    f"{array.nbytes} bytes do not fit at offset {offset} of {self!r}: choose a "
                    "lower offset or a larger region"
                )
            places.append(first + offset)
        raised = _checked_signal(signal, self.peer)
        return self.peer._core.write(list(local), [self._core] * len(places), places, raised)

    def read(self, local: Any, *, stream: Any = None) -> Transfer:
        """Starts to fill `local` from the start of this slice.

        `local` is kept alive until the transfer is complete; its content is undefined before, and
        after a failure. It may be shorter than the slice: its length says how much is read.

        Args:
            local: as for `write`, and writable. Autograd does not see that a tensor is filled.
            stream: as for `write`: nothing is read or filled before. What the stream does later
                sees the bytes when the transfer is complete, or by `Transfer.block_stream`.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError:
                as for `write`; also ValueError if `local` is read-only.
        """
        core = self.peer._core
        if type(local) is ndarray and stream is None:
            return core.read_one(local, self._core, self._offset, self.size_bytes)
        local, order = placed(local, stream, self._core.gpu)
        return core.read_one(local, self._core, self._offset, self.size_bytes, order)

    def _transport(self) -> str:
        return self.peer.path.transport

    def private(self, timeout_s: float | None = 10.0) -> PrivateMapping:
        """Returns the peer's memory copy-on-write: writes to it stay in this process.

        Only on one host (`mapped`). The peer is asked for the memory again, within `timeout_s`.

        Raises:
            UnavailableError: the path to the peer maps nothing.
            ValueError: this is a slice.
            StaleHandleError: the region was freed.
            TimeoutError, ClosedError, PeerLostError: as everywhere.
        """
        core = self._core
        if self.size_bytes != core.size_bytes:
            raise ValueError(f"private() is for a whole region and this is a slice: {self!r}")
        again = self.peer._core.attach(core.id, core.generation, timeout_s, True)
        if again.copied is None:
            raise UnavailableError(
                f"{self!r} is on another host or was reached by {self.peer.path.transport}: its "
                "memory cannot be mapped here"
            )
        return PrivateMapping(again.copied)

    def word(self, offset: int) -> RemoteWord:
        """Returns the 64-bit word at a byte offset of this slice.

        Raises:
            ValueError: outside the slice, not a multiple of 8 from the region's start, or in memory
                of a GPU, where no word can be.
        """
        check_word_memory(self, self._core.on_gpu)
        return RemoteWord(self.peer, self._core, word_offset(self._offset, self.size_bytes, offset))

    def handle(self) -> Handle:
        """Returns the handle of the whole region, to pass on to other processes.

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
            after: transfers of the same Node, to any of its peers.

        Raises:
            ValueError: the value does not fit, or a transfer belongs to another Node.
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


class Prepared:
    """A batch that was checked and resolved once and can be started any number of times.

    It keeps its local objects alive and reads (or fills) them at each start. Neighbouring pieces
    are merged. Any thread may start it; starts do not wait for each other.

    Attributes:
        peer: where the batch goes.
    """

    __slots__ = ("__weakref__", "_core", "_gpu", "_is_write", "peer")

    def __init__(self, peer: Peer, is_write: bool, core: _core.Prepared, gpu: int) -> None:
        self.peer = peer
        self._gpu = gpu  # whose values torch may still be computing, -1 for none
        self._is_write = is_write
        self._core = core

    def __len__(self) -> int:
        """Returns the number of pieces."""
        return self._core.size

    @property
    def size_bytes(self) -> int:
        """Bytes that one start of the whole batch moves."""
        return self._core.bytes

    @property
    def runs(self) -> int:
        """Number of pieces after neighbours were merged."""
        return self._core.runs

    def __repr__(self) -> str:
        return (
            f"<Prepared {len(self)} pieces in {self.runs} runs, {self.size_bytes} bytes, "
            f"to {self.peer.name!r}>"
        )

    def start(
        self,
        indices: ArrayLike | None = None,
        *,
        signal: Signal | None = None,
        stream: Any = None,
    ) -> Transfer:
        """Starts the batch, or the pieces that `indices` names.

        Args:
            indices: whole numbers from 0 to len - 1, in any order, repeats allowed; None starts all
                pieces. An int64 array is used without a copy.
            signal: for a write, as in `RemoteRegion.write`.
            stream: as in `RemoteRegion.write`. None: torch's current one, if a local was a tensor
                on a GPU.

        Raises:
            ValueError: an index out of range, or a signal with a read.
            TypeError: indices are no whole numbers.
            ClosedError, PeerLostError, StaleHandleError: as for `RemoteRegion.write`.
        """
        if indices is not None:
            indices = index_vector(indices)
        order = None
        if stream is not None:
            order = on_stream(stream, self._gpu)
        elif self._gpu >= 0:
            order = current_stream(self._gpu)
        if signal is not None and not self._is_write:
            raise ValueError("a read cannot signal; when it is complete, raise the word yourself")
        return self._core.start(indices, _checked_signal(signal, self.peer), order)


def _checked_signal(signal: Any, peer: Peer) -> tuple[_core.RemoteRegion, int, int] | None:
    """Checks a `signal=` argument; returns the word's region and offset, and the value."""
    if signal is None:
        return None
    try:
        word, value = signal
    except (TypeError, ValueError) as error:
        raise TypeError(f"signal is (RemoteWord, value), not {signal!r}") from error
    if type(word) is not RemoteWord:
        raise TypeError(
            f"signal is (RemoteWord, value), and its first part is {type(word).__name__}; "
            "get one by remote.word(offset)"
        )
    if word.peer._core is not peer._core and not word.peer._core.follows(peer._core):
        raise ValueError(
            f"the signal's word is at {word.peer.name!r} and the transfer goes to {peer.name!r}; "
            "they must be at the same peer"
        )
    return word._core, word.offset, word_value(value)
