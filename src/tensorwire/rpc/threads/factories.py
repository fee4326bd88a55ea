"""Makes channels and servers like grpcio's factories, with keywords for payload."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

from ..attach.negotiation import NewClient
from ..attach.registry import Registry
from ..attach.sharing import ChannelShare, share
from ..attach.terms import CONNECT_S, NO_RUNTIME, OPEN, Terms, target_host
from ..payload.limits import Limits, given_limits
from ..runtime.client import RuntimeClient
from ..runtime.options import Offer, kept, named, named_limits, offer, retries, roomy
from .calls import explain
from .channel import RpcChannel
from .originals import make, original
from .server import RpcServer, ServerPorts

_TRANSPORTS = "TENSORWIRE_TRANSPORTS"
_ALONE = "grpc.use_local_subchannel_pool"
"""An option of channels that do not share their connections, so neither an attachment."""


def insecure_channel(
    target: str,
    options: Any = None,
    compression: Any = None,
    *,
    limits: Limits | None = None,
    transports: tuple[str, ...] | None = None,
    runtime: bool | None = None,
) -> RpcChannel:
    """Makes a channel like `grpc.insecure_channel`.

    Args:
        target: as for grpcio.
        options: as for grpcio.
        compression: as for grpcio.
        limits: of payload: memory, sizes, waiting. Default: `Limits()`.
        transports: by which payload may travel; () for not at all. Default: "shm" and "tcp",
            without those that TENSORWIRE_TRANSPORTS leaves out.
        runtime: calls go by the runtime instead of HTTP/2, where the server has it too. None:
            they do if the environment variable TENSORWIRE_RPC is "runtime".

    Returns:
        A `grpc.Channel`. Its `payload` and `runtime` tell how messages travel
        at present (docs/rpc.md).

    Raises:
        ValueError: a keyword, or the variable, has a value that it cannot have.
    """
    if plain := original("insecure_channel"):
        return plain(target, options, compression)  # type: ignore[no-any-return]
    options = kept(options)
    offered = offer(runtime, options, compression)
    terms, options = channel_terms(target, options, limits, chosen_transports(transports), offered)
    given = "insecure_channel", target, options, compression
    return RpcChannel(make(*given), share_of(terms, *given))


def secure_channel(
    target: str,
    credentials: Any,
    options: Any = None,
    compression: Any = None,
    *,
    limits: Limits | None = None,
    plaintext_transports: tuple[str, ...] = (),
) -> RpcChannel:
    """Makes a channel like `grpc.secure_channel`.

    Unencrypted payload stays in this host's shared memory.

    Args:
        target: as for grpcio.
        credentials: as for grpcio.
        options: as for grpcio.
        compression: as for grpcio.
        limits: as for `insecure_channel`.
        plaintext_transports: by which payload may also travel, unencrypted: ("tcp",). The server
            has to allow it too.

    Raises:
        ValueError: as for `insecure_channel`.
    """
    if plain := original("secure_channel"):
        return plain(target, credentials, options, compression)  # type: ignore[no-any-return]
    transports = secure_transports(plaintext_transports)
    terms, options = channel_terms(target, kept(options), limits, transports)
    given = "secure_channel", target, credentials, options, compression
    return RpcChannel(make(*given), share_of(terms, *given))


def server(
    thread_pool: Any,
    handlers: Any = None,
    interceptors: Any = None,
    options: Any = None,
    maximum_concurrent_rpcs: Any = None,
    compression: Any = None,
    xds: bool = False,
    *,
    limits: Limits | None = None,
    transports: tuple[str, ...] | None = None,
    plaintext_transports: tuple[str, ...] = (),
    listen: str = "",
    runtime: bool | None = None,
) -> RpcServer:
    """Makes a server like `grpc.server`.

    Args:
        thread_pool: as for grpcio.
        handlers: as for grpcio.
        interceptors: as for grpcio.
        options: as for grpcio.
        maximum_concurrent_rpcs: as for grpcio.
        compression: as for grpcio.
        xds: as for grpcio.
        limits: as for `insecure_channel`.
        transports: by which payload may travel; () for not at all. Default: "shm" and "tcp",
            without those that TENSORWIRE_TRANSPORTS leaves out.
        plaintext_transports: by which payload of encrypted connections may travel besides shared
            memory, unencrypted: ("tcp",). The client has to allow it too.
        listen: the host by which clients on other hosts reach this one. By default the host of
            the first insecure port, if it is not loopback.
        runtime: as for `insecure_channel`; clients of secure ports stay with grpcio.

    Raises:
        ValueError: as for `insecure_channel`.
    """
    options = kept(options)
    most = maximum_concurrent_rpcs
    given = thread_pool, handlers, interceptors, options, most, compression, xds
    if plain := original("server"):
        return plain(*given)  # type: ignore[no-any-return]
    transports = chosen_transports(transports)
    terms = server_terms(limits, transports, listen, plaintext_transports, options)
    return new_server(RpcServer, "server", terms, runtime, given)


_Server = TypeVar("_Server", bound=ServerPorts)


def new_server(
    kind: type[_Server],
    name: str,
    terms: Terms,
    runtime: bool | None,
    given: tuple[Any, ...],
) -> _Server:
    """Returns a server around one of grpcio.

    Args:
        kind: of the server.
        name: of the factory of grpcio.
        terms: for payload.
        runtime: as the user gave it.
        given: the arguments of the factory.
    """
    pool, handlers, interceptors, options, most, compression, *more = given
    handlers, interceptors = kept(handlers) or (), kept(interceptors) or ()
    carried = offer(runtime, options, compression)
    service = None
    if carried.limits is not None:
        service = kind.new_service(pool, handlers, interceptors, most, carried.limits)
    registry = Registry(terms, service)
    if terms.transports:
        options = roomy(options, terms.limits.pool_bytes)
    outermost = (kind.new_interceptor(registry), *interceptors)
    inner = make(name, pool, handlers, outermost, options, most, compression, *more)
    return kind(inner, registry, service, carried.reason)


def channel_terms(
    target: str,
    options: Any,
    limits: Limits | None,
    transports: tuple[str, ...],
    runtime: Offer = NO_RUNTIME,
) -> tuple[Terms, Any]:
    """Returns the terms for payload of a channel, and the options for grpcio's channel.

    Args:
        target: of the channel.
        options: the user's.
        limits: the user's.
        transports: by which it may travel.
        runtime: whether calls go by the runtime.
    """
    limits, messages = given_limits(limits), named_limits(options)
    host, repeats = target_host(target), retries(options)
    terms = Terms(limits, transports, "", (), runtime, repeats, host, messages)
    return terms, roomy(options, limits.pool_bytes) if transports else options


def share_of(
    terms: Terms,
    name: str,
    *given: Any,
    world: object = None,
    new_client: NewClient = RuntimeClient,
    lingers: bool = True,
) -> ChannelShare:
    """Returns a channel's share of an attachment, which channels with equal arguments share.

    Args:
        terms: of the channel.
        name: of the factory of grpcio, without asyncio.
        given: its arguments.
        world: threads, or an event loop; channels of different worlds do not share.
        new_client: see `connect`.
        lingers: the attachment stays a while without channels.
    """

    def ask(request: bytes) -> bytes:
        # By no channel of the user's, as that may be closed before the answer, or count calls.
        channel = make(name, *given)
        try:
            answer: bytes = channel.unary_unary(OPEN)(request, timeout=CONNECT_S)
            return answer
        finally:
            channel.close()

    key: Any = world, name, given, terms
    if _ALONE in named(given[-2]):
        key = object()
    return share(key, lingers, terms, explain, ask, new_client)


def as_transports(names: Any, keyword: str = "transports") -> tuple[str, ...]:
    """Checks the transports that a user names, and returns each once; ValueError if unknown."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(f'{keyword} is a tuple of names, as in ("shm", "tcp"), not {names!r}')
    chosen = tuple(dict.fromkeys(names))
    if unknown := [str(each) for each in chosen if each not in ("shm", "tcp", "rdma")]:
        raise ValueError(f"{keyword} are shm, tcp and rdma, not {', '.join(unknown)}")
    return chosen


