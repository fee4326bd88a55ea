"""Keeps descriptors that a server or worker has handed to the launcher for its successor.

docs/internals/launch.md has the messages: JSON on a SOCK_SEQPACKET socket, descriptors beside it.
Knows no process and no policy: who is replaced, and when, is decided in restarts.py. Nothing here
blocks.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import json
import os
import resource
import socket
import struct
import termios
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

from tensorwire.durability.descriptor_store import LISTENER
from tensorwire.jobs.door import LONGEST_MESSAGE, receive_message, send_message
from tensorwire.membership.takeovers import ChangeWord

MOST_KEYS = 4096
COUNTERS = "progress", "work", "size"
"""The numbers of a server or worker that its kept memory may have."""
_MOST_PER_MESSAGE = 100
# The messages that are read before the supervisor looks at something else.
_AT_ONCE = 64
# More than a socket holds: the last messages of a dead process are read to their end.
_ALL = 1 << 16
# What workers say of changes; membership/takeovers.py has what it means.
_CHANGES = {ChangeWord.AT, ChangeWord.SWITCHED, ChangeWord.READY, ChangeWord.JOINED}


class _MemberSays(TypedDict, total=False):
    """A message of a member; docs/internals/launch.md has which keys go together."""

    keep: str
    about: Any
    drop: str
    leave: bool
    offer: str
    joins: str
    saving: str
    took: int
    at: int
    number: int
    ready: int
    switched: int
    obstacle: str
    joined: int


class KeeperError(Exception):
    """An error in a member's message, which the launcher cannot understand or hold."""


class _Kept(NamedTuple):
    descriptor: int
    entry: str  # [KEY, ABOUT] as JSON
    counters: dict[str, int]  # by name the offset in the file


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the launcher's end of a member's socket, which never blocks, and the member's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


