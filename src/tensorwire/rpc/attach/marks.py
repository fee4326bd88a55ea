"""Marks calls, so that their server knows of which attachment they are, and sends small ones.

Calls of a client with one small request share a number, and so their mark; see
`payload.attachment.SharedNumber`. They are calls of grpcio with bytes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..payload import outgoing
from ..payload.attachment import SharedNumber
from ..payload.encode import Encoded, Encoder
from ..payload.tensors import delivered
from .sharing import ChannelShare
from .terms import MARK

_ANY_BYTES = 1 << 62


class SmallCall:
    """A call with a small request, as grpcio takes it.

    Attributes:
        body: the bytes of the request.
        metadata: the user's, with the mark if there is an attachment.
    """

    __slots__ = ("_shared", "_tickets", "body", "metadata")

    def __init__(
        self, body: bytes, metadata: Any, tickets: Sequence[int], shared: SharedNumber | None
    ) -> None:
        self.body = body
        self.metadata = metadata
        self._tickets = tickets
        self._shared = shared

    def end(self, ok: bool) -> None:
        """Takes note of the end of the call; to be called once."""
        if self._shared is not None:
            self._shared.end(ok)
        if ok and self._tickets:
            delivered(self._tickets)


class SmallRequests:
    """The small requests of one method of a channel. Any thread may use it.

    Args:
        share: of the channel's attachment.
        serializer: the user's.
        watched: somebody counts what serializers do that grpcio calls, so none is called before.
    """

    __slots__ = ("_encoder", "_marked", "_share", "_watched")

    def __init__(self, share: ChannelShare, serializer: Any, *, watched: bool) -> None:
        self._share = share
        self._encoder = Encoder(serializer)
        self._watched = watched and serializer is not None
        self._marked: tuple[SharedNumber | None, Any] = (None, None)

    def begin(self, request: Any, metadata: Any) -> SmallCall | Encoded | None:
        """Begins a call whose request travels as it is, whatever is to happen to its response.

        Returns the request for a call of another kind, if its bytes were made; None: the user's. A
        request that cannot be serialized goes that way, which says so as grpcio does.
        """
        share = self._share
        attachment = share.carrier if share.carries else share.ready
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
