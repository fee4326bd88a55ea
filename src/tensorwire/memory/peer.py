"""Another process, seen as a device: what its memory is called, and batches into it.

Single transfers are methods of RemoteRegion; here is what concerns the peer as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tensorwire import _core
from tensorwire._core import Transfer
from tensorwire.errors import StaleHandleError

from .aio import inline_limit
from .arguments import addend, byte_count, name_text
from .bandwidth import memory_gb_per_s, network_gb_per_s, rdma_gb_per_s
from .buffers import as_local, describe, size_bytes
from .handle import Handle
from .remote import RemoteRegion, RemoteWord, Signal, check_signal

if TYPE_CHECKING:
    from .node import Node


@dataclass(frozen=True, slots=True)
class Path:
    """How bytes get to a peer; nothing is chosen silently.

    Attributes:
        transport: "shm", "rdma" or "tcp".
        wire: what the bytes travel on, in words.
        copies: how often a CPU copies each payload byte from source to target, both hosts together.
        expected_gb_per_s: what one transfer should come near to: on shm the memcpy speed measured
            in this process, on tcp and rdma what the NIC promises (None for loopback and virtual
            ones).
        reason: why this transport was chosen, and what excluded the faster ones.
    """

    transport: str
    wire: str
    copies: int
    expected_gb_per_s: float | None
    reason: str


# transport -> (wire, copies)
_WIRES = {
    "shm": ("memory of this host that both processes have mapped", 1),
    "rdma": ("RDMA", 0),
    "tcp": ("TCP", 2),
}


class Peer:
    """A connection to another process, whose memory can be allocated, written, read and signalled.

    Made by `Node.connect` and `Node.accept`. Any thread may use it. When the process dies or the
    link breaks, `lost` becomes true and every transfer in flight fails with `PeerLostError`; the
    object stays lost, and connecting again gives a new one.
    """

    __slots__ = ("__weakref__", "_core", "_node")

    def __init__(self, node: Node, core: _core.Peer) -> None:
        self._node = node
        self._core = core

    @property
    def name(self) -> str:
        """The name of the other Node."""
        return self._core.name

    @property
    def address(self) -> str:
        """Where the other Node listens, "host:port"."""
        return self._core.address

    @property
    def incarnation(self) -> int:
        """Identifies the other process; a restarted one has another number."""
        return self._core.incarnation

    @property
    def pid(self) -> int:
        """Process number of the other side, on its host."""
        return self._core.pid

    @property
    def path(self) -> Path:
        """How transfers to this peer travel. The first look takes some milliseconds."""
        transport = self._core.transport
        wire, copies = _WIRES[transport]
        if transport == "tcp":
            wire = f"TCP to {self.address}"
            expected = network_gb_per_s(self.address)
        elif transport == "rdma":
            device = self._core.wire
            wire = f"RDMA by {device}"
            expected = rdma_gb_per_s(device)
        else:
            expected = memory_gb_per_s()
        return Path(transport, wire, copies, expected, self._core.reason)

    @property
    def lost(self) -> bool:
        """True once the peer or the link is gone, or this side closed the connection."""
        return self._core.lost

    @property
    def lost_reason(self) -> str:
        """Why it is lost, "" as long as it is not."""
        return self._core.lost_reason

    def __eq__(self, other: object) -> bool:
        return self._core is other._core if isinstance(other, Peer) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._core)

    def __repr__(self) -> str:
        state = f", lost: {self.lost_reason}" if self.lost else ""
        return f"<Peer {self.name!r} at {self.address} by {self._core.transport}{state}>"

    def region(self, name_or_handle: str | Handle, timeout_s: float | None = 10.0) -> RemoteRegion:
        """Gets access to a region that the peer has allocated.

        Args:
            name_or_handle: its name, or its `Handle`. With a name it must exist already.
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
            handle = name_or_handle
            if handle.incarnation != self.incarnation:
                raise StaleHandleError(
                    f"the handle of region {handle.name!r} is from incarnation "
                    f"{handle.incarnation:x} of node {handle.node!r}; peer {self.name!r} at "
                    f"{self.address} is incarnation {self.incarnation:x}: "
                    "the process has restarted, ask it for a new handle"
                )
            core = self._core.attach(handle.id, handle.generation, timeout_s)
        else:
            raise TypeError(
                f"a region is found by name (str) or Handle, not {describe(name_or_handle)}"
            )
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

    def write(self, local: Any, remote: Any, *, signal: Signal | None = None) -> Transfer:
        """Starts to write one local object, or a batch of them as one transfer.

        Args:
            local: an object as in `RemoteRegion.write`, or a sequence of them.
            remote: a RemoteRegion (slice), or a sequence of the same length. Pieces of one batch
                must not overlap at the target.
            signal: as in `RemoteRegion.write`: raised after every piece is in place.

        Raises:
            TypeError, ValueError: as for `RemoteRegion.write`; also if the lengths differ or a
                remote belongs to another peer. Nothing was written then.
            PermissionError, ClosedError, PeerLostError, StaleHandleError: as for
                `RemoteRegion.write`.
        """
        if isinstance(remote, RemoteRegion):
            self._check_mine(remote)
            return remote.write(local, signal=signal)
        locals_, remotes, offsets = self._pieces(local, remote)
        if signal is None:
            return self._core.write(locals_, remotes, offsets, None, 0, 0, inline_limit())
        word, value = check_signal(signal, self)
        return self._core.write(
            locals_, remotes, offsets, word._core, word.offset, value, inline_limit()
        )

    def read(self, local: Any, remote: Any) -> Transfer:
        """Starts to fill one local object, or a batch of them as one transfer.

        Args:
            local: an object as in `RemoteRegion.read`, or a sequence of them.
            remote: a RemoteRegion (slice), or a sequence of the same length.

        Raises:
            TypeError, ValueError, PermissionError, ClosedError, PeerLostError, StaleHandleError:
                as for `write`.
        """
        if isinstance(remote, RemoteRegion):
            self._check_mine(remote)
            return remote.read(local)
        locals_, remotes, offsets = self._pieces(local, remote)
        return self._core.read(locals_, remotes, offsets, inline_limit())

    def signal(self, word: RemoteWord, value: int, after: Sequence[Transfer] = ()) -> Transfer:
        """Raises a word of this peer; see `RemoteWord.set`."""
        return check_signal((word, value), self)[0].set(value, after)

    def fetch_add(self, word: RemoteWord, value: int = 1) -> Transfer:
        """Starts an atomic addition; `Transfer.value` is the old value once it is complete.

        See `RemoteWord.fetch_add`, which also waits.
        """
        check_signal((word, 0), self)
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
        return Prepared(self, True, self._core.prepare(True, *self._pieces(local, remote)))

    def prepare_read(self, local: Any, remote: Any) -> Prepared:
        """As `prepare_write`, for reading."""
        return Prepared(self, False, self._core.prepare(False, *self._pieces(local, remote)))

    def close(self, reason: str = "") -> None:
        """Ends the connection; calling it again does nothing.

        Transfers in flight end with `ClosedError` here, and the other side sees this peer as lost.

        Args:
            reason: what the other side's `lost_reason` and errors tell; "" tells that the user
                closed it. At most 1024 bytes as UTF-8.

        Raises:
            ValueError: the reason is too long or has control characters.
        """
        self._node._core.close_peer(self._core, reason)

    def _check_mine(self, remote: RemoteRegion) -> None:
        if remote.peer._core is not self._core:
            raise ValueError(
                f"{remote!r} belongs to peer {remote.peer.name!r}, not to {self.name!r}"
            )

    def _pieces(
        self, local: Any, remote: Any
    ) -> tuple[list[object], list[_core.RemoteRegion], list[int]]:
        if type(local) is not list or type(remote) is not list:
            _check_sequence("local", local)
            _check_sequence("remote", remote)
        if len(local) != len(remote):
            raise ValueError(
                f"a batch has as many locals as remotes, not {len(local)} and {len(remote)}"
            )
        locals_, remotes, offsets = [], [], []
        for position, (source, target) in enumerate(zip(local, remote, strict=True)):
            if type(target) is not RemoteRegion:
                raise TypeError(f"remote {position} is {describe(target)}, not a RemoteRegion")
            if target.peer is not self:
                self._check_mine(target)
            if type(source) is not np.ndarray:
                source = as_local(source)
            # The core knows the region's end, not the slice's.
            if size_bytes(source) > target.size_bytes:
                raise ValueError(
                    f"local {position} has {size_bytes(source)} bytes, more than {target!r}"
                )
            locals_.append(source)
            remotes.append(target._core)
            offsets.append(target._offset)
        return locals_, remotes, offsets


