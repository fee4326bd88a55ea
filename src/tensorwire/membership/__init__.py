"""Who belongs to a job and how its members reach each other. Knows no parameters and no torch."""

from .claim import drop_claim, hold_claim, refusal
from .collective import MAX_NUMBERS, Collective, CollectiveServer
from .engines import Start, explicit_start, find_cluster_start, find_start, torch_job, without_ranks
from .members import (
    GOODBYE,
    LOOPBACK,
    SLICES,
    ServerMember,
    WorkerMember,
    World,
    called,
    check_name,
    introductions_in,
    listed,
    server_name,
    this_host,
    turn_away,
    why_lost,
    worker_name,
)
from .runtime import runtime_folder

__all__ = [
    "GOODBYE",
    "LOOPBACK",
    "MAX_NUMBERS",
    "SLICES",
    "Collective",
    "CollectiveServer",
    "ServerMember",
    "Start",
    "WorkerMember",
    "World",
    "called",
    "check_name",
    "drop_claim",
    "explicit_start",
    "find_cluster_start",
    "find_start",
    "hold_claim",
    "introductions_in",
    "listed",
    "refusal",
    "runtime_folder",
    "server_name",
    "this_host",
    "torch_job",
    "turn_away",
    "why_lost",
    "without_ranks",
    "worker_name",
]
