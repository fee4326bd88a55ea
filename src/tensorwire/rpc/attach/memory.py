"""Makes the memory of one end of an attachment before the other end comes, and joins the two."""

from __future__ import annotations

from tensorwire.errors import UnavailableError
from tensorwire.memory import Node, Peer

from ..payload.attachment import RpcAttachment, make_board
from ..runtime.ring import RING, Rings, make_ring
from .terms import Terms


class OwnMemory:
    """The memory of one end.

    Args:
        node: of this end, whose name is the id of the attachment.
        runs: calls may go by the runtime.

    Attributes:
        node: as given.
    """

    def __init__(self, node: Node, *, runs: bool) -> None:
        self.node = node
        self._board = make_board(node)
        self._ring = make_ring(node) if runs else None

    def join(
        self, peer: Peer, terms: Terms, agreed: dict[str, int], *, is_client: bool
    ) -> RpcAttachment:
        """Returns this end of an attachment.

        Args:
            peer: the other end.
            terms: of this end.
            agreed: see `terms.agreed`.
            is_client: it is the client's.

        Raises:
            TensorwireError: the other end is gone.
        """
        self.node.stop_listening()  # no other peer comes, and two descriptors are free
        id = bytes.fromhex(self.node.name)
        return RpcAttachment(
            id, self.node, self._board, peer, terms.limits, is_client=is_client, **agreed
        )

    def rings(self, attachment: RpcAttachment, timeout_s: float) -> Rings | None:
        """Returns the memory of a line, and lets payload be pushed; None: calls go by grpcio.

        Args:
            attachment: of `join`.
            timeout_s: how long the other end may take to make its part.

        Raises:
            TensorwireError: the other end is gone, or has not made it.
        """
        if self._ring is None:
            return None
        other = attachment.peer.wait_region(RING, timeout_s=timeout_s)
        if other.size_bytes != self._ring.size_bytes:
            raise UnavailableError(
                f"the other end's region {RING!r} has {other.size_bytes} bytes, not "
                f"{self._ring.size_bytes}: use the same version of tensorwire at both ends"
            )
        attachment.add_pushing()
        return Rings(self.node, self._ring, other, attachment.peer)