def _check_sequence(side: str, pieces: Any) -> None:
    if not isinstance(pieces, Sequence) or isinstance(pieces, str | bytes | bytearray):
        raise TypeError(
            f"a batch is a list of local objects and a list of RemoteRegions; "
            f"{side} is {describe(pieces)}"
        )


class Prepared:
    """A batch that was checked and resolved once and can be started any number of times.

    It keeps its local objects alive and reads (or fills) them at each start. Neighbouring pieces
    are merged. Any thread may start it; starts do not wait for each other.

    Attributes:
        peer: where the batch goes.
    """

    __slots__ = ("__weakref__", "_core", "_is_write", "peer")

    def __init__(self, peer: Peer, is_write: bool, core: _core.Prepared) -> None:
        self.peer = peer
        self._is_write = is_write
        self._core = core

    def __len__(self) -> int:
        """Number of pieces."""
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

    def start(self, indices: ArrayLike | None = None, *, signal: Signal | None = None) -> Transfer:
        """Starts the batch, or the pieces that `indices` names.

        Args:
            indices: whole numbers from 0 to len - 1, in any order, repeats allowed; None starts all
                pieces. An int64 array is used without a copy.
            signal: for a write, as in `RemoteRegion.write`.

        Raises:
            ValueError: an index out of range, or a signal with a read.
            TypeError: indices are no whole numbers.
            ClosedError, PeerLostError, StaleHandleError: as for `RemoteRegion.write`.
        """
        if indices is not None:
            indices = _index_vector(indices)
        if signal is None:
            return self._core.start(indices, None, 0, 0, inline_limit())
        if not self._is_write:
            raise ValueError("a read cannot signal; when it is complete, raise the word yourself")
        word, value = check_signal(signal, self.peer)
        return self._core.start(indices, word._core, word.offset, value, inline_limit())


def _index_vector(indices: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    vector = np.asarray(indices)
    if vector.ndim != 1:
        raise ValueError(f"indices have one dimension, not shape {vector.shape}")
    if vector.size and vector.dtype.kind not in "iu":
        raise TypeError(f"indices are whole numbers, not {vector.dtype}")
    return np.ascontiguousarray(vector, np.int64)
