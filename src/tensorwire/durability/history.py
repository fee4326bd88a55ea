"""Records the answers that a worker has got from the others, in order, for its successor.

A worker that takes another one's place runs the script from its beginning. It does not repeat the
former one's requests to others: it gets the answers that are noted here. To keep this short, the
script's position is noted from time to time, a checkpoint of the state of this process alone; then
only later notes count, and the way of the script to that position. The end of a note is written
after it, so that a death leaves whole notes.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory import Region

HISTORY_BYTES = 4 << 20
"""Size of the region; pages that are never written to need no memory."""
POSITIONS_AT = 32
"""The offset in it of the 64 bits that count the noted positions."""

_HEAD_BYTES = 1024
_REASON = slice(64, _HEAD_BYTES)
_FIRST = slice(_HEAD_BYTES, 1 << 20)  # before there is a position
_HALVES = slice(1 << 20, 5 << 19), slice(5 << 19, HISTORY_BYTES)
_ENTRY = struct.Struct("<qqqqq")  # length, kind, store, number, slice
_HALF_BYTES = _HALVES[0].stop - _HALVES[0].start
_LOST_AT = 5  # of the numbers: 1 if the reason holds until a later position
_GOES_ON = "The job can go on from its last checkpoint: job.load"


class NoteKind(IntEnum):
    """The subject of a note.

    SUM: the result of a sum of all workers. COMMIT: a slice's commit. VERSION: the result of a
    version of a store. LOAD: a checkpoint is about to be loaded (number 0), and its result
    (number 1). For an optimizer while another one commits, GRADIENTS: where its gradients are;
    CHANGED: these are about to change; BUFFERS: its buffers.
    """

    SUM = 1
    COMMIT = 2
    VERSION = 3
    LOAD = 4
    GRADIENTS = 5
    CHANGED = 6
    BUFFERS = 7


class Entry(NamedTuple):
    """A note; `number` is of its sum or version, `store` and `slice` are 0 where it has none."""

    kind: NoteKind
    data: bytes
    store: int = 0
    number: int = 0
    slice: int = 0

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The subject of the note, without its content."""
        return self.kind, self.store, self.number, self.slice


