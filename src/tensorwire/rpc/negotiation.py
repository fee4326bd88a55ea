"""How two ends find out that both have tensorwire, and join their memory. Knows no gRPC objects.

The client calls a reserved method of the server, and connects to the Node that is named in the
answer. A server without tensorwire does not know the method, which is an answer too.
docs/rpc-wire.md has the messages.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node, Peer, Region, RemoteRegion

from .agent import ChannelAgent, read_token, token_of
from .attachment import (
    CALLS,
    LAST_GENERATION,
    CallCarrier,
    Limits,
    RpcAttachment,
    make_board,
    make_rendezvous_board,
)
from .envelope import VERSION
from .host import host_id, no_way
from .inbox import SenderGoneError
from .janitor import JANITOR
from .runtime.client import AnyClient, RuntimeClient
from .runtime.context import Caller
from .runtime.options import MessageLimits, Offer
from .runtime.ring import RING, checked, make_ring
from .runtime.server import AnyService

OPEN = "/tensorwire.rpc.Attachment/Open"
"""The reserved method."""
MARK = "tensorwire-attachment-bin"
"""Key of the metadata by which a call says which attachment it is of."""
REFUSED = "tensorwire-refused"
"""Key of the trailing metadata of a call that was refused before the servicer ran."""

RUNTIME_VERSION = 5
"""Of the frames of `runtime`."""

_MOST_BYTES = 4096
_CONNECT_S = 5.0
_READY = "ready"
_LONGEST_PAUSE_S = 60.0
_FOR_EVER = float("inf")
_ANY_BYTES = 1 << 62


NO_RUNTIME = Offer(None, "it is not offered on such a channel")


@dataclass(frozen=True, slots=True)
class Terms:
    """What one end lets payload do.

    Attributes:
        limits: see there.
        transports: by which it may travel, of those of a Node. Empty: not at all.
        listen: the host that clients on other hosts reach this server by; "" for none.
        plaintext_transports: by which payload of an encrypted connection may travel too.
        runtime: whether calls go by the runtime, where the other end has it too.
        agent: of the channel; None: a server knows its calls by their marks alone.
    """

    limits: Limits
    transports: tuple[str, ...]
    listen: str = ""
    plaintext_transports: tuple[str, ...] = ()
    runtime: Offer = NO_RUNTIME
    agent: ChannelAgent | None = None


class DeclinedError(Exception):
    """The server has tensorwire and gives no attachment; it says why."""


class Registry:
    """The attachments of a server. Any thread may use it.

    Args:
        terms: of the server.
        most: attachments at a time; clients beyond get plain gRPC.
        service: carries out calls that do not come by grpcio, None if there are to be none.

    Attributes:
        knows_agents: calls without a mark are looked at too.
    """

    def __init__(self, terms: Terms, most: int, service: AnyService | None = None) -> None:
        self.knows_agents = False
        self._agents: dict[str, RpcAttachment] = {}
        self._service = service
        self._terms = terms
        self._most = most
        self._lock = threading.Lock()
        self._attachments: dict[bytes, RpcAttachment] = {}
        self._waiting: dict[bytes, Node] = {}
        self._closed = False

    def find(self, id: bytes) -> RpcAttachment | None:
        """The attachment of an id."""
        return self._attachments.get(id)

    def of_agent(self, metadata: Any) -> RpcAttachment | None:
        """The attachment of the channel that a call without a mark comes from, by its metadata."""
        token = read_token(metadata)
        attachment = None if token is None else self._agents.get(token)
        return None if attachment is None or attachment.lost else attachment

    @property
    def limits(self) -> Limits:
        """Of the server."""
        return self._terms.limits

    @property
    def attachments(self) -> list[RpcAttachment]:
        """Those that have both ends."""
        return list(self._attachments.values())

    @property
    def awaited(self) -> bool:
        """A client has not given back payload that it was sent: perhaps it has not come to it."""
        return any(each.awaited for each in self.attachments if not each.lost)

    def listen(self, host: str) -> None:
        """Lets clients of other hosts reach this server by a host, unless terms name one."""
        if not self._terms.listen:
            self._terms = replace(self._terms, listen=host)

    def open(
        self,
        request: bytes,
        caller: Caller | None = None,
        *,
        encrypted: bool,
        token: str | None = None,
    ) -> bytes:
        """Makes this end of an attachment, for whoever connects to it with its secret.

        Args:
            request: of the client.
            caller: the client, if its calls may go by the runtime.
            encrypted: the connection is; then payload stays on this host.
            token: of the client's user agent, as it arrives here.

        Raises:
            DeclinedError: there is none for this client.
            ValueError: the request says nothing that can be understood.
        """
        asked = _decode(request)
        lent_bytes = _whole_number(asked, "pool_bytes")
        most_bytes = _limit(asked) if "most_bytes" in asked else None
        wanted = asked.get("transports")
        agent = token_of(asked["agent"]) if "agent" in asked else None
        if agent != token or not self.knows_agents:
            agent = None  # it was changed on the way
        if VERSION not in _list(asked.get("versions")):
            raise DeclinedError(f"this server knows version {VERSION}")
        near = asked.get("host") == host_id() != ""
        allowed = {each for each in self._terms.transports if each in _list(wanted)}
        if encrypted:
            allowed &= {"shm", *self._terms.plaintext_transports}
        if not near:
            allowed.discard("shm")
        transports = [each for each in self._terms.transports if each in allowed]
        listen = "127.0.0.1" if near else self._terms.listen
        if not transports or not listen:
            raise DeclinedError(no_way(_list(wanted), self._terms.transports, near))
        with self._lock:
            if self._closed or len(self._attachments) + len(self._waiting) >= self._most:
                raise DeclinedError(f"this server has {self._most} attachments")
            id, secret = secrets.token_bytes(16), secrets.token_bytes(32)
            try:
                node = Node(
                    id.hex(),
                    listen=f"[{listen}]:0" if ":" in listen else f"{listen}:0",
                    secret=secret,
                    transports=transports,
                    quota_bytes=self._terms.limits.pool_bytes,
                    max_peers=1,
                )
            except ValueError as error:
                raise DeclinedError(
                    f"the server's host for payload is not known: name it by listen= ({error})"
                ) from error
            board = make_board(node)
            runs = asked.get("runtime") == RUNTIME_VERSION and not encrypted
            service = self._service if runs and caller is not None else None
            ring = None if service is None else make_ring(node)
            meeting = None
            if service is not None and most_bytes is not None:
                framed = least_limit(service.limits.send_bytes, most_bytes)
                meeting = make_rendezvous_board(node), framed
            self._waiting[id] = node
        threading.Thread(
            target=self._complete, name="tensorwire-rpc-attachment", daemon=True,
            args=(id, node, board, lent_bytes, service, ring, caller, meeting, agent),
        ).start()  # fmt: skip
        JANITOR.watch(self)
        return _encode(
            version=VERSION,
            attachment=id.hex(),
            secret=secret.hex(),
            address=node.address,
            transports=transports,
            pool_bytes=self._terms.limits.pool_bytes,
            runtime=0 if service is None else RUNTIME_VERSION,
            unmarked=agent is not None,
            **({} if meeting is None or service is None else _told_limit(service.limits)),
        )

    def _complete(
        self,
        id: bytes,
        node: Node,
        board: Region,
        lent_bytes: int,
        service: AnyService | None,
        ring: Region | None,
        caller: Caller | None,
        meeting: tuple[Region, int] | None,
        agent: str | None,
    ) -> None:
        """In a thread of its own, until the client has connected or does not come."""
        try:
            attachment = RpcAttachment(
                id,
                node,
                board,
                node.accept(_CONNECT_S),
                self._terms.limits,
                lent_bytes=lent_bytes,
                is_client=False,
            )
            if service and ring and caller:
                peer = attachment.peer
                other = checked(peer.wait_region(RING, timeout_s=_CONNECT_S))
                if meeting is not None:
                    attachment.add_rendezvous(*meeting)
                end = service.attach(attachment, caller, node, ring, other, peer)
                attachment.runtime = end
                end.start()
            with self._lock:
                self._waiting.pop(id, None)
                if not self._closed:
                    self._attachments[id] = attachment
                    if agent is not None:
                        self._agents[agent] = attachment
                    node.allocate(8, name=_READY)
                    return
        except TensorwireError:
            pass  # the client gets plain gRPC
        with self._lock:
            self._waiting.pop(id, None)
        node.close()

    def look(self) -> bool:
        """For the janitor: forgets attachments whose client is gone."""
        with self._lock:
            for id, attachment in list(self._attachments.items()):
                if attachment.lost:
                    del self._attachments[id]
                    for token, each in list(self._agents.items()):
                        if each is attachment:
                            del self._agents[token]
                    JANITOR.soon(attachment.close)
            return bool(self._attachments or self._waiting)

    def close(self) -> None:
        """Ends all attachments; calling it again does nothing."""
        with self._lock:
            self._closed = True
            nodes = list(self._waiting.values())
            attachments = list(self._attachments.values())
            self._waiting.clear()
            self._attachments.clear()
            self._agents.clear()
        for node in nodes:
            node.close()
        for attachment in attachments:
            attachment.close()


NewClient = Callable[[Node, Region, RemoteRegion, Peer, MessageLimits], CallCarrier]
"""Makes the client's end of a line."""


