"""Lends server 0's memory for checkpoints, and runs the thread that answers their writers.

A checkpoint is seen when it is complete. Until then it belongs to the processes that write it: if
one of them is gone, it is never seen, and its memory comes back. Written memory is read
at the door of readers. docs/files.md has the rules.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from tensorwire import _core
from tensorwire.errors import ClosedError, StaleHandleError, TensorwireError, TimeoutError
from tensorwire.memory import Mailbox, Node, Region, mailbox_bytes
from tensorwire.memory.lent import LentRegion

from ...checkpoint_files import (
    ANSWERS,
    ASKS,
    BELL,
    INDEX,
    INDEX_BYTES,
    INDEX_PLACES,
    LEASE_BYTES,
    METADATA,
    MOST_NAME,
    PART_BYTES,
    CheckpointFile,
    index_text,
    lease_name,
    message,
    part_name,
    told_in,
)
from .lending import lend_region
from .room import check_room

MEMORY = "TENSORWIRE_CHECKPOINT_MEMORY"
"""The variable with how many bytes of checkpoints a job lends at most."""

_LOOK_S = 0.25  # whether writers are still there
_FIND_S, _FIND_LOOK_S = 2.0, 0.01  # for a lease whose owner has rung
_HOSTILE_BELL = 1 << 62  # a bell near its end could not be waited for
_OPEN_FILES = 1 << 16  # of server 0, where it may; checkpoints take at most half of them


class Refusal(Exception):
    """A request that cannot be done; its writer gets the reason and goes on."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class _Stored:
    """A file and its memory."""

    def __init__(self, number: int, path: str, writer: str) -> None:
        self.number, self.path, self.writer = number, path, writer
        self.parts: list[tuple[Region, LentRegion, int]] = []
        self.complete: CheckpointFile | None = None

    @property
    def size_bytes(self) -> int:
        return sum(size for _, _, size in self.parts)

    def free(self) -> None:
        for region, lent, _ in self.parts:
            lent.free()
            if not region.freed:
                region.free()
        self.parts.clear()


class _Pending:
    """A checkpoint that is being written: its files by name, and its writers.

    Attributes:
        broken: a process that wrote some of it is gone.
    """

    def __init__(self) -> None:
        self.files: dict[str, _Stored] = {}
        self.writers: set[str] = set()
        self.broken = False

    def free(self) -> None:
        for file in self.files.values():
            file.free()
        self.files.clear()


