"""Finds `tensorwire serve` for a worker that another program has started, and gets its place.

The supervisor of a host listens on a unix socket. A worker says its rank and gets what
`tensorwire run` would have put into its environment; the socket is then the one for its
descriptors. Each of the two checks that the other is of the same user. The messages are in
docs/internals/launch.md. Knows no torch and starts nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import TypedDict

from tensorwire.durability.descriptor_store import STORE, TERM
from tensorwire.errors import UnavailableError
from tensorwire.jobs.claim import refusal
from tensorwire.jobs.door import knock, receive_message, send_message
from tensorwire.jobs.engines import MAX_WORKERS, number
from tensorwire.membership.world import RANK

SUPERVISOR = "TENSORWIRE_SUPERVISOR"
"""Environment variable: the path of the supervisor's socket."""

_TOLD_BY = f"{RANK} and {SUPERVISOR}"
_PAUSE_S = 0.05
_ANSWER_S = 30.0  # of a program that does nothing but wait for such questions
# Nobody listens yet; a supervisor that was killed has left its name; too many connect at once.
_NOT_YET = FileNotFoundError, ConnectionRefusedError, BlockingIOError
_SECRETS = "TENSORWIRE_SECRET", "TENSORWIRE_SECRET_FILE"


class _PlaceAnswer(TypedDict, total=False):
    environment: dict[str, str]
    term: int
    holder: int
    error: str


def enter_job(environ: MutableMapping[str, str] = os.environ, timeout_s: float = 120.0) -> None:
    """Gets this worker's place from the supervisor that SUPERVISOR names, into `environ`.

    Afterwards it is as if `tensorwire run` had started the process. The supervisor's values replace
    the values that `environ` has under the same names.

    Args:
        environ: names the socket and the rank, and gets the rest.
        timeout_s: how long to wait for a supervisor that does not listen yet; a worker that
            torchrun has started again does not wait.

    Raises:
        RuntimeError: another process is this worker, or the job is over, or has no such rank.
        UnavailableError: nobody listens there, or not one of this user.
        ValueError: the rank is missing or makes no sense.
    """
    path, rank = environ[SUPERVISOR], _rank(environ)
    again = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    channel = _connect(path, 0.0 if again else timeout_s)
    try:
        answer = _ask(channel, path, rank)
        if holder := answer.get("holder"):
            raise RuntimeError(refusal(rank, _TOLD_BY, f"process {holder}"))
        if (why := answer.get("error")) or "environment" not in answer:
            raise RuntimeError(f"tensorwire serve at {path} has no place for worker {rank}: {why}")
        for name in _SECRETS:
            environ.pop(name, None)
        environ.update(answer["environment"])
        if term := answer.get("term"):
            environ[TERM] = str(term)
        channel.setblocking(True)
        environ[STORE] = str(channel.detach())
    finally:
        channel.close()


def _rank(environ: MutableMapping[str, str]) -> int:
    if not (text := environ.get(RANK, "")):
        raise ValueError(
            f"{SUPERVISOR} is set and {RANK} is not: set it to the number of this worker, from 0; "
            "RANK is that of another launcher, which may have started this worker alone"
        )
    return number(RANK, text, 0, MAX_WORKERS - 1)


def _connect(path: str, timeout_s: float) -> socket.socket:
    """Returns a connection to a supervisor of this user."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return knock(path, _ANSWER_S)
        except OSError as error:
            if not isinstance(error, _NOT_YET) or time.monotonic() >= deadline:
                after = f" within {timeout_s:g} s" if timeout_s else ""
                raise UnavailableError(
                    f"{SUPERVISOR} is {path}, and nobody could be reached there{after} "
                    f"({error.strerror or error}): start 'tensorwire serve' on this host, which "
                    "prints the path; if it was there, its job is over: its own messages tell why, "
                    "unless it was killed"
                ) from None
        time.sleep(_PAUSE_S)


def _ask(channel: socket.socket, path: str, rank: int) -> _PlaceAnswer:
    try:
        send_message(channel, {"rank": rank})
        found = receive_message(channel, _PlaceAnswer)
    except OSError as error:
        raise UnavailableError(f"tensorwire serve at {path} does not answer: {error}") from None
    except ValueError as error:
        raise UnavailableError(f"what listens at {path} is no tensorwire serve: {error}") from None
    if found is None:
        raise UnavailableError(
            f"tensorwire serve at {path} has ended; its own messages tell why, unless it was killed"
        )
    return found.content
