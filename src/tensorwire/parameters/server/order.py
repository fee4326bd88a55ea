"""In which order a store's commits are applied, where each worker goes at its own pace.

Server 0 sees commits as they come, one after the other, and tells the other servers what it does
with each. All servers do the same in the same order, so that a version has the same number, and is
made of the same commits, at every server. A mailbox at each other server has places for all that
can be under way: a worker makes no further commit before every server has answered the last one.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from tensorwire.errors import ClosedError, PeerLostError, TensorwireError, TimeoutError
from tensorwire.membership import lost
from tensorwire.memory import Mailbox, Peer, RemoteMailbox, Transfer

from ..messages import APPLY, OPERATION_NAMES, PAUSE, Bytes, DisagreementError
from ..modes import Mode, Pace, Paces
from ..regions import RegionKind, order_places
from .clocks import Clocks
from .gather import Calls
from .inbox import SliceInbox
from .opening import Opening

_EVENT = struct.Struct("<qq")
_LOOK_S = 0.25  # whether all are still there
_HELD_LOOK_S = 0.01  # whether a worker that holds others back waits for them


class EventKind(IntEnum):
    """What all servers do next."""

    APPLIED = 1  # a slice's commit makes the next version
    ANSWERED = 2  # a worker gets the version that is in place
    TOGETHER = 3  # all slices have asked for the same, which makes the next version
    PAUSED = 4  # nothing, until the worker of a slice says that it goes on


class Event(NamedTuple):
    """What all servers do next, with a slice, or the rank of a worker where it is ANSWERED."""

    kind: EventKind
    which: int

    def to_bytes(self) -> Bytes:
        """As it travels."""
        return np.frombuffer(_EVENT.pack(*self), np.uint8)

    @staticmethod
    def from_bytes(data: Bytes) -> Event:
        """Copies it out of memory."""
        kind, index = _EVENT.unpack(data[: _EVENT.size].tobytes())
        return Event(EventKind(kind), index)


class Sequencer(Protocol):
    """Gives the events of a store at one server."""

    def next(self, version: int) -> Event:
        """Returns what comes next, when `version` is in place; ClosedError: nothing does."""

    def pace(self, rank: int) -> Pace | None:
        """What is told of the version that a worker is about to get; None: another server knows."""

    def described(self) -> Mapping[str, object]:
        """For `tensorwire status`, what this server knows."""

    def close(self) -> None:
        """Ends its threads."""


class Follower:
    """See `Sequencer`: that of a server which does as server 0 says."""

    def __init__(self, opening: Opening) -> None:
        places = order_places(opening.spec)
        self._mailbox = Mailbox(opening.allocate(RegionKind.ORDER), places)
        self._first, self._opening, self._number = opening.member.servers[0], opening, 0

    def next(self, version: int) -> Event:
        """See `Sequencer`."""
        self._number += 1
        data = wait(self._opening, self._mailbox, self._number, self._first)
        return Event.from_bytes(data)

    def pace(self, rank: int) -> Pace | None:
        """See `Sequencer`."""
        return None

    def described(self) -> Mapping[str, object]:
        """See `Sequencer`."""
        return {}

    def close(self) -> None:
        """See `Sequencer`."""


class Leader:
    """See `Sequencer`: server 0's. A thread for each slice waits for its commits.

    Args:
        opening: of the store.
        mode: how far workers may be ahead.
        inbox: the commits.
        calls: where workers wait.
    """

    def __init__(self, opening: Opening, mode: Mode, inbox: SliceInbox, calls: Calls) -> None:
        self._opening, self._member, self._calls = opening, opening.member, calls
        self._inbox, self._bounded = inbox, mode.staleness is not None
        committers = opening.committers
        self._slices: dict[int, list[int]] = {}
        for index, rank in enumerate(committers):
            self._slices.setdefault(rank, []).append(index)
        self._clocks = Clocks(self._slices, mode.staleness)
        self._paces = Paces()
        self._come: queue.SimpleQueue[tuple[int, int] | BaseException] = queue.SimpleQueue()
        self._stopped: dict[int, int] = {}  # operations that all make together, by slice
        self._held: list[int] = []  # workers that wait for an answer
        self._adopted = dict.fromkeys(self._slices, 1)  # versions that workers compute with
        self._delays = dict.fromkeys(self._slices, 0)
        self._others = [
            RemoteMailbox(opening.look_up(peer, RegionKind.ORDER), order_places(opening.spec))
            for _, peer in sorted(self._member.servers.items())
        ]
        # What is under way is kept; no more can be.
        most = order_places(opening.spec) * len(self._others)
        self._sent = deque[Transfer](maxlen=most)
        self._number = 0
        self._closing = False
        for index in range(len(committers)):
            name = f"tensorwire-commits-{index}"
            threading.Thread(target=self._watch, args=(index,), name=name, daemon=True).start()

    def _watch(self, index: int) -> None:
        """Tells of each commit of a slice, until the worker leaves or the job is over."""
        number, rank = 1, self._opening.committers[index]
        try:
            peer = self._member.workers[rank]
            try:
                while not self._closing:
                    with contextlib.suppress(TimeoutError):
                        number = self._inbox.wait(index, number + 1, _LOOK_S)
                        self._come.put((index, number))
            except PeerLostError as error:
                if not self._member.has_left(rank):
                    raise lost(peer, error) from error
        except BaseException as error:
            self._come.put(error)  # nobody looks when the store or the Node was closed

    def next(self, version: int) -> Event:
        """See `Sequencer`."""
        event = self._find(version)
        self._number += 1
        data = event.to_bytes()
        self._sent.extend(box.send(data, self._number) for box in self._others)
        return event

    def _find(self, version: int) -> Event:
        while True:
            for rank in self._held:
                self._look()
                if self._clocks.may_go(rank):
                    self._held.remove(rank)
                    self._note(rank, version)
                    return Event(EventKind.ANSWERED, rank)
            if len(self._stopped) == len(self._opening.committers):
                self._stopped.clear()
                self._adopted = dict.fromkeys(self._slices, version + 1)
                return Event(EventKind.TOGETHER, 0)
            try:
                come = self._come.get(timeout=_HELD_LOOK_S if self._held else _LOOK_S)
            except queue.Empty:
                check_open(self._opening)
                self._check_stopped()
                continue
            if isinstance(come, BaseException):
                raise come
            index, number = come
            if number <= self._inbox.taken[index]:
                continue  # that a worker goes on was looked for
            operation = self._inbox.read(index).operation
            if operation == PAUSE:
                return Event(EventKind.PAUSED, index)
            if operation == APPLY:
                self._step(index, number, version)
                return Event(EventKind.APPLIED, index)
            self._stopped[index] = operation

    def _step(self, index: int, number: int, version: int) -> None:
        """A slice's commit is about to make the version behind `version`."""
        rank = self._opening.committers[index]
        mine = self._slices[rank]
        done = sum(self._inbox.taken[each] == number for each in mine)
        delay = version - self._adopted[rank] - done
        self._delays[rank] = max(self._delays[rank], delay)
        if done == len(mine) - 1:  # all others are applied
            self._look()
            self._clocks.step(rank)
            self._held.append(rank)

    def _look(self) -> None:
        """Finds who holds nobody back: who has left, or waits for all others."""
        member, calls = self._member, self._calls
        stopped = {self._opening.committers[index] for index in self._stopped}
        self._clocks.excuse(
            [
                rank
                for rank in self._slices
                if rank in stopped or member.has_left(rank) or calls.is_summing(rank)
            ]
        )

    def _note(self, rank: int, version: int) -> None:
        self._adopted[rank] = version
        clock = self._clocks.now[self._slices[rank][0]]
        self._pace = Pace(version, clock, self._clocks.behind(rank), self._delays[rank])
        self._delays[rank] = 0
        self._paces.add(self._pace)

    def pace(self, rank: int) -> Pace | None:
        """See `Sequencer`."""
        return self._pace

    def _check_stopped(self) -> None:
        """Raises if workers wait for one that will never ask for the same."""
        if not self._stopped:
            return
        index, operation = next(iter(self._stopped.items()))
        name = OPERATION_NAMES[operation]
        waiting = {self._opening.committers[each] for each in self._stopped}
        for rank in self._slices.keys() - waiting:
            if self._member.has_left(rank):
                raise PeerLostError(
                    f"worker {rank} has left the job, and worker {self._opening.committers[index]} "
                    f"calls {name}, which every worker calls"
                )
        summing = [r for r in self._slices.keys() - waiting if self._calls.is_summing(r)]
        if summing and len(summing) + len(waiting) == len(self._slices):
            raise DisagreementError(
                f"worker {summing[0]} calls mean() or barrier() while worker {min(waiting)} "
                f"calls {name}"
            )

    def described(self) -> Mapping[str, object]:
        """See `Sequencer`."""
        return {"clocks": list(self._clocks.now), **self._paces.described()}

    def close(self) -> None:
        """See `Sequencer`."""
        self._closing = True


def check_open(opening: Opening) -> None:
    """Raises ClosedError if nobody waits for the store any more."""
    if opening.closing.is_set() or opening.member.all_left():
        raise ClosedError("all workers have left")


def wait(opening: Opening, mailbox: Mailbox, number: int, peer: Peer) -> Bytes:
    """A message of a peer; ClosedError if nobody waits for it any more."""
    while True:
        try:
            return mailbox.wait(number, _LOOK_S, peer=peer)
        except TimeoutError:
            check_open(opening)
        except PeerLostError as error:
            for _ in range(200):  # its last worker may have left, and then all are about to end
                check_open(opening)
                time.sleep(0.01)
            raise lost(peer, error) from error
        except TensorwireError:
            check_open(opening)
            raise
