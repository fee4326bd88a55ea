"""Two hosts in one kernel: network namespaces joined by a pair of veth devices.

A namespace does not separate memory and processes, so tests that need two hosts forbid shm. A
process enters a host by `enter`; what it opens afterwards belongs there. The link between them is
made slow by `shape`, broken by `cut`, `cut_one_way` and `unplug`, and mended by `restore`.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace

CLONE_NEWNET = 0x40000000
PREFIX = "10.213.87."
NOBODY = "02:00:00:00:00:01"
QUEUE_MS = 10  # what the shaped link queues at most


@dataclass(frozen=True)
class Host:
    """A namespace: its name, its address, and its end of the link."""

    name: str
    address: str
    link: str

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def run(self, *command: str) -> None:
        """Runs a command there."""
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True)


Hosts = tuple[Host, Host]


@functools.cache
def missing() -> str | None:
    """Returns the reason why two hosts cannot be made here, or None."""
    if shutil.which("ip") is None:
        return "ip is missing: apt-get install iproute2"
    name = f"tw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no permission to make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@functools.cache
def missing_shape() -> str | None:
    """Returns the reason why a link between two hosts cannot be shaped here, or None."""
    if why_not := missing():
        return why_not
    if shutil.which("tc") is None:
        return "tc is missing: apt-get install iproute2"
    with two_hosts() as hosts:
        command = ["ip", "netns", "exec", hosts[0].name, *_bucket(hosts[0], 1000)]
        made = subprocess.run(command, capture_output=True, text=True)
    return f"no token bucket (sch_tbf): {made.stderr.strip()}" if made.returncode else None


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Makes them and takes them away."""
    tag = f"tw{os.getpid() % 100000}"
    a, b = (Host(f"{tag}{x}", f"{PREFIX}{i}", f"{tag}{x}v") for i, x in ((1, "a"), (2, "b")))
    with contextlib.ExitStack() as stack:
        for host in (a, b):
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        _ip("link", "add", a.link, "netns", a.name, "type", "veth",
            "peer", "name", b.link, "netns", b.name)  # fmt: skip
        for host in (a, b):
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", host.link)
            host.run("ip", "link", "set", host.link, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield a, b


# ---- the link


def shape(hosts: Hosts, megabits: int) -> None:
    """Lets each side send only so fast; what comes faster waits in a short queue."""
    for host in hosts:
        host.run(*_bucket(host, megabits))


def _bucket(host: Host, megabits: int) -> list[str]:
    burst = max(megabits * 125, 16 << 10)  # what one millisecond carries, and a large packet
    return [
        *("tc", "qdisc", "replace", "dev", host.link, "root", "tbf"),
        *("rate", f"{megabits}mbit", "burst", str(burst), "latency", f"{QUEUE_MS}ms"),
    ]


def cut(hosts: Hosts) -> None:
    """Lets the network swallow everything, without a notice to either side."""
    cut_one_way(*hosts)
    cut_one_way(*reversed(hosts))


def cut_one_way(sender: Host, receiver: Host) -> None:
    """Swallows what one host sends to the other: it goes to a station that does not exist."""
    sender.run("ip", "neigh", "replace", receiver.address, "dev", sender.link,
               "lladdr", NOBODY, "nud", "permanent")  # fmt: skip


def unplug(host: Host) -> None:
    """Takes its device down: it has no route, the other side no carrier."""
    host.run("ip", "link", "set", host.link, "down")


def restore(hosts: Hosts) -> None:
    """Undoes every cut. The link keeps its shape."""
    for host in hosts:
        host.run("ip", "link", "set", host.link, "up")
        host.run("ip", "neigh", "flush", "dev", host.link, "nud", "permanent")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def move(host: Host, address: str) -> Host:
    """Gives it another address; what was bound to the old one is not reachable any more."""
    host.run("ip", "addr", "del", f"{host.address}/24", "dev", host.link)
    host.run("ip", "addr", "add", f"{address}/24", "dev", host.link)
    return replace(host, address=address)


# ---- being there


@contextlib.contextmanager
def enter(path: str) -> Iterator[None]:
    """Moves the calling thread, and threads that it starts, to that host within the block."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(path, os.O_RDONLY)
    try:
        _set(there)
        yield
    finally:
        _set(here)
        os.close(here)
        os.close(there)


def _set(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
