"""Gives a script the batches of its worker's slices, in an order that seed and epoch decide."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, takewhile, tee
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from .data_source import DataSource, LoaderData
from .means import checked_weight
from .order import PassPlan, Seeded
from .position import ALL_STEPS, LoaderPass
from .random_numbers import (
    BEHIND_A_PASS,
    IN_A_STEP,
    random_state,
    seed_all,
    seed_of,
    set_random_state,
)
from .session import Session
from .stream import CollateFound, StreamReader
from .turns import BatchOrder


def checked_seed(seed: Any) -> int:
    """Returns a seed that torch takes; raises TypeError or ValueError for others."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"a seed is a whole number, not {seed!r}") from None
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"a seed is a number of 64 bits, as for torch.manual_seed, not {seed}")
    return number


def generator_of(
    session: Session, step: int, slice_index: int | None, epoch: int | None
) -> torch.Generator:
    """See `Job.generator`."""
    if slice_index is None:
        slice_index = session.turns.default_slice
    if slice_index is None:
        raise ValueError(
            f"this worker computes the slices {list(session.my_slices)}: say for which one "
            "the generator is, job.generator(step, slice_index)"
        )
    epoch = session.epoch if epoch is None else epoch
    if min(step, slice_index, epoch) < 0:
        raise ValueError("step, slice and epoch are numbers from 0 up")
    # The last part keeps these apart from the loader's.
    return torch.Generator().manual_seed(seed_of(session.seed, epoch, step, slice_index, -1))


class ShardOfData(Subset[Any]):
    """A worker's part of a dataset, with the parts of workers whose slices it takes over."""

    def __init__(self, dataset: Dataset[Any], session: Session) -> None:
        self._session = session
        self._found: tuple[Sequence[int], Sequence[int]] = (), ()
        super().__init__(dataset, ())

    @property
    def indices(self) -> Sequence[int]:
        """The indices of its samples."""
        ranks, replicas = self._session.ranks, self._session.replicas
        if self._found[0] != ranks:
            size = len(self.dataset)  # type: ignore[arg-type]
            self._found = ranks, [i for rank in ranks for i in range(rank, size, replicas)]
        return self._found[1]

    @indices.setter
    def indices(self, value: Sequence[int]) -> None:
        """Ignores what `Subset` sets: the indices follow from the session."""


