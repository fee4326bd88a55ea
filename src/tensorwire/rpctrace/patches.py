"""Wraps grpcio's (de)serializers, which count bytes, and the begin and end of its calls.

The standard library only: it runs in the traced processes, whose Python need not have tensorwire.
Each module of grpcio is changed right after its own import, before anybody has its names. All stays
grpcio's own: no class, object or signature is replaced, and nothing here holds a message or a call.
"""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import struct
import sys
import weakref
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .recorder import Recorder

ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_RESERVED = "/tensorwire.rpc.Attachment/Open"
# Of docs/internals/rpc-wire.md: how an envelope begins, how many pieces it has, and whose it is.
_MAGIC = b"\xff\xfftensorwire-rpc"
_HEAD = struct.Struct("<16s4xI16s24x")
_PIECE = struct.Struct("<QQQ")
_MOST = 1 << 40  # what an envelope says is its sender's word
_TRACE = "_tensorwire_trace"


class TracedMethod:
    """One method as one side sees it.

    Args:
        recorder: where it is counted.
        side: "client" or "server".
        arity: one of ARITIES.
        method: its full name.
    """

    def __init__(self, recorder: Recorder, side: str, arity: str, method: str) -> None:
        self._recorder = recorder
        self._name = (side, arity, method)
        self._rows: dict[tuple[str, ...], int] = {}

    def begin(self) -> int:
        """Counts the begin of a call; returns the time, for `ended`."""
        self._recorder.begin_call()
        return perf_counter_ns()

    def not_begun(self) -> None:
        """Takes back a `begin`: grpcio has refused to make the call."""
        self._recorder.end_call()

    def ended(self, began_ns: int, code: str) -> None:
        """Counts a call that is over."""
        took = perf_counter_ns() - began_ns
        self._recorder.add(self._row("calls", code), took)
        self._recorder.end_call()

    def serialize(self, serializer: Any, message: Any, protocol: str = "grpc") -> Any:
        """Returns the serialized message; without a serializer the message is bytes already."""
        began = perf_counter_ns()
        data = message if serializer is None else serializer(message)
        protocol = "again" if _is_again(message) else protocol
        self._count("sent", data, serializer, perf_counter_ns() - began, protocol)
        return data

    def deserialize(self, deserializer: Any, data: Any, protocol: str = "grpc") -> Any:
        """Returns the message in some bytes; without a deserializer they are the message."""
        if deserializer is None:
            self._count("received", data, None, 0, protocol)
            return data
        began = perf_counter_ns()
        message = deserializer(data)
        self._count("received", data, deserializer, perf_counter_ns() - began, protocol)
        return message

    def _count(self, direction: str, data: Any, by: Any, ns: int, protocol: str) -> None:
        if not isinstance(data, bytes):
            return  # grpcio is about to say so
        size, left = len(data), 0
        encoded = 0 if by is None else size
        if data.startswith(_MAGIC) and size >= _HEAD.size:
            _, count, attachment = _HEAD.unpack_from(data)
            end = _HEAD.size + count * _PIECE.size
            if 0 < count and end <= size:
                pieces = list(_PIECE.iter_unpack(data[_HEAD.size : end]))
                protocol = _transport(attachment)
                left = sum(length for _, _, length in pieces)
                if protocol == "refused" or left > _MOST:
                    left, protocol = 0, "refused"
                else:
                    encoded = size - end + sum(length for ticket, _, length in pieces if not ticket)
                    size += left - end
        row = self._row("messages", direction, protocol)
        self._recorder.add(row, size, left, encoded, ns)

    def _row(self, kind: str, *what: str) -> int:
        found = self._rows.get(what)
        if found is None:
            found = self._rows[what] = self._recorder.row((kind, *self._name, *what))
        return found


def _is_again(message: Any) -> bool:
    """Tells whether tensorwire.rpc repeats a request whose payload it sent elsewhere before."""
    if type(message).__name__ != "SentMessage":
        return False
    outgoing = sys.modules.get("tensorwire.rpc.payload.outgoing")
    return outgoing is not None and getattr(message, "link", None) is outgoing.AGAIN


