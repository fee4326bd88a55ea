"""Counts the samples of a slice's gradient: its weight in the mean over all slices."""

from __future__ import annotations

from ..session import Session


class SampleCount:
    """Counts the samples of one optimizer's slices.

    A batch counts once, when a gradient comes while it is the present one of a loader that is being
    iterated, of several the innermost; or if it is what `next(iter(loader))` gave and no step has
    used it. So evaluation, a pass that is over and what was withdrawn do not count.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._samples = 0
        self._batch = -1  # the last that was counted
        self._before = session.batches  # when the last step was made

    def gradient_comes(self) -> None:
        """A gradient has arrived. A hook calls it, so it is cheap."""
        present = self._session.present_batch()
        if present is not None and present[0] != self._batch:
            self._batch = present[0]
            self._samples += present[1]

    def withdraw(self) -> None:
        """The gradients since the last step do not count."""
        self._samples, self._batch = 0, -1

    def weight(self) -> float:
        """Samples since the last step; 1 where no loader gives them."""
        present = self._session.present_batch()
        if self._samples == 0 and present is not None and present[0] > self._before:
            return float(present[1])  # the model had no gradient for them
        return float(self._samples or 1)

    def stepped(self) -> None:
        """The next slice begins."""
        self.withdraw()
        self._before = self._session.batches
