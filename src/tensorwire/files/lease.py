"""Leases memory at a door, in which a reader asks for snapshots and shows that it is alive."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from tensorwire.errors import StaleHandleError, TensorwireError, TimeoutError
from tensorwire.memory import Peer, RemoteMailbox, RemoteRegion
from tensorwire.parameters.reading import ANSWERS, ASKS, BELL, HEART_S, LEASE_BYTES, Ask, lease_name
from tensorwire.parameters.snapshot import Reply

_WORD_BYTES = 64  # of a mailbox, before its message


class DoorLease:
    """The lease at one door. One thread at a time.

    Args:
        door: the server's.
        reader: the name of this process's Node.
    """

    def __init__(self, door: Peer, reader: str) -> None:
        self._door, self._name = door, lease_name(reader)
        self._region: RemoteRegion | None = None
        self._number = self._beats = 0

    def send(self, ask: Ask) -> None:
        """Sends a request; the answer to the one before must have come.

        Raises:
            BusyError: the door has no place for another reader.
            PeerLostError: the server is gone.
        """
        for last in (False, True):
            region = self._leased()
            self.beat()  # a reader that has held nothing for long lives, too
            try:
                self._number += 1
                RemoteMailbox(region[ASKS]).send(ask.to_bytes(), self._number).wait(10.0)
                break
            except StaleHandleError:  # this process was stopped for long
                self._region = None
                if last:
                    raise
        self._door.region(BELL).word(0).fetch_add(1, 10.0)

    def answer(self, deadline: float) -> Reply:
        """Waits for the server's answer and returns it.

        Raises:
            TimeoutError: nothing in time; the request is withdrawn.
            PeerLostError, StaleHandleError: as everywhere.
        """
        assert self._region is not None
        answers, count, pause = self._region[ANSWERS], np.zeros(1, np.uint64), 1e-4
        beat_at = time.monotonic() + HEART_S
        while True:
            answers[:8].read(count).wait(10.0)
            if int(count[0]) >= self._number:
                data = np.zeros(answers.size_bytes - _WORD_BYTES, np.uint8)
                answers[_WORD_BYTES:].read(data).wait(10.0)
                return Reply.from_bytes(data)
            if time.monotonic() > deadline:
                self.give_up()
                raise TimeoutError(
                    f"{self._door.name!r} at {self._door.address} did not answer in time"
                )
            if time.monotonic() > beat_at:  # a version may take long
                self.beat()
                beat_at += HEART_S
            time.sleep(pause)
            pause = min(2 * pause, 0.005)

    def beat(self) -> None:
        """Shows that this process lives."""
        if (region := self._region) is not None:
            self._beats += 1
            with contextlib.suppress(TensorwireError):
                region.word(0).set(self._beats)

    def give_up(self) -> None:
        """Frees the lease, and with it everything asked for and held."""
        region, self._region = self._region, None
        if region is not None:
            with contextlib.suppress(TensorwireError):
                region.free(2.0)

    def _leased(self) -> RemoteRegion:
        if self._region is None:
            self._region = self._door.allocate(LEASE_BYTES, self._name)
            self._number = self._beats = 0
        return self._region
