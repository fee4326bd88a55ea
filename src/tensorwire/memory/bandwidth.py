"""Estimates the speed that a path should reach: of memory, or as the NIC promises.

Knows how the system names interfaces and speeds; knows no peers.
"""

from __future__ import annotations

import fcntl
import functools
import socket
import statistics
import struct
from pathlib import Path

import numpy as np

from tensorwire._core import bench_loops

from .devices import interface, rdma_ports
from .handle import split_address

_SIOCGIFADDR = 0x8915
_PROBE_BYTES = 8 << 20


@functools.cache
def memory_gb_per_s() -> float:
    """Returns the GB/s of a memcpy of 8 MiB in this process, measured once (some milliseconds)."""
    source, target = np.ones(_PROBE_BYTES, np.uint8), np.ones(_PROBE_BYTES, np.uint8)
    ends = target.ctypes.data, source.ctypes.data
    seconds = bench_loops.copy_pieces(*ends, _PROBE_BYTES, 0, 1, 5, 1)
    return _PROBE_BYTES / statistics.median(seconds) / 1e9


def source_address(host: str) -> str | None:
    """Returns the address of this host from which packets to `host` leave; None without a route."""
    try:
        entry = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(entry[0], socket.SOCK_DGRAM) as probe:
            probe.connect(entry[4])  # chooses a route; sends nothing
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def interface_of(host: str) -> str | None:
    """Returns the name of the interface by which packets to `host` leave; None if unknown."""
    local = source_address(host)
    if local is None:
        return None
    there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][4][0]
    if local == str(there).partition("%")[0]:
        return "lo"  # an address of this host, whichever interface has it
    return interface_with(local)


def interface_with(local: str) -> str | None:
    """Returns the name of the interface that has this address, None if none of this host has."""
    if ":" in local:
        packed = socket.inet_pton(socket.AF_INET6, local).hex()
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
        return next((line.split()[5] for line in lines if line.startswith(packed)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == local:
                return name
    return None


def network_gb_per_s(address: str) -> float | None:
    """Returns the promised speed of the NIC towards "host:port"; None if virtual or unknown."""
    name = interface_of(split_address(address)[0])
    found = interface(name) if name is not None else None
    return found.promised_gb_per_s if found is not None else None


def rdma_gb_per_s(wire: str) -> float | None:
    """Returns the promised speed of the port of "rc_mlx5/mlx5_0:1"; None for a software port."""
    name = wire.partition("/")[2]
    found = next((port for port in rdma_ports() if f"{port.device}:{port.port}" == name), None)
    return found.promised_gb_per_s if found is not None else None
