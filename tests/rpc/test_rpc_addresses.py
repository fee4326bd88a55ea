"""The addresses at which a client looks for the memory of its server."""

from typing import Any

import pytest

pytest.importorskip("grpc")

from ends import Ends, System
from test_rpc_conformance import UU, echo

from tensorwire.rpc.attach import negotiation
from tensorwire.rpc.attach.terms import target_host

TCP: dict[str, Any] = {"transports": ("tcp",), "runtime": True}


@pytest.mark.parametrize("somebody_else", [False, True])
def test_the_host_of_the_target_is_tried_too(
    monkeypatch: pytest.MonkeyPatch, somebody_else: bool
) -> None:
    """A server in a container has an address that leads nowhere, or to another server."""
    decode = negotiation.decode
    with negotiation.Node("x" * 32, listen="127.0.0.1:0", secret=b"s" * 32) as other:

        def elsewhere(data: bytes) -> dict[str, Any]:
            values = decode(data)
            port = values["address"].rpartition(":")[2]
            told = other.address if somebody_else else f"127.0.0.9:{port}"
            return {**values, "address": told}

        monkeypatch.setattr(negotiation, "decode", elsewhere)
        ends = Ends(System("tcp", TCP, TCP), {"/t/m": UU(echo)})
        channel = ends.serve().channel()
        assert channel.unary_unary("/t/m")(b"x", timeout=20) == b"x"
        runtime, payload = channel.runtime, channel.payload
        ends.close()
    if somebody_else:  # nothing can be found by another port
        assert payload.startswith("inside: ")
        assert "secret" in payload
    else:
        assert runtime == "tcp"


@pytest.mark.parametrize(
    ("target", "host"),
    [
        ("node7:50051", "node7"), ("dns:///node7:1", "node7"), ("dns://8.8.8.8/node7:1", "node7"),
        ("ipv4:10.0.0.1:5", "10.0.0.1"), ("ipv6:[::1]:5", "::1"), ("[::1]:5", "::1"),
        ("unix:/tmp/x", ""), ("ipv4:10.0.0.1:5,10.0.0.2:5", ""), ("node7", ""),
        (b"node7:5", "node7"),
        ("xds:///service", ""), ("unix-abstract:x", ""),
    ],
)  # fmt: skip
def test_hosts_of_targets(target: Any, host: str) -> None:
    assert target_host(target) == host
