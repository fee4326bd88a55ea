"""Process functions for test_fork.py: processes with a Node that fork, and what their children try.

A forked child reports through a pipe and ends by os._exit, unless the ordinary exit is the point.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from actor import MIB, PATIENCE_S, all_complete

from tensorwire import ClosedError, Node, wait_all
from tensorwire.testing import Channel


def in_child(function: Callable[[], Any], ordinary_exit: bool = False) -> Any:
    """Runs a function in a forked child and gives what it returns, or its exit status."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            result = pickle.dumps((None, function()))
        except BaseException as error:
            result = pickle.dumps((repr(error), None))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(result)
        if ordinary_exit:
            # As sys.exit(), from down here: finalizers, atexit, static destructors.
            ctypes.pythonapi.Py_Exit(0)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        return f"status {os.waitstatus_to_exitcode(status)}"
    error, result = pickle.loads(data)
    if error is not None:
        raise AssertionError(f"in the child: {error}")
    return result


class Traffic:
    """Writes, reads and signals to a peer in a thread, checked, until it is stopped."""

    def __init__(self, node: Node, address: str, require: str | None = None) -> None:
        self._peer = node.connect(address, require=require)
        self._remote = self._peer.region("r")
        self.rounds = 0
        self._error: BaseException | None = None
        self._going = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            size = self._remote.size_bytes - 64
            data, back = np.empty(size, np.uint8), np.empty(size, np.uint8)
            while self._going:
                self.rounds += 1
                data[:] = self.rounds % 251
                signal = self._remote.word(0), self.rounds
                self._remote[64:].write(data, signal=signal).wait(PATIENCE_S)
                self._remote[64:].read(back).wait(PATIENCE_S)
                assert (back == data).all()
        except BaseException as error:
            self._error = error

    def wait_for(self, rounds: int) -> None:
        """Waits until `rounds` more rounds are done."""
        goal = self.rounds + rounds
        while self.rounds < goal:
            assert self._error is None, self._error
            assert self._thread.is_alive()

    def stop(self) -> None:
        self._going = False
        self._thread.join()
        assert self._error is None, self._error


def forks_during_traffic(channel: Channel, transports: list[str], address: str) -> dict[str, Any]:
    """Forks many times while bytes move; every other child leaves by the ordinary exit."""
    with Node("parent", transports=transports) as node:
        traffic = Traffic(node, address)
        exits = []
        for number in range(8):
            traffic.wait_for(1)
            exits.append(in_child(lambda: gc.collect() >= 0, ordinary_exit=number % 2 == 0))
        traffic.wait_for(3)
        traffic.stop()
        return {"exits": exits, "complete": all_complete(node), "rounds": traffic.rounds}


