"""Lays out the memory in which gradients are written as files and from which they are committed.

A head, a table with the size of each file, a description of the files, and room for each of them.
The size counts the bytes that were written, as everywhere; 0 means no file, `ABSENT` that the
worker has no gradient for that tensor. A writer first checks that the head allows it.
"""

from __future__ import annotations

import ast
import errno
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.parameters import Bytes, Layout

from .errors import refuse
from .npy import npy_header, numpy_dtype

_MAGIC = 0x7477_6772_6164_0001  # changes with the layout
_HEAD_BYTES = 4096
_MAGIC_AT, _STATE, _VERSION, _COUNT, _TOLD_AT, _TOLD_BYTES, _STORE = range(7)
_SAMPLES_AT = 64
_PAGE = 4096
_HEADER_ROOM = 1024  # what others write in front of the elements may be longer than ours
_MOST_HEADER = 65536

_KIND = re.compile(r"[<>=|]?[a-zA-Z?][0-9]{0,4}")
"""The form of a dtype in a header. numpy gets no other text: some end the process."""

OPEN, COMMITTED, OVER = 0, 1, 2
"""The states: files may be written; they were committed, and the next version is awaited; the
optimizer reads them no more.
"""

ABSENT = (1 << 64) - 1
"""The size of the file of a tensor for which the worker has no gradient in this version."""


