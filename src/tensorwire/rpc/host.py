"""Tells hosts apart, by what both ends of an attachment say of theirs."""

import os
from collections.abc import Container
from pathlib import Path


def host_id() -> str:
    """Names this host as it was booted, and its network; "" where the system does not tell.

    Two ends with the same name may share memory, and reach each other by 127.0.0.1. Containers that
    have a network each are two hosts.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # a kernel without namespaces
        return boot


def no_way(theirs: Container[object], ours: Container[object], near: bool) -> str:
    """Why payload has no way between two ends, with what decides about that.

    Args:
        theirs: the transports that the client has named.
        ours: those of the server.
        near: both are on one host.
    """
    known = ("shm", "tcp", "rdma")
    at = [", ".join(each for each in known if each in names) or "none" for names in (theirs, ours)]
    return (
        "there is no way for payload between these two ends, which are on "
        f"{'one host' if near else 'two hosts'}: the client has {at[0]}, the server {at[1]}. "
        "transports= and TENSORWIRE_TRANSPORTS say which, of encrypted connections "
        "plaintext_transports= at both ends; between hosts the server needs listen=, or a first "
        "insecure port that is not on loopback"
    )
