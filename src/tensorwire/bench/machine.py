"""Describes the machine of a figure: processor, memory, kernel, versions; and if it was quiet.

Reads /proc and /sys and the installed distributions; changes nothing but, on request, the cores on
which this process may run. Anything that cannot be read is None, never a guess.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tensorwire import _core
from tensorwire.memory.devices import read_line

PACKAGES = ("tensorwire", "numpy", "torch", "grpcio", "nixl-cu12", "nixl-cu13", "nixl")
"""Distributions whose version may explain a figure."""

_ROOT = Path("/")


def chosen(path: Path) -> str | None:
    """Returns the bracketed word of a kernel switch: "always [madvise] never" gives "madvise"."""
    text = read_line(path)
    words = (text or "").split()
    return next((word[1:-1] for word in words if word[0] + word[-1] == "[]"), text)


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yields key and value of each line "key: value"."""
    for line in (read_line(path) or "").splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def cpu_model(root: Path = _ROOT) -> str | None:
    """Returns the processor's name as the kernel gives it."""
    keys = ("model name", "Model", "Processor")
    found = (value for key, value in _entries(root / "proc/cpuinfo") if key in keys)
    return next(found, None) or platform.processor() or None


def memory_bytes(key: str = "MemTotal", root: Path = _ROOT) -> int | None:
    """Returns a figure of /proc/meminfo in bytes; None without one."""
    value = dict(_entries(root / "proc/meminfo")).get(key)
    return None if value is None else int(value.split()[0]) * 1024


def version(package: str) -> str | None:
    """Returns the version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(packages: Iterable[str] = PACKAGES) -> dict[str, Any]:
    """Returns everything about this machine that a reader of the figures needs, ready for JSON."""
    huge = _ROOT / "sys/kernel/mm/transparent_hugepage"
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "cpu_quota": _core.cpu_quota(),
        "governor": read_line(_ROOT / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "hypervisor": _hypervisor(),
        "kernel": platform.release(),
        "memory_bytes": memory_bytes(),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_huge_pages": chosen(huge / "enabled"),
        "transparent_huge_pages_shmem": chosen(huge / "shmem_enabled"),
        "python": platform.python_version(),
        "c_library": " ".join(platform.libc_ver()),
        "packages": {package: version(package) for package in packages},
    }


def _hypervisor() -> str | None:
    if "hypervisor" not in dict(_entries(_ROOT / "proc/cpuinfo")).get("flags", "").split():
        return None
    return read_line(_ROOT / "sys/class/dmi/id/sys_vendor") or "unknown"


def warnings_about(machine: dict[str, Any]) -> list[str]:
    """Returns a sentence for each fact that makes figures worse or less certain."""
    found = []
    quota = machine["cpu_quota"]
    if len(machine["affinity"]) < 2:
        found.append("one core only: both processes share it, so latency is that of the scheduler")
    if quota is not None and quota < 2:
        found.append(f"the control group grants {quota:g} cores: long runs will be throttled")
    if machine["governor"] not in (None, "performance"):
        found.append(
            f"frequency governor {machine['governor']}: small transfers look slower; "
            "'cpupower frequency-set -g performance' steadies them"
        )
    return found


class OtherWork:
    """The CPU time that other processes take on the cores of this one, from now on.

    Work of the kernel in interrupts belongs to nobody and is left out. Processes that this one has
    started count as its own while they live and after their parents have waited for them.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._cores = sorted(os.sched_getaffinity(0))
        self._begin = self._times()

    def share(self) -> float | None:
        """Returns their part of the time of these cores, 0 to 1; None where nothing tells."""
        now, before = self._times(), self._begin
        if now is None or before is None:
            return None
        wall, busy, own = (a - b for a, b in zip(now, before, strict=True))
        return max(0.0, busy - own) / (wall * len(self._cores)) if wall > 0 else None

    def _times(self) -> tuple[float, float, float] | None:
        """Returns seconds of the clock, of these cores at work, and of the own processes."""
        tick = os.sysconf("SC_CLK_TCK")
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            named = {words[0]: words[1:] for words in map(str.split, lines) if words}
            busy = 0
            for core in self._cores:
                user, nice, system, _, _, _, _, stolen, *_ = map(int, named[f"cpu{core}"])
                busy += user + nice + system + stolen
            return time.monotonic(), busy / tick, sum(self._own()) / tick
        except (OSError, KeyError, ValueError):
            return None

    def _own(self) -> Iterator[int]:
        """Yields the ticks of each process of the tree, and of children that it waited for."""
        parents: dict[int, int] = {}
        used: dict[int, int] = {}
        for folder in (self._root / "proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(fields[1])
                used[int(folder.name)] = sum(map(int, fields[11:15]))
        for pid in used:
            above = pid
            while above != os.getpid() and above in parents:
                above = parents[above]
            if above == os.getpid():
                yield used[pid]


def pin_process(cores: Iterable[int]) -> None:
    """Lets every thread of this process run on `cores` only, threads started before included.

    Raises:
        OSError: none of the cores may be used.
    """
    wanted = set(cores)
    for task in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(task), wanted)
        except ProcessLookupError:
            continue  # the thread ended between the listing and the call


def process_cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of another process, dead ones included.

    It is the process CPU clock of `clock_getcpuclockid(3)`: the kernel encodes it as the complement
    of the process number, shifted by three, with 2 for the scheduler's nanosecond clock.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(f"no CPU clock of process {pid}: {error}") from error
