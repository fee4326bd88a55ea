"""Lets two ends find out that both have tensorwire, and join their memory, without gRPC objects.

The client calls a reserved method of the server, and connects to the Node that is named in the
answer. A server without tensorwire does not know the method, which is an answer too.
docs/internals/rpc-wire.md has the messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node, Peer
from tensorwire.memory.handle import join_address, split_address

from ..payload.attachment import CallCarrier, RpcAttachment
from ..payload.host import SCARCE, descriptors_are_scarce, host_id, tell_scarce
from ..payload.inbox import SenderGoneError
from ..payload.janitor import JANITOR
from ..payload.route import least_threshold
from ..runtime.client import AnyClient, RuntimeClient
from ..runtime.options import MessageLimits
from ..runtime.ring import Rings
from .memory import OwnMemory
from .terms import (
    ATTACHMENT_VERSION,
    CONNECT_S,
    READY,
    RUNTIME_VERSION,
    Terms,
    agreed,
    as_list,
    decode,
    encode,
)

_LONGEST_PAUSE_S = 60.0
_FOR_EVER = float("inf")


NewClient = Callable[[Rings, MessageLimits], CallCarrier]
"""Makes the client's end of a line."""


def connect(
    terms: Terms,
    ask: Callable[[bytes], bytes],
    new_client: NewClient = RuntimeClient,
    least_s: float = CONNECT_S,
) -> RpcAttachment:
    """Opens a new attachment, and returns the client's end.

    Args:
        terms: of the client.
        ask: calls the reserved method of the server.
        new_client: makes its end of a line, where both have the runtime.
        least_s: how long connecting may take.

    Raises:
        UnavailableError, PeerLostError, ...: there is no way to the server's memory.
        ValueError: the server's answer cannot be understood.
        Exception: the error of `ask`.
    """
    limits = terms.runtime.limits
    answer = decode(
        ask(
            encode(
                versions=[ATTACHMENT_VERSION],
                host=host_id(),
                transports=list(terms.transports),
                pool_bytes=terms.limits.pool_bytes,
                beside_bytes=max(terms.messages.receive_bytes, -1),
                runtime=0 if limits is None else RUNTIME_VERSION,
            ),
        )
    )
    id, secret = (bytes.fromhex(str(answer.get(name))) for name in ("attachment", "secret"))
    transports = [each for each in terms.transports if each in as_list(answer.get("transports"))]
    if answer.get("version") != ATTACHMENT_VERSION or len(id) != 16 or not transports:
        raise ValueError(
            f"the server answered with version {answer.get('version')!r} and transports "
            f"{answer.get('transports')!r}, and this client needs version {ATTACHMENT_VERSION} and "
            f"one of {list(terms.transports)}: use the same version of tensorwire at both ends"
        )
    node = Node(
        id.hex(),
        secret=secret,
        transports=transports,
        quota_bytes=terms.limits.pool_bytes,
        max_peers=1,
    )
    runs = limits is not None and answer.get("runtime") == RUNTIME_VERSION
    try:
        own = OwnMemory(node, runs=runs)
        peer = _reach(node, str(answer.get("address")), terms.host, least_s)
        attachment = own.join(peer, terms, agreed(terms.messages, answer), is_client=True)
        peer.wait_region(READY, timeout_s=least_s)
        rings = own.rings(attachment, least_s)
        if rings is not None and limits is not None:
            attachment.runtime = new_client(rings, limits)
        return attachment
    except BaseException:
        node.close()
        raise


def _reach(node: Node, address: str, host: str, timeout_s: float) -> Peer:
    """Connects to the server's Node, by the address that it tells or the channel's own.

    A server in a container, or one whose address is translated, may tell one that leads nowhere
    from here, or to another program. The channel has reached the host of its target.

    Args:
        node: this end; its name is the attachment's.
        address: as the server tells it.
        host: of the channel's target, "" for none.
        timeout_s: for all of it.

    Raises:
        UnavailableError, PeerLostError, ...: of the address that was told.
    """
    told, port = split_address(address)
    other = "" if host in ("", told) else join_address(host, port)
    try:
        return _met(node, address, timeout_s / 2 if other else timeout_s)
    except (TensorwireError, PermissionError):
        if other:
            with contextlib.suppress(TensorwireError, PermissionError):
                return _met(node, other, timeout_s / 2)
        raise


def _met(node: Node, address: str, timeout_s: float) -> Peer:
    peer = node.connect(address, timeout_s=timeout_s)
    if peer.name != node.name:
        peer.close()
        raise UnavailableError(
            f"{address}, the address for payload that the server named, belongs to another program"
        )
    return peer


