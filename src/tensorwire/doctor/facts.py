"""Reads the equipment and promises of a machine, without judging it.

Every reader takes the root of the file system. A `Facts` travels to the other end as JSON; what
comes from there is checked before it is believed or printed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import platform
import resource
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorwire import _core
from tensorwire.bench import machine
from tensorwire.memory.devices import (
    UCX_LIBRARY,
    Interface,
    RdmaPort,
    interfaces,
    rdma_ports,
    read_line,
    read_number,
)
from tensorwire.memory.node import TRANSPORTS
from tensorwire.parameters import groups_left

FORMAT = 3
_CAP_IPC_LOCK = 14
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)
_SEAL_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 16)
# Loading happens in a process of its own: two copies of UCX in one process can hang.
_LOAD_UCX = f"""
import ctypes
library = ctypes.CDLL("{UCX_LIBRARY}")
library.ucp_get_version_string.restype = ctypes.c_char_p
print(library.ucp_get_version_string().decode())
"""


_LOOK_FOR_GPUS = """
from tensorwire import _core
cuda, names = _core.gpus()
print(cuda, *names, sep="\\n")
"""


@dataclass(frozen=True, slots=True)
class Tcp:
    """The kernel's settings for a TCP stream; None for an unknown one.

    Attributes:
        receive_bytes, send_bytes: the largest buffers that it sizes by itself (third number of
            net.ipv4.tcp_rmem, tcp_wmem).
        explicit_receive_bytes: net.core.rmem_max, the bound of buffers set by a program.
        adapts: net.ipv4.tcp_moderate_rcvbuf.
        congestion: the algorithm.
    """

    receive_bytes: int | None = None
    send_bytes: int | None = None
    explicit_receive_bytes: int | None = None
    adapts: bool | None = None
    congestion: str = ""

    @property
    def window_bytes(self) -> int | None:
        """How much can be on its way: the kernel keeps half of a buffer for its own bookkeeping."""
        if self.receive_bytes is None or self.send_bytes is None:
            return None
        return min(self.receive_bytes, self.send_bytes) // 2


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The shared memory that shm regions can be made of.

    Attributes:
        fault: why a memfd cannot be made and sealed, "" if it can.
        huge_pages: the kernel's switch for shared memory ("never", "advise", ...), "" if unknown.
        dev_shm_bytes: size of /dev/shm, None if it is not mounted.
        available_bytes: memory that the system could give.
        group_left_bytes: what the control group still allows, None without a limit.
    """

    fault: str = ""
    huge_pages: str = ""
    dev_shm_bytes: int | None = None
    available_bytes: int | None = None
    group_left_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cpu:
    """The cores that this process may use.

    Attributes:
        model: the processor.
        cores, usable: of the machine; of this process by its affinity.
        quota: cores that the control group grants, None without a limit.
        load: runnable tasks over the last minute.
        threads: of each process by OMP_NUM_THREADS, None if that is not set.
    """

    model: str = ""
    cores: int = 1
    usable: int = 1
    quota: float | None = None
    load: float | None = None
    threads: int | None = None

    @property
    def free(self) -> float:
        """The number of cores that this process can keep busy."""
        return min(self.usable, self.quota or self.usable)

    @property
    def oversubscribed(self) -> bool:
        """True if there is more to run than cores."""
        return self.load is not None and self.load > self.free


@dataclass(frozen=True, slots=True)
class Rdma:
    """The parts of this machine that rdma needs.

    Attributes:
        ports: of all devices.
        ucx: the version of UCX that can be loaded, "" if none can.
        ucx_fault: why not.
        verbs: whether /dev/infiniband lets this user in.
        locked_bytes: how much memory may be locked, None without a limit.
    """

    ports: tuple[RdmaPort, ...] = ()
    ucx: str = ""
    ucx_fault: str = ""
    verbs: bool = False
    locked_bytes: int | None = None

    @property
    def active(self) -> list[RdmaPort]:
        """The ports that can carry data."""
        return [port for port in self.ports if port.active]


