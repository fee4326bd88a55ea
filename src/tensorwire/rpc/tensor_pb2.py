"""The message of tensor.proto, under the name that generated code imports.

Written by hand: what protoc generates refuses every protobuf that is older than protoc or much
newer. `tests/unit/test_rpc_tensor.py` compares it with tensor.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto


def _describe() -> bytes:
    """tensor.proto as protoc would give it."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tensorwire/rpc/tensor.proto", package="tensorwire.rpc", syntax="proto3"
    )
    message = file.message_type.add(name="Tensor")
    for name, number, type_, label in (
        ("dtype", 1, _FIELD.TYPE_STRING, _FIELD.LABEL_OPTIONAL),
        ("shape", 2, _FIELD.TYPE_INT64, _FIELD.LABEL_REPEATED),
        ("data", 3, _FIELD.TYPE_BYTES, _FIELD.LABEL_OPTIONAL),
        ("ticket", 15, _FIELD.TYPE_FIXED64, _FIELD.LABEL_OPTIONAL),
    ):
        message.field.add(name=name, number=number, type=type_, label=label, json_name=name)
    encoded: bytes = file.SerializeToString()
    return encoded


DESCRIPTOR: Any = descriptor_pool.Default().AddSerializedFile(_describe())
Tensor: Any = message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name["Tensor"])
"""`tensorwire.rpc.Tensor`."""
