"""Two machines: they write into each other, and notice lost hosts and links.

tests/peers/test_partition.py shows tcp when hosts and links are lost.
"""

from typing import Any

import pytest
from actor import MIB
from actors import MachineGroup, start_actor_on
from rig import Machine

Machines = tuple[Machine, Machine]


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "rdma"))


@pytest.fixture
def pair(machines: Machines, group: MachineGroup, transport: str) -> tuple[Any, Any]:
    """Two actors, one per machine; the first is connected to a region of the second."""
    options = {"transports": [transport], "peer_timeout_s": 3.0}
    _, near = start_actor_on(group, machines[0], "near", **options)
    _, far = start_actor_on(group, machines[1], "far", **options)
    handle = far.allocate("r", MIB, "rw", "r")
    assert near.connect(handle) == transport
    assert near.find_remote("r") == MIB
    return near, far


@pytest.mark.parametrize("transport", ["tcp", "rdma"], indirect=True)
def test_write_signal_wait(pair: tuple[Any, Any], transport: str) -> None:
    near, far = pair
    data = bytes(range(250)) * 400
    waiting = far.begin("wait_until", "r", 0, 7, 20.0)
    near.write(64, data, 0, 7)
    waiting()
    assert far.contents("r", 64, 64 + len(data)) == data
    near.allocate("back", MIB, "rw", "back")
    assert far.connect(near.address()) == transport
    far.find_remote("back")
    waiting = near.begin("wait_until", "back", 8, 1, 20.0)
    far.write(100, data, 8, 1)
    waiting()
    assert near.contents("back", 100, 100 + len(data)) == data


def test_a_host_without_power_is_noticed(machines: Machines, pair: tuple[Any, Any]) -> None:
    near, far = pair
    writing = near.begin("write_for_ever", 4096)
    far.wait_until("r", 0, 3, 20.0)
    machines[1].power_off()
    with pytest.raises(AssertionError, match="PeerLostError"):
        writing()


def test_a_broken_link_is_noticed_and_another_connection_works(
    machines: Machines, pair: tuple[Any, Any], transport: str
) -> None:
    near, far = pair
    writing = near.begin("write_for_ever", 4096)
    far.wait_until("r", 0, 3, 20.0)
    machines[0].link(False)
    with pytest.raises(AssertionError, match="PeerLostError"):
        writing()
    machines[0].link(True)
    reach = f"until busybox ping -c 1 -W 1 {machines[1].address}; do sleep 0.1; done"
    machines[0].run(["sh", "-c", reach])
    assert near.connect(far.address()) == transport
    near.find_remote("r")
    near.write(64, b"again", 8, 5)
    assert far.value("r", 8) == 5