def calls_in_child(channel: Channel, transports: list[str], address: str) -> dict[str, str]:
    """Tries everything in a forked child; gives what each call did."""
    with Node("parent", transports=transports) as node:
        peer = node.connect(address)
        remote = peer.region("r")
        region = node.allocate(4096, name="own")
        word, batch = region.word(0), peer.prepare_write([b"x"], [remote])
        local = np.ones(64, np.uint8)
        finished = remote.write(local)
        finished.wait(PATIENCE_S)
        handle = region.handle()
        calls: dict[str, Callable[[], Any]] = {
            "node.allocate": lambda: node.allocate(64),
            "node.adopt": lambda: node.adopt(local),
            "node.region": lambda: node.region("own"),
            "node.connect": lambda: node.connect(address),
            "node.accept": lambda: node.accept(1.0),
            "node.peers": lambda: node.peers,
            "node.wait_until": lambda: node.wait_until(word, 1, 1.0),
            "region.array": region.array,
            "region.memoryview": region.memoryview,
            "region.adopt": lambda: region.adopt(local),
            "word.value": lambda: word.value,
            "word.wait_until": lambda: word.wait_until(1, 1.0),
            "word.wait_until, reached": lambda: word.wait_until(0, 1.0),
            "word.reached": lambda: asyncio.run(word.reached(1, 1.0)),
            "peer.region": lambda: peer.region("r"),
            "peer.region, handle": lambda: peer.region(remote.handle()),
            "peer.allocate": lambda: peer.allocate(64),
            "peer.write": lambda: peer.write([local], [remote]).wait(1.0),
            "peer.read": lambda: peer.read([local], [remote]).wait(1.0),
            "peer.signal": lambda: peer.signal(remote.word(0), 1).wait(1.0),
            "peer.fetch_add": lambda: peer.fetch_add(remote.word(0)).wait(1.0),
            "peer.prepare_write": lambda: peer.prepare_write([local], [remote]).start().wait(1.0),
            "prepared.start": lambda: batch.start().wait(1.0),
            "remote.write": lambda: remote.write(local).wait(1.0),
            "remote.write, signal": lambda: remote.write(local, signal=(remote.word(0), 1)),
            "remote.read": lambda: remote.read(local).wait(1.0),
            "remote.free": lambda: remote.free(1.0),
            "remote_word.set": lambda: remote.word(0).set(1).wait(1.0),
            "remote_word.fetch_add": lambda: remote.word(0).fetch_add(1, 1.0),
        }
        allowed: dict[str, Callable[[], Any]] = {
            "node.name": lambda: node.name == "parent",
            "node.address": lambda: bool(node.address),
            "node.closed": lambda: node.closed,
            "node.close": lambda: node.close() is None,
            "region.free": lambda: region.free() is None,
            "peer.close": lambda: peer.close() is None,
            "repr": lambda: bool(repr((node, region, peer, remote, batch, finished))),
            "finished.wait": lambda: finished.wait() is None and finished.done(),
            "wait_all": lambda: wait_all([finished]) is None,
            "handle": lambda: region.handle() == handle,
            "own Node": own_node,
        }
        outcome = {name: in_child(lambda call=call: attempt(call)) for name, call in calls.items()}
        for name, call in allowed.items():
            outcome[name] = "fine" if in_child(call) is True else "no"
        # The parent has felt nothing of it.
        remote.write(local).wait(PATIENCE_S)
        region.array()[:] = 1
        return outcome


def attempt(call: Callable[[], Any]) -> str:
    try:
        result = call()
    except ClosedError as error:
        return f"ClosedError: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"returned {result!r}"


def own_node() -> bool:
    """A forked child starts a Node of its own, as the messages advise."""
    with Node("first") as first, Node("second") as second:
        region = second.allocate(64)
        peer = first.connect(second.address)
        peer.region(region.handle()).write(b"child").wait(PATIENCE_S)
        return region.memoryview()[:5] == b"child"


def pending_in_child(channel: Channel, address: str) -> list[str]:
    """Waits in a child for a transfer that is in flight in its parent; the peer is frozen."""
    with Node("parent", transports=["tcp"]) as node:
        remote = node.connect(address).region("r")
        channel.send("ready")
        channel.recv()
        transfer = remote.write(np.ones(remote.size_bytes, np.uint8))
        seen = [in_child(lambda: attempt(lambda: transfer.wait(5.0)))]

        async def waits() -> None:
            await transfer

        seen.append(in_child(lambda: attempt(lambda: asyncio.run(waits()))))
        channel.send("tried")
        transfer.wait(PATIENCE_S)
        return seen


def memory_in_child(channel: Channel, transports: list[str], address: str) -> dict[str, Any]:
    """Touches the parent's memory, own and remote, in a child; it must die of it."""
    with Node("parent", transports=transports) as node:
        region = node.allocate(MIB)
        view = region.array()
        view[:] = 7
        results: dict[str, Any] = {}
        for name, touch in (
            ("read", lambda: int(view[0])),
            ("write", lambda: view.__setitem__(0, 9)),
            ("end", lambda: int(view[-1])),
        ):
            # By way of a child that lives on, so that the grandchild is far from the Node.
            results[name] = in_child(lambda touch=touch: in_child(touch))
        results["untouched"] = bool((view == 7).all())
        return results


