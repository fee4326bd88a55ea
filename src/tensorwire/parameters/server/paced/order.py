"""Orders the commits of a store where each worker goes at its own pace.

Server 0 sees commits as they come, one after the other. It notes for its successor what it does
with each, then tells the other servers. All servers do the same in the same order, so that a
version has the same number, and is made of the same commits, at every server. A mailbox at each
other server has places for all that can be under way: a worker makes no further commit before every
server has answered the last one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from tensorwire.errors import ClosedError, PeerLostError, TensorwireError, TimeoutError
from tensorwire.membership.identity import lost
from tensorwire.memory import Mailbox, Peer, RemoteMailbox, Transfer

from ...messages import APPLY, OPERATION_NAMES, Bytes, DisagreementError
from ...modes import Pace
from ...regions import RegionKind, order_places
from ..opening import Opening
from ..stepping.gather import Calls
from .clocks import Clocks
from .events import Event, EventKind
from .inbox import SliceInbox
from .ledger import Lead, Ledger

_LOOK_S = 0.25  # whether all are still there
_HELD_LOOK_S = 0.01  # whether a worker that holds others back waits for them


class Follower:
    """The events of a store at a server which does as server 0 says."""

    def __init__(self, opening: Opening) -> None:
        places = order_places(opening.spec)
        self._mailbox = Mailbox(opening.allocate(RegionKind.ORDER), places)
        self._first, self._opening = opening.member.servers[0], opening

    def await_event(self, number: int) -> Event:
        """Returns an event by its number; ClosedError: nothing comes any more."""
        return Event.from_bytes(wait(self._opening, self._mailbox, number, self._first))


class PauseWish(NamedTuple):
    """The wish of a worker for a pause: its rank, and the number of its request."""

    rank: int
    number: int


class Leader:
    """The side of a store that decides on events, at server 0. A thread per slice awaits commits.

    Args:
        opening: of the store.
        ledger: of this server, with what a predecessor has decided.
        inbox: the commits.
        calls: where workers wait.
    """

    def __init__(self, opening: Opening, ledger: Ledger, inbox: SliceInbox, calls: Calls) -> None:
        self._opening, self._member, self._calls = opening, opening.member, calls
        self._inbox, self._ledger = inbox, ledger
        committers = opening.committers
        self._slices: dict[int, list[int]] = {}
        for index, rank in enumerate(committers):
            self._slices.setdefault(rank, []).append(index)
        if ledger.account.lead is None:
            ledger.account.lead = Lead(
                Clocks(self._slices, opening.mode.staleness),
                adopted=dict.fromkeys(self._slices, 1),
                delays=dict.fromkeys(self._slices, 0),
            )
        self._lead = ledger.account.lead
        self._come: queue.SimpleQueue[tuple[int, int] | PauseWish | BaseException] = (
            queue.SimpleQueue()
        )
        self._stopped: dict[int, int] = {}  # operations that all make together, by slice
        places = order_places(opening.spec)
        self._others = [
            (peer, RemoteMailbox(opening.look_up(peer, RegionKind.ORDER), places))
            for _, peer in sorted(self._member.servers.items())
        ]
        # What is under way is kept; no more can be.
        self._sent = deque[Transfer](maxlen=places * len(self._others))
        self._closing = False
        for index in range(len(committers)):
            name = f"tensorwire-commits-{index}"
            threading.Thread(target=self._watch, args=(index,), name=name, daemon=True).start()

    def _watch(self, index: int) -> None:
        """Puts each commit of a slice into `_come`, until the worker leaves or the job is over."""
        number, rank = self._inbox.taken[index], self._opening.committers[index]
        try:
            try:
                while not self._closing:
                    with contextlib.suppress(TimeoutError):
                        come = self._inbox.wait(index, number + 1, _LOOK_S)
                        # Over a network a commit overtakes its gradients, and must wait for them.
                        self._inbox.await_gradients(index, _LOOK_S)
                        self._come.put((index, come))
                        number = come
            except PeerLostError as error:
                if not self._member.has_left(rank):
                    raise lost(self._member.workers[rank], error) from error
        except BaseException as error:
            self._come.put(error)  # nobody looks when the store or the Node was closed

    def ask_pause(self, rank: int, number: int) -> None:
        """Asks for a pause until the worker ends it: no version is made meanwhile. Any thread."""
        self._come.put(PauseWish(rank, number))

    @property
    def is_decided(self) -> bool:
        """True if the next event was decided, perhaps by a predecessor."""
        return self._lead.decided > self._ledger.account.events

    def decide(self, version: int) -> None:
        """Waits for the next event after `version`, and notes it; ClosedError: there is none."""
        self._lead.event = self._find(version)
        self._lead.decided += 1
        self._ledger.note()

    def send(self) -> Event:
        """Tells the others the last decision, and returns it."""
        event, number = self._lead.event, self._lead.decided
        assert event is not None
        data = event.to_bytes()
        for peer, box in self._others:
            if self._opening.durable:
                self._member.persist(peer, _send, box, data, number)
            else:
                self._sent.append(box.send(data, number))
        return event

    def _find(self, version: int) -> Event:
        lead = self._lead
        while True:
            for rank in lead.held:
                self._look()
                if lead.clocks.may_go(rank):
                    lead.held.remove(rank)
                    self._note(rank, version)
                    return Event(EventKind.ANSWERED, rank)
            if len(self._stopped) == len(self._opening.committers):
                self._stopped.clear()
                lead.adopted = dict.fromkeys(self._slices, version + 1)
                return Event(EventKind.TOGETHER)
            try:
                come = self._come.get(timeout=_HELD_LOOK_S if lead.held else _LOOK_S)
            except queue.Empty:
                check_open(self._opening)
                self._check_stopped()
                continue
            if isinstance(come, BaseException):
                raise come
            if isinstance(come, PauseWish):
                if come.number > lead.paused.get(come.rank, 0):
                    lead.paused[come.rank] = come.number
                    return Event(EventKind.PAUSED, *come)
                continue  # a predecessor has decided on it
            index, number = come
            if number <= self._inbox.taken[index]:
                continue  # a predecessor has decided on it
            operation = self._inbox.read(index).operation
            if operation == APPLY:
                self._step(index, number, version)
                return Event(EventKind.APPLIED, index)
            self._stopped[index] = operation

    def _step(self, index: int, number: int, version: int) -> None:
        """Decides that a slice's commit makes the version after `version`."""
        rank, lead = self._opening.committers[index], self._lead
        mine = self._slices[rank]
        done = sum(self._inbox.taken[each] == number for each in mine)
        delay = version - lead.adopted[rank] - done
        lead.delays[rank] = max(lead.delays[rank], delay)
        if done == len(mine) - 1:  # all others are applied
            self._look()
            lead.clocks.step(rank)
            lead.held.append(rank)

    def _look(self) -> None:
        """Finds workers that block no other: they left, or wait for all others."""
        member, calls = self._member, self._calls
        stopped = {self._opening.committers[index] for index in self._stopped}
        is_new = self._lead.clocks.excuse(
            [
                rank
                for rank in self._slices
                if rank in stopped or member.has_left(rank) or calls.is_summing(rank)
            ]
        )
        if is_new:
            self._ledger.note()  # a successor cannot see it after the worker has gone on

    def _note(self, rank: int, version: int) -> None:
        lead = self._lead
        lead.adopted[rank] = version
        clock = lead.clocks.now[self._slices[rank][0]]
        lead.pace = Pace(version, clock, lead.clocks.behind(rank), lead.delays[rank])
        lead.delays[rank] = 0
        lead.paces.add(lead.pace)

    @property
    def pace(self) -> Pace | None:
        """The pace of the version that a worker is about to get."""
        return self._lead.pace

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
                f"worker {summing[0]} calls mean(), sum(), barrier() or load() while worker "
                f"{min(waiting)} calls {name}"
            )

    def described(self) -> Mapping[str, object]:
        """Returns the numbers for `tensorwire status`."""
        return {"clocks": list(self._lead.clocks.now), **self._lead.paces.described()}

    def close(self) -> None:
        """Ends its threads."""
        self._closing = True


def check_open(opening: Opening) -> None:
    """Raises ClosedError if no worker waits for the store any more."""
    if opening.closing.is_set() or opening.member.all_left():
        raise ClosedError("all workers have left")


def wait(opening: Opening, mailbox: Mailbox, number: int, peer: Peer) -> Bytes:
    """Returns a message of a peer; ClosedError if no worker waits for the store any more."""
    while True:
        try:
            return opening.member.persist(peer, partial(mailbox.wait, number, _LOOK_S, peer=peer))
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


def _send(box: RemoteMailbox, data: Bytes, number: int) -> None:
    box.send(data, number).wait()
