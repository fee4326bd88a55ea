"""Deals the data of a job to slices, in an order that seed and epoch decide, not the workers."""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from .position import LoaderPass
from .random_numbers import (
    BEHIND_A_PASS,
    IN_A_STEP,
    random_state,
    seed_all,
    seed_of,
    set_random_state,
)
from .session import Session
from .taking import BatchTurns, Taking


def checked_seed(seed: Any) -> int:
    """A seed that torch takes; raises TypeError or ValueError for others."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed is a whole number, not {seed!r}") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"a seed is a number of 64 bits, as for torch.manual_seed, not {seed}")
    return number


def deal(count: int, slices: int, batch_size: int, drop_last: bool) -> list[list[tuple[int, int]]]:
    """Returns for every step and slice [start, stop) of its samples in the epoch's order.

    What does not fill a step is a step of its own, shared equally; if it has not a sample for every
    slice, the step before takes it too.

    Raises:
        ValueError: fewer samples than slices.
    """
    if count < slices:
        raise ValueError(f"{count} samples cannot be dealt to {slices} slices; each needs one")
    whole = batch_size * slices
    ends = list(range(whole, count + 1, whole))
    rest = count - (ends[-1] if ends else 0)
    if rest and not drop_last:
        if rest < slices and ends:
            ends[-1] = count
        else:
            ends.append(count)
    steps, start = [], 0
    for end in ends:
        size = end - start
        bounds = [start + size * i // slices for i in range(slices + 1)]
        steps.append(list(pairwise(bounds)))
        start = end
    return steps


def generator_of(
    session: Session, step: int, slice_index: int | None, epoch: int | None
) -> torch.Generator:
    """See `Job.generator`."""
    taking = session.taking
    if slice_index is None and taking is not None:
        slice_index = taking.default_slice
    if slice_index is None:
        if len(session.my_slices) > 1:
            raise ValueError(
                f"this worker computes the slices {list(session.my_slices)}: say for which one "
                "the generator is, job.generator(step, slice_index)"
            )
        slice_index = session.my_slices[0]
    epoch = session.epoch if epoch is None else epoch
    if min(step, slice_index, epoch) < 0:
        raise ValueError("step, slice and epoch are numbers from 0 up")
    # The last part keeps these apart from the loader's.
    return torch.Generator().manual_seed(seed_of(session.seed, epoch, step, slice_index, -1))


class ShardOfData(Subset[Any]):
    """A worker's part of a dataset, with those of workers whose slices it takes over."""

    def __init__(self, dataset: Dataset[Any], session: Session) -> None:
        self._session = session
        self._found: tuple[Sequence[int], Sequence[int]] = (), ()
        super().__init__(dataset, ())

    @property
    def indices(self) -> Sequence[int]:
        """Those of its samples."""
        ranks, replicas = self._session.ranks, self._session.replicas
        if self._found[0] != ranks:
            size = len(self.dataset)  # type: ignore[arg-type]
            self._found = ranks, [i for rank in ranks for i in range(rank, size, replicas)]
        return self._found[1]

    @indices.setter
    def indices(self, value: Sequence[int]) -> None:
        """Set by the class above; it is a function of the session."""


