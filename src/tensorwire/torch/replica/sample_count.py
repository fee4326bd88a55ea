"""How many samples a slice's gradient stands for: its weight in the mean over all slices."""

from __future__ import annotations

from ..session import Session


class SampleCount:
    """Counts the samples of one optimizer's slices.

    A batch counts once, when a gradient comes while it is the loader's present one. So evaluation,
    a look at a batch, and what was withdrawn do not count.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._samples = 0
        self._batch = -1  # the last that was counted
        self._before = session.batches  # when the last step was made

    def gradient_comes(self) -> None:
        """A gradient has arrived. A hook calls it, so it is cheap."""
        session = self._session
        if session.batches != self._batch:
            self._batch = session.batches
            if session.batches > 0:
                self._samples += session.batch_samples

    def withdraw(self) -> None:
        """The gradients since the last step do not count."""
        self._samples, self._batch = 0, -1

    def weight(self) -> float:
        """Samples since the last step; 1 where no loader gives them."""
        if self._samples == 0 and self._session.batches > self._before:
            return float(self._session.batch_samples)  # the model had no gradient for them
        return float(self._samples or 1)

    def stepped(self) -> None:
        """The next slice begins."""
        self.withdraw()
        self._before = self._session.batches
