"""Opens a server's door for readers: a Node whose secret permits no writing.

Its peers reach memory at this Node and nothing of the job's. A thread of its own answers them and
sleeps while there are none. A reader's request lies in memory that it leases here, which goes with
its connection; answers are put there, too, so that the server waits for no reader.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tensorwire.durability.descriptor_store import DescriptorStore
from tensorwire.durability.durable_memory import open_node
from tensorwire.errors import ClosedError, StaleHandleError, TensorwireError, TimeoutError
from tensorwire.jobs.secret import job_secret, reading_secret
from tensorwire.membership.server import ServerMember
from tensorwire.membership.status import StatusRegion
from tensorwire.memory import Mailbox, Region

from ...reading import ANSWERS, ASKS, BELL, LEASE_BYTES, LOST_S, Ask, AskKind, lease_name
from ...snapshot import Reply, RequestOutcome
from .budget import CopyBudget
from .lending import Lending
from .sealed import SealedMemory

DOOR = "door"
"""The region of a server's Node with the address of its door, for other servers."""

_LISTENER = "door listener"
_ADDRESS_BYTES = 512
_MOST_READERS = 128
_LOOK_S = 0.25
_WORD_BYTES = 64  # of a mailbox, before its message
_HOSTILE_BELL = 1 << 62  # above that it could not be waited for
_MOST_BELL = (1 << 64) - 1
_REST, _MOST_REST_S = 3.0, 0.005  # after a look, of its time: others need the interpreter, too


class ReaderLease:
    """The lease of a reader: its requests, and its sign of life."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._word = region.word(0)
        self._asks, self._answers = Mailbox(region[ASKS]), region[ANSWERS]
        self._beat, self._since = self._word.value, time.monotonic()
        self._answered = 0
        self.asked_s = 0.0  # when the request came that waits
        self._pending: Ask | None = None

    @property
    def has_ended(self) -> bool:
        """True if its reader has gone, or has shown no life for LOST_S."""
        if self.region.freed:
            return True
        if (beat := self._word.value) != self._beat:
            self._beat, self._since = beat, time.monotonic()
        return time.monotonic() - self._since > LOST_S

    def serve(self, lendings: Mapping[int, Lending]) -> None:
        """Answers the reader's request, if there is one and it can be done now."""
        number = self._asks.count
        if number != self._answered and self._pending is None:
            self._answered, self.asked_s = number, time.monotonic()
            try:
                self._pending = Ask.from_bytes(self._asks.message(number))
            except ValueError:
                self._answer(Reply(RequestOutcome.REFUSED, "the request is not valid"))
        if (ask := self._pending) is None:
            return
        lending, unheld = lendings.get(ask.store), list[SealedMemory]()
        if lending is None:
            text = f"the job has no store {ask.store}"
            answer: Reply | None = Reply(RequestOutcome.REFUSED, text)
        elif ask.kind == AskKind.FREE:
            unheld = lending.release(self, ask)
            answer = Reply(RequestOutcome.DONE)
        else:
            answer = lending.ask(self, ask)
        try:
            if answer is not None:
                self._pending = None
                self._answer(answer)
        finally:
            for memory in unheld:  # which takes long: the reader does not wait for it
                memory.free()

    def _answer(self, reply: Reply) -> None:
        # Under the request's number, whatever the reader has written to the word.
        data = reply.to_bytes()
        self._answers[_WORD_BYTES : _WORD_BYTES + len(data)].array()[:] = data
        self._answers.word(0).set(self._answered)


