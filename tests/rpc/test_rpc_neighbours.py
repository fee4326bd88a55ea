"""Generated stubs, health, reflection, and secure channels."""

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from ends import SHM, Methods, attached_channel
from test_rpc_conformance import UU, echo, wait_for

from tensorwire import rpc

PROTO = """
syntax = "proto3";
package model;
import "tensorwire/rpc/tensor.proto";
message Request { string name = 1; repeated tensorwire.rpc.Tensor inputs = 2; bytes raw = 3; }
message Reply { map<string, tensorwire.rpc.Tensor> outputs = 1; bytes raw = 2; }
service Model {
  rpc Predict(Request) returns (Reply);
  rpc Each(stream Request) returns (stream Reply);
}
"""
BIG = bytes(300_000)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    protoc = pytest.importorskip("grpc_tools.protoc")
    folder = tmp_path_factory.mktemp("generated")
    (folder / "served_model.proto").write_text(PROTO)
    include = str(Path(protoc.__file__).parent / "_proto")
    arguments = ["", f"-I{folder}", f"-I{rpc.proto_path()}", f"-I{include}"]
    outputs = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main([*arguments, *outputs, "served_model.proto"]) == 0
    sys.path.insert(0, str(folder))
    try:
        messages = importlib.import_module("served_model_pb2")
        yield messages, importlib.import_module("served_model_pb2_grpc")
    finally:
        sys.path.remove(str(folder))


