"""gRPC: sends the payload of a message as `route` decides, and makes the bytes for grpcio.

The same for requests and responses. Payload that cannot travel beside its message travels inside,
as without tensorwire: no attachment, no memory at the receiver, a payload that is too small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import StaleHandleError, TensorwireError, TimeoutError
from tensorwire.memory import Transfer

from .. import logs
from .attachment import RpcAttachment
from .encode import Encoded, Serializer, arrays_of, inside, without_arrays
from .envelope import BODY, MAGIC, MAX_PIECES, PUSHED_VERSION, VERSION, Envelope, escape, seal
from .fields import may_have_tensors, tensors
from .leases import Lease, place
from .push import Push
from .route import PayloadWay, route
from .tensors import delivered
from .window import Window

_AT_ONCE_S = 0.1
_SLICE_S = 0.1
_ANSWER_S = 5.0
_SURE_S = 0.1
"""The time that the other end has to confirm a call, before it is taken not to have the call."""
MOST_BYTES = (1 << 31) - 1
_IN_ONE_GO_BYTES = 1 << 16  # as in grpcio, less frames and headers: messages of 250 kB do, too


class CallLink:
    """One call as the end sees it that sends in it: its attachment and its number there.

    Args:
        attachment: of the call; None: everything travels inside.
        call: its number.
        remaining: seconds to its deadline, None if it has none.
        needed: tells whether the call goes on.

    Attributes:
        attachment, call: as given.
        goes_on: tells whether the call goes on, as far as its end was not noticed here.
        leases: the memory that messages of the call use, as far as this end has to take it back.
        must_confirm: payload goes ahead only when the other end has confirmed the call.
        foreign: another server has the call, so everything travels inside.
        unsure: that may be wrong: there was no time to find out.
        patience_s: how long a message waits for memory; None: as the attachment says.
        answer_s: how long the other end may take to make new memory.
        ended: the call is over; a thread that still sends in it takes its memory back.
        by_runtime: it is a call of the runtime, whose payload may be pushed.
        window: of its messages that travel beside, if they are a stream that gRPC carries.
        in_loop: it is one of an event loop, which copies payload at once where it can.
        tickets: of the arrays of its only request, if they go with it.
        lease: memory that was taken for its next message.
        notice: told of the size of a message that travels inside for lack of an attachment.
    """

    # Defaults are the class's: setting them all would take nearly as long as a small call.
    leases: Sequence[Lease] = ()
    tickets: Sequence[int] = ()
    lease: Lease | None = None
    must_confirm = False
    patience_s: float | None = None
    answer_s = _ANSWER_S
    foreign = False
    unsure = False
    ended = False
    by_runtime = False
    in_loop = False
    window: Window | None = None
    notice: Callable[[int], object] | None = None

    def __init__(
        self,
        attachment: RpcAttachment | None,
        call: tuple[int, int],
        remaining: Callable[[], float | None],
        needed: Callable[[], bool],
    ) -> None:
        self.attachment = attachment
        self.call = call
        self.goes_on = needed
        self._remaining = remaining

    def needed(self) -> bool:
        """Returns whether the messages of the call are still needed."""
        return not self.ended and self.goes_on()

    def waits(self) -> bool:
        """Returns whether a message may still wait for its receiver."""
        return self.needed() and self.left_s(1.0) > 0

    def never_waits(self) -> None:
        """Keeps the caller from waiting for memory; without it the message travels inside."""
        self.patience_s, self.answer_s = 0.0, _AT_ONCE_S

    def never_blocks(self) -> CallLink:
        """Returns itself, as the link of a call of an event loop, which must not wait."""
        self.patience_s, self.in_loop = 0.0, True
        return self

    def awaits_messages(self) -> bool:
        """Returns whether the call goes on, and has time left."""
        return not self.ended and self.left_s(1.0) > 0

    def left_s(self, at_most: float) -> float:
        """Returns the seconds to the deadline of the call, and not more than `at_most`."""
        remaining = self._remaining()
        return at_most if remaining is None else min(at_most, max(remaining, 0.0))


def no_deadline() -> None:
    """Returns None, the time that is left to a call without a deadline."""


def at_once() -> float:
    """Returns the seconds that are left to a call whose event loop must not wait."""
    return _AT_ONCE_S


def always() -> bool:
    """Returns True: a call cannot end while its message is made."""
    return True


PLAIN = CallLink(None, (0, 0), no_deadline, always)
"""The link of calls without an attachment."""

AGAIN = CallLink(None, (0, 0), no_deadline, always)
"""The link of a request sent again unchanged, because its payload went ahead to another server."""


def is_kept(data: Any) -> bool:
    """Returns whether grpcio may keep a call with this request beyond its deadline.

    It does if the socket takes no more in the middle of the message, until the socket ends. A
    message not longer than its buffer of writes is written in one go, so its call ends in time.
    """
    return isinstance(data, bytes) and len(data) > _IN_ONE_GO_BYTES


@dataclass(slots=True, eq=False, repr=False)
class SentMessage:
    """A message that is handed to grpcio in the place of the user's.

    Attributes:
        message: the user's.
        link: of its call.
        tickets: of the arrays that it stands for, when it was serialized.
        ahead: its payload went ahead of it.
        last: the arrays are let go when it has left, and not when the call has ended well.
        staging: the rest of the payload, if any, which is pushed after the bytes have been sent:
            their sender then calls `finish`.
        is_kept: it was prepared, and `is_kept` says so of its bytes.
        kept: keeps the memory of its arrays, where they arrived in a request.
        keeps_body: the bytes of a message without arrays are kept in `body`, see `as_sent`.
    """

    message: Any
    link: CallLink
    last: bool
    keeps_body: bool = False
    ahead: bool = field(default=False, init=False)
    tickets: list[int] = field(default_factory=list, init=False)
    staging: Push | None = field(default=None, init=False)
    is_kept: bool = field(default=False, init=False)
    kept: Any = field(default=None, init=False)
    body: bytes | None = field(default=None, init=False)
    _arrays: dict[int, NDArray[np.uint8]] | None = field(default=None, init=False)
    _made: bytes | Exception | None = field(default=None, init=False)
    _begun: bool = field(default=False, init=False)

    def __del__(self) -> None:
        # grpcio drops it where the call has ended before it was asked for its bytes.
        if getattr(self, "_begun", True):  # it has none if its thread was interrupted
            return
        if self.last and may_have_tensors(type(self.message)):
            delivered([each.held.ticket for each in tensors(self.message)])

    def with_arrays(self) -> SentMessage:
        """Returns itself, with the arrays of its Tensors, which it keeps until it is serialized.

        For asyncio, where grpcio sends an empty message if a serializer fails.

        Raises:
            StaleHandleError: the array of a Tensor is gone.
        """
        self._arrays = arrays_of(self.message)
        return self

    def prepare(self, serializer: Serializer) -> None:
        """Serializes it now, and keeps the bytes or the error for `serialize`."""
        try:
            data = self._made = self.serialize(serializer)
        except Exception as error:
            self._made = error
        else:
            self.is_kept = is_kept(data)

    def serialize(self, serializer: Serializer) -> bytes:
        """Returns the bytes that travel.

        Raises:
            StaleHandleError: the array of a Tensor is gone.
            ValueError: arrays that do not travel beside it are too long for it.
            Exception: the error of the serializer.
        """
        made, self._made = self._made, None
        if isinstance(made, Exception):
            raise made
        if made is not None:
            return made
        self._begun = True
        link = self.link
        attachment = None if link.foreign else link.attachment
        arrays = self._take_arrays()
        self.tickets = list(arrays)
        body: Any = None
        if not arrays:
            body = self._encode(attachment, serializer)
            if not isinstance(body, bytes):
                return body  # type: ignore[no-any-return]  # grpcio says that it is no message
        if self.keeps_body:
            self.body = body
        size = sum(each.nbytes for each in arrays.values()) if body is None else len(body)
        if link.attachment is None and link.notice is not None:
            link.notice(size)
        way_of = partial(route, by_runtime=link.by_runtime, in_loop=link.in_loop)
        way = way_of(size, attachment if len(arrays) < MAX_PIECES else None, arrays=body is None)
        if way is PayloadWay.INSIDE and body is None:
            body = self._whole(arrays, serializer)
            # The rest of the message may be large itself.
            arrays, way = {}, way_of(len(body), attachment, arrays=False)
        data = None
        if attachment is not None and way is not PayloadWay.INSIDE:
            rest = without_arrays(self.message, serializer) if body is None else body
            data = self._beside(attachment, arrays, rest, way)
        if data is None:
            whole = self._whole(arrays, serializer) if body is None else body
            data = self._plain(attachment, whole)
        del arrays  # the memory of a request among them is given back now
        return self._left(data)

    def _take_arrays(self) -> dict[int, NDArray[np.uint8]]:
        """Returns the arrays of the message's Tensors, and keeps them no longer."""
        arrays, self._arrays = self._arrays, None
        if arrays is not None:
            return arrays
        try:
            return arrays_of(self.message)
        except StaleHandleError as error:
            self._tell(error)
            raise

    def _encode(self, attachment: RpcAttachment | None, serializer: Serializer) -> Any:
        """Returns the serializer's bytes for a message without arrays."""
        if attachment is not None and attachment.recent:
            # The other end writes into the same memory again, which caches still have.
            attachment.look_at_recent()
        message = self.message
        if type(message) is Encoded:
            return message.take()
        return message if serializer is None else serializer(message)

    def _beside(
        self,
        attachment: RpcAttachment,
        arrays: dict[int, NDArray[np.uint8]],
        rest: bytes,
        way: PayloadWay,
    ) -> bytes | None:
        """Returns the envelope of a message whose payload travels beside it; None: it cannot.

        Args:
            attachment: of the call.
            arrays: of the message.
            rest: the message without them; where that is large, it travels beside too.
            way: how.
        """
        beside = dict(arrays)
        if not arrays or len(rest) >= attachment.least_bytes(by_runtime=self.link.by_runtime):
            beside[BODY] = np.frombuffer(rest, np.uint8)
            rest = b""
        if not attachment.may_send(len(rest) + sum(each.nbytes for each in beside.values())):
            return None
        try:
            if not self._is_ours(attachment):
                return None
            if not self._has_window(attachment):
                return None
            lease = self._take(attachment, place([each.nbytes for each in beside.values()])[1])
            return None if lease is None else self._sent(attachment, lease, beside, rest, way)
        except TensorwireError:
            return None  # the attachment is over; the call is not

    def _is_ours(self, attachment: RpcAttachment) -> bool:
        """Returns whether the attachment's other end has the call, as far as it must be known."""
        link = self.link
        if not link.must_confirm:
            return True
        patience_s = self._patience_s(attachment)
        wait_s = link.left_s(2 * patience_s) / 2  # the rest is for the message itself
        link.foreign = not self._confirmed(attachment, wait_s)
        if link.foreign:
            link.unsure = wait_s < min(patience_s, _SURE_S) or not link.needed()
        else:
            link.must_confirm = False
        return not link.foreign

    def _has_window(self, attachment: RpcAttachment) -> bool:
        """Waits, where it may, until a stream has room; True if its reader has taken enough."""
        window = self.link.window
        if window is None or not window.full:
            return True
        # In an event loop the message travels inside, where gRPC holds it up.
        return self._patience_s(attachment) > 0 and window.wait(self.link.waits)

    def _patience_s(self, attachment: RpcAttachment) -> float:
        own = self.link.patience_s
        return attachment.limits.patience_s if own is None else own

    def _take(self, attachment: RpcAttachment, size: int) -> Lease | None:
        """Takes memory of the receiver; None: there is none in time."""
        link, pool = self.link, attachment.leases_there
        patience_s = self._patience_s(attachment)
        lease, link.lease = link.lease, None
        if lease is None:
            lease = pool.take_idle(size, link.call)
        if lease is None:
            attachment.look_at_recent()  # the other end may wait for memory, too
            answer_s = link.left_s(min(link.answer_s, max(patience_s, 1.0)))
            left_s = link.left_s(patience_s)
            lease = pool.take(size, link.call, left_s, link.needed, answer_s)
        if lease is None and link.needed():
            attachment.tell_full(size, pool.failure)
        return lease

    def _sent(
        self,
        attachment: RpcAttachment,
        lease: Lease,
        beside: dict[int, NDArray[np.uint8]],
        rest: bytes,
        way: PayloadWay,
    ) -> bytes | None:
        """Returns the envelope of payload that is in this memory, or on its way there."""
        link, sources = self.link, list(beside.values())
        sizes = [each.nbytes for each in sources]
        offsets, _ = place(sizes)
        pieces = tuple(zip(beside, offsets, sizes, strict=True))
        self._own(attachment, lease)
        if link.ended:
            attachment.retire([lease], link.call)
            return None
        if link.window is not None:
            link.window.add(lease)
        version = VERSION
        if way is PayloadWay.PUSHED and attachment.pushing is not None:
            version, chunked = PUSHED_VERSION, beside.keys() == {BODY}
            self.staging = attachment.pushing.push(lease, sources, offsets, chunked=chunked)
        elif not self._wait(lease.memory.write_at(sources, offsets)):
            attachment.retire([lease], link.call)
            return None
        self.ahead = True
        at = lease.slot, lease.serial, lease.turn
        return seal(Envelope(attachment.id, *at, pieces, rest, version))

    def _plain(self, attachment: RpcAttachment | None, data: Any) -> Any:
        """Returns the bytes of a message that is not an envelope, escaped if they look like one."""
        if attachment is None or self.link.foreign or not isinstance(data, bytes):
            return data
        return escape(attachment.id, data) if data.startswith(MAGIC) else data

    def _left(self, data: bytes) -> bytes:
        """Lets go of the arrays of a message that leaves, and returns its bytes."""
        if self.last and self.tickets:
            delivered(self.tickets)
        if self.staging is None:
            self._let_go()
        return data

    def _let_go(self) -> None:
        """Looks at memory of requests after a message has left with its arrays.

        The arrays may lie in a request's memory, which is given back now, before the other end
        needs it.
        """
        if self.tickets and self.link.attachment is not None:
            self.link.attachment.look_at_recent()

    def _whole(self, arrays: dict[int, NDArray[np.uint8]], serializer: Serializer) -> Any:
        """Returns the message with its arrays in it; ValueError if they are too long for it."""
        size_bytes = sum(each.nbytes for each in arrays.values())
        if size_bytes > MOST_BYTES:
            error = ValueError(
                f"arrays of {size_bytes} bytes are too long for a message of protobuf (2 GiB), and "
                "did not travel beside it: that takes more pool_bytes at the receiver than those"
            )
            self._tell(error)
            raise error
        return inside(self.message, arrays, serializer)

    def _tell(self, error: Exception) -> None:
        """Logs why a message cannot be sent, as grpcio says only that it cannot be serialized."""
        if not self.link.in_loop:  # there the user gets the error itself
            logs.OWN.error("a message cannot be sent: %s", error)

    def finish(self) -> None:
        """Copies the rest of the message, whose bytes have been sent."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.run(self.link.awaits_messages)
            del staging
            self._let_go()

    def _own(self, attachment: RpcAttachment, lease: Lease) -> None:
        """Notes memory as used for this call, whose end takes it back."""
        link = self.link
        leases = [each for each in link.leases if each is not lease]
        link.leases = [lease, *attachment.leases_there.used_of(leases, link.call)]

    def _confirmed(self, attachment: RpcAttachment, patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        while not attachment.confirmed(self.link.call, min(patience_s, _SLICE_S)):
            if not self.link.needed() or time.monotonic() >= until:
                return attachment.confirmed(self.link.call)
        return True

    def _wait(self, transfer: Transfer) -> bool:
        """Waits for a transfer; False when the message is not needed any more."""
        while True:
            try:
                transfer.wait(_SLICE_S, lead=False)  # a call has other things to do between two
                return True
            except TimeoutError:
                if not self.link.needed() or self.link.left_s(1) <= 0:
                    return False