def shard_of(dataset: Dataset[Any], session: Session) -> Subset[Any]:
    """See `Job.shard`."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            "job.shard needs a dataset with a length; of others take every "
            "job.replicas-th sample yourself, as by itertools.islice(data, job.replica, None, "
            "job.replicas)"
        )
    if session.turns.grows:
        return ShardOfData(dataset, session)
    size = len(dataset)  # type: ignore[arg-type]
    return Subset(dataset, range(session.replica, size, session.replicas))


class _RequestOrder(Sampler[Any]):
    """The requested indices of one pass, in the order in which this worker computes them."""

    def __init__(self) -> None:
        self.now: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.now)


class _BeginWorker:
    """The start of a loader's process: `get_worker_info` shows the user's dataset, not our wrapper.

    Args:
        own: the user's `worker_init_fn`, called after that.
        alone: a stream is shown one process, since each of them reads all of it.
    """

    def __init__(self, own: Callable[[int], None] | None, alone: bool) -> None:
        self._own, self._alone = own, alone

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        object.__setattr__(info, "dataset", info.dataset._dataset)  # frozen, as users see it
        if self._own is not None:
            self._own(number)
        if self._alone:
            object.__setattr__(info, "id", 0)
            object.__setattr__(info, "num_workers", 1)


class Loader:
    """The loader that `Job.loader` makes. Each iteration over it is a pass; an epoch may have more.

    Attributes:
        dataset: as given, or the given DataLoader's.
        batch_size: of one slice, as given.
    """

    def __init__(
        self,
        session: Session,
        begin_pass: Callable[[int | None, int], None],
        given: LoaderData,
        accumulate: int,
        weights: str | Callable[[Any], float] | None,
    ) -> None:
        if isinstance(given.dataset, Loader):
            raise TypeError("job.loader needs the data, and not another job.loader of them")
        if weights is not None and weights != "equal" and not callable(weights):
            raise ValueError(
                'weights is None (by samples), "equal", or a function that returns the weight of '
                f"a batch, as lambda batch: int(batch['mask'].sum()); not {weights!r}"
            )
        self._source = source = DataSource(given, session.slices, accumulate)
        self.dataset, self.batch_size = source.dataset, source.batch_size
        self._session, self._begin_pass = session, begin_pass
        self._accumulate, self._weights = accumulate, weights
        self._name = session.position.name_of_next_loader()
        self._number_of_name = crc32(self._name.encode())
        self._epoch, self._passes, self._plans = session.position.began, 0, 0
        self._data = f"{source.name} in {source.dealing}, shuffle={source.shuffle}, "
        self._data += f"drop_last={source.dealing.drop_last}, accumulate={accumulate}"
        self._before = session.position.orders[self._data]  # passes of loaders made before
        self._requests = _RequestOrder()
        self._generator = torch.Generator()
        options, reader = source.options, Seeded(source.dataset)
        if source.is_stream:
            reader = StreamReader(source.dataset, source.dealing)
            options["collate_fn"] = CollateFound(options.get("collate_fn"))
        if options.get("num_workers"):
            own = options.get("worker_init_fn")
            options["worker_init_fn"] = _BeginWorker(own, source.is_stream)
        self._loader = DataLoader(
            reader, batch_sampler=self._requests, generator=self._generator, **options
        )

    def __len__(self) -> int:
        """Returns how many batches this worker gets in a pass.

        Raises:
            TypeError: it is unknown, since the data or their sampler have no length.
        """
        if self._source.steps is None:
            raise TypeError(
                f"the number of batches of {self._source.name} is unknown: give the data, or their "
                "sampler, a __len__"
            )
        steps = self._source.steps
        if not self._source.is_exact:  # it depends on the sizes of the last batches
            _, plan = self._plan(self._number())
            steps = sum(1 for _ in takewhile(plan.has, range(steps)))
        return steps * len(self._session.my_slices)

    @property
    def first_batch(self) -> int:
        """The number of batches of the next pass that a checkpoint already has.

        The pass goes on after them: `enumerate(loader, loader.first_batch)` counts as before.
        """
        first = self._session.position.first_step(self._name, self._number(), self._groups)
        return first * self._batches_per_step

    @property
    def _groups(self) -> int:
        """The optimizer's steps in a pass."""
        steps = self._source.steps
        return ALL_STEPS if steps is None else steps // self._accumulate

    @property
    def _batches_per_step(self) -> int:
        return self._accumulate * len(self._session.my_slices)

    def _number(self) -> int:
        """Returns the number of the next pass in this epoch."""
        if self._session.position.began != self._epoch:
            self._epoch, self._passes, self._before = self._session.position.began, 0, 0
        return self._passes

    def _count_pass(self) -> None:
        """Counts a pass; a look at the first batch alone is not counted."""
        self._passes += 1
        if self._source.is_random:
            self._session.position.orders[self._data] += 1

    def _plan(self, number: int) -> tuple[int, PassPlan]:
        """Returns the number that stands for the epoch in all seeds of a pass, and its plan."""
        session, number = self._session, self._before + number
        # A second pass within an epoch has an order of its own.
        epoch = session.epoch if number == 0 else seed_of(session.epoch, number)
        self._plans += 1
        return epoch, self._source.plan(session.seed, epoch, self._plans, self._generator)

    def __iter__(self) -> Iterator[Any]:
        session, number = self._session, self._number()
        trains = torch.is_grad_enabled()
        session.turns.check_present("a new pass of a loader")
        session.turns.check("a new pass of a loader")
        epoch, plan = self._plan(number)

        def seed(step: int, index: int) -> int:
            # Each process of a pipeline draws other numbers.
            return seed_of(session.seed, epoch, step, index, 1 + session.stage)

        if not trains:
            order = BatchOrder(session.turns, plan.has, 0, self._accumulate)
            yield from self._give(plan, seed, order, None)
            return
        begun = session.position.begin(
            self._name, number, self._data, self._groups,
            session.turns.batches_per_step(self._accumulate),
        )  # fmt: skip
        steps = None if self._groups == ALL_STEPS else self._groups
        self._begin_pass(steps, begun.first_step)
        if begun.first_step:
            self._count_pass()
        try:
            if begun.first_step == ALL_STEPS:
                pass  # it was over before
            else:
                first = begun.first_step * self._accumulate
                order = session.turns.batches(
                    plan.has, lambda step, index: plan.sizes(step)[index], first, self._accumulate,
                    partial(self._begin_batch, begun), session.is_ahead,
                )  # fmt: skip
                yield from self._give(plan, seed, order, begun)
        finally:
            session.position.end(self._name, begun)
            if not session.closed:
                session.rejoin.end_pass(self._name, number)

    def _begin_batch(self, of: LoaderPass) -> None:
        self._session.rejoin.begin_batch(self._name, of.number, of.given == 0)

    def _give(
        self,
        plan: PassPlan,
        seed: Callable[[int, int], int],
        order: BatchOrder,
        of: LoaderPass | None,
    ) -> Iterator[Any]:
        """Gives out batches, each with its step and the random numbers of its seed."""
        session, this = self._session, object()
        looked_at = of is None or of.first_step == 0
        before = random_state() if of is None else None
        planned: Iterator[tuple[int, int]] = iter(())
        given: Iterator[Any] = iter(())
        try:
            while (turn := order.next()) is not None:
                if next(planned, None) != turn:
                    asked, planned = tee(chain([turn], order.rest()))
                    self._requests.now = (plan.request(*each) for each in asked)
                    given = iter(self._loader)
                    next(planned)
                step, index = turn
                data = plan.take(step, next(given))
                self._batch_comes(this, plan, step, index, data, of)
                seed_all(seed(step, index))
                if of is not None:
                    self._begin_step(step, of)
                    session.turns.give(index)
                    of.given = order.given
                yield data
                plan.forget(order.began)
                if looked_at:
                    looked_at = False
                    self._count_pass()
            session.pass_ends(this, False)
        finally:
            session.pass_ends(this, of is not None)
            if session.gave_last(this):
                if before is not None:
                    set_random_state(before)  # an evaluation leaves no trace
                elif of is not None:
                    self._draw_alike(of)

    def _batch_comes(
        self, this: object, plan: PassPlan, step: int, index: int, data: Any, of: LoaderPass | None
    ) -> None:
        """Notes that a batch is given out, with its weight."""
        sizes = plan.sizes(step)
        weight = float(sizes[index])
        if of is not None:
            of.mark = plan.mark(step)
            of.is_last = not plan.has(step + 1)
            if callable(self._weights):
                weight = checked_weight(self._weights(data))
            elif self._weights is not None:
                weight = 1.0
        batch = self._session.batch_comes(this, sizes[index], weight)
        if of is not None and self._weights is None:
            batch.uneven = len(set(sizes)) > 1
        elif of is not None and not callable(self._weights):
            batch.partial = index < max(self._session.my_slices)

    def _begin_step(self, step: int, of: LoaderPass) -> None:
        """Seeds the numbers that an optimizer draws in the step, the same for all its slices."""
        step //= self._accumulate
        self._session.step_seed = self._seed_of_pass(of, step, IN_A_STEP)

    def _draw_alike(self, ended: LoaderPass) -> None:
        """Makes all workers draw the same numbers after a pass, independent of its slices."""
        self._session.step_seed = None
        steps = self._source.steps
        seed_all(self._seed_of_pass(ended, -1 if steps is None else steps, BEHIND_A_PASS))

    def _seed_of_pass(self, of: LoaderPass, step: int, what: int) -> int:
        session = self._session
        return seed_of(session.seed, session.epoch, self._number_of_name, of.number, step, what)
