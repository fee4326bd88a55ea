"""Finds grpcio's own factories, also where a program has replaced them by tensorwire's.

A program may change over by `grpc.insecure_channel = tensorwire.rpc.insecure_channel`, or by a
function that calls it. The channel within ours is then still to be one of grpcio.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

_MODULES = {"": grpc, "aio.": grpc.aio}
_ORIGINALS: dict[str, Callable[..., Any]] = {
    prefix + name: getattr(module, name)
    for prefix, module in _MODULES.items()
    for name in ("insecure_channel", "secure_channel", "server")
}
_MAKING: ContextVar[str] = ContextVar("tensorwire_rpc_making", default="")


def make(name: str, *given: Any) -> Any:
    """Calls grpcio's factory, which is looked up now: others may have wrapped it.

    Args:
        name: of the factory, with "aio." before a name of `grpc.aio`.
        given: its arguments.
    """
    prefix, _, last = name.rpartition(".")
    factory = getattr(_MODULES[prefix and prefix + "."], last)
    token = _MAKING.set(name)
    try:
        return factory(*given)
    finally:
        _MAKING.reset(token)


def original(name: str) -> Callable[..., Any] | None:
    """Returns the factory of grpcio if `make` has just called ours of this name; otherwise None."""
    return _ORIGINALS[name] if _MAKING.get() == name else None