@pytest.mark.parametrize("transport", ["shm", "tcp", "inside"])
def test_generated_stubs(generated: tuple[Any, Any], transport: str) -> None:
    messages, services = generated

    class Model(services.ModelServicer):  # type: ignore[misc]
        def Predict(self, request: Any, context: Any) -> Any:
            assert all(not each.data for each in request.inputs) or transport == "inside"
            arrays = [rpc.unpack(each) for each in request.inputs]
            outputs = {str(i): rpc.pack(each * 2) for i, each in enumerate(arrays)}
            return messages.Reply(outputs=outputs, raw=request.raw + request.name.encode())

        def Each(self, requests: Any, context: Any) -> Any:
            return (self.Predict(each, context) for each in requests)

    options = {"limits": rpc.Limits(threshold_bytes=1000), "transports": (transport,)}
    if transport == "inside":
        options["transports"] = ()
    server = rpc.server(ThreadPoolExecutor(4), **options)
    services.add_ModelServicer_to_server(Model(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with attached_channel(f"127.0.0.1:{port}", **options) as channel:
        stub = services.ModelStub(channel)

        def request() -> Any:
            inputs = [rpc.pack(np.full(5000 * i, i, "float32")) for i in range(4)]
            return messages.Request(name="x", inputs=inputs, raw=BIG)

        replies = [stub.Predict(request()), *stub.Each(request() for _ in range(3))]
        for reply in replies:
            assert reply.raw == BIG + b"x"
            for i in range(4):
                got = rpc.unpack(reply.outputs[str(i)])
                np.testing.assert_array_equal(got, np.full(5000 * i, 2 * i, "float32"))
    server.stop(0).wait()


PARTS = {
    "a Tensor": lambda reply: reply.outputs["3"],
    "all of them": lambda reply: reply.outputs,
    "the message": lambda reply: reply,
    "an array": lambda reply: rpc.unpack(reply.outputs["3"])[5:],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_message_keeps_its_memory(generated: tuple[Any, Any], part: str) -> None:
    """The memory stays also if the rest of the message is gone, and other messages come."""
    messages, services = generated

    class Model(services.ModelServicer):  # type: ignore[misc]
        def Predict(self, request: Any, context: Any) -> Any:
            outputs = {str(i): rpc.pack(np.full(5000, i, "float32")) for i in range(1, 4)}
            return messages.Reply(outputs=outputs)

    server = rpc.server(ThreadPoolExecutor(2), **SHM)
    services.add_ModelServicer_to_server(Model(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with attached_channel(f"127.0.0.1:{port}", **SHM) as channel:
        stub = services.ModelStub(channel)
        kept = PARTS[part](stub.Predict(messages.Request()))
        for _ in range(3):
            stub.Predict(messages.Request())
            time.sleep(0.1)  # some looks
        assert channel.attachment.leases_here.held == 1
        found = kept["3"] if part == "all of them" else kept
        found = found.outputs["3"] if part == "the message" else found
        array = found if part == "an array" else rpc.unpack(found)
        assert array[-1] == 3
        del kept, found, array
        wait_for(lambda: channel.attachment.leases_here.held == 0)
    server.stop(0).wait()


def test_health_and_reflection() -> None:
    health = pytest.importorskip("grpc_health.v1.health")
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2")
    health_pb2_grpc = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    reflection = pytest.importorskip("grpc_reflection.v1alpha.reflection")
    database = pytest.importorskip("grpc_reflection.v1alpha.proto_reflection_descriptor_database")
    server = rpc.server(ThreadPoolExecutor(4), **SHM)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    reflection.enable_server_reflection([health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    for make in (grpc.insecure_channel, rpc.insecure_channel):
        with make(f"127.0.0.1:{port}", **(SHM if make is rpc.insecure_channel else {})) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            serving = health_pb2.HealthCheckResponse.SERVING
            assert check(health_pb2.HealthCheckRequest()).status == serving
            # The reserved method, which payload needs, is not listed: it is of no service.
            names = database.ProtoReflectionDescriptorDatabase(channel).get_services()
            assert sorted(names) == sorted([health.SERVICE_NAME, reflection.SERVICE_NAME])
    server.stop(0).wait()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    folder = tmp_path_factory.mktemp("certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    try:
        subprocess.run([*command, *names, *files], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    return (folder / "key.pem").read_bytes(), (folder / "certificate.pem").read_bytes()


@pytest.mark.parametrize(
    ("at_server", "at_client", "payload"),
    [
        ({}, {}, "shm"),
        ({"transports": ("tcp",)}, {}, "inside"),
        ({"transports": ("tcp",)}, {"plaintext_transports": ("tcp",)}, "inside"),
        ({"transports": ("tcp",), "plaintext_transports": ("tcp",)}, {}, "inside"),
        (
            {"transports": ("tcp",), "plaintext_transports": ("tcp",)},
            {"plaintext_transports": ("tcp",)},
            "tcp",
        ),
    ],
    ids=["shm", "nobody allows", "client allows", "server allows", "both allow"],
)
def test_payload_leaves_encryption_where_it_may(
    certificate: tuple[bytes, bytes], at_server: Any, at_client: Any, payload: str
) -> None:
    server = rpc.server(ThreadPoolExecutor(4), limits=rpc.Limits(threshold_bytes=1000), **at_server)
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([certificate]))
    server.start()
    trusted = grpc.ssl_channel_credentials(certificate[1])
    with rpc.secure_channel(
        f"localhost:{port}", trusted, limits=rpc.Limits(threshold_bytes=1000), **at_client
    ) as channel:
        channel.attach(10)
        assert channel.unary_unary("/t/m")(BIG) == BIG
        assert channel.payload.startswith(payload)
    server.stop(0).wait()


@pytest.mark.parametrize("asks", [False, True])
def test_encrypted_calls_stay_with_grpcio(
    certificate: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    """Whatever the environment says, and if a client of a secure port asks for the runtime."""
    from tensorwire.rpc.attach.terms import Terms
    from tensorwire.rpc.runtime.options import MessageLimits, Offer

    monkeypatch.setenv("TENSORWIRE_RPC", "runtime")
    server = rpc.server(ThreadPoolExecutor(4), limits=rpc.Limits(threshold_bytes=1000))
    assert server.runtime == "offered"
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([certificate]))
    server.start()
    trusted = grpc.ssl_channel_credentials(certificate[1])
    with rpc.secure_channel(
        f"localhost:{port}", trusted, limits=rpc.Limits(threshold_bytes=1000)
    ) as channel:
        if asks:
            keeper = channel.share._keeper
            terms: Terms = keeper._terms
            keeper._terms = replace(terms, runtime=Offer(MessageLimits()))
            channel.share.carries = keeper.carries = True
        channel.attach(10)
        assert channel.unary_unary("/t/m")(BIG) == BIG
        assert channel.payload == "shm"
        assert channel.attachment.runtime is None
        assert channel.runtime.startswith("grpcio: the server" if asks else "grpcio: ")
    server.stop(0).wait()


def test_other_hosts_reach_what_is_not_loopback() -> None:
    """A client of another host is simulated by another boot id."""
    from tensorwire.rpc.attach.registry import DeclinedError, Registry
    from tensorwire.rpc.attach.terms import Terms
    from tensorwire.rpc.payload.limits import Limits
    from tensorwire.rpc.threads.server import outside_host

    hosts = {
        "[::]:50051": "::", "0.0.0.0:1": "0.0.0.0", "127.0.0.1:0": "", "localhost:1": "",
        "[::1]:1": "", "unix:/tmp/x": "", "10.0.0.1:5": "10.0.0.1", "node7:5": "node7",
    }  # fmt: skip
    assert {each: outside_host(each) for each in hosts} == hosts
    request = b'{"versions":[3],"host":"other","transports":["shm","tcp"],"pool_bytes":100000}'
    registry = Registry(Terms(Limits(max_attachments=2), ("shm", "tcp")))
    with pytest.raises(DeclinedError, match="no way"):
        registry.open(request, encrypted=False)
    registry.listen("127.0.0.1")
    assert b'"transports": ["tcp"]' in registry.open(request, encrypted=False)
    with pytest.raises(DeclinedError, match="no way"):
        registry.open(request, encrypted=True)
    registry.close()
