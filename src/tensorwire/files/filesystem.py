"""`tw://HOST:PORT/…` for fsspec: a running job as files, of which its owner may write some.

Registered as the entry point `tw` of `fsspec.specs`; the tree itself is tree.py. docs/files.md has
the files and the errors.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import io
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.utils import stringify_path

from tensorwire.memory.handle import split_address

from .checkpoints import is_checkpoint
from .errors import as_os_errors, refuse
from .reader import JobReader
from .tree import Tree
from .tree_items import FileContent, FileWriting, TreeEntry

_SCHEME = "tw://"
_BUFFER_BYTES = 1 << 20


class TensorwireFileSystem(AbstractFileSystem):
    """A running job as files; its owner may write some of them.

    These are the gradients of workers that run no script, checkpoints, the files in `control` and,
    while the job is paused, parameters.

    Paths begin after the address: `params/layer.weight.npy`. Any thread. It connects when it
    is used first, and keeps the connection until `close` or the end of the process; a forked child
    makes one of its own.

    Args:
        address: "host:port" of server 0, for jobs of this host and user; else of its door.
        secret: of readers; see `JobReader`. It is no part of a URL.
        secret_file: a file with it.
        transports: which may be used; None: all.
        timeout_s: for answers, and for a version that is being made.

    Raises:
        ValueError: no address, or a malformed one.
    """

    protocol: ClassVar[str | tuple[str, ...]] = "tw"
    root_marker = ""

    def __init__(
        self,
        address: str = "",
        secret: str | bytes | None = None,
        secret_file: str | None = None,
        transports: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not address:
            raise ValueError(
                'tw:// needs the address of a job: "tw://HOST:PORT/…", or address="HOST:PORT"'
            )
        split_address(address)
        self.address = address
        self._options = {
            "secret": secret,
            "secret_file": secret_file,
            "transports": transports,
            "timeout_s": timeout_s,
        }
        self._opening = threading.Lock()
        self._opened: list[Tree] = []
        _MADE[id(self)] = self  # fsspec compares by what they were made with
        weakref.finalize(self, _close, self._opened)

    @property
    def tree(self) -> Tree:
        """The tree, connected.

        Raises:
            OSError: nobody is there, or the secret is wrong.
        """
        with self._opening:
            if not self._opened:
                with as_os_errors(self.unstrip_protocol("")):
                    reader = JobReader(self.address, **self._options)  # type: ignore[arg-type]
                tree = Tree(reader)
                weakref.finalize(self, tree.close)  # before the Node is closed at exit
                self._opened.append(tree)
            return self._opened[0]

    def close(self) -> None:
        """Ends the connection; the next use makes another one."""
        with self._opening:
            _close(self._opened)

    # ---- paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        path = stringify_path(path)
        if path.startswith(_SCHEME):
            _check_url(path)
            path = path.removeprefix(_SCHEME).partition("/")[2]
        return path.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        path = stringify_path(path)
        if not path.startswith(_SCHEME):
            return {}
        _check_url(path)
        return {"address": path.removeprefix(_SCHEME).partition("/")[0]}

    def unstrip_protocol(self, name: str) -> str:
        """See fsspec: with the address."""
        return f"{_SCHEME}{self.address}/{self._strip_protocol(name)}"

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """See fsspec; the secret is a password."""
        told: dict[str, Any] = super().to_dict(include_password=include_password)
        if not include_password:
            told.pop("secret", None)
        return told

    # ---- what there is

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """See fsspec; a file lists itself."""
        path = self._strip_protocol(path)
        found = self.tree.entry(path)
        entries = self.tree.entries(path) if found.is_folder else [found]
        return [_info(each) if detail else each.path for each in entries]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """See fsspec; with dtype, shape and version of tensors."""
        return _info(self.tree.entry(self._strip_protocol(path)))

    def exists(self, path: str, **_: Any) -> bool:
        """See fsspec; raises the error if the job cannot be asked."""
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def modified(self, path: str) -> datetime.datetime:
        """Returns the time when this process saw the version first."""
        found = self.tree.entry(self._strip_protocol(path))
        return datetime.datetime.fromtimestamp(found.modified, datetime.UTC)

    def created(self, path: str) -> datetime.datetime:
        """Returns the same as `modified`: a version is a new file."""
        return self.modified(path)

    def ukey(self, path: str) -> str:
        """Returns a key of path and version, which is the same as long as the content is."""
        found = self.tree.entry(self._strip_protocol(path))
        version = found.modified if found.version is None else found.version
        return hashlib.sha256(f"{self.address} {found.path} {version}".encode()).hexdigest()

    # ---- contents

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """See fsspec: bytes [start, end) of one version; from the end if they are negative."""
        path = self._strip_protocol(path)
        with self.tree.open(path) as content:
            first, last = _range(content.size_bytes, start, end)
            return content.read_part(first, last)

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """See fsspec: ranges of one file are of one version."""
        if max_gap is not None:
            raise NotImplementedError("tw:// joins no ranges; leave max_gap out")
        firsts = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        lasts = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(paths) == len(firsts) == len(lasts):
            raise ValueError("cat_ranges takes as many starts and ends as paths")
        contents: dict[str, FileContent] = {}
        found: list[Any] = []
        try:
            for path, start, end in zip(paths, firsts, lasts, strict=True):
                try:
                    name = self._strip_protocol(path)
                    if name not in contents:
                        contents[name] = self.tree.open(name)
                    content = contents[name]
                    found.append(content.read(*_range(content.size_bytes, start, end)))
                except OSError as error:
                    if on_error == "raise":
                        raise
                    found.append(error)
        finally:
            for content in contents.values():
                content.close()
        return found

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader | io.BufferedWriter:
        if mode == "wb":
            tree = self.tree
            writing = tree.desk.write(path) if is_checkpoint(path) else tree.open_for_writing(path)
            writing.truncate(0)
            return WritableStream(WritableFile(writing), _BUFFER_BYTES)
        if mode != "rb":
            if is_checkpoint(path):
                text = f"files of a checkpoint are opened by 'rb' or 'wb', and not by {mode!r}"
                raise refuse(errno.EINVAL, path, text)
            raise _read_only(path)
        return BufferedFile(OpenFile(self.tree.open(path)), _BUFFER_BYTES)

    def snapshot(self, store: int = 0, whole: bool = True) -> str:
        """Takes a snapshot and holds it until `release`, `close` or the end; returns its folder.

        Args:
            store: number of the store.
            whole: with the optimizer's state.
        """
        version = self.tree.take(store, whole)
        return f"snapshots/{version}" if store == 0 else f"stores/{store}/snapshots/{version}"

    def release(self, folder: str) -> None:
        """Gives back a snapshot that `snapshot` has taken."""
        parts = self._strip_protocol(folder).split("/")
        try:
            store = int(parts[1]) if parts[0] == "stores" else 0
            version = int(parts[-1])
        except (ValueError, IndexError):
            text = "this is not the folder of a snapshot, which snapshot() returns"
            raise refuse(errno.ENOENT, folder, text) from None
        self.tree.release(version, store)

    # ---- what is refused

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Begins a checkpoint; refused for any other path."""
        self.makedirs(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Begins a checkpoint like `mkdir`; does nothing if another folder exists already."""
        path = self._strip_protocol(path)
        if not is_checkpoint(path):
            if not (exist_ok and self.isdir(path)):
                raise _read_only(path)
        elif not exist_ok and self.exists(path):
            raise refuse(errno.EEXIST, path)
        else:
            self.tree.desk.make_folder(path)

    def mkdirs(self, path: str, exist_ok: bool = False) -> None:
        """Begins a checkpoint like `makedirs`, but keeps its written files, as `put` needs it."""
        name = self._strip_protocol(path)
        if exist_ok and is_checkpoint(name):
            self.tree.desk.make_folder(name, anew=False)
        else:
            self.makedirs(path, exist_ok)

    def rmdir(self, path: str) -> None:
        """Refuses to remove a folder: a checkpoint is removed with its content."""
        raise _read_only(path)

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        if not is_checkpoint(path):
            raise _read_only(path)
        self.tree.desk.remove(path)

    def rm_file(self, path: str) -> None:
        """Removes a checkpoint that is a file, or a file that is being written."""
        self._rm(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Gives back the memory of a checkpoint; a folder of files needs `recursive`."""
        for each in path if isinstance(path, list) else [path]:
            name = self._strip_protocol(each)
            if is_checkpoint(name) and not recursive and self.isdir(name):
                raise refuse(errno.EISDIR, name)
            self._rm(name)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Refuses to copy within the job."""
        raise _read_only(path2)

    def mv(self, path1: str, path2: str, *_: Any, **__: Any) -> None:
        """Renames a file of a checkpoint that is being written; refuses any other path."""
        old, new = self._strip_protocol(path1), self._strip_protocol(path2)
        if not (is_checkpoint(old) and is_checkpoint(new)):
            raise _read_only(old)
        self.tree.desk.rename(old, new)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """See fsspec; refuses files that cannot be written."""
        if mode != "overwrite":
            raise _read_only(path)
        with self._open(self._strip_protocol(path), "wb") as file:
            file.write(value)

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Refuses to touch a file."""
        raise _read_only(path)

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        """Copies a local file into a checkpoint; refuses any other path."""
        if not is_checkpoint(self._strip_protocol(rpath)):
            raise _read_only(rpath)
        super().put_file(lpath, rpath, *args, **options)


class OpenFile(io.RawIOBase):
    """A content as a file of Python. One thread at a time."""

    def __init__(self, content: FileContent) -> None:
        super().__init__()
        self._content, self._at = content, 0
        self.size, self.version = content.size_bytes, content.version

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See io."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"position {base + offset} is before the file's start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """See io."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See io."""
        view = memoryview(buffer).cast("B")
        data = self._content.read(self._at, self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """See io."""
        data = self._content.read(self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        """See io; gives back the memory that is lent for the file."""
        if not self.closed:
            try:
                self._content.close()
            finally:
                super().close()


class WritableFile(io.RawIOBase):
    """A writable file, as a file object of Python. One thread at a time.

    Closing it commits the content, because fsspec has no call for that.
    """

    def __init__(self, writing: FileWriting) -> None:
        super().__init__()
        self._writing, self._at = writing, 0
        self._abandoned = False

    def writable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """See io."""
        return self._at

    def write(self, data: Any) -> int:
        """See io."""
        if self._abandoned:
            return memoryview(data).nbytes
        count = self._writing.write(self._at, data)
        self._at += count
        return count

    def abandon(self) -> None:
        """Abandons the file: later writes and the close have no effect."""
        self._abandoned = True
        self._writing.abandon()

    def close(self) -> None:
        """See io; raises the fault of the contents that were written."""
        if not self.closed:
            super().close()
            if not self._abandoned:
                self._writing.sync()


class WritableStream(io.BufferedWriter):
    """The stream that `open` gives for writing; an exception discards the written bytes."""

    raw: WritableFile

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.closed:
            with contextlib.suppress(OSError):  # the exception tells more
                self.raw.abandon()
        self.close()


class BufferedFile(io.BufferedReader):
    """The stream that `open` gives for reading, with the size that fsspec asks for."""

    raw: OpenFile

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return self.raw.size


def _info(entry: TreeEntry) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": entry.path,
        "size": None if entry.is_folder else entry.size_bytes,
        "type": "directory" if entry.is_folder else "file",
        "mode": 0o40555 if entry.is_folder else 0o100000 | entry.mode,
    }
    if entry.is_folder:
        told["size"] = 0
    else:
        told["mtime"] = entry.modified
    more: Mapping[str, Any] = {"version": entry.version, "dtype": entry.dtype or None}
    told |= {name: value for name, value in more.items() if value is not None}
    if entry.dtype:
        told["shape"] = entry.shape
    return told


def _range(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _check_url(url: str) -> None:
    if "@" in url.removeprefix(_SCHEME).partition("/")[0]:
        raise ValueError(
            "a tw:// URL has no user and no secret, which logs would show: give secret= or "
            "secret_file=, or name a file in TENSORWIRE_READ_SECRET_FILE"
        )


def _read_only(path: str) -> OSError:
    text = "only grads/…, control/…, checkpoints/… and, in a pause, params/… are written, by 'wb'"
    return refuse(errno.EROFS, path, text)


def _close(trees: list[Tree]) -> None:
    while trees:
        trees.pop().close()


_MADE: weakref.WeakValueDictionary[int, TensorwireFileSystem] = weakref.WeakValueDictionary()


def _forked() -> None:
    """Resets file systems in a forked child: the connections are the parent's."""
    for each in list(_MADE.values()):
        each._opening = threading.Lock()
        each._opened.clear()


os.register_at_fork(after_in_child=_forked)
