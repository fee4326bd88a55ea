"""Locks files for the life of a process; the kernel unlocks them when it ends.

Removes names that this process has made in the runtime folder, unless they name other files now.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
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


def open_locked(path: Path, flags: int = 0) -> int | None:
    """Opens a file of this user alone, which is made if need be, and locks it.

    Args:
        path: of the file; no links are followed.
        flags: more of open(2).

    Returns:
        The descriptor; None: another one has the lock, or has removed the file meanwhile.

    Raises:
        OSError: it cannot be opened, or the file system has no locks.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        if try_lock(descriptor) and is_there(path, descriptor):
            undo.pop_all()
            return descriptor
    return None


def make_locked(folder: Path, prefix: str, flags: int = 0) -> tuple[Path, int]:
    """Makes a file with a new name that begins with `prefix` and the number of this process.

    Returns:
        Its path, and the descriptor by which it is locked.

    Raises:
        OSError: as for `open_locked`.
    """
    while True:
        path = folder / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        if (descriptor := open_locked(path, flags | os.O_EXCL)) is not None:
            return path, descriptor
        # Another program took it for what a dead process left.
        with contextlib.suppress(OSError):
            path.unlink()


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
