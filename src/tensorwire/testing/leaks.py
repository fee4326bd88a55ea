"""Counts the resources of a process from outside: descriptors, memory, threads, children.

Reads /proc only and knows nothing of tensorwire, so it also finds what other code left behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that this process holds now; `now` takes a Footprint, `growth` compares two.

    Each attribute counts things by what they are, not by their number in this process, so that
    closing and opening the same thing again is no growth.

    Attributes:
        descriptors: open files; sockets by inode with protocol and address.
        mappings: mapped memfds and shared memory files, by inode and length.
        threads: running threads, by number and name.
        children: child processes, also those that have ended and were not waited for.
        shared_files: files in /dev/shm, of any process; folders and named semaphores there are no
            shared memory.
    """

    descriptors: Counter[str] = field(default_factory=Counter)
    mappings: Counter[str] = field(default_factory=Counter)
    threads: Counter[str] = field(default_factory=Counter)
    children: Counter[str] = field(default_factory=Counter)
    shared_files: Counter[str] = field(default_factory=Counter)

    @classmethod
    def now(cls) -> Footprint:
        """Takes stock. Resources that come or go meanwhile may be missing."""
        return cls(_descriptors(), _mappings(), _threads(), _children(), _shared_files())

    def growth(self, since: Footprint) -> list[str]:
        """Returns one line for each resource that is here and was not there before."""
        lines = []
        for kind in self.__slots__:
            more = getattr(self, kind) - getattr(since, kind)
            lines += [f"{kind}: {count} × {what}" for what, count in sorted(more.items())]
        return lines


@contextlib.contextmanager
def assert_no_leak(settle_s: float = 2.0) -> Iterator[None]:
    """Checks that the block gave back everything that it took.

    Background work gets `settle_s` seconds to end; the check returns as soon as
    nothing is left. An exception of the block passes through without a check.

    Raises:
        AssertionError: something was left; the message lists it.
    """
    gc.collect()  # garbage of before must not make room for a leak
    before = Footprint.now()
    yield
    check_no_growth(before, settle_s)


def check_no_growth(before: Footprint, settle_s: float = 2.0) -> None:
    """Checks that nothing is held that was not held before; see `assert_no_leak`."""
    deadline = time.monotonic() + settle_s
    while Footprint.now().growth(before):
        gc.collect()  # what is left may be garbage
        growth = Footprint.now().growth(before)
        if growth and time.monotonic() > deadline:
            raise AssertionError(f"left behind after {settle_s:g} s:\n  " + "\n  ".join(growth))
        time.sleep(0.01)


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    sockets = _sockets()
    for name in _entries("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            # The listing itself shows up as a descriptor that is gone by now, or as the folder.
            if not (target.startswith("/proc/") and target.endswith("/fd")):
                found[sockets.get(target, target)] += 1
    return found


def _sockets() -> dict[str, str]:
    """Returns the text for each socket, with protocol and address, by the text of its link."""
    described = {}
    for protocol in ("tcp", "tcp6", "unix"):
        for line in _lines(f"/proc/self/net/{protocol}")[1:]:
            words = [*line.split(), "unnamed"]
            if protocol == "unix":
                name, address = f"socket:[{words[6]}]", words[7]
            else:
                name, address = f"socket:[{words[9]}]", f"{words[1]} to {words[2]}"
            described[name] = f"{name} {protocol} {address}"
    return described


def _mappings() -> Counter[str]:
    found: Counter[str] = Counter()
    for line in _lines("/proc/self/maps"):
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(("/memfd:", "/dev/shm/")):
            start, end = (int(part, 16) for part in words[0].split("-"))
            found[f"{words[5]} inode {words[4]}, {end - start} bytes"] += 1
    return found


def _threads() -> Counter[str]:
    return Counter(
        f"{tid} ({name})"
        for tid in _entries("/proc/self/task")
        for name in _lines(f"/proc/self/task/{tid}/comm")
    )


def _children() -> Counter[str]:
    return Counter(
        f"{pid} ({_command(pid)})"
        for tid in _entries("/proc/self/task")
        for line in _lines(f"/proc/self/task/{tid}/children")
        for pid in line.split()
    )


def _command(pid: str) -> str:
    name, _, rest = "\n".join(_lines(f"/proc/{pid}/stat")).rpartition(")")
    if not rest:
        return "gone"
    return name.partition("(")[2] + (", ended and not waited for" if rest.split()[0] == "Z" else "")


def _shared_files() -> Counter[str]:
    # Names with "sem." are semaphores of sem_open(3); pools of processes make many at a time.
    return Counter(
        name
        for name in _entries("/dev/shm")
        if not (name.startswith("sem.") or os.path.isdir(f"/dev/shm/{name}"))
    )


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
