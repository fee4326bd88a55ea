"""Waiting costs nearly nothing, can be interrupted, and needs no core of its own."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from actor import MIB, background, eventually, is_asleep, start_actor
from waiting import CALLS, idles, interrupted, player

from tensorwire.memory import crowded
from tensorwire.testing import PeerGroup, node_pair

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

# These do not block on shm: they need nobody at the other side.
NEED_TARGET = ("Transfer.wait", "Transfer.wait, lead=False", "wait_all", "fetch_add")
SECONDS = 3.0
SHARE = 0.02  # of a core


def blocking_calls(transport: str) -> list[str]:
    return [name for name in CALLS if transport == "tcp" or name not in NEED_TARGET]


@pytest.mark.slow
def test_a_waiting_process_is_idle(transport: str) -> None:
    """All wait at the same time: a waiting process disturbs no other, so none is disturbed."""
    calls = ["wait_until", "wait_until, peer", "wait_until beside another", "reached", "accept"]
    calls += list(NEED_TARGET[:2]) if transport == "tcp" else []
    with PeerGroup() as group:
        host, target = start_actor(group, "host", transports=[transport])
        target.allocate("r", 32 * MIB, "rw", "r")
        address = target.address()
        members = [group.start(idles, name, [transport], address, SECONDS) for name in calls]
        for member in members:
            assert member.recv() == "ready"
        host.stop()
        for member in members:
            member.send("go")
        for name, member in zip(calls, members, strict=True):
            cpu_s, seconds = member.result()
            assert seconds >= SECONDS
            assert cpu_s < SHARE * seconds, f"{name}: {cpu_s / seconds:.1%} of a core"
        host.cont()


def test_interrupt(transport: str) -> None:
    """Ctrl-C ends every blocking call with KeyboardInterrupt."""
    with PeerGroup() as group:
        host, target = start_actor(group, "host", transports=[transport])
        target.allocate("r", 32 * MIB, "rw", "r")
        address = target.address()
        calls = blocking_calls(transport)
        members = [group.start(interrupted, name, [transport], address) for name in calls]
        for member in members:
            assert member.recv() == "ready"
        host.stop()
        for member in members:
            member.send("go")
        for name, member in zip(calls, members, strict=True):
            assert member.recv() == "blocking"
            eventually(lambda pid=member.pid: is_asleep(pid), f"{name} blocks")
            pressed = time.monotonic()
            os.kill(member.pid, signal.SIGINT)
            assert member.result() - pressed < 1.0, name
        host.cont()


def test_who_does_not_lead_leaves_the_loop_to_the_thread() -> None:
    """Also beside those that lead, and where the thread has parked for them."""
    with node_pair(["tcp"]) as pair:
        pair.far.allocate(64 * 1024, name="r")
        remote = pair.to_far.region("r")
        data = np.ones(64 * 1024, np.uint8)

        def write(lead: bool) -> None:
            for _ in range(200):
                remote.write(data).wait(10, lead=lead)

        write(True)
        handed_over = pair.near.stats()["handovers"]
        remote.write(data).wait(10, lead=False)  # the thread may still be parked
        for _ in range(50):
            time.sleep(0.002)
            remote.write(data).wait(10, lead=False)
        assert pair.near.stats()["handovers"] == handed_over
        together = [background(write, lead) for lead in (True, False, True, False)]
        for each in together:
            each.result(timeout=30)


@pytest.mark.parametrize("shared_core", [True, False])
def test_ping_pong(transport: str, shared_core: bool) -> None:
    """Two processes answer each other's signals, also if they have to share one core."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = cores[:1] if shared_core else cores
    rounds = 2000
    with PeerGroup() as group:
        players = [
            group.start(player, [transport], chosen, rounds, serves) for serves in (True, False)
        ]
        addresses = [each.recv() for each in players]
        for each, address in zip(players, reversed(addresses), strict=True):
            each.send(address)
        for step in ("ready", "played"):
            for each in players:
                assert each.recv() == step
            for each in players:
                each.send("go")
        assert [each.result() for each in players] == [rounds, rounds]


def test_cores_that_others_want_are_known() -> None:
    """Within moments, also where this process waits for nothing."""
    burners = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(len(os.sched_getaffinity(0)) + 1)
    ]
    try:
        eventually(crowded, "more threads want to run than there are cores")
    finally:
        for each in burners:
            each.kill()
            each.wait()