def descriptors_elsewhere(channel: Channel, transports: list[str], address: str) -> dict[str, Any]:
    """Which descriptors a forked child and an executed program have beyond what they should."""
    usual = open_descriptors()
    with Node("parent", transports=transports) as node:
        node.allocate(64)
        peer = node.connect(address)
        remote = peer.region("r")
        remote.write(b"x").wait(PATIENCE_S)
        executed = [
            subprocess.run(
                ["/bin/ls", "-l", "/proc/self/fd"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=True,
                **options,
            ).stdout
            for options in ({"close_fds": False}, {"close_fds": False, "preexec_fn": os.getpid})
        ]
        forked = in_child(lambda: sorted(set(open_descriptors()) - set(usual)))
        return {"forked": forked, "executed": executed}


def open_descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            pass  # the listing's own
    return found


def loader(channel: Channel, addresses: dict[str, str]) -> dict[str, Any]:
    """A DataLoader with two forked workers after a Node, during traffic on each transport."""
    import torch
    from torch.utils.data import DataLoader

    with Node("parent") as node:
        traffic = [Traffic(node, address, require) for require, address in addresses.items()]
        batches = DataLoader(
            torch.utils.data.TensorDataset(torch.arange(256)),
            batch_size=8,
            num_workers=2,
            multiprocessing_context="fork",
        )
        sums = []
        for _ in range(2):
            for (batch,) in batches:
                sums.append(int(batch.sum()))
                for each in traffic:
                    each.wait_for(1)
        for each in traffic:
            each.wait_for(3)
            each.stop()
        return {"sum": sum(sums), "complete": all_complete(node), "peers": len(node.peers)}


def dies_with_a_child(channel: Channel, transports: list[str], address: str) -> None:
    """Forks a child that lives on, tells its number, and waits to be killed."""
    with Node("parent", transports=transports) as node:
        peer = node.connect(address)
        remote = peer.region("r")
        remote.write(b"x").wait(PATIENCE_S)
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        channel.send(pid)
        channel.recv(None)


def _hangs(function: Callable[[], None]) -> bool:
    """Tells whether a forked child does not come to the end of a function within seconds."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        with contextlib.suppress(BaseException):
            function()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def first_node_while_forking(_: Channel) -> int:
    """How many of some children hang that were forked while the first Node here was made."""

    def fork_meanwhile(delay_s: float) -> int:
        making = threading.Thread(target=lambda: Node("first").close())
        making.start()
        time.sleep(delay_s)
        hung = _hangs(lambda: Node("child").close())
        making.join()
        return int(hung)

    # Each in a process of its own, which has made no Node yet.
    return sum(in_child(partial(fork_meanwhile, i * 2e-4)) for i in range(20))


def forks_while_transfers_end(_: Channel) -> int:
    """How many of some children hang that use Nodes of their own."""

    def use() -> None:
        with Node("a", transports=["tcp"]) as a, Node("b", transports=["tcp"]) as b:
            b.allocate(64, name="x")
            remote = a.connect(b.address).region("x")
            for _ in range(3):
                remote.write(np.ones(8, np.uint8)).wait(2)

    over = False
    with Node("near", transports=["tcp"]) as near, Node("far", transports=["tcp"]) as far:
        far.allocate(4096, name="r")
        remote = near.connect(far.address).region("r")

        def transfer() -> None:
            while not over:
                wait_all([remote.write(np.ones(8, np.uint8)) for _ in range(64)])

        threads = [threading.Thread(target=transfer) for _ in range(3)]
        for each in threads:
            each.start()
        hung = 0
        until = time.monotonic() + 15
        while time.monotonic() < until and hung == 0:
            hung += _hangs(use)
        over = True
        for each in threads:
            each.join()
    return hung
