"""Descriptors that harm a process that receives, maps, looks at or closes them, for attackers.

Each kind is a function that gives a descriptor of its own; its companions are kept until the
process ends. None of it is nice: several block when their last holder closes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from random import Random

import fuse
import wire
from attack import libc

SYS_USERFAULTFD, SYS_IO_URING_SETUP, SYS_MEMFD_SECRET, SYS_TIMERFD = 323, 425, 447, 283
MFD_HUGETLB = 4
LINGER_S = 6  # how long a lingering socket blocks whoever closes it
QUEUED = 60  # descriptors inside of one message in a queue
_kept: list[object] = []  # other ends


def _system_call(number: int, *arguments: object) -> int:
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def lingering_socket() -> int:
    """Makes a TCP socket with data that is not read: closing it blocks for the time it names."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stream = socket.create_connection(listener.getsockname(), 2.0)
        _kept.append(listener.accept()[0])
    stream.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            stream.send(bytes(1 << 16))
    stream.setblocking(True)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return stream.detach()


def hung_file() -> int:
    """A file on a FUSE mount whose server hangs; needs root when it is made."""
    return fuse.hung_file()


def full_pipe() -> int:
    read, write = os.pipe()
    _kept.append(read)
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    return write


def terminal() -> int:
    master, slave = os.openpty()
    _kept.append(master)
    return slave


def epoll_of_epolls() -> int:
    outer = select.epoll()
    for _ in range(4):
        inner = outer
        outer = select.epoll()
        outer.register(inner.fileno())
        _kept.append(inner)
    _kept.append(outer)
    return os.dup(outer.fileno())


def io_uring() -> int:
    return _system_call(SYS_IO_URING_SETUP, 4, ctypes.create_string_buffer(120))


def process() -> int:
    return os.pidfd_open(os.getpid())


def userfaultfd() -> int:
    return _system_call(SYS_USERFAULTFD, os.O_CLOEXEC | 1)


def timer() -> int:
    return _system_call(SYS_TIMERFD, 1, os.O_CLOEXEC | os.O_NONBLOCK)


def folder() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY)


def path_only() -> int:
    return os.open("/", os.O_PATH)


def leased_file() -> int:
    """A file under a lease: a process that opens it waits for its holder."""
    with tempfile.NamedTemporaryFile() as file:
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return os.dup(file.fileno())


def full_eventfd() -> int:
    """An eventfd that blocks a process that rings it."""
    event = os.eventfd(0, os.EFD_CLOEXEC)
    os.eventfd_write(event, (1 << 64) - 2)
    return event


def reading_pipe() -> int:
    """A pipe's end for reading, of which the other one is closed."""
    read, write = os.pipe()
    os.close(write)
    return read


def packet_pipe() -> int:
    """A pipe with room for one message."""
    read, write = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    _kept.append(read)
    return write


def named_pipe() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/bell")
        return os.open(f"{folder}/bell", os.O_RDWR)


def eventfd() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def unix_listener() -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    return listener.detach()


def netlink() -> int:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).detach()


def _memfd(size: int, seals: int, flags: int = 0, content: bytes = b"") -> int:
    memory = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.truncate(memory, size)
    if content:
        os.pwrite(memory, content, 0)
    if seals:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
    return memory


def unsealed_memory() -> int:
    return _memfd(1 << 20, 0, content=wire.encode("Page", incarnation=0x7177))


def half_sealed_memory() -> int:
    return _memfd(1 << 20, fcntl.F_SEAL_GROW, content=wire.encode("Page", incarnation=0x7177))


def small_memory() -> int:
    return _memfd(4096, wire.SEALS)


def empty_memory() -> int:
    return _memfd(0, wire.SEALS)


def vast_memory() -> int:
    """Makes sealed memory larger than any machine's, of which no page exists yet."""
    return _memfd(1 << 46, wire.SEALS)


def unwritable_memory() -> int:
    return _memfd(1 << 20, wire.SEALS | fcntl.F_SEAL_WRITE)


def huge_pages() -> int:
    """Sealed memory of huge pages, of which the machine may have none."""
    return _memfd(1 << 22, wire.SEALS, MFD_HUGETLB)


def secret_memory() -> int:
    return _system_call(SYS_MEMFD_SECRET, 0)


def read_only_memory() -> int:
    memory = _memfd(1 << 20, wire.SEALS)
    try:
        return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    finally:
        os.close(memory)


