"""Server side: makes the attachments that clients ask for, and keeps them."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace

from tensorwire.errors import TensorwireError
from tensorwire.memory import Node

from ..payload.attachment import CALLS, LAST_GENERATION, RpcAttachment
from ..payload.envelope import read_mark
from ..payload.host import descriptors_are_scarce, host_id, no_way
from ..payload.janitor import JANITOR
from ..runtime.served import Caller
from ..runtime.server import AnyService
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

_NO_ROOM = TensorwireError, MemoryError, RuntimeError, OSError
_NO_ROOM_TEXT = "the server could not get memory, a thread or a descriptor for another client"
"""The errors of a process without descriptors, memory or threads left."""


class DeclinedError(Exception):
    """The server has tensorwire and gives no attachment; the text says why."""


class Registry:
    """The attachments of a server. Any thread may use it.

    Args:
        terms: of the server.
        service: carries out calls that do not come by grpcio, None if there are to be none.
    """

    def __init__(self, terms: Terms, service: AnyService | None = None) -> None:
        self._service = service
        self._terms = terms
        self._lock = threading.Lock()
        self._attachments: dict[bytes, RpcAttachment] = {}
        self._waiting: dict[bytes, Node] = {}
        self._closed = False

    def find(self, id: bytes) -> RpcAttachment | None:
        """Returns the attachment of an id."""
        return self._attachments.get(id)

    @property
    def attachments(self) -> list[RpcAttachment]:
        """The attachments that have both ends."""
        return list(self._attachments.values())

    @property
    def awaited(self) -> bool:
        """True while a client has not given back payload: perhaps it has not read it yet."""
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
    ) -> bytes:
        """Makes this end of an attachment, for the client that connects to it with its secret.

        Args:
            request: of the client.
            caller: the client, if its calls may go by the runtime.
            encrypted: the connection is; then payload stays on this host.

        Raises:
            DeclinedError: there is none for this client.
            ValueError: the request cannot be understood.
        """
        asked = decode(request)
        numbers = agreed(self._terms.messages, asked)
        wanted = asked.get("transports")
        if ATTACHMENT_VERSION not in as_list(asked.get("versions")):
            raise DeclinedError(
                f"the client knows versions {as_list(asked.get('versions'))} and this server "
                f"version {ATTACHMENT_VERSION}: use the same version of tensorwire at both ends"
            )
        near = asked.get("host") == host_id() != ""
        allowed = {each for each in self._terms.transports if each in as_list(wanted)}
        if encrypted:
            allowed &= {"shm", *self._terms.plaintext_transports}
        if not near:
            allowed.discard("shm")
        transports = [each for each in self._terms.transports if each in allowed]
        listen = "127.0.0.1" if near else self._terms.listen
        if not transports or not listen:
            raise DeclinedError(no_way(as_list(wanted), self._terms.transports, near))
        with self._lock:
            if (
                self._closed
                or len(self._attachments) + len(self._waiting) >= self._terms.limits.max_attachments
            ):
                raise DeclinedError(
                    f"{self._terms.limits.max_attachments} clients, the most that this server's "
                    "Limits allow, send payload beside messages already, or the server is "
                    "closing: raise max_attachments there"
                )
            if descriptors_are_scarce():
                raise DeclinedError(
                    "the server has most of its file descriptors in use, and keeps the rest for "
                    "connections: raise its limit (ulimit -n)"
                )
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
                    "the server does not know at which address clients reach it for payload: name "
                    f"one by listen= of tensorwire.rpc.server ({error})"
                ) from error
            except _NO_ROOM as error:
                raise DeclinedError(f"{_NO_ROOM_TEXT}: {error}") from error
            self._waiting[id] = node
        try:
            runs = asked.get("runtime") == RUNTIME_VERSION and not encrypted
            service = self._service if runs and caller is not None else None
            own = OwnMemory(node, runs=service is not None)
            threading.Thread(
                target=self._complete, name="tensorwire-rpc-attachment", daemon=True,
                args=(id, own, numbers, service, caller),
            ).start()  # fmt: skip
        except BaseException as error:
            self._give_up(id, node)
            if isinstance(error, _NO_ROOM):
                raise DeclinedError(f"{_NO_ROOM_TEXT}: {error}") from error
            raise
        JANITOR.watch(self)
        return encode(
            version=ATTACHMENT_VERSION,
            attachment=id.hex(),
            secret=secret.hex(),
            address=node.address,
            transports=transports,
            pool_bytes=self._terms.limits.pool_bytes,
            beside_bytes=max(self._terms.messages.receive_bytes, -1),
            runtime=0 if service is None else RUNTIME_VERSION,
        )

    def _complete(
        self,
        id: bytes,
        own: OwnMemory,
        numbers: dict[str, int],
        service: AnyService | None,
        caller: Caller | None,
    ) -> None:
        """Waits, in a thread of its own, until the client has connected or does not come."""
        try:
            peer = own.node.accept(CONNECT_S)
            attachment = own.join(peer, self._terms, numbers, is_client=False)
            rings = own.rings(attachment, CONNECT_S)
            if service is not None and caller is not None and rings is not None:
                attachment.runtime = end = service.attach(attachment, caller, rings)
                end.start()
            with self._lock:
                self._waiting.pop(id, None)
                if not self._closed:
                    self._attachments[id] = attachment
                    own.node.allocate(8, name=READY)
                    return
        except _NO_ROOM:
            pass  # the client gets plain gRPC
        self._give_up(id, own.node)

    def _give_up(self, id: bytes, node: Node) -> None:
        with self._lock:
            self._waiting.pop(id, None)
        node.close()

    def look(self) -> bool:
        """Forgets attachments whose client is gone. Called by the janitor."""
        with self._lock:
            for id, attachment in list(self._attachments.items()):
                if attachment.lost:
                    del self._attachments[id]
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
        for node in nodes:
            node.close()
        for attachment in attachments:
            attachment.close()


def may_be_of_a_call(mark: object) -> bool:
    """Returns whether a mark has a number that a call can have."""
    found = read_mark(mark)
    return found is not None and found[1] < CALLS and found[2] <= LAST_GENERATION
