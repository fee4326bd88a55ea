"""Sums of a few numbers over all workers, through the memory of server 0.

For results and barriers, not for tensors: a worker writes its numbers behind a word and waits for a
word of its own. The sum is taken in the order of the ranks.
"""

from __future__ import annotations

import threading
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tensorwire.errors import TensorwireError
from tensorwire.memory import wait_all

from .members import ServerMember, WorkerMember

MAX_NUMBERS = 4096
_REGION = "collective"
_HEAD = 64
_BLOCK = _HEAD + 8 * (MAX_NUMBERS + 1)
_BLOCK += -_BLOCK % 64


class CollectiveServer:
    """Server 0's part: a thread that ends when the Node is closed or a worker is lost."""

    def __init__(self, member: ServerMember) -> None:
        self._member = member
        self._inbox = member.node.allocate(_BLOCK * member.count, name=_REGION, access="w")
        self._words = [self._inbox.word(_BLOCK * rank) for rank in range(member.count)]

    def is_waiting(self, rank: int) -> bool:
        """This worker is in a call that not all others have reached."""
        calls = [word.value for word in self._words]
        return calls[rank] > min(calls)

    def start(self) -> None:
        """Begins to serve; after the workers have connected."""
        threading.Thread(target=self._run, name="tensorwire-collective", daemon=True).start()

    def _run(self) -> None:
        member = self._member
        try:
            for number in count(1):
                blocks = []
                for rank in range(member.count):
                    block = self._inbox[_BLOCK * rank : _BLOCK * (rank + 1)]
                    self._words[rank].wait_until(number, peer=member.workers[rank])
                    blocks.append(block[_HEAD:].array("float64"))
                used = {int(block[0]) for block in blocks}
                size = min(used)
                total = np.zeros(size + 1)
                total[0] = size if len(used) == 1 else -1
                for numbers in blocks:
                    total[1:] += numbers[1 : size + 1]
                sent = []
                for rank in range(member.count):
                    region = member.workers[rank].region(_REGION)
                    sent.append(region[_HEAD:].write(total, signal=(region.word(0), number)))
                wait_all(sent)
        except TensorwireError:
            pass  # the main thread sees the same and tells the workers


class Collective:
    """A worker's part. One thread at a time; all workers make the same calls in the same order."""

    def __init__(self, member: WorkerMember) -> None:
        self._member = member
        self._outbox = member.node.allocate(_BLOCK, name=_REGION, access="w")
        offset = _BLOCK * member.place.rank
        self._remote = member.servers[0].region(_REGION)[offset : offset + _BLOCK]
        self._number = 0

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all workers.

        Raises:
            ValueError: too many numbers, or the workers gave different amounts.
            PeerLostError: server 0 is gone, which it also is after another worker failed.
        """
        if len(values) > MAX_NUMBERS:
            raise ValueError(f"{len(values)} numbers; at most {MAX_NUMBERS} can be combined")
        self._number += 1
        message = np.concatenate([[float(len(values))], values])
        remote, server = self._remote, self._member.servers[0]
        remote[_HEAD:].write(message, signal=(remote.word(0), self._number)).wait()
        self._outbox.word(0).wait_until(self._number, peer=server)
        result = self._outbox[_HEAD:].array("float64")
        if result[0] < 0:
            raise ValueError("the workers call mean() or barrier() with different values")
        return result[1 : len(values) + 1].copy()
