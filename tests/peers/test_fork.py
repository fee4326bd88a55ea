"""Fork after a Node exists: the parent goes on unharmed, the child has nothing of the Node."""

import signal

import pytest
from actor import MIB, NOTICED_S, Actor, eventually, exists, killed_at_end, start_actor
from forking import (
    calls_in_child,
    descriptors_elsewhere,
    dies_with_a_child,
    first_node_while_forking,
    forks_during_traffic,
    forks_while_transfers_end,
    loader,
    memory_in_child,
    pending_in_child,
)

from tensorwire import Node
from tensorwire.testing import PeerGroup

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


def host(group: PeerGroup, transport: str) -> Actor:
    """A process with a region "r" for the forking one."""
    _, target = start_actor(group, "host", transports=[transport])
    target.allocate("r", 2 * MIB, "rw", "r")
    return target


def test_forks_during_traffic(transport: str) -> None:
    with PeerGroup() as group:
        target = host(group, transport)
        member = group.start(forks_during_traffic, [transport], target.address())
        seen = member.result()
        assert seen["exits"] == [True] * 8, member.log()
        assert seen["complete"]
        assert target.value("r", 0) == seen["rounds"]


def test_child_calls(transport: str) -> None:
    """Every call tells that the Node belongs to the parent."""
    with PeerGroup() as group:
        target = host(group, transport)
        outcome = group.start(calls_in_child, [transport], target.address()).result()
        wrong = {
            name: what
            for name, what in outcome.items()
            if what != "fine" and not (what.startswith("ClosedError") and "fork" in what)
        }
        assert wrong == {}


def test_child_waits_for_a_transfer_of_its_parent() -> None:
    with PeerGroup() as group:
        member, target = start_actor(group, "host", transports=["tcp"])
        target.allocate("r", 32 * MIB, "rw", "r")
        parent = group.start(pending_in_child, target.address())
        assert parent.recv() == "ready"
        member.stop()
        parent.send("go on")
        assert parent.recv() == "tried"
        member.cont()
        for what in parent.result():
            assert what.startswith("ClosedError"), what
            assert "fork" in what
        assert target.is_filled("r", 0, 32 * MIB, 1)


def test_child_memory(transport: str) -> None:
    """Touching the parent's regions ends a child; it never reaches the parent's memory."""
    with PeerGroup() as group:
        target = host(group, transport)
        seen = group.start(memory_in_child, [transport], target.address()).result()
        died = f"status {-signal.SIGSEGV}"
        assert seen == {"read": died, "write": died, "end": died, "untouched": True}


def test_descriptors_stay_with_the_parent(transport: str) -> None:
    with PeerGroup() as group:
        target = host(group, transport)
        seen = group.start(descriptors_elsewhere, [transport], target.address()).result()
        # What the child has more than the parent had before: its pipe, and nothing else.
        assert len(seen["forked"]) == 1, seen["forked"]
        assert "pipe:" in seen["forked"][0]
        for listing in seen["executed"]:
            for trace in ("memfd:", "eventpoll", "eventfd", "socket:"):
                assert trace not in listing, listing


@pytest.mark.slow
def test_data_loader() -> None:
    pytest.importorskip("torch")
    with PeerGroup() as group:
        addresses = {transport: host(group, transport).address() for transport in ("shm", "tcp")}
        seen = group.start(loader, addresses).result(50)
        assert seen == {"sum": 2 * sum(range(256)), "complete": True, "peers": 2}


def test_death_is_noticed_although_a_child_lives(transport: str) -> None:
    """Its peers are not fooled by descriptors that a child might hold."""
    with PeerGroup() as group, Node("watcher", transports=[transport]) as node:
        node.allocate(64, name="r")
        member = group.start(dies_with_a_child, [transport], node.address, name="parent")
        peer = node.accept(20)
        with killed_at_end(member.recv()) as child:
            member.kill()
            eventually(lambda: peer.lost, "the loss", NOTICED_S)
            assert exists(child)


def test_a_child_of_a_process_that_makes_its_first_node() -> None:
    """Another thread is in the middle of it; the child makes one of its own."""
    with PeerGroup() as group:
        assert group.start(first_node_while_forking).result() == 0


@pytest.mark.slow
def test_children_while_transfers_end() -> None:
    """Other threads let go of buffers; each child uses Nodes of its own."""
    with PeerGroup() as group:
        assert group.start(forks_while_transfers_end).result(50) == 0
