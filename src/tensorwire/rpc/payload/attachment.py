"""Joins a client and a server: a Node at each end, connected to each other alone.

An attachment belongs to one channel and one server. The client asks for it over gRPC itself
(`attach/registry.py`) and gets a secret that only the two have; both then know each other's memory.
It ends with the peer.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from tensorwire.errors import TensorwireError, TimeoutError, UnavailableError
from tensorwire.memory import Node, Peer, Region, RemoteRegion
from tensorwire.memory.core import core_of

from .. import logs
from .envelope import mark
from .inbox import Inbox
from .janitor import JANITOR, Watched
from .leases import SLOTS, Lease, LeasePool
from .limits import Limits
from .push import BOARD_BYTES, Pushing
from .route import threshold
from .window import Window

CALLS = 1024
"""The most calls of an attachment at a time that may have payload beside them."""
LAST_GENERATION = (1 << 32) - 1
"""The highest generation of a call's number: it travels in 4 bytes."""

_RECENT = 8
_GRACE_S = 2.0
_FREES_IDLE_EVERY_S = 1.0
_TAKEN = 8 * (1 + SLOTS + CALLS)
_PUSHED = _TAKEN + 8 * (1 + SLOTS)
_BOARD_BYTES = _PUSHED + BOARD_BYTES
_BOARD = "board"

ATTACHMENTS: weakref.WeakValueDictionary[bytes, RpcAttachment] = weakref.WeakValueDictionary()
"""All attachments of this process, by their ids, for code that sees an envelope pass."""


_pid = os.getpid()
"""The id of this process; asking the system takes longer than the rest of a look at `lost`."""


def _forked() -> None:
    global _pid
    _pid = os.getpid()


os.register_at_fork(after_in_child=_forked)


class CallCarrier(Protocol):
    """An end of a line of `runtime`, which carries calls besides grpcio."""

    def close(self, *, lost: bool) -> None:
        """Ends the line, because the other end is gone (lost) or this one is closed."""


class SharedNumber:
    """The number of all calls of a client that send nothing beside their requests.

    So their mark is the same for each, which HTTP/2 compresses to a byte. When one of them fails,
    the server may have sent a response that is never read. Other calls then begin with a new
    number, and the old one ends with the last of its calls. Any thread may use it, without a lock.

    Attributes:
        attachment: of the calls.
        mark: of the calls, as `envelope.mark` makes it.
        spoiled: no more calls begin with it.
    """

    __slots__ = ("_active", "_end", "_number", "attachment", "mark", "spoiled")

    def __init__(self, attachment: RpcAttachment, number: tuple[int, int]) -> None:
        self.attachment = attachment
        self.mark = mark(attachment.id, *number)
        self.spoiled = False
        self._number = number
        self._active: list[None] = []  # one for each call: appending and popping are atomic
        self._end = [None]  # popped by the thread that ends the number

    def begin(self) -> bool:
        """Begins a call; False if it has to take another number."""
        self._active.append(None)
        if not self.spoiled:
            return True
        self.end(True)
        return False

    def end(self, ok: bool) -> None:
        """Ends a call.

        Args:
            ok: the call has ended well, so its response was seen.
        """
        if not ok:
            self.spoiled = True
        self._active.pop()
        if not self.spoiled or self._active:
            return
        try:
            self._end.pop()
        except IndexError:
            return  # another thread ends it
        self.attachment.end_call(self._number, (), complete=False)


def make_board(node: Node) -> Region:
    """Allocates the words that the other end raises.

    They are for leases, calls, messages taken, and payload that it pushes.
    """
    return node.allocate(_BOARD_BYTES, name=_BOARD)


