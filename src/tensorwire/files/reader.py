"""Reads a running job one-sidedly, without being a worker: its layout, versions and values.

It connects to the doors of the job's servers, where nothing can be written, and reads memory that
they have. The job never waits for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tensorwire.errors import (
    BusyError,
    ClosedError,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
    UnavailableError,
)
from tensorwire.membership.status import read_status, reader_name
from tensorwire.memory import Node, Peer, RemoteMailbox, RemoteRegion
from tensorwire.parameters import Bytes
from tensorwire.parameters.checkpoint_files import INDEX, INDEX_PLACES, Index, read_index
from tensorwire.parameters.reading import HEART_S, Ask, AskKind, Copied
from tensorwire.parameters.snapshot import Reply, RequestOutcome

from .job import Way, find_way, is_launched_here, make_node
from .lease import DoorLease
from .snapshot import ReaderSnapshot, SealedModel
from .store import ReadStore, StoredTensor

_CONNECT_S = 10.0
_STATUS_S = 5.0
_TRIES = 4  # of reading what moved meanwhile, before a snapshot is asked for
_MOST_AHEAD = 64  # how many versions later than possible a snapshot is asked for


class Read(NamedTuple):
    """The result of a read: the bytes, and the version of all of them."""

    data: bytes
    version: int


class JobReader:
    """A reader of the parameters of a running job. Any thread; close it, or use `with`.

    Args:
        address: "host:port" of server 0, for jobs of this host and user; else of its door.
        secret: for reading; None: the secret in `secret_file`, else the one that the environment
            names (TENSORWIRE_READ_SECRET_FILE, TENSORWIRE_READ_SECRET), else the one in the job's
            file, for jobs of this host and user.
        secret_file: a file with it.
        transports: which may be used; None: all. See `tensorwire.Node`.
        timeout_s: for each answer, and for a version that is being made to be complete.

    Attributes:
        address, timeout_s: as given.

    Raises:
        PermissionError: the secret is not the one for the job's readers.
        PeerLostError: nobody listens there.
        UnavailableError: there is no job, or one of another version of tensorwire.
        TimeoutError: no answer in time.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: str | bytes | None = None,
        secret_file: str | None = None,
        transports: Sequence[str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.address, self.timeout_s = address, timeout_s
        self._given = secret, secret_file
        self._transports = None if transports is None else tuple(transports)
        self._lock = threading.RLock()
        self._node: Node | None = None
        self._doors: list[Peer] = []
        self._leases: list[DoorLease] = []
        self._stores: dict[int, ReadStore] = {}
        self._held: list[Ask] = []
        self._heart: threading.Thread | None = None
        self._pulse = threading.Event()
        self._closed, self._process = False, os.getpid()
        self._connect()

    def __enter__(self) -> JobReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections; the servers get back their lent memory. Idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    # ---- what there is

    def status(self) -> dict[str, Any]:
        """Returns server 0's description of the job; see docs/files.md."""
        with self._lock:
            node, door = self._connected()
            return read_status(door, node.name, _STATUS_S)

    def members(self) -> tuple[int, int]:
        """Returns how many workers the job has, and how many servers, as server 0 knows it."""
        told = self.status()
        workers = sum(each["state"] == "connected" for each in told["workers"])
        return workers, int(told["server_processes"])

    def stores(self) -> list[int]:
        """Returns the numbers of the stores that are open: one for each optimizer of the job."""
        return [int(each["number"]) for each in self.status()["stores"]]

    def store(self, number: int = 0) -> ReadStore:
        """Returns the description of a store and the places of its arrays.

        Raises:
            LookupError: there is none, or none yet; the message tells who has not joined.
        """
        with self._lock:
            node, door = self._connected()
            found = self._stores.get(number)
            if found is None or found.is_over():
                try:
                    found = self._stores[number] = ReadStore.find(number, self._doors)
                except LookupError:
                    told = read_status(door, node.name, _STATUS_S)
                    raise LookupError(_without_store(number, told)) from None
            return found

    def checkpoints(self) -> Index:
        """Returns the complete files of checkpoints for which the job has lent memory, by path."""
        with self._lock:
            _, door = self._connected()
            try:
                region = door.region(INDEX)
            except LookupError:
                return {}  # the server takes none, and has said why
            mailbox = RemoteMailbox(region, INDEX_PLACES)
            _, data = mailbox.latest(time.monotonic() + _STATUS_S)
        return read_index(data.tobytes().partition(b"\0")[0])

    def regions(self, names: Sequence[str]) -> list[RemoteRegion]:
        """Returns regions at the door of server 0; LookupError if one is gone."""
        with self._lock:
            _, door = self._connected()
            return [door.region(name) for name in names]

    def has_store(self, number: int) -> bool:
        """Tells whether a store is open."""
        try:
            self.store(number)
        except LookupError:
            return False
        return True

    # ---- reading

    def read(
        self, tensor: StoredTensor, start: int = 0, stop: int | None = None, header: bytes = b""
    ) -> Read:
        """Returns bytes [start, stop) of a tensor, of one version, with a header in front.

        They are read again if the values moved meanwhile. If they always move they are taken from a
        snapshot.

        Args:
            tensor: of `store`.
            start: first byte.
            stop: byte after the last; None: its end.
            header: is put in front.

        Raises:
            TimeoutError: a version was begun and is not complete in time.
            BusyError: they always move, and there are as many snapshots as there may be.
            PeerLostError: the job is over, or a server is gone.
        """
        stop = tensor.size_bytes if stop is None else stop
        data = b""

        def copy() -> None:
            nonlocal data
            data = tensor.copy(start, stop, header)

        version = self._read_live(tensor, start, stop, copy)
        if version is not None:
            return Read(data, version)
        with self.snapshot(tensor.store.number, whole=tensor.state is not None) as snapshot:
            data = b"".join([header, snapshot.tensor_bytes(tensor)[start:stop]])
            return Read(data, snapshot.version)

    def read_into(self, tensor: StoredTensor, target: Bytes) -> int:
        """Reads all of a tensor into memory of its size; returns the version."""
        version = self._read_live(
            tensor, 0, tensor.size_bytes, lambda: tensor.copy_into(0, tensor.size_bytes, target)
        )
        if version is not None:
            return version
        with self.snapshot(tensor.store.number, whole=tensor.state is not None) as snapshot:
            target[:] = np.frombuffer(snapshot.tensor_bytes(tensor), np.uint8)
            return snapshot.version

    def _read_live(
        self, tensor: StoredTensor, start: int, stop: int, copy: Callable[[], None]
    ) -> int | None:
        """Copies bytes as they are now until they are of one version; None: they always move."""
        deadline, tries, pause = time.monotonic() + self.timeout_s, 0, 1e-4
        while tensor.is_live:
            before = tensor.settled_version(start, stop)
            if before is not None:
                copy()
                if tensor.settled_version(start, stop) == before:
                    return before
                tries += 1
                if tries == _TRIES:
                    break
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no version of {tensor.path!r} was complete for {self.timeout_s:g} s: a "
                    "server is stopped or waits in the middle of one"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return None

    def snapshot(
        self, store: int = 0, *, version: int | None = None, whole: bool = False
    ) -> ReaderSnapshot:
        """Returns all values of one version, in memory that the servers lend until it is closed.

        Args:
            store: number of the store.
            version: of a snapshot that somebody holds; None: the newest version.
            whole: with the optimizer's state.

        Raises:
            BusyError: as many as there may be are held.
            LookupError: there is no snapshot of that version.
            MemoryError: a server has none left.
            TimeoutError: a server is stopped, or no version is complete in time.
            PeerLostError: the job is over, or a server is gone.
        """
        with self._lock:
            found = self.store(store)
            deadline = time.monotonic() + self.timeout_s
            wanted, ahead = version or found.newest_version(), 0
            while True:
                ask = Ask(AskKind.MAKE, store, wanted, whole)
                replies = self._ask_all(ask, deadline)
                refused = [each for each in replies if each.outcome != RequestOutcome.DONE]
                if not refused:
                    copies = [Copied.from_text(each.text) for each in replies]
                    self._hold(ask)
                    return ReaderSnapshot(found, ask, copies, self._release)
                self._ask_all(ask._replace(kind=AskKind.FREE), deadline)
                first = _first_possible(refused, ask)
                if version is not None:
                    raise LookupError(f"there is no snapshot of version {version}")
                if time.monotonic() > deadline:
                    raise TimeoutError("versions followed faster than they could be asked for")
                wanted, ahead = first + ahead, min(2 * ahead + 1, _MOST_AHEAD)

    def sealed_model(self, store: int = 0) -> SealedModel:
        """Returns the newest version as a file for `safetensors.safe_open`, until it is closed.

        Raises:
            BusyError, MemoryError, TimeoutError, PeerLostError: as for `snapshot`.
        """
        snapshot = self.snapshot(store)
        try:
            return snapshot.sealed()
        except BaseException:
            snapshot.close()
            raise

    def _ask_all(self, ask: Ask, deadline: float) -> list[Reply]:
        """Asks all servers, and returns the answer of each."""
        try:
            for lease in self._leases:
                lease.send(ask)
            return [lease.answer(deadline) for lease in self._leases]
        except TensorwireError:
            # One server does not answer: no snapshot is complete any more, and none must be kept.
            for lease in self._leases:
                lease.give_up()
            self._held.clear()
            raise

    def _hold(self, ask: Ask) -> None:
        self._held.append(ask)
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="tensorwire-heart", daemon=True)
            self._heart.start()

    def _release(self, ask: Ask) -> None:
        """Closes a snapshot; another one of the same version keeps it at the servers."""
        with self._lock:
            if ask not in self._held:
                return  # the connection is another one by now
            self._held.remove(ask)
            if ask not in self._held and not self._closed:
                with contextlib.suppress(TensorwireError):
                    deadline = time.monotonic() + self.timeout_s
                    self._ask_all(ask._replace(kind=AskKind.FREE), deadline)

    def _beat(self) -> None:
        """Shows the servers that this process lives, as long as it holds snapshots."""
        while True:
            with self._lock:
                if self._closed or not self._held:
                    self._heart = None
                    return
                for lease in self._leases:
                    lease.beat()
            self._pulse.wait(HEART_S)

    # ---- connections

    def _connected(self) -> tuple[Node, Peer]:
        """Returns this side's Node, and the door of server 0, after connecting if need be."""
        if self._closed:
            raise ClosedError("the reader was closed")
        if self._process != os.getpid():
            raise ClosedError("this JobReader was made before a fork: make one in this process")
        if self._node is None or any(door.lost for door in self._doors):
            self._disconnect()
            self._connect()
        assert self._node is not None
        return self._node, self._doors[0]

    def _connect(self) -> None:
        way: Way = find_way(self.address, *self._given)
        node = make_node(reader_name(), way.secret, self._transports)
        try:
            first = _connect_first(node, way)
            doors = [first]
            told = _doors_of(first, node.name)
            doors += [node.connect(address, timeout_s=_CONNECT_S) for address in told[1:]]
        except BaseException:
            node.close()
            raise
        self._node, self._doors = node, doors
        self._leases = [DoorLease(door, node.name) for door in doors]

    def _disconnect(self) -> None:
        node, self._node = self._node, None
        self._doors, self._leases, self._stores, self._held = [], [], {}, []
        self._pulse.set()
        self._pulse = threading.Event()
        if node is not None:
            node.close()


