"""Defines `Job`, by which a script trains with other workers.

The Job has what decides a result besides the model: seeds, the position in the data, the objects it
was asked to keep. How workers reach each other is the `Session`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch.utils.data import Dataset, Subset

from tensorwire.membership.world import World
from tensorwire.parameters import Mode, Result

from . import checkpoint, discovery
from .console import ProgressLine
from .data_source import LoaderData
from .ending import (
    end_with_error,
    ending_error,
    is_interactive,
    tell_of_failed_write,
    tell_of_no_step,
)
from .loader import Loader, generator_of, shard_of
from .means import as_number, checked_weight, mean_of
from .modes import told_of
from .plain_steps import PlainSteps
from .position import ALL_STEPS
from .replica.closed import ClosedReplica
from .replica.replica import Replica
from .saving import Saving
from .session import Session
from .taking.taking import Taking
from .worker_state import obstacles

on_step: Callable[[Job], None] | None = None
"""Called after every version of every optimizer of this process; for `explain`."""


class Job:
    """The common actions of a job's workers; made by `tw.init`.

    Attributes:
        size: number of workers; where they come and go the most that there can be.
        pipeline: how many workers share a model that is split; 1: each has all of it.
        replicas: copies of the model that train together: size / pipeline.
        stage: which process of its replica this is.
        slices: parts of a step.
        seed: of everything random.
        session: how this worker reaches the others; for modules of tensorwire.
        local_replicas: for each distributed optimizer the copy of its model in this process; they
            end with the job.
    """

    def __init__(self, world: World, seed: int, mode: Mode, given: Mapping[str, Any]) -> None:
        self.session = session = Session(world, seed, mode, Taking)
        self.size = session.size
        self.pipeline = session.pipeline
        self.replicas = session.replicas
        self.stage = session.stage
        self.slices = session.slices
        self.seed = session.seed
        self.statistics = session.statistics
        self.local_replicas: list[Replica] = []
        self.closed = False
        self._pid = os.getpid()
        self._given = given
        self._tracked: dict[str, Any] = {}
        self._saving = Saving(session, self._tracked, self.local_replicas)
        self._epochs: object = None  # the present loop of `epochs`
        self._progress: ProgressLine | None = None
        session.after_step.append(self._after_step)
        self._plain_steps = PlainSteps(self.size) if self.size > 1 and self.rank == 0 else None
        torch.manual_seed(self.seed)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing may end without what atexit does.
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    def __repr__(self) -> str:
        replicas = "" if self.pipeline == 1 else f", pipelines of {self.pipeline}"
        return f"<Job worker {self.rank} of {self.size}, {self.slices} slices{replicas}>"

    @property
    def rank(self) -> int:
        """This worker, 0 to size - 1.

        After it has taken over another worker's slices, that worker's rank if it is lower.
        """
        return self.session.rank

    @property
    def replica(self) -> int:
        """The replica that this worker belongs to, 0 to replicas - 1; it changes like `rank`."""
        return self.session.replica

    @property
    def my_slices(self) -> Sequence[int]:
        """The slices that this worker, with its replica, computes in turn."""
        return self.session.my_slices

    @property
    def step_complete(self) -> bool:
        """True if the last `step()` has made a version, of all slices of this worker.

        A worker may have several slices, or take over a killed worker's. Then work that belongs to
        a whole step, as a scheduler's step for each batch, is done `if job.step_complete:`.
        """
        return not any(replica.reducer.turn for replica in self.local_replicas)

    @property
    def epoch(self) -> int:
        """The present epoch inside `epochs`, from 0."""
        return self.session.epoch

    @property
    def batches(self) -> int:
        """The number of batches that this worker's loaders have given out."""
        return self.session.batches

    @property
    def batch_samples(self) -> int:
        """Samples in the last batch."""
        return self.session.batch_samples

    # ---- optimizers

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The distributed optimizers of this process."""
        return [replica.optimizer for replica in self.local_replicas]

    @contextlib.contextmanager
    def editing(self, model: Any) -> Iterator[None]:
        """See `tw.edit`."""
        replicas = [replica for replica in self.local_replicas if replica.shares(model)]
        if not replicas:
            raise RuntimeError(
                "no DistributedOptimizer has parameters of this model; edit it freely"
            )
        with contextlib.ExitStack() as stack:
            for replica in replicas:
                stack.enter_context(replica.editing())
            yield

    def _after_step(self, result: Result) -> None:
        if self._progress:
            self._progress.advance()
        if on_step:
            on_step(self)

    # ---- together

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all workers, of any number of numbers; all give equally many.

        Raises:
            RuntimeError: the job was closed.
        """
        if self.closed:
            raise RuntimeError(
                "this job was closed, and its workers sum up nothing any more: call sum(), mean() "
                "and barrier() before, or tw.init() for another job"
            )
        batch = self.session.present_batch()
        if len(values) and batch is not None and not batch.has_gradient:
            batch.summed = True
        return self.session.sum(values)

    def mean(self, value: Any, weight: float = 1.0) -> Any:
        """Returns the mean over all workers; all call it at the same place of the program.

        Args:
            value: a number, a tensor, or a dict of these. None: this worker has no number and does
                not count, as where `split.step` has no loss. (Beside tensors or dicts of the others
                give one like theirs, and weight 0.)
            weight: of this worker, for example its number of samples.

        Returns:
            float; a float64 tensor of the same shape; or a dict of these.

        Raises:
            ValueError: a weight is negative or not finite, or all are 0.
            RuntimeError: the job was closed.
        """
        return mean_of(self.sum, value, weight)

    def barrier(self) -> None:
        """Waits until every worker has called it; RuntimeError if the job was closed."""
        self.sum([])

    # ---- data

    def loader(
        self,
        dataset: Iterable[Any] | Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        accumulate: int = 1,
        weights: str | Callable[[Any], float] | None = None,
        **options: Any,
    ) -> Loader:
        """Returns a DataLoader over this worker's slices of every step.

        A step has `batch_size` samples per slice, as one process of DistributedDataParallel has.
        The last step shares what is left equally; weights make its gradient the mean over samples.
        Every epoch has another order, the same for any number of workers. All workers read the same
        data in the same order; workers that do not are an error of `step()`.

        Args:
            dataset: read by index, with `__getitem__` and `__len__`; or a stream that is iterated,
                an IterableDataset for example, which every worker reads as a whole and whose
                `collate_fn` sees only what this worker computes; or a DataLoader, whose data,
                order and options are taken.
            batch_size: samples per slice.
            shuffle: another order in every epoch.
            drop_last: leave out what does not fill a step.
            accumulate: how many batches the script accumulates before it steps: a worker of several
                slices gets so many of one slice in a row.
            weights: how much the gradient of a batch counts in the mean over all slices. None: its
                samples. "equal": each batch the same, as with DistributedDataParallel. A function:
                what it returns for the batch, as `lambda batch: int(batch["mask"].sum())`; 0: not
                at all. See also `weight`.
            options: `sampler` gives the order of indices; `batch_sampler` one batch of indices for
                each slice in turn. What they draw from the default generators or a `generator` of
                their own is the same in all workers. Further ones are for
                `torch.utils.data.DataLoader` (num_workers, collate_fn, …).

        Raises:
            TypeError: the data can be read neither by index nor more than once.
            ValueError: they do not fill a step, or two arguments contradict each other; a sampler
                gives each process its part, as DistributedSampler; a stream is to be shuffled.
        """
        given = LoaderData(dataset, batch_size, shuffle, drop_last, options)
        return Loader(self.session, self._begin_pass, given, accumulate, weights)

    def weight(self, weight: float | None = None) -> float:
        """Sets how much the present batch counts in the mean over all slices, if one is given.

        For a script that learns it after the loader has given the batch, or whose data come from
        elsewhere; before `step()`. Where batches are accumulated their weights are added up. Every
        worker says it for each batch of a step, or none does.

        Args:
            weight: a number from 0 up, of tokens for example; 0: its gradient does not count, and
                may be nan. If all slices of a step have 0, no parameter changes.

        Returns:
            What the batch counts, by default its samples; where no loader gives batches, what the
            slice counts so far.

        Raises:
            TypeError, ValueError: it is no such number.
            RuntimeError: there is no batch and no DistributedOptimizer that could take it.
        """
        batch, counts = self.session.present_batch(), self.local_replicas
        if weight is not None:
            number = checked_weight(weight)
            if batch is not None:
                batch.weight, batch.uneven, batch.partial = number, False, False
            elif not counts:
                raise RuntimeError("job.weight() before tw.DistributedOptimizer: make it first")
            for replica in counts if batch is None else ():
                replica.reducer.samples.weigh(number)
        if batch is not None:
            return batch.weight
        return counts[0].reducer.samples.weight() if counts else 1.0

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """Returns this worker's part of a dataset, for evaluation: every `replicas`-th sample.

        Parts may differ by one sample; `job.mean(accuracy, weight=len(shard))` is then exact.

        Raises:
            TypeError: the dataset has no length.
        """
        return shard_of(dataset, self.session)

    def generator(
        self, step: int, slice_index: int | None = None, *, epoch: int | None = None
    ) -> torch.Generator:
        """Returns a new generator for the random numbers of one slice of one step.

        A function of its arguments and `seed` alone, the same for any worker; nothing is
        remembered, and no other worker takes part. For numpy:
        `numpy.random.default_rng(job.generator(step).initial_seed())`.

        Args:
            step: a number from 0 that all workers count alike, of the step in its epoch.
            slice_index: one of `my_slices`; None: the only one of this worker.
            epoch: None: the present one of `epochs`.

        Raises:
            ValueError: this worker has several slices and none is named; a number is negative.
        """
        return generator_of(self.session, step, slice_index, epoch)

    def epochs(self, count: int, *, first: int = 0) -> Iterator[int]:
        """Counts epochs, from where a loaded checkpoint was; worker 0 shows the progress.

        Args:
            count: the end, as of `range(first, count)`.
            first: the first epoch, in a script with a checkpoint of its own; after `job.load` it is
                known already.

        Raises:
            TypeError: one of them is no whole number.
            ValueError: `first` is negative, or other than where `job.load` has gone to.
        """
        for name, value in (("count", count), ("first", first)):
            if isinstance(value, bool) or not isinstance(value, SupportsIndex):
                raise TypeError(f"job.epochs: {name} is a number of epochs, not {value!r}")
        if self._progress:
            self._progress.close()  # of a loop that an error has left, and whose traceback is kept
        progress = self._progress = ProgressLine(count) if self.rank == 0 else None
        loop = self._epochs = object()
        try:
            session, rejoin = self.session, self.session.rejoin
            rejoin.find_load()
            first = session.begin_epochs(first)
            for epoch in rejoin.begin_loop(first, count):
                session.begin_epoch(epoch)
                reasons = partial(obstacles, session, self._tracked, self.local_replicas)
                session.turns.begin_epoch(reasons)
                if progress is None and self.rank == 0:  # since another worker was killed
                    progress = self._progress = ProgressLine(count)
                self.statistics.begin_epoch()
                if (where := rejoin.begin_epoch()) is not None:
                    session.position.load(where)
                if progress:
                    progress.begin(epoch)
                yield epoch
                self.statistics.end_epoch(epoch)
                if progress:
                    progress.end(epoch, self.statistics.values, self.statistics.epoch_s)
        finally:
            if self._epochs is loop:
                self.session.position.leave_epochs()
                if not session.closed:
                    session.rejoin.end_loop()
            if progress:
                progress.close()
            if self._progress is progress:
                self._progress = None

    def log(self, **values: float | torch.Tensor) -> None:
        """Logs figures (loss=…, accuracy=…): worker 0 shows them, the report has each epoch's last.

        Args:
            values: by name, each a number or a tensor of one element.
        """
        plain = {name: as_number(value) for name, value in values.items()}
        self.statistics.values.update(plain)
        if self._progress:
            self._progress.show(plain)

    def _begin_pass(self, steps: int | None, first: int) -> None:
        """Begins the pass of a loader with this number of steps, of which the first ones are done.

        The length of a stream is unknown (None).
        """
        for replica in self.local_replicas:
            replica.between_steps("a new pass of a loader")
        self.statistics.begin_pass()
        if first and self.rank == 0 and not self.session.rejoin.returns:
            where = "a pass that is over" if first == ALL_STEPS else f"step {first}"
            where += "" if steps is None else f" of {steps}"
            text = f"goes on in epoch {self.epoch + 1}, after {where}"
            print(f"tensorwire: {text}", file=sys.stderr, flush=True)
        if self._progress and steps is not None:
            self._progress.expect(steps - first)

    # ---- saving

    def track(self, **objects: Any) -> None:
        """Declares the objects that `save` and `load` handle: model=, optimizer=, best={…}, ….

        Each has `state_dict()` and `load_state_dict()`, or is a dict or a list of tensors, numbers,
        texts and containers of these: `load` fills that very dict or list with what was saved. A
        name that was given before gets another object.

        Raises:
            TypeError: an object is neither; numbers, texts and tuples cannot be filled.
            ValueError: the name "tensorwire", which files have for what the job itself saves.
        """
        for name, thing in objects.items():
            checkpoint.check_trackable(name, thing)
        self._tracked.update(objects)

    def keep(self, **objects: Any) -> None:
        """Raises AttributeError: this is the name that `track` had before 0.1.0."""
        raise AttributeError("job.keep is job.track now")

    def tracked_name(self, thing: Any) -> str:
        """Returns the first name under which `track` has an object; "" for none."""
        return next((name for name, kept in self._tracked.items() if kept is thing), "")

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        every: int = 1,
        wait: bool = True,
    ) -> Path | None:
        """Writes one version of everything kept to a file, for `torch.load`, or into a folder.

        A split model is saved whole, as if it were not split. One worker calls it, between steps;
        no other takes part. The file appears complete or not at all. It keeps the mode of a file
        that it replaces; if the path is a symbolic link, its target is replaced.

        With `wait=False` it returns when all is copied, and the file is written from the copies
        while training goes on. If that fails, the error is raised by the next `save`, which then
        does not save, by `load`, or at the end of the job, which waits for the file.

        Args:
            path: of the file; with `keep` of a folder, which is made.
            keep: a directory of its own for this checkpoint, `checkpoint-000007` for example, with
                a safetensors file for each model and `state.pt` for the rest. So many are kept, the
                last ones; each worker that calls it makes one.
            every: of this many calls the last one writes, as `job.save("folder", keep=3,
                every=100)` after each step. A worker in the place of another one counts on.
            wait: until it is written. While a file or folder is being written, the next save to it
                waits.

        Returns:
            The path that was written; None if it is not yet (`wait`) or will not be (`every`).

        Raises:
            RuntimeError: nothing was kept, or a parameter was changed outside of `edit`: its value
                would be this worker's alone.
            TypeError: a state_dict(), dict or list has other objects than tensors, numbers, texts
                and containers of these, which `load` refuses; or it contains itself.
            ValueError: `keep` or `every` is no number from 1 up.
            OSError: the disk is full or the path cannot be written; what is there stays.
            BusyError: this worker writes two to other paths, or others did for 300 s; wait for one.
            MemoryError: there is none for a copy.
            UnavailableError: `keep` needs safetensors, which is not installed.
        """
        return self._saving.save(path, keep, every, wait)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Puts a saved version back, on all workers; the job goes on where it was saved.

        `epochs` goes on after the saved epoch. If it was saved while a loader gave out the batches
        of an epoch, `epochs` begins with that epoch. Its loaders go on after the last step that the
        file has, and worker 0 prints so.

        The checksums of the whole file are compared before anything of it is used. A folder in
        which nothing was saved so far, empty or left by a job that died in its first save, is no
        error: worker 0 says so, and nothing is loaded.

        Args:
            path: of a file, of a checkpoint's directory, or of a folder: its last checkpoint.

        Raises:
            ValueError: it is damaged, no checkpoint of these objects, or of a job with another
                seed.
            RuntimeError: the workers have loaded different ones.
            OSError: it cannot be read.
        """
        if (loaded := self._saving.load(path, self.editing)) is not None:
            self.session.begin_behind(loaded.epochs, loaded.position)

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Reports where the time of this worker's steps went; see docs/status.md.

        Args:
            path: also write it there as JSON.
        """
        member = self.session.member
        waited = [] if member is None else list(member.without_server_s)
        about: dict[str, Any] = {"workers": self.size, "slices": self.slices, "rank": self.rank}
        stores = [replica.store for replica in self.local_replicas]
        about |= {**told_of(self.session.mode, stores), "server_takeovers_s": waited}
        about |= self.session.turns.report()
        return self.statistics.report(about, stores, path)

    # ---- the end

    def close(self) -> None:
        """Leaves the job, when checkpoints are written. Parameters keep their last values.

        Idempotent.

        Raises:
            OSError, ...: one could not be written, see `save`; the job was left nevertheless.
        """
        if not self.closed:
            self.session.turns.check("close()")
        self._leave(goodbye=True)

    def _leave(
        self,
        goodbye: bool,
        private: bool = True,
        error: BaseException | None = None,
        tell: bool = True,
    ) -> None:
        if self.closed:
            return
        self._saving.writes.finish()
        self.closed = True
        atexit.unregister(self._at_exit)
        if self._plain_steps:
            self._plain_steps.close()
        try:
            for replica in self.local_replicas:
                if tell and goodbye and self.rank == 0 and replica.never_stepped:
                    tell_of_no_step(replica.ownership.model_name)
                replica.close(private)
                if private:  # else nobody uses the optimizer any more
                    optimizer: Any = replica.optimizer
                    optimizer._tensorwire = ClosedReplica()
        finally:
            self.session.after_step.clear()
            self.session.close(goodbye)
            discovery.leave(goodbye, error)
        self._saving.end(goodbye)

    def check_same(self, given: Mapping[str, Any]) -> None:
        """Raises RuntimeError if `init` is called again for another job than this one."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this process is a fork of process {self._pid}, which is worker {self.rank} of a "
                "job already; start a process of its own instead (the start method spawn), or "
                "close() the job there before the fork"
            )
        for name, value in given.items():
            if value != self._given[name]:
                raise RuntimeError(
                    f"this process has joined a job already, by tw.init({name}="
                    f"{self._given[name]!r}), and now {name} is {value!r}: close() that job first, "
                    "or go on with it, which tw.current_job() returns"
                )

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the job is its parent's
        # Nobody uses the parameters any more; copies of them might not fit.
        error, interactive = ending_error(), is_interactive()
        due = None if error or self.closed else self.session.left_due()
        error = error or due
        try:
            self._leave(error is None, private=False, error=error, tell=not interactive)
        except Exception as failed:
            tell_of_failed_write(failed)
            end_with_error()
        if due is not None:
            end_with_error()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._leave(goodbye=kind is None, error=error)
