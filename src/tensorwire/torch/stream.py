"""Reads a dataset that can only be iterated: one stream, which every worker reads as a whole.

Each process that reads keeps the samples of the steps that it is asked for, and only what its
worker computes is collated. It is asked by step and slice, as a dataset is by index, so that the
rest of a `Loader` treats both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from .order import (
    Dealing,
    Step,
    Steps,
    call_set_epoch,
    numbers_for,
    seed_for_a_batch,
)
from .random_numbers import seed_of


class StreamPass(NamedTuple):
    """A pass over a stream.

    Attributes:
        number: differs from those of all other passes of the loader in this process.
        epoch: for `set_epoch`.
        seed: of the random numbers that the stream draws.
    """

    number: int
    epoch: int
    seed: int


class Wanted(NamedTuple):
    """The batch of a slice that a process is asked for.

    Attributes:
        of: its pass.
        step, part: of the slice.
        seed: of what is random in collating it.
    """

    of: StreamPass
    step: int
    part: int
    seed: int


class About(NamedTuple):
    """The facts that the reader of a stream gives about a step.

    Attributes:
        sizes: samples of each slice; none: the stream has ended before.
        is_last: there is no further step.
        mark: checksum of the samples so far.
    """

    sizes: tuple[int, ...]
    is_last: bool
    mark: int


class FoundSlice(NamedTuple):
    """The samples of a slice."""

    about: About
    samples: list[Any]


class StreamReader(Dataset[Any]):
    """The samples of a stream, by step and slice; an earlier step makes it read all again."""

    def __init__(self, dataset: Any, dealing: Dealing) -> None:
        self._dataset, self._dealing = dataset, dealing
        self._of: StreamPass | None = None
        self._steps = Steps(iter(()), numbers_for((), 0), None)

    def __getitems__(self, wanted: Wanted) -> FoundSlice:
        if wanted.of != self._of or wanted.step < self._steps.first:
            self._begin(wanted.of)
        steps, step = self._steps, wanted.step
        if not steps.has(step):
            return FoundSlice(About((), True, 0), [])
        samples = steps[step]
        sizes = tuple(len(each) for each in samples)
        about = About(sizes, not steps.has(step + 1), steps.mark(step))
        # A worker of several slices computes a group of steps for each of them.
        steps.forget(step + 1 - self._dealing.accumulate)
        seed_for_a_batch(wanted.seed)
        return FoundSlice(about, samples[wanted.part])

    def _begin(self, of: StreamPass) -> None:
        self._of = of

        def samples() -> Iterator[Any]:
            call_set_epoch([self._dataset], of.epoch)
            yield from self._dataset

        numbers = numbers_for([self._dataset], of.seed)
        self._steps = Steps(self._dealing.steps(samples()), numbers, _firsts)


def _firsts(step: Step) -> list[Any]:
    """Returns the first sample of each slice."""
    return [each[0] for each in step]


class CollateFound:
    """A `collate_fn` for the findings of a `StreamReader`.

    Args:
        own: the user's; None: torch's.
    """

    def __init__(self, own: Callable[[list[Any]], Any] | None) -> None:
        self._own = own or default_collate

    def __call__(self, found: FoundSlice) -> tuple[About, Any]:
        """Returns the facts about the step, and the batch of the slice."""
        return found.about, self._own(found.samples) if found.about.sizes else None


class StreamPlan:
    """The plan of a pass over a stream, whose length is known from its last step on.

    Args:
        of: the pass.
        seed: parts of the seed of every batch.
    """

    def __init__(self, of: StreamPass, seed: tuple[int, ...]) -> None:
        self._of, self._seed = of, seed
        self._end: int | None = None
        self._about: dict[int, About] = {}

    def has(self, step: int) -> bool:
        """See `PassPlan`."""
        return self._end is None or step < self._end

    def request(self, step: int, index: int) -> Wanted:
        """See `PassPlan`."""
        return Wanted(self._of, step, index, seed_of(*self._seed, step, index, 0))

    def take(self, step: int, data: tuple[About, Any]) -> Any:
        """See `PassPlan`."""
        about, batch = data
        if not about.sizes:
            raise ValueError(
                f"the stream has ended before step {step + 1} of its pass, and had more steps when "
                "it was read before: its length must not change between runs, nor by process"
            )
        self._about[step] = about
        if about.is_last:
            self._end = step + 1
        return batch

    def sizes(self, step: int) -> Sequence[int]:
        """See `PassPlan`."""
        return self._about[step].sizes

    def mark(self, step: int) -> int:
        """See `PassPlan`."""
        return self._about[step].mark

    def forget(self, before: int) -> None:
        """See `PassPlan`."""
        for step in [each for each in self._about if each < before]:
            del self._about[step]
