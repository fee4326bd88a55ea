"""Calls of the runtime over RDMA: between two machines; and unary ones conform in one of them."""

import sys

import rpc_program as program
from actors import MachineGroup
from rig import Machine, python_environment

START_S = 120.0


def test_calls_between_two_machines(machines: tuple[Machine, Machine], group: MachineGroup) -> None:
    near, far = machines
    server = group.start_on(far, program.serve, far.address, name="server")
    target = server.recv(START_S)
    client = group.start_on(near, program.call, target, name="client")
    said = client.result(START_S)
    in_a_loop = group.start_on(near, program.call_aio, target, name="client in a loop")
    said_there = in_a_loop.result(START_S)
    server.send("stop")
    for each in ("echoed", "streamed", "joined", "threshold_bytes"):
        assert said_there[each] == said[each]
    assert said_there["offered"] >= program.SIZES[-1]
    assert said["runtime"] == said["payload"] == "rdma"
    assert said["echoed"] == program.SIZES
    assert said["streamed"] == [program.SIZES[-1]] * 3
    assert said["joined"] == sum(program.SIZES)
    assert said["code"] == "NOT_FOUND"
    assert said["late"] == "DEADLINE_EXCEEDED"
    assert said["array"] == 3 * 200_000.0
    assert said["threshold_bytes"] == program.THRESHOLD_BYTES
    assert said["offered"] >= program.SIZES[-1]


def test_event_loops_in_two_machines(
    machines: tuple[Machine, Machine], group: MachineGroup
) -> None:
    near, far = machines
    server = group.start_on(far, program.serve_aio, far.address, name="server")
    target = server.recv(START_S)
    client = group.start_on(near, program.call_aio, target, name="client")
    said = client.result(START_S)
    server.send("stop")
    assert server.recv(START_S) >= program.SIZES[-1]
    assert said["echoed"] == program.SIZES
    assert said["streamed"] == [program.SIZES[-1]] * 3
    assert said["joined"] == sum(program.SIZES)
    assert said["threshold_bytes"] == program.THRESHOLD_BYTES
    assert said["offered"] >= program.SIZES[-1]


def test_unary_calls_conform(machines: tuple[Machine, Machine]) -> None:
    near, _ = machines
    environment = {**python_environment(), "TENSORWIRE_TESTS_RPC_RDMA": "1"}
    only = "rdma and (four_arities or metadata_and_status or interceptors or (abort and uu))"
    argv = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        "tests/rpc/test_rpc_conformance.py", "-k", only,
    ]  # fmt: skip
    said = near.run(argv, 160.0, env=environment)
    assert "7 passed" in said  # all that there are take some minutes
