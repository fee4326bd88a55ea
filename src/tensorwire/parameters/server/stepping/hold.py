"""Pauses a store, at server 0: it waits before it tells the workers that a step is made.

The step is made, and its values are in place at this server. No worker goes further before all
servers have told it, so that the others stand still, too. The notes outlive the server.
"""

from __future__ import annotations

import contextlib

from tensorwire.errors import ClosedError, TimeoutError
from tensorwire.memory import Word

from ...hold import EDIT_AT, HELD_AT, TAKEN_AT, held_version, held_word, hold_bytes, is_wanted
from ...regions import RegionKind
from ..lending.lending import Lending
from ..opening import Opening

_LOOK_S = 0.02  # for parameters that were written; only while the store stands still


class Hold:
    """The pause of one store, at server 0. Used by the store's thread.

    Args:
        opening: of the store.
        pause: the word by which the job is paused.
        lending: shows it to readers; None: the store cannot be read as files.
    """

    def __init__(self, opening: Opening, pause: Word, lending: Lending | None) -> None:
        self._opening, self._pause, self._lending = opening, pause, lending
        size = hold_bytes(len(opening.spec.tensors))
        region = opening.allocate(RegionKind.HOLD, None, size)
        self._held, self._edit = region.word(HELD_AT), region.word(EDIT_AT)
        self._taken = region.word(TAKEN_AT)

    def stand(self, version: int) -> bool:
        """Waits for the end of a pause, if there is one; tells whether parameters were written.

        Raises:
            ClosedError: the job is over.
        """
        if not is_wanted(self._pause.value):
            return False
        self._held.set(held_word(version))
        self._show()
        self._wait(version)
        return self._taken.value == version

    def is_at(self, version: int) -> bool:
        """Tells whether a predecessor stood still at a version: the next one has not begun."""
        return held_version(self._held.value) == version

    def stand_again(self, version: int) -> bool:
        """Stands still like `stand`, at a predecessor's version, if the predecessor did."""
        if self.is_at(version):
            self._show()
            self._wait(version)
        return self._taken.value == version

    def _wait(self, version: int) -> None:
        opening = self._opening
        while True:
            wanted = self._pause.value
            if self._edit.value == version:
                self._taken.set(version)
            if not is_wanted(wanted):
                break
            if opening.closing.is_set() or opening.member.all_left():
                raise ClosedError("the job is over")
            with contextlib.suppress(TimeoutError):
                self._pause.wait_until(wanted + 1, _LOOK_S)
        self._held.set(held_word(version, over=True))
        self._show()

    def _show(self) -> None:
        if self._lending is not None:
            self._lending.show_held(self._held.value)