class _Lease:
    """The requests of one writer, and the answers to them."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._asks, self._answers = Mailbox(region[ASKS]), region[ANSWERS]
        self._answered = 0

    def serve(self, do: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        number = self._asks.count
        if number == self._answered:
            return
        self._answered = number
        try:
            answer = {"errno": 0, **do(told_in(self._asks.message(number).tobytes()))}
        except Refusal as refusal:
            answer = {"errno": refusal.code, "text": refusal.text}
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            answer = {"errno": errno.EINVAL, "text": f"the request is not valid: {error!r}"}
        data = np.frombuffer(message(answer), np.uint8)
        self._answers[64:].array()[:] = data
        self._answers.word(0).set(number)


class CheckpointShelf:
    """The checkpoints in the memory of server 0. Its thread ends when the Node is closed.

    Args:
        node: of the server, where writers come.
        door: where readers come.
        most_bytes: that are lent; None: half of what this process may have.
        replaces: another process was this server before. It may have had files of a checkpoint
            that several processes write, so such a checkpoint has to begin with its folder.
    """

    def __init__(
        self, node: Node, door: Node, most_bytes: int | None = None, *, replaces: bool = False
    ) -> None:
        self._node, self._door, self._replaces = node, door, replaces
        self._most = _core.memory_limit()[0] // 2 if most_bytes is None else most_bytes
        # A part has two descriptors here, and the server needs others for the workers.
        self._most_parts = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        bell = node.allocate(64, name=BELL, access="rw")
        self._bell, self._rings = bell.word(0), bell.array("uint64")
        size = mailbox_bytes(INDEX_BYTES, INDEX_PLACES)
        self._index = Mailbox(door.allocate(size, name=INDEX, access="r"), INDEX_PLACES)
        self._leases: dict[str, _Lease] = {}
        self._pending: dict[str, _Pending] = {}
        self._complete: dict[str, dict[str, _Stored]] = {}
        # From the clock: a successor, which has none of these files, does not repeat their numbers.
        self._numbers = time.time_ns() // 1000
        self._publish()
        self._thread = threading.Thread(target=self._run, name="tensorwire-shelf", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits for the end of the thread, after the Node was closed."""
        self._thread.join()

    # ---- the thread

    def _run(self) -> None:
        try:
            while True:
                if (seen := self._bell.value) >= _HOSTILE_BELL:
                    self._rings[0] = seen = 1  # a ring meanwhile is seen all the same
                until = time.monotonic() + _FIND_S
                self._look()
                while self._bell.value == seen and time.monotonic() < until and seen:
                    self._wait(seen, _FIND_LOOK_S)  # the writer that rang may not be seen yet
                    self._look()
                self._wait(seen, _LOOK_S if self._leases else None)
        except (ClosedError, StaleHandleError):
            return
        except BaseException:
            traceback.print_exc()  # the job goes on
            sys.stderr.write("tensorwire: no checkpoints are taken after this error\n")

    def _wait(self, seen: int, seconds: float | None) -> None:
        """Waits until the bell rings again, at most `seconds` seconds; None: for ever."""
        with contextlib.suppress(TimeoutError):
            self._bell.wait_until(seen + 1, seconds)

    def _look(self) -> None:
        here = {peer.name for peer in self._node.peers}
        for name in here - self._leases.keys():
            with contextlib.suppress(LookupError, StaleHandleError):
                region = self._node.region(lease_name(name))
                if region.size_bytes >= LEASE_BYTES:
                    self._leases[name] = _Lease(region)
        for name, lease in list(self._leases.items()):
            try:
                if name in here and not lease.region.freed:
                    lease.serve(lambda told, who=name: self._do(who, told))  # type: ignore[misc]
                    continue
            except (ClosedError, StaleHandleError):
                if self._node.closed:
                    raise
            del self._leases[name]
            self._forget(name)

    def _forget(self, writer: str) -> None:
        """Forgets a writer that is gone, with everything that it had not completed."""
        for name, pending in list(self._pending.items()):
            if writer in pending.writers:
                self._break(name, pending)
                pending.writers.discard(writer)
                if not pending.writers:
                    self._pending.pop(name, None)

    def _break(self, name: str, pending: _Pending) -> None:
        """Breaks a checkpoint, so that it is never seen; its other writers are told so."""
        pending.broken = pending.files.keys() != {""}
        pending.free()
        if not pending.broken:
            del self._pending[name]

    def _give_up(self, file: _Stored) -> None:
        name, _, _ = file.path.partition("/")
        self._break(name, self._pending[name])

    # ---- requests

    def _do(self, who: str, told: dict[str, Any]) -> dict[str, Any]:
        match told["do"]:
            case "folder":
                self._make_folder(who, _name(told["path"]))
            case "make":
                return {"number": self._make(who, *_split(told["path"])).number}
            case "part":
                file = self._own(who, int(told["number"]))
                return {"region": self._add_part(file, int(told["size"]))}
            case "finish":
                self._finish(self._own(who, int(told["number"])))
            case "complete":
                self._complete_folder(who, _name(told["path"]))
            case "give up":
                self._give_up(self._own(who, int(told["number"])))
            case "rename":
                self._rename(who, _split(told["path"]), _split(told["to"]))
            case "remove":
                self._remove(who, str(told["path"]))
            case other:
                raise Refusal(errno.EINVAL, f"unknown request {other!r}")
        return {}

    def _make_folder(self, who: str, name: str) -> None:
        """Begins a checkpoint that this process and others will write."""
        if "" in self._complete.get(name, {}):
            raise Refusal(errno.ENOTDIR, f"{name} is a file")
        pending = self._pending.get(name)
        if pending is None or pending.broken:
            pending = self._pending[name] = _Pending()
        pending.writers.add(who)

    def _make(self, who: str, name: str, file: str) -> _Stored:
        if file and "" in self._complete.get(name, {}):
            raise Refusal(errno.ENOTDIR, f"{name} is a file")
        if not file and name in self._complete and "" not in self._complete[name]:
            raise Refusal(errno.EISDIR, f"{name} is a checkpoint of several files")
        if file and self._replaces and name not in self._pending:
            raise Refusal(
                errno.ESTALE,
                f"server 0 was replaced, and with it went what may have been written of {name}; "
                "begin anew, and make its folder first",
            )
        pending = self._pending.setdefault(name, _Pending())
        if pending.broken:
            raise Refusal(
                errno.ESTALE,
                f"a process that wrote a part of {name} is gone or has failed, and so is all of "
                "it; begin anew",
            )
        self._check_alone(who, name, file, pending)
        pending.writers.add(who)
        if (before := pending.files.pop(file, None)) is not None:
            before.free()
        self._numbers += 1
        made = pending.files[file] = _Stored(self._numbers, _join(name, file), who)
        return made

    def _check_alone(self, who: str, name: str, file: str, pending: _Pending) -> None:
        """Raises EBUSY if another program writes a checkpoint of this name."""
        before = pending.files.get(file)
        if before is not None:
            taken = before.writer != who
        else:
            taken = bool(pending.files) and (not file or "" in pending.files)
        if taken:
            if all(each.writer != who for each in pending.files.values()):
                pending.writers.discard(who)  # its end does not break the checkpoint of the others
            raise Refusal(
                errno.EBUSY,
                f"another process writes {_join(name, file)}: two programs at a time cannot write "
                "one checkpoint",
            )

    def _own(self, who: str, number: int) -> _Stored:
        """Returns a file that a process writes."""
        for pending in self._pending.values():
            for file in pending.files.values():
                if file.number == number and file.writer == who and file.complete is None:
                    return file
        raise Refusal(
            errno.ESTALE,
            "the file is gone: it was removed or begun anew, or a process that wrote another part "
            "of the checkpoint has ended",
        )

    def _add_part(self, file: _Stored, size: int) -> str:
        if not 0 < size <= PART_BYTES:
            raise Refusal(errno.EINVAL, f"a part has 1 to {PART_BYTES} bytes, not {size}")
        if sum(len(each.parts) for each in self._all()) >= self._most_parts:
            raise Refusal(
                errno.ENOSPC,
                f"server 0 has open files for {self._most_parts} pieces of checkpoints (a quarter "
                "of ulimit -Hn), and all are used: write fewer files, or raise that limit",
            )
        used = sum(each.size_bytes for each in self._all())
        if used + size > self._most:
            raise Refusal(
                errno.ENOSPC,
                f"the job lends {self._most} bytes for checkpoints ({MEMORY}), and {used} are used",
            )
        name = part_name(file.number, len(file.parts))
        try:
            check_room(size)
            region = self._node.allocate(size, name=name, access="w")
        except MemoryError as error:
            raise Refusal(errno.ENOMEM, f"server 0 has no memory for it: {error}") from error
        except TensorwireError as error:
            raise Refusal(errno.ENOMEM, f"server 0 has no place for it: {error}") from error
        try:
            lent = lend_region(self._door, name, region)
        except TensorwireError as error:
            region.free()
            raise Refusal(
                errno.EOPNOTSUPP, f"this job lends no memory to readers: {error}"
            ) from error
        file.parts.append((region, lent, size))
        return name

    def _finish(self, file: _Stored) -> None:
        sizes = tuple(size for _, _, size in file.parts)
        file.complete = CheckpointFile(file.number, sizes, time.time())
        name, _, inner = file.path.partition("/")
        if inner in ("", METADATA):
            try:
                self._complete_all(name)
            except Refusal:
                file.complete = None  # its writer can still give it up
                raise

    def _complete_folder(self, who: str, name: str) -> None:
        """Completes a checkpoint whose files are all there, also without a `.metadata`."""
        pending = self._pending.get(name)
        if pending is None or who not in pending.writers or "" in pending.files:
            raise Refusal(errno.ENOENT, f"this process does not write {name}: create it first")
        if pending.broken:
            raise Refusal(
                errno.ESTALE,
                f"a process that wrote a part of {name} is gone or has failed; begin anew",
            )
        if not pending.files:
            raise Refusal(errno.EINVAL, f"{name} has no files: write one into it first")
        self._complete_all(name)

    def _complete_all(self, name: str) -> None:
        """Completes a checkpoint, which takes the place of the one before."""
        self._check_whole(name)
        pending = self._pending[name]
        before = self._complete.get(name)
        self._complete[name] = dict(pending.files)
        try:
            self._publish()
        except ValueError as error:
            del self._complete[name]
            if before is not None:
                self._complete[name] = before
            self._break(name, pending)
            raise Refusal(errno.ENOSPC, str(error)) from error
        del self._pending[name]
        for file in (before or {}).values():
            file.free()

    def _check_whole(self, name: str) -> None:
        for file, each in self._pending[name].files.items():
            if each.complete is None:
                raise Refusal(errno.EBUSY, f"{file} of {name} is still written")

    def _rename(self, who: str, old: tuple[str, str], new: tuple[str, str]) -> None:
        if old[0] != new[0] or not (old[1] and new[1]):
            raise Refusal(errno.EXDEV, "a file is renamed inside of its checkpoint")
        if new[1] != METADATA and new[1].endswith(METADATA):
            raise Refusal(
                errno.EOPNOTSUPP,
                "a checkpoint has one .metadata for all processes: save it with collectives",
            )
        pending = self._pending.get(old[0])
        if pending is None or who not in pending.writers or pending.broken:
            raise Refusal(errno.ENOENT, f"this process does not write {_join(*old)}")
        file = pending.files.get(old[1])
        if file is None:
            raise Refusal(errno.ENOENT, f"there is no {_join(*old)}")
        if file.complete is None:
            raise Refusal(errno.EBUSY, f"{_join(*old)} is still written: close it first")
        if old == new:
            return
        if new[1] == METADATA:
            self._check_whole(new[0])
        if (there := pending.files.pop(new[1], None)) is not None:
            there.free()
        pending.files[new[1]] = pending.files.pop(old[1])
        file.path = _join(*new)
        if new[1] == METADATA:
            self._complete_all(new[0])

    def _remove(self, who: str, path: str) -> None:
        """Removes a file that is being written, or a complete checkpoint, but no part of that.

        If a file is removed before it was whole, there is no checkpoint.
        """
        name, _, inner = path.partition("/")
        pending = self._pending.get(name)
        if pending is not None and inner and inner in pending.files:
            if who not in pending.writers:
                raise Refusal(errno.EBUSY, f"another process writes {path}")
            if pending.files[inner].complete is None:
                self._break(name, pending)
            else:
                pending.files.pop(inner).free()
            return
        if inner:
            if inner in self._complete.get(name, {}):
                if pending is not None and who in pending.writers:
                    return  # it goes with all others when what is written is complete
                raise Refusal(
                    errno.EPERM, f"{name} is complete: it is removed as a whole, not {inner}"
                )
            raise Refusal(errno.ENOENT, f"there is no {path}")
        found = self._complete.pop(name, None)
        if found is None and (pending is None or who not in pending.writers):
            raise Refusal(errno.ENOENT, f"there is no checkpoint {name}")
        if pending is not None and who in pending.writers:
            self._pending.pop(name).free()
        self._publish()
        for file in (found or {}).values():
            file.free()

    def _all(self) -> list[_Stored]:
        pending = [file for each in self._pending.values() for file in each.files.values()]
        return pending + [file for each in self._complete.values() for file in each.values()]

    def _publish(self) -> None:
        index = {
            _join(name, inner): file.complete
            for name, files in self._complete.items()
            for inner, file in files.items()
            if file.complete is not None
        }
        data = index_text(index) + b"\0"
        if len(data) > INDEX_BYTES:
            raise ValueError("the job has as many checkpoints, of as many files, as it can have")
        self._index.post(np.frombuffer(data, np.uint8))


