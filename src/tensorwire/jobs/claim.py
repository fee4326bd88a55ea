"""Claims a rank on this host for one process, by a lock that ends with the process.

A process inherits the variables of the one that started it, RANK too. The lock is on a file in a
folder that no other user can write to, so that nobody else can take it or keep it; a forked child
lets go of it. The file has the holder's process id, for messages alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from tensorwire.errors import UnavailableError
from tensorwire.jobs.folder import RUNTIME, runtime_folder
from tensorwire.jobs.host import this_host
from tensorwire.jobs.lockfile import is_there, open_locked, remove_own, try_lock

# How long a lock is tried that no worker holds: a process that removes what dead ones left, or one
# that is between fork and exec.
_PATIENCE_S = 2.0
_held: tuple[Path, int] | None = None


def hold_claim(job: str, rank: int, told_by: str) -> None:
    """Claims to be a worker, until `drop_claim` or the end of this process.

    Args:
        job: the same for all workers of a job, and another one for every other job.
        rank: of the worker.
        told_by: the variables that say the rank, for messages.

    Raises:
        RuntimeError: another process of this host is that worker; it is not disturbed.
        UnavailableError: no folder is fit for the lock, or it has no locks.
    """
    global _held
    digest = hashlib.sha256(f"{this_host()} {job} {rank}".encode()).hexdigest()[:40]
    path = runtime_folder() / f"claim-{digest}"
    if _held is not None and _held[0] == path:
        return
    drop_claim()
    try:
        descriptor = _lock_patiently(path)
    except OSError as error:
        raise UnavailableError(
            f"the file {path}, which keeps a second process from being worker {rank}, cannot be "
            f"locked ({error.strerror}); set {RUNTIME} to a folder of yours on a disk of this host"
        ) from error
    if descriptor is None:
        raise RuntimeError(refusal(rank, told_by, f"process {_holder(path) or '(unknown)'}"))
    _held = path, descriptor
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    _remove_left(path.parent)


def drop_claim() -> None:
    """Drops the claim, so that another process may be this worker. Idempotent."""
    global _held
    if _held is not None:
        path, descriptor = _held
        _held = None
        remove_own(path, descriptor)
        os.close(descriptor)


def refusal(rank: int, told_by: str, holder: str) -> str:
    """Returns the message for a process that claims a rank that is taken.

    Args:
        rank: the rank.
        told_by: the variables that say it.
        holder: the process that has it, such as "process 77".
    """
    return (
        f"worker {rank} of this job is {holder} already, and {told_by} say that this process "
        f"({os.getpid()}) is it too; a process that a worker starts inherits its variables: start "
        "it without them, or call tw.init(rank=0, world_size=1) in it to train alone"
    )


def _lock_patiently(path: Path) -> int | None:
    """Returns the descriptor of the locked file of this name; None if a worker holds it."""
    deadline = time.monotonic() + _PATIENCE_S
    while (descriptor := open_locked(path)) is None:
        # Its holder, or a process that found it left, may have removed it between the two calls.
        if _is_running(_holder(path)) or time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    return descriptor


def _remove_left(folder: Path) -> None:
    """Removes the files of killed processes, which are not locked any more."""
    for path in folder.glob("claim-*"):
        with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
            if try_lock(file.fileno()) and is_there(path, file.fileno()):
                path.unlink()


def _holder(path: Path) -> str:
    """Returns the process id in the file, "" if there is none yet."""
    with contextlib.suppress(OSError):
        return path.read_text("ascii", "replace")[:20]
    return ""


def _is_running(process: str) -> bool:
    return process.isdigit() and os.path.exists(f"/proc/{process}")


def _let_go() -> None:
    """Forgets the claim in a forked child; the lock stays, as it is its parent's too."""
    global _held
    if _held is not None:
        os.close(_held[1])
    _held = None


os.register_at_fork(after_in_child=_let_go)
