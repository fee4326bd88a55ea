"""Messages of ten buffers, as the micro-benchmarks of TensorFlow's gRPC have them.

Small, medium and large buffers: 16 B, 10 KiB and 1 MiB. uniform: as many of each; random: drawn;
skew: six large, three medium, one small.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from tensorwire import rpc

from .rpc_names import RANDOM, SKEW, UNIFORM

_SMALL, _MEDIUM, _LARGE = 16, 10 << 10, 1 << 20
_COUNT = 10
_CLASSES = (_SMALL, _MEDIUM, _LARGE)


def _sizes(scheme: str) -> list[int]:
    if scheme == SKEW:
        return [_LARGE] * 6 + [_MEDIUM] * 3 + [_SMALL]
    if scheme == UNIFORM:
        return [_CLASSES[number % 3] for number in range(_COUNT)]
    assert scheme == RANDOM
    draw = random.Random(17)  # the same for all systems and runs
    return [draw.choice(_CLASSES) for _ in range(_COUNT)]


def total_bytes(scheme: str) -> int:
    """The payload of a message."""
    return sum(_sizes(scheme))


def buffers(scheme: str) -> list[NDArray[np.uint8]]:
    """The payload itself."""
    return [np.arange(size, dtype=np.uint8) for size in _sizes(scheme)]


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
"""As long as what says which attachment a call is of."""


def pack_by_hand(array: NDArray[np.uint8]) -> Any:
    """Makes a Tensor with its elements in it, which needs no tensorwire."""
    return rpc.Tensor(dtype="uint8", shape=array.shape, data=array.tobytes())


def unpack_by_hand(message: Any) -> NDArray[np.uint8]:
    """Returns a view of the elements of such a Tensor, which cannot be written to."""
    return np.frombuffer(message.data, message.dtype).reshape(message.shape)


def of_bytes(payload: Sequence[Any]) -> Any:
    """A message of bytes, which protobuf copies."""
    return Buffers(buffers=[bytes(each) for each in payload])


def of_tensors(payload: Sequence[Any]) -> Any:
    """A message of arrays."""
    return Tensors(buffers=[rpc.pack(each) for each in payload])


def arrays(message: Any) -> list[NDArray[Any]]:
    """The arrays of a message of Tensors."""
    return [rpc.unpack(each) for each in message.buffers]
