"""`tw.init()` and the Job: this process's place among the workers, and what they do together.

The Job owns the fabric (a Node, connections to servers), the numbering of stores, and what decides
a result besides the model: seeds, position in the data, the objects it was asked to keep.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from tensorwire.errors import TensorwireError, consequence
from tensorwire.membership import (
    LOOPBACK,
    MAX_NUMBERS,
    SLICES,
    Collective,
    WorkerMember,
    World,
    introductions_in,
)
from tensorwire.memory import Node
from tensorwire.parameters import LocalStore, Part, RemoteStore, Result, Spec, Store

from . import checkpoint, discovery, rendezvous
from .console import ProgressLine
from .group import Machines, connect, machine_name
from .kernels import TorchKernels
from .loader import Loader, seed_of
from .statistics import Statistics

_ADDRESS_BYTES = 256

_current: Job | None = None

on_step: Callable[[Job], None] | None = None
"""Called after every version of every optimizer of this process; for `explain`."""


def init(
    *,
    slices: int | None = None,
    seed: int = 0,
    transports: Sequence[str] | None = None,
    pipeline: int = 1,
    rank: int | None = None,
    world_size: int | None = None,
) -> Job:
    """Joins the job that this process was started for; alone, it makes a job of one worker.

    What `tensorwire run` has said counts first; then `rank` and `world_size`; then an initialised
    default process group of torch.distributed; then the variables of an engine: torchrun and all
    that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, MPI, or a step of Slurm. All but
    `tensorwire run` start no servers: there the first worker of each host starts one beside it.
    docs/launch.md has the engines one by one. Seeds torch's default generator with `seed`. All
    workers call it, and it returns when all have.

    Args:
        slices: parts of a step, each with its own samples, random numbers and gradients; a
            multiple of the number of replicas, which is the default. The result of a job depends
            on it and not on the number of workers.
        seed: of everything random in the job; worker 0's counts.
        transports: of "shm", "rdma", "tcp"; None allows all.
        pipeline: how many workers share one model that is split (`tw.split`): workers 0 to
            pipeline - 1 are replica 0, and so on. A worker that is alone has all of it.
        rank: of this worker, where the program knows it itself, as a function does that
            `torch.multiprocessing.spawn` calls. Without a process group the workers meet at
            MASTER_ADDR and MASTER_PORT.
        world_size: number of workers; given with `rank`. 1: alone, whatever the environment says.

    Raises:
        RuntimeError: there is a job already, `job.close()` it first; or another process is this
            worker, as where this process has inherited the environment of a worker.
        ValueError: the environment or an argument makes no sense, or a variable says that there
            are other workers and not enough to find them.
        UnavailableError: a server cannot be reached, or a worker did not come.
    """
    global _current
    if _current is not None and not _current.closed:
        raise RuntimeError(_current._why_not_another())
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size are given together, or neither")
    if transports is not None:
        os.environ["TENSORWIRE_TRANSPORTS"] = ",".join(transports)
    if not isinstance(pipeline, int) or pipeline < 1:
        raise ValueError(f"pipeline is a number of workers from 1 up, not {pipeline!r}")
    try:
        place = discovery.find_place(rank, world_size)
        place = replace(place, pipeline=1 if place.workers == 1 else pipeline)
        if slices is not None:
            place = replace(place, slices=slices)
        elif place.workers > 1 and SLICES not in os.environ:
            place = replace(place, slices=place.replicas)
        place.check()
        _current = Job(place, seed)
    except BaseException:
        discovery.leave(orderly=False)
        raise
    return _current


def current_job() -> Job:
    """The job of this process.

    Raises:
        RuntimeError: `tw.init()` was not called.
    """
    if (job := present_job()) is None:
        raise RuntimeError("call tw.init() first")
    return job


def present_job() -> Job | None:
    """The job of this process; None if there is none."""
    return None if _current is None or _current.closed else _current


def _tell_of_no_step(optimizer: Any) -> None:
    """The usual slip, which is silent otherwise: the model is as it was."""
    name = optimizer._tensorwire.model_name
    text = f"the optimizer of {name} got gradients, and its step() was never called"
    print(f"tensorwire: {text}; its parameters are as they were", file=sys.stderr, flush=True)


class Job:
    """What the workers of a job do together; made by `init`.

    Attributes:
        rank: this worker, 0 to size - 1.
        size: number of workers.
        pipeline: how many workers share a model that is split; 1: each has all of it.
        replicas: copies of the model that train together: size / pipeline.
        replica: the one that this worker is of.
        stage: which process of its replica this is.
        slices: parts of a step.
        my_slices: those that this worker, with its replica, computes in turn.
        seed: of everything random.
        optimizers: the distributed ones.
        epoch: the present one inside `epochs`.
        batches: that this worker's loaders have given out.
        batch_samples: in the last one.
    """

    def __init__(self, place: World, seed: int) -> None:
        self.rank = place.rank
        self.size = place.workers
        self.pipeline = place.pipeline
        self.replicas = place.replicas
        self.replica = place.rank // place.pipeline
        self.stage = place.stage
        self.slices = place.slices
        self.my_slices = place.my_slices
        self.optimizers: list[Any] = []
        self.epoch = 0
        self.batches = 0
        self.batch_samples = 0
        self.closed = False
        self._pid = os.getpid()
        self.statistics = Statistics()
        self._kept: dict[str, Any] = {}
        self._stores = 0
        self._first_epoch = 0
        self._done = 0  # epochs that a checkpoint of now has behind it
        self._progress: ProgressLine | None = None
        self._machines: Machines | None = None
        self._member: WorkerMember | None = None
        self._collective: Collective | None = None
        if place.servers:
            self._member = WorkerMember.join(place)
            try:
                self._collective = Collective(self._member)
                seed = self._introduce(self._member, seed)
            except BaseException:
                self._member.close(goodbye=False)
                raise
        self.seed = seed
        torch.manual_seed(seed)
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing may end without what atexit does.
            multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    def __repr__(self) -> str:
        replicas = "" if self.pipeline == 1 else f", pipelines of {self.pipeline}"
        return f"<Job worker {self.rank} of {self.size}, {self.slices} slices{replicas}>"

    def _introduce(self, member: WorkerMember, seed: int) -> int:
        """Tells all workers who can share memory with whom; returns worker 0's seed."""
        mine = seed if self.rank == 0 else 0
        # In halves: a sum is of float64.
        told = [float(mine >> 32), float(mine & 0xFFFFFFFF)]
        told += [0.0] * (2 * self.size)
        told[2 + 2 * self.rank : 4 + 2 * self.rank] = map(float, member.introduction())
        high, low, *others = self.sum(told)
        if not (high.is_integer() and low.is_integer()):
            raise ValueError(f"worker 0 told a seed of {high:g} and {low:g}, which makes no sense")
        member.introduce(introductions_in(others))
        return (int(high) << 32) + int(low)

    # ---- stores and optimizers

    def open_store(self, spec: Spec, apply: TorchKernels, part: Part | None = None) -> Store:
        """A store for an optimizer; all workers open the same ones in the same order.

        Args:
            spec: of all tensors.
            apply: its arithmetic.
            part: which of them this worker has; None: all.
        """
        number, self._stores = self._stores, self._stores + 1
        if self._member is None:
            return LocalStore(spec, apply)
        return RemoteStore(self._member, number, spec, part)

    def add_optimizer(self, optimizer: Any) -> None:
        """Called by DistributedOptimizer."""
        self.optimizers.append(optimizer)

    def drop_optimizer(self, optimizer: Any) -> None:
        """Called by its `close`."""
        self.optimizers = [other for other in self.optimizers if other is not optimizer]

    def stepped(self, result: Result) -> None:
        """Called by an optimizer after a version."""
        self.statistics.step(result)
        if self._progress:
            self._progress.advance()
        if on_step:
            on_step(self)

    # ---- together

    def machines(self) -> Machines:
        """The processes that share a model with this one, connected.

        All workers call it; the first call connects.

        Raises:
            ValueError: each worker has all of the model, and there are several.
            UnavailableError: a process cannot be reached.
        """
        if self._machines is None:
            self._machines = self._connect()
        return self._machines

    def _connect(self) -> Machines:
        if self.pipeline == 1 and self.size > 1:
            raise ValueError(
                f"this job has {self.size} workers and no pipelines, so that each would have the "
                "whole model; say how many share one: tw.init(pipeline=…)"
            )
        if self._member is None or self.pipeline == 1:
            return Machines()
        server = self._member.place.servers[0]
        host = "127.0.0.1"
        if not server.startswith(LOOPBACK):
            host = rendezvous.address_towards(server.rpartition(":")[0].strip("[]"))
        node = Node(machine_name(self.stage), listen=f"{host}:0")
        try:
            # Every worker's address, four bytes in a number.
            told = np.zeros((self.size, _ADDRESS_BYTES // 4))
            text = node.address.encode().ljust(_ADDRESS_BYTES, b"\0")
            told[self.rank] = np.frombuffer(text, "<u4")
            told = np.array(self.sum(told.reshape(-1).tolist())).reshape(told.shape)
            first = self.replica * self.pipeline
            mine = told[first : first + self.pipeline]
            addresses = {i: _address_in(row, first + i) for i, row in enumerate(mine)}
            return connect(node, self.stage, addresses)
        except BaseException:
            node.close()
            raise

    def explain_loss(self, error: TensorwireError, within_s: float = 0.0) -> Exception:
        """Whom the job has lost, if a server says it; else the error itself.

        Another process's end is often seen before the servers have told whose it was.
        """
        deadline = time.monotonic() + within_s
        while True:
            for optimizer in self.optimizers:
                if reason := optimizer._tensorwire.store.reason():
                    return consequence(reason)
            if time.monotonic() >= deadline:
                return error
            time.sleep(0.01)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all workers, of any number of numbers; all give equally many."""
        if self._collective is None:
            return list(values)
        result: list[float] = []
        try:
            for first in range(0, max(len(values), 1), MAX_NUMBERS):
                part = np.array(values[first : first + MAX_NUMBERS], np.float64)
                result += self._collective.sum(part).tolist()
            return result
        except TensorwireError as error:
            explained = self.explain_loss(error)
            if explained is error:
                raise
            raise explained from error

    def mean(self, value: Any, weight: float = 1.0) -> Any:
        """The mean over all workers; all call it at the same place of the program.

        Args:
            value: a number, a tensor, or a dict of such. None: this worker has no number and does
                not count, as where `split.step` has no loss. (Beside tensors or dicts of the others
                give one like theirs, and weight 0.)
            weight: of this worker, for example its number of samples.

        Returns:
            float; a float64 tensor of the same shape; or a dict of these.
        """
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"a weight is a number from 0 up, not {weight!r}")
        if value is None:
            value, weight = 0.0, 0.0
        items = value if isinstance(value, Mapping) else {"": value}
        tensors = {k: torch.as_tensor(v, dtype=torch.float64) for k, v in items.items()}
        flat = [float(weight)]
        for tensor in tensors.values():
            flat += (tensor.detach().cpu().reshape(-1) * weight).tolist()
        total = self.sum(flat)
        if total[0] == 0:
            raise ValueError("mean() of workers whose weights are all 0")
        result, at = {}, 1
        for key, tensor in tensors.items():
            part = torch.tensor(total[at : at + tensor.numel()], dtype=torch.float64) / total[0]
            at += tensor.numel()
            result[key] = part.reshape(tensor.shape) if tensor.dim() else float(part)
        return result if isinstance(value, Mapping) else result[""]

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        self.sum([])

    # ---- data

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        accumulate: int = 1,
        **options: Any,
    ) -> Loader:
        """A DataLoader over this worker's slices of every step; the same for all of a replica.

        A step has `batch_size` samples per slice, as one process of DistributedDataParallel has.
        The last step shares what is left equally; weights make its gradient the mean over samples.
        Every epoch has another order, the same for any number of workers.

        Args:
            dataset: with `__len__` and `__getitem__`.
            batch_size: samples per slice.
            shuffle: another order in every epoch.
            drop_last: leave out what does not fill a step.
            accumulate: how many batches the script accumulates before it steps: a worker of several
                slices gets so many of one slice in a row.
            options: for `torch.utils.data.DataLoader` (num_workers, collate_fn, …).
        """
        return Loader(self, dataset, batch_size, shuffle, drop_last, accumulate, options)

    def shard(self, dataset: Dataset[Any]) -> Subset[Any]:
        """This worker's part of a dataset, for evaluation: every `replicas`-th sample.

        Parts may differ by one sample; `job.mean(accuracy, weight=len(shard))` is then exact.
        """
        return Subset(dataset, range(self.replica, len(dataset), self.replicas))

    def generator(
        self, step: int, slice_index: int | None = None, *, epoch: int | None = None
    ) -> torch.Generator:
        """A new generator for what is random in one slice of one step, whoever computes it.

        A function of its arguments and `seed` alone; nothing is remembered, and no other worker
        takes part. For numpy: `numpy.random.default_rng(job.generator(step).initial_seed())`.

        Args:
            step: a number from 0 that all workers count alike, of the step in its epoch.
            slice_index: one of `my_slices`; None: the only one of this worker.
            epoch: None: the present one of `epochs`.

        Raises:
            ValueError: this worker has several slices and none is named; a number is negative.
        """
        if slice_index is None:
            if len(self.my_slices) > 1:
                raise ValueError(
                    f"this worker computes the slices {list(self.my_slices)}: say for which one "
                    "the generator is, job.generator(step, slice_index)"
                )
            slice_index = self.my_slices[0]
        epoch = self.epoch if epoch is None else epoch
        if min(step, slice_index, epoch) < 0:
            raise ValueError("step, slice and epoch are numbers from 0 up")
        # The last part keeps these apart from the loader's.
        return torch.Generator().manual_seed(seed_of(self.seed, epoch, step, slice_index, -1))

    def epochs(self, count: int) -> Iterator[int]:
        """Counts epochs, from where a loaded checkpoint was; worker 0 shows the progress."""
        self._progress = ProgressLine(count) if self.rank == 0 else None
        try:
            first, self._first_epoch = self._first_epoch, 0
            for epoch in range(first, count):
                self.epoch = epoch
                self._done = epoch + 1
                if self._progress:
                    self._progress.begin(epoch)
                yield epoch
                self.statistics.end_epoch(epoch)
                if self._progress:
                    self._progress.end(epoch, self.statistics.values)
        finally:
            if self._progress:
                self._progress.close()
            self._progress = None

    def log(self, **values: float) -> None:
        """Figures of now (loss=…, accuracy=…): shown by worker 0, kept in the report per epoch."""
        plain = {name: float(value) for name, value in values.items()}
        self.statistics.log(plain)
        if self._progress:
            self._progress.show(plain)

    def expect_steps(self, steps: int) -> None:
        """Called by a loader that begins: so many steps make this epoch."""
        self.statistics.begin_pass()
        if self._progress:
            self._progress.expect(steps)

    # ---- keeping

    def keep(self, **objects: Any) -> None:
        """Names the objects that `save` and `load` care for: model=, optimizer=, scheduler=, ….

        Each has `state_dict()` and `load_state_dict()`.
        """
        for name, thing in objects.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name} has no state_dict() and load_state_dict()")
            self._kept[name] = thing

    def kept_name(self, matches: Callable[[Any], bool]) -> str:
        """The name that `keep` was given for the first object that matches; "" for none."""
        return next((name for name, thing in self._kept.items() if matches(thing)), "")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one version of everything kept to a file, for `torch.load`.

        Of a model that is split all of it, as if it were not. One worker calls it, between steps;
        no other takes part. The file appears complete or not at all, and keeps the mode of one that
        it replaces; of a symbolic link the target is replaced.

        Raises:
            RuntimeError: nothing was kept, or a parameter was changed outside of `edit`: its value
                would be this worker's alone.
            TypeError: a state_dict() has other objects than tensors, numbers, texts and containers
                of these, which `load` refuses.
            OSError: the disk is full or the path cannot be written; an older file stays.
        """
        checkpoint.save(path, self._kept, self.optimizers, self._done, self.seed)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Puts a saved version back, on all workers; `epochs` goes on behind the saved epoch.

        The checksums of the whole file are compared before anything of it is used.

        Raises:
            ValueError: it is damaged, no checkpoint of these objects, or of a job with another
                seed.
            OSError: it cannot be read.
        """
        several = self.pipeline > 1
        self._done = checkpoint.load(path, self._kept, self.optimizers, self.seed, several)
        self._first_epoch = self.epoch = self._done

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Where the time of this worker's steps went; see docs/training.md.

        Args:
            path: also write it there as JSON.
        """
        return self.statistics.report(self, path)

    # ---- the end

    def close(self) -> None:
        """Leaves the job. Parameters keep their last values. Idempotent."""
        self._leave(goodbye=True)

    def _leave(
        self, goodbye: bool, private: bool = True, error: BaseException | None = None
    ) -> None:
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._at_exit)
        try:
            for optimizer in self.optimizers:
                if goodbye and self.rank == 0 and optimizer._tensorwire.never_stepped:
                    _tell_of_no_step(optimizer)
                optimizer._tensorwire.close(private)
        finally:
            if self._machines is not None:
                self._machines.close()
            if self._member is not None:
                self._member.close(goodbye)
            discovery.leave(goodbye, error)

    def _why_not_another(self) -> str:
        if os.getpid() == self._pid:
            return "this process has joined a job already; close() it first"
        return (
            f"this process is a fork of process {self._pid}, which is worker {self.rank} of a job "
            "already; start a process of its own instead (the start method spawn)"
        )

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the job is its parent's
        # Nobody uses the parameters any more; copies of them might not fit.
        error = _ending_error()
        self._leave(goodbye=error is None, private=False, error=error)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._leave(goodbye=kind is None, error=error)


def _address_in(numbers: NDArray[np.float64], rank: int) -> str:
    """What worker `rank` has told in `Job._connect`."""
    if np.all((numbers >= 0) & (numbers < 1 << 32) & (numbers == np.floor(numbers))):
        with contextlib.suppress(UnicodeDecodeError):
            return numbers.astype("<u4").tobytes().rstrip(b"\0").decode()
    raise ValueError(f"worker {rank} told no address: all workers are of one version of tensorwire")


def _ending_error() -> BaseException | None:
    """The exception that ends this process, which is about to end; None if it ends well."""
    last: BaseException | None = getattr(sys, "last_value", None)
    if last is not None:
        return last  # set by the interpreter when an exception has ended the program
    error = sys.exception()  # multiprocessing ends its children while one is on its way
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error
