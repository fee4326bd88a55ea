"""Decides which options of a channel or server the runtime keeps, so that it may carry calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_DEFAULT_RECEIVE_BYTES = 4 << 20
_MOST_BYTES = (1 << 31) - 1
_SEND, _RECEIVE = "grpc.max_send_message_length", "grpc.max_receive_message_length"
# Of connections by HTTP/2 alone: nothing that a call could tell.
_OF_CONNECTIONS = (
    "grpc.http2.",
    "grpc.keepalive_",
    "grpc.so_reuseport",
    "grpc.optimization_target",
    "grpc.use_local_subchannel_pool",
    "grpc.primary_user_agent",
    "grpc.secondary_user_agent",
    "grpc.initial_reconnect_backoff_ms",
    "grpc.min_reconnect_backoff_ms",
    "grpc.max_reconnect_backoff_ms",
)


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """The longest message that an end sends and takes, in bytes as it travels; -1 for no limit."""

    send_bytes: int = -1
    receive_bytes: int = _DEFAULT_RECEIVE_BYTES


ANY_LENGTH = MessageLimits(-1, -1)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one end says of the runtime.

    Attributes:
        limits: of messages; None: calls do not go by it.
        reason: why they do not.
    """

    limits: MessageLimits | None
    reason: str = ""


def retries(options: Iterable[tuple[str | bytes, Any]] | None) -> bool:
    """Whether a channel's requests are sent again by grpcio, as its service config says."""
    given = {n.decode() if isinstance(n, bytes) else n: value for n, value in options or ()}
    config = given.get("grpc.service_config", "")
    config = config.decode(errors="replace") if isinstance(config, bytes) else str(config)
    return '"retryPolicy"' in config and given.get("grpc.enable_retries", 1) != 0


def kept(values: Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Options or interceptors for more than one reader, also where a user gave a generator."""
    return None if values is None else tuple(values)


def roomy(
    options: Iterable[tuple[str | bytes, Any]] | None, pool_bytes: int
) -> tuple[tuple[str | bytes, Any], ...]:
    """Returns options under which grpcio takes messages as long as what may travel beside.

    So it makes no difference whether a message comes before the attachment is there. A limit that
    the user has named stays.
    """
    given = tuple(options or ())
    if any(name in (_RECEIVE, _RECEIVE.encode()) for name, _ in given):
        return given
    most = min(max(pool_bytes, _DEFAULT_RECEIVE_BYTES), _MOST_BYTES)
    return *given, (_RECEIVE, most)


def wanted(runtime: bool | None) -> bool:
    """Whether the user wants it: what he says, else TENSORWIRE_RPC.

    Raises:
        ValueError: he says neither yes nor no, or the variable has another value than "runtime" and
            "attachments".
    """
    if runtime is not None:
        if not isinstance(runtime, bool):
            raise ValueError(f"runtime is True, False or None, not {runtime!r}")
        return runtime
    value = os.environ.get("TENSORWIRE_RPC", "")
    if value not in ("", "runtime", "attachments"):
        raise ValueError(f'TENSORWIRE_RPC is "runtime" or "attachments", not {value!r}')
    return value == "runtime"


def named_limits(options: Iterable[tuple[str | bytes, Any]] | None) -> MessageLimits:
    """Returns the limits of messages that a user has named; what is not named has none."""
    found = {_SEND: -1, _RECEIVE: -1}
    for name, value in options or ():
        key = name.decode() if isinstance(name, bytes) else name
        if key in found and isinstance(value, int):  # of others grpcio says what is wrong
            found[key] = value
    return MessageLimits(found[_SEND], found[_RECEIVE])


def _is_gevent() -> bool:
    """Whether greenlets call here, all of which a wait in the core would stop."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and any(map(monkey.is_module_patched, ("threading", "socket"))):
        return True
    cython = sys.modules.get("grpc._cython.cygrpc")
    return bool(getattr(cython, "g_gevent_activated", False))


def offer(
    runtime: bool | None,
    options: Iterable[tuple[str | bytes, Any]] | None,
    compression: Any,
) -> Offer:
    """What an end offers whose user gave these options.

    Raises:
        ValueError: see `wanted`.
    """
    if not wanted(runtime):
        return Offer(None, "it was not asked for (runtime=True, or TENSORWIRE_RPC=runtime)")
    if compression is not None:
        return Offer(None, "messages are to be compressed")
    if _is_gevent():
        return Offer(
            None,
            "gevent has patched this process, and a call that waits would stop all its greenlets",
        )
    send, receive = -1, _DEFAULT_RECEIVE_BYTES
    for name, value in options or ():
        key = name.decode() if isinstance(name, bytes) else name
        if key == _SEND:
            send = int(value)
        elif key == _RECEIVE:
            receive = int(value)
        elif not key.startswith(_OF_CONNECTIONS):
            return Offer(None, f"it does not know the option {key}")
    return Offer(MessageLimits(send, receive))
