"""Defines the items of a tree of files: entries, contents, files, folders (see `tree.py`)."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import as_os_errors, refuse

READABLE, WRITABLE, PRIVATE = 0o444, 0o644, 0o600
"""The modes of files: readable by all, writable by this user too, or for this user alone."""


@dataclass(frozen=True)
class TreeEntry:
    """A file or folder.

    Attributes:
        path: from the root, without a slash in front; "" is the root.
        is_folder: it has no content of its own.
        size_bytes: of a file as it is now.
        version: of what is in it, for parameters and models; None: it has none.
        dtype: of a tensor, as torch calls it; "" for other files.
        shape: of a tensor.
        modified: when this version was seen first, in seconds since 1970.
        mode: who may read and write a file, as of a file system.
    """

    path: str
    is_folder: bool = False
    size_bytes: int = 0
    version: int | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    modified: float = 0.0
    mode: int = READABLE

    @property
    def writable(self) -> bool:
        """True if it may be written."""
        return bool(self.mode & 0o200)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


class FileContent:
    """The content of an open file. One thread at a time.

    Attributes:
        size_bytes: of it.
        version: of it; None: it has none.
        buffers: called while it is open, all of it as memory, one piece after the other; or None.
        whole: reads all of it, where the first read does that and keeps it; else None.
        backing: called while it is open, a file of this host with just this content, for reading;
            or None.
    """

    def __init__(
        self,
        size_bytes: int,
        read: Callable[[int, int], bytes],
        version: int | None = None,
        close: Callable[[], object] = lambda: None,
        path: str = "",
        read_part: Callable[[int, int], bytes] | None = None,
        buffers: Callable[[], list[bytes | memoryview] | None] = lambda: None,
        whole: Callable[[], bytes | memoryview] | None = None,
        backing: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.buffers, self.whole, self.backing = buffers, whole, backing
        self.size_bytes, self.version = size_bytes, version
        self._read, self._close, self._path = read, close, path
        self._read_part = read_part or read

    @staticmethod
    def of_bytes(data: bytes, version: int | None = None) -> FileContent:
        """Returns the content of bytes that are here."""
        return FileContent(
            len(data), lambda start, stop: data[start:stop], version, buffers=lambda: [data]
        )

    def __enter__(self) -> FileContent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Returns bytes [start, stop), as far as there are; raises ESTALE and others."""
        stop = self.size_bytes if stop is None else min(stop, self.size_bytes)
        with as_os_errors(self._path):
            return self._read(start, stop) if start < stop else b""

    def read_part(self, start: int, stop: int) -> bytes:
        """Reads bytes [start, stop) and moves no more than these, for a file read only once."""
        with as_os_errors(self._path):
            return self._read_part(start, stop) if start < stop else b""

    def close(self) -> None:
        """Gives its memory back; idempotent."""
        self._close()


class Changes:
    """The times at which texts were first seen. Any thread."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, float]] = {}

    def when(self, path: str, content: object) -> float:
        """Returns the time when the content at a path became this one, in seconds since 1970."""
        before = self._seen.get(path)
        if before is None or before[0] != content:
            before = self._seen[path] = content, time.time()
        return before[1]


class FileWriting:
    """A file that is written to. One thread at a time; the methods raise OSErrors of the path."""

    def write(self, offset: int, data: Any) -> int:
        """Writes bytes; returns how many."""
        raise NotImplementedError

    def truncate(self, size: int) -> None:
        """Gives the file this size."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> bytes | None:
        """Returns the written bytes [start, stop); None: a reader's content counts."""
        return None

    def sync(self) -> None:
        """Waits until everything written so far has had its effect."""

    def abandon(self) -> None:
        """Discards the file: its writer failed, so a part of it must have no effect."""


def write_at(file: bytearray, offset: int, data: bytes) -> int:
    """Writes bytes into a file that is in memory; a gap before them is filled with zeros."""
    resize(file, max(len(file), offset))
    file[offset : offset + len(data)] = data
    return len(data)


def resize(file: bytearray, size: int) -> None:
    """Gives a file that is in memory this size; new bytes are 0."""
    file.extend(bytes(max(0, size - len(file))))
    del file[size:]


class Item:
    """An entry of the tree: a file or folder at a path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def entry(self) -> TreeEntry:
        """Returns the entry that listings show."""
        raise NotImplementedError

    def open(self) -> FileContent:
        """Returns a file's content."""
        raise NotImplementedError

    def open_for_writing(self) -> FileWriting:
        """Returns its writer; raises EROFS if nothing can write it."""
        raise refuse(errno.EROFS, self.path)


class Folder(Item):
    """A folder: names, and the items that they stand for."""

    def __init__(
        self,
        path: str,
        names: Callable[[], Sequence[str]],
        child: Callable[[str, str], Item],
    ) -> None:
        super().__init__(path)
        self.names, self._child = names, child

    def entry(self) -> TreeEntry:
        """Returns the entry that listings show."""
        return TreeEntry(self.path, is_folder=True)

    def child(self, name: str) -> Item:
        """Returns the item of a name in this folder, or raises LookupError."""
        return self._child(f"{self.path}/{name}" if self.path else name, name)


class Text(Item):
    """A short file of status/ or control/, read as a whole."""

    def __init__(self, path: str, changes: Changes, text: Callable[[], str]) -> None:
        super().__init__(path)
        self._changes, self._text = changes, text

    def entry(self) -> TreeEntry:
        """Returns the entry that listings show."""
        data = self._text().encode()
        modified = self._changes.when(self.path, data)
        return TreeEntry(self.path, size_bytes=len(data), modified=modified)

    def open(self) -> FileContent:
        """Returns a file's content."""
        return FileContent.of_bytes(self._text().encode())


_MOST_COMMAND = 4096


class _CommandWriting(FileWriting):
    """The writer of a command file: each write is a command, done when the write returns."""

    def __init__(self, path: str, do: Callable[[str], object]) -> None:
        self._path, self._do = path, do

    def write(self, offset: int, data: Any) -> int:
        source = bytes(data)
        if offset:
            raise refuse(errno.EINVAL, self._path, "a command is written at once, from the start")
        if len(source) > _MOST_COMMAND:
            raise refuse(errno.EFBIG, self._path, f"it has at most {_MOST_COMMAND} bytes")
        try:
            text = source.decode()
        except UnicodeDecodeError:
            raise refuse(errno.EINVAL, self._path, "it is no text in UTF-8") from None
        with as_os_errors(self._path):
            self._do(text)
        return len(source)

    def truncate(self, size: int) -> None:
        if size:
            raise refuse(errno.EINVAL, self._path, "a command is written at once, from the start")


class CommandItem(Text):
    """A short text, a write of which is a command."""

    def __init__(
        self, path: str, changes: Changes, text: Callable[[], str], do: Callable[[str], object]
    ) -> None:
        super().__init__(path, changes, text)
        self._do = do

    def entry(self) -> TreeEntry:
        """Returns the entry that listings show."""
        return replace(super().entry(), mode=WRITABLE)

    def open_for_writing(self) -> FileWriting:
        """Returns the writer that takes commands."""
        return _CommandWriting(self.path, self._do)


def fixed(path: str, children: dict[str, Callable[[str], Item]]) -> Folder:
    """Returns a folder with these files and folders."""
    return Folder(path, lambda: sorted(children), lambda at, name: children[name](at))
