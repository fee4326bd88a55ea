"""Runs the cooperating end of a measurement: answers signals, lends memory, opens raw sockets.

Memory is leased from it as from any Node, so writes and reads need nothing of this module. A client
makes itself known by a region in its own Node; each connection gets a dialogue and a thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from tensorwire.aside import put_output_aside
from tensorwire.bench.operations import pong
from tensorwire.bench.raw_socket import RawServer
from tensorwire.doctor import facts
from tensorwire.doctor.dialogue import (
    AREA_BYTES,
    CLIENT_REGION,
    RAW_PATIENCE_S,
    SERVER_REGION,
    Dialogue,
)
from tensorwire.errors import ClosedError, PeerLostError, TensorwireError, TimeoutError
from tensorwire.membership.status import DOCTOR
from tensorwire.memory import Node, Peer
from tensorwire.memory.bandwidth import interface_with
from tensorwire.memory.handle import split_address

_MAX_CLIENTS = 16
_MAX_PINGS = 100_000
_QUOTA_BYTES = 1 << 30
_MOST_RAW_BYTES = 64 << 20

Say = Callable[[str], None]


class Doctor:
    """A Node that helps others to measure; `close` ends it.

    Raises:
        ValueError, UnavailableError, BusyError: as for `Node`.
    """

    def __init__(self, listen: str = "127.0.0.1:0", say: Say = lambda line: None) -> None:
        self.node = Node(
            f"{DOCTOR}{os.getpid()}",
            listen=listen,
            quota_bytes=_QUOTA_BYTES,
            max_peers=_MAX_CLIENTS,
        )
        self._host = split_address(listen)[0]
        self._say = say
        self._facts = facts.read().to_json()
        self._threads: list[threading.Thread] = []
        self._sign = self.node.allocate(64, name=SERVER_REGION, access="r")

    @property
    def address(self) -> str:
        """The address that the other end needs."""
        return self.node.address

    def run(self) -> None:
        """Serves until `close`, or until an exception such as KeyboardInterrupt."""
        while True:
            try:
                peer = self.node.accept(0.5)
            except TimeoutError:
                continue
            except ClosedError:
                return
            thread = threading.Thread(target=self._attend, args=(peer,), daemon=True)
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]
            thread.start()

    def close(self) -> None:
        """Ends everything; clients see this side as lost. Idempotent."""
        self.node.close()
        for thread in self._threads:
            thread.join(5)

    def _attend(self, peer: Peer) -> None:
        """Introduces itself to a client, then answers until one of the two leaves."""
        try:
            theirs = peer.region(CLIENT_REGION)
        except (LookupError, TensorwireError):
            return  # somebody who only measures what needs no help, or is gone already
        self._say(f"{peer.name} measures by {peer.path.transport}")
        try:
            with (
                contextlib.closing(RawServer(self._host, RAW_PATIENCE_S, _MOST_RAW_BYTES)) as raw,
                self.node.allocate(AREA_BYTES) as mine,
            ):
                dialogue = Dialogue(mine, peer)
                dialogue.answer_to(theirs)
                dialogue.send({"handle": mine.handle().to_bytes().hex(), "facts": self._facts})
                while True:
                    _answer(dialogue, raw, dialogue.receive(timeout_s=None))
        except (PeerLostError, ClosedError):
            pass  # the usual end
        except (TensorwireError, ValueError) as error:
            self._say(f"{peer.name}: {error}")
            peer.close()
        self._say(f"{peer.name} is done")


def _answer(dialogue: Dialogue, raw: RawServer, request: dict[str, Any]) -> None:
    """Does the requests of a client.

    Raises:
        PeerLostError, ClosedError: the client left, or this Node ended.
        ValueError, TimeoutError: it does not keep to the protocol.
    """
    kind = request.get("do")
    if kind == "pong":
        first, count = request.get("first"), request.get("count")
        if not (isinstance(first, int) and isinstance(count, int) and 0 < first < 1 << 60):
            raise ValueError(f"first is {first!r} and count {count!r}, not numbers from 1 up")
        if not 0 < count <= _MAX_PINGS:
            raise ValueError(f"count is {count}, not a number from 1 to {_MAX_PINGS}")
        dialogue.send({})
        pong(*dialogue.ping_words, range(first, first + count), dialogue.peer, timeout_s=10.0)
    elif kind == "raw":
        try:
            port, token = raw.listen(str(request.get("mode")), int(request["bytes"]))
            dialogue.send({"port": port, "token": token})
        except (OSError, ValueError, KeyError, TypeError) as error:
            dialogue.send({"error": f"no raw socket: {error}"})
    elif kind == "interface":
        dialogue.send({"name": _interface_of(str(request.get("host")))})
    else:
        dialogue.send({"error": f"this doctor does not know {str(kind)[:40]!r}"})


def _interface_of(host: str) -> str | None:
    """Returns the interface of this machine that has the address by which a client reached it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        return None
    return interface_with(str(found[0][4][0]).partition("%")[0])


def main() -> None:
    """Serves a doctor that is the parent of this process, until its end of standard input closes.

    Prints the address as its first line.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends it in order
    put_output_aside()
    doctor = Doctor()
    print(doctor.address, flush=True)

    def watch() -> None:
        sys.stdin.buffer.read()
        doctor.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    doctor.run()
    watcher.join()


if __name__ == "__main__":
    main()
