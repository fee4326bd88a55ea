"""Locks files for the life of a process; the kernel unlocks them when it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(descriptor: int) -> bool:
    """Locks an open file, unless another one has the lock.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_there(path: Path, descriptor: int) -> bool:
    """The name is still, or again, that of the file which is open; links are not followed."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