@dataclass(frozen=True, slots=True)
class Gpus:
    """The parts of this machine that regions in memory of GPUs need.

    Attributes:
        names: of the GPUs that a process here sees.
        cuda: the newest CUDA that the driver knows, "" if no driver can be used.
        fault: why not.
    """

    names: tuple[str, ...] = ()
    cuda: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, as one process sees it."""

    host: str
    kernel: str
    python: str
    tensorwire: str
    transports: tuple[str, ...]
    restricted: str
    cpu: Cpu
    memory: SharedMemory
    tcp: Tcp
    rdma: Rdma
    gpus: Gpus
    interfaces: tuple[Interface, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns JSON-ready data."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """Returns the facts that `to_json` wrote, possibly on another machine.

        Raises:
            ValueError: it is not that, or of another version.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(
                f"the other end's facts do not have the format {FORMAT}: use the same version of "
                "tensorwire at both ends"
            )
        found = {key: value for key, value in data.items() if key != "format"}
        try:
            made: Facts = _made(cls, found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the other end's facts cannot be read: {error}") from error
        return made


def _made(kind: Any, value: Any) -> Any:
    """Returns JSON data as the declared type; all its texts can be printed.

    Raises:
        KeyError, TypeError, AttributeError: it is not that.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = typing.get_type_hints(kind)
        if value.keys() - fields.keys():
            raise TypeError(f"{kind.__name__} has unknown fields")
        return kind(**{name: _made(field, value[name]) for name, field in fields.items()})
    if typing.get_origin(kind) is tuple:
        return tuple(_made(typing.get_args(kind)[0], part) for part in value)
    allowed = typing.get_args(kind) or (kind,)
    if not isinstance(value, (*allowed, int) if float in allowed else allowed):
        raise TypeError(f"a value is {type(value).__name__}, not {kind}")
    if isinstance(value, str):
        return "".join(sign if sign.isprintable() else "?" for sign in value)[:300]
    return value


# --- readers ------------------------------------------------------------------------------------

_ROOT = Path("/")


def read(root: Path = _ROOT) -> Facts:
    """Reads all facts, in about 0.1 s; UCX is loaded once, in a process that ends."""
    return Facts(
        host=platform.node(),
        kernel=platform.release(),
        python=platform.python_version(),
        tensorwire=machine.version("tensorwire") or "unknown",
        transports=TRANSPORTS,
        restricted=os.environ.get("TENSORWIRE_TRANSPORTS", ""),
        cpu=read_cpu(root),
        memory=read_memory(root),
        tcp=read_tcp(root),
        rdma=read_rdma(root),
        gpus=read_gpus(),
        interfaces=tuple(interfaces(root)),
    )


def read_cpu(root: Path = _ROOT) -> Cpu:
    """Returns cores, quota, load and threads."""
    load = (read_line(root / "proc/loadavg") or "").split()
    threads = os.environ.get("OMP_NUM_THREADS", "")[:9]
    return Cpu(
        model=machine.cpu_model(root) or "",
        cores=os.cpu_count() or 1,
        usable=len(os.sched_getaffinity(0)),
        quota=_core.cpu_quota(str(root)),
        load=float(load[0]) if load else None,
        threads=int(threads) if threads.isdecimal() else None,
    )


def read_memory(root: Path = _ROOT) -> SharedMemory:
    """Reads the available shared memory."""
    try:
        status = os.statvfs(root / "dev/shm")
        dev_shm = status.f_blocks * status.f_frsize
    except OSError:
        dev_shm = None
    switch = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return SharedMemory(
        fault=memfd_fault(),
        huge_pages=machine.chosen(switch) or "",
        dev_shm_bytes=dev_shm,
        available_bytes=machine.memory_bytes("MemAvailable", root),
        group_left_bytes=min((left for left, _ in groups_left(root)), default=None),
    )


def memfd_fault(read_only: bool = False) -> str:
    """Makes, maps and seals a memfd as a region does; returns why that fails, "" if it works.

    Args:
        read_only: seal it as a region that peers may only read.
    """
    seals = _SEALS | _SEAL_FUTURE_WRITE if read_only else _SEALS
    try:
        descriptor = os.memfd_create("tensorwire-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return f"no memfd: {error}"
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            memory[0] = 1
        fcntl.fcntl(descriptor, getattr(fcntl, "F_ADD_SEALS", 1033), seals)
    except OSError as error:
        return f"a memfd cannot be sealed: {error}"
    finally:
        os.close(descriptor)
    return ""


def read_tcp(root: Path = _ROOT) -> Tcp:
    """Returns the kernel's limits of TCP."""
    net = root / "proc/sys/net"
    adapts = read_number(net / "ipv4/tcp_moderate_rcvbuf")
    return Tcp(
        receive_bytes=_third(net / "ipv4/tcp_rmem"),
        send_bytes=_third(net / "ipv4/tcp_wmem"),
        explicit_receive_bytes=read_number(net / "core/rmem_max"),
        adapts=None if adapts is None else adapts == 1,
        congestion=read_line(net / "ipv4/tcp_congestion_control") or "",
    )


def _third(path: Path) -> int | None:
    parts = (read_line(path) or "").split()
    return int(parts[2]) if len(parts) == 3 and parts[2].isdigit() else None


def read_rdma(root: Path = _ROOT) -> Rdma:
    """Returns devices, library and permissions."""
    ucx, fault = load_ucx()
    return Rdma(
        ports=tuple(rdma_ports(root)),
        ucx=ucx,
        ucx_fault=fault,
        verbs=any(
            os.access(path, os.R_OK | os.W_OK) for path in (root / "dev/infiniband").glob("uverbs*")
        ),
        locked_bytes=locked_limit(root),
    )


def load_ucx() -> tuple[str, str]:
    """Returns the version of UCX that a process here can load, or "" and the reason."""
    version, fault = _in_child(_LOAD_UCX)
    return version or ("" if fault else "unknown"), fault


def _in_child(code: str) -> tuple[str, str]:
    """Returns what a child process prints that runs this code, or "" and why it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return "", last[0].partition("Error: ")[2] or last[0]
    return done.stdout.strip(), ""


def read_gpus() -> Gpus:
    """Returns the GPUs that a process here sees.

    A child process looks for them: once loaded, a driver stays in its process.
    """
    found, fault = _in_child(_LOOK_FOR_GPUS)
    cuda, *names = found.splitlines() or [""]
    return Gpus(tuple(names), cuda, fault)


def locked_limit(root: Path = _ROOT) -> int | None:
    """Returns the bytes that may be locked; None without a limit, or for a privileged process."""
    for line in (read_line(root / "proc/self/status") or "").splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft
