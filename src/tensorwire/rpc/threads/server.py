"""Synchronous gRPC server: a grpcio server whose large payload travels beside its messages.

One interceptor does all of it, outside of the user's: it wraps the handler of a call, which the
user's interceptors have seen already, with functions that turn grpcio's bytes into messages and
back. So the handlers, their contexts and the order of all steps are grpcio's own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import grpc

from .. import logs
from ..attach.registry import DeclinedError, Registry, may_be_of_a_call
from ..attach.terms import MARK, OPEN, REFUSED
from ..payload.attachment import RpcAttachment
from ..payload.encode import Encoder
from ..payload.envelope import MAGIC, read_mark
from ..payload.inbox import RefusedError
from ..payload.incoming import Reader, find_only
from ..payload.outgoing import MOST_BYTES, PLAIN, CallLink, SentMessage
from ..payload.tensors import Holding, delivered, drop
from ..runtime.served import Caller, arity_of
from ..runtime.server import AnyService, Service

_DRAIN_S = 1.0
"""The time that a stopped server waits for clients to read payload that they were sent."""

OF_BEHAVIORS = "experimental_non_blocking", "experimental_thread_pool"
"""The attributes that grpcio looks for at the behavior of a handler."""

LOOK_S = 0.005
"""The time between two looks at what a server that stops waits for."""
_MOST_KNOWN = 1024


@lru_cache(maxsize=1024)
def _known_reader(deserializer: Any, streams: bool) -> Reader:
    return Reader(deserializer, streams=streams)


def reader_of(handler: Any) -> Reader:
    """Returns the Reader of a handler's requests, which most calls of a server share."""
    deserializer, streams = handler.request_deserializer, bool(handler.request_streaming)
    try:
        return _known_reader(deserializer, streams)
    except TypeError:  # a callable without a hash
        return Reader(deserializer, streams=streams)


class Handlers:
    """The handlers in the place of the user's, each for calls with one mark.

    Small calls of a client have the same mark, so they have the same handler.

    Args:
        registry: the attachments of the server.

    Attributes:
        kind: makes one, of the user's handler, the attachment and the mark of its calls.
        reserved: the handler of the reserved method, which answers by `_open`.
    """

    kind: Callable[[Any, RpcAttachment | None, Any], Any]
    _open: Callable[[bytes, Any], Any]

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._unmarked: dict[int, Any] = {}
        self.reserved = grpc.unary_unary_rpc_method_handler(self._open)

    def of(self, handler: Any, metadata: Any) -> Any:
        """Returns the handler of a call.

        Args:
            handler: the user's.
            metadata: of the call.
        """
        value = None
        for key, each in metadata or ():
            if key == MARK:
                value = each
        attachment = None if value is None else self._registry.find(value[:16])
        known = self._unmarked if attachment is None else attachment.handlers
        last = known.get(id(handler))
        if last is not None and last.handler is handler and last.mark == value:
            return last
        if attachment is not None and not may_be_of_a_call(value):
            attachment = None
        made = self.kind(handler, attachment, value)
        if len(known) >= _MOST_KNOWN:  # interceptors may make a new handler for each call
            known.clear()
        known[id(handler)] = made
        return made


class Arrived(NamedTuple):
    """A request as it came; it becomes the user's in the thread of the servicer."""

    data: bytes


def is_encrypted(context: Any) -> bool:
    """Returns whether a call came over a secure port."""
    kinds = context.auth_context().get("transport_security_type", ())
    return list(kinds) != [b"insecure"] and bool(kinds)


def why_declined(error: Exception) -> grpc.StatusCode:
    """Returns the code of a call that asks for an attachment and gets none."""
    code = grpc.StatusCode
    return code.FAILED_PRECONDITION if isinstance(error, DeclinedError) else code.INVALID_ARGUMENT


class ServedHandler(grpc.RpcMethodHandler):
    """The handler of calls with one mark, in the place of the user's, of either world.

    Args:
        handler: the user's.
        attachment: of the calls; None: their mark names none of this server, or they have none.
        mark: of the calls, if they have one.

    Attributes:
        handler, mark: as given.
    """

    def __init__(self, handler: Any, attachment: RpcAttachment | None, mark: Any) -> None:
        self.handler = handler
        self.mark = mark
        self.request_streaming = handler.request_streaming
        self.response_streaming = handler.response_streaming
        self._reader = reader_of(handler)
        self._serializer = handler.response_serializer
        self._encoder = Encoder(self._serializer)
        self._attachment = attachment
        self._least_bytes = MOST_BYTES if attachment is None else attachment.threshold_bytes
        found = read_mark(mark)
        self._call = (0, 0) if found is None else found[1:]

    def _link(self, *context: Any) -> CallLink:
        """Returns the link of a call, whose context is given where threads have calls."""
        raise NotImplementedError

    def _encode(self, response: Any, *context: Any) -> bytes:
        """Returns the bytes of a response; raises as `SentMessage.serialize`."""
        found = self._encoder.small(response, self._least_bytes)
        if type(found) is bytes:
            return found
        if isinstance(found, tuple):
            delivered(found[1])
            return found[0]
        message = response if found is None else found
        return SentMessage(message, self._link(*context), last=True).serialize(self._serializer)

    def confirm(self) -> None:
        """Tells the client that this server has these calls."""
        if self._attachment is not None:
            self._attachment.confirm(self._call)