def connect(
    terms: Terms,
    ask: Callable[[bytes], bytes],
    new_client: NewClient = RuntimeClient,
    least_s: float = _CONNECT_S,
) -> RpcAttachment:
    """The client's end of a new attachment.

    Args:
        terms: of the client.
        ask: calls the reserved method of the server.
        new_client: makes its end of a line, where both have the runtime.
        least_s: how long connecting may take.

    Raises:
        UnavailableError, PeerLostError, ...: there is no way to the server's memory.
        ValueError: the server's answer cannot be understood.
        Exception: what `ask` raises.
    """
    limits, agent = terms.runtime.limits, terms.agent
    answer = _decode(
        ask(
            _encode(
                versions=[VERSION],
                host=host_id(),
                transports=list(terms.transports),
                pool_bytes=terms.limits.pool_bytes,
                runtime=0 if limits is None else RUNTIME_VERSION,
                **(_told_limit(limits) if limits else {}),
                **({"agent": agent.nonce} if agent is not None and agent.owned else {}),
            ),
        )
    )
    id, secret = (bytes.fromhex(str(answer.get(name))) for name in ("attachment", "secret"))
    transports = [each for each in terms.transports if each in _list(answer.get("transports"))]
    if answer.get("version") != VERSION or len(id) != 16 or not transports:
        raise ValueError("the server's answer is of no version that is known here")
    node = Node(
        id.hex(),
        secret=secret,
        transports=transports,
        quota_bytes=terms.limits.pool_bytes,
        max_peers=1,
    )
    runs = limits is not None and answer.get("runtime") == RUNTIME_VERSION
    meets = runs and "most_bytes" in answer
    try:
        board = make_board(node)
        ring = make_ring(node) if runs else None
        meeting = make_rendezvous_board(node) if meets else None
        peer = node.connect(str(answer.get("address")), timeout_s=least_s)
        if peer.name != id.hex():
            raise UnavailableError(f"{peer.address} is not the server's end of the attachment")
        lent_bytes = _whole_number(answer, "pool_bytes")
        attachment = RpcAttachment(
            id, node, board, peer, terms.limits, lent_bytes=lent_bytes, is_client=True
        )
        peer.wait_region(_READY, timeout_s=least_s)
        if agent is not None and agent.owned and answer.get("unmarked") is True:
            attachment.unmarked_bytes = attachment.threshold_bytes
        if ring is not None and limits:
            other = checked(peer.region(RING, timeout_s=least_s))
            client = attachment.runtime = new_client(node, ring, other, peer, limits)
            if meeting is not None:
                framed = least_limit(limits.send_bytes, _limit(answer))
                attachment.add_rendezvous(meeting, framed)
                if isinstance(client, AnyClient):
                    client.meet(attachment)
        return attachment
    except BaseException:
        node.close()
        raise


