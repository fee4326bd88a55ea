"""What this machine has and lacks before anything is measured: the doctor without a peer.

`tensorwire info` prints it. Each check is a function that returns one Finding. What `advice` judges
has the doctor's verdict.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tensorwire.bench import machine
from tensorwire.doctor import advice, facts
from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node
from tensorwire.memory.devices import rdma_ports

OK, PART, MISSING = "yes", "partly", "no"

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


Check = Callable[[], Finding]


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


def _judged(subject: str, judge: Callable[[], Iterable[advice.Finding]]) -> Check:
    """A check that says what the doctor says of a subject: the two commands have one verdict."""

    def check() -> Finding:
        judged = next((each for each in judge() if each.subject == subject), None)
        if judged is None:
            return Finding(subject, PART, "unknown")
        state = OK if judged.level == advice.OK else PART
        return Finding(subject, state, judged.text, judged.remedy)

    check.__name__ = f"check_{subject}"
    return check


def _rdma() -> facts.Rdma:
    return facts.Rdma(ports=tuple(rdma_ports()), locked_bytes=facts.locked_limit())


check_locked_memory = _judged("locked memory", lambda: [advice.about_locked_memory(_rdma())])
check_huge_pages = _judged("huge pages", lambda: advice.about_memory(facts.read_memory()))
check_load = _judged("load", lambda: advice.about_cpu(facts.read_cpu()))
_usable_cores = _judged("cores", lambda: advice.about_cpu(facts.read_cpu()))


def check_cores() -> Finding:
    """Waiting is cheapest and fastest when both processes have a core."""
    found, model = _usable_cores(), facts.read_cpu().model or "unknown processor"
    return dataclasses.replace(found, detail=f"{found.detail}, {model}")


def check_memory() -> Finding:
    """What regions can be made of."""
    total, free = machine.memory_bytes(), machine.memory_bytes("MemAvailable")
    if total is None or free is None:
        return Finding("memory", PART, "unknown")
    return Finding("memory", OK, f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB available")


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


CHECKS: tuple[Check, ...] = (
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