def shard_of(dataset: Dataset[Any], session: Session) -> Subset[Any]:
    """See `Job.shard`."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            "job.shard needs a dataset with a length; of others take every "
            "job.replicas-th sample yourself, as by itertools.islice(data, job.replica, None, "
            "job.replicas)"
        )
    if session.taking is not None:
        return ShardOfData(dataset, session)
    size = len(dataset)  # type: ignore[arg-type]
    return Subset(dataset, range(session.replica, size, session.replicas))


class _Batch(list[int]):
    """Indices of samples, and the seed of what is random in reading them."""

    def __init__(self, indices: Iterable[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


class _Batches(Sampler[_Batch]):
    """This worker's batches of one epoch, in the order in which it computes them."""

    def __init__(self) -> None:
        self.now: list[_Batch] = []

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class _Seeded(Dataset[Any]):
    """A dataset whose random numbers depend on the batch, not on the process that reads it."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: _Batch) -> list[Any]:
        torch.default_generator.manual_seed(batch.seed)
        if get_worker_info() is not None:  # a process of the loader: these are its own
            random.seed(batch.seed)
            np.random.seed(batch.seed & 0xFFFFFFFF)
        if hasattr(self._dataset, "__getitems__"):
            items: list[Any] = self._dataset.__getitems__(list(batch))
            return items
        return [self._dataset[index] for index in batch]


class _BeginWorker:
    """Begins a process of a loader: `get_worker_info` shows the user's dataset, not our wrapper.

    Args:
        own: the user's `worker_init_fn`, called after that.
    """

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset._dataset)  # frozen, as users see it
        if self._own is not None:
            self._own(number)


class Loader:
    """Made by `Job.loader`. Iterating it is one epoch.

    Attributes:
        dataset: as given.
        batch_size: as given, of one slice.
    """

    def __init__(
        self,
        session: Session,
        begin_pass: Callable[[int, int], None],
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        accumulate: int,
        options: dict[str, Any],
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError("a loader needs a dataset with a length; iterate others yourself")
        for name, number in (("batch_size", batch_size), ("accumulate", accumulate)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is a whole number from 1 up, not {number!r}")
        for name in ("sampler", "batch_sampler", "generator"):
            if options.get(name) is not None:
                raise ValueError(
                    f"the job chooses the samples, so that each is in one slice; {name}= cannot be "
                    "given. Of a part give torch.utils.data.Subset(dataset, indices); for another "
                    "order or weights iterate a DataLoader of your own, other samples per worker"
                )
        self.dataset, self.batch_size = dataset, batch_size
        self._session, self._begin_pass = session, begin_pass
        self._shuffle, self._accumulate = shuffle, accumulate
        self._name = session.position.name_of_next_loader()
        self._number_of_name = crc32(self._name.encode())
        self._length = len(dataset)
        self._epoch, self._passes = session.position.began, 0
        steps = deal(self._length, session.slices, batch_size, drop_last)
        if not steps:
            raise ValueError(
                f"{self._length} samples do not fill one step of {session.slices} x {batch_size}"
            )
        # Batches that would not fill a group are left out: a step is of complete slices.
        self._steps = steps[: len(steps) // accumulate * accumulate]
        if not self._steps:
            raise ValueError(f"{len(steps)} steps are fewer than accumulate={accumulate}")
        self._data = (
            f"{self._length} samples in {session.slices} slices of {batch_size}, "
            f"shuffle={shuffle}, drop_last={drop_last}, accumulate={accumulate}"
        )
        self._batches = _Batches()
        self._generator = torch.Generator()
        if options.get("num_workers"):
            options = {**options, "worker_init_fn": _BeginWorker(options.get("worker_init_fn"))}
        self._loader = DataLoader(
            _Seeded(dataset), batch_sampler=self._batches, generator=self._generator, **options
        )

    def __len__(self) -> int:
        """Batches that this worker gets in an epoch."""
        return len(self._steps) * len(self._session.my_slices)

    @property
    def first_batch(self) -> int:
        """How many batches of the next pass were given out before a checkpoint was saved.

        It goes on behind them: `enumerate(loader, loader.first_batch)` counts as before.
        """
        steps = len(self._steps) // self._accumulate
        first = self._session.position.first_step(self._name, self._number(), steps)
        return first * self._batches_per_step

    @property
    def _batches_per_step(self) -> int:
        return self._accumulate * len(self._session.my_slices)

    def _number(self) -> int:
        """That of the next pass in this epoch."""
        if self._session.position.began != self._epoch:
            self._epoch, self._passes = self._session.position.began, 0
        return self._passes

    def __iter__(self) -> Iterator[Any]:
        session, number = self._session, self._number()
        # A second pass within an epoch has an order of its own.
        epoch = session.epoch if number == 0 else seed_of(session.epoch, number)
        generator = self._generator.manual_seed(seed_of(session.seed, epoch))
        order = (
            torch.randperm(self._length, generator=generator, device="cpu").tolist()
            if self._shuffle
            else range(self._length)
        )

        def batch(step: int, index: int) -> _Batch:
            start, stop = self._steps[step][index]
            return _Batch(order[start:stop], seed_of(session.seed, epoch, step, index, 0))

        def seed(step: int, index: int) -> int:
            # Each process of a pipeline draws other numbers.
            return seed_of(session.seed, epoch, step, index, 1 + session.stage)

        trains = torch.is_grad_enabled()
        session.check_present("a new pass of a loader")
        session.check_due("a new pass of a loader")
        if session.taking is None or not trains:
            turns = list(self._mine())
            batches = [batch(*each) for each in turns]
            seeds = [(step, seed(step, index)) for step, index in turns]
        if not trains:
            yield from self._give(batches, seeds, None)
            return
        steps = len(self._steps) // self._accumulate
        begun = session.position.begin(
            self._name, number, self._data, steps, self._batches_per_step
        )
        self._begin_pass(steps, begun.first_step)
        first = begun.first_step * self._batches_per_step
        self._passes += first > 0
        try:
            if session.taking is not None:
                yield from self._give_in_turn(session.taking, begun, batch, seed)
            else:
                yield from self._give(batches[first:], seeds[first:], begun)
        finally:
            session.position.end(self._name, begun)
            if session.rejoin is not None and not session.closed:
                session.rejoin.end_pass(self._name, number)

    def _give(
        self, batches: list[_Batch], seeds: list[tuple[int, int]], of: LoaderPass | None
    ) -> Iterator[Any]:
        """Gives out batches, each with its step and the random numbers of its seed."""
        self._batches.now = batches
        session, looked_at = self._session, of is None or of.first_step == 0
        before = random_state() if of is None else None
        this = object()
        given = zip(batches, seeds, self._loader, strict=True)
        rejoin = None if of is None else session.rejoin
        try:
            while True:
                if rejoin is not None and of is not None:
                    rejoin.begin_batch(self._name, of.number, of.given == 0)
                if (each := next(given, None)) is None:
                    break
                batch, (step, seed), data = each
                seed_all(seed)
                session.batch_comes(this, len(batch))
                if of is not None:
                    self._begin_step(step, of)
                    of.given += 1
                yield data
                if looked_at:
                    looked_at = False
                    self._passes += 1  # who only looked at the first batch has made no pass
            session.pass_ends(this, False)
        finally:
            session.pass_ends(this, of is not None)
            if session.gave_last(this):
                if before is not None:
                    set_random_state(before)  # an evaluation leaves no trace
                elif of is not None:
                    self._draw_alike(of)

    def _begin_step(self, step: int, of: LoaderPass) -> None:
        """An optimizer that draws numbers draws those of the step, of which all slices are one."""
        step //= self._accumulate
        self._session.step_seed = self._seed_of_pass(of, step, IN_A_STEP)

    def _draw_alike(self, ended: LoaderPass) -> None:
        """Behind a pass all workers draw the same numbers, of which none depends on its slices."""
        self._session.step_seed = None
        seed_all(self._seed_of_pass(ended, len(self._steps), BEHIND_A_PASS))

    def _seed_of_pass(self, of: LoaderPass, step: int, what: int) -> int:
        session = self._session
        return seed_of(session.seed, session.epoch, self._number_of_name, of.number, step, what)

    def _give_in_turn(
        self,
        taking: Taking,
        of: LoaderPass,
        batch: Callable[[int, int], _Batch],
        seed: Callable[[int, int], int],
    ) -> Iterator[Any]:
        """As `_give`, where slices may be taken over: what comes next is known when it comes."""
        session, this, looked_at = self._session, object(), of.first_step == 0

        def begin_step() -> None:
            if session.rejoin is not None:
                session.rejoin.begin_batch(self._name, of.number, of.given == 0)

        of.batches_per_step = self._accumulate
        turns = BatchTurns(
            taking,
            lambda step, index: len(range(*self._steps[step][index])),
            len(self._steps),
            of.first_step * self._accumulate,
            self._accumulate,
            lambda: session.my_slices,
            session.is_ahead,
            begin_step,
        )
        planned: deque[tuple[int, int]] = deque()
        given: Iterator[Any] = iter(())
        try:
            while (each := turns.next()) is not None:
                if not planned or planned[0] != each:
                    planned = deque([each, *turns.rest()])
                    self._batches.now = [batch(*every) for every in planned]
                    given = iter(self._loader)
                planned.popleft()
                data = next(given)
                seed_all(seed(*each))
                session.batch_comes(this, len(range(*self._steps[each[0]][each[1]])))
                self._begin_step(each[0], of)
                taking.give(each[1])
                of.given = turns.given
                yield data
                if looked_at:
                    looked_at = False
                    self._passes += 1
            session.pass_ends(this, False)
        finally:
            session.pass_ends(this, True)
            if session.gave_last(this):
                self._draw_alike(of)

    def _mine(self) -> Iterator[tuple[int, int]]:
        """(step, slice) of this worker's batches: what a slice accumulates comes together."""
        for first in range(0, len(self._steps), self._accumulate):
            steps = range(first, min(first + self._accumulate, len(self._steps)))
            for index in self._session.my_slices:
                for step in steps:
                    yield step, index
