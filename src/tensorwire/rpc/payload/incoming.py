"""gRPC: puts the payload of an arriving message back before any user code sees it.

The same for requests and responses. Tickets of Tensors that come from outside are never believed:
a Tensor that an envelope has memory for gets a new one; from all others it is taken off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorwire.memory.fresh import copied

from ..tensor_pb2 import Tensor
from .attachment import ATTACHMENTS, RpcAttachment
from .encode import carry_in_pickles
from .envelope import BODY, MAGIC, Envelope, is_pushed, unseal
from .fields import may_have_tensors, tensors
from .inbox import Landed, RefusedError
from .push import Pushing
from .tensors import Holding, give_ticket, new_ticket

Deserializer = Callable[[bytes], Any] | None


class Reader:
    """Turns the bytes that travelled into the user's messages, for one kind of message.

    Args:
        deserializer: the user's, None for messages that are bytes.
        streams: a call has several of them, so their sender is told which were taken.

    Attributes:
        plain: makes messages that came as themselves, as `inside`; the user's own where no ticket
            has to be taken off.
    """

    __slots__ = ("_deserializer", "_streams", "_strips", "plain")

    def __init__(self, deserializer: Deserializer, *, streams: bool = False) -> None:
        self._deserializer = deserializer
        self._streams = streams
        # FromString of a message class tells which it is. Of others it is not known beforehand.
        owner = getattr(deserializer, "__self__", None)
        self._strips = deserializer is not None and (
            not isinstance(owner, type) or may_have_tensors(owner)
        )
        self.plain: Deserializer = self.inside if self._strips else deserializer

    def inside(self, data: bytes) -> Any:
        """Returns the message that came as itself.

        Raises:
            Exception: the error of the deserializer.
        """
        message: Any = data if self._deserializer is None else self._deserializer(data)
        if type(message) is Tensor:
            message.ClearField("held")
        elif self._strips:
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
        """Returns the message that came as itself or as an envelope.

        Args:
            data: the bytes that have arrived.
            find: returns the attachment of an id, if there is one that may send this.
            holdings: gets the `Holding` of the message's Tensors, if they have memory.
            needed: asked while payload is waited for; False ends the wait. None: all payload is
                there, as in calls by grpcio.

        Raises:
            RefusedError: bytes that look like an envelope are of an unknown attachment, or lie.
            Exception: the error of the deserializer.
        """
        if not data.startswith(MAGIC):
            return self.inside(data)
        envelope, attachment = _opened(data, find)
        if not envelope.pieces:
            return self.inside(envelope.body)
        attachment.look_at_recent()
        pushing = _pushing(envelope, attachment, needed)
        landed = attachment.leases_here.arrive(envelope)
        if self._streams and needed is None:  # calls of the runtime have windows of their own
            attachment.leases_here.take(envelope)
        if envelope.is_message:
            return self.inside(_body(envelope, landed, pushing, needed or _never))

        def wait() -> None:
            if pushing is not None:
                pushing.wait(envelope, landed, needed or _never)

        holding = None
        try:
            try:
                body = envelope.body
                if BODY in landed.pieces:
                    wait()
                    body = copied(landed.piece(BODY))
                message = body if self._deserializer is None else self._deserializer(body)
                holding = _redeem(message, landed)
            except Exception:
                wait()  # the sender may write there until then
                raise
            except BaseException:
                if pushing is not None:
                    landed.give_back(reusable=False)
                raise
            wait()
            if holding is not None:
                attachment.remember(holding)
                if holdings is not None:
                    holdings.append(holding)
            return message
        finally:
            if holding is None:
                landed.give_back()


def may_wait(data: bytes) -> bool:
    """Returns whether reading these bytes may wait for payload, or take long to copy it."""
    if not is_pushed(data):
        return False
    try:
        envelope = unseal(data)
    except ValueError:
        return False  # as reading it finds out
    attachment = ATTACHMENTS.get(envelope.attachment)
    pushing = None if attachment is None else attachment.pushing
    return pushing is not None and not pushing.is_short_and_there(envelope)


def _opened(
    data: bytes, find: Callable[[bytes], RpcAttachment | None]
) -> tuple[Envelope, RpcAttachment]:
    """Decodes an envelope, and finds its attachment."""
    try:
        envelope = unseal(data)
        attachment = find(envelope.attachment)
        if attachment is None:
            raise ValueError("the message belongs to a connection that this process does not have")
    except ValueError as error:
        raise RefusedError(str(error)) from None
    size = len(envelope.body) + sum(piece[2] for piece in envelope.pieces)
    if envelope.pieces and 0 <= attachment.taken_bytes < size:  # its sender was told
        raise RefusedError(f"a message larger than max ({size} vs. {attachment.taken_bytes})")
    return envelope, attachment


def _pushing(
    envelope: Envelope, attachment: RpcAttachment, needed: Callable[[], bool] | None
) -> Pushing | None:
    """Returns the `Pushing` that waits for the payload of an envelope; None: it is there."""
    if not envelope.is_pushed:
        return None
    pushing = attachment.pushing
    if pushing is None or needed is None:
        raise RefusedError("the message has a payload that comes later, which was not agreed on")
    if not pushing.maps and not envelope.is_message:
        raise RefusedError("the arrays of a message come later, which only shared memory can do")
    return pushing


def _body(
    envelope: Envelope, landed: Landed, pushing: Pushing | None, needed: Callable[[], bool]
) -> bytes:
    """Returns the message of an envelope, and gives its memory back."""
    if pushing is not None:
        return pushing.read(envelope, landed, needed)
    try:
        return copied(landed.piece(BODY))
    finally:
        landed.give_back()


def _never() -> bool:
    return False


def _redeem(message: Any, arrival: Landed) -> Holding | None:
    """Gives the Tensors of a message new tickets for their memory; None if it has none."""
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
    """Returns the attachment of a call if it has this id: a client may not name any other."""
    return attachment if attachment is not None and attachment.id == id else None