class History:
    """The notes of one worker. One thread uses it.

    It is replayed until its end, in a process that has another one's place; from then on, and in
    others from the beginning, notes are added.

    Args:
        region: zeroed, or a predecessor's; of HISTORY_BYTES.
        rank: of the worker, for messages.
        joins: the region has what `begin_of` gave, of another worker: this process joins the job.
        within: notes within a pass over a loader are kept; a worker that joins needs none of them.

    Attributes:
        position: where the predecessor was, as it was given to `mark`; None: nowhere yet, or it has
            been reached.
        succeeds: this process has another one's place.
        asked: the number of the last sum for which a predecessor has sent its part.
        answered: the number of the last sum whose result this process has.
    """

    def __init__(
        self, region: Region, rank: int, *, joins: bool = False, within: bool = True
    ) -> None:
        self._joins, self._within = joins, within
        self._memory: NDArray[np.uint8] = region.array()
        # Bytes that are used: of the first part and of both halves; which half is in force.
        self._numbers: NDArray[np.int64] = self._memory[:64].view(np.int64)
        self._rank = rank
        self._passing = False  # inside of a pass over a loader, which is not made again
        self._outside: list[Entry] = []  # what is done again on the way to the next position
        self._before = 0  # how many of them were made before the present loop of epochs
        self._dropped: int | None = None  # those from here on are too large to be kept
        self._lost_bytes = 0
        self.position: dict[str, Any] | None = None
        self._later: list[Entry] = []
        first = list(self._entries(_FIRST, int(self._numbers[0])))
        if self._half >= 0:
            entries = self._entries(_HALVES[self._half], int(self._numbers[1 + self._half]))
            body = pickle.loads(next(entries).data)  # the worker's own, in memory of its own
            self.position, self._outside, self._before, self._passing = body
            self._later = list(entries)
        self._ahead = deque([*first, *self._outside])
        self.succeeds = bool(self._ahead) or self.position is not None
        self.asked = self.answered = 0
        notes = [*self._ahead, *self._later]
        self._commits = {each.key: each.data for each in notes if each.kind == NoteKind.COMMIT}

    @property
    def _half(self) -> int:
        return int(self._numbers[3]) - 1

    @property
    def replaying(self) -> bool:
        """True if a predecessor has got further than this process."""
        return self._joins or bool(self._ahead or self._later) or self.position is not None

    @property
    def is_behind(self) -> bool:
        """True if a predecessor has already written the next message, and others went on."""
        return self.replaying or self.asked > self.answered

    # ---- what cannot be replaced

    @property
    def reason(self) -> str:
        """Why no process could go on in the place of this one; "" if one could."""
        return self._memory[_REASON].tobytes().rstrip(b"\0").decode(errors="replace")

    @property
    def is_refused(self) -> bool:
        """True if no process can go on in the place of this one, now or later."""
        return bool(self.reason) and not self._is_lost

    def refuse(self, reason: str) -> None:
        """Refuses a successor to this process, for a reason; the first reason counts."""
        if not self.is_refused:
            self._give_reason(reason)
            self._numbers[_LOST_AT] = 0

    @property
    def _is_lost(self) -> bool:
        """True if notes were lost: no successor can go on before a position needs none of them."""
        return bool(self._numbers[_LOST_AT])

    def _give_reason(self, reason: str) -> None:
        text = reason.encode()[: _HEAD_BYTES - 65]
        self._memory[_REASON] = np.frombuffer(text.ljust(_HEAD_BYTES - 64, b"\0"), np.uint8)

    def _lose(self, size: int, used: int, room: int) -> None:
        """Drops a note without room; later ones until the next position would follow a gap."""
        self._lost_bytes = size + (self._lost_bytes if self._is_lost else used)
        self._numbers[_LOST_AT] = 1
        self._give_reason(
            "its script has asked for more between two of its positions than can be noted: "
            f"{self._lost_bytes:,} bytes of answers, and {room:,} are the most"
        )

    def check(self) -> None:
        """Raises RuntimeError in a process that cannot go on in the place of another one."""
        if self.reason:
            raise RuntimeError(
                f"worker {self._rank} was killed, and no other process can take its place: "
                f"{self.reason}. {_GOES_ON}"
            )

    # ---- replayed

    def take(
        self, kind: NoteKind, store: int = 0, number: int = 0, slice_: int = 0
    ) -> bytes | None:
        """Returns the note on this process's next action; None: it has to act itself.

        Raises:
            RuntimeError: the predecessor has done something else.
        """
        if not self._ahead:
            if self.position is not None:
                raise self.different()
            return None
        if self._ahead[0].key != (kind, store, number, slice_):
            raise self.different()
        return self._ahead.popleft().data

    def is_next(self, kind: NoteKind) -> bool:
        """Tells whether the predecessor's next action is of this kind."""
        return bool(self._ahead) and self._ahead[0].kind == kind

    def skip_load(self) -> bytes | None:
        """Skips all notes of a predecessor's load, and returns its result.

        None: it is not noted, and nothing is left out.
        """
        for at, each in enumerate(self._ahead):
            if each.kind == NoteKind.LOAD and (each.number or at):
                if not each.number:
                    break  # another one
                for _ in range(at + 1):
                    self._ahead.popleft()
                return each.data
        return None

    def take_or_note(
        self, kind: NoteKind, data: bytes, store: int, number: int, slice_: int
    ) -> tuple[bool, bytes | None]:
        """Notes something that a predecessor may not have noted at this place.

        Returns:
            Whether it is noted, and the predecessor's note.
        """
        if not self.replaying:
            self.note(kind, data, store, number, slice_)
            return True, None
        if not self._ahead or self._ahead[0].key != (kind, store, number, slice_):
            return False, None
        return True, self._ahead.popleft().data

    def lies_ahead(
        self, kind: NoteKind, store: int, number: int | None = None, slice_: int | None = None
    ) -> bool:
        """Tells whether the predecessor's notes ahead of this process have one of this kind.

        A `number` or `slice_` of None matches any.
        """
        return any(
            each.kind == kind
            and each.store == store
            and number in (None, each.number)
            and slice_ in (None, each.slice)
            for notes in (self._ahead, self._later)
            for each in notes
        )

    def was_committed(self, store: int, version: int, slice_: int) -> bytes | None:
        """Returns the commit of a slice for a version that a predecessor made or began to make."""
        return self._commits.get((NoteKind.COMMIT, store, version, slice_))

    def reach(self) -> None:
        """Ends the way to the predecessor's position; later notes are replayed.

        Raises:
            RuntimeError: it has not done all that the predecessor had.
        """
        if self._ahead:
            raise self.different()
        self.position, self._ahead, self._later = None, deque(self._later), []
        self._joins = False

    def different(self) -> RuntimeError:
        """Returns the error of a script that does other things than it did in the predecessor."""
        return RuntimeError(
            f"worker {self._rank} was killed, and the process that took its place does other "
            "things: the script's sums, barriers and steps have to be the same when it runs again, "
            "also where it counts batches (enumerate(loader, loader.first_batch)). " + _GOES_ON
        )

    # ---- noted

    def note(
        self, kind: NoteKind, data: bytes, store: int = 0, number: int = 0, slice_: int = 0
    ) -> None:
        """Adds a note at the end, unless no successor could use it."""
        if self.is_refused or (self._passing and not self._within):
            return
        entry = Entry(kind, data, store, number, slice_)
        part, used = (_FIRST, 0) if self._half < 0 else (_HALVES[self._half], 1 + self._half)
        start = int(self._numbers[used])
        if self._is_lost or (end := self._write(part, start, entry)) is None:
            self._lose(len(data), start, part.stop - part.start)
        else:
            self._numbers[used] = end
        if not self._passing if self._half >= 0 else self._is_lost:
            self._add_outside(entry)

    def _add_outside(self, entry: Entry) -> None:
        """Keeps notes that are repeated on the way to the next position, if they fit there."""
        if self._is_lost:
            size = self._outside_bytes() + len(entry.data)
            if self._dropped is None and size > _HALF_BYTES:
                self._dropped = len(self._outside)
            if self._dropped is not None:
                entry = entry._replace(data=b"")
        self._outside.append(entry)

    def _outside_bytes(self) -> int:
        return sum(len(each.data) for each in self._outside)

    def mark(self, position: dict[str, Any], *, passing: bool, again: bool = False) -> str:
        """Notes a position, in place of the one before.

        Args:
            position: what this process alone has, and where it is.
            passing: it is inside of a pass over a loader, and what follows is not made again.
            again: an epoch begins: what was made in the one before is not made again.

        Returns:
            Why it cannot be noted; "" if it was, or a later one can be.
        """
        if again:
            del self._outside[self._before :]
            if self._dropped is not None and self._dropped >= self._before:
                self._dropped = None
        self._passing = passing
        if self._dropped is not None:
            return ""
        half = 1 - max(self._half, 0)
        try:
            body = pickle.dumps((position, self._outside, self._before, passing))
        except Exception as error:  # of any class that is in it
            return f"what job.track has named cannot be noted: {error}"
        entry = Entry(NoteKind.SUM, body)
        if (end := self._write(_HALVES[half], 0, entry)) is None:
            if 2 * self._outside_bytes() > len(body):
                self._lose(0, len(body), _HALF_BYTES)  # a later epoch does not do it again
                return ""
            return (
                "what job.track has named, beside models and distributed optimizers, has "
                f"{len(body)} bytes, too many to be noted with each step"
            )
        self._numbers[1 + half] = end
        self._numbers[3] = half + 1
        self._numbers[POSITIONS_AT // 8] += 1
        if self._is_lost:
            self._give_reason("")
            self._numbers[_LOST_AT] = 0
        return ""

    def begin_pass(self) -> None:
        """Begins a pass over a loader, which is not made again after a position within it."""
        self._passing = True

    # ---- for a worker that joins

    @staticmethod
    def begin_of(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns the notes of a worker before `job.epochs`, for a worker that joins."""
        begun = np.zeros(_FIRST.stop, np.uint8)
        begun[_FIRST] = memory[_FIRST]
        begun[:8] = memory[:8]
        return begun

    def join(self, memory: NDArray[np.uint8]) -> None:
        """Takes the position that another worker has just noted in its own history.

        Raises:
            ValueError: there is none.
        """
        numbers = memory[:64].view(np.int64)
        half = int(numbers[3]) - 1
        if half < 0:
            raise ValueError("the other worker has not noted at which step it is, so none can join")
        part = memory[_HALVES[half]]
        length, *_ = _ENTRY.unpack_from(part.data)
        body = part[_ENTRY.size : _ENTRY.size + length].tobytes()
        self.position, self._outside, self._before, self._passing = pickle.loads(body)
        self._ahead.extend(self._outside)
        end = self._write(_HALVES[0], 0, Entry(NoteKind.SUM, body))
        assert end is not None
        self._numbers[1], self._numbers[3] = end, 1

    def begin_loop(self) -> None:
        """Begins a loop of epochs; a successor repeats everything that was made before it."""
        self._before = len(self._outside)

    def _entries(self, part: slice, used: int) -> Iterator[Entry]:
        memory, at = self._memory[part], 0
        while at < used:
            length, kind, store, number, slice_ = _ENTRY.unpack_from(memory[at:].data)
            start = at + _ENTRY.size
            data = memory[start : start + length].tobytes()
            yield Entry(NoteKind(kind), data, store, number, slice_)
            at = start + length + -length % 8

    def _write(self, part: slice, start: int, entry: Entry) -> int | None:
        """Writes an entry and returns its end; None if it does not fit."""
        memory, length = self._memory[part], len(entry.data)
        at = start + _ENTRY.size
        end = at + length + -length % 8
        if end > len(memory):
            return None
        _ENTRY.pack_into(memory[start:].data, 0, length, *entry.key)
        memory[at : at + length] = np.frombuffer(entry.data, np.uint8)
        return end
