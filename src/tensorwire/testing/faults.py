"""Injects faults: repeats a scripted exchange with its n-th operation failing, for every n.

This finds the error path that nobody thought of: whatever step fails, nothing may hang, nothing may
leak and every transfer must complete exactly once.
"""

from __future__ import annotations

import faulthandler
import gc
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tensorwire._core import FaultPlan
from tensorwire.errors import TensorwireError
from tensorwire.memory import Peer, Transfer
from tensorwire.memory.core import core_of

from .leaks import Footprint, check_no_growth
from .pair import Pair, node_pair
from .target import beside

__all__ = ["Exchange", "FaultPlan", "for_every_n", "inject"]

ACTIONS = ("fail", "drop", "delay", "cut")


def inject(peer: Peer, plan: FaultPlan | None) -> None:
    """Lets a plan act on the operations of one connection, or with None ends that.

    Args:
        peer: the connection, at the side that starts the operations.
        plan: `FaultPlan(nth, action, delay_s)` counts operations from 1 and acts on the n-th only.
            "fail": it is not carried out and completes with UnavailableError. "drop": it is not
            carried out and ends when the connection does. "delay": it starts `delay_s` later.
            "cut": the connection is lost at that moment.
    """
    core_of(peer).inject(plan)


class Exchange:
    """The objects that a script works with: a connected pair and its transfers.

    Attributes:
        pair: faults act on `pair.to_far`.
        timeout_s: the script must wait with a limit: with this one.
        transfers: everything that went through `track`.
    """

    def __init__(self, pair: Pair, timeout_s: float) -> None:
        self.pair = pair
        self.timeout_s = timeout_s
        self.transfers: list[Transfer] = []

    def track(self, transfer: Transfer) -> Transfer:
        """Notes a transfer, whose end is checked, and returns it."""
        self.transfers.append(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Tracks a transfer and waits for it."""
        self.track(transfer).wait(self.timeout_s)


Script = Callable[[Exchange], None]
PairBuilder = Callable[..., AbstractContextManager[Pair]]


def for_every_n(
    script: Script,
    action: str,
    *,
    transports: Iterable[str] | None = None,
    delay_s: float = 0.02,
    timeout_s: float = 0.5,
    deadline_s: float = 30.0,
    limit: int = 1000,
    build: PairBuilder = node_pair,
    **options: Any,
) -> int:
    """Runs a script with a fault at its first operation, its second, and so on to its last.

    Each run has a fresh pair of Nodes. The last run is the first in which the plan finds no
    operation to act on: it must succeed without any error. In the runs before, the script may end
    with an error of tensorwire; after a mere delay it may not.

    Args:
        script: starts operations on `exchange.pair.to_far`, tracks them, and checks what it reads.
            It must be deterministic, so that the n-th operation is the same in every run.
        action: "fail", "drop", "delay" or "cut".
        transports: for both Nodes.
        delay_s: of "delay".
        timeout_s: `exchange.timeout_s`; with "drop" one run waits as long.
        deadline_s: a run that takes longer hangs.
        limit: a script with more operations is an error.
        build: makes the pair, as `node_pair` does; for Nodes that are on different hosts.
        options: more arguments for both Nodes.

    Returns:
        How many operations were hit, one per run.

    Raises:
        AssertionError: a run hung, leaked, ended with a wrong error, or left a transfer without an
            end or with two; the message says which n.
    """
    if action not in ACTIONS:
        raise ValueError(f"action is one of {', '.join(ACTIONS)}, not {action!r}")
    chosen = None if transports is None else list(transports)
    gc.collect()
    for nth in range(1, limit + 1):
        where = f"{action} of operation {nth} on {chosen}"
        plan = FaultPlan(nth, action, delay_s)
        before = Footprint.now()
        _run(script, plan, action, where, partial(build, chosen, **options), timeout_s, deadline_s)
        check_no_growth(before)
        if not plan.hit:
            return nth - 1
    raise AssertionError(f"the script has more than {limit} operations, or the plan never ends")


def _run(
    script: Script,
    plan: FaultPlan,
    action: str,
    where: str,
    build: PairBuilder,
    timeout_s: float,
    deadline_s: float,
) -> None:
    with build() as pair:
        exchange = Exchange(pair, timeout_s)
        inject(pair.to_far, plan)
        running = beside(script, exchange)
        hung = not wait([running], deadline_s).done
        if hung:
            faulthandler.dump_traceback(all_threads=True)
        early = [(t, t.code) for t in exchange.transfers if t.done()]
    wait([running], deadline_s)
    assert not hung, f"{where}: the script still ran after {deadline_s:g} s"
    allowed = plan.hit and action != "delay"
    error = running.exception()
    if error is not None and not (allowed and isinstance(error, TensorwireError)):
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    del error, running  # they refer to the script's frame, and that to the Nodes
    if not allowed:
        failed = [t.code for t, code in early if code != 0]
        assert not failed, f"{where}: transfers failed with codes {failed}"
        assert len(early) == len(exchange.transfers), f"{where}: the script left transfers open"
    check_completed_once(exchange.transfers, early, where)
    for node in (pair.near, pair.far):
        stats = node.stats()
        assert stats["transfers_started"] == stats["transfers_completed"], f"{where}: {stats}"


def check_completed_once(
    transfers: list[Transfer], early: list[tuple[Transfer, int]], where: str
) -> None:
    """Checks, after their Nodes were closed, that transfers have ended and never changed the end.

    Args:
        transfers: all that were started.
        early: (transfer, code) of those that had ended before the close.
        where: begins the message of a failure.

    Raises:
        AssertionError: one has not ended, or has ended in two ways.
    """
    for transfer in transfers:
        assert transfer.done(), f"{where}: a transfer has not completed although its Node is closed"
    for transfer, code in early:
        assert transfer.code == code, (
            f"{where}: a transfer completed twice, with codes {code} and {transfer.code}"
        )
