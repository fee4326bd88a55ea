"""Words in memory of a peer, and transfers that raise one: signals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensorwire import _core
from tensorwire._core import Transfer

from .arguments import addend, word_value

if TYPE_CHECKING:
    from .peer import Peer


class RemoteWord:
    """A 64-bit word in a peer's region: a signal that one process raises, or a shared counter.

    Use a word for one of the two. As a signal it has one writer and only grows, so that a repeated
    signal is harmless; as a counter it is changed by `fetch_add` only.
    """

    __slots__ = ("_core", "offset", "peer")

    def __init__(self, peer: Peer, core: _core.RemoteRegion, offset: int) -> None:
        self.peer = peer
        self._core = core
        self.offset = offset

    def __repr__(self) -> str:
        return f"<RemoteWord at byte {self.offset} of {self._core.name!r} at {self.peer.name!r}>"

    def set(self, value: int, after: Sequence[Transfer] = ()) -> Transfer:
        """Raises the word to `value`, once all transfers in `after` are complete.

        A lower value changes nothing. If one of `after` fails, the word is not touched and this
        transfer fails with the same error.

        Args:
            value: 0 to 2**64 - 1.
            after: transfers of the same Node, to any of its peers.

        Raises:
            ValueError: the value does not fit, or a transfer belongs to another Node.
            ClosedError, PeerLostError, StaleHandleError, PermissionError: as for
                `RemoteRegion.write`.
        """
        return self.peer._core.signal(self._core, self.offset, word_value(value), after)

    def fetch_add(self, value: int = 1, timeout_s: float | None = None) -> int:
        """Adds to the word, modulo 2**64, in one atomic step, and returns the value before.

        `value` is -2**63 to 2**63 - 1.

        Executed by a CPU of the host that owns the memory, which must be alive. After an error it
        is unknown whether the addition took place; protocols that must count exactly once use
        signals.

        Raises:
            TimeoutError: the answer did not come in time; it may still be added.
            ValueError: the value does not fit.
            ClosedError, PeerLostError, StaleHandleError, PermissionError: as for
                `RemoteRegion.write`.
        """
        transfer = self.peer._core.fetch_add(self._core, self.offset, addend(value))
        transfer.wait(timeout_s)
        return transfer.value


Signal = tuple[RemoteWord, int]


def check_signal(signal: Any, peer: Peer) -> Signal:
    """Checks a `signal=` argument and returns (word, value)."""
    try:
        word, value = signal
    except (TypeError, ValueError) as error:
        raise TypeError(f"signal is (RemoteWord, value), not {signal!r}") from error
    if type(word) is not RemoteWord:
        raise TypeError(
            f"signal is (RemoteWord, value), and its first part is {type(word).__name__}; "
            "get one by remote.word(offset)"
        )
    if word.peer._core is not peer._core and not word.peer._core.follows(peer._core):
        raise ValueError(
            f"the signal's word is at {word.peer.name!r} and the transfer goes to {peer.name!r}; "
            "they must be at the same peer"
        )
    return word, word_value(value)
