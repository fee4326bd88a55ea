"""Who belongs to a job and how its members reach each other. Knows no parameters and no torch."""

from .collective import MAX_NUMBERS, Collective, CollectiveServer
from .members import (
    GOODBYE,
    LOOPBACK,
    SLICES,
    Place,
    ServerMember,
    WorkerMember,
    called,
    check_name,
    introductions_in,
    listed,
    server_name,
    turn_away,
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
    "WorkerMember",
    "called",
    "check_name",
    "introductions_in",
    "listed",
    "server_name",
    "turn_away",
    "why_lost",
    "worker_name",
]
