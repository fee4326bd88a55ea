"""Lists network interfaces and RDMA ports from /sys, and tells whether UCX is there.

Reads only, loads nothing, starts nothing. Every reader takes the root of the file system, so that a
tree of another machine can be read. A value that cannot be read is None or empty, never a guess.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

UCX_LIBRARY = "libucp.so.0"
UCX_REMEDY = "apt install libucx0 ibverbs-providers (Debian, Ubuntu) or dnf install ucx ucx-ib"

_ROOT = Path("/")


def read_line(path: Path) -> str | None:
    """Returns the stripped content of a small file; None when it cannot be read or is not text."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> int | None:
    """Returns the number in a small file; None when there is none."""
    try:
        return int(read_line(path) or "")
    except ValueError:
        return None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface.

    Attributes:
        name: for example "eth0".
        state: "up", "down" or "unknown", as the kernel calls it.
        carrier: whether there is a link; None when it is not known, as on one that is down.
        megabits_per_s: the speed that it reports, None when it reports none.
        mtu: largest packet in bytes.
        duplex: "full", "half" or "".
        physical: it stands for hardware (a NIC, also one of a virtual machine, a bond or a VLAN of
            them). The speed that any other interface reports is made up.
    """

    name: str
    state: str
    carrier: bool | None
    megabits_per_s: int | None
    mtu: int | None
    duplex: str
    physical: bool

    @property
    def promised_gb_per_s(self) -> float | None:
        """The promised speed in one direction; None if there is no trustworthy promise."""
        if not self.physical or self.megabits_per_s is None:
            return None
        return self.megabits_per_s / 8e3


def interface(name: str, root: Path = _ROOT) -> Interface | None:
    """Returns one interface by its name; None when there is none."""
    folder = root / "sys/class/net" / name
    if not folder.is_dir():
        return None
    speed = read_number(folder / "speed")
    carrier = read_number(folder / "carrier")
    kind = (read_line(folder / "uevent") or "").split()
    hardware = (folder / "device").exists() or (folder / "bonding").is_dir()
    return Interface(
        name=name,
        state=read_line(folder / "operstate") or "unknown",
        carrier=None if carrier is None else carrier == 1,
        megabits_per_s=speed if speed is not None and speed > 0 else None,
        mtu=read_number(folder / "mtu"),
        duplex=read_line(folder / "duplex") or "",
        physical=hardware or "DEVTYPE=vlan" in kind,
    )


def interfaces(root: Path = _ROOT) -> list[Interface]:
    """Returns all of them but loopback, by name."""
    found = (interface(name, root) for name in _names(root / "sys/class/net") if name != "lo")
    return [each for each in found if each is not None]


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device.

    Attributes:
        device, port: for example "mlx5_0" and 1.
        state: "ACTIVE", "DOWN", "INIT", ...
        gigabits_per_s: its rate, None when it is not known.
        link_layer: "InfiniBand" or "Ethernet" (RoCE).
        gids: its addresses; unset entries are left out.
        netdev: the network interface that it shares its wire with, "" if there is none.
    """

    device: str
    port: int
    state: str
    gigabits_per_s: float | None
    link_layer: str
    gids: tuple[str, ...]
    netdev: str

    @property
    def active(self) -> bool:
        """True if the port can carry data."""
        return self.state == "ACTIVE"

    @property
    def promised_gb_per_s(self) -> float | None:
        """The promised speed in one direction; None for a device made of software."""
        if self.gigabits_per_s is None or self.device.startswith(("rxe", "siw")):
            return None
        return self.gigabits_per_s / 8


def rdma_ports(root: Path = _ROOT) -> list[RdmaPort]:
    """Returns the ports of all RDMA devices."""
    top = root / "sys/class/infiniband"
    return [
        _rdma_port(top / device, int(port))
        for device in _names(top)
        for port in _names(top / device / "ports")
        if port.isdigit()
    ]


def _rdma_port(device: Path, port: int) -> RdmaPort:
    folder = device / "ports" / str(port)
    rate = re.match(r"[\d.]+", read_line(folder / "rate") or "")
    gids, netdev = [], ""
    for index in sorted(_names(folder / "gids"), key=lambda text: (len(text), text)):
        gid = read_line(folder / "gids" / index)
        if gid and set(gid) - {"0", ":"}:
            gids.append(gid)
            netdev = netdev or read_line(folder / "gid_attrs/ndevs" / index) or ""
    beside = _names(device / "device/net")
    netdev = netdev or (beside[0] if beside else "") or read_line(device / "parent") or ""
    return RdmaPort(
        device=device.name,
        port=port,
        state=(read_line(folder / "state") or "unknown").rpartition(" ")[2],
        gigabits_per_s=float(rate[0]) if rate else None,
        link_layer=read_line(folder / "link_layer") or "unknown",
        gids=tuple(gids),
        netdev=netdev,
    )


def has_ucx(root: Path = _ROOT) -> bool:
    """Tells whether the loader would find UCX, without loading it.

    Two copies of UCX in one process can hang, so this check must not load one.
    """
    try:
        if UCX_LIBRARY.encode() + b"\0" in (root / "etc/ld.so.cache").read_bytes():
            return True
    except OSError:
        pass  # no cache, as on musl: the folders are left
    folders = ["lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib"]
    if root == _ROOT:
        folders += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
    return any((root / folder / UCX_LIBRARY).exists() for folder in folders)
