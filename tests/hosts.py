"""Two hosts in one kernel: network namespaces joined by a pair of veth devices.

What a namespace does not separate is memory and processes, so tests that need two hosts forbid shm.
A process enters a host by `enter`; what it opens afterwards belongs there.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000
PREFIX = "10.213.87."


@dataclass(frozen=True)
class Host:
    """A namespace: its name and its address."""

    name: str
    address: str

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def run(self, *command: str) -> None:
        """Runs a command there."""
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True)


def missing() -> str | None:
    """Why two hosts cannot be made here."""
    if shutil.which("ip") is None:
        return "ip is missing: apt-get install iproute2"
    name = f"tw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"no permission to make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes them and takes them away."""
    tag = f"tw{os.getpid() % 100000}"
    hosts = (Host(f"{tag}a", f"{PREFIX}1"), Host(f"{tag}b", f"{PREFIX}2"))
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "del", host.name)
        names = [f"{host.name}v" for host in hosts]
        _ip("link", "add", names[0], "netns", hosts[0].name, "type", "veth",
            "peer", "name", names[1], "netns", hosts[1].name)  # fmt: skip
        for host, link in zip(hosts, names, strict=True):
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", link)
            host.run("ip", "link", "set", link, "up")
            host.run("ip", "link", "set", "lo", "up")
        yield hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def enter(path: str) -> Iterator[None]:
    """The calling thread, and threads that it starts, are on that host inside the block."""
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
