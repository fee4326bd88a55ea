"""Sums of a few numbers over all workers, through the memory of server 0.

For results and barriers, not for tensors: a worker writes its numbers behind a word and waits for a
word of its own. The sum is taken in the order of the ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import PeerLostError, TensorwireError, consequence
from tensorwire.memory import RemoteRegion, Transfer, wait_all

from .members import ServerMember, WorkerMember

MAX_NUMBERS = 4096
_REGION = "collective"
_HEAD = 64
_BLOCK = _HEAD + 8 * (MAX_NUMBERS + 1)
_BLOCK += -_BLOCK % 64
_TEXT = 4096  # bytes behind a worker's block: why no result will follow
_FAILED = 1 << 62  # value of a worker's word then


class CollectiveServer:
    """Server 0's part: a thread that ends when the Node is closed or a worker is lost."""

    def __init__(self, member: ServerMember) -> None:
        self._member = member
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._inbox = member.node.allocate(_BLOCK * member.count, name=_REGION, access="w")
        self._outboxes: dict[int, RemoteRegion] = {}
        self._sending = threading.Lock()  # a result must not follow the text
        self._failed = False
        self._words = [self._inbox.word(_BLOCK * rank) for rank in range(member.count)]
        self._thread = threading.Thread(target=self._run, name="tensorwire-collective", daemon=True)

    def is_waiting(self, rank: int) -> bool:
        """This worker is in a call that not all others have reached."""
        calls = [word.value for word in self._words]
        return calls[rank] > min(calls)

    def start(self, fail: Callable[[BaseException], None]) -> None:
        """Begins to serve; after the workers have connected. `fail` is told what ends it."""
        self._fail = fail
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits until its thread has ended, which it does when the Node is closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        member = self._member
        try:
            for number in count(1):
                blocks = []
                for rank in range(member.count):
                    self._wait(rank, number)
                    start = _BLOCK * rank + _HEAD
                    blocks.append(self._inbox[start : start + _BLOCK - _HEAD].array("float64"))
                for rank, peer in member.workers.items():
                    if rank not in self._outboxes:  # it is there: its owner has called
                        self._outboxes[rank] = peer.region(_REGION, None)
                total = _sum(blocks)
                with self._sending:
                    if self._failed:
                        return
                    sent = [_send(region, total, number) for region in self._outboxes.values()]
                wait_all(sent)
        except BaseException as error:
            if not member.node.closed and not self._all_left():
                self._fail(error)

    def tell(self, text: str) -> None:
        """Ends every worker's present and future calls with an error; by the main thread."""
        with self._sending:
            self._failed = True
        message = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
        for rank, peer in self._member.workers.items():
            try:
                region = self._outboxes.get(rank) or peer.region(_REGION, 5.0)
                region[_BLOCK:].write(message, signal=(region.word(0), _FAILED)).wait(2.0)
            except (LookupError, TensorwireError):
                continue  # it is the one that is lost, or has not called yet

    def _all_left(self) -> bool:
        return all(self._member.has_left(rank) for rank in range(self._member.count))

    def _wait(self, rank: int, number: int) -> None:
        member = self._member
        try:
            self._words[rank].wait_until(number, peer=member.workers[rank])
        except PeerLostError:
            if not member.has_left(rank):
                raise
            while not any(word.value >= number for word in self._words):
                if self._all_left():
                    raise
                time.sleep(0.02)
            name = member.name_of(member.workers[rank])
            raise PeerLostError(
                f"{name} has left the job, and others call mean() or barrier(): every worker "
                "makes the same calls"
            ) from None


def _send(region: RemoteRegion, data: NDArray[Any], value: int) -> Transfer:
    return region[_HEAD:].write(data, signal=(region.word(0), value))


def _sum(blocks: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """What goes back: how many numbers, then the sums; -1 where the workers disagree."""
    sizes = {int(block[0]) if 0 <= block[0] <= MAX_NUMBERS else -1 for block in blocks}
    (size,) = sizes if len(sizes) == 1 else (-1,)
    total = np.zeros(max(size, 0) + 1)
    total[0] = size
    if size > 0:
        for numbers in blocks:
            total[1:] += numbers[1 : size + 1]
    return total


class Collective:
    """A worker's part. One thread at a time; all workers make the same calls in the same order."""

    def __init__(self, member: WorkerMember) -> None:
        self._member = member
        self._outbox = member.node.allocate(_BLOCK + _TEXT, name=_REGION, access="w")
        offset = _BLOCK * member.place.rank
        self._remote = member.servers[0].region(_REGION)[offset : offset + _BLOCK]
        self._number = 0

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all workers.

        Raises:
            ValueError: too many numbers, or the workers gave different amounts.
            RuntimeError: the job is over; the message says why and names who failed.
            PeerLostError: server 0 is gone.
        """
        if len(values) > MAX_NUMBERS:
            raise ValueError(f"{len(values)} numbers; at most {MAX_NUMBERS} can be combined")
        self._number += 1
        message = np.concatenate([[float(len(values))], values])
        remote, word = self._remote, self._outbox.word(0)
        try:
            remote[_HEAD:].write(message, signal=(remote.word(0), self._number)).wait()
            word.wait_until(self._number, peer=self._member.servers[0])
        except TensorwireError as error:
            # What the server said before it was lost is worth more than that it was lost.
            if word.value >= _FAILED:
                raise consequence(self._text()) from error
            raise
        if word.value >= _FAILED:
            raise consequence(self._text())
        result = self._outbox[_HEAD:_BLOCK].array("float64")
        if result[0] < 0:
            raise ValueError(
                "the workers call mean() or barrier() with different values. None stands for one "
                "number: where others give a tensor or a dict, give one like it, and weight=0"
            )
        return result[1 : len(values) + 1].copy()

    def _text(self) -> str:
        data = self._outbox[_BLOCK:].array().tobytes()
        return data.rstrip(b"\0").decode(errors="replace")
