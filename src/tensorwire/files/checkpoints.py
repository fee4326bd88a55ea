"""Writes and reads checkpoints in memory that a job lends: the files `checkpoints/…`.

A file lies in parts at server 0: a writer asks for a part, and then writes it one-sidedly. A reader
finds the parts in an index. A checkpoint is seen when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tensorwire.errors import TensorwireError, TimeoutError, UnavailableError
from tensorwire.memory import Peer, RemoteMailbox, RemoteRegion
from tensorwire.parameters.checkpoint_files import (
    ANSWERS,
    ASKS,
    BELL,
    LEASE_BYTES,
    METADATA,
    PART_BYTES,
    CheckpointFile,
    lease_name,
    message,
    part_name,
    told_in,
)

from .errors import as_os_errors, refuse
from .owner import JobOwner
from .reader import JobReader
from .tree_items import FileContent, FileWriting, Folder, Item, TreeEntry

CHECKPOINTS = "checkpoints"
_ANSWER_S = 30.0
_WRITE_S = 60.0
_AGAIN_S = 0.1


def is_checkpoint(path: str) -> bool:
    """Tells whether a path names a checkpoint, or something in one."""
    return path.startswith(f"{CHECKPOINTS}/")


class CheckpointDesk:
    """A client that asks a job for memory for checkpoints. Any thread.

    The methods raise OSError, with the errno that docs/files.md tells.

    Args:
        owner: of the job.
    """

    def __init__(self, owner: JobOwner) -> None:
        self._owner, self._lock = owner, threading.Lock()
        self._peer: Peer | None = None
        self._lease: RemoteRegion | None = None
        self._number = self._answered = 0
        self._open: dict[str, CheckpointWriting] = {}
        # By what lease each checkpoint of several files was begun: the server forgets them with it.
        self._begun: dict[str, RemoteRegion] = {}
        self._late: dict[str, Any] = {}  # a request whose answer came too late, or not yet
        self._unwanted: list[int] = []  # files that the server has still to be told to give up
        self._settling, self._settling_lock = False, threading.Lock()

    def make_folder(self, path: str, anew: bool = True) -> None:
        """Begins a checkpoint that this process will write, beside others.

        Args:
            path: of the checkpoint.
            anew: what this process has written of it before does not count.
        """
        if anew:
            self._begun.pop(path, None)
        self.ask(path, of=path, do="folder", path=_inner(path))

    def write(self, path: str) -> CheckpointWriting:
        """Returns the writer of a file, which goes from its beginning to its end."""
        of = path.rpartition("/")[0]
        told = self.ask(path, of=of if is_checkpoint(of) else None, do="make", path=_inner(path))
        made = self._open[path] = CheckpointWriting(self, path, int(told["number"]))
        return made

    def complete(self, path: str) -> None:
        """Completes a checkpoint; this process and others have written all its files."""
        self.ask(path, of=path, do="complete", path=_inner(path))
        self._begun.pop(path, None)

    def rename(self, path: str, to: str) -> None:
        """Renames a file within a checkpoint that is being written."""
        self.ask(path, do="rename", path=_inner(path), to=_inner(to))
        self._finish_folder(to)

    def remove(self, path: str) -> None:
        """Gives back the memory of a complete checkpoint, or of a file that is written."""
        self._begun.pop(path, None)
        self.ask(path, do="remove", path=_inner(path))
        if (writing := self._open.pop(path, None)) is not None:
            writing.discard()

    def finish(self, path: str, number: int) -> None:
        """Finishes a file, which is whole."""
        self.ask(path, do="finish", number=number)
        self.finished(path)
        self._finish_folder(path)

    def _finish_folder(self, path: str) -> None:
        """Ends the writing of a checkpoint with its file `.metadata`."""
        of, _, name = path.rpartition("/")
        if name == METADATA:
            self._begun.pop(of, None)

    def finished(self, path: str) -> None:
        """Forgets the writer of a file that is not written any more."""
        self._open.pop(path, None)

    def give_up(self, path: str, number: int) -> None:
        """Gives up a file: its checkpoint is never complete, and the memory goes back."""
        self.finished(path)
        self.ask(path, do="give up", number=number)

    def region(self, name: str) -> RemoteRegion:
        """Returns the memory that server 0 has given under this name."""
        assert self._peer is not None
        return self._peer.region(name)

    def ask(self, path: str, /, of: str | None = None, **told: Any) -> dict[str, Any]:
        """Asks server 0 for something concerning a path; returns its answer.

        Args:
            path: for errors.
            of: the checkpoint of several files that is begun or continued by it.
            told: the request.
        """
        try:
            data = message(told)
        except ValueError:
            raise refuse(errno.ENAMETOOLONG, path) from None
        with self._lock, as_os_errors(path):
            lease = self._leased()
            assert self._peer is not None
            if of is not None and self._begun.setdefault(of, lease) is not lease:
                del self._begun[of]
                raise refuse(
                    errno.ESTALE,
                    path,
                    "a connection to the servers was lost, and what this process has written of "
                    f"{_inner(of)} is gone; begin anew",
                )
            self._settle(lease)
            try:
                answer = self._exchange(lease, data)
            except TimeoutError:
                self._late = told
                self._settle_later()
                raise
        if code := answer["errno"]:
            raise refuse(code, path, answer.get("text", ""))
        return answer

    def _exchange(self, lease: RemoteRegion, data: bytes) -> dict[str, Any]:
        assert self._peer is not None
        self._number += 1
        RemoteMailbox(lease[ASKS]).send(np.frombuffer(data, np.uint8), self._number).wait(_WRITE_S)
        self._peer.region(BELL).word(0).fetch_add(1, _WRITE_S)
        return self._answer(lease[ANSWERS])

    def unwanted(self, number: int) -> None:
        """Gives up a file later, as soon as server 0, which has not answered, goes on."""
        self._unwanted.append(number)
        self._settle_later()

    def _settle(self, lease: RemoteRegion) -> None:
        """Takes late answers of server 0, and frees the memory of requests that timed out."""
        if self._answered < self._number:
            answer = self._answer(lease[ANSWERS])
            if self._late.get("do") == "make" and not answer["errno"]:
                self._unwanted.append(int(answer["number"]))
            self._late = {}
        while self._unwanted:
            told = {"do": "give up", "number": self._unwanted[-1]}
            self._exchange(lease, message(told))  # it may have gone meanwhile
            self._unwanted.pop()

    def _settle_later(self) -> None:
        """Starts a thread that settles late answers even if no other request comes."""
        with self._settling_lock:
            if self._settling:
                return
            self._settling = True
            threading.Thread(
                target=self._settle_when_it_goes_on, name="tensorwire-checkpoints", daemon=True
            ).start()

    def _settle_when_it_goes_on(self) -> None:
        while True:
            time.sleep(_AGAIN_S)  # others want to be answered, too
            with self._lock:
                try:
                    if self._lease is not None:
                        self._settle(self._lease)
                except TimeoutError:
                    continue
                except (TensorwireError, OSError):
                    self._unwanted.clear()  # the connection is lost, and with it all of that
            with self._settling_lock:
                if not self._unwanted:
                    self._settling = False
                    return

    def _answer(self, answers: RemoteRegion) -> dict[str, Any]:
        deadline, pause, count = time.monotonic() + _ANSWER_S, 1e-4, np.zeros(1, np.uint64)
        while True:
            answers[:8].read(count).wait(_WRITE_S)
            if int(count[0]) >= self._number:
                data = np.empty(answers.size_bytes - 64, np.uint8)
                answers[64:].read(data).wait(_WRITE_S)
                self._answered = self._number
                return told_in(data.tobytes())
            if time.monotonic() > deadline:
                raise TimeoutError("server 0 does not answer: it is stopped")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def _leased(self) -> RemoteRegion:
        peer, name = self._owner.first()
        if peer is not self._peer or self._lease is None:
            self._peer, self._lease, self._number, self._answered = peer, None, 0, 0
            self._late.clear()
            self._unwanted.clear()
            try:
                peer.region(BELL)
            except LookupError:
                raise UnavailableError(
                    "this job takes no checkpoints; its server 0 has said why when it started"
                ) from None
            self._lease = peer.allocate(LEASE_BYTES, lease_name(name))
        return self._lease


class CheckpointWriting(FileWriting):
    """The writer of one file of a checkpoint, from first byte to last. One thread at a time.

    Args:
        desk: where memory is got.
        path: of the file.
        number: of the file.
    """

    def __init__(self, desk: CheckpointDesk, path: str, number: int) -> None:
        self._desk, self._path, self._number = desk, path, number
        self._part = np.empty(0, np.uint8)
        self._used = self._size = 0
        self._over = False
        self._failure: OSError | None = None

    def write(self, offset: int, data: Any) -> int:
        """Appends bytes to those already written; returns how many."""
        self._check()
        if self._over:
            raise refuse(errno.EPERM, self._path, "it was closed before, and is whole")
        if offset != self._size:
            with self._or_never():  # what is closed now would lack something
                raise refuse(errno.ESPIPE, self._path, "a checkpoint is written from start to end")
        source = np.frombuffer(data, np.uint8)
        if not len(self._part) and len(source):
            self._part = np.empty(PART_BYTES, np.uint8)
        at = 0
        while at < len(source):
            count = min(len(source) - at, PART_BYTES - self._used)
            self._part[self._used : self._used + count] = source[at : at + count]
            self._used, at = self._used + count, at + count
            if self._used == PART_BYTES:
                self._send()
        self._size += len(source)
        return len(source)

    @property
    def size_bytes(self) -> int:
        """The number of bytes that were written."""
        return self._size

    @property
    def failed(self) -> bool:
        """True if some bytes could not be written; its checkpoint is then never complete."""
        return self._failure is not None

    def truncate(self, size: int) -> None:
        """Refuses any size but the present one: a checkpoint is written from start to end."""
        self._check()
        if size != self._size:
            with self._or_never():
                raise refuse(errno.EINVAL, self._path, "a checkpoint is written from start to end")

    def sync(self) -> None:
        """Finishes the file, which is whole."""
        self._check()
        if self._over:
            return
        self._over = True
        self._send()
        self._part = np.empty(0, np.uint8)
        with self._or_never():
            self._desk.finish(self._path, self._number)

    def discard(self) -> None:
        """Drops the unsent bytes of a file that was removed while it was written."""
        self._over, self._part = True, np.empty(0, np.uint8)

    def abandon(self) -> None:
        """Gives the file up before it is whole, and its checkpoint with it."""
        if not self._over and self._failure is None:
            self.discard()
            self._desk.give_up(self._path, self._number)

    def _send(self) -> None:
        if not self._used:
            return
        with self._or_never(), as_os_errors(self._path):
            told = self._desk.ask(self._path, do="part", number=self._number, size=self._used)
            region = self._desk.region(told["region"])
            region.write(self._part[: self._used]).wait(_WRITE_S)
        self._used = 0

    def _check(self) -> None:
        """Raises an earlier error: some bytes were taken, and others were not."""
        if (failure := self._failure) is not None:
            raise refuse(
                failure.errno or errno.EIO,
                self._path,
                "it could not be written, and what was written of its checkpoint is gone; begin "
                f"anew ({failure.strerror})",
            )

    @contextlib.contextmanager
    def _or_never(self) -> Iterator[None]:
        """Makes an error of the block final, so that no later byte follows a gap."""
        try:
            yield
        except OSError as error:
            self._failure, self._part = error, np.empty(0, np.uint8)
            if error.errno == errno.ETIMEDOUT:
                self._desk.unwanted(self._number)
            elif error.errno != errno.ENOTCONN:
                with contextlib.suppress(OSError):
                    self._desk.give_up(self._path, self._number)
            raise


class _FileItem(Item):
    """A file of a complete checkpoint."""

    def __init__(self, reader: JobReader, path: str, file: CheckpointFile) -> None:
        super().__init__(path)
        self._reader, self._file = reader, file

    def entry(self) -> TreeEntry:
        file = self._file
        return TreeEntry(self.path, False, file.size_bytes, file.number, modified=file.modified)

    def open(self) -> FileContent:
        file = self._file
        names = [part_name(file.number, index) for index in range(len(file.parts))]
        with as_os_errors(self.path):
            regions = self._reader.regions(names)

        def read(start: int, stop: int) -> bytes:
            pieces, at = [], 0
            for region, size in zip(regions, file.parts, strict=True):
                first, last = max(start - at, 0), min(stop - at, size)
                if first < last:
                    pieces.append(_bytes_of(region[first:last]))
                at += size
            return b"".join(pieces)

        def buffers() -> list[bytes | memoryview] | None:
            mapped = all(region.mapped for region in regions)
            return [region.memoryview() for region in regions] if mapped else None

        return FileContent(
            file.size_bytes, read, file.number, regions.clear, self.path, buffers=buffers
        )


def checkpoints_folder(reader: JobReader, path: str) -> Folder:
    """Returns the folder of the complete checkpoints."""

    def names() -> list[str]:
        return sorted({each.partition("/")[0] for each in reader.checkpoints()})

    def child(at: str, name: str) -> Item:
        index = reader.checkpoints()
        if name in index:
            return _FileItem(reader, at, index[name])
        inside = sorted(each.partition("/")[2] for each in index if each.partition("/")[0] == name)
        if not inside:
            raise LookupError(name)

        def file(below: str, inner: str) -> Item:
            return _FileItem(reader, below, index[f"{name}/{inner}"])

        return Folder(at, lambda: inside, file)

    return Folder(path, names, child)


def _inner(path: str) -> str:
    return path.removeprefix(f"{CHECKPOINTS}/")


def _bytes_of(region: RemoteRegion) -> bytes | memoryview:
    if region.mapped:
        return region.memoryview()
    data = np.empty(region.size_bytes, np.uint8)
    region.read(data).wait(_WRITE_S)
    return data.data
