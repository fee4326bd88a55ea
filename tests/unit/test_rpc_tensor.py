"""The Tensor message, its fields in other messages, and arrays in and out without a channel."""

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import EncodeError
from google.protobuf.wrappers_pb2 import BytesValue

from tensorwire import Node, StaleHandleError, rpc
from tensorwire.rpc.payload import tensors
from tensorwire.rpc.payload.envelope import MAGIC, Envelope, escape, seal, unseal
from tensorwire.rpc.payload.fields import may_have_tensors
from tensorwire.rpc.payload.fields import tensors as walk
from tensorwire.rpc.payload.incoming import Reader

FIELD = descriptor_pb2.FieldDescriptorProto


def nested_types() -> tuple[Any, Any]:
    """A message with Tensors everywhere, also within itself; and one with a number only."""
    file = descriptor_pb2.FileDescriptorProto(
        name="nested.proto",
        package="nested",
        syntax="proto3",
        dependency=["tensorwire/rpc/tensor.proto"],
    )
    tree = file.message_type.add(name="Tree")
    entry = tree.nested_type.add(name="NamedEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=FIELD.TYPE_STRING, label=FIELD.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=FIELD.TYPE_MESSAGE, label=FIELD.LABEL_OPTIONAL,
        type_name=".tensorwire.rpc.Tensor",
    )  # fmt: skip
    for number, (name, type_name, label) in enumerate(
        (
            ("one", ".tensorwire.rpc.Tensor", FIELD.LABEL_OPTIONAL),
            ("many", ".tensorwire.rpc.Tensor", FIELD.LABEL_REPEATED),
            ("named", ".nested.Tree.NamedEntry", FIELD.LABEL_REPEATED),
            ("child", ".nested.Tree", FIELD.LABEL_OPTIONAL),
            ("plain", ".nested.Plain", FIELD.LABEL_OPTIONAL),
        ),
        1,
    ):
        tree.field.add(
            name=name, number=number, type=FIELD.TYPE_MESSAGE, label=label, type_name=type_name
        )
    plain = file.message_type.add(name="Plain")
    plain.field.add(name="n", number=1, type=FIELD.TYPE_INT64, label=FIELD.LABEL_OPTIONAL)
    pool = descriptor_pool.Default()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName("nested.proto").message_types_by_name
    return tuple(message_factory.GetMessageClass(found[name]) for name in ("Tree", "Plain"))  # type: ignore[return-value]


Tree, Plain = nested_types()


@pytest.fixture(autouse=True)
def nothing_lent() -> Any:
    yield
    tensors.delivered(list(tensors._lent))


