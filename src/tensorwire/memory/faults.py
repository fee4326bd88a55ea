"""Faults of one connection on purpose, for tests: `tensorwire.testing` is what people use."""

from __future__ import annotations

from tensorwire._core import FaultPlan

from .peer import Peer

__all__ = ["FaultPlan", "inject"]


def inject(peer: Peer, plan: FaultPlan | None) -> None:
    """Lets a plan act on the operations of one connection, or with None ends that.

    Args:
        peer: the connection, at the side that starts the operations.
        plan: `FaultPlan(nth, action, delay_s)` counts operations from 1 and acts on the n-th only.
            "fail": it is not carried out and completes with UnavailableError. "drop": it is not
            carried out and ends when the connection does. "delay": it starts `delay_s` later.
            "cut": the connection is lost at that moment.
    """
    peer._core.inject(plan)
