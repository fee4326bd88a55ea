"""Memory of a peer as objects: RemoteRegion and RemoteWord.

They are thin: a slice is three numbers beside the core's object, and every transfer is one call
into the core. They know no connections; each is handed its Peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy import ndarray
from numpy.typing import DTypeLike, NDArray

from tensorwire import _core
from tensorwire._core import Transfer
from tensorwire.errors import UnavailableError

from .aio import inline_limit
from .arguments import addend, byte_range, word_offset, word_value
from .buffers import array_over, as_local
from .handle import Handle, access_name
from .private import PrivateMapping

if TYPE_CHECKING:
    from .peer import Peer

Signal = tuple["RemoteWord", int]


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

    @property
    def mapped(self) -> bool:
        """Whether this process sees the memory itself: on shm it does, on a network it cannot."""
        return self._core.mapped

    def memoryview(self) -> memoryview:
        """The bytes of this slice where they are, at the peer; nothing is copied.

        Only on one host (`mapped`). Both processes then use the same memory: nothing orders their
        loads and stores but signals. The view keeps the memory alive, also after the owner freed
        the region, ended or was lost, when nobody else looks at it any more. It is read-only where
        the owner does not let peers write.

        Raises:
            UnavailableError: the path to the peer maps nothing; use `read` and `write`.
            ClosedError: this side's Node was closed; or this process was forked from the one that
                has the grant.
        """
        if not self.mapped:
            raise UnavailableError(
                f"{self!r} is on another host or was reached by {self.peer.path.transport}: its "
                "memory cannot be mapped here; use read() and write()"
            )
        view: Any = self._core.view()  # before Python 3.12 stubs cannot say that it is a buffer
        return memoryview(view)[self._offset : self._offset + self.size_bytes]

    def array(
        self, dtype: DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> NDArray[Any]:
        """A numpy array over `memoryview()`, with its conditions.

        Args:
            dtype: as for `Region.array`.
            shape: as for `Region.array`.

        Raises:
            TypeError, ValueError: as for `Region.array`.
            UnavailableError, ClosedError: as for `memoryview`.
        """
        return array_over(self, dtype, shape)

    def private(self, timeout_s: float | None = 10.0) -> PrivateMapping:
        """The peer's memory copy-on-write: what is written there stays in this process.

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
