"""Exchanges messages with other processes of this user by unix sockets.

A process that can be asked has a `Door`, at which others knock. The kernel says who connects, and
other users are not heard. Where a secret is needed, a caller proves with a number that is used once
that it knows the secret. A message is a JSON object with descriptors beside it, and goes through
one parser; docs/internals/launch.md has the messages. Knows none of them.
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from tensorwire.jobs.folder import runtime_folder
from tensorwire.jobs.lockfile import remove_own, tell, try_lock
from tensorwire.outside import parse_json

T = TypeVar("T")

LONGEST_MESSAGE = 1 << 16
"""The most bytes of a message, unless its receiver wants more."""

_MOST_DESCRIPTORS = 253  # that the kernel lets through in one message (SCM_MAX_FD)
_LONGEST_PATH = 107  # bytes for which the kernel has room
_MOST_SILENT = 64  # connections that have sent nothing; more make room for others
_PURPOSE = b"tensorwire: ask the launcher of a job"
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: process, user and group of the other end
_PATIENCE_S = 2.0  # with other processes that open a door in the same folder


# ---- messages


class Message(NamedTuple, Generic[T]):
    """A received message: its content, and the descriptors beside it, which are the receiver's."""

    content: T
    descriptors: list[int]


def send_message(
    channel: socket.socket, message: Mapping[str, Any] | bytes, descriptors: Sequence[int] = ()
) -> None:
    """Sends a message; the descriptors stay the caller's.

    Raises:
        OSError: the other end is gone, or the kernel does not take it.
    """
    if not isinstance(message, bytes):
        try:
            message = json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # a path that is no UTF-8
            message = json.dumps(message).encode()
    rights = array.array("i", descriptors)
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    channel.sendmsg([message], beside, socket.MSG_NOSIGNAL)


