"""Opens unix sockets in folders of any length, under names that no other process has.

The number of a process is not enough for a name: containers that share a folder have the same
numbers. Nor does it tell whether a process lives; whether somebody listens does.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

_LONGEST_PATH = 107  # the kernel has room for so much


@contextlib.contextmanager
def short_path(path: str | Path) -> Iterator[str]:
    """Yields a name for a socket's path that is short enough for the kernel.

    Raises:
        OSError: the path is too long, and its folder cannot be opened.
    """
    text = os.fspath(path)
    if len(os.fsencode(text)) <= _LONGEST_PATH:
        yield text
        return
    folder, _, name = text.rpartition("/")
    descriptor = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_in(folder: Path, prefix: str, suffix: str = "") -> tuple[socket.socket, Path]:
    """Returns a non-blocking listening SOCK_SEQPACKET socket and its path, for this user alone.

    Sockets that killed processes have left there under such names are removed.

    Args:
        folder: where the path is.
        prefix: how its name begins.
        suffix: how it ends.

    Raises:
        OSError: nobody can listen there.
    """
    for left in folder.glob(f"{prefix}*{suffix}"):
        remove_dead(left)
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    path, made = folder / f"{prefix}{name}{suffix}", folder / f"new-{name}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        with short_path(made) as short:
            listener.bind(short)
        made.chmod(0o600)
        listener.listen()
        made.rename(path)  # who sees this name finds somebody who listens
    except BaseException:
        listener.close()
        with contextlib.suppress(OSError):
            made.unlink()
        raise
    return listener, path


def remove_dead(path: Path) -> None:
    """Removes a socket at which no process listens."""
    with contextlib.suppress(OSError):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.setblocking(False)
            try:
                with short_path(path) as short:
                    channel.connect(short)
            except ConnectionRefusedError:
                if path.is_socket():
                    path.unlink()
