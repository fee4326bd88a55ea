"""Asks the launcher of a running job for something; docs/internals/launch.md has the messages.

The client gets a number that is used once, and proves with it that it knows the job's secret.
"""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypedDict

from tensorwire.errors import TimeoutError, UnavailableError
from tensorwire.jobs.door import knock, proof_of, receive_message, send_message
from tensorwire.jobs.job_file import RunningServer
from tensorwire.jobs.secret import secret_in

_LONGEST_WAIT_S = 1e8  # three years; sockets cannot wait for ever
_ANSWER_S = 10.0  # of a launcher that is asked to take something back
_LOOK_S = 0.1  # between two looks whether it is still wanted


class _Nonce(TypedDict):
    nonce: str


class _ScaleAnswer(TypedDict, total=False):
    says: str
    done: dict[str, dict[str, Any]]
    error: str
    busy: bool


class ScaleError(Exception):
    """A request that cannot be done, or was not; the text gives the reason and the remedy.

    Attributes:
        busy: it may be possible later.
    """

    def __init__(self, text: str, busy: bool = False) -> None:
        super().__init__(text)
        self.busy = busy


def secret_of(server: RunningServer) -> bytes:
    """Returns the secret of a job of this user on this host.

    Raises:
        OSError: it is in a file that cannot be read.
    """
    return secret_in(server.secret_file, server.secret)


def ask_launcher(
    path: str,
    secret: bytes,
    message: dict[str, Any],
    timeout_s: float,
    show: Callable[[str], None],
    is_wanted: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Asks the launcher of a job for something, and waits until it is done.

    After the timeout, or an interrupt, or when it is not wanted any more, the launcher is told to
    take it back, and what comes of that is the answer.

    Args:
        path: of its socket.
        secret: of the job.
        message: what is asked for; see docs/internals/launch.md.
        timeout_s: until it is done.
        show: is given lines on how far it is.
        is_wanted: is called now and then.

    Returns:
        The outcome.

    Raises:
        ScaleError: it is not done.
        UnavailableError: the launcher does not listen, or has ended.
        TimeoutError: it was not done in time, and is taken back.
    """
    deadline, late, interrupted = time.monotonic() + min(timeout_s, _LONGEST_WAIT_S), False, False
    kept = ""  # why it is not taken back
    with contextlib.ExitStack() as stack:
        try:
            channel = stack.enter_context(knock(path, min(timeout_s, _ANSWER_S)))
            told = receive_message(channel, _Nonce)
            proof = proof_of(secret, told.content["nonce"] if told else "")
            send_message(channel, {"ask": message, "proof": proof})
        except (OSError, ValueError) as error:
            raise UnavailableError(f"the launcher of the job does not answer: {error}") from error
        while True:
            left_s = deadline - time.monotonic()
            channel.settimeout(min(max(left_s, 0.001), _LOOK_S))
            try:
                found = receive_message(channel, _ScaleAnswer)
            except (builtins.TimeoutError, KeyboardInterrupt) as error:
                if left_s > _LOOK_S and isinstance(error, builtins.TimeoutError):
                    if late or is_wanted():
                        continue
                    error = KeyboardInterrupt()
                if late:
                    text = "the launcher does not answer, so the change may be made or not"
                    text = f"not done so far, and the launcher goes on: {kept}" if kept else text
                    raise TimeoutError(f"{text}; tensorwire status shows it") from error
                late, interrupted = True, isinstance(error, KeyboardInterrupt)
                with contextlib.suppress(OSError):
                    send_message(channel, {"cancel": True})
                deadline = time.monotonic() + _ANSWER_S
                continue
            except ValueError as error:
                text = f"the launcher of the job cannot be understood: {error}"
                raise UnavailableError(text) from error
            except OSError:
                found = None
            answer = found.content if found else _ScaleAnswer(error="the job has ended meanwhile")
            if "says" in answer:
                show(answer["says"])
                kept = answer["says"] if late else ""
            elif "done" in answer:
                return answer["done"]
            elif late and not interrupted:
                raise TimeoutError(f"not done within {timeout_s:g} s: {answer.get('error')}")
            else:
                why = answer.get("error", "the launcher gave no reason")
                raise ScaleError(why, answer.get("busy", False))
