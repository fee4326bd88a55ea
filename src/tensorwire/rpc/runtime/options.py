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
# Options of connections by HTTP/2 alone: they change no result of a call.
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
    """An offer of the runtime by one end, or the reason for none.

    Attributes:
        limits: of messages; None: calls do not use the runtime.
        reason: why they do not.
    """

    limits: MessageLimits | None
    reason: str = ""


Options = Iterable[tuple[str | bytes, Any]] | None


def named(options: Options) -> dict[str, Any]:
    """Returns the values of options by their names; the last of a name counts."""
    return {n.decode() if isinstance(n, bytes) else n: value for n, value in options or ()}


def retries(options: Options) -> bool:
    """Returns whether grpcio sends requests again, by the service config of the channel."""
    given = named(options)
    config = given.get("grpc.service_config", "")
    config = config.decode(errors="replace") if isinstance(config, bytes) else str(config)
    return '"retryPolicy"' in config and given.get("grpc.enable_retries", 1) != 0


def kept(values: Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Returns options or interceptors as a tuple, to be read more than once."""
    return None if values is None else tuple(values)


def roomy(options: Options, pool_bytes: int) -> tuple[tuple[str | bytes, Any], ...]:
    """Returns options under which grpcio takes messages as long as payload beside them may be.

    So a message may also come before the attachment is there. A limit that the user has named
    stays.
    """
    given = tuple(options or ())
    if _RECEIVE in named(given):
        return given
    most = min(max(pool_bytes, _DEFAULT_RECEIVE_BYTES), _MOST_BYTES)
    return *given, (_RECEIVE, most)


def wanted(runtime: bool | None) -> bool:
    """Returns the user's choice for the runtime: the argument, else TENSORWIRE_RPC.

    Raises:
        ValueError: the argument is neither a bool nor None, or the variable has another value than
            "runtime" and "attachments".
    """
    if runtime is not None:
        if not isinstance(runtime, bool):
            raise ValueError(f"runtime is True, False or None, not {runtime!r}")
        return runtime
    value = os.environ.get("TENSORWIRE_RPC", "")
    if value not in ("", "runtime", "attachments"):
        raise ValueError(f'TENSORWIRE_RPC is "runtime" or "attachments", not {value!r}')
    return value == "runtime"


def named_limits(options: Options) -> MessageLimits:
    """Returns the limits of messages that a user has named; a limit without a name is -1."""
    found = [named(options).get(name) for name in (_SEND, _RECEIVE)]
    # grpcio complains of a value that is no number.
    return MessageLimits(*(each if isinstance(each, int) else -1 for each in found))


def _is_gevent() -> bool:
    """Returns whether greenlets call here; a wait in the core would stop all of them."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and any(map(monkey.is_module_patched, ("threading", "socket"))):
        return True
    cython = sys.modules.get("grpc._cython.cygrpc")
    return bool(getattr(cython, "g_gevent_activated", False))


def offer(runtime: bool | None, options: Options, compression: Any) -> Offer:
    """Returns the offer of an end whose user gave these options.

    Raises:
        ValueError: see `wanted`.
    """
    if not wanted(runtime):
        return Offer(None, "it was not asked for (runtime=True, or TENSORWIRE_RPC=runtime)")
    if compression is not None:
        return Offer(None, "messages are to be compressed")
    if _is_gevent():
        text = "gevent has patched this process, and a call that waits would stop all its greenlets"
        return Offer(None, text)
    given = named(options)
    for key in given:
        if key not in (_SEND, _RECEIVE) and not key.startswith(_OF_CONNECTIONS):
            return Offer(None, f"it does not know the option {key}")
    send, receive = given.get(_SEND, -1), given.get(_RECEIVE, _DEFAULT_RECEIVE_BYTES)
    return Offer(MessageLimits(int(send), int(receive)))
