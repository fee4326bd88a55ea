"""Speaks the wire protocol of docs/internals/wire.md in plain Python, for tests; it can also lie.

Nothing here uses tensorwire. Layouts are tables of (offset, size, field), which test_wire_layout
compares with the document; everything is sent and received through them.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

PATIENCE_S = 20.0

# ---- layouts

Fields = dict[str, tuple[int, int, Any]]  # name: (offset, size, what is there by default)

HELLO: Fields = {
    "magic": (0, 8, b"TWIREv01"),
    "version": (8, 2, 3),
    "kind": (10, 1, 1),
    "has_secret": (11, 1, 0),
    "transports": (12, 4, 3),
    "incarnation": (16, 8, 0x7177),
    "reserved": (24, 8, 0),
    "nonce": (32, 32, b""),
    "host": (64, 16, b""),
    "pid": (80, 4, 0),
    "port": (84, 2, 0),
    "name_bytes": (86, 1, 0),
    "reserved2": (87, 1, 0),
    "name": (88, 72, b""),
}
PROOF: Fields = {"proof": (0, 32, b""), "reserved": (32, 8, 0)}
WELCOME: Fields = {
    "status": (0, 2, 0),
    "message_bytes": (2, 1, 0),
    "reserved": (3, 13, b""),
    "proof": (16, 32, b""),
    "message": (48, 112, b""),
}
CHOICE: Fields = {"transport": (0, 4, 2), "reserved": (4, 4, 0), "socket": (8, 8, 0)}
MEETING: Fields = {"status": (0, 2, 0), "reserved": (2, 6, b""), "socket": (8, 8, 0)}
HEADER: Fields = {
    "magic": (0, 1, 0x54),
    "type": (1, 1, 0),
    "flags": (2, 1, 0),
    "reserved": (3, 1, 0),
    "status": (4, 2, 0),
    "reserved2": (6, 2, 0),
    "reserved3": (8, 4, 0),
    "region": (12, 4, 0),
    "generation": (16, 8, 0),
    "offset": (24, 8, 0),
    "length": (32, 8, 0),
    "transfer": (40, 8, 0),
    "total": (48, 8, 0),
    "value": (56, 8, 0),
}
PAGE: Fields = {
    "magic": (0, 8, b"TWpage01"),
    "incarnation": (8, 8, 0),
    "reserved": (16, 48, b""),
    "armed": (64, 4, 0),
    "reserved2": (68, 60, b""),
    "generations": (128, 131072, b""),
}
SIZES = {
    "Hello": 160, "Proof": 40, "Welcome": 160, "Choice": 16, "Meeting": 16, "Header": 64,
    "Page": 131200,
}  # fmt: skip
LAYOUTS = {
    "Hello": HELLO, "Proof": PROOF, "Welcome": WELCOME, "Choice": CHOICE,
    "Meeting": MEETING, "Header": HEADER, "Page": PAGE,
}  # fmt: skip

WRITE, READ, DATA, SIGNAL, FETCH_ADD, DONE = 1, 2, 3, 4, 5, 6
ALLOCATE, LOOKUP, FREE, GRANT, ATTACH, GOODBYE, KEY, REVOKE = 7, 8, 9, 10, 11, 12, 13, 14
LAST, READABLE, WRITABLE = 1, 2, 4
OK, CLOSED, STALE, BUSY, UNAVAILABLE, INVALID, PERMISSION, NOT_FOUND = 0, 1, 3, 4, 6, 7, 8, 9
CLIENT, BUSY_KIND, CHALLENGE = 1, 2, 3
SHM_BIT, TCP_BIT = 1, 2
MAX_CHUNK_BYTES, MAX_BODY_BYTES = 1 << 20, 1024
U64 = (1 << 64) - 1


def encode(layout: str, **values: Any) -> bytes:
    """Bytes of a message; a field that is not named has its default."""
    fields = LAYOUTS[layout]
    assert values.keys() <= fields.keys(), f"{values.keys() - fields.keys()} not in {layout}"
    message = bytearray(SIZES[layout])
    for name, (offset, size, default) in fields.items():
        value = values.get(name, default)
        data = value if isinstance(value, bytes) else value.to_bytes(size, "little")
        assert len(data) <= size, f"{name} is longer than {size} bytes"
        message[offset : offset + len(data)] = data
    return bytes(message)


def decode(layout: str, message: bytes) -> dict[str, Any]:
    """Fields of a message: bytes where the default is bytes, else numbers."""
    assert len(message) == SIZES[layout]
    result: dict[str, Any] = {}
    for name, (offset, size, default) in LAYOUTS[layout].items():
        data = message[offset : offset + size]
        result[name] = data if isinstance(default, bytes) else int.from_bytes(data, "little")
    return result


# ---- handshake


def host_id() -> bytes:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return hashlib.sha256(b"tensorwire host" + boot_id).digest()[:16]


def hello(secret: bytes = b"", name: bytes = b"client", **values: Any) -> bytes:
    values = {"nonce": os.urandom(32), "host": host_id(), "pid": os.getpid(), **values}
    return encode(
        "Hello", **{"has_secret": int(bool(secret)), "name_bytes": len(name), "name": name} | values
    )


@dataclass(frozen=True)
class Keys:
    """The keys that both sides derive from a secret and the two Hellos."""

    client: bytes
    server: bytes

    @classmethod
    def derive(cls, key: bytes, client_hello: bytes, server_hello: bytes) -> Keys:
        # HMAC cannot tell such keys from others.
        told_apart = key.endswith(b"\0") or len(key) > 64
        length = struct.pack("<Q", len(key)) if told_apart else b""

        def mac(role: bytes) -> bytes:
            return hmac.digest(key, role + client_hello + server_hello + length, "sha256")

        return cls(
            mac(b"tensorwire client proof"),
            mac(b"tensorwire server proof"),
        )


class HungUp(Exception):
    """The other side closed the stream."""


@dataclass
class Frame:
    """A frame that came, with its descriptors; the Wire closes them."""

    header: dict[str, Any]
    body: bytes
    descriptors: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return self.header[name]


class Wire:
    """One connected stream, on shm with a socket for descriptors beside it.

    Every wait has a limit; `close` closes also what came with frames.
    """

    MAX_DESCRIPTORS: ClassVar = 16

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        stream.settimeout(PATIENCE_S)
        self.incarnation = 0  # of the other side, after the handshake
        self.beside: socket.socket | None = None  # on shm
        self._descriptors: list[int] = []

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.stream.close()
        if self.beside is not None:
            self.beside.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def send(self, data: bytes) -> None:
        """Sends all of it.

        Raises:
            HungUp: the other side does not take it any more.
        """
        try:
            self.stream.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise HungUp from error

    def receive(self, size: int) -> bytes:
        """Receives exactly `size` bytes.

        Raises:
            HungUp: the stream ended.
        """
        data = b""
        while len(data) < size:
            more = self._receive_some(size - len(data))
            if not more:
                raise HungUp
            data += more
        return data

    def _receive_some(self, size: int) -> bytes:
        try:
            return self.stream.recv(size)
        except ConnectionResetError:
            return b""

    def pass_descriptors(self, message: bytes, descriptors: Sequence[int]) -> None:
        """Sends a message with descriptors; the frame that announces it is another matter.

        Raises:
            HungUp: the other side has closed its socket.
        """
        assert self.beside is not None
        try:
            socket.send_fds(self.beside, [message], list(descriptors))
        except (ConnectionRefusedError, BrokenPipeError, ConnectionResetError) as error:
            raise HungUp from error

    def _take_descriptors(self) -> list[int]:
        assert self.beside is not None
        _, came, _, _ = socket.recv_fds(self.beside, 64, self.MAX_DESCRIPTORS)
        self._descriptors += came
        return came

    def frame(self, type_: int, body: bytes = b"", fds: Sequence[int] = (), **values: Any) -> None:
        """Sends a frame; its length is the body's unless it is given."""
        header = encode("Header", **{"type": type_, "length": len(body)} | values)
        if fds:
            self.pass_descriptors(header, fds)
        self.send(header + body)

    def attach(self, page_fd: int, bell: int, **values: Any) -> None:
        """Sends the page and the doorbell of a Node."""
        incarnation = values.get("incarnation", HELLO["incarnation"][2])
        self.frame(ATTACH, fds=[page_fd, bell], generation=incarnation)

    def next_frame(self) -> Frame:
        header = decode("Header", self.receive(SIZES["Header"]))
        size = 0 if header["type"] == READ else header["length"]
        usable = header["type"] == ATTACH or header["flags"] & (READABLE | WRITABLE)
        brings = header["type"] in (ATTACH, GRANT) and header["status"] == OK and usable
        descriptors = self._take_descriptors() if brings and self.beside is not None else []
        return Frame(header, self.receive(size), descriptors)

    def let_go(self, frame: Frame) -> None:
        """Closes the descriptors of a frame before the end."""
        for descriptor in frame.descriptors:
            self._descriptors.remove(descriptor)
            os.close(descriptor)
        frame.descriptors.clear()

    def answer(self, type_: int | None = None) -> Frame:
        """The next frame that is not the other side's kAttach."""
        while (frame := self.next_frame()).type == ATTACH:
            pass
        assert type_ is None or frame.type == type_, frame
        return frame

    def ask(self, type_: int, body: bytes = b"", **values: Any) -> Frame:
        self.frame(type_, body, **values)
        return self.answer()

    def hung_up(self, within_s: float = PATIENCE_S) -> bool:
        """Tells whether the other side closes the stream in time; drops what it still sends."""
        deadline = time.monotonic() + within_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self.stream.settimeout(left_s)
                if not self._receive_some(1 << 20):
                    return True
            return False
        except TimeoutError:
            return False
        finally:
            self.stream.settimeout(PATIENCE_S)

    def quiet(self, for_s: float) -> bool:
        """Tells whether nothing comes, not even the end, for so long."""
        return not select.select([self.stream], [], [], for_s)[0]

    # ---- the client's half

    def greet(self, hello_bytes: bytes) -> bytes:
        """Sends a Hello, returns the server's."""
        self.send(hello_bytes)
        return self.receive(SIZES["Hello"])

    def prove(self, proof: bytes) -> dict[str, Any]:
        """Sends a proof, returns the Welcome."""
        self.send(encode("Proof", proof=proof))
        welcome = decode("Welcome", self.receive(SIZES["Welcome"]))
        welcome["message"] = welcome["message"][: welcome["message_bytes"]].decode()
        return welcome

    def handshake(self, key: bytes, hello_bytes: bytes) -> None:
        """Everything up to the Welcome."""
        server_hello = self.greet(hello_bytes)
        self.incarnation = decode("Hello", server_hello)["incarnation"]
        keys = Keys.derive(key, hello_bytes, server_hello)
        welcome = self.prove(keys.client)
        assert welcome["status"] == OK, welcome
        assert welcome["proof"] == keys.server, "the server does not know the secret"

    def meet(self) -> None:
        """Chooses shm, and makes two sockets for descriptors meet."""
        self.beside, name = unix_socket()
        self.send(encode("Choice", transport=SHM_BIT, socket=name))
        meeting = decode("Meeting", self.receive(SIZES["Meeting"]))
        assert meeting["status"] == OK, meeting
        self.beside.connect(unix_name(meeting["socket"]))


