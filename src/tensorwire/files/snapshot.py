"""Reader side: a snapshot, one version of a store in memory that its servers lend."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from tensorwire.errors import ClosedError
from tensorwire.memory import RemoteRegion, memory_file
from tensorwire.parameters import Bytes
from tensorwire.parameters.model_file import FileRange, ModelFile, held_bytes, model_file
from tensorwire.parameters.reading import Ask, Copied, parts_of
from tensorwire.parameters.snapshot import Parts, state

from .store import ReadStore, StoredTensor

_WAIT_S = 60.0


class _Part(NamedTuple):
    """The part of a snapshot that one server has."""

    model: RemoteRegion
    held: list[FileRange]
    state: RemoteRegion | None
    parts: Parts | None


class ReaderSnapshot:
    """One version of a store, whatever the job does meanwhile. One thread at a time.

    Args:
        store: that it is of.
        ask: by which it was asked for.
        copies: what the servers have answered, in their order.
        release: called once, when it is closed.

    Attributes:
        version: of the values.
        whole: it has the optimizer's state, too.
        size_bytes: of the model file.
    """

    def __init__(
        self,
        store: ReadStore,
        ask: Ask,
        copies: Sequence[Copied],
        release: Callable[[Ask], object],
    ) -> None:
        self.version, self.whole = ask.version, ask.whole
        self._store, self._ask, self._copies, self._release = store, ask, copies, release
        self._file: ModelFile = model_file(store.layout, store.number, ask.version)
        self.size_bytes = self._file.size_bytes
        self._closed = False
        self._parts = [self._find(server, copy) for server, copy in enumerate(copies)]

    def _find(self, server: int, copy: Copied) -> _Part:
        door, share = self._store.doors[server], self._store.shares[server]
        model = door.region(copy.model)
        found, parts = None, None
        if copy.state:
            found = door.region(copy.state)
            head = np.empty(Parts.head_bytes(), np.uint8)
            found[: len(head)].read(head).wait(_WAIT_S)
            parts = Parts.read(head)
        return _Part(model, self._file.held(share, server == 0), found, parts)

    def __enter__(self) -> ReaderSnapshot:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back to the servers. Idempotent."""
        if not self._closed:
            self._closed = True
            self._parts.clear()
            self._release(self._ask)

    def tensor_bytes(self, tensor: StoredTensor, header: bytes = b"") -> bytes:
        """Returns the header and a tensor's bytes; of a state only if the snapshot is whole."""
        self._check()
        if tensor.state is None:
            place = self._file.places[tensor.index]
            return self.read(place.start, place.stop, header)
        first = self._store.layout.places[tensor.index].start
        pieces: list[bytes | memoryview] = [header]
        for server, start, stop in parts_of(self._store.shares, first, first + tensor.size_bytes):
            part, share = self._parts[server], self._store.shares[server]
            assert part.state is not None
            assert part.parts is not None
            at = part.parts.place(state(tensor.state)).start - share.start
            pieces.append(_bytes_of(part.state[at + start : at + stop]))
        return b"".join(pieces)

    def read(self, start: int, stop: int, header: bytes = b"") -> bytes:
        """Returns the header and bytes [start, stop) of the model file."""
        self._check()
        pieces: list[tuple[int, bytes | memoryview]] = [(-1, header)]
        for part in self._parts:
            for held in part.held:
                first, last = max(start, held.start), min(stop, held.stop)
                if first < last:
                    at = held.at + first - held.start
                    pieces.append((first, _bytes_of(part.model[at : at + last - first])))
        return b"".join(piece for _, piece in sorted(pieces, key=lambda each: each[0]))

    def mapped_pieces(self) -> list[bytes | memoryview] | None:
        """Returns the model file as memory of servers that is mapped here; None if it is not."""
        self._check()
        if not all(part.model.mapped for part in self._parts):
            return None
        found = [
            (held.start, _bytes_of(part.model[held.at : held.at + held.stop - held.start]))
            for part in self._parts
            for held in part.held
            if held.stop > held.start
        ]
        return [piece for _, piece in sorted(found, key=lambda each: each[0])]

    def read_into(self, target: Bytes) -> None:
        """Reads all bytes of the model file into memory of `size_bytes`."""
        self._check()
        for part in self._parts:
            transfers = [
                part.model[held.at : held.at + held.stop - held.start].read(
                    target[held.start : held.stop]
                )
                for held in part.held
                if held.stop > held.start
            ]
            for transfer in transfers:
                transfer.wait(_WAIT_S)

    def sealed(self) -> SealedModel:
        """Returns the model file as a file of this host that can be mapped; see `SealedModel`."""
        if (path := self.server_path) is not None:
            return SealedModel(path, self, -1)
        descriptor = self.sealed_copy()
        return SealedModel(f"/proc/{os.getpid()}/fd/{descriptor}", self, descriptor)

    @property
    def server_path(self) -> str | None:
        """The server's own memory as a file of this host that holds the model file, if it does."""
        self._check()
        copy, part = self._copies[0], self._parts[0]
        if len(self._copies) > 1 or not part.model.mapped or not self._file.fills_pages:
            return None
        if held_bytes(part.held) != self.size_bytes:
            return None
        path = f"/proc/{copy.pid}/fd/{copy.descriptor}"
        return path if _is_mapped(path, part.model.memoryview()) else None

    def sealed_copy(self) -> int:
        """Returns a sealed memfd with the model file, which cannot change; the caller closes it."""
        descriptor = memory_file("model.safetensors", self.size_bytes)
        try:
            with mmap.mmap(descriptor, self.size_bytes) as memory:
                target = np.frombuffer(memory, np.uint8)
                self.read_into(target)
                del target
            _seal(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"the snapshot of version {self.version} was closed")


