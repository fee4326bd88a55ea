"""Publishes a running job's addresses and secret to other programs of its user.

Each server has a file in the user's runtime folder, which nobody else can read, and which is locked
as long as the server lives. So has each process that takes gradients from files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tensorwire.jobs.folder import runtime_folder
from tensorwire.jobs.lockfile import is_there, make_locked, remove_own, try_lock
from tensorwire.outside import parse_json

_MOST_BYTES = 64 << 10
_MOST_SHOWN = 1000  # characters of a command


@dataclass(frozen=True)
class RunningServer:
    """A server of a job that runs on this host.

    Attributes:
        index: its place among the servers.
        address: where it listens.
        pid: of its process.
        workers: how many the job has.
        command: what the launcher was told to run; "" if it did not say.
        started: seconds since 1970.
        secret: of the job; "" if it has none or is in a file.
        secret_file: where the secret is; "" if it is in no file.
        door: where it listens for readers of parameters; "" if it lets none in.
        reading_secret: by which they may read, and no more; "" if the job has no secret.
        pids: the namespace in which `pid` is a process; "" if that is not known.
        ticks: when it started, in seconds of this host's clock that is never set; 0: not known.
    """

    index: int
    address: str
    pid: int
    workers: int
    command: str
    started: float
    secret: str
    secret_file: str
    door: str = ""
    reading_secret: str = ""
    pids: str = ""
    ticks: float = 0.0


@dataclass(frozen=True)
class RunningFileWorker:
    """A process of a job that runs on this host, which takes a worker's gradients from files.

    Attributes:
        rank: of the worker.
        server: where server 0 of its job listens.
        pid: of the process.
        socket: path of the socket at which programs that write the files connect.
        started: seconds since 1970.
    """

    rank: int
    server: str
    pid: int
    socket: str
    started: float


Told = TypeVar("Told", RunningServer, RunningFileWorker)
_PREFIXES = {RunningServer: "server-", RunningFileWorker: "file-worker-"}


def shown_command(words: Sequence[str]) -> str:
    """Returns a command for people: in one short line, without characters that a terminal obeys."""
    text = " ".join(map(str, words))
    text = "".join(each if each.isprintable() else "?" for each in text[: _MOST_SHOWN + 1])
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…"


class JobFile:
    """The file of one process, until `close` or the end of the process.

    Args:
        told: what it tells.

    Raises:
        UnavailableError, OSError: there is no folder for it, or it cannot be written.
    """

    def __init__(self, told: RunningServer | RunningFileWorker) -> None:
        self._path, self._descriptor = make_locked(runtime_folder(), _PREFIXES[type(told)])
        try:
            os.write(self._descriptor, json.dumps(asdict(told)).encode())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            remove_own(self._path, descriptor)
            os.close(descriptor)


def running_servers() -> list[RunningServer]:
    """Returns the servers of this user on this host, the oldest first; removes files of dead ones.

    Raises:
        UnavailableError: no folder is fit for such files.
    """
    return sorted(_told(RunningServer), key=lambda server: (server.started, server.index))


def running_file_workers() -> list[RunningFileWorker]:
    """Returns this user's workers on this host that take gradients from files, oldest first.

    Raises:
        UnavailableError: no folder is fit for such files.
    """
    return sorted(_told(RunningFileWorker), key=lambda worker: (worker.started, worker.rank))


def _told(kind: type[Told]) -> list[Told]:
    found = list[Told]()
    for path in runtime_folder().glob(f"{_PREFIXES[kind]}*"):
        found += _read(path, kind)
    return found


def _read(path: Path, kind: type[Told]) -> Iterator[Told]:
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not try_lock(descriptor):
                yield parse_json(os.read(descriptor, _MOST_BYTES), kind)
            elif is_there(path, descriptor):
                path.unlink()  # nobody has the lock: its process was killed
        finally:
            os.close(descriptor)