class AttachmentKeeper:
    """The attachment of a channel: made when it is needed, made again when it is lost.

    Any thread may use it.

    Args:
        terms: of the client.
        explain: (kind, text) of an error; its kind is "unknown method", "unreachable" or "other".
        new_client: see `connect`.

    Attributes:
        attachment: the latest, which may be lost; None: there was none.
        carries: calls may go by the runtime, where the server has it.
        plain_bytes: while there is none, requests that are shorter may be sent as they are, without
            asking for one. 0: none may.
    """

    def __init__(
        self,
        terms: Terms,
        explain: Callable[[BaseException], tuple[str, str]],
        new_client: NewClient = RuntimeClient,
    ) -> None:
        self._new_client = new_client
        self._terms = terms
        self.carries = terms.runtime.limits is not None
        self._explain = explain
        self._lock = threading.Lock()
        self.attachment: RpcAttachment | None = None
        self.plain_bytes = 0
        self._by_id: dict[bytes, RpcAttachment] = {}
        self._over: set[bytes] = set()
        self._pause_until = 0.0
        self._pause_s = 0.0
        self._closed = False
        self._reason = "no call was made yet"
        _KEEPERS.add(self)

    @property
    def carried_reason(self) -> str:
        """Why calls do not go by the runtime."""
        if not self.carries:
            return self._terms.runtime.reason
        if self.ready is None:
            return self.reason
        return "the server does not offer the runtime"

    @property
    def reason(self) -> str:
        """Why there is no attachment that is `ready`."""
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

    @property
    def disowned(self) -> bool:
        """A server may take calls of this channel without a mark for those of an attachment.

        Which is not there any more, or another process's.
        """
        agent = self._terms.agent
        if agent is None:
            return False
        return not agent.owned or (self.attachment is not None and self.attachment.lost)

    def settled(self) -> bool:
        """Nothing is to be asked of the server at the moment."""
        if self._closed or time.monotonic() < self._pause_until:
            return True
        return self.attachment is not None and not self.attachment.lost

    def find(self, id: bytes) -> RpcAttachment | None:
        """The attachment of an id, also one that was replaced but is still there.

        Raises:
            SenderGoneError: there was one, and it is over.
        """
        attachment = self._by_id.get(id)
        if attachment is None and id in self._over:
            raise SenderGoneError("the attachment of the message is over, and its payload gone")
        return attachment

    def get(self, ask: Callable[[bytes], bytes], wait_s: float) -> RpcAttachment | None:
        """The attachment, for which the server is asked if need be.

        Args:
            ask: calls the reserved method of the server.
            wait_s: how long to wait for another thread that asks.
        """
        if (attachment := self.ready) is not None:
            return attachment
        if self.settled() or not self._lock.acquire(timeout=wait_s):
            return None
        try:
            if self.settled():
                return self.ready
            try:
                attachment = connect(self._terms, ask, self._new_client)
            except Exception as error:
                self._failed(error)
                return None
            if self._closed:
                attachment.close()
                return None
            for key, each in list(self._by_id.items()):
                if each.lost:
                    self._over.add(key)
                    del self._by_id[key]
                    JANITOR.soon(each.close)
            self._by_id[attachment.id] = self.attachment = attachment
            self._pause_s = 0.0
            self._reason = ""
            return attachment
        finally:
            self._lock.release()

    def _failed(self, error: Exception) -> None:
        kind, self._reason = self._explain(error)
        if kind == "unknown method":
            self._pause_until = _FOR_EVER
            self.plain_bytes = 0 if self.disowned else _ANY_BYTES
        elif kind != "unreachable":  # which the call itself will find out
            self.pause()

    def pause(self) -> None:
        """Sends plain messages for a while, twice as long as the last time."""
        self._pause_s = min(max(2 * self._pause_s, 1.0), _LONGEST_PAUSE_S)
        self._pause_until = time.monotonic() + self._pause_s

    def disconnected(self) -> None:
        """A call could not reach the server: it may be another one next time."""
        self._pause_until = 0.0
        self.plain_bytes = 0

    def close(self) -> None:
        """Ends the attachments; calling it again does nothing."""
        self._closed = True
        self._reason = "the channel is closed"
        self._over.update(list(self._by_id))
        for attachment in list(self._by_id.values()):
            attachment.close()
        self._by_id.clear()


