"""`tensorwire info`: what this machine can do, what is missing, and the remedy.

Each check is a function that returns one Finding and never raises; the command prints them.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorwire.bench import machine
from tensorwire.errors import TensorwireError
from tensorwire.memory import Node
from tensorwire.memory.devices import rdma_ports

OK, PART, MISSING = "yes", "partly", "no"
_STYLES = {OK: "green", PART: "yellow", MISSING: "red"}

_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
_SEAL_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 16)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing this machine has or lacks.

    Attributes:
        subject: what was looked at.
        state: "yes", "partly" or "no".
        detail: what was found.
        remedy: what to do about it, "" when there is nothing to do.
    """

    subject: str
    state: str
    detail: str
    remedy: str = ""


# --- transports ---------------------------------------------------------------------------------


def check_shm() -> Finding:
    """A memfd that can be mapped and sealed, which is what a shm region is."""
    try:
        descriptor = os.memfd_create("tensorwire-info", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return Finding("shm", MISSING, f"no memfd: {error}", "a Linux kernel of 3.17 or newer")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
        fcntl.fcntl(descriptor, getattr(fcntl, "F_ADD_SEALS", 1033), _SEALS)
    except OSError as error:
        return Finding(
            "shm", MISSING, f"a memfd cannot be sealed: {error}", "allow fcntl F_ADD_SEALS here"
        )
    else:
        try:
            fcntl.fcntl(descriptor, getattr(fcntl, "F_ADD_SEALS", 1033), _SEAL_FUTURE_WRITE)
        except OSError:
            return Finding(
                "shm",
                PART,
                "memfd and size seals; read-only grants cannot be sealed",
                "a Linux kernel of 5.1 or newer",
            )
    finally:
        os.close(descriptor)
    return Finding("shm", OK, "memfd, size seals, read-only seals")


def check_tcp() -> Finding:
    """A listening socket on loopback, and whether IPv6 is there too."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return Finding("tcp", MISSING, f"cannot listen on 127.0.0.1: {error}", "bring up 'lo'")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return Finding("tcp", OK, "IPv4 only")
    return Finding("tcp", OK, "IPv4 and IPv6")


def check_rdma() -> Finding:
    """A Node that offers it: the device, its port, UCX and locked memory at once."""
    ports = (f"{port.device}:{port.port} ({port.state})" for port in rdma_ports())
    devices = ", ".join(ports) or "no device"
    try:
        with Node("info", transports=["rdma"]):
            return Finding("rdma", OK, devices)
    except (TensorwireError, MemoryError) as error:
        return Finding("rdma", MISSING, devices, str(error))


# --- packages -----------------------------------------------------------------------------------


def check_core() -> Finding:
    """The compiled module: imported, not only found."""
    try:
        core = importlib.import_module("tensorwire._core")
    except ImportError as error:
        return Finding("core", MISSING, str(error), "pip install --force-reinstall tensorwire")
    found = machine.version("tensorwire") or "not installed as a package"
    return Finding("core", OK, f"tensorwire {found}, {Path(str(core.__file__)).name}")


def _check_package(name: str, why: str, remedy: str, needed: bool = False) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, MISSING if needed else PART, f"not installed; {why}", remedy)
    return Finding(name, OK, machine.version(name) or "version unknown")


def check_numpy() -> Finding:
    """What every array view is made of."""
    return _check_package("numpy", "nothing works without it", "pip install numpy", needed=True)


def check_torch() -> Finding:
    """Optional: tensor views, adopting tensors, training."""
    return _check_package(
        "torch", "tensors and training need it", "pip install 'tensorwire[torch]'"
    )


# --- limits and circumstances -------------------------------------------------------------------


def check_open_files() -> Finding:
    """Each peer takes a few descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_amount(soft)} of at most {_amount(hard)}"
    if 0 <= soft < 4096:
        return Finding(
            "open files", PART, text, f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
        )
    return Finding("open files", OK, text)


def check_locked_memory() -> Finding:
    """RDMA pins what it registers; shm and tcp do not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("locked memory", OK, text)
    return Finding("locked memory", PART, f"{text}; only rdma needs more", "ulimit -l unlimited")


def check_huge_pages() -> Finding:
    """Large shared regions are faster with them; a note, not a fault."""
    anonymous = machine.chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    shared = machine.chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    detail = f"anonymous memory: {anonymous or 'unknown'}; shared memory: {shared or 'unknown'}"
    if shared in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", OK, detail)
    return Finding(
        "huge pages",
        PART,
        f"{detail}; shm regions use {mmap.PAGESIZE >> 10} KiB pages",
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)",
    )


def check_cores() -> Finding:
    """Waiting is cheapest and fastest when both processes have a core."""
    usable = len(os.sched_getaffinity(0))
    quota = machine.cpu_quota()
    detail = f"{usable} of {os.cpu_count()} usable, {machine.cpu_model() or 'unknown processor'}"
    if quota is not None:
        detail += f"; control group grants {quota:g}"
    if min(usable, quota or usable) < 2:
        return Finding("cores", PART, detail, "two cores or more, so that a waiter may spin")
    return Finding("cores", OK, detail)


def check_memory() -> Finding:
    """What regions can be made of."""
    total, free = machine.memory_bytes(), machine.memory_bytes("MemAvailable")
    if total is None or free is None:
        return Finding("memory", PART, "unknown")
    return Finding("memory", OK, f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB available")


def check_load() -> Finding:
    """Other work on the machine."""
    load = machine.load_average()
    if load is None:
        return Finding("load", PART, "unknown")
    detail = ", ".join(f"{value:.2f}" for value in load)
    if load[0] > 0.5 * len(os.sched_getaffinity(0)):
        return Finding("load", PART, detail, "measure when the machine is quiet")
    return Finding("load", OK, detail)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_core,
    check_shm,
    check_tcp,
    check_rdma,
    check_numpy,
    check_torch,
    check_open_files,
    check_locked_memory,
    check_huge_pages,
    check_cores,
    check_memory,
    check_load,
)


def look() -> list[Finding]:
    """All findings; a check that fails unexpectedly is a finding too."""
    found = []
    for check in CHECKS:
        try:
            found.append(check())
        except Exception as error:
            subject = check.__name__.removeprefix("check_").replace("_", " ")
            found.append(Finding(subject, PART, f"could not be looked at: {error}"))
    return found


# --- command ------------------------------------------------------------------------------------


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def info(as_json: bool) -> None:
    """What can this machine do, and what is missing?

    Looks at transports, packages, limits and load; changes nothing. Exits with 1 if neither shared
    memory nor TCP can be used.

    \b
    For a person:
        tensorwire info

    \b
    For a script:
        tensorwire info --json
    """  # noqa: D301 (\b is what click reads)
    found = look()
    if as_json:
        data = {
            "findings": [dataclasses.asdict(finding) for finding in found],
            "machine": machine.describe(),
        }
        click.echo(json.dumps(data, indent=1))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=110)
        console.print(table(found))
    usable = {finding.subject for finding in found if finding.state != MISSING}
    if not {"shm", "tcp"} & usable:
        raise SystemExit(1)


def table(found: list[Finding]) -> Table:
    """The findings as a coloured table; the state is a word too, so it reads without colour."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("what", style="bold", no_wrap=True)
    shown.add_column("here", no_wrap=True)
    shown.add_column("found", overflow="fold")
    shown.add_column("remedy", overflow="fold")
    for finding in found:
        state = Text(finding.state, style=_STYLES[finding.state])
        # Text, because a remedy such as tensorwire[torch] is not markup.
        shown.add_row(finding.subject, state, Text(finding.detail), Text(finding.remedy))
    return shown
