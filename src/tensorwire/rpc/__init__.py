"""gRPC with large payloads moved one-sidedly: the same stubs and servicers, arrays as messages.

docs/rpc.md is the guide. The factories take the place of grpcio's; everything else of grpcio stays
what it is.
"""

from pathlib import Path

from tensorwire.errors import UnavailableError

try:
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
except ImportError as error:
    raise UnavailableError(
        f"tensorwire.rpc needs grpcio and protobuf ({error}): pip install 'tensorwire[rpc]'"
    ) from error

from .asyncio import channel as aio
from .payload.outgoing import embed
from .payload.tensors import array, tensor, torch_tensor
from .tensor_pb2 import Tensor
from .threads.factories import insecure_channel, secure_channel, server

__all__ = [
    "Tensor",
    "aio",
    "array",
    "embed",
    "insecure_channel",
    "proto_path",
    "secure_channel",
    "server",
    "tensor",
    "torch_tensor",
]


def proto_path() -> str:
    """The folder for protoc's -I in which `tensorwire/rpc/tensor.proto` is found."""
    return str(Path(__file__).parents[2])
