"""Hosts in one kernel: two joined by a link, or several at a switch, at a chosen speed.

They are network namespaces; token buckets limit what each sends, and at a switch what each
receives. Needs root, and `ip` and `tc` (Debian's iproute2). The hosts share memory and cores, so a
bench between them must not use shared memory. The machine's own network is not changed, and the
namespaces are removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_PREFIX = "10.213.88."
_QUEUE_MS = 10  # the longest queue of the link
_SWITCH_QUEUE_MS = 50  # longer, as several may send to one host at once


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace: its name, IP address, and network device; picklable."""

    name: str
    address: str
    device: str

    def command(self, *words: str) -> list[str]:
        """Returns the command line that runs `words` in this host, with the same process id."""
        return ["ip", "netns", "exec", self.name, *words]

    def enter(self) -> None:
        """Moves the calling thread into this host, and all threads that it starts from now on.

        Raises:
            OSError: the host is gone, or the process is not root.
        """
        descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(descriptor, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {self.name}")
        finally:
            os.close(descriptor)


Hosts = tuple[Host, Host]


def missing(megabits: int) -> str | None:
    """Returns the reason why such a link is impossible here, or None."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is missing: apt-get install iproute2"
    try:
        with two_hosts(megabits):
            return None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip()
        return f"no link between network namespaces ({said}); it needs root"


@contextlib.contextmanager
def two_hosts(megabits: int) -> Iterator[Hosts]:
    """Makes two hosts joined by a link; each sends at most `megabits` Mbit/s.

    Raises:
        subprocess.CalledProcessError: `ip` or `tc` failed.
    """
    tag = f"twb{os.getpid() % 100000}"
    a, b = (Host(f"{tag}{x}", f"{_PREFIX}{i}", f"{tag}{x}v") for i, x in ((1, "a"), (2, "b")))
    with contextlib.ExitStack() as stack:
        _make(stack, a.name, b.name)
        _run("ip", "link", "add", a.device, "netns", a.name, "type", "veth",
             "peer", "name", b.device, "netns", b.name)  # fmt: skip
        for host in (a, b):
            _plug(host, megabits, _QUEUE_MS)
        yield a, b


@contextlib.contextmanager
def switched_hosts(count: int, megabits: int) -> Iterator[list[Host]]:
    """Makes hosts at one switch; each sends and receives at most `megabits` Mbit/s.

    The switch queues packets of several hosts to one, as real switches do.

    Raises:
        ValueError: more hosts than there are addresses.
        subprocess.CalledProcessError: `ip` or `tc` failed.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"a switch has 1 to 200 hosts, not {count}")
    tag = f"tws{os.getpid() % 100000}"
    switch = f"{tag}s"
    hosts = [Host(f"{tag}h{i}", f"{_PREFIX}{i + 1}", f"v{i}") for i in range(count)]
    with contextlib.ExitStack() as stack:
        _make(stack, switch, *(host.name for host in hosts))
        inside = ("ip", "netns", "exec", switch)
        _run(*inside, "ip", "link", "add", "bridge", "type", "bridge")
        _run(*inside, "ip", "link", "set", "bridge", "up")
        for host in hosts:
            _run("ip", "link", "add", host.device, "netns", host.name, "type", "veth",
                 "peer", "name", host.device, "netns", switch)  # fmt: skip
            _run(*inside, "ip", "link", "set", host.device, "master", "bridge", "up")
            _run(*inside, *_bucket(host, megabits, _SWITCH_QUEUE_MS))
            _plug(host, megabits, _SWITCH_QUEUE_MS)
        yield hosts


def _make(stack: contextlib.ExitStack, *names: str) -> None:
    """Adds namespaces, which are removed when the stack is closed."""
    for name in names:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "del", name)


def _plug(host: Host, megabits: int, queue_ms: int) -> None:
    """Gives a host its address, and limits its sending speed."""
    _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", host.device))
    _run(*host.command("ip", "link", "set", host.device, "up"))
    _run(*host.command("ip", "link", "set", "lo", "up"))
    _run(*host.command(*_bucket(host, megabits, queue_ms)))


def _bucket(host: Host, megabits: int, queue_ms: int) -> list[str]:
    burst = max(megabits * 125, 16 << 10)  # one millisecond of data, and at least a large packet
    return [
        *("tc", "qdisc", "replace", "dev", host.device, "root", "tbf"),
        *("rate", f"{megabits}mbit", "burst", str(burst), "latency", f"{queue_ms}ms"),
    ]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
