"""Defines the messages of two ends that attach, and the terms of each for payload.

docs/internals/rpc-wire.md has the messages. Knows no gRPC objects.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tensorwire.memory.handle import split_address
from tensorwire.outside import parse_json

from ..payload.limits import Limits
from ..runtime.options import ANY_LENGTH, MessageLimits, Offer

OPEN = "/tensorwire.rpc.Attachment/Open"
"""The reserved method."""
MARK = "tensorwire-attachment-bin"
"""Key of the metadata by which a call names its attachment."""
REFUSED = "tensorwire-refused"
"""Key of the trailing metadata of a call that was refused before the servicer ran."""

ATTACHMENT_VERSION = 3
"""The version of the messages and memory of an attachment."""
RUNTIME_VERSION = 7
"""The version of the frames of `runtime`."""

CONNECT_S = 15.0
"""The time that a server may take at each step of an attachment. No call waits for it."""
READY = "ready"
"""Name of the region that a server makes when it has entered an attachment."""
_MOST_BYTES = 4096

NO_RUNTIME = Offer(None, "it is not offered on such a channel")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one end for payload.

    Attributes:
        limits: of its memory, and rules for its payload.
        transports: by which it may travel, of a Node's. Empty: not at all.
        listen: the host that clients on other hosts reach this server by; "" for none.
        plaintext_transports: by which payload of an encrypted connection may travel too.
        runtime: whether calls go by the runtime, where the other end has it too.
        retries: grpcio sends requests of the channel again by itself; an envelope is of use once.
        host: of the channel's target; see `target_host`.
        messages: the longest that a user has allowed, wherever their payload travels.
    """

    limits: Limits
    transports: tuple[str, ...]
    listen: str = ""
    plaintext_transports: tuple[str, ...] = ()
    runtime: Offer = NO_RUNTIME
    retries: bool = False
    host: str = ""
    messages: MessageLimits = ANY_LENGTH


def target_host(target: Any) -> str:
    """Returns the one host that a channel's target names; "" if it names none, or several."""
    name = target.decode(errors="replace") if isinstance(target, bytes) else str(target)
    scheme, colon, rest = name.partition(":")
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        name = rest.rpartition("/")[2]
    try:
        return split_address(name)[0]
    except ValueError:
        return ""


def encode(**values: Any) -> bytes:
    """Encodes the values that one end tells the other."""
    return json.dumps(values).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Decodes the values that the other end tells; ValueError if they cannot be understood."""
    return parse_json(data, dict[str, Any], _MOST_BYTES)


def _number(values: dict[str, Any], name: str, least: int) -> int:
    value = values.get(name)
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"the other end says {name} is {value!r}; it is a number from {least} up")
    return value


def agreed(own: MessageLimits, values: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers that two ends have agreed on, for `RpcAttachment`.

    Args:
        own: limits of messages of this end.
        values: of the other end: `pool_bytes` is the memory that this end may write into,
            `beside_bytes` the longest message that it takes with payload beside it, -1 for any.

    Raises:
        ValueError: a value is no number, or out of range.
    """
    beside = _number(values, "beside_bytes", -1) if "beside_bytes" in values else -1
    most = own.send_bytes, beside
    return {
        "lent_bytes": _number(values, "pool_bytes", 0),
        "sent_bytes": max(most) if min(most) < 0 else min(most),  # negative for no limit
        "taken_bytes": own.receive_bytes,
    }


def as_list(value: Any) -> list[Any]:
    """Returns a list that the other end tells; an empty one if the value is no list."""
    return value if isinstance(value, list) else []
