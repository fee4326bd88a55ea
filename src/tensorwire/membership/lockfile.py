"""Locks files for the life of a process; the kernel unlocks them when it ends.

Removes names of this process in the runtime folder, which may be another one by then.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
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
    """Tells whether the name still, or again, names the open file; follows no links."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def tell(text: str) -> None:
    """Prints a line to stderr."""
    print(f"tensorwire: {text}", file=sys.stderr, flush=True)


def remove_own(
    path: Path, descriptor: int | None = None, say: Callable[[str], object] = tell
) -> None:
    """Removes a name that this process has made, or says in one line why it stays.

    Cleaning up never changes the outcome of what was done, so it raises nothing.

    Args:
        path: the name.
        descriptor: the open file; a name that is another file's by now is left alone.
        say: prints the line.
    """
    try:
        if descriptor is None or is_there(path, descriptor):
            path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is gone, perhaps with its folder
    except OSError as error:
        say(f"{path} cannot be removed and stays: {error.strerror}; nobody needs it any more")
