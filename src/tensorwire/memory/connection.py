"""Describes a connection to another process and its end: a Peer without its memory."""

from __future__ import annotations

from tensorwire import _core

from .buffers import describe
from .open_node import OpenNode
from .path import Path, path_to


class Connection:
    """The base of `Peer`, which documents it."""

    __slots__ = ("_core", "_node")

    def __init__(self, node: OpenNode, core: _core.Peer) -> None:
        self._node = node
        self._core = core

    @property
    def name(self) -> str:
        """The name of the other Node."""
        return self._core.name

    @property
    def address(self) -> str:
        """The address where the other Node listens, "host:port"."""
        return self._core.address

    @property
    def incarnation(self) -> int:
        """Identifies the other Node; a restarted process has another, unless it goes on as it."""
        return self._core.incarnation

    @property
    def pid(self) -> int:
        """Process number of the other side, on its host; a successor has another one."""
        return self._core.pid

    @property
    def path(self) -> Path:
        """How transfers to this peer travel. The first look takes some milliseconds."""
        return path_to(self._core)

    @property
    def offered(self) -> tuple[str, ...]:
        """The transports that the other Node offers, whichever of them is used."""
        return tuple(self._core.offered)

    @property
    def lost(self) -> bool:
        """True once the peer or the link is gone, or this side closed the connection."""
        return self._core.lost

    @property
    def lost_reason(self) -> str:
        """Why it is lost, "" as long as it is not."""
        return self._core.lost_reason

    def __eq__(self, other: object) -> bool:
        return self._core is other._core if isinstance(other, Connection) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._core)

    def __repr__(self) -> str:
        state = f", lost: {self.lost_reason}" if self.lost else ""
        return f"<Peer {self.name!r} at {self.address} by {self._core.transport}{state}>"

    def close(self, reason: str = "") -> None:
        """Ends the connection; calling it again does nothing.

        Transfers in flight end with `ClosedError` here, and the other side sees this peer as lost.

        Args:
            reason: what the other side's `lost_reason` and errors tell; "" tells that the user
                closed it. At most 1024 bytes as UTF-8.

        Raises:
            ValueError: the reason is too long or has control characters.
        """
        self._node.core.close_peer(self._core, reason)

    def succeed(self, successor: Connection) -> None:
        """Makes this object, whose connection was lost, use the connection of `successor`.

        For a process that another one has succeeded as the same Node (`Node(incarnation=)`,
        `Node.restore`): connect to it, and hand over what `connect` returned. From then on all that
        is asked of this object, and of RemoteRegions, RemoteWords, RemoteMailboxes and Prepareds
        that came from it, goes to the successor. Their memory stays mapped where it was, and looked
        up from then on it is mapped there too. Regions that were not restored are stale.

        Transfers and waits that were under way when the connection was lost have failed, and what
        `allocate` got belonged to the old connection; neither is taken up again. Both objects can
        be used afterwards, and mixed. It may be called again after each further loss, on this
        object alone.

        Any thread may call it while others use this object: each of their calls goes to the old
        connection, which fails it, or to the new one.

        Args:
            successor: connected to a Node of the same name and incarnation, from the same Node
                here. If it was lost meanwhile, so is this object.

        Raises:
            TypeError: not a Peer.
            ValueError: this peer is not lost, `successor` is of another Node there or here, or is
                this very connection. Nothing has changed then.
            UnavailableError: one of the two is not reached over shared memory.
            ClosedError: the Node was closed; or this is a forked child.
        """
        if not isinstance(successor, Connection):
            raise TypeError(f"a Peer is succeeded by a Peer, not by {describe(successor)}")
        self._core.succeed(successor._core)
