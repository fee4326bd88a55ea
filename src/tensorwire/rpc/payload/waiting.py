"""Waits for a word that a sender raises."""

from __future__ import annotations

import time
from collections.abc import Callable

from tensorwire.errors import TimeoutError
from tensorwire.memory import Pace, Peer, Word

from .inbox import GivenUpError, StalledError

GIVEN_UP = "nobody needs the message any more"

_SLICE_S = 0.05
STALLED_S = 10.0


def nothing_new() -> int:
    """Returns 0, for a sender whose progress only its word shows."""
    return 0


def wait_word(
    word: Word,
    value: int,
    peer: Peer,
    needed: Callable[[], bool],
    news: Callable[[], int] = nothing_new,
    longest_s: float | None = None,
    pace: Pace | None = None,
) -> None:
    """Waits until the sender has raised a word.

    Args:
        word: of this end.
        value: to which it is to be raised.
        peer: the sender.
        needed: asked meanwhile; False ends it.
        news: a number that changes while the sender goes on.
        longest_s: how long it may take without news; None: `STALLED_S`.
        pace: of earlier waits for the same kind of word, see `Word.wait_until`.

    Raises:
        GivenUpError: it is not needed any more.
        RefusedError: the sender has not gone on for `longest_s`.
        TensorwireError: the sender, or the memory, is gone.
    """
    patience = _Patience(needed, news, longest_s)
    while word.value < value:
        try:
            word.wait_until(value, _SLICE_S, peer=peer, pace=pace)
        except TimeoutError:
            patience.look()


class _Patience:
    """A limit for the wait for a sender."""

    def __init__(
        self, needed: Callable[[], bool], news: Callable[[], int], longest_s: float | None
    ) -> None:
        self._needed = needed
        self._news = news
        self._seen = -1
        self._longest_s = STALLED_S if longest_s is None else longest_s
        self._until = time.monotonic() + self._longest_s

    def look(self) -> None:
        """Raises the reason to end the wait, if there is one."""
        if not self._needed():
            raise GivenUpError(GIVEN_UP) from None
        seen, now = self._news(), time.monotonic()
        if seen != self._seen:
            self._seen, self._until = seen, now + self._longest_s
        elif now > self._until:
            raise StalledError(
                f"the sender has not come further for {self._longest_s:.3g} s"
            ) from None