class ReaderDoor:
    """The door of a server for readers. Its thread ends when it is closed.

    Args:
        member: this server; its Node gets a region with the door's address.
        store: keeps its listening socket for a successor, where members are replaced.
        options: `listen` and `advertise` of the server's Node.

    Attributes:
        address: for readers.
        secret: of readers, see `reading_secret`.
        node: the door's.
        budget: for copies.

    Raises:
        ValueError, OSError, UnavailableError, BusyError: it cannot be opened.
    """

    def __init__(
        self, member: ServerMember, store: DescriptorStore | None, **options: str | None
    ) -> None:
        self._member = member
        self.secret = reading_secret(job_secret())
        host = str(options["listen"]).rpartition(":")[0]
        self.node = open_node(
            f"door-{member.index}",
            store,
            key=_LISTENER,
            listen=f"{host}:0",
            advertise=options["advertise"],
            secret=self.secret.encode() or None,
            transports=[each for each in member.node.transports if each != "rdma"] or ["tcp"],
            quota_bytes=_MOST_READERS * LEASE_BYTES,
            max_peers=_MOST_READERS,
        )
        self.address = self.node.address
        self._status = StatusRegion(self.node)
        bell = self.node.allocate(64, name=BELL, access="rw")
        self._bell, self._rings = bell.word(0), bell.array("uint64")
        told = member.node.allocate(_ADDRESS_BYTES, name=DOOR, access="r")
        told.array()[: len(self.address)] = bytearray(self.address.encode())
        self.budget = CopyBudget()
        self._others: dict[int, str] = {}
        self._lendings: dict[int, Lending] = {}
        self._leases: dict[str, ReaderLease] = {}
        self._thread = threading.Thread(target=self._run, name="tensorwire-door", daemon=True)
        self._thread.start()

    def add(self, lending: Lending) -> None:
        """Answers readers of a store from now on."""
        self._lendings[lending.store] = lending

    def remove(self, lending: Lending) -> None:
        """Stops answering readers of a store; the lending can be closed."""
        self._lendings.pop(lending.store, None)

    def ring(self) -> None:
        """Makes the thread look at requests; does nothing without readers."""
        if self._leases:
            with contextlib.suppress(ClosedError, StaleHandleError):
                # Readers write this word: it may be at its end.
                self._bell.set(min(self._bell.value + 1, _MOST_BELL))

    def close(self) -> None:
        """Closes the Node, so that readers see that the job is over."""
        self.node.close()
        self._thread.join()

    def tell(self, stores: Callable[[], list[Mapping[str, Any]]]) -> None:
        """Writes the job's description for readers, if there are any. The server's main thread."""
        with contextlib.suppress(ClosedError):
            if peers := self.node.peers:
                self._tell([peer.name for peer in peers], stores())

    def _tell(self, readers: list[str], stores: list[Mapping[str, Any]]) -> None:
        doors = {self._member.index: self.address, **self._find_others()}
        told = {
            "readers": readers,
            "doors": [doors.get(index, "") for index in range(len(self._member.servers) + 1)],
            "snapshots": {number: each.held() for number, each in list(self._lendings.items())},
            **self._member.described(stores),
        }
        self._status.write(told)

    def _find_others(self) -> Mapping[int, str]:
        """Returns the doors of the other servers, as far as they are known by now."""
        for index, peer in self._member.servers.items():
            if index not in self._others and not peer.lost:
                with contextlib.suppress(LookupError, TensorwireError):
                    region = peer.region(DOOR, 1.0)
                    data = bytearray(region.size_bytes)
                    region.read(data).wait(1.0)
                    self._others[index] = data.rstrip(b"\0").decode()
        return self._others

    def _run(self) -> None:
        try:
            while True:
                if not self.node.peers:
                    self._forget_all()
                    self.node.accept()
                if (seen := self._bell.value) >= _HOSTILE_BELL:
                    self._rings[0] = seen = 0  # a ring meanwhile is seen by this look
                began = time.monotonic()
                self._look()
                time.sleep(min(_REST * (time.monotonic() - began), _MOST_REST_S))
                look_s = min(self.budget.opens_in_s() or _LOOK_S, _LOOK_S)
                with contextlib.suppress(TimeoutError):
                    self._bell.wait_until(seen + 1, look_s)
        except (ClosedError, StaleHandleError):
            self._forget_all()
        except BaseException:
            # The job goes on without a door.
            traceback.print_exc()
            sys.stderr.write("tensorwire: the door for readers is closed after this error\n")
            self._forget_all()
            self.node.close()

    def _look(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                self.node.accept(timeout_s=0)
        for peer in self.node.peers:
            if peer.name not in self._leases:
                with contextlib.suppress(LookupError, StaleHandleError):  # it may go meanwhile
                    region = self.node.region(lease_name(peer.name))
                    if region.size_bytes >= LEASE_BYTES:
                        self._leases[peer.name] = ReaderLease(region)
        lendings = dict(self._lendings)
        # The reader that has waited longest comes first, not one that asks all the time.
        for name, lease in sorted(self._leases.items(), key=lambda each: each[1].asked_s):
            try:
                ended = lease.has_ended
                if not ended:
                    lease.serve(lendings)
            except (ClosedError, StaleHandleError):
                ended = True
            if ended:
                self._forget(name)

    def _forget(self, name: str) -> None:
        lease = self._leases.pop(name)
        for lending in list(self._lendings.values()):
            for memory in lending.release(lease):
                memory.free()
        if not lease.region.freed:
            with contextlib.suppress(ClosedError):
                lease.region.free()

    def _forget_all(self) -> None:
        for name in list(self._leases):
            self._forget(name)
        for lending in list(self._lendings.values()):
            lending.idle()


def open_door(
    member: ServerMember, store: DescriptorStore | None, **options: str | None
) -> ReaderDoor | None:
    """Opens the door of a server, or prints why there is none: the job runs without it."""
    try:
        return ReaderDoor(member, store, **options)
    except (TensorwireError, ValueError, OSError) as error:
        sys.stderr.write(f"server {member.index}: nobody can read the job as files: {error}\n")
        return None