def dial(address: str) -> Wire:
    """A TCP connection, before the handshake."""
    host, _, port = address.rpartition(":")
    stream = socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(stream)


def unix_name(name: int) -> str:
    return f"\0tensorwire-{name:016x}"


def unix_socket(connect_to: int | None = None) -> tuple[socket.socket, int]:
    """A socket for descriptors, and its name."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.settimeout(PATIENCE_S)
    if connect_to is not None:
        made.connect(unix_name(connect_to))
    name = int.from_bytes(os.urandom(8), "little") | 1
    made.bind(unix_name(name))
    return made, name


def connect_tcp(address: str, secret: bytes = b"", **values: Any) -> Wire:
    """A stream that carries frames over TCP."""
    wire = dial(address)
    wire.handshake(secret, hello(secret, **values))
    wire.send(encode("Choice"))
    return wire


def connect_shm(address: str, secret: bytes = b"", attach: bool = True, **values: Any) -> Wire:
    """A stream with a socket for descriptors beside it; `attach` also sends a good kAttach."""
    wire = dial(address)
    wire.handshake(secret, hello(secret, **values))
    wire.meet()
    if attach:
        with (
            page(values.get("incarnation", HELLO["incarnation"][2])) as page_fd,
            doorbell() as bell,
        ):
            wire.attach(page_fd, bell, **values)
    return wire


def connect(transport: str, address: str, secret: bytes = b"", **values: Any) -> Wire:
    return {"tcp": connect_tcp, "shm": connect_shm}[transport](address, secret, **values)


# ---- descriptors

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextlib.contextmanager
def memory(size: int, content: bytes = b"", seals: int = SEALS) -> Iterator[int]:
    """A memfd."""
    descriptor = os.memfd_create("wire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, size)
        os.pwrite(descriptor, content, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def page(
    incarnation: int, generations: Iterable[int] = (), armed: int = 0, **values: Any
) -> Iterator[int]:
    """The page of a Node."""
    words = array.array("Q", generations).tobytes()
    content = encode("Page", incarnation=incarnation, armed=armed, generations=words, **values)
    with memory(-len(content) // 4096 * -4096, content) as descriptor:
        yield descriptor


@contextlib.contextmanager
def doorbell() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---- the server's half


class Wires(list[Wire]):
    """Many streams, closed at the end of a block."""

    def __enter__(self) -> Wires:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self:
            each.close()


class FakeNode:
    """A listener that speaks the protocol to every client and then does as the test says.

    `claim` changes fields of the Hellos that it sends from then on.
    """

    def __init__(
        self,
        secret: bytes = b"",
        incarnation: int = 0x5EED,
        patience_s: float = PATIENCE_S,
        **values: Any,
    ) -> None:
        self.secret = secret
        self.incarnation = incarnation
        self._values = {"transports": TCP_BIT, "incarnation": incarnation, **values}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(patience_s)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FakeNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def claim(self, **values: Any) -> None:
        self._values |= values

    def accept(self) -> Wire:
        """A connection, before the handshake."""
        return Wire(self._listener.accept()[0])

    def challenge(self, client_hello: bytes) -> bytes:
        return hello(self.secret, **{"kind": CHALLENGE, "name": b"fake", **self._values})

    def welcome(self, wire: Wire, key: bytes) -> None:
        """Takes a client through, up to the Welcome."""
        client_hello = wire.receive(SIZES["Hello"])
        wire.incarnation = decode("Hello", client_hello)["incarnation"]
        server_hello = self.challenge(client_hello)
        wire.send(server_hello)
        keys = Keys.derive(key, client_hello, server_hello)
        proof = decode("Proof", wire.receive(SIZES["Proof"]))["proof"]
        assert proof == keys.client
        wire.send(encode("Welcome", proof=keys.server))

    def accept_tcp(self) -> Wire:
        """A client that chose TCP; frames follow."""
        wire = self.accept()
        self.welcome(wire, self.secret)
        assert decode("Choice", wire.receive(SIZES["Choice"]))["transport"] == TCP_BIT
        return wire

    def accept_shm(self) -> Wire:
        """A client that chose shm; frames follow. Needs `transports` with shm."""
        wire = self.accept()
        self.welcome(wire, self.secret)
        choice = decode("Choice", wire.receive(SIZES["Choice"]))
        assert choice["transport"] == SHM_BIT
        wire.beside, name = unix_socket(choice["socket"])
        wire.send(encode("Meeting", socket=name))
        return wire
