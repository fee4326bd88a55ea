"""Serves the files `grads/…`, in which programs write gradients of workers without a script."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

from .errors import refuse
from .file_worker import FileWorker
from .job import file_workers_of
from .names import NPY, file_name, tensor_of
from .tree_items import (
    PRIVATE,
    Changes,
    FileContent,
    FileWriting,
    Folder,
    Item,
    Text,
    TreeEntry,
    resize,
    write_at,
)

GRADIENTS, COMMIT, VERSION = "grads", "commit", "version"
_MOST_COMMIT = 64 << 10
_LOOK_S = 1.0  # a job does not get other workers


class GradientFolders:
    """The workers of a job whose gradients come from files; each is connected when it is used.

    Any thread.

    Args:
        address: of the job.

    Attributes:
        changes: of the files.
    """

    def __init__(self, address: str) -> None:
        self._address, self._lock = address, threading.Lock()
        self._workers: dict[int, FileWorker] = {}
        self._commits: dict[int, _CommitWriting] = {}
        self.changes = Changes()
        self._ranks: list[int] = []
        self._looked = float("-inf")

    def ranks(self) -> list[int]:
        """Returns the ranks of the workers that take files."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                found = [each.rank for each in file_workers_of(self._address)]
                self._ranks = found or self._ranks  # the files of a job that is over say so
                self._looked = time.monotonic()
            return self._ranks

    def worker(self, rank: int) -> FileWorker:
        """Returns a worker that takes files; raises OSError like `FileWorker`."""
        with self._lock:
            if rank not in self._workers:
                self._workers[rank] = FileWorker(self._address, rank)
            return self._workers[rank]

    def commit(self, worker: FileWorker) -> _CommitWriting:
        """Returns the writer of a worker's `commit`, shared because one may write, another sync."""
        with self._lock:
            path = f"{worker.path()}/{COMMIT}"
            return self._commits.setdefault(worker.rank, _CommitWriting(worker, path))

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        with self._lock:
            self._commits.clear()
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()


class _GradientItem(Item):
    """A tensor's gradient: as long as it was not written it has no bytes."""

    def __init__(self, path: str, changes: Changes, worker: FileWorker, name: str) -> None:
        super().__init__(path)
        self._changes = changes
        self._worker, self._memory = worker, worker.memory
        self._index = self._memory.index(name)

    def entry(self) -> TreeEntry:
        file, size = self._memory.files[self._index], self._memory.size(self._index)
        modified = self._changes.when(self.path, (size, self._memory.version))
        return TreeEntry(self.path, False, size, None, file.dtype, file.shape, modified, PRIVATE)

    def open(self) -> FileContent:
        memory, index = self._memory, self._index
        size = memory.size(index)
        return FileContent(size, lambda start, stop: memory.read(index, start, stop))

    def open_for_writing(self) -> FileWriting:
        return _GradientWriting(self._worker, self._memory.files[self._index].name, self.path)


class _GradientWriting(FileWriting):
    def __init__(self, worker: FileWorker, name: str, path: str) -> None:
        self._worker, self._name, self._path = worker, name, path

    def write(self, offset: int, data: Any) -> int:
        memory = self._worker.memory
        return memory.write(memory.index(self._name), offset, data, self._path)

    def truncate(self, size: int) -> None:
        memory = self._worker.memory
        memory.truncate(memory.index(self._name), size, self._path)


class _CommitItem(Item):
    """The file `commit`: a written text commits the gradients with the file's sync."""

    def __init__(self, path: str, changes: Changes, writing: _CommitWriting) -> None:
        super().__init__(path)
        self._changes, self._writing = changes, writing

    def entry(self) -> TreeEntry:
        text = self._writing.text
        modified = self._changes.when(self.path, text)
        return TreeEntry(self.path, size_bytes=len(text), modified=modified, mode=PRIVATE)

    def open(self) -> FileContent:
        return FileContent.of_bytes(self._writing.text)

    def open_for_writing(self) -> FileWriting:
        return self._writing


class _CommitWriting(FileWriting):
    def __init__(self, worker: FileWorker, path: str) -> None:
        self._worker, self._path, self._text = worker, path, bytearray()

    @property
    def text(self) -> bytes:
        """The text written since the last commit."""
        return bytes(self._text)

    def write(self, offset: int, data: Any) -> int:
        source = bytes(data)
        if offset + len(source) > _MOST_COMMIT:
            raise refuse(errno.EFBIG, self._path, f"it has at most {_MOST_COMMIT} bytes")
        return write_at(self._text, offset, source)

    def truncate(self, size: int) -> None:
        if size > _MOST_COMMIT:
            raise refuse(errno.EFBIG, self._path, f"it has at most {_MOST_COMMIT} bytes")
        resize(self._text, size)

    def sync(self) -> None:
        written = self.text
        try:
            text = written.decode()
        except UnicodeDecodeError:
            raise refuse(errno.EINVAL, self._path, "it is no text in UTF-8") from None
        self._worker.commit_text(text)
        if self.text == written:  # what was written meanwhile is for the next commit
            self._text.clear()


def gradients_folder(path: str, folders: GradientFolders) -> Folder:
    """Returns the folder with a folder for each worker that takes files."""

    def child(at: str, name: str) -> Item:
        ranks = {str(each): each for each in folders.ranks()}
        return _of_worker(at, folders, folders.worker(ranks[name]))

    return Folder(path, lambda: [str(each) for each in folders.ranks()], child)


def _of_worker(path: str, folders: GradientFolders, worker: FileWorker) -> Folder:
    def names() -> list[str]:
        return [COMMIT, VERSION, *(f"{file_name(each)}{NPY}" for each in worker.names)]

    def child(at: str, name: str) -> Item:
        if name == COMMIT:
            return _CommitItem(at, folders.changes, folders.commit(worker))
        if name == VERSION:
            return Text(at, folders.changes, lambda: f"{worker.version}\n")
        return _GradientItem(at, folders.changes, worker, tensor_of(name))

    return Folder(path, names, child)
