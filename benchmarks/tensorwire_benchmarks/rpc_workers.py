"""Client processes of `bench rpc` that call at a time: small calls, or those of a training step.

Each is a process of its own that has channels to one or several servers. This module is imported by
the bench, which has no grpcio, so everything that needs it is imported where it is used.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

import numpy as np

from tensorwire.bench.processes import PairError

from .rpc_names import SKEW, UNARY

_BEGIN_S = 0.02
"""So that all begin at one time."""
_STATE: dict[tuple[str, ...], Any] = {}

Targets = dict[str, dict[str, str]]


class Workers:
    """So many client processes; started once, connected to all servers.

    Args:
        count: how many.
        targets: of each server, by system and wire.

    Raises:
        PairError: they did not come up.
    """

    def __init__(self, count: int, targets: Sequence[Targets]) -> None:
        context = get_context("spawn")
        self._processes = [
            ProcessPoolExecutor(1, mp_context=context, initializer=_ignore_interrupts)
            for _ in range(count)
        ]
        self._all(len(self._processes), _connect, targets)

    def _all(self, count: int, work: Callable[..., Any], *given: Any) -> list[Any]:
        """Has it done by some of them at a time; what they give back."""
        futures = [each.submit(work, *given) for each in self._processes[:count]]
        try:
            return [each.result() for each in futures]
        except (BrokenProcessPool, RuntimeError) as error:
            raise PairError(f"a client process failed: {error}") from error

    def call(
        self, count: int, wire: str, system: str, size_bytes: int, seconds: float
    ) -> tuple[list[float], float]:
        """Some of them make small calls of the first server for so long.

        Returns:
            Seconds of each call, and of CPU time of them all.
        """
        self._all(count, _call, wire, system, size_bytes, 0.0)  # what comes first is not counted
        at = time.monotonic() + _BEGIN_S + seconds
        found = self._all(count, _call, wire, system, size_bytes, at)
        return [one for times, _ in found for one in times], sum(cpu for _, cpu in found)

    def push_pull(
        self, count: int, wire: str, system: str, seconds: float
    ) -> tuple[float, int, float]:
        """Some of them push to all servers and pull from them, over and over, for so long.

        Returns:
            Seconds from the first call to the last, calls, and seconds of CPU time of them all.
        """
        self._all(count, _push_pull, wire, system, 0.0)
        began = time.monotonic()
        found = self._all(count, _push_pull, wire, system, began + _BEGIN_S + seconds)
        took = max(ended for _, ended, _ in found) - began
        return took, sum(calls for calls, _, _ in found), sum(cpu for _, _, cpu in found)

    def close(self) -> None:
        """Ends them."""
        for each in self._processes:
            with contextlib.suppress(BrokenProcessPool, RuntimeError):
                each.submit(_disconnect).result()
            each.shutdown(wait=True, cancel_futures=True)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the bench ends them in order


def _connect(targets: Sequence[Targets]) -> None:
    from .rpc_pair import ClientCalls

    _STATE["servers",] = [ClientCalls(each) for each in targets]


def _disconnect() -> None:
    for each in _STATE.pop(("servers",), ()):
        each.close()


def _call(wire: str, system: str, size_bytes: int, until: float) -> tuple[list[float], float]:
    key = ("call", wire, system)
    if key not in _STATE:
        payload = np.arange(size_bytes, dtype=np.uint8)
        _STATE[key] = _STATE["servers",][0].simple(wire, UNARY, system, payload)
    operation, times = _STATE[key], []
    cpu = time.process_time()
    while True:
        began = time.monotonic()
        operation()
        ended = time.monotonic()
        times.append(ended - began)
        if ended >= until:
            return times, time.process_time() - cpu


def _push_pull(wire: str, system: str, until: float) -> tuple[int, float, float]:
    key = ("push_pull", wire, system)
    if key not in _STATE:
        servers = _STATE["servers",]
        _STATE[key] = [each.begin_scheme(wire, SKEW, system) for each in servers]
    beginnings, calls = _STATE[key], 0
    cpu = time.process_time()
    while True:
        for wait in [begin() for begin in beginnings]:
            wait()
        calls += len(beginnings)
        if (ended := time.monotonic()) >= until:
            return calls, ended, time.process_time() - cpu
