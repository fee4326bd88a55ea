"""Tells this host, and this view of its processes, from others."""

from __future__ import annotations

import contextlib
import hashlib
import os

LOOPBACK = ("127.", "[::1]", "localhost")
"""How addresses begin that name this host."""


def pid_namespace() -> str:
    """Returns a name for this namespace of process numbers; "" if the system gives none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def boot_id() -> str:
    """Returns a name for this host since its boot; "" if the system gives none."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return ""


def this_host() -> int:
    """Returns 48 bits, equal for processes of a user that share memory and loopback; 0: unknown."""
    try:
        text = f"{boot_id()} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return 0  # nobody can tell
    if text.startswith(" "):
        return 0
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little") or 1
