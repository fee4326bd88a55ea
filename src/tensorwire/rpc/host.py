"""Tells hosts apart, by what both ends of an attachment say of theirs."""

import os
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
