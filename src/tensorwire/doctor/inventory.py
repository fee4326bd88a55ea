"""Lists the equipment of this machine, and its gaps, before anything is measured, without a peer.

`tensorwire doctor --quick` prints it. Subjects that `advice` judges get the doctor's verdict.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import resource
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tensorwire.bench import machine
from tensorwire.doctor import advice, facts
from tensorwire.doctor.advice import MISSING, NOTE, OK, Finding
from tensorwire.errors import TensorwireError, UnavailableError
from tensorwire.memory import Node
from tensorwire.memory.devices import rdma_ports

_COMPILER_REMEDY = "a C++ compiler (Debian: apt install g++), or its name in CXX"


def _of_doctor(subject: str, judged: Iterable[Finding]) -> Finding:
    """Returns the doctor's finding on a subject, so that both commands have one verdict."""
    found = (each for each in judged if each.subject == subject)
    return next(found, Finding(NOTE, subject, "unknown"))


# --- transports ---------------------------------------------------------------------------------


def check_shm() -> Finding:
    """Checks that a memfd can be mapped and sealed, as a shm region needs it."""
    if fault := facts.memfd_fault():
        judged = _of_doctor("shared memory", advice.about_memory(facts.read_memory()))
        return Finding(MISSING, "shm", fault, judged.remedy)
    if facts.memfd_fault(read_only=True):
        text = "memfd and size seals; read-only grants cannot be sealed"
        return Finding(NOTE, "shm", text, "a Linux kernel of 5.1 or newer")
    return Finding(OK, "shm", "memfd, size seals, read-only seals")


def check_tcp() -> Finding:
    """Checks that a socket can listen on loopback, and whether one can by IPv6."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return Finding(MISSING, "tcp", f"cannot listen on 127.0.0.1: {error}", "bring up 'lo'")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return Finding(OK, "tcp", "IPv4 only")
    return Finding(OK, "tcp", "IPv4 and IPv6")


def check_rdma() -> Finding:
    """Checks that a Node can offer rdma: device, port, UCX and locked memory at once."""
    ports = (f"{port.device}:{port.port} ({port.state})" for port in rdma_ports())
    devices = ", ".join(ports) or "no device"
    try:
        with Node("info", transports=["rdma"]):
            return Finding(OK, "rdma", devices)
    except (TensorwireError, MemoryError) as error:
        return Finding(MISSING, "rdma", devices, str(error))


# --- packages -----------------------------------------------------------------------------------


def check_core() -> Finding:
    """Checks that the compiled module can be imported."""
    try:
        core = importlib.import_module("tensorwire._core")
    except ImportError as error:
        return Finding(MISSING, "core", str(error), "pip install --force-reinstall tensorwire")
    found = machine.version("tensorwire") or "not installed as a package"
    return Finding(OK, "core", f"tensorwire {found}, {Path(str(core.__file__)).name}")


def _check_package(name: str, without: str, why: str, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(without, name, f"not installed; {why}", remedy)
    return Finding(OK, name, machine.version(name) or "version unknown")


def check_placement() -> Finding:
    """Checks for the library that places gradients, or a compiler that can build it."""
    if importlib.util.find_spec("torch") is None:
        return Finding(NOTE, "placement", "torch is not installed; only training needs it")
    try:
        from tensorwire.torch.allocator import library
    except (ImportError, OSError) as error:
        text = f"torch {machine.version('torch')} cannot be imported: {error}"
        return Finding(MISSING, "placement", text, "install torch anew")
    try:
        return Finding(OK, "placement", library.find())
    except UnavailableError as error:
        return Finding(NOTE, "placement", f"gradients are copied: {error}", _COMPILER_REMEDY)


def check_compiler() -> Finding:
    """Checks for a compiler of that library, if the wheel has none for the installed torch."""
    placement = check_placement()
    if placement.level == MISSING or importlib.util.find_spec("torch") is None:
        return Finding(NOTE, "compiler", "not looked for; only placement, with torch, needs one")
    from tensorwire.torch.allocator.library import find_compiler

    try:
        found, text = find_compiler(), "no c++, g++ or clang++"
    except UnavailableError as error:
        found, text = None, str(error)
    if found is not None:
        return Finding(OK, "compiler", " ".join(found))
    if placement.level == OK:
        return Finding(NOTE, "compiler", f"{text}; not needed: placement is {placement.text}")
    return Finding(MISSING, "compiler", f"{text}; placement needs one", _COMPILER_REMEDY)


# --- limits and circumstances -------------------------------------------------------------------


def check_open_files() -> Finding:
    """Checks the limit of open files; each peer takes a few descriptors."""
    soft, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = ("unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits)
    text = " of at most ".join(shown)
    if 0 <= soft < 4096:
        more = min(hard, 65536) if hard > 0 else 65536
        return Finding(NOTE, "open files", text, f"ulimit -n {more}")
    return Finding(OK, "open files", text)


def check_cores() -> Finding:
    """Checks for two cores: waiting is fastest when both processes have one."""
    cpu = facts.read_cpu()
    found = _of_doctor("cores", advice.about_cpu(cpu))
    return dataclasses.replace(found, text=f"{found.text}, {cpu.model or 'unknown processor'}")


def check_memory() -> Finding:
    """Checks the memory that regions can be made of."""
    total, free = machine.memory_bytes(), machine.memory_bytes("MemAvailable")
    if total is None or free is None:
        return Finding(NOTE, "memory", "unknown")
    return Finding(OK, "memory", f"{free / (1 << 30):.1f} of {total / (1 << 30):.1f} GiB available")


def check_gpu() -> Finding:
    """Checks whether regions can be in memory of a GPU."""
    gpus = facts.read_gpus()
    judged = advice.about_gpus(gpus)
    if gpus.names:
        return judged
    remedy = "only for memory of a GPU: NVIDIA's driver, and a GPU that this process may use"
    return dataclasses.replace(judged, level=MISSING, remedy=remedy)


CHECKS: dict[str, Callable[[], Finding]] = {
    "core": check_core,
    "shm": check_shm,
    "tcp": check_tcp,
    "rdma": check_rdma,
    "GPU": check_gpu,
    "numpy": partial(
        _check_package, "numpy", MISSING, "nothing works without it", "pip install numpy"
    ),
    "torch": partial(
        _check_package, "torch", NOTE, "tensors and training need it",
        "pip install 'tensorwire[torch]'",
    ),
    "placement": check_placement,
    "compiler": check_compiler,
    "open files": check_open_files,
    "locked memory": lambda: advice.about_locked_memory(
        facts.Rdma(ports=tuple(rdma_ports()), locked_bytes=facts.locked_limit())
    ),
    "huge pages": lambda: _of_doctor("huge pages", advice.about_memory(facts.read_memory())),
    "cores": check_cores,
    "memory": check_memory,
    "load": lambda: _of_doctor("load", advice.about_cpu(facts.read_cpu())),
}  # fmt: skip
"""All subjects in the order in which they are shown."""


def look() -> list[Finding]:
    """Returns all findings; a check that fails unexpectedly is a finding too."""
    found = []
    for subject, check in CHECKS.items():
        try:
            found.append(check())
        except Exception as error:
            found.append(Finding(NOTE, subject, f"could not be looked at: {error}"))
    return found
