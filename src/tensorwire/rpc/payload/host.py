"""Tells whether both ends of an attachment are on one host, by the name that each gives its own."""

import os
import resource
from collections.abc import Container
from pathlib import Path

from .. import logs


def host_id() -> str:
    """Returns a name for this host as it was booted, and its network; "" where there is none.

    Two ends with the same name may share memory, and reach each other by 127.0.0.1. Containers that
    have a network each are two hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    if not boot:
        return ""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # a kernel without namespaces
        return boot


def descriptors_are_scarce() -> bool:
    """Returns whether three quarters of the descriptors that this process may have are in use.

    The others are for connections: without attachments gRPC works, without descriptors it does not.
    A new descriptor is the lowest free number (open(2)).
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    return most != resource.RLIM_INFINITY and 4 * lowest >= 3 * most


SCARCE = (
    "this process has most of its file descriptors in use, and keeps the rest for the program; "
    "raise its limit (ulimit -n)"
)

_TOLD: set[str] = set()


def tell_scarce(consequence: str) -> None:
    """Logs once the consequence of `descriptors_are_scarce`."""
    if consequence not in _TOLD:
        _TOLD.add(consequence)
        logs.OWN.warning("%s. So %s. This is logged once.", SCARCE, consequence)


def no_way(theirs: Container[object], ours: Container[object], near: bool) -> str:
    """Returns a text that says why payload has no way between two ends.

    Args:
        theirs: the transports that the client has named.
        ours: the transports of the server.
        near: both are on one host.
    """
    known = ("shm", "tcp", "rdma")
    at = [", ".join(each for each in known if each in names) or "none" for names in (theirs, ours)]
    return (
        "there is no way for payload between client and server, which are on "
        f"{'one host' if near else 'two hosts'}: the client has the transports {at[0]}, the server "
        f"{at[1]}. Set transports= or TENSORWIRE_TRANSPORTS at both ends, for encrypted "
        "connections plaintext_transports=. Between hosts the server needs listen= too, or a "
        "first insecure port that is not on loopback"
    )
