"""Lets workers that other programs have started join a job, and checks which ones they are.

A supervisor of the same user listens on a unix socket; who connects says which worker it is. Only
this user's processes are heard, and the kernel says which process each of them is. Knows no job:
who is let in is decided in serve.py. Nothing here blocks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

from tensorwire.errors import UnavailableError
from tensorwire.membership import (
    PEER_CREDENTIALS,
    is_there,
    remove_own,
    runtime_folder,
    short_path,
    tell,
    try_lock,
)
from tensorwire.outside import parse_json

# Who has connected and says nothing for long makes room for others.
_MOST_WAITING = 256
_LONGEST_CLAIM = 4096


class _PlaceQuestion(TypedDict):
    rank: int


class Visitor:
    """A process that something else has started. It is watched, and ended only by `fence`.

    Args:
        index: its rank.
        pid: its number.
        pidfd: owned from now on; ready for reading when the process has ended.

    Attributes:
        kind: "worker".
        index, pid, pidfd: as given.
        name: such as "worker 0".
        killed, died_for_memory: nobody here can know how it ended.
    """

    kind = "worker"
    killed = True
    died_for_memory = False

    def __init__(self, index: int, pid: int, pidfd: int) -> None:
        self.index, self.pid, self.pidfd = index, pid, pidfd
        self.name = f"worker {index}"
        self._ending = "ended without a goodbye"

    @property
    def has_ended(self) -> bool:
        """True if `pidfd` is ready by now."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def ending(self) -> str:
        """Returns how it ended, as a phrase that follows its name."""
        return self._ending

    def fence(self, why: str) -> None:
        """Ends the process, which cannot go on beside its successor; see `Replaceable`."""
        self._ending = why
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stops watching it."""
        os.close(self.pidfd)


class Claim(NamedTuple):
    """A claim at the socket: the rank that a process says it has, and its connection."""

    visitor: Visitor
    socket: socket.socket

    def refuse(self, **why: object) -> None:
        """Sends it away."""
        with contextlib.suppress(OSError):
            self.socket.send(json.dumps(why).encode())
        self.socket.close()
        self.visitor.close()


class Door:
    """The socket at which workers come; its name is there until `close`.

    A file beside it is locked as long as the door is there, so that the name of a killed supervisor
    can be taken, and the name of a living one cannot.

    Args:
        path: of the socket; None: one in the user's runtime folder.
        say: prints a line where its name cannot be removed.

    Attributes:
        path: of the socket.
        descriptor: ready for reading when `claims` has something to do.

    Raises:
        UnavailableError: the path is another supervisor's, or cannot be a socket's.
    """

    def __init__(self, path: Path | None = None, say: Callable[[str], object] = tell) -> None:
        self._say = say
        if path is None:
            path = runtime_folder() / f"serve-{os.getpid()}-{secrets.token_hex(4)}"
            _remove_left(path.parent)
        self.path = path
        self._lock = -1
        self._waiting: dict[int, socket.socket] = {}
        self._epoll = select.epoll()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._open()
        except OSError as error:
            self.close()
            raise UnavailableError(
                f"tensorwire serve cannot listen at {self.path}: {error.strerror or error}; "
                "--socket names another place"
            ) from error
        except BaseException:
            self.close()
            raise
        self.descriptor = self._epoll.fileno()

    def _open(self) -> None:
        if self.path.exists() and not self.path.is_socket():
            raise UnavailableError(f"{self.path} is there already, and is no socket")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(_lock_of(self.path), flags, 0o600)
        if not (try_lock(self._lock) and is_there(_lock_of(self.path), self._lock)):
            os.close(self._lock)
            self._lock = -1
            raise UnavailableError(
                f"another tensorwire serve listens at {self.path}; --socket names another place"
            )
        self.path.unlink(missing_ok=True)  # what a killed one has left
        with short_path(self.path) as short:
            self._listener.bind(short)
        self.path.chmod(0o600)
        self._listener.listen()
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)

    def claims(self) -> Iterator[Claim]:
        """Yields the claims of workers; closes all other connections."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._waiting and (claim := self._heard(descriptor)) is not None:
                yield claim

    def close(self) -> None:
        """Removes the name and closes all connections. May be called again."""
        for waiting in self._waiting.values():
            waiting.close()
        self._waiting.clear()
        self._epoll.close()
        self._listener.close()
        if self._lock >= 0:
            for path in (self.path, _lock_of(self.path)):
                remove_own(path, say=self._say)
            os.close(self._lock)
            self._lock = -1

    def _accept(self) -> None:
        try:
            came, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process may open no more files
            return
        came.setblocking(False)
        if len(self._waiting) == _MOST_WAITING:
            self._forget(next(iter(self._waiting))).close()
        self._waiting[came.fileno()] = came
        self._epoll.register(came, select.EPOLLIN)

    def _heard(self, descriptor: int) -> Claim | None:
        came = self._forget(descriptor)
        try:
            data = came.recv(_LONGEST_CLAIM)
            told = came.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
            pid, user, _ = PEER_CREDENTIALS.unpack(told)
            if user == os.geteuid():
                rank = parse_json(data, _PlaceQuestion, _LONGEST_CLAIM)["rank"]
                visitor = Visitor(rank, pid, os.pidfd_open(pid))
                if not _is_closed(came):  # so that the number is still that of who connected
                    return Claim(visitor, came)
                visitor.close()
        except ValueError as error:
            with contextlib.suppress(OSError):
                came.send(json.dumps({"refused": f"that is no question: {error}"}).encode())
        except OSError:
            pass  # it is gone, or in no process table of this one
        came.close()
        return None

    def _forget(self, descriptor: int) -> socket.socket:
        self._epoll.unregister(descriptor)
        return self._waiting.pop(descriptor)


def _is_closed(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _remove_left(folder: Path) -> None:
    """Removes the remains of killed supervisors there."""
    for lock in folder.glob("serve-*.lock"):
        with contextlib.suppress(OSError), lock.open("r+b", buffering=0) as file:
            if try_lock(file.fileno()) and is_there(lock, file.fileno()):
                lock.with_suffix("").unlink(missing_ok=True)
                lock.unlink()
