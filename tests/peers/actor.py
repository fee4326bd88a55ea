"""Processes that do as a test tells them, and the few words that tests of several processes use.

An `Actor` is a `Target` of `tensorwire.testing` that also connects, moves bytes by itself, forks,
kills itself and counts what it holds. Tests call its methods by name in another process.
"""

import contextlib
import ctypes
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire import Handle, Node, Peer, RemoteRegion, TensorwireError
from tensorwire.testing import Channel, Footprint, Member, PeerGroup, warm_up
from tensorwire.testing.target import Target, target_elsewhere

MIB = 1 << 20
GIB = 1 << 30
NOTICED_S = 1.0  # how soon a death on this host must be noticed
PATIENCE_S = 20.0  # for what is only required to happen


class Actor(Target):
    """The requests of a test to another process; arguments and results can be pickled."""

    def incarnation(self) -> int:
        """The incarnation of the Node."""
        return self._node.incarnation

    def connect(self, address: str | Handle, timeout_s: float = 10.0) -> str:
        """Connects, for the methods below; returns the transport."""
        self._link: Peer = self._node.connect(address, timeout_s=timeout_s)
        return self._link.path.transport

    def find_remote(self, name: str | Handle) -> int:
        """Looks a region of the peer up, for the methods below; returns its size."""
        self._remote: RemoteRegion = self._link.region(name)
        return self._remote.size_bytes

    def lease(self, size_bytes: int, name: str) -> None:
        """Allocates at the peer."""
        self._remote = self._link.allocate(size_bytes, name)

    def write_for_ever(self, size_bytes: int) -> None:
        """Writes into the remote region again and again; word 0 counts the rounds."""
        local = np.ones(size_bytes, np.uint8)
        for round_ in range(1, 1 << 60):
            self._remote[64:].write(local, signal=(self._remote.word(0), round_)).wait()

    def read_for_ever(self, size_bytes: int) -> None:
        """Reads the remote region again and again; its word 0 counts the rounds."""
        local = np.ones(size_bytes, np.uint8)
        for round_ in range(1, 1 << 60):
            self._remote[64:].read(local).wait()
            self._remote.word(0).set(round_)

    def die_when(self, key: str, offset: int, value: int) -> None:
        """Waits, awake, for a byte of an own region to be at least `value`, and kills itself."""
        array = self._regions[key].array()
        while array[offset] < value:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    def fork(self) -> int:
        """Forks a child that does nothing until it is killed; returns its number."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid

    def words(self, key: str, offsets: list[int]) -> list[int]:
        """The 64-bit words at these offsets of a region."""
        return self._regions[key].array("uint64")[np.array(offsets) // 8].tolist()

    def mark(self) -> None:
        """Notes what this process holds."""
        gc.collect()
        self._mark = Footprint.now()

    def growth(self, settle_s: float = 2.0) -> list[str]:
        """Returns what this process holds beyond `mark` and does not give back in time."""
        return growth_since(self._mark, settle_s)

    def peer_count(self) -> int:
        """How many peers the Node has now."""
        return len(self._node.peers)

    def rss_bytes(self) -> int:
        """Resident memory of this process that is in use and not shared with others."""
        ctypes.CDLL(None).malloc_trim(0)  # what is free but kept for later is no growth
        return memory_of("self")["RssAnon"]


def serve_actor(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: an Actor that is told what to do until the channel ends."""
    for name in options.get("transports") or []:
        warm_up(name)
    serve(channel, Actor(options))


def serve(channel: Channel, actor: Actor) -> None:
    """Lets an Actor do what it is told."""
    with contextlib.closing(actor), contextlib.suppress(EOFError):
        while True:
            method, args = channel.recv(None)
            error, result = None, None
            try:
                result = getattr(actor, method)(*args)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            channel.send((error, result))


def start_actor(
    group: PeerGroup, name: str, function: Callable[..., Any] = serve_actor, **options: Any
) -> tuple[Member, Any]:
    """Starts a process with an Actor whose Node has this name."""
    member = group.start(function, {"name": name, **options}, name=name)
    return member, target_elsewhere(member)


def background(function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Calls a function in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return future


def eventually(condition: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> None:
    """Looks again and again until a condition holds; fails when the time is over."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.002)


def growth_since(before: Footprint, settle_s: float = 2.0) -> list[str]:
    """Returns what this process holds more than before and does not give back in time."""
    deadline = time.monotonic() + settle_s
    while True:
        gc.collect()
        growth = Footprint.now().growth(before)
        if not growth or time.monotonic() > deadline:
            return growth
        time.sleep(0.01)


def all_complete(node: Node) -> bool:
    """Tells whether every transfer that the Node ever started has completed."""
    stats = node.stats()
    return stats["transfers_started"] == stats["transfers_completed"]


def memory_of(pid: int | str) -> dict[str, int]:
    """The memory figures of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {key: int(value.split()[0]) << 10 for key, value in pairs}


def cpu_seconds() -> float:
    """Processor time of this process and all its threads."""
    times = os.times()
    return times.user + times.system


def is_asleep(pid: int) -> bool:
    """Tells whether every thread of a process sleeps (or is stopped)."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state in "ST" for state in states)


def exists(pid: int) -> bool:
    """Tells whether a process exists and is not a zombie."""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in "ZX"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return False
        raise


@contextlib.contextmanager
def killed_at_end(pid: int) -> Iterator[int]:
    """Ends a process that is not our child, whatever the block does, and waits until it is gone."""
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not exists(pid), f"the end of process {pid}")


def error_of(function: Callable[..., Any], *args: Any, **options: Any) -> Exception | None:
    """The error of tensorwire or of bad use that a call raises, or None."""
    try:
        function(*args, **options)
    except (TensorwireError, ValueError, LookupError, MemoryError, PermissionError) as error:
        return error
    return None
