"""Lists the rows of the protocol where each worker goes at its own pace (see `transitions.py`)."""

from __future__ import annotations

from .phase import Phase, Transition

EVENT = Phase(
    "event",
    "server",
    "does the next event of a store where each worker goes at its own pace: a commit is applied, "
    "or those of all together, a worker is answered, or versions stand still for one",
    (
        Transition(
            "event.decided",
            "server 0 has noted which event comes next, with all that follows from it for the "
            "clocks of workers, and nobody knows",
            "takes what is noted",
            waits="a commit, a worker that may go on, or one that wants a pause",
            when="undecided",
        ),
        Transition(
            "event.sent",
            "the other servers are told of the event",
            "tells them again, the same",
            when="leads",
        ),
        Transition(
            "event.come",
            "another server knows what comes next",
            "reads it again: it stays",
            waits="server 0's word",
            when="follows",
        ),
        Transition(
            "event.made",
            "the event is done, as a version is made or brought to a worker, and not noted",
            "does it again: cells that are done stay, and the worker is not told",
            waits="the commit, which server 0 has seen",
        ),
        Transition(
            "event.noted",
            "it is noted with what workers are told, and nobody is told",
            "never does it again; tells the workers",
        ),
        Transition("event.told", "the workers are told", "tells them again, each what it was told"),
    ),
)

PAUSE = Phase(
    "pause",
    "server",
    "makes no version, where each worker goes at its own pace, while one reads",
    (
        Transition(
            "pause.begun",
            "the version that stands still is noted, and who has asked may not be told",
            "notes it again, and tells who asks again",
        ),
        Transition(
            "pause.over",
            "it has heard that the pause is over",
            "finds that noted",
            waits="the worker, or a process in its place",
        ),
    ),
)

STANDING = Phase(
    "standing",
    "worker",
    "has a version stand still where each worker goes at its own pace",
    (
        Transition(
            "pause.asked",
            "a worker has asked servers for a pause, and has no answer",
            "ends the pauses of its predecessor",
        ),
        Transition(
            "pause.held",
            "all servers stand still after the same version",
            "ends the pauses of its predecessor",
            waits="the answers of all servers",
        ),
    ),
)
