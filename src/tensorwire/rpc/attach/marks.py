"""Marks calls, so that their server knows of which attachment they are, and sends small ones.

Calls of a client with one small request share a number, and so their mark; see
`payload.attachment.SharedNumber`. They are calls of grpcio with bytes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from tensorwire.errors import TensorwireError

from ..payload import outgoing
from ..payload.attachment import RpcAttachment, SharedNumber
from ..payload.encode import Encoded, Encoder
from ..payload.envelope import mark
from ..payload.janitor import JANITOR
from ..payload.leases import Lease
from ..payload.outgoing import CallLink, SentMessage, always
from ..payload.tensors import delivered
from .sharing import ChannelShare
from .terms import MARK, REFUSED


@dataclass(slots=True, eq=False, repr=False)
class SmallCall:
    """A call with a small request, as grpcio takes it.

    Attributes:
        body: the bytes of the request.
        metadata: the user's, with the mark if there is an attachment.
        tickets: of the arrays in it.
        shared: its number, None if it has no mark.
    """

    body: bytes
    metadata: Any
    tickets: Sequence[int]
    shared: SharedNumber | None

    def end(self, ok: bool) -> None:
        """Takes note of the end of the call; to be called once."""
        if self.shared is not None:
            self.shared.end(ok)
        if ok and self.tickets:
            delivered(self.tickets)


class SmallRequests:
    """The small requests of one method of a channel. Any thread may use it.

    Args:
        share: of the channel's attachment.
        serializer: the user's.
        watched: the work of serializers that grpcio calls is counted, so none is called before.
    """

    __slots__ = ("_encoder", "_marked", "_share", "_watched")

    def __init__(self, share: ChannelShare, serializer: Any, *, watched: bool) -> None:
        self._share = share
        self._encoder = Encoder(serializer)
        self._watched = watched and serializer is not None
        self._marked: tuple[SharedNumber | None, Any] = (None, None)

    def begin(
        self, request: Any, metadata: Any, attachment: RpcAttachment | None
    ) -> SmallCall | Encoded | None:
        """Begins a call whose request travels as it is, whatever is to happen to its response.

        Returns the request for a call of another kind, if its bytes were made; None: the user's. A
        request that cannot be serialized goes that way too, for the same error as in grpcio.
        """
        share = self._share
        if attachment is None:  # one that may be worth an attachment goes where that is noticed
            least = outgoing.MOST_BYTES if share.settled() else share.least_bytes
        elif attachment.runtime is not None:
            return None
        else:
            least = attachment.threshold_bytes
        if self._watched:
            return None
        try:
            found = self._encoder.small(request, least)
        except Exception:
            return None
        tickets: Sequence[int] = ()
        if isinstance(found, tuple):
            found, tickets = found
        elif not isinstance(found, bytes):
            return found
        if attachment is None or (shared := attachment.share()) is None:
            return SmallCall(found, metadata, tickets, None)
        known, marked = self._marked
        if known is not shared:
            marked = ((MARK, shared.mark),)
            self._marked = shared, marked
        return SmallCall(found, (*metadata, *marked) if metadata else marked, tickets, shared)


class Sender:
    """Begins and ends the calls of a channel by grpcio, in either world.

    Args:
        share: the channel's, of an attachment.

    Attributes:
        share: as given.
        proof: the codes of a server that cannot parse an envelope.
        ends_at_once: the thread in which a call fails may wait for locks.
    """

    proof: tuple[grpc.StatusCode, ...] = (grpc.StatusCode.INTERNAL,)
    ends_at_once = True

    def __init__(self, share: ChannelShare) -> None:
        self.share = share

    def begin(self, metadata: Any, remaining: Callable[[], float | None]) -> tuple[CallLink, Any]:
        """Returns the link of a new call, and its metadata with the mark of its attachment.

        Args:
            metadata: the user's.
            remaining: see `CallLink`.
        """
        attachment = self.share.ready
        call = None if attachment is None else attachment.begin_call()
        if attachment is None or call is None:
            return self.share.plain, metadata
        link = CallLink(attachment, call, remaining, always)
        link.foreign = link.unsure = self.share.retries  # an envelope is of use once
        return link, (*(metadata or ()), (MARK, mark(attachment.id, *call)))

    def end(self, link: CallLink, ok: bool, code: Any = None) -> None:
        """Takes back the payload of a call that is over, as far as it was not read.

        Args:
            link: of the call.
            ok: it has ended well.
            code: of its end, None if that is not known.
        """
        if code is grpc.StatusCode.UNAVAILABLE:
            self.share.disconnected()
        elif link.foreign and not link.unsure:
            self.share.pause()
        attachment = link.attachment
        if attachment is None:
            return
        link.ended = True  # before the leases are looked at: see `SentMessage`
        if ok:
            attachment.end_call(link.call, link.leases, complete=True)
        else:
            self.fail(attachment, link.call, link.leases, code)

    def fail(
        self,
        attachment: RpcAttachment,
        call: tuple[int, int],
        leases: Sequence[Lease],
        code: Any,
    ) -> None:
        """Ends a call that has not ended well; its code is None if that is not known."""
        if code is grpc.StatusCode.UNAVAILABLE:
            self.share.disconnected()
        if self.ends_at_once:
            attachment.end_call(call, leases, complete=False)
        else:
            JANITOR.soon(partial(attachment.end_call, call, leases, complete=False))

    def end_small(self, small: SmallCall, code: Any) -> None:
        """Ends a call with a small request; its code is None if that is not known."""
        if code is grpc.StatusCode.UNAVAILABLE:
            self.share.disconnected()
        small.end(code is grpc.StatusCode.OK)

    def is_to_be_sent_again(
        self, outgoing: SentMessage, code: grpc.StatusCode, trailing: Any
    ) -> bool:
        """Returns whether a request's payload went ahead to a server that has not got the call.

        Either the server says so, or it cannot even parse an envelope: then it is none of ours, and
        no server of ours has confirmed the call.

        Args:
            outgoing: the request.
            code: of the call.
            trailing: metadata of the call.
        """
        if any(key == REFUSED for key, _ in trailing or ()) or (
            code in self.proof and not call_is_confirmed(outgoing.link)
        ):
            self.share.pause()
            return True
        return False


def call_is_confirmed(link: CallLink) -> bool:
    """Returns whether the attachment's server has the call. True if it cannot be known any more."""
    attachment = link.attachment
    try:
        return attachment is None or attachment.lost or attachment.confirmed(link.call)
    except TensorwireError:
        return True
