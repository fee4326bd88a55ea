"""Process functions for test_trust.py: processes that run as another user."""

import encodings.idna  # noqa: F401  socket imports it late, when nobody may not read it any more
import os
from typing import Any

import wire
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


def attach_as_nobody(channel: Channel, address: str) -> tuple[int, bytes, bool]:
    """Gives, as user nobody, its memory to somebody else's Node.

    Returns status and text of the answer, and whether that hangs up.
    """
    with wire.dial(address) as stream:  # imports what nobody may not read
        stream.close()
    become_nobody()
    with wire.connect_shm(address) as stream:
        stream.frame(wire.LOOKUP, b"open")
        answer = stream.next_frame()
        return answer.status, answer.body, stream.hung_up()


def read_secret(channel: Channel, path: str) -> str:
    """Starts, as user nobody, a Node with a secret that only its owner may read."""
    become_nobody()
    os.environ["TENSORWIRE_SECRET_FILE"] = path
    try:
        with Node():
            return "started"
    except ValueError as error:
        return str(error)
