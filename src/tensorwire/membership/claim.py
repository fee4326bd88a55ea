"""One process of a host is a worker of a job, and no other one: a name that the kernel keeps.

A process inherits the variables of the one that started it, RANK too. The name is an abstract unix
socket, which is gone with its process; forked children let go of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct

_held: tuple[str, socket.socket] | None = None


def hold_claim(job: str, rank: int, told_by: str) -> None:
    """Claims to be a worker, until `drop_claim` or the end of this process.

    Args:
        job: the same for all workers of a job, and another one for every other job.
        rank: of the worker.
        told_by: the variables that say the rank, for messages.

    Raises:
        RuntimeError: another process of this host is that worker; it is not disturbed.
    """
    global _held
    name = f"\0tensorwire-{hashlib.sha256(f'{job} {rank}'.encode()).hexdigest()[:40]}"
    if _held is not None and _held[0] == name:
        return
    drop_claim()
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(name)
        made.listen()
    except OSError as error:
        made.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise RuntimeError(refusal(rank, told_by, f"process {_holder(name)}")) from None
    _held = name, made


def drop_claim() -> None:
    """Another process may be this worker from now on. Idempotent."""
    global _held
    if _held is not None:
        _held[1].close()
    _held = None


def refusal(rank: int, told_by: str, holder: str) -> str:
    """The message for a process that claims a rank that is taken.

    Args:
        rank: the rank.
        told_by: the variables that say it.
        holder: who has it, such as "process 77".
    """
    return (
        f"worker {rank} of this job is {holder} already, and {told_by} say that this process "
        f"({os.getpid()}) is it too; a process that a worker starts inherits its variables: start "
        "it without them, or call tw.init(rank=0, world_size=1) in it to train alone"
    )


def _holder(name: str) -> str:
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(1.0)
        probe.connect(name)
        told = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return str(struct.unpack("3i", told)[0])
    return "(unknown)"  # it is just starting or ending


os.register_at_fork(after_in_child=drop_claim)
