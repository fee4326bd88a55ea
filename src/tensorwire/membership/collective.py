"""Sums numbers and exchanges texts among all workers, through the memory of server 0.

It is for results and barriers, not for tensors: a worker writes a message, then raises a word, and
waits for a word of its own. A message is a kind, the number of its workers, and a content. A kind
from 0 up is a count of float64, which are added up in the order of the ranks; a lower one, see
`_of_bytes`, is a count of bytes, which come back one after the other in the order of the ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorwire.durability.history import NoteKind
from tensorwire.errors import PeerLostError, TensorwireError, consequence
from tensorwire.failpoints import failpoint
from tensorwire.membership.identity import called
from tensorwire.membership.server import OfWorkers, ServerMember
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Mailbox, Peer, RemoteMailbox, RemoteRegion, mailbox_bytes

_MOST_NUMBERS = 4096  # of one message; more are several messages
_MOST_BYTES = 8 * _MOST_NUMBERS
_DISAGREE = -1  # in an answer: the workers' messages are of different kinds or lengths
_REGION = "collective"
_HEAD_BYTES = 16
_PLACE = _HEAD_BYTES + _MOST_BYTES
_BLOCK = mailbox_bytes(_PLACE)
_BLOCK += -_BLOCK % 64
_TEXT = 4096  # bytes after a worker's block: why no result will follow
_FAILED = 1 << 62  # the number of the message in a worker's mailbox once the job has failed


class _Answer(NamedTuple):
    """The answer of a sum, and how many workers' parts were added up."""

    content: NDArray[np.uint8]
    parts: int


class CollectiveServer:
    """Server 0's part: a thread that ends when the Node is closed or a worker is lost."""

    def __init__(self, member: ServerMember) -> None:
        self._member = member
        self._fail: Callable[[BaseException], None] = lambda error: None
        region = member.allocate(_BLOCK * member.count, name=_REGION, access="w")
        starts = range(0, region.size_bytes, _BLOCK)
        self._inboxes = [Mailbox(region[start : start + _BLOCK]) for start in starts]
        # With the place of the text. Looked up after the worker's first call: it is there then.
        self._outboxes = OfWorkers[RemoteRegion](member, _their_region)
        # The last answer after its number, before it is sent: a successor sends it again.
        last = member.allocate(_BLOCK, name="last sum", access="none").array()
        self._last_number, self._last_answer = last[:8].view(np.int64), last[8:]
        self._sending = threading.Lock()  # a result must not follow the text
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="tensorwire-collective", daemon=True)

    def is_waiting(self, rank: int) -> bool:
        """Tells whether a worker is in a call that not all others have reached."""
        # All know the sums that were made; a worker that has joined since has sent nothing yet.
        made = int(self._last_number[0])
        calls = {r: max(each.count, made) for r, each in enumerate(self._inboxes)}
        return calls[rank] > min(n for r, n in calls.items() if not self._member.is_taken(r))

    def start(self, fail: Callable[[BaseException], None]) -> None:
        """Begins to serve, after the workers have connected. `fail` gets the error that ends it."""
        self._fail = fail
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits until its thread has ended, which it does when the Node is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        member, first = self._member, max(int(self._last_number[0]), 1)
        try:
            for number in count(first):
                self._make(number)
                if self._failed:
                    return
        except BaseException as error:
            if not member.node.closed and not member.all_left():
                self._fail(error)

    def _make(self, number: int) -> None:
        """Makes a sum, unless a predecessor has noted it, and tells the workers."""
        answer = self._last_answer[:_PLACE]
        if self._last_number[0] < number:
            answer = self._gather(number)
            failpoint("sum.gathered")
            self._last_answer[: len(answer)] = answer
            self._last_number[0] = number
            failpoint("sum.noted")
        self._tell_sum(number, answer)
        failpoint("sum.told")

    def _gather(self, number: int) -> NDArray[np.uint8]:
        ranks = range(self._member.count)
        parts = [self._part(rank, number) for rank in ranks]
        # A worker that has joined meanwhile gives its part, too.
        while late := [r for r in ranks if parts[r] is None and not self._member.is_taken(r)]:
            for rank in late:
                parts[rank] = self._part(rank, number)
        return _answer(parts)

    def _tell_sum(self, number: int, answer: NDArray[np.uint8]) -> None:
        member = self._member
        boxes = {}
        for rank, peer in list(member.workers.items()):
            if member.is_taken(rank):
                continue
            try:
                region = member.persist(peer, self._outboxes.find, rank)
                boxes[rank] = RemoteMailbox(region[:_BLOCK])
            except PeerLostError:
                if not member.is_taken(rank):
                    raise
        with self._sending:
            if not self._failed:
                member.tell_workers(boxes, answer, number)

    def tell(self, text: str) -> None:
        """Ends every worker's present and future calls with an error. For the main thread."""
        with self._sending:
            self._failed = True
        message = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        for rank, peer in self._member.workers.items():
            # A worker that is lost, or has not called yet, has no region.
            with contextlib.suppress(LookupError, TensorwireError):
                region = self._outboxes.get(rank) or peer.region(_REGION, 5.0)
                region[_BLOCK:].write(message, signal=(region.word(0), _FAILED)).wait(2.0)

    def _part(self, rank: int, number: int) -> NDArray[np.uint8] | None:
        """Returns the part of a worker in a sum; None if it was killed before it gave any."""
        member, inbox = self._member, self._inboxes[rank]
        if not member.is_taken(rank):
            try:
                return self._wait(rank, number)
            except PeerLostError:
                if not member.is_taken(rank):
                    raise
        return inbox.message(number) if inbox.count >= number else None

    def _wait(self, rank: int, number: int) -> NDArray[np.uint8]:
        member, inbox = self._member, self._inboxes[rank]
        peer = member.workers.get(rank)
        try:
            if peer is None:
                return inbox.wait(number)
            return member.persist(peer, partial(inbox.wait, number, peer=peer))
        except PeerLostError:
            if not member.has_left(rank) or member.is_taken(rank):
                raise
            while not any(inbox.count >= number for inbox in self._inboxes):
                if member.all_left():
                    raise
                time.sleep(0.02)
            raise PeerLostError(
                f"{called(member.workers[rank])} has left the job, and others call mean(), sum(), "
                "barrier() or load(): every worker makes the same calls"
            ) from None


