"""gRPC: puts the payload of an arriving message back before any user code sees it.

The same for requests and responses. Tickets of Tensors that come from outside are never believed:
those that an envelope has memory for get a new one, all others are taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorwire.memory.fresh import copied

from .attachment import RpcAttachment
from .encode import carry_in_pickles
from .envelope import BODY, MAGIC, Envelope, unseal
from .fields import may_have_tensors, tensors
from .inbox import Landed, RefusedError
from .rendezvous import Rendezvous
from .tensors import Holding, give_ticket, new_ticket

Deserializer = Callable[[bytes], Any] | None


class Reader:
    """Turns what travelled into the user's messages, for one kind of message.

    Args:
        deserializer: the user's, None for messages that are bytes.

    Attributes:
        plain: makes messages that came as themselves, as `inside`; the user's own where nothing is
            to be taken off them.
    """

    __slots__ = ("_deserializer", "_strips", "plain")

    def __init__(self, deserializer: Deserializer) -> None:
        self._deserializer = deserializer
        # FromString of a message class tells which it is. Of others it is not known beforehand.
        owner = getattr(deserializer, "__self__", None)
        self._strips = deserializer is not None and (
            not isinstance(owner, type) or may_have_tensors(owner)
        )
        self.plain: Deserializer = self.inside if self._strips else deserializer

    def inside(self, data: bytes) -> Any:
        """The message that came as itself.

        Raises:
            Exception: what the deserializer raises.
        """
        message = data if self._deserializer is None else self._deserializer(data)
        if self._strips:
            for each in tensors(message):
                each.ClearField("held")
        return message

    def read(
        self,
        data: bytes,
        find: Callable[[bytes], RpcAttachment | None],
        holdings: list[Holding] | None = None,
        *,
        needed: Callable[[], bool] | None = None,
    ) -> Any:
        """The message that came as itself or as an envelope.

        Args:
            data: what grpcio has received.
            find: the attachment of an id, if there is one that may send this.
            holdings: gets what keeps the memory of the message's Tensors.
            needed: asked while the sender lets this end wait for a message that is to be read;
                False ends that. None: there is no such message, as in calls by grpcio.

        Raises:
            RefusedError: what looks like an envelope is of an unknown attachment, or lies.
            Exception: what the deserializer raises.
        """
        if not data.startswith(MAGIC):
            return self.inside(data)
        try:
            envelope = unseal(data)
            attachment = find(envelope.attachment)
            if attachment is None:
                raise ValueError("an envelope of an attachment that is not known here")
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if not envelope.pieces:
            return self.inside(envelope.body)
        _check_length(envelope, attachment)
        attachment.look_at_recent()
        if envelope.awaited and not envelope.pushes_arrays:
            rendezvous, goes_on = _rendezvous_of(attachment, needed)
            return self.inside(rendezvous.read(envelope, goes_on))
        arrival = attachment.leases_here.arrive(envelope)

        def await_arrays() -> None:
            if envelope.awaited:
                rendezvous, goes_on = _rendezvous_of(attachment, needed)
                rendezvous.arrays(envelope, arrival, goes_on)

        holding = None
        try:
            try:
                body = envelope.body
                if BODY in arrival.pieces:
                    await_arrays()
                    body = copied(arrival.piece(BODY))
                message = body if self._deserializer is None else self._deserializer(body)
                holding = _redeem(message, arrival)
            except Exception:
                await_arrays()  # the sender may write there until then
                raise
            except BaseException:
                if envelope.awaited:
                    arrival.abandon()
                raise
            await_arrays()
            if holding is not None:
                attachment.remember(holding)
                if holdings is not None:
                    holdings.append(holding)
            return message
        finally:
            if holding is None:
                arrival.give_back()


def _check_length(envelope: Envelope, attachment: RpcAttachment) -> None:
    """Refuses a message that is longer than its sender was told to send beside."""
    most = attachment.taken_bytes
    size = len(envelope.body) + sum(piece[2] for piece in envelope.pieces)
    if 0 <= most < size:
        raise RefusedError(f"a message larger than max ({size} vs. {most})")


def _rendezvous_of(
    attachment: RpcAttachment, needed: Callable[[], bool] | None
) -> tuple[Rendezvous, Callable[[], bool]]:
    if attachment.rendezvous is None or needed is None:
        raise RefusedError("nothing was agreed on messages that are to be waited for")
    return attachment.rendezvous, needed


def _redeem(message: Any, arrival: Landed) -> Holding | None:
    """Gives the Tensors of a message new tickets for their memory; None if it has none."""
    if arrival.pieces.keys() == {BODY}:
        for each in tensors(message):
            each.ClearField("held")
        return None
    passed: list[Any] = []
    new: dict[int, int] = {}
    for each in tensors(message, passed):
        if not (sent := each.held.ticket):
            each.ClearField("held")
            continue
        if sent not in arrival.pieces:
            raise RefusedError("a Tensor names memory that did not come with its message")
        ticket = new_ticket()
        give_ticket(each, ticket)
        new[ticket] = sent
    each = None
    if not new:
        return None
    for owner in passed:
        if hasattr(owner, "DESCRIPTOR"):
            carry_in_pickles(type(owner))
    owner = None
    return Holding(arrival, new, passed)


def find_only(attachment: RpcAttachment | None, id: bytes) -> RpcAttachment | None:
    """Memory is of the attachment of the call, and of no other one that the client knows."""
    return attachment if attachment is not None and attachment.id == id else None