def test_the_message_is_that_of_the_proto_file(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    described = tmp_path / "tensor.bin"
    arguments = ["", f"-I{rpc.proto_path()}", f"--descriptor_set_out={described}"]
    assert protoc.main([*arguments, "tensorwire/rpc/tensor.proto"]) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(described.read_bytes())
    ours = descriptor_pb2.FileDescriptorProto()
    rpc.Tensor.DESCRIPTOR.file.CopyToProto(ours)
    assert ours == files.file[0]


def test_tensors_are_found_everywhere() -> None:
    message = Tree()
    places = [message.one, message.many.add(), message.named["x"], message.child.child.one]
    for number, place in enumerate(places):
        place.shape.append(number)
    assert sorted(list(each.shape) for each in walk(message)) == [[0], [1], [2], [3]]
    passed: list[Any] = []
    assert len(list(walk(message, passed))) == 4
    assert passed[0] is message
    assert may_have_tensors(Tree)
    assert may_have_tensors(rpc.Tensor)
    assert not may_have_tensors(Plain)
    assert not may_have_tensors(BytesValue)
    assert not may_have_tensors(bytes)
    assert list(walk(Plain(n=1))) == list(walk(b"bytes")) == []


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8", "int64", "bool", "complex64"])
def test_arrays_in_and_out(dtype: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    for each in (array, array.T, array[::2], array[..., None]):
        message = rpc.pack(each)
        assert (message.dtype, tuple(message.shape), message.data) == (dtype, each.shape, b"")
        np.testing.assert_array_equal(rpc.unpack(message), each)
        inside = rpc.embed(message)
        assert inside.data == each.tobytes()
        np.testing.assert_array_equal(rpc.unpack(inside), each)


def test_names_of_before_0_1_0_say_the_new_one() -> None:
    for old, new in {"tensor": "pack", "array": "unpack", "torch_tensor": "unpack"}.items():
        with pytest.raises(
            AttributeError, match=rf"tensorwire\.rpc\.{old} is now .*\.rpc\.{new}\("
        ):
            getattr(rpc, old)
    with pytest.raises(ValueError, match='like is "numpy" or "torch", not'):
        rpc.unpack(rpc.pack(np.ones(2)), like="jax")


def test_nothing_is_copied() -> None:
    array = np.arange(10.0)
    assert np.shares_memory(rpc.unpack(rpc.pack(array)), array)
    with Node("owner") as node:
        region = node.allocate(4096)
        assert np.shares_memory(rpc.unpack(rpc.pack(region[64:128])), region.array())


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        message = rpc.pack(tensor)
        for each in (message, rpc.embed(message)):
            got = rpc.unpack(each, like="torch")
            assert got.dtype is dtype
            assert torch.equal(got, tensor)
        assert rpc.unpack(message, like="torch").data_ptr() == tensor.data_ptr()
    with pytest.raises(TypeError, match=r"like='torch'"):
        rpc.unpack(rpc.pack(torch.ones(2, dtype=torch.bfloat16)))
    needs_gradient = torch.ones(2, 3, requires_grad=True).T
    assert torch.equal(rpc.unpack(rpc.pack(needs_gradient), like="torch"), torch.ones(3, 2))
    for elsewhere in (torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match=r"dense.* call its cpu\(\), to_dense\(\)"):
            rpc.pack(elsewhere)
    assert rpc.unpack(rpc.pack(torch.empty(0, 3)), like="torch").shape == (0, 3)


@pytest.mark.parametrize("bad", [np.array([object()]), np.array(["a"]), np.zeros(2, "longdouble")])
def test_what_is_no_tensor(bad: Any) -> None:
    with pytest.raises(TypeError, match="numbers"):
        rpc.pack(bad)


def test_bytes_are_no_tensor_by_themselves() -> None:
    with pytest.raises(TypeError, match=r"np\.frombuffer\(data, np\.uint8\)"):
        rpc.pack(b"raw")
    assert rpc.unpack(rpc.pack(np.frombuffer(b"raw", np.uint8))).tobytes() == b"raw"


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_what_would_be_lost_on_the_way() -> None:
    torch = pytest.importorskip("torch")
    quantized = torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.qint8)
    with pytest.raises(ValueError, match="would lose the scale"):
        rpc.pack(quantized)


@pytest.mark.parametrize("owner", [3, {}, ()])
def test_an_owner_that_nobody_can_watch(owner: Any) -> None:
    with pytest.raises(TypeError, match=f"of {type(owner).__name__}, which has no weak references"):
        rpc.pack(np.ones(2), owner=owner)
    assert tensors.lent_arrays() == 0


@pytest.mark.parametrize("no_message", [np.ones(2), {"a": 1}, b"", None])
def test_only_messages_can_be_embedded(no_message: Any) -> None:
    with pytest.raises(TypeError, match="embed takes a protobuf message, not"):
        rpc.embed(no_message)


def test_a_field_that_was_never_set() -> None:
    pytest.importorskip("torch")
    for look in (rpc.unpack, partial(rpc.unpack, like="torch")):
        with pytest.raises(TypeError, match="the field was never set"):
            look(Tree().one)


def test_a_message_that_left_without_its_array() -> None:
    """Sent by plain grpcio or a file: the receiver is told what the writer forgot."""
    message = rpc.pack(np.arange(3.0))
    with pytest.raises(EncodeError, match="put_it_in_by_tensorwire_rpc_embed"):
        message.SerializeToString()
    with pytest.raises(EncodeError, match="put_it_in_by_tensorwire_rpc_embed"):
        Tree(child=Tree(many=[message])).SerializeToString()
    stored = message.SerializePartialToString()
    tensors.delivered([message.held.ticket])
    with pytest.raises(StaleHandleError, match=r"is made by embed\(message\)"):
        rpc.unpack(rpc.Tensor.FromString(stored))
    arrived = Reader(rpc.Tensor.FromString).inside(stored)
    with pytest.raises(ValueError, match=r"came with 0 bytes: a sender .* embed\(message\)"):
        rpc.unpack(arrived)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "float32", "shape": [3], "data": b"\0" * 8},
        {"dtype": "float32", "shape": [-1], "data": b""},
        {"dtype": "float32", "shape": [1 << 40, 1 << 40]},
        {"dtype": "object", "shape": [1], "data": b"\0" * 8},
        {"dtype": "<f4", "shape": [1], "data": b"\0" * 4},
        {"dtype": "no such", "shape": [0]},
        {"dtype": "S8", "shape": [1], "data": b"\0" * 8},
    ],
)
def test_fields_that_lie(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        rpc.unpack(rpc.Tensor(**fields))


def test_a_missing_grpcio_says_what_to_install() -> None:
    code = """
import sys
sys.modules["grpc"] = None
from tensorwire import UnavailableError
try:
    import tensorwire.rpc
except UnavailableError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'tensorwire[rpc]'" in done.stdout


def test_envelopes() -> None:
    envelope = Envelope(b"s" * 16, 5, 6, 7, ((9, 0, 10), (8, 64, 3)), b"body")
    assert unseal(seal(envelope)) == envelope
    assert unseal(escape(b"s" * 16, MAGIC + b"x")).body == MAGIC + b"x"
    with pytest.raises(ValueError, match="twice"):
        unseal(seal(Envelope(b"s" * 16, 5, 6, 7, ((9, 0, 10), (9, 64, 3)), b"")))
    whole = seal(envelope)
    for end in range(16, len(whole) - 4):
        with pytest.raises(ValueError, match="envelope"):
            unseal(whole[:end])


def test_arrays_that_go_while_the_overdue_are_looked_for() -> None:
    """A collection may begin in the middle of it, and take some with their owners."""
    tickets = [
        rpc.pack(np.ones(1)).held.ticket for _ in range(5000)
    ]  # more than tuples are kept for

    def let_one_go(phase: str, info: dict[str, int]) -> None:
        tensors.delivered([tickets.pop()])

    before = gc.get_threshold()
    gc.callbacks.append(let_one_go)
    gc.set_threshold(1)
    try:
        assert tensors._overdue.look()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(let_one_go)
    assert tensors.lent_arrays() == len(tickets)
