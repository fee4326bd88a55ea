"""Finds this user's folder of running jobs, into which no other user can write.

It is the place for locks and for what jobs tell about themselves, because nobody else can take a
name in it. Knows nothing of either.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tensorwire.errors import UnavailableError

RUNTIME = "XDG_RUNTIME_DIR"


def runtime_folder() -> Path:
    """Returns the first fit one of three folders, made if missing; all processes get the same.

    These are `tensorwire` in `$XDG_RUNTIME_DIR`, `tensorwire-UID` in `tempfile.gettempdir()`, which
    TMPDIR changes, and `tensorwire-HOST` in `cache_folder()`, if a stranger has taken the second.

    Raises:
        UnavailableError: none is fit; the message says why, and what to do.
    """
    refusals: list[str] = []
    for folder in _candidates(refusals):
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            reason = _why_unfit(folder)
        except OSError as error:
            reason = str(error.strerror)
        if reason is None:
            return folder
        refusals.append(f"{folder} ({reason})")
    raise UnavailableError(
        f"no folder for the locks of running jobs is fit: {', '.join(refusals)}; set {RUNTIME} to "
        "a folder that is yours and that nobody else can write to, the same for all processes"
    )


def cache_folder() -> Path | None:
    """Returns `$XDG_CACHE_HOME`, else `~/.cache`; None if neither is a path."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return found if found.is_absolute() else None


def _candidates(refusals: list[str]) -> Iterator[Path]:
    """Yields the folders to try; adds to `refusals` why others cannot even be tried."""
    # `su` and `sudo` may leave the folder of another user.
    runtime = Path(os.environ.get(RUNTIME, ""))
    try:
        reason = _why_unfit(runtime) if runtime.is_absolute() else "not set, or no absolute path"
    except OSError as error:
        reason = str(error.strerror)
    if reason is None:
        yield runtime / "tensorwire"
    else:
        refusals.append(f"${RUNTIME} ({reason})")
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:  # no folder for temporary files at all
        refusals.append(str(error.strerror))
    else:
        yield temporary / f"tensorwire-{os.geteuid()}"
    # Several hosts can share a home, and their locks need not know of each other.
    if (cache := cache_folder()) is not None:
        with contextlib.suppress(OSError):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield cache / f"tensorwire-{socket.gethostname()}"
    else:
        refusals.append("~/.cache (neither XDG_CACHE_HOME nor HOME is an absolute path)")


def _why_unfit(folder: Path) -> str | None:
    """Returns why others can write to it, or this user cannot; None: it is fit. No links."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "no folder"
    if found.st_uid != os.geteuid():
        return f"owned by user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"mode {stat.S_IMODE(found.st_mode):o}, so that others can write"
    return None if os.access(folder, os.W_OK | os.X_OK) else "not to be written"