def receive_message(
    channel: socket.socket, form: type[T], most_bytes: int = LONGEST_MESSAGE
) -> Message[T] | None:
    """Returns the next message; None: the other end is gone.

    Args:
        channel: from which it is read.
        form: of its content; see `parse_json`.
        most_bytes: of its content.

    Raises:
        ValueError: it is too long, or of another form. Its descriptors are closed.
        OSError: there is none; EMFILE: this process may open no more descriptors.
    """
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    data, beside, flags, _ = channel.recvmsg(most_bytes, space, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, rights in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(rights[: len(rights) - len(rights) % found.itemsize])
    if not data and not found:
        return None
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if flags & socket.MSG_TRUNC:
            raise ValueError(f"it is longer than {most_bytes} bytes")
        try:
            return Message(parse_json(data, form, most_bytes), found.tolist())
        except ValueError as error:
            raise ValueError(f"{error}: {data[:100].decode(errors='replace')!r}") from error
    except BaseException:
        for each in found:
            os.close(each)
        raise


def proof_of(secret: bytes, nonce: str) -> str:
    """Returns the proof that its sender, which was given `nonce`, knows a secret."""
    return hmac.new(secret, _PURPOSE + nonce.encode(), hashlib.sha256).hexdigest()


# ---- the process that knocks


def knock(path: str | Path, timeout_s: float) -> socket.socket:
    """Returns a connection to a door; it waits at most this long for each of its messages.

    Raises:
        OSError: nobody listens there; PermissionError: a process of another user does.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.settimeout(timeout_s)
        with short_path(path) as short:
            channel.connect(short)
        pid, user = _other_end(channel)
        if user != os.geteuid():
            text = f"process {pid} of user {user} listens there, and not one of {os.geteuid()}"
            raise PermissionError(errno.EPERM, text)
        return channel
    except BaseException:
        channel.close()
        raise


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


# ---- the process that is asked


class DoorClient:
    """A process of this user that has connected to a door.

    Attributes:
        channel: its socket, which never blocks.
        pid: its number, by the kernel.
        known: it has sent a message, and the secret is known to it.
    """

    def __init__(self, channel: socket.socket, pid: int, nonce: str) -> None:
        self.channel, self.pid, self._nonce = channel, pid, nonce
        self.known = False
        if nonce:
            self.send({"nonce": nonce})

    def send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a message; a process that is gone, or does not read, misses it."""
        with contextlib.suppress(OSError):
            send_message(self.channel, message, descriptors)

    def refuse(self, text: str, **more: object) -> None:
        """Sends the reason of a refusal, and closes the connection."""
        self.send({"error": text, **more})
        self.channel.close()

    def proves(self, secret: bytes, content: Mapping[str, Any]) -> bool:
        """Tells whether the sender of a message knows the secret."""
        proof = str(content.get("proof", "")).encode(errors="replace")
        return hmac.compare_digest(proof, proof_of(secret, self._nonce).encode())


class Door(Generic[T]):
    """A socket at which processes of this user connect; its name is there until `close`.

    Nothing here blocks but `messages`, where it is asked to wait.

    Args:
        form: of all messages, a TypedDict; with a secret it has the text "proof".
        name: how the name of the socket begins, which is a new one in the user's runtime folder.
            Sockets that killed processes have left there under such names are removed.
        path: of the socket, instead of that; a dead one is replaced.
        secret: that a process has to know; None: it is enough to be of this user.
        most_bytes: of a message.
        say: prints a line where the name cannot be removed.

    Attributes:
        path: of the socket.
        descriptor: ready for reading when `messages` has something to do.

    Raises:
        UnavailableError, OSError: nobody can listen there; EADDRINUSE: somebody does.
    """

    def __init__(
        self,
        form: type[T],
        name: str = "",
        path: Path | None = None,
        *,
        secret: bytes | None = None,
        most_bytes: int = LONGEST_MESSAGE,
        say: Callable[[str], object] = tell,
    ) -> None:
        self._form, self._secret, self._most_bytes, self._say = form, secret, most_bytes, say
        self._clients: dict[int, DoorClient] = {}
        new = f"{name}{os.getpid()}-{secrets.token_hex(4)}"  # numbers differ only in a container
        self.path = path or runtime_folder() / new
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _alone_in(self.path.parent):
                for left in self.path.parent.glob(f"{name}*") if path is None else [path]:
                    remove_dead(left)
                with short_path(self.path) as short:
                    self._listener.bind(short)
                self.path.chmod(0o600)
                self._listener.listen()
        except BaseException:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self.descriptor = self._epoll.fileno()

    def messages(self, timeout_s: float = 0.0) -> Iterator[tuple[DoorClient, T | None]]:
        """Yields what has come since, with its sender; None: one that is `known` is gone.

        A message that makes no sense is refused here.
        """
        for descriptor, _ in self._epoll.poll(timeout_s):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (sender := self._clients.get(descriptor)) is not None:
                was_known = sender.known
                try:
                    content = self._received(sender)
                except BlockingIOError:
                    continue
                if content is None:
                    del self._clients[descriptor]
                    sender.channel.close()
                if content is not None or was_known:
                    yield sender, content

    def forget(self, client: DoorClient) -> None:
        """Stops listening to a process, whose connection goes on."""
        descriptor = client.channel.fileno()
        if self._clients.get(descriptor) is client:
            self._epoll.unregister(descriptor)
            del self._clients[descriptor]

    def close(self) -> None:
        """Removes the name and closes all connections. May be called again."""
        for client in self._clients.values():
            client.channel.close()
        self._clients.clear()
        self._epoll.close()
        if self._listener.fileno() >= 0:
            self._listener.close()
            remove_own(self.path, say=self._say)

    def _accept(self) -> None:
        try:
            came, _ = self._listener.accept()
        except OSError:  # it has gone again, or this process may open no more files
            time.sleep(0.001)
            return
        came.setblocking(False)
        pid, user = _other_end(came)
        if user != os.geteuid():
            came.close()
            return
        silent = [each for each in self._clients.values() if not each.known]
        if len(silent) >= _MOST_SILENT:
            self.forget(silent[0])
            silent[0].channel.close()
        nonce = "" if self._secret is None else secrets.token_hex(16)
        self._clients[came.fileno()] = DoorClient(came, pid, nonce)
        self._epoll.register(came, select.EPOLLIN)

    def _received(self, sender: DoorClient) -> T | None:
        try:
            found = receive_message(sender.channel, self._form, self._most_bytes)
        except BlockingIOError:
            raise
        except ValueError as error:
            sender.refuse(
                f"the request is not valid ({error}): use the job's version of tensorwire"
            )
            return None
        except OSError:
            return None
        if found is None:
            return None
        for descriptor in found.descriptors:  # nobody is to send any
            os.close(descriptor)
        if self._secret is not None and not sender.known:
            if not sender.proves(self._secret, cast(Mapping[str, Any], found.content)):
                sender.refuse("this is not the secret of the job")
                return None
        sender.known = True
        return found.content


def remove_dead(path: Path) -> None:
    """Removes a socket at which no process listens."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        mine.setblocking(False)
        try:
            with short_path(path) as short:
                mine.connect(short)
        except ConnectionRefusedError:
            if path.is_socket():
                path.unlink()


def _other_end(channel: socket.socket) -> tuple[int, int]:
    """Returns process and user of the other end of a connection."""
    told = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(told)
    return pid, user


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps others from taking a socket for dead whose process is about to listen."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(OSError):  # a file system without locks
            while not try_lock(descriptor) and time.monotonic() < deadline:
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)
