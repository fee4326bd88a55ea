"""Both sides of status: the report of a server to clients that are no workers, and its reader.

A reader connects with the job's secret and a name of its own. While one is connected, the server
writes a description of itself now and then into a region that readers read; without readers it
costs nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tensorwire.errors import TimeoutError, UnavailableError
from tensorwire.memory import Mailbox, Node, Peer, RemoteMailbox, mailbox_bytes
from tensorwire.outside import parse_json

READER = "reader-"
"""How the names of readers' Nodes begin."""

DOCTOR = "doctor-"
"""How the names of Nodes of `tensorwire doctor` begin, which measure the way to a server."""

_REGION = "status"
_MOST_BYTES = 256 << 10  # of one description
_PLACES = 2  # one more may be in the making while another one is read


def reader_name() -> str:
    """Returns a name for a reader's Node that no other one has."""
    return f"{READER}{os.getpid()}-{secrets.token_hex(4)}"


class StatusRegion:
    """The server's end. One thread at a time.

    Args:
        node: of the server.
    """

    def __init__(self, node: Node) -> None:
        size = mailbox_bytes(_MOST_BYTES, _PLACES)
        self._mailbox = Mailbox(node.allocate(size, name=_REGION, access="r"), _PLACES)

    def write(self, description: Mapping[str, Any]) -> None:
        """Replaces the description that readers see."""
        data = json.dumps(description).encode()
        if len(data) >= _MOST_BYTES:
            data = json.dumps({**description, "stores": [], "truncated": True}).encode()
        self._mailbox.post(np.frombuffer(data + b"\0", np.uint8))


def read_status(peer: Peer, reader: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """Reads a server's description of itself and its job.

    Args:
        peer: the server.
        reader: the name of this process's Node, which the answer must name.
        timeout_s: for the answer.

    Raises:
        TimeoutError: the server does not answer.
        UnavailableError: it is none, or of another version of tensorwire.
        PeerLostError: it has ended.
    """
    try:
        region = peer.region(_REGION)[: mailbox_bytes(_MOST_BYTES, _PLACES)]
    except (LookupError, ValueError):
        raise UnavailableError(
            f"{peer.name!r} at {peer.address} tells no status: it is no server of a job, or of "
            "another version of tensorwire"
        ) from None
    mailbox, deadline = RemoteMailbox(region, _PLACES), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        number, data = mailbox.latest(deadline)
        if number:
            text = data.tobytes().partition(b"\0")[0]
            found = parse_json(text, dict[str, Any], _MOST_BYTES)
            if reader in found.get("readers", ()):
                return found
        time.sleep(0.02)
    raise TimeoutError(f"{peer.name!r} at {peer.address} did not tell its status in time")
