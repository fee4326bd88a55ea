"""Trains one worker's copy of a model: parameters in a store, and the protocol of a step.

It is the part of `DistributedOptimizer` below the user's optimizer. It declares the tensors,
publishes values, commits, and waits for versions. Gradients are the `Reducer`'s, and the memory of
parameters is the `Residency`'s.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import (
    APPLY,
    CHECK_FINITE,
    PUBLISH,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    WITH_GRADIENT,
    Bytes,
    Commit,
    Part,
    Spec,
    Store,
)

from ..model_index import ModelIndex
from ..modes import check_optimizer
from ..session import Session
from ..views import flat_bytes, tensor_at
from .arithmetic import Arithmetic
from .buffers import Buffers
from .closed import JOB_CLOSED
from .device_parameters import device_parameters, shared_device
from .edit_memory import EditMemory
from .gradient_state import Found, GradientState
from .held import Held
from .mutation_guard import MutationGuard
from .optimizer_state import OptimizerState
from .ownership import Pipelined, Replicated
from .reducer import Reducer
from .residency import Residency
from .same_batches import SameBatches
from .slices_in_turn import SlicesInTurn
from .worker_steps import WorkerSteps
from .written_values import WrittenValues


class Replica:
    """The copy of a model that one optimizer trains. One thread at a time; backward may be another.

    Args:
        session: of this worker.
        others: the replicas of this job's optimizers, this one too once it is made.
        optimizer: the user's.
        model: of which it has parameters; this process's part of a split one.
        max_norm, buffers, placement, apply, parameters_on: as of `DistributedOptimizer`.
        ema: as there; 0: there is no average.
        lazy_rows: sparse="lazy".
        index: of a split model.

    Attributes:
        session, optimizer, model: as given.
        ownership: which process has which part of the model.
        reducer: has the gradients.
        store: has the parameters.
        state: the optimizer's.
        held: what it has while another one steps.
        parameters: all of the store; on meta where another process has one.
        trained: indices of the parameters here that get gradients.
        buffers: the model's.
        last_norm: of the last averaged gradient; nan if it was not asked for.
        steps: versions that `step` has made.
        scaling: what gradients are multiplied by in the next step (None: 1), and whether nothing is
            applied if they are not finite; a scaler sets it.
        finite: the last step's gradient was, where a scaler asked.
        closed: true after `close`.
        same_batches: looks whether several workers compute the same.
        was_scaled: a scaler has made steps.
    """

    def __init__(
        self,
        session: Session,
        others: Sequence[Replica],
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        max_norm: float | None,
        buffers: str,
        placement: str,
        apply: str,
        ema: float,
        lazy_rows: bool,
        parameters_on: str,
        index: ModelIndex | None = None,
    ) -> None:
        self.session, self.optimizer, self.model = session, optimizer, model
        self.closed = False
        self.last_norm, self.steps = math.nan, 0
        self.scaling: tuple[float | None, bool] = (None, False)
        self.finite, self.was_scaled = True, False
        self._others = others
        self._placement, self._parameters_on = placement, parameters_on
        self._apply, self._ema, self._lazy_rows = apply, ema, lazy_rows
        self._buffers_kind = buffers
        self._max_norm = math.inf if max_norm is None else float(max_norm)
        self.ownership = Replicated(model, optimizer)
        if index is not None:
            self.ownership = Pipelined(model, optimizer, session, index)
        self.same_batches = SameBatches(session)
        self._edit_memory = EditMemory()
        self._editing = False
        self._open(self._plan())
        if session.rank == 0:
            self.arithmetic.tell()
        self._publish()
        self.state.load()

    # ---- planning

    def _plan(self) -> tuple[list[torch.Tensor], Arithmetic]:
        """Returns the parameters of a store for all tensors, and the arithmetic for them."""
        declared, parameters = self.ownership.declare([e for e in self._others if e is not self])
        if not any(tensor.kind in WITH_GRADIENT for tensor in declared):
            raise ValueError("no parameter of the optimizer requires a gradient: set requires_grad")
        arithmetic = Arithmetic(
            self.optimizer, declared, self._apply, self._ema, self._lazy_rows,
            self.session.imports, self.ownership.split,
        )  # fmt: skip
        tables = [each.name for each in declared if each.kind == "rows"]
        check_optimizer(self.session.mode, self._buffers_kind, arithmetic.by_worker, tables)
        return parameters, arithmetic

    def _open(self, plan: tuple[list[torch.Tensor], Arithmetic]) -> None:
        """Opens a store for all tensors."""
        session, ownership = self.session, self.ownership
        self.parameters, self.arithmetic = plan
        self._names = names = {id(p): name for name, p in self.model.named_parameters()}
        tensors, arithmetic = self.arithmetic.tensors, self.arithmetic
        here = [i for i, p in enumerate(self.parameters) if id(p) in names]
        self.trained = [i for i in here if tensors[i].kind in WITH_GRADIENT]
        self._tables = {i for i in self.trained if tensors[i].kind == "rows"}
        self.buffers = Buffers(
            self.model, self._buffers_kind, len(tensors), session, ownership.index
        )
        self._sends = [i for i in here if ownership.speaks_for(names[id(self.parameters[i])])]
        tensors += self.buffers.specs()
        speaks = [*self._sends, *self.buffers.mine]
        part = Part([*here, *self.buffers.here], speaks) if ownership.split else None
        spec = Spec(
            arithmetic.text, arithmetic.kernel.hyper, len(self.optimizer.param_groups),
            session.slices, tuple(tensors), session.pipeline, arithmetic.kernel.scalars, self._ema,
        )  # fmt: skip
        spec.check()
        device = shared_device(self._parameters_on, [self.parameters[i] for i in self.trained])
        self.store: Store = session.open_store(spec, arithmetic.kernel, part, device)
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        held = {i: self.parameters[i] for i in here}
        self._own = [p for group in self.optimizer.param_groups for p in group["params"]]
        there = device_parameters(self.store, held)
        guard = MutationGuard(self.model, names, self._own, held, self.store, there)
        self._residency = Residency(self.store, held, names, guard, there)
        sent = np.zeros(len(tensors), np.uint8)
        sent[speaks if part else slice(None)] = 1
        states = [
            GradientState(i, self.parameters[i], self._name(i), i in self._tables)
            for i in self._sends
            if tensors[i].kind in WITH_GRADIENT
        ]
        self.reducer = Reducer(
            session, self.store, self.parameters, states, sent, guard, self._placement,
            ownership.split,
        )  # fmt: skip
        self.state = OptimizerState(
            session, self.store, self.optimizer, arithmetic, ownership, self.parameters
        )
        own = SlicesInTurn(session, self.store, self.reducer, self.buffers)
        self._turns: SlicesInTurn = session.turns.of_optimizer(own)
        self.held = Held(session, self.store, self.reducer, self.buffers)
        self._worker_steps = WorkerSteps(self.store, self.parameters, self.trained, arithmetic)
        self._written = WrittenValues(self.store, self._residency, self.buffers, self.state, speaks)
        self._forget_average()

    def holds(self, parameter: nn.Parameter) -> bool:
        """Tells whether a parameter lies in the store of this replica."""
        return self._index.get(id(parameter)) in self._residency.parameters

    def release(self, parameter: nn.Parameter) -> None:
        """Gives a parameter that does not change here to another optimizer of the same model.

        Raises:
            ValueError: it is trained here.
        """
        index = self._index.get(id(parameter))
        if index is not None and index in set(self.trained):
            raise ValueError(
                f"parameter {self._name(index)} is trained by another optimizer, together with "
                "others that this one leaves out; close() that one first (job.optimizers has it)"
            )
        if index is not None:
            self._residency.release(index)

    def shares(self, model: Any) -> bool:
        """Tells whether a model is the one of this optimizer, or has parameters of it."""
        if self.ownership.shares(model):
            return True
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for parameter in self.parameters)

    def between_steps(self, what: str) -> None:
        """Raises RuntimeError between slices."""
        if self.reducer.turn:
            raise RuntimeError(
                f"{what} after slice {self.reducer.turn} of {len(self.session.my_slices)} that "
                "this worker computes in turn; only complete steps have a version. After an error "
                "between slices close the job and begin anew"
            )

    def replan(self, saved: dict[str, Any]) -> None:
        """Moves all tensors into a new store, after the optimizer got another group.

        If an error is raised before the move begins, everything is as before.
        """
        self._residency.guard.check()
        self.withdraw()
        plan = self._plan()
        self.state.check_complete(plan[1], saved)
        self._residency.make_private()
        self._move(saved, plan)

    def _move(self, saved: dict[str, Any], plan: tuple[list[torch.Tensor], Arithmetic]) -> None:
        """Moves private parameters into a new store."""
        reducer, old = self.reducer, self.store
        for each in (reducer, self._residency, self.buffers):
            each.close()
        self._open(plan)
        self.reducer.accumulating, self.reducer.samples = reducer.accumulating, reducer.samples
        self._publish()
        self.session.release_store(old)
        state = {self._own[index]: entry for index, entry in saved["state"].items()}
        self.state.load(saved.get("ema"), state)

    def _name(self, index: int) -> str:
        return repr(self._names[id(self.parameters[index])])

    # ---- versions

    def _publish(self, edited: range | None = None) -> None:
        """Publishes replica 0's parameters and buffers to all; of the `edited`, only changes.

        The first values move part by part, so that they are never there twice.
        """
        for part in self._residency.parts() if edited is None else [edited]:
            self._publish_part(part, edited is not None)
            self._residency.adopt(part if edited is None else None)
        self._adopted()

    def meet(self) -> None:
        """Meets all workers, at the same version also where each goes at its own pace."""
        self.session.meet()
        if not self.session.mode.is_sync:
            self._residency.guard.check()
            self.withdraw()
            self._hold(edits=True)
            self._publish(edited=range(0))

    def _publish_part(self, part: range, edited: bool) -> None:
        present = bytearray(len(self.store.layout.spec.tensors))
        slices = self.store.missing()
        if 0 in slices:
            kept = [(i, flat_bytes(self.parameters[i].detach())) for i in self._sends if i in part]
            buffers = [(i, data) for i, data in self.buffers.values() if i in part]
            for index, data in (*kept, *buffers):
                if data.nbytes and (not edited or self.store.differs(index, data)):
                    self.store.push(0, index, data)
                    present[index] = PUSHED
        for slice_index in slices:
            # Only slice 0 says what there is.
            says = bytes(present) if slice_index == 0 else bytes(len(present))
            self._commit(slice_index, PUBLISH, 0, 1.0, (says, ()))
        self._turns.publish_rest(self._commit)
        self.store.wait()

    def adopt(self) -> None:
        """Makes parameters and buffers equal to the store."""
        self._residency.adopt()
        self._adopted()

    def _adopted(self) -> None:
        """Makes buffers equal to the store; the parameters are."""
        self.buffers.take(self.store, published=True)
        self._residency.guard.remember()
        self._bytes_before = self.store.bytes_pushed

    def _commit(
        self,
        slice_index: int,
        operation: int,
        flags: int,
        weight: float,
        present: tuple[bytes, tuple[int, ...]],
    ) -> None:
        self._residency.settle()
        # Clipping is for steps; a reduction tells the norm that there was.
        limit = min(self._max_norm, self._next_max_norm)
        max_norm = limit if operation == APPLY else math.inf
        hyper = self.arithmetic.hyper()
        scale = 1.0 if flags & REDUCED else self._scaled
        commit = Commit(
            self.store.version + 1, operation, flags, scale, max_norm, weight, hyper, *present
        )
        self.store.commit(slice_index, commit)

    # ---- gradients

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Makes backward only add to `.grad` inside."""
        before, self.reducer.accumulating = self.reducer.accumulating, True
        try:
            yield
        finally:
            self.reducer.accumulating = before  # of another store perhaps

    def splitting(self) -> contextlib.AbstractContextManager[None]:
        """Makes gradients of a split model's micro-batches add up inside, to leave at `step`."""
        self.reducer.samples.gradient_comes()  # the loader's present batch counts
        return self.accumulating()

    def withdraw(self) -> None:
        """Withdraws all gradients sent since the last step."""
        self.reducer.withdraw()
        self._forget_average()

    def _forget_average(self) -> None:
        """Forgets the average: the next gradients are not averaged yet, and are not scaled."""
        self._averages: dict[int, tuple[torch.Tensor, Bytes]] | None = None
        self.reducer.sealed = False
        self._reduced_present: tuple[bytes, tuple[int, ...]] = b"", ()
        self._scaled = 1.0
        self._next_max_norm = math.inf

    # ---- the step

    def step(self) -> None:
        """Commits a slice, and with the last slice of this worker makes the next version.

        `scaling` has the factor of gradients, which must be the same if they are reduced already,
        and whether nothing is applied if they are not finite; `finite` tells if they were.
        """
        self._check_open()
        if self._editing:
            raise RuntimeError("step() inside edit() or ema_weights(): leave it first")
        (scale, check_finite), self.scaling = self.scaling, (None, False)
        reducer, statistics, started = self.reducer, self.session.statistics, time.perf_counter()
        reducer.begin_step(started)
        self._residency.guard.check(wait=False)
        self.arithmetic.check_state()
        if reducer.accumulating:
            raise RuntimeError("step() inside accumulate(): leave it before the last backward")
        # With WANT_NORM the average is kept, for worker 0 to read.
        flags = CHECK_FINITE * check_finite | WANT_NORM * self.arithmetic.by_worker
        self.was_scaled = self.was_scaled or scale is not None
        slice_index = reducer.slice_index
        if reducer.reduced:
            reducer.reduced = False
            return
        self._turns.begin(self)
        spoiled = check_finite and not math.isfinite(self.last_norm)
        if reducer.sealed:
            flags |= REDUCED
            self._check_scale(self._scaled if scale is None else scale)
            if self._averages is None:
                reducer.check_all_unchanged()
            elif self.session.replica == 0:
                reducer.push_edited(self._averages, spoiled)
            present = self._reduced_present
        else:
            self._scaled = 1.0 if scale is None else scale
            present = self._take(commits=True)
        self._residency.guard.finish()
        self._turns.check_hyper(self.arithmetic)
        repeated = self.store.is_committed(slice_index)
        if not repeated:
            reducer.check_repeated()
        self._hold()
        self.buffers.push(self.store, slice_index)
        reducer.samples.warn()
        self._commit(slice_index, APPLY, flags, reducer.samples.weight(), present)
        if not self._turns.end(flags, self._averages, spoiled, self._commit):
            statistics.exposed_s += time.perf_counter() - started
            return
        result = self.store.wait()
        self.last_norm = result.norm
        self._residency.refresh(present[0] if result.finite or not check_finite else b"")
        self.buffers.take(self.store)
        if self.arithmetic.by_worker and (result.finite or not check_finite):
            if self.session.rank == 0:
                self._residency.begin_edit(self._edit_memory)
                self._worker_steps.step()
            self._publish(edited=range(len(self.store.layout.spec.tensors)))
        self._forget_average()
        if result.edited:
            self._written.take(self._commit)
        statistics.bytes_pushed += self.store.bytes_pushed - self._bytes_before
        self._bytes_before = self.store.bytes_pushed
        statistics.exposed_s += time.perf_counter() - started
        self.finite, self.steps = result.finite, self.steps + 1
        self._edit_memory.stepped()
        if self.same_batches.looks:
            self.same_batches.stepped()
        reducer.stepped()
        self.session.stepped(result, repeated)

    def _hold(self, edits: bool = False) -> None:
        """Notes gradients before parameters change, see `Held`; `edits` may be anywhere."""
        if edits and not any(each.reducer.waits for each in self._others):
            return
        for each in self._others if self.session.notes else ():
            each.held.note(each is self)

    def _take(self, commits: bool) -> tuple[bytes, tuple[int, ...]]:
        """Takes this slice's own gradients, not averaged; returns the entries of a commit."""
        self.reducer.take(commits)
        if self.same_batches.looks:
            self.same_batches.slice_comes(self.reducer.gradients())
        return self.reducer.present()

    def reduce(self, scale: float) -> float:
        """Averages the gradients on the servers before the step; returns their norm."""
        self._turns.check_averages()
        reducer = self.reducer
        if reducer.sealed:
            self._check_scale(scale)
            return self.last_norm
        if reducer.reduced:
            return math.nan
        self._residency.guard.check()
        self._turns.begin(self)
        self._scaled = scale
        present, weight = self._take(commits=False), reducer.samples.weight()
        if not self.store.is_committed(reducer.slice_index):
            reducer.check_repeated()
        self._turns.begin_average(self.arithmetic)
        self._commit(reducer.slice_index, REDUCE, WANT_NORM, weight, present)
        if not self._turns.end_average():
            return math.nan
        result = self.store.wait()
        reducer.sealed, self._reduced_present = True, present
        self.last_norm = result.norm
        return result.norm

    def _check_scale(self, scale: float) -> None:
        if scale != self._scaled:
            names = "synchronize() and clip_grad_norm_()"
            raise RuntimeError(f"with a GradScaler call scaler.unscale_(opt) before {names}")

    def synchronize(self, scale: float = 1.0) -> None:
        """Fills `.grad` of every trained parameter with the average."""
        if self._averages is not None:
            return
        for i in self._tables:
            raise RuntimeError(
                f"the gradient of {self._name(i)} is sparse, and averaged gradients can only be "
                "read and edited where all are dense: to clip use max_norm= or "
                "tw.clip_grad_norm_, for loss scaling scaler.step without unscale_"
            )
        self.reduce(scale)
        if self.reducer.reduced:
            return  # no averages so far
        self.reducer.check_all_unchanged()
        data = np.empty(self.store.own.size_bytes, np.uint8)
        self.store.read_reduced(data)
        self._averages = {}
        somewhere = self._turns.in_average(self._reduced_present[0])
        for i in self.trained:
            if i not in somewhere:
                continue  # no worker has a gradient for it
            parameter = self.parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            average = data[self.store.own.place(i)]
            parameter.grad.copy_(tensor_at(average, parameter))
            if self._turns.keeps_averages:
                self._averages[i] = (parameter.grad, average)
        self.reducer.forget()

    def clip(self, max_norm: float) -> float:
        """Scales the averaged gradient of the next step down to `max_norm`; returns its norm."""
        norm = self.reduce(self._scaled)
        self._next_max_norm = min(self._next_max_norm, max_norm)
        return norm

    # ---- edit, state

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Makes parameters copies inside; worker 0's changes are published at the end."""
        self._check_open()
        self.between_steps("edit()")
        self.meet()
        self._residency.guard.check()
        self.withdraw()
        self.state.average_frozen()
        residency = self._residency
        before = residency.formats()
        try:
            residency.begin_edit(self._edit_memory)
            self._editing = True
            try:
                yield
            finally:
                self._editing = False
            residency.check_formats(before)
            frozen = residency.guard.frozen_or_not() is not None
            if frozen:
                self.ownership.check_movable("freezing inside edit()")
                plan = self._plan()
            else:
                self._hold(edits=True)
                self._publish(edited=range(len(self.store.layout.spec.tensors)))
        except BaseException:
            residency.take_format(before)
            self.adopt()
            raise
        if frozen:
            self._move(self.state.saved(), plan)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Makes parameters copies inside, with the averages of weights; nothing is published."""
        self._check_open()
        if not self._ema:
            raise RuntimeError("there is no average of weights: DistributedOptimizer(ema=0.999)")
        self.between_steps("ema_weights()")
        if self._editing:
            raise RuntimeError("ema_weights() inside edit() or ema_weights(): leave it first")
        self._residency.guard.check()
        self._editing = True
        try:
            with self._residency.averaged(self._edit_memory, self.state.averages()):
                yield
        finally:
            self._editing = False

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(JOB_CLOSED)

    def check_unchanged(self) -> None:
        """Raises RuntimeError if, outside of an edit, a parameter has a value of its own here."""
        if not self.closed and not self._editing:
            self._residency.guard.check()

    def tensors(self) -> Iterator[Found]:
        """Yields this process's tensors with their places, by the addresses of their arrival."""
        states = {state.index: state for state in self.reducer.states}
        for i, parameter in enumerate(self.parameters):
            if id(parameter) not in self._names:
                continue  # another process has it
            yield Found(
                self._names[id(parameter)], parameter, self.store.layout.places[i].start,
                states.get(i), *self._residency.find(i),
            )  # fmt: skip

    @property
    def never_stepped(self) -> bool:
        """True if gradients came, and no step was made."""
        return self.steps == 0 and self.reducer.came

    def close(self, private: bool = True) -> None:
        """Closes the store; with `private` parameters get memory of this process. Idempotent."""
        self.closed = True
        self._others = ()  # this one is among them, and would keep its memory
        self._let_go(private)
        self.store.close()

    def drop(self) -> None:
        """Closes it with all workers while the job goes on, so that the servers free it too."""
        self.between_steps("close()")
        self.closed = True
        self.withdraw()
        self._let_go(True)
        self.session.release_store(self.store)

    def _let_go(self, private: bool) -> None:
        self.state.leave()
        if private:
            self._residency.make_private()
        for each in (self.reducer, self._residency, self.buffers):
            each.close()
