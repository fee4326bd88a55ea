"""Lets the channels of a process to one server share an attachment, as grpcio shares connections.

Knows no gRPC objects.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable
from typing import Any

from ..payload.attachment import RpcAttachment
from ..payload.host import descriptors_are_scarce
from ..payload.janitor import JANITOR
from ..payload.outgoing import CallLink, always, no_deadline
from .negotiation import AttachmentKeeper

LINGER_S = 2.0
"""The time that an attachment stays without channels, for programs with a channel for each call."""

_SHARED: dict[Hashable, SharedKeeper] = {}
_lock = threading.RLock()  # a collector may drop a channel in here


class SharedKeeper(AttachmentKeeper):
    """The keeper of an attachment that channels share.

    Args:
        key: of the table.
        lingers: it stays a while without channels.
        given: as of `AttachmentKeeper`.

    Attributes:
        users: shares of the channels that are open.
    """

    def __init__(self, key: Hashable, lingers: bool, *given: Any) -> None:
        super().__init__(*given)
        self.users: set[object] = set()
        self._key = key
        self._lingers = lingers
        self._idle_since = 0.0

    def leave(self, user: object) -> None:
        """Removes a channel that is closed.

        The attachment of the last one ends later, and not in here.
        """
        with _lock:
            self.users.discard(user)
            if self.users:
                return
            self._idle_since = time.monotonic()
            at_once = not self._lingers or self.is_unused
            if at_once:
                self._forget()
        if at_once:
            self.close()
        else:
            JANITOR.watch(self)

    def look(self) -> bool:
        """Ends the attachment once it has had no channels for long. Called by the janitor."""
        with _lock:
            if self.users:
                return True  # it may be without channels again before the janitor lets go of it
            late = time.monotonic() >= self._idle_since + LINGER_S
            if not late and not descriptors_are_scarce():
                return True
            self._forget()
        self.close()
        return False

    def _forget(self) -> None:
        if _SHARED.get(self._key) is self:
            del _SHARED[self._key]


class ChannelShare:
    """A channel's share of an attachment. Any thread may use it.

    Args:
        keeper: gets this as one of its users.

    Attributes:
        plain: the link of its calls that have no attachment.
        closed: the channel is.
        carries, retries, least_bytes: as of the keeper.
    """

    def __init__(self, keeper: SharedKeeper) -> None:
        self._keeper = keeper
        keeper.users.add(self)
        self.closed = False
        self.carries, self.retries = keeper.carries, keeper.retries
        self.least_bytes = keeper.least_bytes
        self.plain = CallLink(None, (0, 0), no_deadline, always)
        self.plain.notice = keeper.notice
        self.find = keeper.find
        self.notice = keeper.notice
        self.pause = keeper.pause
        self.disconnected = keeper.disconnected

    @property
    def ready(self) -> RpcAttachment | None:
        """See `AttachmentKeeper.ready`; None once the channel is closed."""
        return None if self.closed else self._keeper.ready

    @property
    def current(self) -> RpcAttachment | None:
        """The attachment for a call that begins; is opened, where calls may go by the runtime."""
        attachment = None if self.closed else self._keeper.ready
        if attachment is None and self.carries and not self.closed:
            self._keeper.open_soon()
        return attachment

    @property
    def reason(self) -> str:
        """The reason why there is no attachment that is `ready`."""
        return "the channel is closed" if self.closed else self._keeper.reason

    @property
    def carried_reason(self) -> str:
        """The reason why calls do not use the runtime."""
        return "the channel is closed" if self.closed else self._keeper.carried_reason

    def settled(self) -> bool:
        """See `AttachmentKeeper.settled`."""
        return self.closed or self._keeper.settled()

    def attach(self, timeout_s: float) -> bool:
        """See `AttachmentKeeper.attach`."""
        return not self.closed and self._keeper.attach(timeout_s)

    def close(self) -> None:
        """Ends the channel's calls by the runtime, and gives its share up. Never waits."""
        if self.closed:
            return
        self.closed = True
        self._keeper.end_calls_of(self)
        self._keeper.leave(self)


def share(key: Hashable, lingers: bool, *given: Any) -> ChannelShare:
    """Returns a share of the attachment of a key.

    Args:
        key: equal for channels that may share: the server, and all options of the channel.
        lingers: it stays a while without channels.
        given: the arguments of its keeper, if there is none yet.
    """
    try:
        hash(key)
    except TypeError:  # an option that cannot be compared
        key = object()
    with _lock:
        keeper = _SHARED.get(key)
        if keeper is None:
            keeper = _SHARED[key] = SharedKeeper(key, lingers, *given)
        return ChannelShare(keeper)


def _forked() -> None:
    """Replaces locks in a forked child, where a thread that does not run may have one."""
    global _lock
    _lock = threading.RLock()
    for each in list(_SHARED.values()):
        each._lock, each._opening = threading.RLock(), None


os.register_at_fork(after_in_child=_forked)
