"""Describes the end of a call as its client sees it."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from ..payload.inbox import GivenUpError, SenderGoneError
from .frames import EndBody

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NoResponse(NamedTuple):
    """How a call ends whose response cannot be had."""

    code: grpc.StatusCode
    details: str


def failure_of(error: Exception) -> NoResponse | None:
    """What became of a response that was to be read; None if it is that it cannot be parsed."""
    if isinstance(error, GivenUpError):  # unless the call has ended already
        return NoResponse(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    if isinstance(error, SenderGoneError):
        return NoResponse(grpc.StatusCode.UNAVAILABLE, str(error))
    return None


def status_of(body: EndBody) -> tuple[grpc.StatusCode, str]:
    """The code and the details of an END."""
    code = _CODES.get(body.code)
    if code is None:
        return grpc.StatusCode.UNKNOWN, f"the server sent the unknown code {body.code}"
    return code, body.details
