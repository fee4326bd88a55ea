"""The messages of `bench rpc`, and the work of both ends of a call on them.

Messages of ten buffers are like those in the micro-benchmarks of TensorFlow's gRPC: six large,
three medium and one small buffer of 1 MiB, 10 KiB and 16 B (skew).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from tensorwire import rpc

from .rpc_names import GRPCIO_TENSOR, RUNTIME_TENSOR, SKEW, STREAMED, TENSOR


def _make() -> tuple[Any, Any]:
    pool = descriptor_pool.Default()
    file = descriptor_pb2.FileDescriptorProto(
        name="tensorwire_benchmarks/rpc_payloads.proto", package="tensorwire_benchmarks",
        dependency=[rpc.Tensor.DESCRIPTOR.file.name], syntax="proto3",
    )  # fmt: skip
    field = descriptor_pb2.FieldDescriptorProto
    for name, kind in (("Buffers", field.TYPE_BYTES), ("Tensors", field.TYPE_MESSAGE)):
        message = file.message_type.add(name=name)
        made = message.field.add(name="buffers", number=1, label=field.LABEL_REPEATED, type=kind)
        if kind == field.TYPE_MESSAGE:
            made.type_name = f".{rpc.Tensor.DESCRIPTOR.full_name}"
    pool.Add(file)
    return tuple(
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorwire_benchmarks.{name}"))
        for name in ("Buffers", "Tensors")
    )


Buffers, Tensors = _make()
"""Messages with a field `buffers`: of bytes, and of Tensors."""

METADATA = (("tensorwire-attachment-bin", bytes(range(24))),)
"""Metadata as long as the metadata that names a call's attachment."""


def read(payload: Any) -> int:
    """Reads every byte of bytes or an array."""
    array = np.frombuffer(payload, np.uint8) if isinstance(payload, bytes) else payload
    return int(np.bitwise_xor.reduce(array.view(np.uint64)))


def of_tensors(payload: Sequence[Any]) -> Any:
    """Makes a message of arrays."""
    return Tensors(buffers=[rpc.pack(each) for each in payload])


def arrays(message: Any) -> list[NDArray[Any]]:
    """Returns the arrays of a message of Tensors."""
    return [rpc.unpack(each) for each in message.buffers]


def _pack_by_hand(payload: Sequence[NDArray[np.uint8]]) -> Any:
    (array,) = payload
    return rpc.Tensor(dtype="uint8", shape=array.shape, data=array.tobytes())


def _unpack_by_hand(message: Any) -> tuple[NDArray[np.uint8]]:
    return (np.frombuffer(message.data, message.dtype).reshape(message.shape),)


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to put payload into messages, and the methods of a servicer of these messages.

    Attributes:
        name: the first part of its methods' names; the kind of call follows.
        message: the class; None: messages are bytes, which exist before a call.
        pack: makes a message of arrays.
        unpack: returns the payload of a message.
        given_back: whether the servicer answers with its request, not with a new message.
    """

    name: str
    message: Any
    pack: Callable[[Sequence[Any]], Any]
    unpack: Callable[[Any], Iterable[Any]]
    given_back: bool = False

    def types(self) -> tuple[Any, ...]:
        """Returns the serializer and the parser of a client's method; none for bytes."""
        return (self.message.SerializeToString, self.message.FromString) if self.message else ()

    def served_types(self) -> dict[str, Any]:
        """Returns the same as named arguments of a servicer's method."""
        names = "response_serializer", "request_deserializer"
        return dict(zip(names, self.types(), strict=False))

    def messages(self, payload: Sequence[Any]) -> Callable[[], Any]:
        """Returns a function that makes the message of each call."""
        if self.message is None:
            made = self.pack(payload)
            return lambda: made
        return lambda: self.pack(payload)

    def read(self, message: Any) -> None:
        """Reads every byte of a message."""
        for each in self.unpack(message):
            read(each)

    def unary(self, request: Any, context: Any) -> Any:
        """Reads a request and answers with its payload."""
        payload = self.unpack(request)
        for each in payload:
            read(each)
        return request if self.given_back else self.pack(list(payload))

    def stream(self, request: Any, context: Any) -> Iterator[Any]:
        """Reads a request and answers with `STREAMED` messages of its payload."""
        payload = list(self.unpack(request))
        for each in payload:
            read(each)
        for _ in range(STREAMED):
            yield request if self.given_back else self.pack(payload)


CODECS = (
    _BYTES := Codec("bytes", None, lambda parts: parts[0].tobytes(), lambda found: (found,), True),
    _TENSOR := Codec(
        "tensor", rpc.Tensor, lambda parts: rpc.pack(parts[0]), lambda found: (rpc.unpack(found),)
    ),
    _BY_HAND := Codec("by_hand", rpc.Tensor, _pack_by_hand, _unpack_by_hand),
    _BUFFERS := Codec(
        "buffers",
        Buffers,
        lambda parts: Buffers(buffers=list(map(bytes, parts))),  # protobuf copies them again
        lambda found: found.buffers,
        True,
    ),
    _TENSORS := Codec("tensors", Tensors, of_tensors, arrays),
)


def codec_of(case: str, system: str) -> Codec:
    """Returns the codec of a system's calls in a case."""
    if case == SKEW:
        return _TENSORS if system in (TENSOR, RUNTIME_TENSOR) else _BUFFERS
    return {TENSOR: _TENSOR, GRPCIO_TENSOR: _BY_HAND}.get(system, _BYTES)
