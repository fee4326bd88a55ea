"""Process functions for test_trust.py: processes that run as another user."""

import encodings.idna  # noqa: F401  socket imports it late, when nobody may not read it any more
import os
import socket
from typing import Any

from actor import Actor, serve

from tensorwire import Node
from tensorwire.testing import Channel

NOBODY = 65534


def become_nobody() -> None:
    """Gives up root, for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def nobody(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: an Actor that runs as nobody."""
    become_nobody()
    serve(channel, Actor(options))


def knock(channel: Channel, incarnation: int) -> tuple[str, bytes]:
    """As nobody, talks to the unix socket of somebody else's Node without looking who it is."""
    become_nobody()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(10)
        stream.connect(f"\0tensorwire-{incarnation:016x}")
        try:
            stream.sendall(b"TWIREv01" + bytes(152))
            return "answered", stream.recv(4096)
        except (BrokenPipeError, ConnectionResetError):
            return "hung up", b""


def read_secret(channel: Channel, path: str) -> str:
    """As nobody, starts a Node with a secret that only its owner may read."""
    become_nobody()
    os.environ["TENSORWIRE_SECRET_FILE"] = path
    try:
        with Node():
            return "started"
    except ValueError as error:
        return str(error)
