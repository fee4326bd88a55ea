"""Runs a worker whose gradients come from files: `python -m tensorwire.files.worker_process`.

`tensorwire run --file-workers` starts it. It is a worker like the others and runs no script: it
follows worker 0 (`parameters.worker.following`), and where a step wants gradients it takes those
that others have written into its memory. A writer connects to a socket in the user's runtime
folder, gets that memory, and asks for commits. It needs no torch.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import TypedDict

from tensorwire.aside import put_output_aside
from tensorwire.jobs.door import Door, DoorClient
from tensorwire.jobs.job_file import JobFile, RunningFileWorker
from tensorwire.jobs.secret import job_secret, reading_secret
from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.memory import Region
from tensorwire.parameters import Bytes, Spec
from tensorwire.parameters.server.lending.door import DOOR
from tensorwire.parameters.worker.following import FollowedStore, ScriptlessWorker

from .commit_text import CommitText
from .errors import refuse
from .gradient_memory import ABSENT, COMMITTED, GradientMemory, plan
from .names import file_name
from .reader import JobReader

_MOST_BYTES = 128 << 10  # of a request
_MOST_WRITERS = 64
_LEAST_PAUSE_S, _MOST_PAUSE_S = 2e-4, 5e-3


class _WriterRequest(TypedDict, total=False):
    do: str
    text: str


class WorkerFiles:
    """The files of one store's gradients. One thread.

    Args:
        member: this worker.
        store: for which they are.
    """

    def __init__(self, member: WorkerMember, store: FollowedStore) -> None:
        self.store, self._member = store, member
        _, told, size = plan(store.layout)
        self._region: Region = member.memory.allocate(
            size, name=f"files/{store.number}", access="none"
        )
        memory: Bytes = self._region.array()
        self.memory = GradientMemory.make(memory, told, len(store.layout.trained), store.number)
        self.descriptor = self._region.descriptor()
        self._folder = f"grads/{member.place.rank}"
        self.tell_version()

    def commit(self, text: str) -> None:
        """Checks the gradients, which then wait for worker 0's commit; raises OSError."""
        path, memory = f"{self._folder}/commit", self.memory
        said = CommitText.parse(text, path)
        memory.check_open(path)
        if said.version != memory.version:
            raise refuse(
                errno.ESTALE, path, f"version {memory.version} is in place, not {said.version}"
            )
        for name in said.absent:
            try:
                index = memory.index(name)
            except LookupError:
                raise refuse(errno.EINVAL, path, f"no tensor {name!r} gets gradients") from None
            if memory.size(index):
                raise refuse(errno.EINVAL, path, f"the gradient of {name!r} was written")
            memory.sizes[index] = ABSENT
        try:
            for index, file in enumerate(memory.files):
                where = f"{self._folder}/{file_name(file.name)}.npy"
                memory.elements(index, where, said.allow_nan)
        except BaseException:
            memory.sizes[memory.sizes == ABSENT] = 0
            raise
        memory.commit(said.samples)

    def answer(self) -> bool:
        """Gives worker 0's step the gradients, if both are there; tells whether it did."""
        asked = None if self.store.is_committed else self.store.asked()
        if asked is None or not self.store.wants(asked) or self.memory.state != COMMITTED:
            return False
        if self.memory.version < self.store.version:
            return False  # these are of a version before
        gradients = {}
        for index, tensor in enumerate(self.store.layout.trained):
            path = f"{self._folder}/{file_name(self.memory.files[index].name)}.npy"
            try:
                data = self.memory.elements(index, path)
            except OSError as error:  # somebody wrote while another one committed
                told = "was changed after its commit, and has to be committed again"
                sys.stderr.write(f"tensorwire: {path} {told}: {error.strerror}\n")
                self.memory.reopen()
                return False
            if data is not None:
                gradients[tensor] = data
        self.store.answer(asked, gradients, self.memory.samples)
        return True

    def tell_version(self) -> None:
        """Opens the files for a new version in place, unless nothing changes in it."""
        if self.memory.version < self.store.version and self.store.is_settled:
            self.memory.open(self.store.version)

    def close(self) -> None:
        """Marks the memory as over for programs that have it mapped, and frees it."""
        self.memory.end()
        os.close(self.descriptor)
        self._member.memory.free(self._region)


