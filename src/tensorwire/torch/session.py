"""Represents a worker of a job on the fabric: its rank, its stores, and collective calls.

`Job` is the interface that scripts use; the other modules of this package need a `Session`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from zlib import crc32

from tensorwire.errors import TensorwireError, UnavailableError, consequence
from tensorwire.jobs.host import LOOPBACK
from tensorwire.membership.collective import Collective
from tensorwire.membership.takeovers import Takeovers
from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.memory import Node
from tensorwire.parameters import (
    LocalStore,
    Mode,
    ModelDevice,
    OwnPaceStore,
    Paces,
    Part,
    RemoteStore,
    Result,
    Spec,
    Store,
)

from . import rendezvous
from .group import Machines, address_in, connect, machine_name
from .kernels import TorchKernel, permitted_imports
from .notes import Notes
from .position import LoaderPass, Position
from .random_numbers import IN_AN_EPOCH, seed_all, seed_of
from .rejoin import Rejoin
from .statistics import Statistics
from .turns import SliceTurns

_ADDRESS_BYTES = 256
_SEED_BYTES = 16
Given = TypeVar("Given")
Answer = TypeVar("Answer")

_present: Session | None = None
_left: set[tuple[str, ...]] = set()
"""The servers of jobs that this process has left."""


def present_session() -> Session | None:
    """Returns the session of this process's job; None if there is none."""
    return None if _present is None or _present.closed else _present


@dataclass(slots=True, eq=False)
class GivenBatch:
    """A batch that an iteration over a loader has given out.

    Attributes:
        number: of the batches of this worker so far, this one included.
        samples: in it.
        weight: of it in the mean over the slices of its step.
        uneven: it counts by its samples, and other slices of its step have more or fewer.
        partial: it counts as every other, and this worker computes more slices of its step.
        has_gradient: a gradient has come of it.
        summed: before that the script has called `Job.sum` or `Job.mean`.
        stepped: the `SampleCount` of the optimizer that has made a step with it last.
    """

    number: int
    samples: int
    weight: float
    uneven: bool = False
    partial: bool = False
    has_gradient: bool = False
    summed: bool = False
    stepped: object = None


