"""Decides which small requests are sent by calls of grpcio alone."""

from __future__ import annotations

from typing import Any

from ..attach.negotiation import AttachmentKeeper
from ..payload.envelope import MAGIC
from ..payload.fields import may_have_tensors
from ..payload.outgoing import Encoded


class SmallRequests:
    """The small requests of one method of a channel. Any thread may use it.

    Args:
        keeper: of the channel's attachment.
        serializer: the user's.
        watched: somebody counts what serializers do that grpcio calls, so none is called before.
    """

    __slots__ = ("_keeper", "_plain_type", "_serializer", "_watched")

    def __init__(self, keeper: AttachmentKeeper, serializer: Any, *, watched: bool) -> None:
        self._keeper = keeper
        self._serializer = serializer
        self._watched = watched
        self._plain_type: type | None = bytes if serializer is None else None

    def encode(self, request: Any) -> bytes | Encoded | None:
        """The bytes of a request that needs nothing of ours.

        With them the call is grpcio's, and nothing else: no mark, no number, no look at its end.
        Else the request as it goes the other way, if its bytes were made; None: the user's. One
        that cannot be serialized goes that way, which says so as grpcio does.
        """
        keeper = self._keeper
        attachment = keeper.attachment
        most_bytes = keeper.plain_bytes if attachment is None else attachment.unmarked_bytes
        if not most_bytes:
            return None
        if type(request) is not self._plain_type:
            if self._watched or may_have_tensors(type(request)):
                return None
            self._plain_type = type(request)
        serializer = self._serializer
        try:
            body = request if serializer is None else serializer(request)
        except Exception:
            return None
        if type(body) is not bytes or body.startswith(MAGIC):
            return None
        if len(body) >= most_bytes:
            return None if serializer is None else Encoded(request, serializer, body)
        return body
