"""Answers the kernel's FUSE requests for a running job that is mounted as a folder.

The core reads the requests and answers reads of bytes in memory; this module knows the files. A
file of a version is a file of its own: a program that has it open, or mapped, sees that version,
and the kernel keeps no pages of one for another. The inode of stat(2) belongs to the path.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable

from tensorwire._core import fuse as core_fuse
from tensorwire.errors import UnavailableError

from .checkpoints import CheckpointWriting
from .errors import Explanations, as_os_errors, refuse
from .fuse_messages import (
    CHANGING,
    DIRECT_IO,
    GID,
    MODE,
    PASSTHROUGH,
    SIZE,
    UID,
    WRITTEN_AT,
    Operation,
    attributes,
    attributes_answer,
    directory,
    entry,
    inode_of,
    name_in,
    number_answer,
    opened,
    statfs,
    unpack_batch_forget,
    unpack_create,
    unpack_handle,
    unpack_mkdir,
    unpack_open,
    unpack_poll,
    unpack_read,
    unpack_rename,
    unpack_setattr,
    unpack_xattr,
)
from .mounted_tree import MountedTree, is_polled
from .tree import Tree
from .tree_items import FileContent, FileWriting, TreeEntry
from .wanted import wanted_while

ROOT = 1
_THREADS = 4  # answer at once; where all wait for a server, one more does
_MOST_THREADS = 64
_INIT_S = 5.0  # for the kernel's first request
_XATTR, _FOLDER_VALID_S = "user.tensorwire.", 1
_LOOK_S, _MOST_LOOK_S = 1e-3, 20e-3  # while somebody polls
_LOOK_SHARE = 0.01  # of the time since the last change
_LOOK_AGAIN_S = 10.0  # after ESTALE
_NO_REPLACE = 1  # of renameat2(2)


class _Node:
    """A file of one version, or a folder, as the kernel knows it.

    Attributes:
        entry: as it was when it was looked up.
        key: by which it is found: path and version, None while it is written.
        lookups: how often the kernel has, and has not forgotten.
        opens: how many handles there are.
        content: of all of them; None while there are none.
        buffers: of the content, from which the core answers; None: it does not.
        backing: the number of the file that the kernel reads and maps for it; 0: none.
    """

    def __init__(self, number: int, entry_: TreeEntry, key: tuple[str, int | None]) -> None:
        self.number, self.entry, self.key = number, entry_, key
        self.lookups = self.opens = 0
        self.content: FileContent | None = None
        self.buffers: list[bytes | memoryview] | None = None
        self.backing = 0
        self.lock = threading.Lock()

    @property
    def is_of_version(self) -> bool:
        """True if its content never changes."""
        return self.key[1] is not None


class _Handle:
    """An open file or folder."""

    def __init__(
        self,
        node: _Node,
        content: FileContent | None = None,
        writing: FileWriting | None = None,
        names: list[tuple[str, bool]] | None = None,
    ) -> None:
        self.node, self.content, self.writing, self.names = node, content, writing, names
        self.seen = b""  # what was read last, of a file that is polled


class JobMount:
    """A mounted tree. Its threads answer until it is unmounted or closed.

    Args:
        tree: of the job; the caller closes it, after this.
        folder: an empty one, or what is in it is not seen.

    Raises:
        UnavailableError: the kernel has no FUSE.
        PermissionError: this process may not mount.
        ValueError: nothing can be mounted there.
    """

    def __init__(self, tree: Tree, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(folder)
        self._tree, self._lock = MountedTree(tree), threading.Lock()
        self._uid, self._gid = os.geteuid(), os.getegid()
        root = _Node(ROOT, TreeEntry("", is_folder=True), ("", None))
        self._nodes = {ROOT: root}
        self._numbers = itertools.count(ROOT + 1)
        self._of: dict[tuple[str, int | None], _Node] = {root.key: root}
        self._written: dict[str, list[float]] = {}  # the times by which expected opens come
        self._handles: dict[int, _Handle] = {}
        self._handle_numbers = itertools.count(1)
        self._began = time.time()
        self._polls: dict[int, _Handle] = {}  # by the numbers under which they are woken
        self._polling, self._closed = threading.Event(), False
        self._mount = core_fuse.Mount(self.folder, self._uid, self._gid)
        self._explain = Explanations("tensorwire mount")
        self._under_way: dict[int, threading.Event] = {}  # requests; set: it was interrupted
        self._threads, self._idle = set[threading.Thread](), 0
        with self._lock:
            for _ in range(_THREADS):
                self._add_thread()
        threading.Thread(target=self._watch, name="tensorwire-polls", daemon=True).start()

    @property
    def passes_through(self) -> bool:
        """True if the kernel itself reads a server's copy of a model, where that is one file."""
        deadline = time.monotonic() + _INIT_S
        while (found := self._mount.backs) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return bool(found)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it is unmounted; says whether it is."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in list(self._threads))

    def close(self) -> None:
        """Unmounts it; processes with open files get ENOTCONN. Idempotent."""
        self._mount.end()
        self._closed = True
        self._polling.set()
        self.wait(10.0)
        for number, handle in list(self._handles.items()):
            if isinstance(handle.writing, CheckpointWriting):  # nobody has closed it
                self._tree.give_up(handle.node.entry.path, handle.writing)
            self._release(number)

    # ---- requests

    def _add_thread(self) -> None:
        """Starts a thread. The caller holds the lock; only a started thread can be waited for."""
        thread = threading.Thread(target=self._run, name="tensorwire-fuse", daemon=True)
        self._idle += 1
        thread.start()
        self._threads.add(thread)

    def _run(self) -> None:
        while (request := self._mount.next()) is not None:
            with self._lock:
                self._idle -= 1
                if not self._idle and len(self._threads) < _MOST_THREADS:
                    self._add_thread()  # somebody answers also while all others wait
            self._serve(*request)
            with self._lock:
                self._idle += 1
                if self._idle > _THREADS:
                    self._idle -= 1
                    self._threads.discard(threading.current_thread())
                    return

    def _serve(self, operation: int, unique: int, node: int, body: bytes) -> None:
        """Answers a request, if an answer is wanted."""
        if operation == Operation.INTERRUPT:
            event = self._under_way.get(unpack_handle(body))
            if event is None:  # its request is not taken yet; where it was answered nobody listens
                self._mount.answer(unique, errno.EAGAIN)
            else:
                event.set()
            return
        if operation in (Operation.FORGET, Operation.BATCH_FORGET):
            with contextlib.suppress(struct.error):  # of a kernel that means something else
                self._forget(operation, node, body)
            return
        interrupted = self._under_way[unique] = threading.Event()
        try:
            with wanted_while(lambda: not interrupted.is_set()):
                answer = self._answer(operation, node, body)
        except OSError as error:
            self._mount.answer(unique, error.errno or errno.EIO)
            self._explain(error)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            self._mount.answer(unique, errno.EIO)
        else:
            self._mount.answer(unique, 0, [answer] if answer else [])
        finally:
            del self._under_way[unique]

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation in CHANGING:
            raise refuse(errno.EROFS, self._node(node).entry.path)
        do = self._OPERATIONS.get(operation)
        if do is None:
            raise refuse(errno.ENOSYS, "")
        return do(self, node, body)

    def _node(self, number: int) -> _Node:
        with self._lock:
            found = self._nodes.get(number)
        if found is None:
            raise refuse(errno.ESTALE, "")
        return found

    def _path(self, parent: int, name: str) -> str:
        folder = self._node(parent).entry.path
        return f"{folder}/{name}" if folder else name

    def _lookup(self, parent: int, body: bytes) -> bytes:
        return self._looked_up(self._path(parent, name_in(body)))[1]

    def _looked_up(self, path: str) -> tuple[_Node, bytes]:
        """Returns the node at a path, which the kernel then knows, and the answer for it."""
        found = self._tree.entry(path)
        with self._lock:
            written = max(self._written.get(path, [0.0])) > time.monotonic()
            key = path, None if written else found.version
            node = self._of.get(key)
            if node is None:
                node = self._of[key] = _Node(next(self._numbers), found, key)
                self._nodes[node.number] = node
            node.entry = found  # its mode may change
            node.lookups += 1
        valid_s = _FOLDER_VALID_S if found.is_folder else 0
        return node, entry(node.number, valid_s, self._attributes(node, found))

    def _forget(self, operation: int, node: int, body: bytes) -> None:
        forgotten = []
        if operation == Operation.FORGET:
            forgotten = [(node, unpack_handle(body))]
        elif operation == Operation.BATCH_FORGET:
            forgotten = unpack_batch_forget(body)
        with self._lock:
            for number, count in forgotten:
                found = self._nodes.get(number)
                if found is None or number == ROOT:
                    continue
                found.lookups -= count
                if found.lookups <= 0 and not found.opens:
                    del self._nodes[number]
                    self._of.pop(found.key, None)

    def _attributes(self, node: _Node, now: TreeEntry | None = None) -> bytes:
        now = now or node.entry
        size, modified = now.size_bytes, now.modified
        content = node.content
        if content is not None and node.is_of_version:
            size = content.size_bytes
        mode = stat.S_IFREG | now.mode
        if now.is_folder:
            mode = stat.S_IFDIR | 0o555 | (now.mode & 0o200)
            modified = modified or self._began
        return attributes(inode_of(node.entry.path), size, modified, mode, self._uid, self._gid)

    def _getattr(self, number: int, _: bytes) -> bytes:
        node = self._node(number)
        fresh = None if node.is_of_version or number == ROOT else self._tree.entry(node.entry.path)
        return attributes_answer(self._attributes(node, fresh))

    def _setattr(self, number: int, body: bytes) -> bytes:
        node = self._node(number)
        valid, size = unpack_setattr(body)
        if not self._tree.entry(node.entry.path).writable or valid & (MODE | UID | GID):
            raise refuse(errno.EROFS, node.entry.path)
        if valid & SIZE:
            self._tree.truncate(node.entry.path, size)
        return self._getattr(number, body)

    def _open(self, number: int, body: bytes) -> bytes:
        node, flags = self._node(number), unpack_open(body)
        path = node.entry.path
        writing, writes = None, flags & os.O_ACCMODE != os.O_RDONLY
        if writes and node.is_of_version and self._tree.entry(path).writable:
            # A reader of this version must not see it shrink: the kernel looks the path up again.
            with self._lock:
                self._written.setdefault(path, []).append(time.monotonic() + _LOOK_AGAIN_S)
            raise refuse(errno.ESTALE, path)
        if writes:
            with self._lock:
                if (coming := self._written.get(path)) and coming.pop(0) and not coming:
                    del self._written[path]
        if writes or (
            node.entry.writable and node.entry.version is None
        ):  # `sync` opens it to read
            writing = self._tree.open_for_writing(path, flags)
            if flags & os.O_TRUNC:
                writing.truncate(0)
        content = None
        with node.lock:
            if node.is_of_version and writing is None:
                if node.content is None:
                    node.content = self._tree.open(path)
                    node.buffers = node.content.buffers()
                    node.backing = self._back(node.content)
                content = node.content
            elif writing is None:
                content = self._tree.open(path)
            with self._lock:
                node.opens += 1
        handle = self._add(_Handle(node, content, writing))
        if content is not None and node.buffers is not None:
            self._mount.serve(handle, node.buffers)
        if not node.is_of_version or writing is not None:
            return opened(handle, DIRECT_IO)
        return opened(handle, PASSTHROUGH if node.backing else 0, node.backing)

    def _create(self, parent: int, body: bytes) -> bytes:
        _, name = unpack_create(body)
        path = self._path(parent, name)
        writing = self._tree.create(path)
        node, told = self._looked_up(path)
        with self._lock:
            node.opens += 1
        return told + opened(self._add(_Handle(node, writing=writing)), DIRECT_IO)

    def _mkdir(self, parent: int, body: bytes) -> bytes:
        path = self._path(parent, unpack_mkdir(body))
        self._tree.make_folder(path)
        return self._looked_up(path)[1]

    def _unlink(self, parent: int, body: bytes) -> bytes:
        self._tree.remove(self._path(parent, name_in(body)))
        return b""

    def _rmdir(self, parent: int, body: bytes) -> bytes:
        self._tree.remove_folder(self._path(parent, name_in(body)))
        return b""

    def _rename(self, parent: int, body: bytes, has_flags: bool = False) -> bytes:
        folder, flags, old, new = unpack_rename(body, has_flags)
        path, to = self._path(parent, old), self._path(folder, new)
        if flags & ~_NO_REPLACE:
            raise refuse(errno.EINVAL, path, "two files cannot be exchanged (RENAME_EXCHANGE)")
        self._tree.rename(path, to, bool(flags & _NO_REPLACE))
        return b""

    def _back(self, content: FileContent) -> int:
        """Lets the kernel read a content's own file, where it does and there is one."""
        path = content.backing() if self._mount.backs else None
        if path is None:
            return 0
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return 0  # another user's, or the server is gone: it is read by this process
        try:
            if os.fstat(descriptor).st_size != content.size_bytes:
                return 0
            return self._mount.back(descriptor)
        except UnavailableError:
            return 0
        finally:
            os.close(descriptor)

    def _add(self, handle: _Handle) -> int:
        with self._lock:
            number = next(self._handle_numbers)
            self._handles[number] = handle
            return number

    def _read(self, _: int, body: bytes) -> bytes:
        number, offset, size = unpack_read(body)
        handle = self._handles[number]
        if handle.content is None:  # of a file that is written
            if handle.writing is not None:
                written = handle.writing.read(offset, offset + size)
                if written is not None:
                    return written
            with self._tree.open(handle.node.entry.path) as content:
                return content.read(offset, offset + size)
        node = handle.node
        if is_polled(node.entry.path):  # as it is now, also where it is read again
            with self._tree.open(node.entry.path) as content:
                handle.seen = content.read()
            return handle.seen[offset : offset + size]
        if not node.is_of_version or node.content is None:
            return handle.content.read(offset, offset + size)
        with node.lock:
            if node.buffers is None and node.content.whole is not None:
                with as_os_errors(node.entry.path):
                    node.buffers = [node.content.whole()]
            if node.buffers is not None:
                self._mount.serve(number, node.buffers)
            return handle.content.read(offset, offset + size)

    def _write(self, _: int, body: bytes) -> bytes:
        number, offset, size = unpack_read(body)
        writing = self._handles[number].writing
        if writing is None:
            raise refuse(errno.EBADF, "")
        data = memoryview(body)[WRITTEN_AT : WRITTEN_AT + size]
        try:
            return number_answer(writing.write(offset, data))
        except OSError:
            if isinstance(writing, CheckpointWriting) and writing.failed:
                self._tree.failed(self._handles[number].node.entry.path)
            raise

    def _fsync(self, _: int, body: bytes) -> bytes:
        writing = self._handles[unpack_handle(body)].writing
        if writing is not None and not isinstance(writing, CheckpointWriting):
            writing.sync()
        return b""

    def _fsyncdir(self, _: int, body: bytes) -> bytes:
        self._tree.complete(self._handles[unpack_handle(body)].node.entry.path)
        return b""

    def _flush(self, _: int, body: bytes) -> bytes:
        """Answers close(2) of a checkpoint's file with the result, unless it is still empty.

        A shell closes its own copy of a descriptor before the program writes.
        """
        handle = self._handles[unpack_handle(body)]
        writing = handle.writing
        if isinstance(writing, CheckpointWriting) and writing.size_bytes:
            self._tree.closed(handle.node.entry.path, writing)
        return b""

    def _release_one(self, _: int, body: bytes) -> bytes:
        self._release(unpack_handle(body))
        return b""

    def _release(self, number: int) -> None:
        self._mount.unserve(number)
        with self._lock:
            handle = self._handles.pop(number, None)
            self._polls = {p: each for p, each in self._polls.items() if each is not handle}
        if handle is None or handle.names is not None:
            return
        node, left = handle.node, None
        with node.lock, self._lock:
            node.opens -= 1
            if not node.is_of_version:
                left = handle.content
            elif not node.opens:
                left, node.content, node.buffers = node.content, None, None
                if node.backing:
                    self._mount.unback(node.backing)
                node.backing = 0
            if node.lookups <= 0 and not node.opens:
                self._nodes.pop(node.number, None)
                self._of.pop(node.key, None)
        if isinstance(handle.writing, CheckpointWriting):
            self._tree.closed(node.entry.path, handle.writing)  # an empty one
        if left is not None:
            left.close()

    def _opendir(self, number: int, _: bytes) -> bytes:
        node = self._node(number)
        found = self._tree.entries(node.entry.path)
        names = [(".", True), ("..", True), *((each.name, each.is_folder) for each in found)]
        return opened(self._add(_Handle(node, names=names)))

    def _readdir(self, _: int, body: bytes) -> bytes:
        handle, first, size = unpack_read(body)
        return directory(self._handles[handle].names or [], first, size)

    # ---- polling

    def _poll(self, _: int, body: bytes) -> bytes:
        number, poll, wants = unpack_poll(body)
        handle = self._handles[number]
        if not is_polled(handle.node.entry.path):
            return number_answer(select.POLLIN | select.POLLOUT)
        if wants:  # first, so that no change is missed
            with self._lock:
                self._polls[poll] = handle
            self._polling.set()
        return number_answer(select.POLLIN if self._has_changed(handle) else 0)

    def _has_changed(self, handle: _Handle) -> bool:
        try:
            with self._tree.open(handle.node.entry.path) as content:
                return content.read() != handle.seen
        except OSError:
            return True  # the reader gets the error

    def _watch(self) -> None:
        changed = time.monotonic()
        while not self._closed:
            self._polling.wait()
            with self._lock:
                polls = list(self._polls.items())
                if not polls:
                    self._polling.clear()
            for poll, handle in polls:
                if self._has_changed(handle):
                    changed = time.monotonic()
                    with self._lock:
                        self._polls.pop(poll, None)
                    self._mount.wake_poll(poll)
            # A program that has waited long need not hear of a change within a millisecond.
            waited_s = time.monotonic() - changed
            time.sleep(min(max(_LOOK_S, _LOOK_SHARE * waited_s), _MOST_LOOK_S))

    # ---- attributes of tensors

    def _xattrs(self, number: int) -> dict[str, bytes]:
        found = self._node(number).entry
        told: dict[str, object] = {"version": found.version}
        if found.dtype:
            told |= {"dtype": found.dtype, "shape": ",".join(map(str, found.shape))}
        return {
            f"{_XATTR}{name}": str(value).encode()
            for name, value in told.items()
            if value is not None
        }

    def _getxattr(self, number: int, body: bytes) -> bytes:
        size, name = unpack_xattr(body)
        value = self._xattrs(number).get(name)
        if value is None:
            raise refuse(errno.ENODATA, name)
        return _fitting(value, size)

    def _listxattr(self, number: int, body: bytes) -> bytes:
        size, _ = unpack_xattr(body)
        return _fitting(b"".join(f"{name}\0".encode() for name in self._xattrs(number)), size)

    def _statfs(self, _: int, __: bytes) -> bytes:
        return statfs()

    def _nothing(self, _: int, __: bytes) -> bytes:
        return b""

    _OPERATIONS: dict[int, Callable[[JobMount, int, bytes], bytes]] = {  # noqa: RUF012
        Operation.LOOKUP: _lookup,
        Operation.GETATTR: _getattr,
        Operation.SETATTR: _setattr,
        Operation.OPEN: _open,
        Operation.READ: _read,
        Operation.WRITE: _write,
        Operation.STATFS: _statfs,
        Operation.RELEASE: _release_one,
        Operation.FSYNC: _fsync,
        Operation.GETXATTR: _getxattr,
        Operation.LISTXATTR: _listxattr,
        Operation.FLUSH: _flush,
        Operation.OPENDIR: _opendir,
        Operation.READDIR: _readdir,
        Operation.POLL: _poll,
        Operation.RELEASEDIR: _release_one,
        Operation.FSYNCDIR: _fsyncdir,
        Operation.CREATE: _create,
        Operation.MKDIR: _mkdir,
        Operation.UNLINK: _unlink,
        Operation.RMDIR: _rmdir,
        Operation.RENAME: _rename,
        Operation.RENAME2: lambda self, *asked: self._rename(*asked, has_flags=True),
        Operation.DESTROY: _nothing,
    }


def _fitting(value: bytes, size: int) -> bytes:
    if size == 0:
        return number_answer(len(value))
    if len(value) > size:
        raise refuse(errno.ERANGE, "")
    return value
