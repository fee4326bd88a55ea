"""A peer restarts, connections come and go: neighbours go on, and nothing is left."""

from itertools import pairwise

import numpy as np
import pytest
from actor import MIB, PATIENCE_S, all_complete, eventually, growth_since, memory_of, start_actor
from neighbours import neighbour, restarting

from tensorwire import BusyError, Node, Peer
from tensorwire.testing import Footprint, PeerGroup

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nothing_left")]

RESTARTS = 24
RESTARTS_RDMA = 5  # in an emulated machine a process takes ten seconds to start
CYCLES = {"shm": 700, "tcp": 700, "rdma": 350}
# What a process may keep after hundreds of connections. UCX 1.13 keeps about 3 KiB of each.
KEPT = 2 * MIB


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The paths of the two neighbours."""
    if "paths" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--transport")
        paths = [([name], [name]) for name in chosen] if chosen else [(["shm", "tcp"], ["tcp"])]
        metafunc.parametrize("paths", paths, ids=["-".join(dict.fromkeys(a + b)) for a, b in paths])


@pytest.mark.slow
def test_restarts_under_load(paths: tuple[list[str], list[str]]) -> None:
    """A process is killed and comes back while two neighbours use it and each other."""
    restarts = RESTARTS_RDMA if "rdma" in paths[0] else RESTARTS
    with PeerGroup() as group:
        every = sorted({*paths[0], *paths[1]})
        victim = group.start(restarting, "127.0.0.1:0", every)
        address, handle = victim.recv()
        left = group.start(neighbour, "left", paths[0], address, name="left")
        right = group.start(neighbour, "right", paths[1], address, name="right")
        addresses = left.recv(), right.recv()
        right.send(addresses[0])
        left.send(addresses[1])
        incarnations = {handle.incarnation}
        for restart in range(restarts + 1):
            for one in (left, right):
                assert one.recv() == handle.incarnation
            victim.kill()
            if restart < restarts:
                victim = group.start(restarting, address, every)
                again, handle = victim.recv()
                assert again == address
                incarnations.add(handle.incarnation)
        assert len(incarnations) == restarts + 1
        for one in (left, right):
            one.send("stop")
        for seen in [one.recv() for one in (left, right)]:
            assert seen["wrong"] == 0
            assert seen["stale"] == restarts
            assert seen["rounds"] >= restarts
            assert not seen["other_lost"]
            assert seen["growth"] == []
            assert seen["complete"]
        for one in (left, right):
            one.send("go")
            one.result()


@pytest.mark.slow
def test_cycles_of_connections(transport: str) -> None:
    """Connect, move bytes, disconnect, again and again: nothing grows on either side."""
    count = CYCLES[transport]
    with PeerGroup() as group, Node("guest", transports=[transport]) as node:
        _, target = start_actor(group, "host", transports=[transport])
        handle = target.allocate("r", 4096)
        data, back = np.arange(512, dtype=np.int64), np.empty(512, np.int64)

        def cycle(number: int) -> None:
            peer = node.connect(handle)
            remote = peer.region(handle)
            remote[8:].write(data[1:], signal=(remote.word(0), number)).wait(PATIENCE_S)
            remote.read(back).wait(PATIENCE_S)
            assert back[0] == number
            assert (back[1:] == data[1:]).all()
            peer.allocate(4096).write(data).wait(PATIENCE_S)
            peer.close()
            assert peer.lost

        def cycles(first: int, last: int) -> tuple[int, int]:
            """Runs cycles; returns the memory after them, here and there."""
            for number in range(first, last):
                cycle(number)
            eventually(lambda: target.peer_count() == 0, "the host forgets the last guest")
            return memory_of("self")["RssAnon"], target.rss_bytes()

        # Allocators take megabytes at a time, now and then. What every connection leaves is seen in
        # each of four parts, so the least growth tells: under half a page for a connection.
        part = count // 5
        sizes = [cycles(1, part)]
        before = Footprint.now()
        target.mark()
        sizes += [cycles(number * part, (number + 1) * part) for number in range(1, 5)]
        assert growth_since(before) == []
        assert target.growth() == []
        for each in zip(*sizes, strict=True):
            assert min(later - sooner for sooner, later in pairwise(each)) < 2048 * part, each
        assert all_complete(node)
        assert node.peers == []


@pytest.mark.slow
def test_cycles_of_nodes(transport: str) -> None:
    """Nodes come and go, too; what they leased is given back each time."""
    with PeerGroup() as group:
        _, target = start_actor(group, "host", transports=[transport], quota_bytes=MIB)
        target.mark()
        anonymous = 0
        for number in range(150):
            with Node("guest", transports=[transport]) as guest:
                peer = guest.connect(target.address())
                eventually(lambda peer=peer: leased(peer), "the last guest's lease ends")
            if number == 50:
                anonymous = memory_of("self")["RssAnon"]
        eventually(lambda: target.peer_count() == 0, "the host forgets the last guest")
        assert target.growth() == []
        assert memory_of("self")["RssAnon"] - anonymous < KEPT


def leased(peer: Peer) -> bool:
    """Tries to allocate all that the quota allows."""
    try:
        peer.allocate(MIB)
    except BusyError:
        return False
    return True
