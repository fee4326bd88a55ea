"""The message of tensor.proto, under the name that generated code imports.

Written by hand: generated code refuses every protobuf that is older than protoc or much newer.
`tests/unit/test_rpc_tensor.py` compares it with tensor.proto.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

NEVER_SET = "array_is_elsewhere_put_it_in_by_tensorwire_rpc_embed"
"""The required field of `Held`; without it serializing is an error, which names the field."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_HELD = ".tensorwire.rpc.Tensor.Held"


def _describe() -> bytes:
    """Returns tensor.proto as protoc would give it."""
    file = descriptor_pb2.FileDescriptorProto(
        name="tensorwire/rpc/tensor.proto", package="tensorwire.rpc"
    )
    message = file.message_type.add(name="Tensor")
    for name, number, type_, label in (
        ("dtype", 1, _FIELD.TYPE_STRING, _FIELD.LABEL_OPTIONAL),
        ("shape", 2, _FIELD.TYPE_INT64, _FIELD.LABEL_REPEATED),
        ("data", 3, _FIELD.TYPE_BYTES, _FIELD.LABEL_OPTIONAL),
    ):
        message.field.add(name=name, number=number, type=type_, label=label, json_name=name)
    message.field[1].options.packed = True
    message.field.add(
        name="held", number=15, type=_FIELD.TYPE_MESSAGE, label=_FIELD.LABEL_OPTIONAL,
        type_name=_HELD, json_name="held",
    )  # fmt: skip
    held = message.nested_type.add(name="Held")
    first, *others = NEVER_SET.split("_")
    held.field.add(
        name=NEVER_SET, number=1, type=_FIELD.TYPE_BOOL, label=_FIELD.LABEL_REQUIRED,
        json_name=first + "".join(map(str.capitalize, others)),
    )  # fmt: skip
    held.field.add(
        name="ticket", number=2, type=_FIELD.TYPE_FIXED64, label=_FIELD.LABEL_OPTIONAL,
        json_name="ticket",
    )  # fmt: skip
    held.extension_range.add(start=3, end=4)
    encoded: bytes = file.SerializeToString()
    return encoded


def _describe_json() -> bytes:
    """Returns a field of `Held` whose type is unknown, so that making JSON of one fails.

    The field is known to this process alone: tensor.proto would need an import for it.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name="tensorwire/rpc/held.proto",
        package="tensorwire.rpc",
        dependency=[DESCRIPTOR.name, any_pb2.DESCRIPTOR.name],
    )
    file.extension.add(
        name="json", number=3, type=_FIELD.TYPE_MESSAGE, label=_FIELD.LABEL_OPTIONAL,
        type_name=f".{any_pb2.Any.DESCRIPTOR.full_name}", extendee=_HELD, json_name="json",
    )  # fmt: skip
    encoded: bytes = file.SerializeToString()
    return encoded


DESCRIPTOR: Any = descriptor_pool.Default().AddSerializedFile(_describe())
Tensor: Any = message_factory.GetMessageClass(DESCRIPTOR.message_types_by_name["Tensor"])
"""`tensorwire.rpc.Tensor`."""
Tensor.__module__ = __name__  # where pickle looks for it

_JSON: Any = descriptor_pool.Default().AddSerializedFile(_describe_json())
HELD: Any = Tensor.Held()
"""The field `held` of a Tensor whose array is not in it, without its ticket."""
HELD.Extensions[
    _JSON.extensions_by_name["json"]
].type_url = "tensorwire.rpc.embed puts the array in"