class AttachmentKeeper:
    """The attachment of all channels that share it: opened when it may pay, and when it is lost.

    Any thread may use it. Only `attach` waits for an opening.

    Args:
        terms: of the client.
        explain: (kind, text) of an error; its kind is "unknown method", "unreachable" or "other".
        ask: calls the reserved method of the server, by no channel of the user's.
        new_client: see `connect`.

    Attributes:
        attachment: the latest, which may be lost; None: there was none.
        carries: calls may go by the runtime, where the server has it.
        least_bytes: the least size of a message that may be worth an attachment.
    """

    def __init__(
        self,
        terms: Terms,
        explain: Callable[[BaseException], tuple[str, str]],
        ask: Callable[[bytes], bytes],
        new_client: NewClient = RuntimeClient,
    ) -> None:
        self._new_client = new_client
        self._terms = terms
        self._ask = ask
        self.carries = terms.runtime.limits is not None
        self.retries = terms.retries
        self.least_bytes = least_threshold(terms.limits.threshold_bytes, terms.transports)
        self._explain = explain
        self._lock = threading.RLock()  # a handler of a signal may make a call in here
        self._opening: threading.Event | None = None
        self.attachment: RpcAttachment | None = None
        self._by_id: dict[bytes, RpcAttachment] = {}
        self._over: set[bytes] = set()
        self._pause_until = 0.0
        self._pause_s = 0.0
        self._closed = False
        self._reason = "no message was large enough yet to ask the server for an attachment"
        if self.carries:
            self._reason = "no call was made yet"
        if not terms.transports:
            self._reason = "transports= and TENSORWIRE_TRANSPORTS leave none"

    @property
    def carried_reason(self) -> str:
        """The reason why calls do not use the runtime."""
        if not self.carries:
            return self._terms.runtime.reason
        if self.ready is None:
            return self.reason
        return "the server does not offer the runtime"

    @property
    def reason(self) -> str:
        """The reason why there is no attachment that is `ready`."""
        if self._opening is not None:
            return "the attachment is being opened"
        if self._reason:
            return self._reason
        if self.attachment is not None and self.attachment.lost:
            return "the connection of the attachment is over"
        return "a call met a server that does not know the attachment, so for a while none uses it"

    @property
    def ready(self) -> RpcAttachment | None:
        """The attachment, if there is one already that is to be used."""
        attachment = self.attachment
        if attachment is None or attachment.lost:
            return None
        if self._pause_until and time.monotonic() < self._pause_until:
            return None
        return attachment

    def settled(self) -> bool:
        """Returns whether there is nothing to ask of the server at the moment."""
        if self._closed or not self._terms.transports or time.monotonic() < self._pause_until:
            return True
        return self.attachment is not None and not self.attachment.lost

    def find(self, id: bytes) -> RpcAttachment | None:
        """Returns the attachment of an id, also one that was replaced but is still there.

        Raises:
            SenderGoneError: there was one, and it is over.
        """
        attachment = self._by_id.get(id)
        if attachment is None and id in self._over:
            raise SenderGoneError("the sender's connection has ended, so the payload is gone")
        return attachment

    def notice(self, size_bytes: int) -> None:
        """Learns the size of a message that travels inside; opens an attachment if it may pay."""
        if size_bytes >= self.least_bytes:
            self.open_soon()

    def open_soon(self) -> None:
        """Opens the attachment in a thread of its own, if it is not there. Never waits for it."""
        if self._opening is not None or self.settled():
            return
        with self._lock:
            if self._opening is not None or self.settled():
                return
            opening = self._opening = threading.Event()
        try:
            threading.Thread(
                target=self._open, args=(opening,), name="tensorwire-rpc-open", daemon=True
            ).start()
        except BaseException as error:  # no thread is left, or this one is interrupted
            self._opening = None
            opening.set()
            if not isinstance(error, RuntimeError):
                raise
            self._failed(error)

    def attach(self, timeout_s: float) -> bool:
        """Opens the attachment, and waits for it; True if it is there."""
        self.open_soon()
        opening = self._opening
        if opening is not None:
            opening.wait(timeout_s)
        return self.ready is not None

    def _open(self, opening: threading.Event) -> None:
        try:
            if descriptors_are_scarce():
                tell_scarce("channels send all messages inside gRPC")
                self._reason = SCARCE
                self.pause()
                return
            attachment = connect(self._terms, self._ask, self._new_client)
        except Exception as error:
            self._failed(error)
        else:
            self._enter(attachment)
        finally:
            self._opening = None
            opening.set()

    def _enter(self, attachment: RpcAttachment) -> None:
        for key, each in list(self._by_id.items()):
            if each.lost:
                self._over.add(key)
                del self._by_id[key]
                JANITOR.soon(each.close)
        self._by_id[attachment.id] = self.attachment = attachment
        self._pause_s = 0.0
        self._reason = ""
        if self._closed:  # meanwhile, by another thread
            self.close()

    def _failed(self, error: Exception) -> None:
        kind, self._reason = self._explain(error)
        if kind == "unknown method":
            self._pause_until = _FOR_EVER
        elif kind != "unreachable":  # which calls find out themselves
            self.pause()

    def pause(self) -> None:
        """Sends plain messages for a while, twice as long as the last time."""
        self._pause_s = min(max(2 * self._pause_s, 1.0), _LONGEST_PAUSE_S)
        self._pause_until = time.monotonic() + self._pause_s

    def disconnected(self) -> None:
        """Ends the pause after a call could not reach the server, as the next server may differ."""
        self._pause_until = 0.0

    def end_calls_of(self, owner: object) -> None:
        """Ends the calls of the runtime that one channel has begun, which is closed."""
        for attachment in list(self._by_id.values()):
            if isinstance(client := attachment.runtime, AnyClient):
                client.end_calls_of(owner)

    @property
    def is_unused(self) -> bool:
        """True if the keeper has had nothing to do with the server, so nothing is lost with it."""
        return not self._by_id and self._opening is None and not self._pause_until

    def close(self) -> None:
        """Ends the attachments without waiting for the end; calling it again does nothing."""
        self._closed = True
        self._reason = "the channel is closed"
        self._over.update(list(self._by_id))
        for attachment in list(self._by_id.values()):
            attachment.end_line()
            JANITOR.soon(attachment.close)
        self._by_id.clear()
