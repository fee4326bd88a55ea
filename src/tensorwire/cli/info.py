"""`tensorwire info`: what this machine can do, what is missing, and the remedy.

Each check is a function that returns one Finding and never raises; the command prints them.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click
from rich import box
from rich.table import Table
from rich.text import Text

from tensorwire.bench import machine
from tensorwire.command import Command, terminal
from tensorwire.doctor import advice, facts
from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node
from tensorwire.memory.devices import rdma_ports

OK, PART, MISSING = "yes", "partly", "no"
_STYLES = {OK: "green", PART: "yellow", MISSING: "red"}

_SHARED = "shared memory"  # as the doctor calls shm
_COMPILER_REMEDY = "a C++ compiler (Debian: apt install g++), or its name in CXX"


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
    if fault := facts.memfd_fault():
        (judged,) = (x for x in advice.about_memory(facts.read_memory()) if x.subject == _SHARED)
        return Finding("shm", MISSING, fault, judged.remedy)
    if facts.memfd_fault(read_only=True):
        text = "memfd and size seals; read-only grants cannot be sealed"
        return Finding("shm", PART, text, "a Linux kernel of 5.1 or newer")
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


def check_placement() -> Finding:
    """The library that produces gradients where they are needed: prebuilt, or a compiler for it."""
    if importlib.util.find_spec("torch") is None:
        return Finding("placement", PART, "torch is not installed; only training needs it")
    try:
        from tensorwire.torch.allocator import library
    except (ImportError, OSError) as error:
        text = f"torch {machine.version('torch')} cannot be imported: {error}"
        return Finding("placement", MISSING, text, "install torch anew")
    try:
        return Finding("placement", OK, library.find())
    except UnavailableError as error:
        return Finding("placement", PART, f"gradients are copied: {error}", _COMPILER_REMEDY)


def check_compiler() -> Finding:
    """What compiles that library where none came for the installed torch."""
    placement = check_placement()
    if placement.state == MISSING or importlib.util.find_spec("torch") is None:
        return Finding("compiler", PART, "not looked for; only placement, with torch, needs one")
    from tensorwire.torch.allocator.library import find_compiler

    try:
        found, text = find_compiler(), "no c++, g++ or clang++"
    except UnavailableError as error:
        found, text = None, str(error)
    if found is not None:
        return Finding("compiler", OK, " ".join(found))
    if placement.state == OK:
        return Finding("compiler", PART, f"{text}; not needed: placement is {placement.detail}")
    return Finding("compiler", MISSING, f"{text}; placement needs one", _COMPILER_REMEDY)


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


def _judged(found: Iterable[advice.Finding], subject: str) -> Finding:
    """What the doctor says of a subject: the two commands have one verdict."""
    judged = next((each for each in found if each.subject == subject), None)
    if judged is None:
        return Finding(subject, PART, "unknown")
    state = OK if judged.level == advice.OK else PART
    return Finding(subject, state, judged.text, judged.remedy)


def check_locked_memory() -> Finding:
    """RDMA pins what it registers; shm and tcp do not."""
    rdma = facts.Rdma(ports=tuple(rdma_ports()), locked_bytes=facts.locked_limit())
    return _judged([advice.about_locked_memory(rdma)], "locked memory")


def check_huge_pages() -> Finding:
    """Large shared regions are faster with them; a note, not a fault."""
    return _judged(advice.about_memory(facts.read_memory()), "huge pages")


def check_cores() -> Finding:
    """Waiting is cheapest and fastest when both processes have a core."""
    cpu = facts.read_cpu()
    found = _judged(advice.about_cpu(cpu), "cores")
    return dataclasses.replace(found, detail=f"{found.detail}, {cpu.model or 'unknown processor'}")


def check_memory() -> Finding:
    """What regions can be made of."""
    total, free = machine.memory_bytes(), machine.memory_bytes("MemAvailable")
    if total is None or free is None:
        return Finding("memory", PART, "unknown")
    return Finding("memory", OK, f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB available")


def check_load() -> Finding:
    """Other work on the machine."""
    return _judged(advice.about_cpu(facts.read_cpu()), "load")


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_core,
    check_shm,
    check_tcp,
    check_rdma,
    check_numpy,
    check_torch,
    check_placement,
    check_compiler,
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


@click.command(cls=Command)
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
        terminal().print(table(found))
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
