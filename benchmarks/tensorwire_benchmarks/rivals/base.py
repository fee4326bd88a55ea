"""The common base of the rivals: the driver's side of a pair.

A rival prepares a case and makes one operation; the harness does timing, warm-up and CPU clocks, so
that every system is measured in the same way.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tensorwire.bench.harness import Block, run_block, time_each, warm_up
from tensorwire.bench.machine import pin_process

Operation = Callable[[], object]


class RivalDriver(ABC):
    """The measured side. Methods are called one at a time, by name, from the bench's process."""

    def __init__(self, link: Connection, options: dict[str, Any]) -> None:
        self.link = link
        self.options = options
        self.target_pid = int(link.recv())
        self._operation: Operation | None = None
        self._each_s = 0.0

    @abstractmethod
    def connect_case(self, case: str, size_bytes: int) -> tuple[Operation, str]:
        """Sets both sides up for a case.

        Returns:
            One operation, complete when the data has arrived, and a note on how it is tuned.
        """

    def prepare(self, case: str, size_bytes: int) -> str:
        """Makes the case ready to run; returns the note of its row."""
        self._operation = None
        self._each_s = 0.0
        self._operation, note = self.connect_case(case, size_bytes)
        return note

    def announce(self, count: int) -> None:
        """Tells the target of a rival that `count` operations follow, if the target must act."""
        del count

    def run(self, count: int) -> list[float]:
        """Returns the seconds of each of `count` operations.

        One more runs first, unmeasured, to wake both sides, unless operations take 20 ms or more.
        """
        assert self._operation is not None, "prepare comes first"
        extra = self._extra()
        self.announce(count + extra)
        if extra:
            self._operation()
        return time_each(self._operation, count)

    def _extra(self) -> int:
        return 1 if self._each_s < 0.02 else 0

    def warm(self, system: str, max_s: float) -> float:
        """Warms up for about `max_s` and returns the length of one operation."""
        del system  # a rival's pair has only one
        self._each_s = warm_up(self.run, max_s, max_count=20)
        return self._each_s

    def block(self, system: str, count: int) -> Block:
        """Runs and returns a block of `count` operations, with CPU times."""
        del system
        return run_block(self.run, count, self.target_pid, extra_operations=self._extra())

    def pin(self, driver_cores: Sequence[int], target_cores: Sequence[int]) -> None:
        """Lets every thread of the two processes run on these cores only."""
        pin_process(driver_cores)
        self.link.send(("pin", list(target_cores)))
        self.link.recv()

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Frees what the rival holds; the process ends right after it."""


def free_port() -> int:
    """Returns a TCP port on loopback that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
