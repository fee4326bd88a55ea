"""gRPC with large payloads moved one-sidedly: the same stubs and servicers, arrays as messages.

docs/rpc.md is the guide. The factories take the place of grpcio's; everything else of grpcio stays
the same.
"""

from pathlib import Path
from typing import Any

from tensorwire.errors import UnavailableError

try:
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
except ImportError as error:
    raise UnavailableError(
        f"tensorwire.rpc needs grpcio and protobuf ({error}): pip install 'tensorwire[rpc]'"
    ) from error

from . import aio
from .payload.encode import embed
from .payload.limits import Limits
from .payload.tensors import pack, unpack
from .tensor_pb2 import Tensor
from .threads.factories import insecure_channel, secure_channel, server

__all__ = [
    "Limits",
    "Tensor",
    "aio",
    "embed",
    "insecure_channel",
    "pack",
    "proto_path",
    "secure_channel",
    "server",
    "unpack",
]

_RENAMED = {
    "tensor": "pack(array)",
    "array": "unpack(message)",
    "torch_tensor": 'unpack(message, like="torch")',
}
"""The names that `tensorwire.rpc` had until 0.1.0, each with the expression that replaces it."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        raise AttributeError(f"tensorwire.rpc.{name} is now tensorwire.rpc.{_RENAMED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def proto_path() -> str:
    """Returns the folder for protoc's -I in which `tensorwire/rpc/tensor.proto` is found."""
    return str(Path(__file__).parents[2])