def _name(path: object) -> str:
    name, file = _split(path)
    if file:
        raise Refusal(errno.EPERM, "a checkpoint is a folder of files, and has no folders")
    return name


def _split(path: object) -> tuple[str, str]:
    """Returns the name of a checkpoint, and of the file in it; "" if it is a file itself."""
    parts = str(path).split("/")
    if len(parts) > 2:
        raise Refusal(errno.EPERM, "a checkpoint is a folder of files, and has no folders")
    for part in parts:
        if part in ("", ".", "..") or not part.isprintable():
            raise Refusal(errno.EINVAL, f"{part!r} is no name of a checkpoint or file")
        if len(part.encode()) > MOST_NAME:
            raise Refusal(errno.ENAMETOOLONG, f"a name has at most {MOST_NAME} bytes")
    return parts[0], parts[1] if len(parts) == 2 else ""


def _join(name: str, file: str) -> str:
    return f"{name}/{file}" if file else name


def open_shelf(node: Node, door: Node, *, replaces: bool) -> CheckpointShelf | None:
    """Opens the shelf of server 0, or prints why there is none: the job runs without it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _OPEN_FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _OPEN_FILES), hard))
    try:
        return CheckpointShelf(node, door, _most_bytes(), replaces=replaces)
    except (TensorwireError, ValueError, OSError, MemoryError) as error:
        sys.stderr.write(f"server 0: no checkpoints can be written to this job: {error}\n")
        return None


def _most_bytes() -> int | None:
    """Returns the value of the variable MEMORY; None if it is not set."""
    if (text := os.environ.get(MEMORY)) is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{MEMORY} is {text!r}, and not a whole number of bytes")
    return int(text)