class Writers:
    """The connections of programs of this user on this host that write gradients. One thread.

    Args:
        member: this worker.
    """

    def __init__(self, member: WorkerMember) -> None:
        self._rank = member.place.rank
        self.files: WorkerFiles | None = None
        self._writers = set[DoorClient]()
        self._door = Door(_WriterRequest, "writers-", most_bytes=_MOST_BYTES)
        path = str(self._door.path)
        self._file = JobFile(
            RunningFileWorker(self._rank, member.place.servers[0], os.getpid(), path, time.time())
        )

    def serve(self, timeout_s: float) -> bool:
        """Answers requests, or waits `timeout_s` seconds; tells whether there was a request."""
        asked = False
        for writer, request in self._door.messages(timeout_s):
            asked = True
            if request is None:
                self._writers.discard(writer)
            elif writer not in self._writers and len(self._writers) >= _MOST_WRITERS:
                text = f"{_MOST_WRITERS} programs are connected to this worker, which is the most"
                self._fail(writer, refuse(errno.EBUSY, f"grads/{self._rank}", text))
                writer.channel.close()
            else:
                self._writers.add(writer)
                try:
                    writer.send({}, self._do(request))
                except OSError as error:
                    self._fail(writer, error)
        return asked

    @staticmethod
    def _fail(writer: DoorClient, error: OSError) -> None:
        writer.send({"error": error.strerror, "errno": error.errno, "path": error.filename})

    def _do(self, request: _WriterRequest) -> list[int]:
        """Does a request; returns the descriptors for the answer."""
        if self.files is None:
            raise refuse(errno.ENOENT, f"grads/{self._rank}", "no optimizer is there yet")
        if request.get("do") == "open":
            return [self.files.descriptor]
        if request.get("do") == "commit":
            self.files.commit(request.get("text", ""))
            return []
        raise refuse(errno.EINVAL, f"grads/{self._rank}", f"unknown request {request.get('do')!r}")

    def close(self) -> None:
        """Closes the socket and all connections, so that the writers learn of the job's end."""
        self._file.close()
        self._door.close()


class FileWorkerProcess:
    """The worker, until the job is over. One thread."""

    def __init__(self, member: WorkerMember) -> None:
        self._member = member
        self._follower = ScriptlessWorker(member, self._find_spec)
        self._writers = Writers(member)

    def _find_spec(self, number: int) -> Spec:
        server = self._member.servers[0]
        region = server.region(DOOR)
        data = bytearray(region.size_bytes)
        region.read(data).wait(10.0)
        door = data.rstrip(b"\0").decode()
        secret = reading_secret(job_secret())
        with JobReader(door, secret=secret) as reader:
            return reader.store(number).layout.spec

    def run(self) -> None:
        """Runs until worker 0 has left in good order; raises why the job is over otherwise."""
        pause_s = _LEAST_PAUSE_S
        try:
            while not self._follower.is_over:
                done = self._follower.turn()
                done = self._take_files() or done
                # Worker 0 may step at any time; what it waits for must not wait for this process.
                pause_s = _LEAST_PAUSE_S if done else min(2 * pause_s, self._most_pause_s)
                if self._writers.serve(0.0 if done else pause_s):
                    pause_s = _LEAST_PAUSE_S
        finally:
            if self._writers.files is not None:
                self._writers.files.close()
            self._writers.close()

    @property
    def _most_pause_s(self) -> float:
        files = self._writers.files
        waits = files is not None and files.memory.state == COMMITTED
        return 5e-4 if waits else _MOST_PAUSE_S

    def _take_files(self) -> bool:
        """Makes files for the newest store and answers a step; tells whether it did answer."""
        files, stores = self._writers.files, self._follower.stores
        newest = stores[max(stores)] if stores else None
        if files is not None and files.store is not newest:
            files.close()
            files = self._writers.files = None
        if files is None and newest is not None:
            files = self._writers.files = WorkerFiles(self._member, newest)
        for store in stores.values():
            asked = None if store is newest or store.is_committed else store.asked()
            if asked is not None and store.wants(asked):
                raise ValueError(
                    "a job with file workers trains with one optimizer, the one that was made last"
                )
        if files is None:
            return False
        files.tell_version()
        return files.answer()


def main() -> int:
    """Runs the worker; returns 0 when the job has ended in good order."""
    put_output_aside()
    place = World.from_environment()
    if place is None:
        sys.stderr.write("tensorwire: a file worker is started by 'tensorwire run'\n")
        return 2
    member = WorkerMember.join(place)
    try:
        FileWorkerProcess(member).run()
    except BaseException:
        member.close(goodbye=False)
        raise
    member.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
