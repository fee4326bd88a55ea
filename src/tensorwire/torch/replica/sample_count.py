"""Adds up the weight of a slice's gradient in the mean over all slices: by default its samples."""

from __future__ import annotations

import warnings

from ..script_line import script_stacklevel
from ..session import GivenBatch, Session


class UnevenStepWarning(UserWarning):
    """A script seems to scale a loss by a sum that does not fit the weights of its batches.

    The text says what to do. Where the loss is right as it is,
    `warnings.filterwarnings("ignore", category=tw.UnevenStepWarning)`.
    """


class SampleCount:
    """The count of the samples of one optimizer's slices, and their weights.

    A batch counts once, when a gradient comes while it is the present one of a loader that is being
    iterated, of several the innermost; or if it is what `next(iter(loader))` gave and no step has
    used it. So evaluation, a pass that is over and what was withdrawn do not count. Where no loader
    gives batches, weights count that the script has given for gradients that were not withdrawn.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._counted: list[GivenBatch] = []
        self._before = session.batches  # when the last step was made
        self._given: list[float] = []  # by the script, where no loader gives batches
        self._used = 0  # of these, when the last gradient came
        self._came = False  # a gradient, where no loader gives batches

    def gradient_comes(self) -> None:
        """Notes the arrival of a gradient. A hook calls it, so it is cheap.

        Warns, once in a job and in worker 0, where another optimizer has made a step with the batch
        before it: of a worker's several slices only the last one then sees what that step did.
        """
        present = self._session.present_batch()
        if present is None:
            self._came, self._used = True, len(self._given)
        elif not self._counted or self._counted[-1] is not present:
            present.has_gradient = True
            self._counted.append(present)
            if present.stepped is not None and present.stepped is not self:
                self._warn_of_turns()

    def _warn_of_turns(self) -> None:
        session = self._session
        if session.warned_of_turns or len(session.turns.slices) == 1:
            return
        session.warned_of_turns = True
        if session.rank == 0:
            warnings.warn(_TURNS, stacklevel=script_stacklevel())

    def weigh(self, weight: float) -> None:
        """Notes the script's weight of its gradients, where no loader gives batches."""
        self._given.append(weight)

    def withdraw(self) -> None:
        """Withdraws the gradients since the last step."""
        self._counted.clear()
        # A script that weighs batches before backward() may have weighed the next one already.
        del self._given[: self._used or (len(self._given) if self._came else 0)]
        self._used, self._came = 0, False

    @property
    def _batches(self) -> list[GivenBatch]:
        present = self._session.present_batch()
        if not self._counted and present is not None and present.number > self._before:
            return [present]  # the model had no gradient for it
        return self._counted

    def samples(self) -> int:
        """Returns samples since the last step; 1 where no loader gives them."""
        return sum(batch.samples for batch in self._batches) or 1

    def weight(self) -> float:
        """Returns the samples' weight; 1 where no loader gives them and the script says nothing."""
        weights = [*(batch.weight for batch in self._batches), *self._given]
        return float(sum(weights)) if weights else 1.0

    def warn(self) -> None:
        """Gives an `UnevenStepWarning` before a step, once in a job and in worker 0, if need be."""
        session = self._session
        scaled = [batch for batch in self._counted if batch.summed]
        uneven = any(batch.uneven for batch in scaled)
        if not session.warned_of_weights and (uneven or any(batch.partial for batch in scaled)):
            session.warned_of_weights = True
            if session.rank == 0:
                text = (_TWICE if uneven else _PARTIAL) + _SILENCE
                warnings.warn(text, UnevenStepWarning, stacklevel=script_stacklevel())

    def stepped(self) -> None:
        """Begins the next slice."""
        self.withdraw()
        self._given.clear()
        self._before = self._session.batches
        if (present := self._session.present_batch()) is not None:
            present.stepped = self


_TWICE = (
    "the slices of this step have different numbers of samples and count by these, and the script "
    "has called job.sum() or job.mean() between its batch and backward(). If that scales the loss "
    "(local sum / sum of all workers * workers, as for DistributedDataParallel), it is weighted "
    'twice: say job.loader(…, weights="equal").'
)
_TURNS = (
    "this worker computes several slices of a step, and optimizers take turns with each of them: a "
    "gradient came after the step() of another optimizer. That step is made after the last slice, "
    "so earlier ones are computed with parameters from before it, and the result depends on the "
    "number of workers. Run with as many slices as workers (--slices). If the losses do not depend "
    'on each other: warnings.filterwarnings("ignore", message="this worker computes several")'
)
_PARTIAL = (
    'the loader has weights="equal", workers compute several slices of a step, and the script '
    "has called job.sum() or job.mean() between the batch of one and backward(). That adds up one "
    "slice of each worker, not all slices of the step. If it scales the loss, the gradient depends "
    "on the number of workers: let the loss be a mean over the slice, and say job.loader(…, "
    "weights=lambda batch: …) with what it is a mean of, such as tokens."
)
_SILENCE = (
    " If it does not scale the loss: "
    'warnings.filterwarnings("ignore", category=tw.UnevenStepWarning)'
)