def _transport(attachment: bytes) -> str:
    """Returns how the payload of an envelope travelled; "refused" if its reader cannot know."""
    module = sys.modules.get("tensorwire.rpc.payload.attachment")
    found = getattr(module, "ATTACHMENTS", {}).get(attachment)
    if found is None:
        return "refused"
    return str(found.transport)


class Tracer:
    """An import hook, and the changes that it makes.

    Args:
        recorder: where calls and messages are counted.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[tuple[str, str, str], TracedMethod] = {}
        self._patches: dict[str, Callable[[Any], None]] = {
            "grpc._channel": self._sync_client,
            "grpc._server": self._sync_server,
            "grpc.aio._call": self._aio_client,
            "grpc.aio._server": self._aio_server,
            "tensorwire.rpc.runtime.observed": self._runtime,
        }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        patch = self._patches.get(name)
        spec = None if patch is None else importlib.machinery.PathFinder.find_spec(name, path)
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                patch(module)
            except (AttributeError, TypeError) as error:  # a grpcio that has changed inside
                self._recorder.add(self._recorder.row(("unknown", name, str(error))), 0)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _watched(self, side: str, arity: str, method: Any) -> TracedMethod | None:
        name = method.decode() if isinstance(method, bytes) else str(method)
        if name == _RESERVED:
            return None
        key = (side, arity, name)
        found = self._known.get(key)
        if found is None:
            found = self._known.setdefault(key, TracedMethod(self._recorder, *key))
        return found

    def _runtime(self, module: Any) -> None:
        module.OBSERVER = self._watched

    def _sync_client(self, module: Any) -> None:
        for arity in ARITIES:
            self._patch_factory(module.Channel, arity)
            kind = "".join(part.capitalize() for part in arity.split("_")) + "MultiCallable"
            kinds = [getattr(module, f"_{kind}")]
            if arity == "unary_stream":
                kinds.append(module._SingleThreadedUnaryStreamMultiCallable)
            for each in kinds:
                for name in ("__call__", "with_call", "future"):
                    if name in vars(each):
                        waits = name != "future" and arity.endswith("unary")
                        _patch(each, name, _count_blocking if waits else _count_nowait)

    def _patch_factory(self, channel: Any, arity: str) -> None:
        make = getattr(channel, arity)

        @functools.wraps(make)
        def made(
            self_: Any,
            method: Any,
            request_serializer: Any = None,
            response_deserializer: Any = None,
            *more: Any,
            **named: Any,
        ) -> Any:
            watched = self._watched("client", arity, method)
            if watched is None:
                return make(
                    self_, method, request_serializer, response_deserializer, *more, **named
                )
            out = functools.partial(watched.serialize, request_serializer)
            into = functools.partial(watched.deserialize, response_deserializer)
            multi = make(self_, method, out, into, *more, **named)
            setattr(multi, _TRACE, watched)
            return multi

        setattr(channel, arity, made)

    def _sync_server(self, module: Any) -> None:
        create, interceptor = module.create_server, _Interceptor(self._watched)

        @functools.wraps(create)
        def created(pool: Any, handlers: Any, interceptors: Any, *more: Any, **named: Any) -> Any:
            return create(pool, handlers, (interceptor, *interceptors), *more, **named)

        module.create_server = created

    def _aio_client(self, module: Any) -> None:
        for arity in ARITIES:
            kind = getattr(module, "".join(part.capitalize() for part in arity.split("_")) + "Call")
            begin = kind.__init__
            names = list(inspect.signature(begin).parameters)
            if names[7:10] != ["method", "request_serializer", "response_deserializer"]:
                raise AttributeError(f"{kind.__name__} takes {names}")
            kind.__init__ = self._begun(arity, begin)

    def _begun(self, arity: str, begin: Any) -> Any:
        @functools.wraps(begin)
        def begun(call: Any, *given: Any) -> None:
            watched = self._watched("client", arity, given[6])
            if watched is None:
                begin(call, *given)
                return
            began = watched.begin()
            out = functools.partial(watched.serialize, given[7])
            into = functools.partial(watched.deserialize, given[8])
            try:
                begin(call, *given[:7], out, into, *given[9:])
            except BaseException:
                watched.not_begun()
                raise
            # Not by the call's own method, which would keep the call: dropped ones are cancelled.
            state = weakref.ref(call)
            call._cython_call.add_done_callback(lambda: watched.ended(began, _code_of_aio(state())))

        return begun

    def _aio_server(self, module: Any) -> None:
        begin, watched = module.Server.__init__, self._watched

        class Outermost(module.ServerInterceptor):  # type: ignore[misc]
            async def intercept_service(self, continuation: Any, details: Any) -> Any:
                return _traced(watched, await continuation(details), details)

        interceptor = Outermost()

        @functools.wraps(begin)
        def begun(
            server: Any, pool: Any, handlers: Any, interceptors: Any, *more: Any, **named: Any
        ) -> None:
            begin(server, pool, handlers, (interceptor, *(interceptors or ())), *more, **named)

        module.Server.__init__ = begun


def _patch(kind: Any, name: str, count: Any) -> None:
    """Makes `count` call a method of a class of grpcio, for objects whose calls are counted."""
    call = getattr(kind, name)

    @functools.wraps(call)
    def called(self: Any, *args: Any, **named: Any) -> Any:
        watched = vars(self).get(_TRACE)
        if watched is None:
            return call(self, *args, **named)
        return count(watched, functools.partial(call, self, *args, **named))

    setattr(kind, name, called)


def _count_blocking(watched: TracedMethod, call: Callable[[], Any]) -> Any:
    began, code = watched.begin(), "OK"
    try:
        return call()
    except BaseException as error:
        code = _code_of(error)
        raise
    finally:
        watched.ended(began, code)


def _count_nowait(watched: TracedMethod, call: Callable[[], Any]) -> Any:
    began = watched.begin()
    try:
        made = call()
    except BaseException:
        watched.not_begun()
        raise
    state = weakref.ref(made)  # one that is dropped is cancelled, so nothing here holds it

    def ended() -> None:
        watched.ended(began, _code_of(state()))

    if not hasattr(made, "add_callback") or not made.add_callback(ended):
        ended()
    return made


def _code_of(call: Any) -> str:
    """Returns the status code of an ended call, or of an error that is a call."""
    if call is None:
        return "CANCELLED"
    code = getattr(call, "code", None)
    return type(call).__name__ if code is None else _name_of(code())


def _code_of_aio(call: Any) -> str:
    if call is None or call.cancelled():
        return "CANCELLED"
    task = call.code()
    try:
        task.send(None)
    except StopIteration as done:
        return _name_of(done.value)
    finally:
        task.close()
    return "UNKNOWN"


def _name_of(code: Any) -> str:
    return str(getattr(code, "name", code))


class _Interceptor:
    """The outermost interceptor of a server: it sees grpcio's bytes, and no other one sees it."""

    def __init__(self, watched: Any) -> None:
        self._watched = watched

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        return _traced(self._watched, continuation(details), details)


