"""Puts somebody between two Nodes who does to each record of TLS what a test says.

A record is a type, two bytes of version, two of length, and so many bytes (RFC 8446, 5.1).
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

CHANGE_CIPHER_SPEC = 20  # a record without a meaning, for old devices between the ends

# Given who sends, the number of the record among all of that side, and its bytes; returns what is
# passed on, or None to end both connections.
Passed = list[bytes] | None
Act = Callable[[str, int, bytes], Passed]


def pass_on(sender: str, number: int, record: bytes) -> Passed:
    """Changes nothing."""
    return [record]


class Middle:
    """Passes connections on to a server, record by record.

    Attributes:
        address: where clients connect.
        seen: all bytes of both directions.
        records: how many came from each side.
        connections: how many came.
        harmed: the act changed something.
    """

    def __init__(self, server_address: str, act: Act = pass_on) -> None:
        host, _, port = server_address.rpartition(":")
        self._server = (host, int(port))
        self._act = act
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.records = {"client": 0, "server": 0}
        self.connections = 0
        self.harmed = False
        self._held: dict[str, list[bytes]] = {"client": [], "server": []}
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            for sender, source, sink in (("client", client, server), ("server", server, client)):
                thread = threading.Thread(target=self._pump, args=(sender, source, sink))
                self._threads.append(thread)
                thread.start()

    def _pump(self, sender: str, source: socket.socket, sink: socket.socket) -> None:
        stream = source.makefile("rb")
        with contextlib.suppress(OSError, ValueError):
            while head := stream.read(5):
                record = head + stream.read(int.from_bytes(head[3:5], "big"))
                self.seen += record
                number = self.records[sender]
                self.records[sender] += 1
                passed = self._act(sender, number, record)
                self.harmed |= passed != [record]
                if passed is None:
                    break
                for each in passed:
                    sink.sendall(each)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()


@contextlib.contextmanager
def between(server_address: str, act: Act = pass_on) -> Iterator[Middle]:
    """A Middle for a block."""
    middle = Middle(server_address, act)
    try:
        yield middle
    finally:
        middle.close()


def attack(how: str, sender: str, number: int) -> Act:
    """Does something to one record of one side: its bytes, its place, or the end of the stream."""
    held: list[bytes] = []

    def act(who: str, now: int, record: bytes) -> Passed:
        if who != sender or now < number or record[0] == CHANGE_CIPHER_SPEC:
            return [record]
        if now > number:
            return [record, *(held.pop() for _ in range(len(held)))]
        changed = bytearray(record)
        if how == "flip":
            changed[5 + (len(record) - 5) // 2] ^= 0x10
            return [bytes(changed)]
        if how == "flip the tag":
            changed[-1] ^= 1
            return [bytes(changed)]
        if how == "flip the length":
            changed[4] ^= 1
            return [bytes(changed)]
        if how == "drop":
            return []
        if how == "repeat":
            return [record, record]
        if how == "reorder":
            held.append(record)
            return []
        if how == "end":
            return None
        assert how == "truncate", how
        held.append(b"")
        return [record[: len(record) // 2]]

    return act