def chosen_transports(names: Any, usual: tuple[str, ...] = ("shm", "tcp")) -> tuple[str, ...]:
    """Returns the transports that a user names, or the usual ones that the environment allows.

    Raises:
        ValueError: names, or the names in TENSORWIRE_TRANSPORTS, are unknown.
    """
    if names is not None:
        return as_transports(names)
    text = os.environ.get(_TRANSPORTS, "")
    if not text:
        return usual
    allowed = as_transports([name.strip() for name in text.split(",")], _TRANSPORTS)
    return tuple(each for each in usual if each in allowed)


def secure_transports(plaintext: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the transports by which payload of a secure channel may travel."""
    beside = as_transports(plaintext, "plaintext_transports")
    return tuple(dict.fromkeys((*chosen_transports(None, ("shm",)), *beside)))


def server_terms(
    limits: Limits | None,
    transports: tuple[str, ...],
    listen: Any,
    plaintext: tuple[str, ...],
    options: Any,
) -> Terms:
    """Checks the arguments of a server for payload, and returns its terms."""
    if not isinstance(listen, str):
        raise ValueError(f"listen is the name or address of a host, not {listen!r}")
    plaintext = as_transports(plaintext, "plaintext_transports")
    messages = named_limits(options)
    return Terms(given_limits(limits), transports, listen, plaintext, messages=messages)
