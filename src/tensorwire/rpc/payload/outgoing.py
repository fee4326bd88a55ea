"""gRPC: decides what of a leaving message travels beside it, and makes the bytes for grpcio.

The same for requests and responses. Whatever cannot go ahead travels inside, as without
tensorwire: no attachment, no memory at the receiver, a payload that is too small to be worth it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import StaleHandleError, TensorwireError, TimeoutError
from tensorwire.memory import Transfer, crowded

from .. import logs
from .attachment import RpcAttachment
from .encode import Encoded, Encoder, Serializer, arrays_of, inside, without_arrays
from .envelope import BODY, MAGIC, MAX_PIECES, PUSHED_VERSION, VERSION, Envelope, escape, seal
from .fields import may_have_tensors, tensors
from .leases import AnyLease, place
from .pushing import LEAST_ARRAYS_BYTES, PushedArrays
from .rendezvous import Dispatch, Staging
from .tensors import delivered

_AT_ONCE_S = 0.1
_SLICE_S = 0.1
_ANSWER_S = 5.0
_SURE_S = 0.1
"""Whoever has not confirmed a call after this time is taken for somebody else."""
_MOST_BYTES = (1 << 31) - 1
_IN_ONE_GO_BYTES = 1 << 16  # as in grpcio, less frames and headers: messages of 250 kB do, too


class CallLink:
    """One call as the end sees it that sends in it: its attachment and its number there.

    Args:
        attachment: of the call; None: everything travels inside.
        call: its number.
        remaining: seconds to its deadline, None if it has none.
        needed: whether the call goes on.

    Attributes:
        attachment, call, needed: as given.
        leases: what was sent in the call, as far as this end has to take it back.
        bodies: those of them that hold a message and no arrays: who reads it gives it back.
        must_confirm: payload goes ahead only when the other end has confirmed the call.
        foreign: somebody else has the call, so everything travels inside.
        unsure: that may be wrong: there was no time to find out.
        patience_s: how long a message waits for memory; None: as the attachment says.
        ended: the call is over; whoever sends in it still takes that back.
        offers: messages may travel by rendezvous, because it is a call of the runtime.
        in_loop: it is one of an event loop, which copies before it goes on what it can at once.
    """

    # What is so at first stands here: a small call takes little longer than to set all of it.
    leases: Sequence[AnyLease] = ()
    bodies: Sequence[AnyLease] = ()
    must_confirm = False
    patience_s: float | None = None
    foreign = False
    unsure = False
    ended = False
    offers = False
    in_loop = False

    def __init__(
        self,
        attachment: RpcAttachment | None,
        call: tuple[int, int],
        remaining: Callable[[], float | None],
        needed: Callable[[], bool],
    ) -> None:
        self.attachment = attachment  # CarriedLink sets these too
        self.call = call
        self.needed = needed
        self._remaining = remaining

    def awaits_messages(self) -> bool:
        """The call goes on, and its time."""
        return not self.ended and self.left_s(1.0) > 0

    def left_s(self, at_most: float) -> float:
        """Seconds to the deadline of the call, and not more than `at_most`."""
        remaining = self._remaining()
        return at_most if remaining is None else min(at_most, max(remaining, 0.0))


def no_deadline() -> None:
    """Of a call without one."""


def at_once() -> float:
    """What is left to a call whose event loop must not wait."""
    return _AT_ONCE_S


def always() -> bool:
    """Of a call that cannot end while its message is made."""
    return True


PLAIN = CallLink(None, (0, 0), no_deadline, always)
"""For calls without an attachment."""

AGAIN = CallLink(None, (0, 0), no_deadline, always)
"""For a request that is sent again as it is, because its payload went ahead to somebody else."""


def is_kept(data: Any) -> bool:
    """Whether grpcio may keep a call with this request beyond its deadline.

    It does if the socket takes no more in the middle of the message, until the socket ends. What is
    not longer than its buffer of writes is written in one go, and the call then ends in time.
    """
    return isinstance(data, bytes) and len(data) > _IN_ONE_GO_BYTES


class SentMessage:
    """A message that is handed to grpcio in the place of the user's.

    Attributes:
        message: the user's.
        link: of its call.
        tickets: of the arrays that it stands for, when it was serialized.
        ahead: its payload went ahead of it.
        last: the arrays are let go when it has left, and not when the call has ended well.
        staging: what is left of the message to be copied when its bytes have been sent, if
            anything: whoever sends them calls `finish`.
        by_rendezvous: it travels so.
        is_kept: it was prepared, and `is_kept` says so of its bytes.
        kept: keeps the memory of its arrays, where they are those of a request.
        size_bytes: of the message, if it was asked whether it is to; else 0.
    """

    __slots__ = (
        "_arrays",
        "_begun",
        "_made",
        "ahead",
        "body",
        "by_rendezvous",
        "is_kept",
        "keeps_body",
        "kept",
        "last",
        "link",
        "message",
        "size_bytes",
        "staging",
        "tickets",
    )

    def __init__(
        self, message: Any, link: CallLink, *, last: bool, keeps_body: bool = False
    ) -> None:
        self.keeps_body = keeps_body
        self.message = message
        self.link = link
        self.last = last
        self.ahead = False
        self.tickets: list[int] = []
        self.staging: Staging | PushedArrays | None = None
        self.by_rendezvous = False
        self.is_kept = False
        self.kept: Any = None
        self.size_bytes = 0
        self.body: bytes | None = None
        self._arrays: dict[int, NDArray[np.uint8]] | None = None
        self._made: bytes | Exception | None = None
        self._begun = False

    def __del__(self) -> None:
        # grpcio drops it where the call has ended before it was asked for its bytes.
        if getattr(self, "_begun", True):  # it has none if its thread was interrupted
            return
        if self.last and may_have_tensors(type(self.message)):
            delivered([each.held.ticket for each in tensors(self.message)])

    def with_arrays(self) -> SentMessage:
        """Itself, with the arrays of its Tensors, which it keeps until it is serialized.

        For asyncio, where grpcio sends an empty message if a serializer fails.

        Raises:
            StaleHandleError: the array of a Tensor is gone.
        """
        self._arrays = arrays_of(self.message)
        return self

    def prepare(self, serializer: Serializer) -> None:
        """Serializes it now, and keeps what comes of that for `serialize`."""
        try:
            data = self._made = self.serialize(serializer)
        except Exception as error:
            self._made = error
        else:
            self.is_kept = is_kept(data)

    def serialize(self, serializer: Serializer) -> bytes:
        """The bytes that travel.

        Raises:
            StaleHandleError: the array of a Tensor is gone.
            ValueError: arrays that do not travel beside it are too long for it.
            Exception: what the serializer raises.
        """
        made, self._made = self._made, None
        if isinstance(made, Exception):
            raise made
        if made is not None:
            return made
        self._begun = True
        attachment = None if self.link.foreign else self.link.attachment
        arrays, self._arrays = self._arrays, None
        if arrays is None:
            try:
                arrays = arrays_of(self.message)
            except StaleHandleError as error:
                self._tell(error)
                raise
        self.tickets = list(arrays)
        body = None
        if not arrays:
            if attachment is not None and attachment.recent:
                # The other end writes into the same memory again, which caches still have.
                attachment.look_at_recent()
            message = self.message
            if type(message) is Encoded:
                body = message.take()
            else:
                body = message if serializer is None else serializer(message)
            if attachment is None or not isinstance(body, bytes):
                return body  # what is no message, grpcio says
            if self.keeps_body:
                self.body = body
            rendezvous = attachment.rendezvous if self.link.offers else None
            if body and rendezvous is not None and not (self.link.in_loop and rendezvous.maps):
                self.size_bytes = len(body)
                self.by_rendezvous = attachment.may_send(len(body)) and rendezvous.takes(len(body))
                if self.by_rendezvous and (offered := self._offer(attachment, body)) is not None:
                    return offered
        return self._otherwise(attachment, arrays, body, serializer)

    def _otherwise(
        self,
        attachment: RpcAttachment | None,
        arrays: dict[int, NDArray[np.uint8]],
        body: bytes | None,
        serializer: Serializer,
    ) -> bytes:
        """What travels of a message that is not read by the other end."""
        self.by_rendezvous = False
        beside: dict[int, NDArray[np.uint8]] = {}
        if attachment is not None and body is None:
            least = attachment.arrays_threshold(by_runtime=self.link.offers)
            if sum(each.nbytes for each in arrays.values()) >= least and len(arrays) < MAX_PIECES:
                beside = arrays
        if body is None and not beside:
            body = self._whole(arrays, serializer)
        data: bytes | None = None
        if attachment is not None and (
            beside or (isinstance(body, bytes) and len(body) >= attachment.threshold_bytes)
        ):
            try:
                data = self._ahead(attachment, beside, body, serializer)
            except TensorwireError:
                pass  # the attachment is over; the call is not
        if data is None:
            whole: bytes = self._whole(arrays, serializer) if body is None else body
            data = whole
            if attachment is not None and isinstance(data, bytes) and data.startswith(MAGIC):
                if not self.link.foreign:
                    data = escape(attachment.id, data)
        if self.last and arrays:
            delivered(self.tickets)
            arrays.clear()
        if self.staging is None:
            self._let_go()
        return data

    def _let_go(self) -> None:
        """The message has left with its arrays, which may have been those of a request.

        So its memory is given back now, and that of others, before the other end needs it.
        """
        if self.tickets and self.link.attachment is not None:
            self.link.attachment.look_at_recent()

    def _whole(self, arrays: dict[int, NDArray[np.uint8]], serializer: Serializer) -> Any:
        """The message with its arrays in it; ValueError if they are too long for that."""
        size_bytes = sum(each.nbytes for each in arrays.values())
        if size_bytes > _MOST_BYTES:
            error = ValueError(
                f"arrays of {size_bytes} bytes are too long for a message of protobuf (2 GiB), and "
                "did not travel beside it: that takes more pool_bytes at the receiver than those"
            )
            self._tell(error)
            raise error
        return inside(self.message, arrays, serializer)

    def _tell(self, error: Exception) -> None:
        """Why a message cannot be sent, of which grpcio says only that it cannot be serialized."""
        if not self.link.in_loop:  # there the user gets the error itself
            logs.OWN.error("a message cannot be sent: %s", error)

    def finish(self) -> None:
        """Copies what is left of the message, whose bytes have been sent."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.run(self.link.awaits_messages)
            del staging
            self._let_go()

    def _offer(self, attachment: RpcAttachment, body: bytes) -> bytes | None:
        """An envelope of a message that the other end reads; None: there is no memory for it."""
        link, rendezvous = self.link, attachment.rendezvous
        assert rendezvous is not None
        patience_s = link.left_s(attachment.limits.patience_s)
        try:
            offer = rendezvous.offer(body, link.call, patience_s, link.needed)
        except TensorwireError:
            return None  # the attachment is over; the call is not
        return self._offered(attachment, offer, len(body))

    def _offered(
        self, attachment: RpcAttachment, offer: Dispatch | None, size_bytes: int
    ) -> bytes | None:
        if offer is None:
            if self.link.needed():
                rendezvous = attachment.rendezvous
                assert rendezvous is not None
                attachment.tell_full(size_bytes, rendezvous.offers.failure)
            return None
        link, lease = self.link, offer.lease
        self._own(attachment, lease)
        if link.ended:
            attachment.retire([lease], link.call)
            return None
        self.ahead = True
        self.staging = offer.staging
        pieces, place = ((BODY, 0, size_bytes),), (lease.slot, lease.serial, lease.turn)
        return seal(Envelope(attachment.id, *place, pieces, b"", offer.version))

    def _own(self, attachment: RpcAttachment, lease: AnyLease) -> None:
        """Memory is used for this call, whose end takes it back."""
        link = self.link
        leases = [each for each in link.leases if each is not lease]
        link.leases = [lease, *attachment.used_of(leases, link.call)]

    def _ahead(
        self,
        attachment: RpcAttachment,
        arrays: dict[int, NDArray[np.uint8]],
        body: bytes | None,
        serializer: Serializer,
    ) -> bytes | None:
        """An envelope of these arrays, and of the rest where that is large; None: no memory."""
        if body is None:
            body = without_arrays(self.message, serializer)
        if not attachment.may_send(len(body) + sum(each.nbytes for each in arrays.values())):
            return None
        beside: dict[int, Any] = dict(arrays)
        if len(body) >= attachment.threshold_bytes:
            beside[BODY] = body
        return self._place(attachment, beside, b"" if BODY in beside else body)

    def _place(
        self, attachment: RpcAttachment, beside: dict[int, Any], body: bytes
    ) -> bytes | None:
        link = self.link
        patience_s = attachment.limits.patience_s if link.patience_s is None else link.patience_s
        if link.must_confirm:
            wait_s = link.left_s(2 * patience_s) / 2  # the rest is for the message itself
            if not self._confirmed(attachment, wait_s):
                link.foreign = True
                link.unsure = wait_s < min(patience_s, _SURE_S) or not link.needed()
                return None
            link.must_confirm = False
        if BODY in beside:
            beside[BODY] = np.frombuffer(beside[BODY], np.uint8)
        sources: list[NDArray[np.uint8]] = list(beside.values())
        sizes = [each.nbytes for each in sources]
        offsets, size = place(sizes)
        answer_s = min(_ANSWER_S, max(patience_s, 1.0))
        lease = attachment.leases_there.take_idle(size, link.call)
        if lease is None:
            attachment.look_at_recent()  # the other end may wait for memory, too
            lease = attachment.leases_there.take(
                size, link.call, link.left_s(patience_s), link.needed, link.left_s(answer_s)
            )
        if lease is None:
            if link.needed():
                attachment.tell_full(size, attachment.leases_there.failure)
            return None
        self._own(attachment, lease)
        if link.ended:
            attachment.retire([lease], link.call)
            return None
        version, rendezvous = VERSION, attachment.rendezvous
        if (
            link.offers
            and not link.in_loop  # where others may change them before all are copied
            and size >= LEAST_ARRAYS_BYTES
            and rendezvous is not None
            and rendezvous.maps
            and beside.keys() != {BODY}
            and not crowded()  # whom this thread wakes might take its core before all are copied
        ):
            # The receiver wakes up, and makes the message, while they are copied.
            self.staging = rendezvous.pushing.push_arrays(lease, sources, offsets)
            version = PUSHED_VERSION
        elif not self._wait(lease.memory.write_at(sources, offsets)):
            attachment.leases_there.retire([lease], link.call)
            return None
        if beside.keys() == {BODY}:
            link.bodies = [lease, *attachment.leases_there.used_of(link.bodies, link.call)]
        self.ahead = True
        pieces = tuple(zip(beside, offsets, sizes, strict=True))
        at = lease.slot, lease.serial, lease.turn
        return seal(Envelope(attachment.id, *at, pieces, body, version))

    def _confirmed(self, attachment: RpcAttachment, patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        while not attachment.confirmed(self.link.call, min(patience_s, _SLICE_S)):
            if not self.link.needed() or time.monotonic() >= until:
                return attachment.confirmed(self.link.call)
        return True

    def _wait(self, transfer: Transfer) -> bool:
        """False when nobody needs the message any more."""
        while True:
            try:
                transfer.wait(_SLICE_S, lead=False)  # a call has other things to do between two
                return True
            except TimeoutError:
                if not self.link.needed() or self.link.left_s(1) <= 0:
                    return False


class Responses:
    """Encodes the only responses of calls by grpcio, for one serializer and one attachment.

    Args:
        serializer: the user's.
        attachment: of the calls, None if they have none.
    """

    __slots__ = ("_encoder", "_least", "_least_arrays", "_serializer")

    def __init__(self, serializer: Serializer, attachment: RpcAttachment | None) -> None:
        self._serializer = serializer
        self._encoder = Encoder(serializer)
        self._least = self._least_arrays = _MOST_BYTES
        if attachment is not None:
            self._least = attachment.threshold_bytes
            self._least_arrays = attachment.arrays_bytes

    def encode(self, response: Any, link: Callable[..., CallLink], *call: Any) -> bytes:
        """Returns the bytes of a response; raises as `SentMessage.serialize`.

        Args:
            response: the user's.
            link: gives that of the call, for a response that is not small.
            call: what it takes.
        """
        found = self._encoder.small(response, self._least, self._least_arrays)
        if type(found) is bytes:
            return found
        if isinstance(found, tuple):
            delivered(found[1])
            return found[0]
        message = response if found is None else found
        return SentMessage(message, link(*call), last=True).serialize(self._serializer)