def _their_region(worker: Peer) -> RemoteRegion:
    return worker.region(_REGION, None)


def _of_bytes(size: int) -> int:
    """Returns the kind of a message with this many bytes; `_DISAGREE` is another kind."""
    return -2 - size


def _message(kind: int, content: NDArray[Any], parts: int = 1) -> NDArray[np.uint8]:
    head = np.array([kind, parts], np.int64).view(np.uint8)
    return np.concatenate([head, content.view(np.uint8)])


def _answer(blocks: Sequence[NDArray[np.uint8] | None]) -> NDArray[np.uint8]:
    """Returns the answer for every worker; a missing block adds nothing, or zero bytes."""
    given = [block for block in blocks if block is not None]
    kinds = {int(block[:8].view(np.int64)[0]) for block in given}
    kind = kinds.pop() if len(kinds) == 1 else _DISAGREE
    if 0 <= kind <= _MOST_NUMBERS:
        total = np.zeros(kind)
        for block in given:
            total += block[_HEAD_BYTES : _HEAD_BYTES + 8 * kind].view(np.float64)
        return _message(kind, total, len(given))
    size = _of_bytes(kind)  # its own inverse
    if 0 <= size * len(blocks) <= _MOST_BYTES and kind != _DISAGREE:
        nothing = np.zeros(_HEAD_BYTES + size, np.uint8)
        each = [nothing if block is None else block for block in blocks]
        pieces = [block[_HEAD_BYTES : _HEAD_BYTES + size] for block in each]
        return _message(kind, np.concatenate(pieces), len(given))
    return _message(_DISAGREE, np.empty(0, np.uint8))