class RpcAttachment:
    """One end of an attachment. Any thread may use it.

    Attributes:
        id, limits, peer: as given.
        transport: by which payload travels.
        threshold_bytes: the least payload of grpcio's calls that travels beside its message.
        runtime_threshold_bytes: the least payload of the runtime's calls that does.
        maps: each end has the memory of the other one mapped.
        leases_here: the memory that the other end writes into.
        leases_there: the memory that this end writes into.
        handlers: for the server, the handlers that serve calls of it.
        recent: the holdings of the latest messages, see `look_at_recent`. A list, as copying it
            is atomic.
        runtime: carries calls besides grpcio; None: only grpcio does.
        pushing: for calls of the runtime; None: there is no runtime.
        sent_bytes, taken_bytes: as given.

    Args:
        id: 16 random bytes that only the two ends know.
        node: this end; closed with the attachment.
        board: of `make_board`.
        peer: the other end.
        limits: of this end.
        lent_bytes: the memory that the other end lets this one write into.
        is_client: the end that numbers the calls.
        sent_bytes: the longest message that may travel beside from here; -1 for no limit.
        taken_bytes: the longest one that is taken here; -1 for no limit.

    Raises:
        TensorwireError: the other end is gone, or has other words.
    """

    def __init__(
        self,
        id: bytes,
        node: Node,
        board: Region,
        peer: Peer,
        limits: Limits,
        *,
        lent_bytes: int,
        is_client: bool,
        sent_bytes: int = -1,
        taken_bytes: int = -1,
    ) -> None:
        self.id = id
        self.sent_bytes = sent_bytes
        self.taken_bytes = taken_bytes
        self.limits = limits
        self.peer = peer
        self._core = core_of(peer)
        self.transport = peer.path.transport
        own = limits.threshold_bytes
        self.maps = self.transport == "shm"
        self.threshold_bytes = threshold(self.transport, own, by_runtime=False)
        self.runtime_threshold_bytes = threshold(self.transport, own, by_runtime=True)
        self._node = node
        self._board = board
        self._is_client = is_client
        self._pid = _pid
        self._other_board: RemoteRegion = peer.wait_region(_BOARD, timeout_s=5)
        if (size := self._other_board.size_bytes) != _BOARD_BYTES:
            raise UnavailableError(
                f"the other end's region {_BOARD!r} has {size} bytes, not {_BOARD_BYTES}: use the "
                "same version of tensorwire at both ends"
            )
        self.leases_here = Inbox(node, self._other_board, _TAKEN)
        self.leases_there = LeasePool(peer, board, lent_bytes)
        self._lent_bytes = lent_bytes
        self._told_full = False
        self._late: deque[tuple[float, Sequence[Lease], tuple[int, int]]] = deque()
        self._generations = [0] * CALLS
        self._idle_calls = deque(range(CALLS))
        self.recent: list[Watched] = []
        self.runtime: CallCarrier | None = None
        self.pushing: Pushing | None = None
        self.handlers: dict[int, Any] = {}
        self._shared: SharedNumber | None = None
        self._frees_idle_at = 0.0
        ATTACHMENTS[id] = self
        JANITOR.watch(self)

    @property
    def lost(self) -> bool:
        """True when the other end, or the way to it, is gone, and in a forked child."""
        return self._core.lost or self._pid != _pid

    def least_bytes(self, *, by_runtime: bool) -> int:
        """Returns the least size of payload that travels beside its message."""
        return self.runtime_threshold_bytes if by_runtime else self.threshold_bytes

    def may_send(self, size_bytes: int) -> bool:
        """Returns whether a message of this size may travel beside.

        If not, grpcio reports the error.
        """
        return self.sent_bytes < 0 or size_bytes <= self.sent_bytes

    def look(self) -> bool:
        """Ends with the peer, and takes back the memory of calls that are over.

        Called by the janitor.
        """
        if self.lost:
            self.close()
            return False
        if not self._is_client:
            self.leases_there.retire_calls(self._call_ended)
        while self._late and self._late[0][0] < time.monotonic():
            _, leases, call = self._late.popleft()
            self.retire(leases, call)
        if (now := time.monotonic()) >= self._frees_idle_at:
            self._frees_idle_at = now + _FREES_IDLE_EVERY_S
            self.leases_there.free_idle()
        return True

    def add_pushing(self) -> None:
        """Lets payload of the runtime's calls be pushed. To be called at both ends."""
        boards = self._board[_PUSHED:], self._other_board[_PUSHED:]
        self.pushing = Pushing(self._node, self.peer, *boards)

    @property
    def awaited(self) -> bool:
        """True while the other end has not given back payload that it was sent."""
        return bool(self.leases_there.used)

    def retire(self, leases: Sequence[Lease], call: tuple[int, int]) -> None:
        """Gives up uses by a call that the other end may never see; see `LeasePool.retire`."""
        if self._pid == _pid:  # else the memory is the parent's, and not mapped here
            self.leases_there.retire(leases, call)

    def remember(self, holding: Watched) -> None:
        """Notes the memory of a message, to be looked at before the next messages."""
        self.recent.append(holding)
        del self.recent[:-_RECENT]

    def look_at_recent(self) -> None:
        """Gives the memory of the latest messages back, if they were dropped meanwhile."""
        recent = self.recent
        for each in recent[:]:
            if not each.look():
                with contextlib.suppress(ValueError):  # another thread has seen that too
                    recent.remove(each)

    def tell_full(self, size_bytes: int, failure: str = "") -> None:
        """Logs, once, that a message travels inside because there is no memory for it.

        Args:
            size_bytes: of the message.
            failure: why there was no new memory; "" if the limits allow no more.
        """
        if self._told_full:
            return
        self._told_full = True
        why = failure or (
            "the memory for payload was full for too long (pool_bytes: "
            f"{self._lent_bytes} at the other end, {self.limits.pool_bytes} here). Arrays and "
            "messages that are kept fill it: keep copies of them, or raise pool_bytes in Limits"
        )
        logs.OWN.warning(
            "a message of %d bytes was sent inside gRPC, which is slower: %s. This is logged once.",
            size_bytes,
            why,
        )

    def end_line(self) -> None:
        """Ends calls that do not use grpcio, before `close`. Calling it again does nothing."""
        # A lock may be held for ever in a forked child.
        if self.runtime is not None and self._pid == _pid:
            self.runtime.close(lost=self.peer.lost)

    def close(self) -> None:
        """Ends the attachment; views of memory that arrived stay. Calling it again does nothing."""
        self.end_line()
        self._node.close()

    # The client numbers its calls: a word raised for a call has to name it.

    def begin_call(self) -> tuple[int, int] | None:
        """Takes a number for a call; None: as many are under way as there are numbers left."""
        try:
            # The one that is idle for longest: all wear out together. Atomic, as the append.
            slot = self._idle_calls.popleft()
        except IndexError:
            return None
        self._generations[slot] += 1
        return slot, self._generations[slot]

    def end_call(self, call: tuple[int, int], leases: Sequence[Lease], complete: bool) -> None:
        """Gives a number back, and takes back payload that was sent in the call and not seen.

        Args:
            call: the number.
            leases: the memory of the payload that was sent from here.
            complete: the call ended well, so all payload that was sent to here was seen. The server
                may be about to give memory back, so it is given a moment for that.
        """
        if not complete:
            self.confirm(call)
            self.retire(leases, call)
        elif leases:
            self._late.append((time.monotonic() + _GRACE_S, leases, call))
        # Generations only rise, as the words of the board do: a slot is worn out by its last one.
        if call[1] < LAST_GENERATION:
            self._idle_calls.append(call[0])

    def window(self) -> Window:
        """Returns the window of a stream that begins to send here in a call by grpcio."""
        return Window(self.peer, self._board, _TAKEN)

    def share(self) -> SharedNumber | None:
        """Begins a call, at the client, that shares its number; None: there is no number left.

        The call ends by `SharedNumber.end`.
        """
        while True:
            shared = self._shared
            if shared is not None and shared.begin():
                return shared
            if shared is None or shared.spoiled:
                number = self.begin_call()
                if number is None:
                    return None
                self._shared = SharedNumber(self, number)

    def confirm(self, call: tuple[int, int]) -> None:
        """Tells the client that this server has the call, or the server that it has ended."""
        try:
            self._other_board.word(_place(call)).set(call[1])
        except TensorwireError:
            pass  # the other end is gone

    def confirmed(self, call: tuple[int, int], timeout_s: float = 0) -> bool:
        """Returns, at the client, whether the server of this attachment has the call.

        Raises:
            PeerLostError, ClosedError: the attachment is over.
        """
        word = self._board.word(_place(call))
        if timeout_s == 0:
            return word.value >= call[1]
        try:
            word.wait_until(call[1], timeout_s, peer=self.peer)
        except TimeoutError:
            return False
        return True

    async def confirmed_later(self, call: tuple[int, int], timeout_s: float) -> bool:
        """Returns the result of `confirmed`, without blocking; False if the attachment is over."""
        try:
            await self._board.word(_place(call)).reached(call[1], timeout_s, peer=self.peer)
        except TensorwireError:
            return False
        return True

    def _call_ended(self, call: tuple[int, int]) -> bool:
        return call[0] < CALLS and self._board.word(_place(call)).value >= call[1]


def _place(call: tuple[int, int]) -> int:
    return 8 * (1 + SLOTS + call[0])