class Keeper:
    """The descriptors of one member, and the socket to the process that is this member now.

    Invariants: every descriptor that came is either in `_held` or closed; `_queue` is what the
    process has yet to be told before it may say anything itself.

    Attributes:
        left: None so far; then whether the member has left in good order; false: it has failed.
        offer: why no other worker could take over the slices of this one; "": one could; None: it
            has said nothing so far.
        took: the number of the last takeover that this worker has made.
        saving: the path of the checkpoint that it is writing; "" if it writes none.
        joins: why no worker could join by what this one has noted; None: it has said nothing.
        said: what else it has said of changes of the job's workers, by the name of each message.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._held: dict[str, _Kept] = {}
        self._queue: collections.deque[tuple[bytes, list[int]]] = collections.deque()
        self._reset = False
        self.left: bool | None = None
        self.offer: str | None = None
        self.took = 0
        self.saving = ""
        self.joins: str | None = None
        self.said: dict[str, dict[str, Any]] = {}

    @property
    def descriptor(self) -> int | None:
        """The socket, ready for reading when `read` has something; None if nothing more comes."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def sending(self) -> bool:
        """True if `send` has something left that waits for room in the socket."""
        return self._socket is not None and bool(self._queue)

    @property
    def restorable(self) -> bool:
        """True if a successor could go on with the held memory."""
        return LISTENER in self._held

    @property
    def taken(self) -> bool:
        """True if the process has read all messages, also if there were none."""
        if self._reset or self._queue:
            return False
        if self._socket is None:
            return True
        unread = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        return struct.unpack("i", unread) == (0,)

    def attach(self, ours: socket.socket) -> None:
        """Takes the launcher's end of a socket to a process that is this member from now on."""
        self._disconnect()
        self._queue.clear()
        self._reset = False
        self._socket = ours

    def tell(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Tells the attached process something, after the messages that wait already.

        Args:
            message: what to tell.
            descriptors: sent beside it; they stay the caller's, and open until it is sent.

        Raises:
            KeeperError: see `send`.
        """
        self._queue.append((json.dumps(message).encode(), list(descriptors)))
        self.send()

    def held(self, key: str) -> int | None:
        """Returns the descriptor held under a key; it stays this object's. None without one."""
        return self._held[key].descriptor if key in self._held else None

    def hand_over(self, arguments: list[str], term: int, restarts: int) -> None:
        """Tells the attached process to start, and gives it all that is held, which stays here too.

        Args:
            arguments: options of the server that it replaces.
            term: how often that was replaced, with this time.
            restarts: how often because a process had died.

        Raises:
            KeeperError: see `send`.
        """
        messages = list(_batches(self._held.values()))
        about = {"term": term, "restarts": restarts, "messages": len(messages)}
        self._queue.append((json.dumps({"start": arguments, **about}).encode(), []))
        self._queue.extend(messages)
        self.send()

    def send(self) -> None:
        """Sends waiting messages, as far as there is room.

        Raises:
            KeeperError: the kernel does not take it.
        """
        while self._queue and self._socket is not None:
            data, descriptors = self._queue[0]
            try:
                send_message(self._socket, data, descriptors)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._reset = True  # it ends, or has; the watch over the process finds out
                return
            except OSError as error:
                text = f"its successor cannot be told what it had: {error.strerror}"
                raise KeeperError(text) from error
            self._queue.popleft()

    def read(self) -> None:
        """Reads and does incoming messages; a part, if there are many.

        Raises:
            KeeperError: it is nothing that a server or worker says; the socket is closed.
        """
        self._read(_AT_ONCE)

    def read_all(self) -> None:
        """Reads all that a process has left which has ended. Raises as `read` does."""
        self._read(_ALL)

    def progress(self) -> int:
        """Returns how far the member has come, by the counters in the files that it has named."""
        return sum(self.counted("progress").values())

    def counted(self, name: str) -> dict[str, int]:
        """Returns the present value of a counter, by the key of each file that has this counter."""
        found = {}
        for key, kept in self._held.items():
            if (offset := kept.counters.get(name)) is not None:
                with contextlib.suppress(OSError):
                    data = os.pread(kept.descriptor, 8, offset)
                    found[key] = int.from_bytes(data, "little") if len(data) == 8 else 0
        return found

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that are in use in all files that are held."""
        return sum(512 * os.fstat(kept.descriptor).st_blocks for kept in self._held.values())

    @property
    def address(self) -> str:
        """The address where the server has said that it listens; "" if it has not."""
        if (kept := self._held.get(LISTENER)) is None:
            return ""
        about = json.loads(kept.entry)[1]
        address = about.get("address", "") if isinstance(about, dict) else ""
        return address if isinstance(address, str) else ""

    def close(self) -> None:
        """Closes the socket and all held descriptors; may be called again."""
        self._disconnect()
        self._queue.clear()
        for kept in self._held.values():
            os.close(kept.descriptor)
        self._held.clear()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _read(self, most: int) -> None:
        for _ in range(most):
            if self._socket is None:
                return
            descriptors: list[int] = []
            try:
                found = receive_message(self._socket, _MemberSays)
                if found is None:
                    self._disconnect()
                    return
                message, descriptors = found
                self._take(message, descriptors)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It has closed its end and left unread what it was told. The kernel says so once
                # and then gives out what had come before.
                self._reset = True
            except (OSError, ValueError, KeeperError) as error:
                self._disconnect()
                raise self._mistake(error) from error
            finally:
                for descriptor in descriptors:  # that were not kept
                    os.close(descriptor)

    def _mistake(self, error: Exception) -> KeeperError:
        """Returns the mistake that an error tells of."""
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return KeeperError(
                f"the launcher cannot hold more of its descriptors than {len(self._held)}: it may "
                f"have {soft} open files; raise the hard limit (ulimit -Hn) or use --on-death end"
            )
        if isinstance(error, KeeperError):
            return error
        return KeeperError(f"its message to the launcher cannot be understood: {error}")

    def _take(self, message: _MemberSays, descriptors: list[int]) -> None:
        """Does a message; takes the descriptor that it keeps out of the list."""
        if self._queue:
            raise KeeperError("it sent a message before it had read the launcher's")
        if "leave" in message and not descriptors:
            self.left = message["leave"]
            self._drop(LISTENER)
        elif "offer" in message and not descriptors:
            self.offer = message["offer"]
            self.joins = message.get("joins", "")
        elif "saving" in message and not descriptors:
            self.saving = message["saving"]
        elif "took" in message and not descriptors:
            self.took = max(self.took, message["took"])
        elif (said := _CHANGES & message.keys()) and not descriptors:
            self.said[said.pop()] = {**message}
        elif "drop" in message and "keep" not in message:
            key = message["drop"]
            if descriptors:
                raise KeeperError(f"its 'drop' of {key!r} came with {len(descriptors)} descriptors")
            self._drop(key)
        elif "keep" in message and "drop" not in message:
            key = message["keep"]
            if len(descriptors) != 1:
                raise KeeperError(
                    f"its 'keep' of {key!r} came with {len(descriptors)} descriptors, not with one"
                )
            self._keep(key, message.get("about"), descriptors)
        else:
            raise KeeperError(f"its message has no known key: {json.dumps(message)[:100]!r}")

    def _drop(self, key: str) -> None:
        if (kept := self._held.pop(key, None)) is not None:
            os.close(kept.descriptor)

    def _keep(self, key: str, about: Any, descriptors: list[int]) -> None:
        counters = {}
        for name in COUNTERS if isinstance(about, dict) else ():
            if (offset := about.get(name)) is not None:
                if type(offset) is not int or not 0 <= offset < 1 << 62:
                    raise KeeperError(f"the offset of {name!r} in {key!r} is {offset!r}")
                counters[name] = offset
        entry = json.dumps([key, about])
        if len(entry) > LONGEST_MESSAGE:
            raise KeeperError(f"the facts about {key!r} are longer than {LONGEST_MESSAGE} bytes")
        former = self._held.get(key)
        if former is None and len(self._held) == MOST_KEYS:
            raise KeeperError(f"the launcher keeps at most {MOST_KEYS} descriptors of a process")
        self._held[key] = _Kept(descriptors.pop(), entry, counters)
        if former is not None:
            os.close(former.descriptor)


def _batches(held: Iterable[_Kept]) -> Iterator[tuple[bytes, list[int]]]:
    """Yields the messages that hand all over: none too long, none with too many descriptors."""
    entries: list[str] = []
    descriptors: list[int] = []
    for kept in held:
        length = sum(map(len, entries)) + len(kept.entry)
        if entries and (length > LONGEST_MESSAGE or len(entries) == _MOST_PER_MESSAGE):
            yield _batch(entries), descriptors
            entries, descriptors = [], []
        entries.append(kept.entry)
        descriptors.append(kept.descriptor)
    if entries:
        yield _batch(entries), descriptors


def _batch(entries: list[str]) -> bytes:
    return f'{{"kept": [{", ".join(entries)}]}}'.encode()