def _connect_first(node: Node, way: Way) -> Peer:
    try:
        return node.connect(way.address, timeout_s=_CONNECT_S)
    except PermissionError as error:  # what it advises is for members of a job
        if way.secret:
            raise PermissionError(
                f"{way.address} has another secret for readers than the one that was given; it "
                "comes from secret= or secret_file=, TENSORWIRE_READ_SECRET_FILE or "
                "TENSORWIRE_READ_SECRET, else from the job's file"
            ) from error
        if is_launched_here(way.address):
            raise PeerLostError(
                f"server 0 of the job at {way.address} is gone, and another server takes its place"
            ) from error
        raise PermissionError(
            f"{way.address} asks for a secret, and no job file of this host and user has the one "
            "for reading it; for a job of another host or user give its door and the secret, which "
            "`tensorwire ls --save-secret` writes there"
        ) from error


def _doors_of(door: Peer, reader: str) -> list[str]:
    """Returns the addresses of the doors of all servers; waits for servers that start."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            told = read_status(door, reader, _STATUS_S)
        except UnavailableError:
            raise UnavailableError(
                f"{door.name!r} at {door.address} takes no readers: give the address that "
                "`tensorwire ls` shows, or that of server 0 of a job on this host"
            ) from None
        addresses = told.get("doors")
        if not isinstance(addresses, list) or not addresses:
            raise UnavailableError(
                f"{door.name!r} at {door.address} takes no readers: give an address that "
                "`tensorwire ls` shows"
            )
        if all(addresses):
            return [str(each) for each in addresses]
        if time.monotonic() > deadline:
            missing = addresses.index("")
            raise TimeoutError(
                f"server {missing} of the job took no readers within {_CONNECT_S:g} s: its own "
                "messages may tell why"
            )
        time.sleep(0.05)


def _without_store(number: int, told: Mapping[str, Any]) -> str:
    workers = [str(each["rank"]) for each in told["workers"] if each["state"] == "expected"]
    text = f"the job has no store {number} yet"
    if not workers:
        return text
    which = f"workers {', '.join(workers)} have" if workers[1:] else f"worker {workers[0]} has"
    return f"{text}: {which} not joined"


def _first_possible(refused: Sequence[Reply], ask: Ask) -> int:
    """Returns the first version that all servers can still copy; raises their other answers."""
    for each in refused:
        if each.outcome == RequestOutcome.BUSY:
            raise BusyError(f"{each.text}: wait until a reader closes one")
        if each.outcome == RequestOutcome.NO_MEMORY:
            raise MemoryError(each.text)
        if each.outcome != RequestOutcome.PASSED:
            raise StaleHandleError(f"no snapshot of version {ask.version}: {each.text}")
    return max(int(each.text) for each in refused)