class SealedModel:
    """One version as a model.safetensors that `safetensors.safe_open(path)` maps; use `with`.

    It is memory, and nothing is on a disk. It lies at the server where that is of this host and has
    all of it, so that nobody copies; else in this process. Either way nobody can map it for
    writing, and what was mapped stays when it is closed. The path is good for all processes of this
    user.

    Args:
        path: of the file.
        snapshot: that it shows, owned from now on.
        descriptor: of this process's memory, owned; -1: the server has it.

    Attributes:
        path: "/proc/PID/fd/N", until `close`.
        version: of the values.
        size_bytes: of the file.
        is_copy: it is a copy of this process.
    """

    def __init__(self, path: str, snapshot: ReaderSnapshot, descriptor: int) -> None:
        self.path, self.version, self.size_bytes = path, snapshot.version, snapshot.size_bytes
        self.is_copy = descriptor >= 0
        self._snapshot, self._descriptor = snapshot, descriptor
        if self.is_copy:
            snapshot.close()  # the servers need not hold it

    def __enter__(self) -> SealedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back, as soon as no process has it mapped. Idempotent."""
        self._snapshot.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _is_mapped(path: str, memory: memoryview) -> bool:
    """Tells whether a file is the one that is mapped here as some memory, and can be read.

    In another PID namespace than the server's its number is of another process, or of none.
    """
    address = np.frombuffer(memory, np.uint8).ctypes.data
    try:
        with open(path, "rb") as file, open("/proc/self/maps") as maps:
            about = os.fstat(file.fileno())
            device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
            for line in maps:
                where, _, _, mapped_device, inode, *_ = line.split()
                start, _, stop = where.partition("-")
                if int(start, 16) <= address < int(stop, 16):
                    return (mapped_device, int(inode)) == (device, about.st_ino)
    except OSError:
        pass
    return False


def _bytes_of(region: RemoteRegion) -> bytes | memoryview:
    if not region.size_bytes:
        return b""
    if region.mapped:
        return region.memoryview()
    data = np.empty(region.size_bytes, np.uint8)
    region.read(data).wait(_WAIT_S)
    return data.data


def _seal(descriptor: int) -> None:
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