def _traced(watched: Any, handler: Any, details: Any) -> Any:
    if handler is None:
        return None
    first, second = (
        "stream" if each else "unary"
        for each in (handler.request_streaming, handler.response_streaming)
    )
    found = watched("server", f"{first}_{second}", details.method)
    return handler if found is None else TracedHandler(handler, found)


class TracedHandler:
    """The handler of one call, in the place of the user's, whose behaviours it has.

    The servicer's code is not wrapped, so that what grpcio looks for on it is there. A call of a
    server is over with its response, or when grpcio drops this.
    """

    def __init__(self, handler: Any, watched: TracedMethod) -> None:
        self._handler, self._watched = handler, watched
        self._began = watched.begin()
        self._over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def request_deserializer(self, data: Any) -> Any:
        """Turns bytes into the user's request."""
        return self._watched.deserialize(self._handler.request_deserializer, data)

    def response_serializer(self, message: Any) -> Any:
        """Turns the user's response into bytes."""
        data = self._watched.serialize(self._handler.response_serializer, message)
        if not self._handler.response_streaming:
            self._over = True
            self._watched.ended(self._began, "answered")
        return data

    def __del__(self) -> None:
        if not self._over:
            streams = self._handler.response_streaming
            self._watched.ended(self._began, "over" if streams else "not answered")
