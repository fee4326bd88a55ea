"""Lists the rows of the protocol that the launcher does (see `transitions.py`)."""

from __future__ import annotations

from .phase import Phase, Transition

_NOBODY = "there is none: the job ends with the launcher"

CHANGE = Phase(
    "change",
    "launcher",
    "changes the number of workers",
    (
        Transition(
            "change.asked",
            "all workers are asked how many steps they have made, and wait soon",
            _NOBODY,
        ),
        Transition(
            "change.planned",
            "all are told after which step they change",
            _NOBODY,
            waits="what they answer",
        ),
        Transition(
            "change.handed",
            "workers that join are told where the script is",
            _NOBODY,
            waits="the worker that notes it",
        ),
    ),
)

GRANT = Phase(
    "grant",
    "launcher",
    "gives the place of a member to another process",
    (
        Transition("term.granted", "its place has a term that it had never before", _NOBODY),
        Transition(
            "successor.started",
            "a process for the place is there, and waits for what it gets",
            _NOBODY,
        ),
        Transition("grant.noted", "its term and its process are on disk", _NOBODY),
        Transition("place.handed", "it is told its term, and gets the memory", _NOBODY),
    ),
)

DEATH = Phase(
    "death",
    "launcher",
    "replaces a member that was killed",
    (
        Transition(
            "death.noticed",
            "the launcher knows that a member was killed, and has all that it had handed over",
            _NOBODY,
            waits="the end of a process",
        ),
        Transition("death.counted", "it may be replaced once more", _NOBODY),
        GRANT,
    ),
)

MOVE = Phase(
    "move",
    "launcher",
    "moves shares from a server to others",
    (
        Transition(
            "takers.ready",
            "the servers that get shares, and who goes on with what the one keeps that gives, have "
            "imported everything",
            _NOBODY,
            waits="new processes",
        ),
        Transition("giver.killed", "the server that gives shares away is killed", _NOBODY),
        Transition("shares.moved", "a server that runs has got its shares", _NOBODY),
    ),
)
