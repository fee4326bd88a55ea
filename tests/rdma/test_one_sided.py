"""RDMA is one-sided: a target that is stopped is written and read all the same.

Words need the target's CPU: they are held back, a bounded number of them on the wire, and arrive
when it goes on.
"""

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from actor import MIB, PATIENCE_S, Actor, serve
from actors import MachineGroup, node_options, start_actor_on
from rig import Machine

from tensorwire import wait_all
from tensorwire.testing import Channel
from tensorwire.testing.target import target_elsewhere

WORDS = 2000  # more than one peer may have under way

# Those that take longest first.
SUITES = (
    "test_faults.py",
    "test_threads.py",
    "test_restart.py::test_cycles_of_connections",
    "test_restart.py::test_restarts_under_load",
    "test_stopped.py",
)


class Initiator(Actor):
    """Writes into the remote region, reads it and raises its words, without waiting for words."""

    def write_and_read(self, seed: int) -> bool:
        """True if what is read back is what was written."""
        data = np.random.default_rng(seed).integers(0, 256, MIB, np.uint8)
        self._remote[64 : 64 + MIB].write(data).wait(PATIENCE_S)
        back = np.zeros_like(data)
        self._remote[64 : 64 + MIB].read(back).wait(PATIENCE_S)
        return bool((back == data).all())

    def raise_words(self) -> int:
        """Raises a word WORDS times; returns how many of these calls are over after a while."""
        word = self._remote.word(8)
        self._raising = [word.set(value) for value in range(1, WORDS + 1)]
        self._raising.append(self._remote[16:24].write(b"\7" * 8, signal=(self._remote.word(0), 1)))
        time.sleep(1.0)
        return sum(transfer.done() for transfer in self._raising)

    def finish_words(self) -> None:
        """Waits for all of them."""
        wait_all(self._raising, PATIENCE_S)


