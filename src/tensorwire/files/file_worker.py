"""Lets a program write and commit the gradients of a worker that runs no script."""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import threading
import time
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from tensorwire.jobs.door import knock, receive_message, send_message

from .commit_text import CommitText
from .errors import refuse
from .gradient_memory import OPEN, OVER, GradientMemory
from .job import file_workers_of
from .names import file_name
from .npy import npy_header, numpy_dtype

_ANSWER_S = 60.0


class _WriterAnswer(TypedDict, total=False):
    error: str | None
    errno: int
    path: str | None


class FileWorker:
    """The gradients of one worker as files, and its commits. Any thread; close it, or use `with`.

    It is a worker of `tensorwire run --file-workers`, of this user on this host. Parameters are
    read elsewhere: by `JobReader`, `tw://…` or a mount. Several processes may use one worker, as
    long as each file has one writer. `commit` reports errors in a file.

    Args:
        address: "host:port" of server 0, or of its door.
        rank: of the worker.

    Attributes:
        rank: as given.

    Raises:
        OSError: ENOENT if the job has no such worker, or no optimizer yet; ENOTCONN if the process
            is gone that takes the gradients; EBUSY if 64 programs are connected to it.
    """

    def __init__(self, address: str, rank: int) -> None:
        self.rank, self._address = rank, address
        self._folder = f"grads/{rank}"
        self._lock = threading.RLock()
        self._channel: socket.socket | None = None
        self._memory: GradientMemory | None = None
        self._was_there = False
        with self._lock:
            self._open()

    def __enter__(self) -> FileWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; written files stay. Idempotent."""
        with self._lock:
            channel, self._channel, self._memory = self._channel, None, None
            if channel is not None:
                channel.close()

    # ---- what there is

    @property
    def memory(self) -> GradientMemory:
        """The files, of the newest optimizer.

        Raises:
            OSError: as for the constructor.
        """
        with self._lock:
            if self._memory is None or self._memory.state == OVER or self._is_gone():
                self.close()
                self._open()
            assert self._memory is not None
            return self._memory

    @property
    def names(self) -> list[str]:
        """The tensors that get gradients."""
        return [file.name for file in self.memory.files]

    @property
    def version(self) -> int:
        """The version whose gradients are wanted, or were committed."""
        return self.memory.version

    def path(self, name: str = "") -> str:
        """Returns the path of a tensor's gradient among the job's files; "": the folder."""
        return f"{self._folder}/{file_name(name)}.npy" if name else self._folder

    # ---- gradients

    def write(self, name: str, gradient: ArrayLike) -> None:
        """Writes the gradient of a tensor, of its shape and converted to the tensor's dtype.

        A tensor of bfloat16 takes two bytes for each element ("|V2", or uint16).

        Raises:
            LookupError: no tensor of this name gets gradients.
            ValueError: the shape is another one.
            OSError: EBUSY if this version was committed.
        """
        memory = self.memory
        index = memory.index(name)
        file, array = memory.files[index], np.asarray(gradient)
        if array.shape != file.shape:
            raise ValueError(f"the gradient of {name!r} has shape {file.shape}, not {array.shape}")
        dtype = numpy_dtype(file.dtype)
        if dtype.kind == "V":
            if array.dtype.itemsize != dtype.itemsize:
                raise ValueError(f"the gradient of {name!r} has elements of {dtype.itemsize} bytes")
            array = np.ascontiguousarray(array)
        else:
            array = np.ascontiguousarray(array, dtype)
        header, path = npy_header(file.dtype, file.shape), self.path(name)
        memory.truncate(index, 0, path)
        memory.write(index, 0, header, path)
        memory.write(index, len(header), array.reshape(-1).view(np.uint8), path)

    def commit(
        self,
        version: int,
        *,
        samples: float | None = None,
        absent: tuple[str, ...] = (),
        allow_nan: bool = False,
    ) -> None:
        """Commits all gradients of a version, so that the step takes them.

        It returns when they were checked. `wait` tells when the next version is in place.

        Args:
            version: of the parameters that they were computed with.
            samples: the number that they stand for; None: as many as worker 0's slice has.
            absent: tensors without a gradient; each other one must have been written.
            allow_nan: elements may be infinite or no numbers.

        Raises:
            OSError: ENODATA, EFBIG, EINVAL or EDOM for what is wrong with a file, ESTALE for
                another version, EBUSY where this one was committed, ENOTCONN if the job is over,
                ETIMEDOUT if nobody answers; it may then have been committed all the same.
        """
        self.commit_text(str(CommitText(version, samples, tuple(absent), allow_nan)))

    def commit_text(self, text: str) -> None:
        """Commits like `commit`, with the text of the file `commit`."""
        with self._lock:
            memory = self.memory  # connects anew where the process was replaced
            assert memory is self._memory
            self._ask({"do": "commit", "text": text})

    def wait(self, version: int, timeout_s: float | None = None) -> int:
        """Waits until gradients of a later version than this are wanted, and returns that one.

        Raises:
            TimeoutError: not in time.
            OSError: ENOTCONN if the job is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s, memory, look_at = 2e-5, self.memory, 0.0
        while True:
            if memory.state == OPEN and (found := memory.version) > version:
                return found
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise TimeoutError(f"no version follows {version} within {timeout_s:g} s")
            if now > look_at:  # whether somebody is there costs a call
                memory, look_at = self.memory, now + 0.02
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    # ---- the process that takes them

    def _open(self) -> None:
        found = [each for each in file_workers_of(self._address) if each.rank == self.rank]
        if not found and self._was_there:
            raise self._gone()
        if not found:
            raise refuse(
                errno.ENOENT,
                self._folder,
                f"no worker {self.rank} of the job at {self._address} takes gradients from files "
                "of this user on this host",
            )
        try:
            self._channel = knock(found[-1].socket, _ANSWER_S)
            (descriptor,) = self._ask({"do": "open"})
            try:
                mapped = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            finally:
                os.close(descriptor)
            self._memory = GradientMemory(np.frombuffer(mapped, np.uint8))
            self._was_there = True
        except BaseException as error:
            self.close()
            if isinstance(error, ConnectionError | FileNotFoundError) and not getattr(
                error, "told", False
            ):
                raise self._gone() from None
            raise

    def _ask(self, request: dict[str, Any]) -> list[int]:
        assert self._channel is not None
        try:
            send_message(self._channel, request)
            found = receive_message(self._channel, _WriterAnswer)
        except ConnectionError:
            raise self._gone() from None
        except ValueError as wrong:
            told = f"its answer makes no sense: {wrong}"
            raise refuse(errno.EPROTO, self._folder, told) from None
        except BaseException as late:  # an answer that comes later is none to the next request
            self.close()
            if isinstance(late, TimeoutError):
                told = f"the process that takes them has not answered in {_ANSWER_S:g} s"
                raise refuse(errno.ETIMEDOUT, self._folder, told) from None
            raise
        if found is None:
            raise self._gone()
        answer, descriptors = found
        if (text := answer.get("error")) is not None:
            for each in descriptors:
                os.close(each)
            code = answer.get("errno", errno.EPROTO)
            error = OSError(code, text, answer.get("path", self._folder))
            error.told = True  # type: ignore[attr-defined]
            raise error
        return descriptors

    def _is_gone(self) -> bool:
        if self._channel is None:
            return True
        poll = select.poll()  # nobody sends what was not asked for: only its end can be seen
        poll.register(self._channel, select.POLLIN)
        return bool(poll.poll(0))

    def _gone(self) -> OSError:
        return refuse(
            errno.ENOTCONN, self._folder, "the job is over, or the process that takes them is gone"
        )