class ServedCall(ServedHandler):
    """A `ServedHandler` for threads, which keeps all other attributes of the user's handler.

    Args: as of `ServedHandler`.
    """

    unary_unary = unary_stream = stream_unary = stream_stream = None

    def __init__(self, handler: Any, attachment: RpcAttachment | None, mark: Any) -> None:
        super().__init__(handler, attachment, mark)
        kind = arity_of(handler)
        self._behavior = run = getattr(handler, kind)
        self.request_deserializer = self._reader.plain  # also if the bytes look like an envelope
        self.response_serializer: Any = self._encode  # without a context: it has no attachment
        if mark is not None:
            self.request_deserializer, self.response_serializer = self._receive, self._send
            run = partial(self._run)
            if kind == "unary_unary":
                run, self.response_serializer = partial(self._run_one), self._answer
            for name in OF_BEHAVIORS:
                if hasattr(self._behavior, name):
                    setattr(run, name, getattr(self._behavior, name))
        setattr(self, kind, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)

    def _receive(self, data: bytes) -> Any:
        if data.startswith(MAGIC):
            return Arrived(data)
        plain = self._reader.plain
        return data if plain is None else plain(data)

    def _send(self, outgoing: SentMessage) -> bytes:
        return outgoing.serialize(self._serializer)

    def _run_one(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Returns the response to one request, with the context that sending it may need."""
        if type(request) is Arrived:
            return self._run(request, context)
        response = self._behavior(request, context)
        if type(response) is bytes and self._serializer is None:
            if len(response) < self._least_bytes and not response.startswith(MAGIC):
                return response  # as most are
        return response, context

    def _answer(self, answered: bytes | SentMessage | tuple[Any, grpc.ServicerContext]) -> bytes:
        """Returns the bytes of a response of `_run_one`."""
        if type(answered) is bytes:
            return answered
        if isinstance(answered, SentMessage):
            return answered.serialize(self._serializer)
        return self._encode(*answered)

    def _link(self, *context: Any) -> CallLink:
        if self._attachment is None:
            return PLAIN
        (of_call,) = context
        call = self._call
        link = CallLink(self._attachment, call, of_call.time_remaining, of_call.is_active)
        if self.response_streaming:
            link.window = self._attachment.window()
        return link

    def _run(self, request: Any, context: grpc.ServicerContext, *respond: Any) -> Any:
        """Runs the user's behavior; one that does not block gives its responses to `respond`."""
        holdings: list[Holding] = []
        if self.request_streaming:
            self.confirm()
            request = Arriving(request, self, context)
        elif type(request) is Arrived:
            request = self.open_one(request, context, holdings)
            self.confirm()
        link = self._link(context)
        responses = self._behavior(request, context, *(partial(_leave, link, f) for f in respond))
        had = [request]
        del request
        drop(had, holdings, responses)
        if respond:
            return None
        if self.response_streaming:
            return Leaving(responses, link)
        leaving = SentMessage(responses, link, last=True)
        leaving.kept = had
        return leaving

    def open_one(
        self, arrived: Arrived, context: grpc.ServicerContext, holdings: list[Holding]
    ) -> Any:
        """Returns the user's request; ends the call if there is none.

        Args:
            arrived: as it came.
            context: of the call.
            holdings: gets the `Holding` of its Tensors, if they have memory.
        """
        try:
            return self._reader.read(arrived.data, partial(find_only, self._attachment), holdings)
        except RefusedError as error:
            trailing = *(context.trailing_metadata() or ()), (REFUSED, "1")
            context.set_trailing_metadata(trailing)
            text = f"payload that is not where the message says: {error}"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        except Exception:
            logs.OWN.exception("a request could not be deserialized")
            context.abort(grpc.StatusCode.INTERNAL, "Exception deserializing request!")
        raise AssertionError


def _leave(link: CallLink, respond: Any, response: Any) -> None:
    """Gives grpcio one of several responses; None: there are no more."""
    respond(None if response is None else SentMessage(response, link, last=True))


class Arriving:
    """The requests of a stream, for the servicer."""

    def __init__(self, requests: Any, call: ServedCall, context: Any) -> None:
        self._requests = requests
        self._call = call
        self._context = context

    def __iter__(self) -> Arriving:
        return self

    def __next__(self) -> Any:
        arrived = next(self._requests)
        if type(arrived) is not Arrived:
            return arrived
        return self._call.open_one(arrived, self._context, [])

    next = __next__


class Leaving:
    """The servicer's responses, each with its link."""

    def __init__(self, responses: Any, link: CallLink) -> None:
        self._responses = responses
        self._link = link

    def __iter__(self) -> Iterator[SentMessage | None]:
        return self

    def __next__(self) -> SentMessage | None:
        response = next(self._responses)
        if response is None:  # for grpcio there are no more
            return None
        return SentMessage(response, self._link, last=True)


class Interceptor(Handlers, grpc.ServerInterceptor):
    """Answers the reserved method, and wraps the handlers of calls of an attachment.

    Args: as of `Handlers`.
    """

    kind = ServedCall

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if handler_call_details.method == OPEN:
            return self.reserved
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return self.of(handler, handler_call_details.invocation_metadata)

    def _open(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        encrypted = is_encrypted(context)
        try:
            return self._registry.open(request, Caller.of(context), encrypted=encrypted)
        except (DeclinedError, ValueError) as error:
            context.abort(why_declined(error), str(error))
        raise AssertionError


class ServerPorts:
    """The common part of servers of threads and of an event loop: attachments, handlers and ports.

    Args:
        inner: of grpcio, with a `new_interceptor` of the registry as its first one.
        registry: the attachments.
        service: carries out calls that do not come by grpcio; None: there are none.
        reason: why there are none.

    Attributes:
        inner: of grpcio.
        new_service, new_interceptor: their classes.
    """

    new_service: Callable[..., AnyService]
    new_interceptor: Callable[[Registry], Any]
    _started = False

    def __init__(self, inner: Any, registry: Registry, service: Any, reason: str) -> None:
        self.inner = inner
        self._registry = registry
        self._service = service
        self._reason = reason
        weakref.finalize(self, registry.close).atexit = False

    @property
    def attachments(self) -> list[RpcAttachment]:
        """The attachments of clients that payload is exchanged with."""
        return self._registry.attachments

    @property
    def runtime(self) -> str:
        """How calls may come: "offered" for the runtime, or "grpcio: " and the reason."""
        return f"grpcio: {self._reason}" if self._service is None else "offered"

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        handlers = tuple(generic_rpc_handlers)
        self.inner.add_generic_rpc_handlers(handlers)
        if self._service is not None:
            self._service.add_generic(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        self.inner.add_registered_method_handlers(service_name, method_handlers)
        if self._service is not None and not self._started:
            self._service.add_registered(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        port: int = self.inner.add_insecure_port(address)
        if host := outside_host(address):
            self._registry.listen(host)
        return port

    def add_secure_port(self, address: str, server_credentials: Any) -> int:
        port: int = self.inner.add_secure_port(address, server_credentials)
        return port

    def _begin_stop(self, grace: float | None) -> None:
        """Lets no more calls begin, and without a grace ends all."""
        if self._service is not None:
            self._service.stop()
            if grace is None:
                self._service.cancel_all()

    def _end_stop(self, until: float, stopped: Callable[[], bool]) -> Iterator[None]:
        """Ends calls and attachments; yields as long as it has to wait for something.

        Args:
            until: of time.monotonic; the end of the grace.
            stopped: whether grpcio's server has.
        """
        service = self._service
        if service is not None:
            while service.active and time.monotonic() < until:
                yield
            service.cancel_all()
        while not stopped():
            yield
        until = time.monotonic() + _DRAIN_S
        while self._registry.awaited and time.monotonic() < until:
            yield
        self._registry.close()


class RpcServer(ServerPorts, grpc.Server):
    """A `grpc.Server`; made by `server`.

    Args: as of `ServerPorts`.
    """

    new_service, new_interceptor = Service, Interceptor

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._closed = threading.Event()
        self._stopping = False

    def start(self) -> None:
        self.inner.start()
        self._started = True

    def stop(self, grace: float | None) -> Any:
        self._stopping = True
        until = time.monotonic() + (grace or 0.0)
        self._begin_stop(grace)
        stopped = self.inner.stop(grace)
        closed = threading.Event()

        def close() -> None:
            for _ in self._end_stop(until, stopped.is_set):
                time.sleep(LOOK_S)
            closed.set()
            self._closed.set()

        if stopped.is_set() and (self._service is None or not self._service.active):
            close()
        else:
            threading.Thread(target=close, name="tensorwire-rpc-stop", daemon=True).start()
        return closed

    def __del__(self) -> None:
        # Ends it for threads that wait for its termination, as grpcio's does.
        if end := getattr(getattr(self, "inner", None), "__del__", None):
            end()

    def wait_for_termination(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        if self.inner.wait_for_termination(timeout):
            return True
        if self._service is None or not self._stopping:
            return False
        return not self._closed.wait(None if until is None else max(until - time.monotonic(), 0.0))


def outside_host(address: str) -> str:
    """Returns the host of a port that other hosts reach, as a Node takes it; "" for loopback."""
    if address.startswith(("unix:", "unix-abstract:", "vsock:")):
        return ""
    host = address.rpartition(":")[0].strip("[]")
    if host in ("", "localhost", "::1") or host.startswith("127."):
        return ""
    return host
