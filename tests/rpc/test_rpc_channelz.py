"""The calls of a channel that grpcio counts: no more than the program made."""

import json
from typing import Any

import pytest

pytest.importorskip("grpc")

from ends import Ends, System
from grpc._cython import cygrpc
from test_rpc_conformance import UU, wait_for

COUNTED = [("grpc.enable_channelz", 1)]
MB = 1 << 20


def counts(target: str) -> list[tuple[int, int, int]]:
    """Calls started, succeeded and failed of each channel to a target."""
    found = json.loads(cygrpc.channelz_get_top_channels(0)).get("channel", [])
    names = "callsStarted", "callsSucceeded", "callsFailed"
    return [
        tuple(int(each["data"].get(name, 0)) for name in names)
        for each in found
        if target in each["data"]["target"]
    ]


@pytest.mark.parametrize("ours", [None, {}, {"runtime": True}])
def test_channelz_counts_as_grpcio(ours: dict[str, Any] | None) -> None:
    """The channel's calls, with payload beside them or not, and not how it finds the memory."""
    size = MB if ours is not None else 1000
    ends = Ends(System("", ours, ours), {"/t/m": UU(lambda request, _: bytes(len(request)))})
    channel = ends.serve().channel(options=COUNTED)
    call = channel.unary_unary("/t/m")
    for _ in range(3):
        assert len(call(bytes(size), timeout=20)) == size
    if ours is not None:
        wait_for(lambda: channel.payload == "shm")
        assert len(call(bytes(size), timeout=20)) == size
        assert channel.runtime.startswith("grpcio: ")
    made = 3 if ours is None else 4
    assert (made, made, 0) in counts(f"127.0.0.1:{ends.port}")
    ends.close()
