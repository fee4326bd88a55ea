"""Who belongs to a job and how its members reach each other. Knows no parameters and no torch."""

from .claim import drop_claim, hold_claim, refusal
from .collective import MAX_NUMBERS, Collective, CollectiveServer
from .engines import Start, explicit_start, find_cluster_start, find_start, without_ranks
from .members import (
    GOODBYE,
    LOOPBACK,
    SLICES,
    Place,
    ServerMember,
    WorkerMember,
    called,
    server_name,
    this_host,
    why_lost,
    worker_name,
)

__all__ = [
    "GOODBYE",
    "LOOPBACK",
    "MAX_NUMBERS",
    "SLICES",
    "Collective",
    "CollectiveServer",
    "Place",
    "ServerMember",
    "Start",
    "WorkerMember",
    "called",
    "drop_claim",
    "explicit_start",
    "find_cluster_start",
    "find_start",
    "hold_claim",
    "refusal",
    "server_name",
    "this_host",
    "why_lost",
    "without_ranks",
    "worker_name",
]