class Session:
    """A worker and its connections to the others; a `Job` makes it, in all workers together.

    Args:
        world: which worker this is.
        seed: of everything random; worker 0's counts.
        mode: how the steps of workers follow each other.
        take_over: makes `turns` in a job that does not replace killed workers.

    Attributes:
        rank, size, pipeline, replicas, replica, stage, slices, my_slices, seed: as of `Job`.
        mode: as given.
        done: epochs that a checkpoint, written now, counts as complete.
        first_epoch: with which the next loop of `Job.epochs` begins.
        epoch, batches, batch_samples: where in its data this worker is; as of `Job`.
        step_seed: of an optimizer that draws numbers in a step of a loader; None: there is no step.
        position: where in its data this worker is, for a checkpoint.
        statistics: of the steps.
        before_release: called before servers free a store.
        after_step: called with the result of each version.
        member: this worker on the fabric; None if it is alone.
        rejoin: where its script is, for a process in its place.
        turns: which slice it computes next.
        warned_of_weights: see `SampleCount.warn`.
        warned_of_turns: see `SampleCount.gradient_comes`.
        closed: true after `close`.
    """

    def __init__(
        self, world: World, seed: int, mode: Mode, take_over: Callable[[Takeovers], SliceTurns]
    ) -> None:
        global _present
        self.mode = mode
        self._world = world
        self.size = world.workers
        self.pipeline = world.pipeline
        self.replicas = world.replicas
        self.stage = world.stage
        self.slices = world.slices
        self.epoch = 0
        self.done = 0
        self.first_epoch = 0
        self.batches = 0
        self.batch_samples = 0
        self.step_seed: int | None = None
        self._giver: object = None  # the iteration that has given out the last batch
        self._present: dict[object, GivenBatch] = {}  # by iteration, the last one last
        # The last batch of a pass that was over before a step used it.
        self._left: GivenBatch | None = None
        self._used = 0  # batches that were given out before the last version
        self.warned_of_weights = self.warned_of_turns = False
        self.closed = False
        self.position = Position()
        self.statistics = Statistics()
        self.before_release: Callable[[], None] = lambda: None
        self.after_step: list[Callable[[Result], None]] = []
        self.rejoin = Notes()
        self.turns = SliceTurns(world)
        self._stores: list[Store] = []
        self._opened = 0  # stores, those that are gone included
        self._machines: Machines | None = None
        self.member: WorkerMember | None = None
        self._collective: Collective | None = None
        if world.servers:
            try:
                self.member = WorkerMember.join(world)
            except UnavailableError as error:
                if tuple(world.servers) not in _left:
                    raise
                raise UnavailableError(
                    "this process has left its job, which cannot be joined again: one run of "
                    "`tensorwire run` is one job. Call tw.init() once, and opt.close() before the "
                    f"next model's optimizer is made ({error})"
                ) from error
            if self.member.takeovers is not None:
                self.turns = take_over(self.member.takeovers)
            if self.member.history is not None:
                asked, takeovers = world.asked, self.member.takeovers
                self.rejoin = Rejoin(self.member.history, world.rank, asked, takeovers)
            try:
                self._collective = Collective(self.member)
                seed = self._introduce(self.member, seed)
            except BaseException:
                self.member.close(goodbye=False)
                raise
        self.seed = seed
        _present = self

    def _introduce(self, member: WorkerMember, seed: int) -> int:
        """Tells all workers which of them can share memory; returns worker 0's seed."""
        mine = (seed if self.rank == 0 else 0).to_bytes(_SEED_BYTES, "little", signed=True)
        mine += bytes([member.place.durable])
        told = self.gather(mine + member.colocation.introduction())
        # A place without a worker has sent zeros.
        here = [any(each) or not self._world.takeover for each in told]
        durable = [bool(each[_SEED_BYTES]) for each in told]
        others = [rank for rank, is_here in enumerate(here) if is_here and not durable[rank]]
        if others and any(durable):
            raise ValueError(
                f"worker {others[0]} says tw.init(durable=False), or transports "
                f"without shm, and worker {durable.index(True)} does not: "
                "all workers have to say the same"
            )
        member.colocation.learn([each[_SEED_BYTES + 1 :] for each in told])
        return int.from_bytes(told[0][:_SEED_BYTES], "little", signed=True)

    @property
    def rank(self) -> int:
        """The rank of this worker, or the lowest of the workers whose slices it has taken over."""
        return self.turns.rank

    @property
    def acts_for_another(self) -> bool:
        """True if this worker's `rank` belongs to a worker that was killed or has left."""
        return self.rank != self._world.rank

    @property
    def ranks(self) -> Sequence[int]:
        """The workers whose slices this one computes: itself, and workers that were killed."""
        return self.turns.ranks

    @property
    def replica(self) -> int:
        """The replica that this worker belongs to, from 0."""
        return self.rank // self.pipeline

    @property
    def my_slices(self) -> Sequence[int]:
        """The slices that this worker computes in turn."""
        return self.turns.slices

    @property
    def imports(self) -> tuple[str, ...] | None:
        """The modules that servers may import for optimizers; None: there are no servers."""
        return None if self.member is None else permitted_imports()

    @property
    def notes(self) -> bool:
        """True if this process takes notes, so that another one can take its place."""
        return self.rejoin.notes

    # ---- data

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of `Job.epochs`, in which all workers draw the same random numbers."""
        self.epoch, self.done = epoch, epoch + 1
        self.position.begin_epoch(epoch)
        seed_all(seed_of(self.seed, epoch, IN_AN_EPOCH))

    def batch_comes(self, iteration: object, samples: int, weight: float) -> GivenBatch:
        """Returns what is noted of a batch that an iteration over a loader gives out."""
        self.batches += 1
        self.batch_samples = samples
        self._giver = iteration
        self._present.pop(iteration, None)
        batch = self._present[iteration] = GivenBatch(self.batches, samples, weight)
        return batch

    def pass_ends(self, iteration: object, trains: bool) -> None:
        """Ends an iteration; if it `trains`, its last batch is worked on until a version."""
        last = self._present.pop(iteration, None)
        if last is not None and trains:
            self._left = last

    def gave_last(self, iteration: object) -> bool:
        """Tells whether this iteration gave the last batch; the end of others is unknown."""
        return self._giver is iteration

    def is_ahead(self, slice_index: int) -> bool:
        """Tells whether a killed worker has committed a slice for the next version of a store."""
        return any(slice_index not in store.missing() for store in self._stores)

    def left_due(self) -> RuntimeError | None:
        """Returns and prints the error of a script that ends while a batch is due; else None.

        At the end of a process a raised error is not seen.
        """
        try:
            self.turns.check("the script ends")
        except RuntimeError as due:
            print(f"tensorwire: {due}", file=sys.stderr, flush=True)
            return due
        return None

    def present_batch(self) -> GivenBatch | None:
        """Returns the batch that is worked on; None if no loader gave one."""
        left = self._left
        if left is not None and left.number <= self._used:
            left = None
        return next(reversed(self._present.values()), left)

    # ---- stores

    def open_store(
        self,
        spec: Spec,
        kernel: TorchKernel,
        part: Part | None = None,
        device: ModelDevice | None = None,
    ) -> Store:
        """Returns a store for an optimizer; all workers open the same ones in the same order.

        Args:
            spec: of all tensors.
            kernel: its arithmetic.
            part: which of them this worker has; None: all.
            device: on which servers are to keep their shares; None: on none.
        """
        number, self._opened = self._opened, self._opened + 1
        store: Store
        if self.member is None:
            store = LocalStore(spec, kernel, device)
        elif self.mode.is_sync:
            store = RemoteStore(self.member, number, spec, part, device=device)
        else:
            store = OwnPaceStore(self.member, number, spec, self.mode, device)
        self._stores.append(store)
        return store

    def release_store(self, store: Store) -> None:
        """Frees a store, also at the servers, once even after an interrupt. All workers call it."""
        if store in self._stores:
            self.before_release()
            self.rejoin.refuse("an optimizer was closed, or got other parameters or groups")
            try:
                store.release()
            finally:
                self._stores.remove(store)

    def stepped(self, result: Result, repeated: bool = False) -> None:
        """Notes a new version of a store; see `Rejoin.stepped`."""
        where = self.position.inside
        if where:
            self.rejoin.refuse(where)
        self.rejoin.stepped(repeated)
        self.turns.stepped(where)
        self.statistics.step(result)
        due = self.position.stepped()
        self._used = self.batches
        for each in self.after_step:
            each(result)
        for one in due:
            self._compare_samples(one)

    def _compare_samples(self, of: LoaderPass) -> None:
        """Raises RuntimeError if workers were given other samples for the same step of a pass."""
        if not self.mode.is_sync or self.pipeline > 1:
            return  # they make other steps, or not all of them read the data
        mark = crc32(of.data.encode(), of.mark)
        told = self.gather((mark << 1 | 1).to_bytes(8, "little"))
        here = [rank for rank, each in enumerate(told) if any(each)]  # the others were killed
        if others := [rank for rank in here if told[rank] != told[here[0]]]:
            raise RuntimeError(
                f"worker {others[0]} has read other samples than worker {here[0]} up to step "
                f"{of.steps} of a pass over {of.data}, so that some would count twice and others "
                "not at all. job.loader deals out what all workers read alike: leave out whatever "
                "gives a process its part (by rank, job.shard, DistributedSampler, …), "
                "and draw random numbers from torch's, Python's or numpy's default generator"
            )

    def explain_loss(self, error: TensorwireError, within_s: float = 0.0) -> Exception:
        """Returns the error that names the lost process, if a server knows it; else `error`.

        The end of another process is often seen before the servers have told its name.
        """
        deadline = time.monotonic() + within_s
        while True:
            for store in self._stores:
                if reason := store.reason():
                    return consequence(reason)
            if time.monotonic() >= deadline:
                return error
            time.sleep(0.01)

    # ---- for a process in the place of this one

    def saved(self) -> dict[str, Any]:
        """Returns the position of this worker."""
        return {
            "epoch": self.epoch,
            "done": self.done,
            "batches": self.batches,
            "batch_samples": self.batch_samples,
            "position": self.position.now(),
            "made_steps": self.position.made_steps,
            "statistics": self.statistics.noted(),
            "server_takeovers_s": [] if self.member is None else list(self.member.without_server_s),
            "paces": self._paces(),
            **self.turns.saved(),
            **self.counts(),
        }

    def counts(self) -> dict[str, Any]:
        """Returns the numbers of sums and versions so far, for `count`."""
        return {
            "sums": 0 if self._collective is None else self._collective.number,
            "versions": [store.version for store in self._stores],
        }

    def _paces(self) -> list[Paces]:
        return [store.paces for store in self._stores if isinstance(store, OwnPaceStore)]

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Continues at the place of the script where a predecessor has made `saved`."""
        self.epoch, self.done, self.batches = saved["epoch"], saved["done"], saved["batches"]
        self.batch_samples, self._used = saved["batch_samples"], self.batches
        self.position.made_steps = saved["made_steps"]
        if self.turns.go_on(saved):  # else it is of another worker
            self.statistics.go_on(saved["statistics"])
            if self.member is not None:
                self.member.without_server_s[:0] = saved["server_takeovers_s"]
        if self._collective is not None:
            self._collective.go_on(saved["sums"])
        for store, version in zip(self._stores, saved["versions"], strict=True):
            store.go_on(version)
        paced = [store for store in self._stores if isinstance(store, OwnPaceStore)]
        for store, paces in zip(paced, saved["paces"], strict=True):
            store.paces = paces

    def begin_epochs(self, first: int) -> int:
        """Returns the epoch with which a loop of `Job.epochs` begins.

        Args:
            first: what the script says; 0: nothing.

        Raises:
            ValueError: it is negative, or a checkpoint was loaded that begins elsewhere.
        """
        loaded, self.first_epoch = self.first_epoch, 0
        if first < 0:
            raise ValueError(f"first is an epoch from 0 up, not {first!r}")
        if first and loaded and first != loaded:
            raise ValueError(
                f"job.load goes on with epoch {loaded}, and job.epochs(first={first}) says another "
                "one: leave first= out, which is for checkpoints that the script loads by itself"
            )
        return loaded or first

    def begin_behind(self, done: int, position: dict[str, Any] | None) -> None:
        """Makes `Job.epochs` begin where a checkpoint was saved."""
        self.first_epoch = self.epoch = self.done = done
        self.position.load(position)

    def count(self, began: Mapping[str, Any]) -> None:
        """Makes sums and versions follow the numbers of `counts`, as when an epoch began."""
        if self._collective is not None:
            self._collective.go_on(began["sums"])
        for store, version in zip(self._stores, began["versions"], strict=False):
            store.version = version  # the versions that the epoch makes come after these

    # ---- together

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over all workers, of any number of numbers; all give equally many."""
        return self._ask(self._collective.sum, values) if self._collective else list(values)

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the data of each worker, by rank; all give equally many bytes."""
        return self._ask(self._collective.gather, data) if self._collective else [data]

    def _ask(self, ask: Callable[[Given], Answer], given: Given) -> Answer:
        self.rejoin.find_load()
        self.turns.check_present("sum(), mean(), barrier() or another call of all workers")
        self.turns.check("sum(), mean(), barrier() or another call of all workers")
        try:
            answer = ask(given)
            self.turns.adopt()  # slices of workers that died before this answer
            return answer
        except TensorwireError as error:
            if (explained := self.explain_loss(error)) is error:
                raise
            raise explained from error

    def barrier(self) -> None:
        """Waits until every worker has called it."""
        self.sum([])

    def meet(self) -> None:
        """Begins a call that all workers make; until its end no worker steps."""
        self.turns.check_present("edit() or another call of all workers")
        if not self.mode.is_sync:  # else steps keep them together
            self.barrier()

    def machines(self) -> Machines:
        """Returns the processes that share a model with this one, connected.

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
        if self.member is None or self.pipeline == 1:
            return Machines()
        server = self.member.place.servers[0]
        host = "127.0.0.1"
        if not server.startswith(LOOPBACK):
            host = rendezvous.address_towards(server.rpartition(":")[0].strip("[]"))
        node = Node(machine_name(self.stage), listen=f"{host}:0")
        try:
            told = self.gather(node.address.encode().ljust(_ADDRESS_BYTES, b"\0"))
            first = self.replica * self.pipeline
            ranks = range(first, first + self.pipeline)
            addresses = {rank - first: address_in(told[rank], rank) for rank in ranks}
            return connect(node, self.stage, addresses)
        except BaseException:
            node.close()
            raise

    # ---- the end

    def close(self, goodbye: bool) -> None:
        """Ends the session; without `goodbye` the other workers learn that this one failed."""
        self.closed = True
        self._giver = (
            None  # a pass that ends with the interpreter draws nothing: torch is gone then
        )
        if self._machines is not None:
            self._machines.close()
        if self.member is not None:
            _left.add(tuple(self._world.servers))
            self.member.close(goodbye)
