"""Warns that a connection is slower than both ends could have it.

The rule is pure: what is known about both ends in, reason and remedy out. `warn_if_slower` gathers
what is known and says it once per address and process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .devices import UCX_LIBRARY, UCX_REMEDY, RdmaPort, has_ucx, rdma_ports


class PathWarning(UserWarning):
    """A peer is reached by a path that is clearly slower than another that both ends could have.

    The text says why, and what to do. Silent when the paths were restricted on purpose, by
    `Node(transports=)`, TENSORWIRE_TRANSPORTS or `connect(require=)`.
    """


@dataclass(frozen=True, slots=True)
class Slower:
    """The reason why a path is slower than it could be, and the remedy."""

    reason: str
    remedy: str


def why_slower(
    transport: str,
    reason: str,
    ports: Sequence[RdmaPort],
    ucx: bool,
    offered_there: Collection[str],
) -> Slower | None:
    """Judges a path that was chosen freely.

    Args:
        transport: as in `Path`.
        reason: as in `Path`.
        ports: RDMA ports of this host.
        ucx: whether the library that rdma needs is installed here.
        offered_there: transports that the peer offers.

    Returns:
        None if the path is the best that both ends have, as far as can be told from here.
    """
    if transport == "tcp" and reason.startswith("same host"):
        return Slower(
            reason,
            "run both processes as one user and in one network namespace (docker: "
            "--network=host or --network=container:NAME; Kubernetes: one pod)",
        )
    active = [port for port in ports if port.active]
    if transport != "tcp" or not active or "rdma" not in offered_there:
        return None
    both = f"both ends have RDMA ({active[0].device} here)"
    if not ucx:
        return Slower(f"{both}, but {UCX_LIBRARY} is not installed here", UCX_REMEDY)
    return Slower(
        f"{both}, but it is not used: {reason}",
        "listen where other hosts reach this Node, or name rdma in transports=; "
        "'tensorwire doctor' tells what is missing",
    )


_warned: set[str] = set()
_lock = threading.Lock()


def warn_if_slower(
    address: str, name: str, transport: str, reason: str, offered_there: Collection[str]
) -> None:
    """Warns, with the caller's caller as the place, if `why_slower` finds a reason."""
    if transport == "shm":
        return
    with _lock:
        if address in _warned:
            return
        _warned.add(address)
    ports = rdma_ports()
    slower = why_slower(transport, reason, ports, bool(ports) and has_ucx(), offered_there)
    if slower is not None:
        warnings.warn(
            f"peer {name!r} at {address} is reached by {transport}: {slower.reason}. "
            f"Remedy: {slower.remedy}. transports= or require= makes the choice yours",
            PathWarning,
            stacklevel=3,
        )