class Collective:
    """A worker's part. One thread at a time; all workers make the same calls in the same order."""

    def __init__(self, member: WorkerMember) -> None:
        self._member = member
        region = member.memory.allocate(_BLOCK + _TEXT, name=_REGION, access="w")
        self._inbox, self._reason = Mailbox(region[:_BLOCK]), region[_BLOCK:].array()
        offset = _BLOCK * member.place.rank
        server = member.servers[0]
        theirs = member.persist(server, server.region, _REGION)[offset : offset + _BLOCK]
        self._outbox = RemoteMailbox(theirs)
        self._number = 0
        if (history := member.history) is not None and history.succeeds:
            history.asked = int(theirs.array()[:8].view(np.uint64)[0])

    @property
    def number(self) -> int:
        """The number of the last message."""
        return self._number

    def go_on(self, number: int) -> None:
        """Continues after this message, which a predecessor of this process has sent."""
        self._number = number
        if self._member.history is not None:
            self._member.history.answered = number

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all workers, of any number of numbers; all give equally many.

        Raises:
            ValueError: the workers gave different amounts.
            RuntimeError: the job is over; the message says why and names who failed.
            PeerLostError: server 0 is gone.
        """
        while True:
            result: list[float] = []
            parts = set()
            for first in range(0, max(len(values), 1), _MOST_NUMBERS):
                part = np.array(values[first : first + _MOST_NUMBERS], np.float64)
                answer = self._ask(len(part), part)
                parts.add(answer.parts)
                result += answer.content.view(np.float64).tolist()
            if self._agree(parts):
                return result

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of each worker, by rank; all give equally many bytes, a dead one zeros.

        Raises:
            ValueError, RuntimeError, PeerLostError: as for `sum`.
        """
        workers = self._member.place.workers
        most = max(_MOST_BYTES // workers, 1)
        while True:
            found, parts = [b""] * workers, set()
            for first in range(0, max(len(data), 1), most):
                part = np.frombuffer(data[first : first + most], np.uint8)
                answer = self._ask(_of_bytes(len(part)), part)
                parts.add(answer.parts)
                pieces = answer.content.tobytes()
                for rank in range(workers):
                    found[rank] += pieces[rank * len(part) : (rank + 1) * len(part)]
            if self._agree(parts):
                return found

    def _agree(self, parts: set[int]) -> bool:
        """Tells whether all messages had one number of workers; else one was killed between."""
        return self._member.takeovers is None or len(parts) == 1

    def _ask(self, kind: int, content: NDArray[Any]) -> _Answer:
        """Sends a message; returns its answer."""
        self._number += 1
        history, size = self._member.history, content.nbytes
        size *= 1 if kind >= 0 else self._member.place.workers
        if history is not None:
            history.answered = self._number
            if (noted := history.take(NoteKind.SUM, number=self._number)) is not None:
                return _Answer(np.frombuffer(noted, np.uint8).copy(), 0)
        try:
            self._send_part(kind, content)
            block = self._await_answer(kind)
            failpoint("answer.come")
            answer = block[_HEAD_BYTES : _HEAD_BYTES + size].copy()
            if history is not None:
                history.note(NoteKind.SUM, answer.tobytes(), number=self._number)
                failpoint("answer.noted")
        except TensorwireError as error:
            # What the server said before it was lost is worth more than that it was lost.
            if self._inbox.count >= _FAILED:
                raise consequence(self._text()) from error
            raise
        return _Answer(answer, int(block[8:16].view(np.int64)[0]))

    def _send_part(self, kind: int, content: NDArray[Any]) -> None:
        """Sends this worker's part, unless a predecessor has sent it."""
        number, history = self._number, self._member.history
        asked = 0 if history is None else history.asked
        if self._inbox.count < number and asked < number:
            self._member.persist(
                self._member.servers[0],
                lambda: self._outbox.send(_message(kind, content), number).wait(),
            )
            failpoint("part.sent")

    def _await_answer(self, kind: int) -> NDArray[np.uint8]:
        server = self._member.servers[0]
        answer = self._member.persist(server, partial(self._inbox.wait, self._number, peer=server))
        if self._inbox.count >= _FAILED:
            raise consequence(self._text())
        if int(answer[:8].view(np.int64)[0]) != kind:
            raise ValueError(
                "the workers call mean() or sum() with different values. None stands for one "
                "number: where others give a tensor or a dict, give one like it, and weight=0"
            )
        return answer

    def _text(self) -> str:
        return self._reason.tobytes().rstrip(b"\0").decode(errors="replace")


class FollowingCollective:
    """The part of a worker without a script: it makes the calls that worker 0 makes. One thread.

    To a sum it gives zeros, so that it has no weight in a mean; to texts it gives zeros, too, like
    a worker that was killed. It introduces itself with the words of worker 0. Server 0 must be on
    this host, and its memory mapped.

    Args:
        member: this worker, not worker 0.
    """

    def __init__(self, member: WorkerMember) -> None:
        server = member.servers[0]
        region = member.memory.allocate(_BLOCK + _TEXT, name=_REGION, access="w")
        self._inbox, self._reason = Mailbox(region[:_BLOCK]), region[_BLOCK:].array()
        self._member = member
        self._theirs = member.persist(server, server.region, _REGION)

    def follow(self) -> bool:
        """Joins a call in which worker 0 waits and this one does not; says whether it did.

        Raises:
            RuntimeError: the job is over; the message says why and names who failed.
            PeerLostError: server 0 is gone.
        """
        if self._inbox.count >= _FAILED:
            raise consequence(self._reason.tobytes().rstrip(b"\0").decode(errors="replace"))
        rank = self._member.place.rank
        blocks = self._theirs.array()
        first, mine = blocks[:_BLOCK], blocks[_BLOCK * rank : _BLOCK * (rank + 1)]
        number = (
            int(mine[:8].view(np.uint64)[0]) + 1
        )  # also where a predecessor of this process was
        if int(first[:8].view(np.uint64)[0]) < number:
            return False
        message = first[mailbox_bytes(0) : mailbox_bytes(_PLACE)]
        kind = int(message[:8].view(np.int64)[0])
        size = 8 * kind if kind >= 0 else _of_bytes(kind)
        content = np.zeros(size, np.uint8)
        if number == 1:
            content[:] = message[_HEAD_BYTES : _HEAD_BYTES + size]
        outbox = RemoteMailbox(self._theirs[_BLOCK * rank : _BLOCK * (rank + 1)])
        server = self._member.servers[0]
        self._member.persist(server, lambda: outbox.send(_message(kind, content), number).wait())
        return True