_KEEPERS: weakref.WeakSet[AttachmentKeeper] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child, all of whose calls say of which attachment they are."""
    for each in list(_KEEPERS):
        each.plain_bytes = 0
        each._lock = threading.Lock()  # a thread that is not here may have it
        if each.attachment is not None:
            each.attachment.unmarked_bytes = 0


os.register_at_fork(after_in_child=_forked)


def check_mark(registry: Registry, mark: tuple[bytes, int, int] | None) -> RpcAttachment | None:
    """The attachment that a call names, if it is one of this server and its number can be one."""
    if mark is None or mark[1] >= CALLS or mark[2] > LAST_GENERATION:
        return None
    return registry.find(mark[0])


def _encode(**values: Any) -> bytes:
    return json.dumps(values).encode()


def _decode(data: bytes) -> dict[str, Any]:
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{len(data)} bytes are too many")
    values = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError("it is no object")
    return values


def _whole_number(values: dict[str, Any], name: str) -> int:
    """A field of a message that is a number from 0 up; ValueError if it is none."""
    value = values.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}")
    return value


def _told_limit(limits: MessageLimits) -> dict[str, int]:
    """What tells the other end that messages may travel by rendezvous: the longest it may frame."""
    return {"most_bytes": limits.receive_bytes}


def _limit(values: dict[str, Any]) -> int:
    """The other end's `most_bytes`; ValueError if it is none."""
    value = values.get("most_bytes")
    if type(value) is not int or not -1 <= value < 1 << 62:
        raise ValueError(f"most_bytes is {value!r}")
    return value


def least_limit(one: int, other: int) -> int:
    """The lower one of two limits, each negative for none."""
    return max(one, other) if one < 0 or other < 0 else min(one, other)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
