"""Connects one worker to one server; of other servers it knows only their answers."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tensorwire.errors import PeerLostError, TensorwireError, TimeoutError, consequence
from tensorwire.membership.identity import lost
from tensorwire.membership.worker import WorkerMember
from tensorwire.memory import Mailbox, Peer, Region, RemoteRegion, wait_all

from ..kernel import Rows
from ..layout import Extent
from ..messages import POISON, Bytes, Commit, Result
from ..regions import RegionKind, ServerRegions, result_block
from ..rows import Gradient, rows_here
from .outbox import Copier, Outbox

T = TypeVar("T")


class Answers:
    """The answers of all servers of a store to a worker: a mailbox of each, read in order."""

    def __init__(self, member: WorkerMember, region: Region) -> None:
        self._member, servers = member, member.servers
        self._mailboxes = [
            (peer, Mailbox(region[result_block(server)])) for server, peer in enumerate(servers)
        ]

    def wait(self, version: int) -> Result:
        """Waits until a version is in place at all servers; returns their common result."""
        results = []
        for peer, mailbox in self._mailboxes:
            result = Result.from_bytes(
                self.attempt(peer, partial(mailbox.wait, version, peer=peer))
            )
            if result.failed or result.version != version:
                raise consequence(result.message or "the job is over; its servers have ended")
            results.append(result)
        return replace(
            results[0],
            finite=all(each.finite for each in results),
            work_s=max(each.work_s for each in results),
            notes_s=max(each.notes_s for each in results),
            notes_bytes=sum(each.notes_bytes for each in results),
        )

    def wait_opened(self) -> None:
        """Returns when all servers have opened the store, perhaps for a predecessor."""
        self.wait_reached(1)

    def wait_reached(self, version: int) -> None:
        """Returns when a version, or a later one, is in place at all servers."""
        for peer, mailbox in self._mailboxes:
            self.attempt(peer, partial(mailbox.wait, version, peer=peer))
        if reason := self.reason():
            raise consequence(reason)

    def is_reached(self, version: int, timeout_s: float) -> bool:
        """Waits for a version at all servers, a later one or the end; tells if it came in time."""

        def wait(mailbox: Mailbox, peer: Peer) -> bool:
            try:
                mailbox.wait(version, timeout_s, peer=peer)
            except TimeoutError:
                return False
            return True

        return all(self.attempt(peer, wait, mailbox, peer) for peer, mailbox in self._mailboxes)

    @property
    def last(self) -> int:
        """The last version that all servers have told."""
        return min(mailbox.count for _, mailbox in self._mailboxes)

    @property
    def is_over(self) -> bool:
        """True if a server has told that no version will follow."""
        return any(mailbox.count >= POISON for _, mailbox in self._mailboxes)

    def reason(self) -> str:
        """See `Store`."""
        for _, mailbox in self._mailboxes:
            if mailbox.count >= POISON:
                return Result.from_bytes(mailbox.message(POISON)).message
        return ""

    def explain(self, peer: Peer, error: TensorwireError) -> Exception:
        """Returns the best error for a lost server: the reason that any server gave before."""
        if reason := self.reason():
            return consequence(reason)
        if isinstance(error, PeerLostError):
            return lost(peer, error)
        return error

    def attempt(self, peer: Peer, action: Callable[..., T], *arguments: Any) -> T:
        """Calls an action that concerns a peer, and explains an error.

        It is done again where the peer was a server that another one has replaced.
        """
        while True:
            try:
                return action(*arguments)
            except TensorwireError as error:
                lost_peer = isinstance(error, PeerLostError) and not self.reason()
                if not (lost_peer and self._member.recover(peer)):
                    raise self.explain(peer, error) from error


class Link:
    """A server of an open store.

    Attributes:
        peer: the server.
        regions, share: of the store there, and its cells.
        mapped: its memory is mapped here, so that backward can produce gradients there.

    Args:
        commits: for each slice of this worker, which of all commits is its own. For slices that it
            takes over it is the number of the slice.
        sends: tensors whose gradients come from this worker.
    """

    def __init__(
        self,
        peer: Peer,
        regions: ServerRegions,
        commits: Mapping[int, int],
        sends: Container[int],
        answers: Answers,
    ) -> None:
        self.regions, self.share = regions, regions.share
        self.mapped = peer.path.transport == "shm"
        self.peer, self._answers = peer, answers
        self._senders: dict[int, Copier | Outbox] = {
            i: Copier(peer, regions, i, commit)
            if self.mapped
            else Outbox(peer, regions, i, commit, sends)
            for i, commit in commits.items()
        }

    def _sender(self, slice_index: int) -> Copier | Outbox:
        found = self._senders.get(slice_index)
        if found is None:
            made = self._answers.attempt(
                self.peer, Copier, self.peer, self.regions, slice_index, slice_index
            )
            found = self._senders[slice_index] = made
        return found

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients and buffers that were written to it, since the start."""
        return sum(sender.bytes_sent for sender in self._senders.values())

    def has(self, place: Extent) -> bool:
        """Tells whether bytes of a tensor lie there."""
        return max(self.share.start, place.start) < min(self.share.stop, place.end)

    def part(self, place: Extent) -> slice:
        """Returns which bytes of the share are a tensor's."""
        start, stop = self.share.clip(place.start, place.end)
        return slice(start - self.share.start, stop - self.share.start)

    def push(self, slice_index: int, tensor: int, data: Any) -> int:
        """Pushes the part of a gradient for this server; returns as `Store.push`."""
        sender = self._senders.get(slice_index) or self._sender(slice_index)
        return self._answers.attempt(self.peer, sender.push, tensor, data)

    def rows_copied(self, tensor: int, rows: Rows) -> int:
        """Returns how many bytes this process will copy itself of a gradient of some rows."""
        copied = 0
        for table in self.regions.tables if self.mapped else ():
            for member in table.members:
                if member.tensor == tensor:
                    begin, end = rows_here(member, rows)
                    copied += (end - begin) * (rows.itemsize + table.row_bytes)
        return copied

    def send_rest(self, slice_index: int, gradients: Mapping[int, Gradient]) -> None:
        """Sends gradients of tables, and pending pushes of the slice."""
        sender, attempt = self._sender(slice_index), self._answers.attempt
        for table in self.regions.tables:
            if not gradients.keys().isdisjoint(table.tensors):
                attempt(self.peer, sender.push_rows, table, gradients)
        attempt(self.peer, sender.flush)

    def commit(self, slice_index: int, commit: Commit, data: Bytes) -> None:
        """Writes a slice's commit, of which `data` are the bytes."""
        self._answers.attempt(self.peer, self._sender(slice_index).commit, commit, data)

    def committed(self, slice_index: int) -> int:
        """Returns the last version that was committed for a slice; where memory is shared."""
        return self._answers.attempt(self.peer, lambda: self._sender(slice_index).committed)

    def read_commit(self, slice_index: int) -> Commit:
        """Returns the last commit of a slice, from any worker; where memory is shared."""
        spec = self.share.layout.spec
        return self._answers.attempt(self.peer, lambda: self._sender(slice_index).read_commit(spec))

    def flush(self) -> None:
        """Sends pending pushes of all slices."""
        for sender in self._senders.values():
            self._answers.attempt(self.peer, sender.flush)

    def settle(self) -> None:
        """Waits until all that was sent is in place."""
        senders = self._senders.values()
        transfers = [transfer for sender in senders for transfer in sender.transfers]
        self._answers.attempt(self.peer, wait_all, transfers)
        for sender in senders:
            sender.transfers.clear()

    def region(self, kind: RegionKind, which: int | str | None = None) -> RemoteRegion:
        """Returns a region of the server."""
        name = self.regions.name(kind, which)
        return self._answers.attempt(self.peer, self.peer.region, name)

    def find(self, kind: RegionKind, which: int | str | None = None) -> RemoteRegion | None:
        """Returns a region of the server; None if it does not have it."""
        name = self.regions.name(kind, which)
        try:
            return self._answers.attempt(self.peer, self.peer.region, name, None)
        except LookupError:
            return None

    def read(self, remote: RemoteRegion, local: Any) -> None:
        """Fills `local` from the server's memory."""
        self._answers.attempt(self.peer, lambda: remote.read(local).wait())

    def write(self, remote: RemoteRegion, local: Any) -> None:
        """Overwrites the server's memory."""
        self._answers.attempt(self.peer, lambda: remote.write(local).wait())


def commit_again(links: Sequence[Link], slice_index: int, commit: Commit) -> None:
    """Sends a commit to the servers that have not got it."""
    data = commit.to_bytes()
    for link in links:
        if link.committed(slice_index) < commit.version:
            link.commit(slice_index, commit, data)
