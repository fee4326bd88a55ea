"""Controls a job as its owner: its user, on its host, with the job's own secret.

It pauses the job by a word of server 0, lets it go on, and writes parameters into memory of the
servers while it stands still. Nobody at the servers runs for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tensorwire.errors import (
    BusyError,
    PeerLostError,
    StaleHandleError,
    TensorwireError,
    TimeoutError,
    UnavailableError,
)
from tensorwire.jobs.asking import ask_launcher, secret_of
from tensorwire.jobs.folder import runtime_folder
from tensorwire.jobs.job_file import RunningServer
from tensorwire.jobs.job_log import logged_jobs
from tensorwire.jobs.lockfile import open_locked, remove_own
from tensorwire.membership.status import reader_name
from tensorwire.memory import Node, Peer, RemoteRegion
from tensorwire.parameters import AVERAGE_ONLY, Bytes
from tensorwire.parameters.hold import (
    EDIT_AT,
    PAUSE,
    TAKEN_AT,
    WRITTEN_AT,
    is_wanted,
)
from tensorwire.parameters.reading import parts_of
from tensorwire.parameters.regions import RegionKind, region_name

from .job import find_server, is_launched_here, make_node
from .reader import JobReader
from .store import ReadStore
from .wanted import is_still_wanted

_WAIT_S = 10.0
_CONNECT_S = 10.0
_LOOK_S = 0.005
_TOLD_S = 0.25
_KNOWN_S = 5.0  # until server 0 tells readers of workers and servers that have come or gone


class JobOwner:
    """The control of a job by its user, on its host. Any thread; close it.

    Args:
        reader: of the job, which stays the caller's.
    """

    def __init__(self, reader: JobReader) -> None:
        self._reader, self._lock = reader, threading.RLock()
        self._servers: list[Peer] = []
        self._node: Node | None = None
        self._numbers: list[int] = []
        self._look_at = 0.0
        self._was_found = False

    def close(self) -> None:
        """Ends the connections. A pause stays. Idempotent."""
        with self._lock:
            node, self._node, self._servers = self._node, None, []
            if node is not None:
                node.close()

    # ---- pausing

    def held(self) -> tuple[ReadStore, int] | None:
        """Returns the store that stands still and its version; None while the job is not paused."""
        for number in self._stores():
            if self._reader.has_store(number):
                store = self._reader.store(number)
                if (version := store.held_version()) is not None:
                    return store, version
        return None

    def _stores(self) -> list[int]:
        """Returns the numbers of the stores; servers do not tell them more often."""
        if time.monotonic() > self._look_at:
            self._numbers, self._look_at = self._reader.stores(), time.monotonic() + _TOLD_S
        return self._numbers

    def pause(self, timeout_s: float) -> int:
        """Pauses the job after its present step, and returns when it stands still.

        Returns:
            The version that is in place from then on.

        Raises:
            PermissionError: the job is not of this user on this host.
            UnavailableError: it cannot be paused.
            TimeoutError: it has made no step in time, and goes on.
            InterruptedError: nobody wants it any more; it goes on.
            BusyError: somebody else has let it go on meanwhile.
            PeerLostError: it is over.
        """
        with self._lock:
            word = self._pause_word()
            self._check_mode()
            before = _value(word, 0)
            word.word(0).set(before if is_wanted(before) else before + 1).wait(_WAIT_S)
        # Others may let it go on meanwhile, by this process, too.
        deadline, alone = time.monotonic() + timeout_s, not is_wanted(before)
        while (found := self.held()) is None:
            with self._lock:
                if not is_wanted(_value(self._pause_word(), 0)):
                    raise BusyError(
                        "the job goes on: somebody has written 0 into control/pause meanwhile, or "
                        "had asked for the pause before, and waits no longer"
                    )
            wanted = is_still_wanted()
            if time.monotonic() > deadline or not wanted:
                if alone:
                    self.go_on()
                after = "the job goes on" if alone else "others wait for the pause, too"
                if not wanted:
                    raise InterruptedError(errno.EINTR, f"it was interrupted; {after}")
                raise TimeoutError(f"the job has made no step in {timeout_s:g} s; {after}")
            time.sleep(_LOOK_S)
        return found[1]

    def go_on(self) -> None:
        """Ends the pause, if there is one."""
        with self._lock:
            word = self._pause_word()
            before = _value(word, 0)
            if is_wanted(before):
                word.word(0).set(before + 1).wait(_WAIT_S)

            def is_over() -> bool:  # also where somebody else pauses it anew
                return self.held() is None or _value(word, 0) != before + is_wanted(before)

            _await(is_over, "server 0 does not let the job go on: it is stopped")

    # ---- writing

    def write(self, store: ReadStore, version: int, values: Mapping[int, Bytes]) -> None:
        """Writes values for tensors, which all become the next version when the job goes on.

        Until this returns none of them counts, even if a process dies.

        Args:
            store: that stands still.
            version: at which it does.
            values: the bytes of each tensor, by its index.

        Raises:
            StaleHandleError: it does not stand still at this version any more.
            BusyError: parameters were written in this pause, or are being written.
            UnavailableError: this job has no such parameters.
            TimeoutError: a server does not have the version, because it is stopped or new.
            PermissionError, PeerLostError: as for `pause`.
        """
        if store.layout.spec.optimizer == AVERAGE_ONLY:
            raise UnavailableError(
                "worker 0 applies this optimizer, so that nobody else can write parameters: see "
                'DistributedOptimizer(apply="servers")'
            )
        with self._lock, self._alone():
            servers = self._connected()
            hold = servers[0].region(region_name(store.number, RegionKind.HOLD))
            self._check_held(store, version)
            if _value(hold, TAKEN_AT) >= version:
                raise BusyError(
                    f"parameters of version {version} were written in this pause already: end it, "
                    "and write the next ones in another pause"
                )
            self._await_settled(store, version)
            self._move(store, servers, values)
            written = np.zeros(len(store.layout.spec.tensors), np.uint8)
            written[list(values)] = 1
            hold[WRITTEN_AT : WRITTEN_AT + len(written)].write(written).wait(_WAIT_S)
            hold.word(EDIT_AT).set(version).wait(_WAIT_S)
            self._await_taken(store, hold, version)

    def _move(self, store: ReadStore, servers: list[Peer], values: Mapping[int, Bytes]) -> None:
        under_way = []
        name = region_name(store.number, RegionKind.WRITTEN)
        regions = [peer.region(name) for peer in servers]
        for index, data in values.items():
            first = store.layout.places[index].start
            for server, start, stop in parts_of(store.shares, first, first + len(data)):
                at = start - store.shares[server].start
                target = regions[server][at : at + stop - start]
                under_way.append(target.write(data[start - first : stop - first]))
        for transfer in under_way:
            transfer.wait(60.0)

    def _check_held(self, store: ReadStore, version: int) -> None:
        if store.held_version() != version:
            raise StaleHandleError(f"the pause at version {version} is over: pause the job again")

    def _await_settled(self, store: ReadStore, version: int) -> None:
        """Waits until all servers have the version; some may still be making it."""

        def is_settled() -> bool:
            self._check_held(store, version)
            return store.settled(range(len(store.doors))) == version

        _await(
            is_settled,
            f"a server does not have version {version}: it is stopped, or has replaced one that "
            "was killed; let the job go on, and pause it again",
        )

    def _await_taken(self, store: ReadStore, hold: RemoteRegion, version: int) -> None:
        def is_taken() -> bool:
            over = store.held_version() != version  # first: it is noted before that
            if not (found := _value(hold, TAKEN_AT) >= version) and over:
                self._check_held(store, version)
            return found

        _await(is_taken, "server 0 does not answer: it may take what was written later")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks out other writers of parameters of this user; the lock ends with this process."""
        server = self._server()  # in another container one may have the same number
        path = runtime_folder() / f"writes-{server.pid}-{server.started:.6f}"
        if (descriptor := open_locked(path)) is None:
            raise BusyError("another process writes parameters of this job")
        try:
            yield
        finally:
            remove_own(path)
            os.close(descriptor)

    # ---- what the launcher does

    def scale(self, asked: Mapping[str, object], timeout_s: float) -> str:
        """Changes the number of workers or servers, as `tensorwire scale`; returns when it is done.

        Args:
            asked: see docs/internals/launch.md.
            timeout_s: until it is done.

        Returns:
            A line of text for each change, on what has become of it.

        Raises:
            ScaleError: it is not done; the text says why.
            PermissionError: the job is not of this user on this host.
            UnavailableError: it has no launcher that hears this.
            TimeoutError: it was not done in time, and was taken back.
        """
        server = self._server()
        jobs = (each for each in logged_jobs() if each.running and server.address in each.addresses)
        path = next((each.control for each in jobs), "")
        if not path:
            raise UnavailableError(
                "only jobs of tensorwire run can be scaled, when their workers are started"
            )
        outcome = ask_launcher(
            path, secret_of(server), dict(asked), timeout_s, lambda _: None, is_still_wanted
        )
        self._await_known(outcome)
        return "".join(f"{each['text']}\n" for each in outcome.values())

    def _await_known(self, outcome: Mapping[str, Any]) -> None:
        """Waits until server 0 knows the new workers and servers; the launcher hears first."""
        deadline = time.monotonic() + _KNOWN_S
        with contextlib.suppress(TensorwireError):  # it is done, whatever becomes of the job
            while time.monotonic() < deadline and is_still_wanted():
                workers, servers = self._reader.members()
                if (
                    outcome.get("workers", {}).get("now", workers) == workers
                    and len(outcome.get("servers", {}).get("shares", range(servers))) == servers
                ):
                    return
                time.sleep(_LOOK_S)

    # ---- connections

    def _server(self) -> RunningServer:
        """Returns server 0 as the file of its job describes it.

        Raises:
            PermissionError: it is not this user's, or of another host.
            PeerLostError: it was this user's, and is gone.
        """
        found = find_server(self._reader.address)
        if found is None and (self._was_found or is_launched_here(self._reader.address)):
            raise PeerLostError(
                f"server 0 of the job at {self._reader.address} is gone; the job is over, or "
                "another server takes its place"
            )
        if found is None:
            raise PermissionError(
                f"the job at {self._reader.address} is controlled by its own user on its own host, "
                "who has its secret; the secret for reading is not enough"
            )
        self._was_found = True
        return found

    def first(self) -> tuple[Peer, str]:
        """Returns server 0, and the name of this side's Node there.

        Raises:
            PermissionError, UnavailableError, PeerLostError: as for `pause`.
        """
        with self._lock:
            peer = self._connected()[0]
            assert self._node is not None
            return peer, self._node.name

    def _connected(self) -> list[Peer]:
        if self._node is None or any(peer.lost for peer in self._servers):
            self.close()
            server = self._server()
            addresses = self._reader.status()["servers"]
            node = make_node(reader_name(), secret_of(server), ("shm", "tcp"))
            try:
                self._servers = [node.connect(each, timeout_s=_CONNECT_S) for each in addresses]
            except BaseException:
                node.close()
                raise
            self._node = node
        return self._servers

    def _pause_word(self) -> RemoteRegion:
        return self._connected()[0].region(PAUSE)

    def _check_mode(self) -> None:
        """Raises UnavailableError where each worker goes at its own pace."""
        first = self._connected()[0]
        for number in self._reader.stores():
            try:
                first.region(region_name(number, RegionKind.HOLD))
            except LookupError:
                raise UnavailableError(
                    'only jobs of mode="sync" can be paused: in other modes workers do not wait '
                    "for each other"
                ) from None


def _await(done: Callable[[], bool], late: str) -> None:
    """Waits until something is done; raises TimeoutError with this text if it takes long."""
    deadline = time.monotonic() + _WAIT_S
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(late)
        time.sleep(_LOOK_S)


def _value(region: RemoteRegion, at: int) -> int:
    found = np.zeros(1, np.uint64)
    region[at : at + 8].read(found).wait(_WAIT_S)
    return int(found[0])