def serve_initiator(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: an Initiator that is told what to do until the channel ends."""
    serve(channel, Initiator(options))


def test_a_stopped_target(machines: tuple[Machine, Machine], group: MachineGroup) -> None:
    first, second = machines
    options = node_options(first, name="near", transports=["rdma"])
    near = target_elsewhere(group.start_on(first, serve_initiator, options))
    member, far = start_actor_on(group, second, "far", transports=["rdma"])
    handle = far.allocate("r", 2 * MIB)
    assert near.connect(handle) == "rdma"
    near.find_remote(handle)
    assert near.write_and_read(1)
    member.stop()
    before = cpu_ticks(second, member.pid)
    for seed in range(2, 7):
        assert near.write_and_read(seed)
    assert near.raise_words() == 0
    assert near.write_and_read(7), "words that wait hold nothing else up"
    assert cpu_ticks(second, member.pid) == before
    member.cont()
    near.finish_words()
    assert far.words("r", [0, 8, 16]) == [1, WORDS, 0x0707070707070707]
    data = np.random.default_rng(7).integers(0, 256, MIB, np.uint8)
    assert far.contents("r", 64, 64 + MIB) == data.tobytes()


def cpu_ticks(machine: Machine, pid: int) -> int:
    """Returns the CPU time that a process there has used."""
    fields = machine.run(["cat", f"/proc/{pid}/stat"]).rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def queue_pairs(machine: Machine) -> int:
    """How many of them the device there has, beside the one that the kernel keeps."""
    listed = machine.run(["rdma", "resource", "show", "qp", "link", f"{machine.device}/1"])
    return sum("pid" in line for line in listed.splitlines())


def test_the_named_device(machines: tuple[Machine, Machine]) -> None:
    first, _ = machines
    script = """
import sys, tensorwire as tw
try:
    with tw.Node(transports=["rdma"], rdma_device=sys.argv[1]) as node, \\
            tw.Node(transports=["rdma"]) as other:
        print(node.connect(other.address).path.wire)
except tw.UnavailableError as error:
    print("no:", error)
"""
    for name in ("rxe0", "rxe0:1", "eth0"):
        said = python(first, script, name)
        assert said == "RDMA by rc_verbs/rxe0:1, not encrypted\n"
    assert "no RDMA port is called 'mlx5_7'; there are rxe0:1" in python(first, script, "mlx5_7")
    first.run(["ip", "link", "set", "eth0", "down"])
    try:
        said = python(first, script, "rxe0")
        assert "no RDMA port is active: rxe0:1 (1: DOWN, eth0)" in said
        assert "ip link set" in said
    finally:
        first.run(["ip", "link", "set", "eth0", "up"])
    first.run(["sh", "-c", "until rdma link show rxe0/1 | grep -q ACTIVE; do sleep 0.05; done"])


def test_without_ucx(machines: tuple[Machine, Machine]) -> None:
    first, _ = machines
    script = """
import tensorwire as tw
try:
    tw.Node(transports=["rdma"])
except tw.UnavailableError as error:
    print(error)
"""
    said = python(first, script, env={"TENSORWIRE_UCX": "/nowhere/libucp.so.0"})
    assert "/nowhere/libucp.so.0 cannot be loaded" in said
    assert "apt-get install libucx0" in said


def test_locked_memory(machines: tuple[Machine, Machine]) -> None:
    """A region that may not be locked is refused, with the remedy; the rest goes on."""
    first, _ = machines
    script = """
import ctypes, resource, tensorwire as tw
resource.setrlimit(resource.RLIMIT_MEMLOCK, (400 << 20, 400 << 20))
libc = ctypes.CDLL(None)
header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.syscall(126, header, nothing) == 0  # capset: the superuser's memory is not counted
near, far = tw.Node(transports=["rdma"]), tw.Node(transports=["rdma"])
peer = near.connect(far.address)
small = far.allocate(4096, name="small")
peer.region("small").write(b"before").wait(10)
far.allocate(400 << 20, name="large")
try:
    peer.region("large")
except MemoryError as error:
    print(error)
peer.region("small").write(b"behind").wait(10)
print(bytes(small.memoryview()[:6]))
near.close()
far.close()
"""
    said = python(first, script)
    assert "the NIC cannot register 419430400 bytes" in said
    assert "this process may lock 409600 KiB: ulimit -l unlimited" in said
    assert said.endswith("b'behind'\n")


@pytest.mark.timeout(620)
def test_the_suites_of_other_transports(machines: tuple[Machine, Machine]) -> None:
    """Unchanged. Each runs within one machine, and both machines work at the same time."""
    left, failures = deque(SUITES), []

    def work_on(machine: Machine) -> None:
        while True:
            try:
                suite = left.popleft()
            except IndexError:
                return
            try:
                run_suite(machine, suite)
            except Exception as error:
                error.add_note(f"in {suite}")
                failures.append(error)

    with ThreadPoolExecutor(len(machines)) as pool:
        list(pool.map(work_on, machines))
    if failures:
        raise ExceptionGroup("suites", failures)


def run_suite(machine: Machine, suite: str, timeout_s: float = 400.0) -> None:
    """Also leaves no queue pair behind."""
    before = queue_pairs(machine)
    # A Node with rdma takes a second to make there, too long for a test that makes hundreds.
    chosen = "rdma and not come_and_go"
    command = ["-p", "no:cacheprovider", "-k", chosen, "--transport", "rdma", "-o", "timeout=300"]
    with machine.python("pytest", *command, f"tests/peers/{suite}") as process:
        code = process.wait(timeout_s)
    assert code == 0, process.output[-6000:]
    assert " passed" in process.output
    until = time.monotonic() + 10.0  # the kernel frees those of processes that were killed
    while (left := queue_pairs(machine)) != before and time.monotonic() < until:
        time.sleep(0.2)
    assert left == before


def python(
    machine: Machine, script: str, *arguments: str, env: dict[str, str] | None = None
) -> str:
    """Runs a script there and returns what it prints."""
    path = f"/tmp/script-{time.monotonic_ns()}.py"
    machine.run(["sh", "-c", f"cat >{path} <<'END'\n{script}\nEND"])
    with machine.python(path, *arguments, env=env) as process:
        return process.check(60.0)