def nested() -> int:
    """A unix socket in whose queue lie more descriptors, among them such sockets."""
    inner = None
    for _ in range(4):
        near, far = socket.socketpair(socket.AF_UNIX)
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(3):
                queued = [eventfd() for _ in range(QUEUED)] + ([inner] if inner is not None else [])
                try:
                    socket.send_fds(near, [b"x"], queued)
                finally:
                    for descriptor in queued[:QUEUED]:
                        os.close(descriptor)
        near.close()
        if inner is not None:
            os.close(inner)
        inner = far.detach()
    assert inner is not None
    return inner


def lingering_inside() -> int:
    """A unix socket in whose queue lies a lingering socket."""
    near, far = socket.socketpair(socket.AF_UNIX)
    inner = lingering_socket()
    socket.send_fds(near, [b"x"], [inner])
    os.close(inner)
    near.close()
    return far.detach()


KINDS: dict[str, Callable[[], int]] = {
    function.__name__.replace("_", " "): function
    for function in (
        lingering_socket, lingering_inside, hung_file, full_pipe, terminal, epoll_of_epolls,
        io_uring, process, userfaultfd, timer, folder, path_only, leased_file, full_eventfd,
        reading_pipe, packet_pipe, named_pipe, eventfd, unix_listener, netlink, unsealed_memory,
        half_sealed_memory, small_memory,
        empty_memory, vast_memory, unwritable_memory, huge_pages, secret_memory, read_only_memory,
        nested,
    )
}  # fmt: skip
NEED_ROOT = ("hung file", "leased file")  # made before the attacker gives it up
BLOCKING = ("lingering socket", "lingering inside", "hung file")


def draw(random: Random, many: bool = True) -> list[str]:
    """Some kinds; the ones that block are drawn often, since they are the worst."""
    if random.random() < 0.4:
        return [random.choice(BLOCKING)]
    return random.sample(sorted(KINDS), random.randint(1, 4 if many else 1))


class Store:
    """Descriptors of some kinds: one of each is made beforehand, a copy is given every time.

    The blocking kinds are given away: the receiver must be the last who has them.
    """

    AHEAD = 3

    def __init__(self, kinds: list[str]) -> None:
        self._made: dict[str, list[int]] = {}
        self.missing: dict[str, str] = {}
        for kind in kinds:
            try:
                count = self.AHEAD if kind in BLOCKING else 1
                self._made[kind] = [KINDS[kind]() for _ in range(count)]
            except OSError as error:  # the kernel has no such thing, or not for us
                self.missing[kind] = str(error)

    def take(self, random: Random) -> int:
        """A descriptor that the caller gives away and then closes.

        Raises:
            OSError: the kernel has none of the kinds, or none can be made now.
        """
        kinds = sorted(kind for kind, made in self._made.items() if made)
        if not kinds:
            return os.open("/dev/null", os.O_RDWR)
        kind = random.choice(kinds)
        if kind not in BLOCKING:
            return os.dup(self._made[kind][0])
        descriptor = self._made[kind].pop()
        if kind != "hung file":
            with contextlib.suppress(OSError):
                self._made[kind].insert(0, KINDS[kind]())
        return descriptor


def hold_pipe(hung: int, read_end: int, write_end: int, by: str) -> None:
    """Copies from or to a page of a hung file: a pipe's lock is held meanwhile. Does not end."""
    if hung < 0:
        time.sleep(60)
    # Not the module mmap, which asks for the size of the file.
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    page = libc.mmap(None, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, hung, 0)
    if by == "a write":
        libc.write(write_end, ctypes.c_void_p(page), ctypes.c_size_t(8))
    else:
        os.set_blocking(write_end, False)
        with contextlib.suppress(BlockingIOError):
            os.write(write_end, (1).to_bytes(8, "little"))  # an eventfd takes eight bytes
        libc.read(read_end, ctypes.c_void_p(page), ctypes.c_size_t(8))
    time.sleep(60)


def put(to: socket.socket, message: bytes, descriptors: Sequence[int], name: str = "") -> None:
    """Sends a message with descriptors, to the socket of this name if it is not connected.

    Raises:
        OSError: no process receives it, or not now.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
    to.sendmsg([message], rights, socket.MSG_DONTWAIT, *([name] if name else []))


def let_go(descriptors: Sequence[int]) -> None:
    """Closes them, without being held up."""
    for descriptor in descriptors:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            _close_soon(descriptor)
        else:  # a hung file does not let go of us, either
            threading.Thread(target=os.close, args=[descriptor], daemon=True).start()


def send(to: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Sends a message with descriptors and lets go of these, also if they did not leave.

    At once, so that the receiver is the last who has them.
    """
    try:
        put(to, message, descriptors)
    finally:
        let_go(descriptors)


def _close_soon(descriptor: int) -> None:
    """If ours is the last one after all, closing lingers, until a signal comes."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        os.close(descriptor)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
