"""Brings versions to workers that go at their own pace, each into its own memory.

Over a network the workers are served in turns: were all of them sent to at once, their links would
share this server's, and all would get the version at the time of the last. So they would begin the
next step together, and want the link together again. There are as many turns at a time as servers,
because all servers send to the same worker, whose link they share. A worker that takes much longer
than others, since it is stopped or on a slow link, does not hold them up.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from tensorwire.errors import TensorwireError, TimeoutError
from tensorwire.memory import RemoteRegion, Transfer

from ...messages import Bytes
from ...regions import RegionKind
from ..opening import Opening

_SLOWER = 2.0  # than the quickest so far: others do not wait for it any more
_LEAST_S = 0.002  # that they wait
_FIRST_S = 0.2  # before any delivery was timed


class Deliveries:
    """The deliveries of a store, see the module. One thread uses it, beside its own.

    Args:
        opening: of the store.
        master: the parameters of the share; they change again when a call has returned.
        answer: tells a worker, by its rank, a numbered message after transfers.
        fail: is told of errors that must not happen.
    """

    def __init__(
        self,
        opening: Opening,
        master: Bytes,
        answer: Callable[[int, int, bytes, list[Transfer]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._opening, share = opening, opening.regions.share
        self._master, self._start = master[: share.size_bytes], share.start
        self._answer, self._fail = answer, fail
        self._turns = len(opening.member.servers) + 1
        self._views: dict[int, RemoteRegion] = {}
        self._copies: dict[int, Bytes] = {}  # what is under way to workers over a network
        self._wanted: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sent: dict[int, list[Transfer]] = {}  # by rank, until it asks again
        self._under_way: deque[tuple[Transfer, float]] = deque()  # with when it began
        self._quickest_s = _FIRST_S

    def bring(self, rank: int) -> bool:
        """Copies the share into a worker's memory if that is mapped, else into a buffer for `send`.

        The worker was told of its last delivery. If it is killed meanwhile, the copy is made again
        for its successor, which has the same memory.

        Returns:
            Whether it is still to be sent: `send`.
        """
        member, master = self._opening.member, self._master
        if not master.size or rank not in member.workers:
            return False
        if rank in self._opening.mapped:
            member.persist(member.workers[rank], self._copy, rank)
            return False
        self._copies.setdefault(rank, np.empty_like(master))[:] = master
        return True

    def send(self, rank: int, number: int, data: bytes) -> None:
        """Sends the copied values when it is the worker's turn, and then the message."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="tensorwire-deliveries", daemon=True
            )
            self._thread.start()
        self._wanted.put((rank, number, data))

    def close(self) -> None:
        """Ends the thread, after it has sent all wanted deliveries."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            rank, number, data = wanted
            try:
                while len(self._under_way) >= self._turns:
                    self._await_turn(*self._under_way.popleft())
                began = time.perf_counter()
                transfers = self._sent[rank] = [self._view(rank).write(self._copies[rank])]
                self._under_way.append((transfers[0], began))
                self._answer(rank, number, data, transfers)
            except TensorwireError as error:
                peer = self._opening.member.workers.get(rank)
                if peer is not None and not peer.lost:  # else others see that it is gone
                    self._fail(error)
            except BaseException as error:
                self._fail(error)
                return

    def _await_turn(self, transfer: Transfer, began: float) -> None:
        limit_s = max(_SLOWER * self._quickest_s, _LEAST_S)
        with contextlib.suppress(TensorwireError):  # it is too late, or the worker is gone
            try:
                transfer.wait(max(began + limit_s - time.perf_counter(), 0.0))
            except TimeoutError:
                return
            self._quickest_s = min(self._quickest_s, time.perf_counter() - began)

    def _copy(self, rank: int) -> None:
        self._view(rank).write(self._master).wait()

    def _view(self, rank: int) -> RemoteRegion:
        if rank not in self._views:
            name = self._opening.regions.name(RegionKind.VIEW)
            view = self._opening.member.workers[rank].region(name)
            self._views[rank] = view[self._start : self._start + self._master.size]
        return self._views[rank]
