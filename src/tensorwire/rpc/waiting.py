"""Waiting for a sender: for a word that it raises, or for what is read of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from tensorwire._core import Transfer
from tensorwire.errors import TimeoutError
from tensorwire.memory import Peer, Word
from tensorwire.memory.aio import wait_transfer

from .inbox import GivenUpError, RefusedError

GIVEN_UP = "nobody needs the message any more"

_SLICE_S = 0.05
_STALLED_S = 10.0


def wait_word(word: Word, value: int, peer: Peer, needed: Callable[[], bool]) -> None:
    """Waits until the sender has raised a word.

    Args:
        word: of this end.
        value: to which it is to be raised.
        peer: the sender.
        needed: asked meanwhile; False ends it.

    Raises:
        GivenUpError: nobody needs it.
        RefusedError: the sender does not go on.
        TensorwireError: the sender, or the memory, is gone.
    """
    until = time.monotonic() + _STALLED_S
    while word.value < value:
        try:
            word.wait_until(value, _SLICE_S, peer=peer)
        except TimeoutError:
            _look_at_time(until, needed)


async def wait_word_later(word: Word, value: int, peer: Peer, needed: Callable[[], bool]) -> None:
    """As `wait_word`, without blocking the event loop."""
    until = time.monotonic() + _STALLED_S
    while word.value < value:
        try:
            await word.reached(value, _SLICE_S, peer=peer)
        except TimeoutError:
            _look_at_time(until, needed)


def _look_at_time(until: float, needed: Callable[[], bool]) -> None:
    """Raises what ends the waiting for a sender."""
    if not needed():
        raise GivenUpError(GIVEN_UP) from None
    if time.monotonic() > until:
        raise RefusedError(f"the sender has not come further for {_STALLED_S} s") from None


def finish(transfer: Transfer, needed: Callable[[], bool]) -> None:
    """Waits for what is read of the sender's memory; raises as `wait_word`."""
    while True:
        try:
            transfer.wait(_SLICE_S)
            return
        except TimeoutError:
            if not needed():
                raise GivenUpError(GIVEN_UP) from None


async def finish_later(transfer: Transfer, needed: Callable[[], bool]) -> None:
    """As `finish`, without blocking the event loop."""
    while True:
        try:
            await wait_transfer(transfer, _SLICE_S)
            return
        except TimeoutError:
            if not needed():
                raise GivenUpError(GIVEN_UP) from None
