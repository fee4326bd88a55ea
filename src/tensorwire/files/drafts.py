"""Keeps parameters that were written while the job is paused until they are committed.

They lie in this process, so that nothing of them counts when it ends, and are as large as the model
at most.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

import numpy as np

from .errors import refuse
from .gradient_memory import GradientFile, elements_of, room_of
from .names import file_name
from .owner import JobOwner
from .store import ReadStore, StoredTensor
from .tree_items import FileWriting, resize, write_at


class Drafts:
    """The written parameters of one store in the present pause. Any thread.

    Args:
        store: that it is of.

    Attributes:
        store: as its servers are now.
    """

    def __init__(self, store: ReadStore) -> None:
        self.store, self._lock = store, threading.Lock()
        self._version = self._committed = 0
        self._files: dict[int, bytearray] = {}

    def goes_on_with(self, store: ReadStore) -> bool:
        """Tells whether it is the same store, perhaps with other servers, and adopts it then."""
        if store.layout.spec != self.store.layout.spec:
            return False
        self.store = store
        return True

    def begin(self, path: str) -> int:
        """Returns the version that written values will follow; values of another pause are gone.

        Raises:
            OSError: EROFS if the store does not stand still.
        """
        version = self.store.held_version()
        if version is None:
            raise refuse(
                errno.EROFS,
                path,
                "parameters are written while the job is paused: write 1 into control/pause",
            )
        with self._lock:
            if version != self._version:
                self._version = version
                self._files.clear()
        return version

    @property
    def names(self) -> list[str]:
        """The tensors that are written in this pause, as files."""
        if self.store.held_version() != self._version:
            return []
        with self._lock:
            tensors = self.store.layout.spec.tensors
            return [file_name(tensors[index].name) for index in sorted(self._files)]

    def discard(self) -> None:
        """Discards everything that was written."""
        with self._lock:
            self._files.clear()

    def file(self, tensor: StoredTensor, whole: bytes | None) -> bytearray:
        """Returns the written bytes of a tensor; at first these are `whole`, or empty."""
        with self._lock:
            return self._files.setdefault(tensor.index, bytearray(whole or b""))

    def has(self, tensor: StoredTensor) -> bool:
        """Tells whether a tensor was written in this pause."""
        if self.store.held_version() != self._version:
            return False
        with self._lock:
            return tensor.index in self._files

    def commit(self, owner: JobOwner, version: int, allow_nan: bool, path: str) -> None:
        """Makes the written values the job's parameters when it goes on.

        Raises:
            OSError: ESTALE for another version, ENODATA if nothing is written, or what is wrong
                with a file; as for `JobOwner.write`.
        """
        if (here := self.begin(path)) != version:
            raise refuse(
                errno.ESTALE,
                path,
                f"the job is paused at version {here}: write 'version {here}'",
            )
        with self._lock:
            files = {index: bytes(data) for index, data in self._files.items()}
        if not files and self._committed == version:
            text = "parameters were committed in this pause already: end it, and pause again"
            raise refuse(errno.EBUSY, path, text)
        if not files:
            raise refuse(errno.ENODATA, path, "no parameter was written in this pause")
        values = {}
        for index, data in files.items():
            spec = self.store.layout.spec.tensors[index]
            told = GradientFile(spec.name, spec.dtype, spec.stored_shape, 0, 0, spec.size_bytes)
            at = f"params/{file_name(spec.name)}.npy"
            values[index] = elements_of(np.frombuffer(data, np.uint8), told, at, allow_nan)
        owner.write(self.store, version, values)
        self._committed = version
        self.discard()


def is_written(tensor: StoredTensor) -> bool:
    """Tells whether values that servers get for it while the job is paused reach the workers."""
    return tensor.spec.kind != "constant"


class DraftWriting(FileWriting):
    """The writer of one parameter's file.

    Args:
        drafts: of the store.
        tensor: whose file it is.
        present: the whole file as it is now.
        path: of the file.
    """

    def __init__(self, drafts: Drafts, tensor: StoredTensor, present: Any, path: str) -> None:
        self._drafts, self._tensor, self._present, self._path = drafts, tensor, present, path
        spec = tensor.spec
        if not is_written(tensor):
            text = "it is a frozen parameter, or a buffer that each worker keeps for itself"
            raise refuse(errno.EROFS, path, text)
        self._version = drafts.begin(path)
        self._most = spec.size_bytes + room_of(spec.dtype, spec.stored_shape)

    def write(self, offset: int, data: Any) -> int:
        """Writes bytes; returns how many."""
        source, file = bytes(data), self._file()
        if offset + len(source) > self._most:
            raise self._too_large()
        return write_at(file, offset, source)

    def truncate(self, size: int) -> None:
        """Gives the file this size."""
        if size > self._most:
            raise self._too_large()
        resize(self._file(empty=size == 0), size)

    def read(self, start: int, stop: int) -> bytes | None:
        """Returns the written bytes [start, stop); None if nothing was written."""
        return bytes(self._file()[start:stop]) if self._drafts.has(self._tensor) else None

    def _file(self, empty: bool = False) -> bytearray:
        if self._drafts.begin(self._path) != self._version:
            text = "the job has gone on since this file was opened: open it again"
            raise refuse(errno.ESTALE, self._path, text)
        if self._drafts.has(self._tensor) or empty:
            return self._drafts.file(self._tensor, None)
        return self._drafts.file(self._tensor, self._present())

    def _too_large(self) -> OSError:
        spec = self._tensor.spec
        text = f"{spec.dtype} of shape {spec.stored_shape} has {spec.size_bytes} bytes"
        return refuse(errno.EFBIG, self._path, text)