@dataclass(frozen=True)
class GradientFile:
    """One file.

    Attributes:
        name: of the tensor.
        dtype, shape: of its elements as they lie in the file.
        at: where its room in the memory begins.
        room_bytes: how much it may have.
        size_bytes: of the elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    room_bytes: int
    size_bytes: int


def plan(layout: Layout) -> tuple[list[GradientFile], bytes, int]:
    """Returns the files of a store's gradients, their description, and the memory's size."""
    files: list[GradientFile] = []
    tensors = [layout.spec.tensors[index] for index in layout.trained]
    # The length of the description does not depend on where the files lie.
    entries = [[t.name, t.dtype, list(t.stored_shape), t.size_bytes] for t in tensors]
    told = json.dumps(entries).encode()
    at = _padded(_HEAD_BYTES + 8 * len(tensors) + len(told))
    for tensor in tensors:
        room = tensor.size_bytes + room_of(tensor.dtype, tensor.stored_shape)
        files.append(
            GradientFile(
                tensor.name, tensor.dtype, tensor.stored_shape, at, room, tensor.size_bytes
            )
        )
        at += _padded(room)
    return files, told, at


def _padded(size: int) -> int:
    return size + -size % _PAGE


class GradientMemory:
    """The memory as one process sees it. Any thread; only one at a time writes one file.

    Attributes:
        files: in the order of the store's tensors with gradients.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self._words: NDArray[np.uint64] = memory[:_HEAD_BYTES].view(np.uint64)
        if len(memory) < _HEAD_BYTES or int(self._words[_MAGIC_AT]) != _MAGIC:
            raise ValueError(
                "this is no memory for gradients of this version of tensorwire: use the job's"
            )
        count = int(self._words[_COUNT])
        start, size = int(self._words[_TOLD_AT]), int(self._words[_TOLD_BYTES])
        self.files = _files_of(memory[start : start + size].tobytes(), start + size)
        if len(self.files) != count:
            raise ValueError(f"the memory for gradients names {len(self.files)} files of {count}")
        self.sizes: NDArray[np.uint64] = memory[_HEAD_BYTES : _HEAD_BYTES + 8 * count].view(
            np.uint64
        )
        self._index = {each.name: i for i, each in enumerate(self.files)}

    @staticmethod
    def make(memory: Bytes, told: bytes, count: int, store: int) -> GradientMemory:
        """Makes one of zeroed memory; the memory of a predecessor stays as it is."""
        words = memory[:_HEAD_BYTES].view(np.uint64)
        if int(words[_MAGIC_AT]) != _MAGIC:
            at = _HEAD_BYTES + 8 * count
            memory[at : at + len(told)] = np.frombuffer(told, np.uint8)
            words[_COUNT], words[_TOLD_AT], words[_TOLD_BYTES] = count, at, len(told)
            words[_STORE], words[_STATE] = store, COMMITTED  # until a version is in place
            words[_MAGIC_AT] = _MAGIC
        return GradientMemory(memory)

    @property
    def state(self) -> int:
        """OPEN, COMMITTED or OVER."""
        return int(self._words[_STATE])

    @property
    def store(self) -> int:
        """The number of the store."""
        return int(self._words[_STORE])

    @property
    def version(self) -> int:
        """The version of the parameters that is in place."""
        return int(self._words[_VERSION])

    @property
    def samples(self) -> float | None:
        """The committed number of samples of the gradients; None if the commit gives none."""
        value = float(self._memory[_SAMPLES_AT : _SAMPLES_AT + 8].view(np.float64)[0])
        return value or None

    def index(self, name: str) -> int:
        """Returns the index of a tensor's file; LookupError if it gets no gradients."""
        if name not in self._index:
            raise LookupError(f"no tensor {name!r} gets gradients")
        return self._index[name]

    def room(self, index: int) -> Bytes:
        """Returns the memory of one file."""
        file = self.files[index]
        return self._memory[file.at : file.at + file.room_bytes]

    def size(self, index: int) -> int:
        """Returns the size of a file as far as it was written."""
        size = int(self.sizes[index])
        return 0 if size == ABSENT else min(size, self.files[index].room_bytes)

    # ---- for writers

    def check_open(self, path: str) -> None:
        """Raises EBUSY between a commit and the next version, and ESTALE if no optimizer reads."""
        if self.state == COMMITTED:
            raise refuse(
                errno.EBUSY,
                path,
                f"this worker has committed its gradients; wait for version {self.version + 1}",
            )
        if self.state == OVER:
            raise refuse(errno.ESTALE, path, "the optimizer was closed, or has other parameters")

    def truncate(self, index: int, size: int, path: str) -> None:
        """Gives a file this size; new bytes are 0."""
        self.check_open(path)
        room, before = self.room(index), self.size(index)
        if size > len(room):
            raise _too_large(self.files[index], path)
        room[min(size, before) : max(size, before)] = 0
        self.sizes[index] = size

    def write(self, index: int, offset: int, data: Any, path: str) -> int:
        """Writes bytes into a file; returns how many."""
        self.check_open(path)
        source, room = np.frombuffer(data, np.uint8), self.room(index)
        if offset + len(source) > len(room):
            raise _too_large(self.files[index], path)
        before = self.size(index)
        if len(source):
            room[before:offset] = 0  # nothing, where the file goes on
            room[offset : offset + len(source)] = source
            self.sizes[index] = max(before, offset + len(source))
        return len(source)

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Returns bytes [start, stop) of a file, as far as there are."""
        return self.room(index)[start : min(stop, self.size(index))].tobytes()

    # ---- for the worker

    def commit(self, samples: float | None) -> None:
        """Closes the files for writers until the next version is in place."""
        self._memory[_SAMPLES_AT : _SAMPLES_AT + 8].view(np.float64)[0] = samples or 0.0
        self._words[_STATE] = COMMITTED

    def open(self, version: int) -> None:
        """Opens empty files for the next version, once a version is in place."""
        self.sizes[:] = 0
        self._words[_VERSION] = version
        self._words[_STATE] = OPEN

    def reopen(self) -> None:
        """Opens the files again after a commit that does not count."""
        self._words[_STATE] = OPEN

    def end(self) -> None:
        """Marks the memory as over: its files are not read any more."""
        self._words[_STATE] = OVER

    def elements(self, index: int, path: str, allow_nan: bool = True) -> Bytes | None:
        """Returns the elements of a whole file; None for a tensor without a gradient.

        Raises:
            OSError: ENODATA if it is not whole, EFBIG if it is longer, EINVAL if it is of another
                dtype or shape, EDOM if an element is not finite.
        """
        file = self.files[index]
        if int(self.sizes[index]) == ABSENT:
            return None
        return elements_of(self.room(index)[: self.size(index)], file, path, allow_nan)


def elements_of(written: Bytes, file: GradientFile, path: str, allow_nan: bool) -> Bytes:
    """Returns the elements of a whole .npy file, as far as it was written; raises as `elements`."""
    size = len(written)
    if size == 0:
        raise refuse(errno.ENODATA, path, "it was not written since the last version")
    start = _check_header(written[:_MOST_HEADER].tobytes(), file, path)
    if size < start + file.size_bytes:
        raise refuse(errno.ENODATA, path, f"it has {size} of {start + file.size_bytes} bytes")
    if size > start + file.size_bytes:
        raise refuse(
            errno.EFBIG, path, f"it has {size} bytes, and {start + file.size_bytes} are right"
        )
    data = written[start:]
    if not allow_nan and not _all_finite(data, file.dtype):
        raise refuse(
            errno.EDOM, path, "an element is infinite or no number; 'nan' commits it as it is"
        )
    return data


def room_of(dtype: str, shape: Sequence[int]) -> int:
    """Returns how much a file may have in front of its elements."""
    return max(_HEADER_ROOM, len(npy_header(dtype, shape)) + 256)


def _too_large(file: GradientFile, path: str) -> OSError:
    return refuse(
        errno.EFBIG, path, f"{file.dtype} of shape {file.shape} has {file.size_bytes} bytes"
    )


def _files_of(told: bytes, end: int) -> list[GradientFile]:
    files, at = [], _padded(end)
    for name, dtype, shape, size in json.loads(told):
        room = size + room_of(dtype, shape)
        files.append(GradientFile(name, dtype, tuple(shape), at, room, size))
        at += _padded(room)
    return files


def _check_header(data: bytes, file: GradientFile, path: str) -> int:
    """Returns the offset of the elements; raises if the header does not fit the tensor."""
    if len(data) < 10:
        raise refuse(errno.ENODATA, path, "it ends within the header of its .npy file")
    if data[:6] != b"\x93NUMPY" or data[6] not in (1, 2, 3):
        raise refuse(errno.EINVAL, path, "it is no .npy file; write it with numpy.save")
    wide = 2 if data[6] == 1 else 4
    start = 8 + wide + int.from_bytes(data[8 : 8 + wide], "little")
    if start > len(data):
        code = errno.ENODATA if start <= _HEADER_ROOM else errno.EINVAL
        raise refuse(code, path, "it ends within the header of its .npy file")
    try:
        told = ast.literal_eval(data[8 + wide : start].decode())
        kind, fortran, shape = told["descr"], told["fortran_order"], tuple(told["shape"])
        if not _KIND.fullmatch(kind):
            raise ValueError(kind)
        found = np.dtype(kind)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise refuse(errno.EINVAL, path, "its .npy header cannot be read") from None
    wanted = numpy_dtype(file.dtype).newbyteorder("<")
    if (
        found != wanted
        or shape != file.shape
        or (fortran and len(shape) > 1 and math.prod(shape) > max(shape))
    ):
        order = ", in Fortran's order" if fortran else ""
        raise refuse(
            errno.EINVAL,
            path,
            f"it has {found.str} of shape {shape}{order}, and {wanted.str} of shape {file.shape} "
            "in C order is wanted",
        )
    return start


def _all_finite(data: Bytes, dtype: str) -> bool:
    if dtype == "bfloat16":  # numpy has none: an exponent of ones is infinite or no number
        words = np.frombuffer(data.data, "<u2")
        return not bool(((words & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(data.data, numpy_dtype(dtype))).all())
