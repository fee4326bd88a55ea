"""Provides tools for tests of code that uses tensorwire, and of tensorwire itself.

A connected pair of Nodes, groups of processes, injected faults, leak checks, and the suite that
every transport must pass. Nothing here is imported by the rest of the package.
"""

from .conformance import check_names, check_transport, run_check
from .faults import Exchange, FaultPlan, for_every_n, inject
from .group import Channel, Member, MemberError, PeerGroup
from .leaks import Footprint, assert_no_leak
from .pair import Pair, node_pair
from .setup import Elsewhere, warm_up

__all__ = [
    "Channel",
    "Elsewhere",
    "Exchange",
    "FaultPlan",
    "Footprint",
    "Member",
    "MemberError",
    "Pair",
    "PeerGroup",
    "assert_no_leak",
    "check_names",
    "check_transport",
    "for_every_n",
    "inject",
    "node_pair",
    "run_check",
    "warm_up",
]
