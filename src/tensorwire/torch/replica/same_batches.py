"""Notices that several workers compute the same: their batches are equal.

Random numbers outside `job.loader` are the same in all workers, so a plain DataLoader that shuffles
gives all of them the same samples. Gradients tell it without a look at any data.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch

from tensorwire.memory import checksum

from ..script_line import script_stacklevel
from ..session import Session
from ..views import flat_bytes

_MASK = (1 << 64) - 1

STEPS = 3
"""The number of first steps that are compared."""


class SameBatchesWarning(UserWarning):
    """Several workers train with the same batches; the text says which, and what to do.

    Where that is meant, `warnings.filterwarnings("ignore", category=tw.SameBatchesWarning)`.
    """


class SameBatches:
    """A comparison of one optimizer's gradients among the workers.

    All workers make the same steps, so all of them compare at the same one; where each goes at its
    own pace nothing is compared.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        together = session.mode.is_sync and session.pipeline == 1
        self._steps = STEPS if session.replicas > 1 and together else 0
        self._found = 0
        self._counts = True

    @property
    def looks(self) -> bool:
        """True if the gradients of this step are compared."""
        return self._steps > 0

    def saved(self) -> tuple[int, int, bool]:
        """Returns the numbers for a successor of this process."""
        return self._steps, self._found, self._counts

    def go_on(self, saved: tuple[int, int, bool]) -> None:
        """Goes on where another process was."""
        self._steps, self._found, self._counts = saved

    def slice_comes(self, gradients: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Notes the gradients of a slice that is committed, by the index of the parameter."""
        found: list[int] = []
        nonzero = False
        for index, gradient in gradients:
            parts = _parts(gradient.detach())
            nonzero = nonzero or bool(parts[-1].any())
            found += [index, *(checksum(flat_bytes(part)) for part in parts)]
        self._counts = self._counts and nonzero and self._session.batches == 0
        self._found = hash((self._found, tuple(found)))

    def stepped(self) -> None:
        """Counts a version; warns in worker 0, at most once."""
        self._steps -= 1
        if self._steps:
            return
        session = self._session
        # The lowest bit tells that the worker counts.
        mine = (self._found << 1 | 1) & _MASK if self._counts else 0
        told = session.gather(mine.to_bytes(8, "little"))
        for one in told if session.rank == 0 else ():
            ranks = [rank for rank, each in enumerate(told) if each == one != bytes(8)]
            if len(ranks) > 1:
                warnings.warn(_text(ranks), SameBatchesWarning, stacklevel=script_stacklevel())
                return


def _parts(gradient: torch.Tensor) -> list[torch.Tensor]:
    if gradient.layout == torch.strided:
        return [gradient.contiguous()]
    gradient = gradient.coalesce()
    return [gradient.indices(), gradient.values().contiguous()]


def _text(ranks: Sequence[int]) -> str:
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return (
        f"workers {named} computed the same gradients, to the bit, in the first {STEPS} steps: "
        "their batches are equal, and do not come from job.loader. Random numbers outside of "
        "job.loader are the same in all workers, so that DataLoader(shuffle=True) gives everybody "
        "the same samples: use job.loader(dataset, batch_size, shuffle=True), or deal the data out "
        "by job.rank. If equal batches are meant: "
        'warnings.filterwarnings("ignore", category=tw.SameBatchesWarning)'
    )
