"""A relay that passes a handshake on message by message, so that a test can stop it anywhere.

The sizes are those of docs/internals/wire.md.
"""

import socket
from types import TracebackType

HELLO, CHALLENGE, PROOF, WELCOME, CHOICE, MEETING = 160, 160, 40, 160, 16, 16

# The messages of a handshake: who sends, how many bytes.
MESSAGES = (
    ("client", HELLO),
    ("server", CHALLENGE),
    ("client", PROOF),
    ("server", WELCOME),
    ("client", CHOICE),
)


class Relay:
    """Listens for one client and passes bytes between it and the server, when it is told to."""

    def __init__(self, server_address: str) -> None:
        host, _, port = server_address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = (host, int(port))
        self._sockets: dict[str, socket.socket] = {}

    def join(self) -> None:
        """Waits for the client and connects to the server."""
        self._listener.settimeout(10)
        self._sockets["client"], _ = self._listener.accept()
        self._sockets["server"] = socket.create_connection(self._server)
        for each in self._sockets.values():
            each.settimeout(10)

    def receive(self, sender: str, size: int) -> bytes:
        """Takes one message, and keeps it from the other side."""
        data = b""
        while len(data) < size:
            part = self._sockets[sender].recv(size - len(data))
            assert part, f"the {sender} hung up after {len(data)} of {size} bytes"
            data += part
        return data

    def send(self, receiver: str, data: bytes) -> None:
        """Sends a message to one side."""
        self._sockets[receiver].sendall(data)

    def forward(self, count: int) -> None:
        """Passes the first `count` messages on."""
        for sender, size in MESSAGES[:count]:
            receiver = "server" if sender == "client" else "client"
            self.send(receiver, self.receive(sender, size))

    def ended(self, side: str) -> bool:
        """Waits for one side to hang up; what it still sends is thrown away."""
        try:
            while self._sockets[side].recv(4096):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def hang_up(self) -> None:
        """Ends both connections and the listening, as the system does when the server dies."""
        self._listener.close()
        for each in self._sockets.values():
            each.close()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hang_up()
