"""The files in which programs write the gradients of workers that run no script: `grads/…`."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any

from .errors import refuse
from .file_worker import FileWorker
from .job import file_workers_of
from .names import file_name, tensor_name
from .tree_items import FileContent, FileWriting, Folder, Item, Text, TreeEntry

GRADIENTS, COMMIT, VERSION = "grads", "commit", "version"
_NPY = ".npy"
_MOST_COMMIT = 64 << 10
_LOOK_S = 1.0  # a job does not get other workers


class GradientFolders:
    """The workers of a job whose gradients come from files; each is connected when it is used.

    Any thread.

    Args:
        address: of the job.
    """

    def __init__(self, address: str) -> None:
        self._address, self._lock = address, threading.Lock()
        self._workers: dict[int, FileWorker] = {}
        self._ranks: list[int] = []
        self._looked = float("-inf")

    def ranks(self) -> list[int]:
        """Of these workers."""
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                self._ranks = [each.rank for each in file_workers_of(self._address)]
                self._looked = time.monotonic()
            return self._ranks

    def worker(self, rank: int) -> FileWorker:
        """One of them; raises OSError as `FileWorker`."""
        with self._lock:
            if rank not in self._workers:
                self._workers[rank] = FileWorker(self._address, rank)
            return self._workers[rank]

    def close(self) -> None:
        """Ends the connections. Idempotent."""
        with self._lock:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()


class _GradientItem(Item):
    """A tensor's gradient: as long as it was not written it has no bytes."""

    def __init__(self, path: str, worker: FileWorker, name: str) -> None:
        super().__init__(path)
        self._worker, self._memory = worker, worker.memory
        self._index = self._memory.index(name)

    def entry(self) -> TreeEntry:
        file, size = self._memory.files[self._index], self._memory.size(self._index)
        return TreeEntry(
            self.path, False, size, None, file.dtype, file.shape, time.time(), writable=True
        )

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
    """What is written here, with the file's sync, commits the gradients."""

    def __init__(self, path: str, worker: FileWorker) -> None:
        super().__init__(path)
        self._worker = worker

    def entry(self) -> TreeEntry:
        return TreeEntry(self.path, modified=time.time(), writable=True)

    def open(self) -> FileContent:
        return FileContent.of_bytes(b"")

    def open_for_writing(self) -> FileWriting:
        return _CommitWriting(self._worker, self.path)


class _CommitWriting(FileWriting):
    def __init__(self, worker: FileWorker, path: str) -> None:
        self._worker, self._path, self._text = worker, path, bytearray()

    def write(self, offset: int, data: Any) -> int:
        source = bytes(data)
        if offset + len(source) > _MOST_COMMIT:
            raise refuse(errno.EFBIG, self._path, f"it has at most {_MOST_COMMIT} bytes")
        self._text[len(self._text) :] = bytes(max(0, offset - len(self._text)))
        self._text[offset : offset + len(source)] = source
        return len(source)

    def truncate(self, size: int) -> None:
        if size > _MOST_COMMIT:
            raise refuse(errno.EFBIG, self._path, f"it has at most {_MOST_COMMIT} bytes")
        self._text[len(self._text) :] = bytes(max(0, size - len(self._text)))
        del self._text[size:]

    def sync(self) -> None:
        try:
            text = self._text.decode()
        except UnicodeDecodeError:
            raise refuse(errno.EINVAL, self._path, "it is no text in UTF-8") from None
        self._worker.commit_text(text)
        self._text.clear()


def gradients_folder(path: str, folders: GradientFolders) -> Folder:
    """The folder with one of each such worker."""

    def child(at: str, name: str) -> Item:
        ranks = {str(each): each for each in folders.ranks()}
        return _of_worker(at, folders.worker(ranks[name]))

    return Folder(path, lambda: [str(each) for each in folders.ranks()], child)


def _of_worker(path: str, worker: FileWorker) -> Folder:
    def names() -> list[str]:
        return [COMMIT, VERSION, *(f"{file_name(each)}{_NPY}" for each in worker.names)]

    def child(at: str, name: str) -> Item:
        if name == COMMIT:
            return _CommitItem(at, worker)
        if name == VERSION:
            return Text(at, lambda: f"{worker.version}\n")
        stem = name.removesuffix(_NPY)
        tensor = tensor_name(stem)
        if not name.endswith(_NPY) or file_name(tensor) != stem:
            raise LookupError(name)
        return _GradientItem(at, worker, tensor)

    return Folder(path, names, child)
