"""The parameters of one optimizer in a store, and the protocol of its steps.

What `DistributedOptimizer` does behind the user's optimizer: it declares and places the tensors,
sends gradients from hooks, commits, and adopts versions. It knows stores, and no processes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import (
    ABSENT,
    APPLY,
    CHECK_FINITE,
    POOLED,
    PRODUCED,
    PUBLISH,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    Bytes,
    Commit,
    LocalStore,
    Part,
    Place,
    Result,
    Spec,
    Store,
)

from ..allocator.gradient_slots import (
    NO_PLACE,
    NOT_YET,
    SLOT,
    SPARSE,
    GradientSlots,
    Placed,
    try_slots,
)
from ..kernels import TorchKernels, hyper_of, path_of
from ..model_index import ModelIndex, model_index_of
from ..session import Session
from ..views import address_of, flat_bytes, rows_of, same_bytes, tensor_at
from . import optimizer_state
from .buffers import Buffers
from .declaration import declare_all, declare_whole
from .edit_memory import EditMemory
from .gradient_checks import GradientChecks, sum_of
from .mutation_guard import MutationGuard
from .ownership import Ownership
from .same_batches import SameBatches
from .sample_count import SampleCount


class Found(NamedTuple):
    """A parameter and its last gradient.

    Attributes:
        name, parameter: as in the model.
        offset: in the store.
        placed: what the gradient did; None if there is none.
        shared: the gradient's place is a server's memory.
        size_bytes: of the gradient; of a sparse one the rows that it has.
        bytes_copied: of the gradient, by this process; None if none has left.
        inside: the parameter lies in the store's memory.
        held: it belongs there; else another optimizer has it.
    """

    name: str
    parameter: torch.Tensor
    offset: int
    placed: Placed | None
    shared: bool
    size_bytes: int
    bytes_copied: int | None
    inside: bool
    held: bool


class _Left(NamedTuple):
    """A gradient that has left, or lies where it is read: it must stay as it was."""

    gradient: torch.Tensor
    version: int
    address: int
    checksum: int | None  # of what is looked at


class Replica:
    """Of one optimizer; one thread at a time, but backward may be another."""

    def __init__(
        self,
        session: Session,
        trained: Sequence[Replica],
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        max_norm: float | None,
        buffers: str,
        placement: str,
        whole: ModelIndex | None = None,
    ) -> None:
        self.session = session
        self._trained = trained
        self._placement = placement
        self.optimizer = optimizer
        self.model = model
        self._ownership = Ownership(session, whole, model, optimizer) if whole is not None else None
        self.max_norm = math.inf if max_norm is None else float(max_norm)
        self.accumulating = False
        self.closed = False
        self._edited = False  # an edit is under way
        self.last_norm = math.nan
        self.steps = 0  # versions that step() has made
        self._spent = session.statistics
        self._first_push = 0.0
        self._buffers_kind = buffers
        self._hooks: list[Any] = []
        self._samples = SampleCount(session)
        self._same_batches = SameBatches(session)
        self._edit_memory = EditMemory()
        self.scaling: tuple[float | None, bool] = (None, False)  # of the next step, by a scaler
        self.finite = True  # the last step's gradient, where a scaler asked
        self._turn = 0  # which of this worker's slices is being computed
        self._open()
        self._publish()
        self.load_state()

    # ---- planning

    def _open(self) -> None:
        self._names = names = {id(p): name for name, p in self.model.named_parameters()}
        self._apply = TorchKernels(path_of(self.optimizer))
        part = None
        ownership = self._ownership
        if ownership is None:
            others = [each for each in self._trained if each is not self]
            rows_alone = self._apply.changes_rows_alone
            found = declare_all(self.model, self.optimizer, others, rows_alone)
        else:
            found = declare_whole(ownership, self.model, self.optimizer)
        tensors, planned = found.tensors, found.planned
        self.parameters = found.parameters
        here = [i for i, p in enumerate(self.parameters) if id(p) in names]
        kinds = "trained", "rows"
        if not any(tensor.kind in kinds for tensor in tensors):
            raise ValueError("no parameter of the optimizer requires a gradient")
        self.trained = [i for i in here if tensors[i].kind in kinds]
        self._groups_of = [tensor.group for tensor in tensors]
        self._tables = {i for i in self.trained if tensors[i].kind == "rows"}
        self.buffers = Buffers(
            self.model,
            self._buffers_kind,
            len(tensors),
            self.session.my_slices,
            # One slice agrees with itself, and nobody has only a part of it.
            self.session.slices > 1 or self.session.pipeline > 1,
            ownership.whole if ownership else None,
            self.session.stage,
        )
        mine = {n for n in names.values() if ownership is None or ownership.speaks_for(n)}
        self._sends = [i for i in here if names[id(self.parameters[i])] in mine]
        tensors += self.buffers.specs()
        if ownership is not None:
            part = Part([*here, *self.buffers.here], [*self._sends, *self.buffers.mine])
        groups = len(self.optimizer.param_groups)
        path, hyper = path_of(self.optimizer), self._apply.hyper
        pipeline = self.session.pipeline
        spec = Spec(path, hyper, groups, self.session.slices, tuple(tensors), pipeline)
        spec.check()
        self.store: Store = self.session.open_store(spec, self._apply, part)
        self._version = 1
        self._local_slots = self._find_local_slots()
        self._slots = self._find_places()
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._held = {i: self.parameters[i] for i in here}
        self._watch = MutationGuard(self.model, names, planned, self._held, self.store)
        self._pushed: dict[int, _Left] = {}
        self._produced: set[int] = set()  # of what counts as pushed: lies there by itself
        self._pooled: dict[int, int] = {}  # of these, what lies in the pool: in whose block
        self._was_in_place: dict[int, bool] = {}  # each one's last gradient, when it left
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self._sparse_bytes: dict[int, int] = {}  # of the rows of each one's last gradient
        self.bytes_copied: dict[int, int] = {}  # by this process, of each one's last gradient
        self._synchronized: dict[int, tuple[torch.Tensor, Bytes]] | None = None
        self._scaled = 1.0
        self._reduced = False
        self._next_max_norm = math.inf
        sent = np.zeros(len(tensors), np.uint8)
        sent[[*self._sends, *self.buffers.mine] if part else slice(None)] = 1
        self._all_present = self._present = (sent * PUSHED).tobytes()
        self._all_produced = (sent * PRODUCED).tobytes()
        self._blocks: tuple[int, ...] = ()
        # What backward makes here and this process speaks for.
        self._left = [i for i in self.trained if sent[i]]
        dense = [i for i in self._left if i not in self._tables]
        self._looks = GradientChecks({i: self.parameters[i].nbytes for i in dense})
        self._look = self._looks.at(self.steps)
        for i in self._left:
            hook = self.parameters[i].register_post_accumulate_grad_hook(self._on_gradient)
            self._hooks.append(hook)

    def _find_local_slots(self) -> list[list[torch.Tensor]]:
        """Alone: every parameter's gradient in every slot; else nothing."""
        store = self.store
        if not isinstance(store, LocalStore):
            return []
        places = store.layout.places[: len(self.parameters)]
        pairs = list(zip(places, self.parameters, strict=True))
        slots = [store.slot(i) for i in self.session.my_slices]
        return [[tensor_at(slot[at.start : at.end], p) for at, p in pairs] for slot in slots]

    def _find_places(self) -> GradientSlots | str:
        """Where gradients are to be produced, or why they are not."""
        self._shared = [False] * len(self.parameters)
        if self._placement == "copy":
            return 'placement="copy"'
        if len(self.session.my_slices) > 1:
            # A gradient that stays where it is would be there when the next slice is computed.
            return "this worker computes several slices of a step"
        places = self.store.places(self.session.my_slices[0])
        wanted: list[Place | str] = [NO_PLACE] * len(self.parameters)
        for i in self.trained:
            wanted[i] = place = SPARSE if i in self._tables else places[i]
            self._shared[i] = isinstance(place, Place) and place.shared
        if not any(isinstance(each, Place) for each in wanted):
            return next((str(wanted[i]) for i in self.trained), NO_PLACE)
        return try_slots(self.parameters, wanted)

    def holds(self, parameter: nn.Parameter) -> bool:
        """It lies in this store."""
        index = self._index.get(id(parameter))
        return index is not None and index in self._held

    @property
    def model_name(self) -> str:
        """The class of the user's model."""
        return type(self.model).__name__ if self._ownership is None else self._ownership.whole.kind

    @property
    def is_shared(self) -> bool:
        """The model is split: its parameters are those of several processes, or could be."""
        return self._ownership is not None

    def shares(self, model: Any) -> bool:
        """It is the model of this optimizer, or has parameters of it."""
        if self._ownership is not None and model_index_of(model) is self._ownership.whole:
            return True
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for parameter in self.parameters)

    def release(self, parameter: nn.Parameter) -> None:
        """Another optimizer of the same model takes a parameter that does not change here."""
        index = self._index.get(id(parameter))
        if index is not None and index in set(self.trained):
            raise ValueError(f"parameter {self._name(index)} is trained by another optimizer")
        if index is not None:
            self._held.pop(index, None)

    @property
    def between_slices(self) -> bool:
        """Some slices of this worker's step are computed, others not."""
        return self._turn != 0

    def between_steps(self, what: str) -> None:
        """Raises RuntimeError between slices."""
        if self._turn:
            raise RuntimeError(
                f"{what} after slice {self._turn} of {len(self.session.my_slices)} that this "
                "worker computes in turn; only complete steps have a version"
            )

    def replan(self, saved: dict[str, Any]) -> None:
        """After the optimizer got another group: all tensors into a new store."""
        self._watch.check()
        self.withdraw()
        self._make_private()
        self._move(saved)

    def _move(self, saved: dict[str, Any]) -> None:
        """Private parameters into a new store, planned anew."""
        self._stop_hooks()
        old = self.store
        self._open()
        self._publish()
        self.session.release_store(old)
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, entry in saved["state"].items():
            self.optimizer.state[ordered[index]] = entry
        self.load_state()

    # ---- versions

    def _publish(self, edited: bool = False) -> None:
        """Replica 0's parameters and buffers become everybody's; if `edited`, what has changed."""
        present = bytearray(len(self._all_present))
        if self.session.replica == 0:
            kept = [(i, flat_bytes(self.parameters[i].detach())) for i in self._sends]
            for index, data in (*kept, *self.buffers.values()):
                if data.nbytes and (not edited or self.store.differs(index, data)):
                    self.store.push(self.session.my_slices[0], index, data)
                    present[index] = PUSHED
        self._blocks = ()
        for slice_index in self.session.my_slices:
            # Only slice 0 says what there is.
            self._present = bytes(present) if slice_index == 0 else bytes(len(present))
            self._commit(slice_index, PUBLISH, 0, 1.0)
        self._wait()
        self._adopt()

    def _adopt(self) -> None:
        """Lets the parameters be the store's memory."""
        for index, parameter in self._held.items():
            parameter.data = tensor_at(self.store.value(index), parameter)
        self.buffers.take(self.store, published=True)
        self.buffers.remember()
        self._watch.remember()
        self._bytes_before = self.store.bytes_pushed

    def _make_private(self) -> None:
        for parameter in self._held.values():
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def _commit(self, slice_index: int, operation: int, flags: int, weight: float) -> None:
        # Clipping is for steps; a reduction tells the norm that there was.
        limit = min(self.max_norm, self._next_max_norm)
        max_norm = limit if operation == APPLY else math.inf
        hyper = hyper_of(self.optimizer, self._apply.hyper)
        scale = 1.0 if flags & REDUCED else self._scaled
        version, present = self._version + 1, self._present
        commit = Commit(
            version, operation, flags, scale, max_norm, weight, hyper, present, self._blocks
        )
        self.store.commit(slice_index, commit)

    def _wait(self) -> Result:
        # First: an interrupt while waiting does not take the commits back.
        self._version += 1
        return self.store.wait()

    # ---- gradients

    @contextlib.contextmanager
    def splitting(self) -> Iterator[None]:
        """A split model goes through its micro-batches: gradients add up, and leave at `step`."""
        self.batch_comes()
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def batch_comes(self) -> None:
        """The loader's present batch counts in the next step."""
        self._samples.gradient_comes()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.batch_comes()
        index, gradient = self._index[id(parameter)], parameter.grad
        assert gradient is not None
        slots, where = self._slots, None
        if isinstance(slots, GradientSlots) and gradient.layout == torch.strided:
            where = slots.arrived(index, gradient)
        if not self._shared[index]:
            where = None  # it is sent
        if self.accumulating:
            if self._forget(index):
                self.store.settle()  # what left before is not the sum; it leaves later
            return
        if where is not None or self._local_slots:
            self._push(index, parameter, where)  # nothing leaves before step()
            return
        started = time.perf_counter()
        self._push(index, parameter, None)
        self._first_push = self._first_push or started
        self._spent.exposed_s += time.perf_counter() - started

    def _push(self, index: int, parameter: torch.Tensor, where: int | None) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dtype != self._dtypes[index]:
            self._watch.check()
        self._check_layout(index, gradient)
        self.bytes_copied[index] = 0
        if index in self._pushed:
            self.store.settle()  # what left before is being replaced
        if self._reduced:
            raise RuntimeError(
                "backward() after synchronize() or clip_grad_norm_(): call step() or zero_grad() "
                "first"
            )
        self._pooled.pop(index, None)
        if index in self._tables:
            self._push_rows(index, gradient)
        elif where is not None:
            self._produced.add(index)
            if where != SLOT:
                self._pooled[index] = where
            self._spent.bytes_produced += gradient.nbytes
        else:
            self._produced.discard(index)
            if not self._local_slots:
                data = flat_bytes(gradient.detach(), parameter)
                copied = 0 if data.ctypes.data == gradient.data_ptr() else data.nbytes
                if data.nbytes:
                    copied += self.store.push(self.session.my_slices[self._turn], index, data)
                self._count_copied(index, copied)
        self._was_in_place[index] = where is not None or self._is_in_place(index, gradient)
        looked = sum_of(gradient, parameter, self._look.get(index))
        self._pushed[index] = _Left(gradient, gradient._version, address_of(gradient), looked)

    def _check_layout(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout == torch.strided:
            return
        by_rows = gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1
        if index not in self._tables or not by_rows:
            where = "of a model that is split" if self._ownership else "of this model alone"
            what = "it is" if self._ownership else "it is not"
            raise RuntimeError(
                f"the gradient of {self._name(index)} is {gradient.layout}, and {what} the weight "
                f"of an nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True) {where}, or it "
                "is not sparse by rows; make it dense"
            )

    def _push_rows(self, index: int, gradient: torch.Tensor) -> None:
        rows, values, copied = rows_of(gradient, self.parameters[index])
        self._sparse_bytes[index] = rows.nbytes + values.nbytes
        copied += self.store.push_rows(self.session.my_slices[self._turn], index, rows, values)
        self._count_copied(index, copied)

    def _is_in_place(self, index: int, gradient: torch.Tensor) -> bool:
        """It is to be sent, from where it was to be produced."""
        slots = self._slots
        if self._shared[index] or index in self._tables or not isinstance(slots, GradientSlots):
            return False
        return slots.find(index, gradient) is not None

    def _count_copied(self, index: int, copied: int) -> None:
        self.bytes_copied[index] = self.bytes_copied.get(index, 0) + copied
        self._spent.bytes_copied += copied

    def withdraw(self) -> None:
        """Nothing of what left since the last step counts."""
        if self._pushed:
            self.store.settle()
        self._forget_pushed()
        self._samples.withdraw()
        self._forget_reduction()
        if isinstance(self._slots, GradientSlots):
            self._slots.begin()

    def _forget(self, index: int) -> bool:
        """A gradient does not count; whether it did."""
        self._produced.discard(index)
        self._pooled.pop(index, None)
        return self._pushed.pop(index, None) is not None

    def _forget_pushed(self) -> None:
        self._pushed.clear()
        self._produced.clear()
        self._pooled.clear()

    def _forget_reduction(self) -> None:
        self._synchronized, self._reduced, self._scaled = None, False, 1.0
        self._next_max_norm = math.inf

    def _name(self, index: int) -> str:
        return repr(self._names[id(self.parameters[index])])

    def _check_gradients(self) -> None:
        """What left is what `.grad` holds; what did not leave yet leaves now."""
        for i in self._left:
            gradient, pushed = self.parameters[i].grad, self._pushed.get(i)
            if gradient is None:
                self._forget(i)
            elif pushed is None:
                where = None
                if self._shared[i] and isinstance(self._slots, GradientSlots):
                    where = self._slots.find(i, gradient)
                self._push(i, self.parameters[i], where)
            else:
                self._check_unchanged(i, gradient)

    def _gradients_now(self) -> Iterator[tuple[int, torch.Tensor]]:
        for i in self._left:
            if (gradient := self.parameters[i].grad) is not None:
                yield i, gradient

    def _check_unchanged(self, index: int, gradient: torch.Tensor | None) -> None:
        left = self._pushed[index]
        if (
            gradient is not left.gradient
            or gradient._version != left.version
            or address_of(gradient) != left.address
            or self._looks_different(index, left)
        ):
            raise RuntimeError(
                f"the gradient of {self._name(index)} was changed after it had left for the "
                "servers. To clip use DistributedOptimizer(max_norm=…) or tw.clip_grad_norm_, for "
                "loss scaling tw.GradScaler; to read or edit averaged gradients call "
                "opt.synchronize() first"
            )

    def _looks_different(self, index: int, left: _Left) -> bool:
        """By its bytes: what goes through `.grad.data` leaves no other trace."""
        if left.checksum is None:
            return False
        now = sum_of(left.gradient, self.parameters[index], self._look.get(index))
        return now != left.checksum

    def _copy_pushed(self) -> None:
        """Alone, gradients need not leave early: all go into the slot with one call."""
        if not self._local_slots or not self._pushed:
            return
        views = self._local_slots[self._turn]
        chosen = [i for i in self._pushed if i not in self._produced and i not in self._tables]
        if not chosen:
            return
        with torch.no_grad():
            torch._foreach_copy_(
                [views[i] for i in chosen], [self._pushed[i].gradient for i in chosen]
            )
        for i in chosen:
            self._count_copied(i, views[i].nbytes)

    def _present_now(self) -> None:
        whole = len(self._pushed) == len(self._left)
        rows = len(self._tables & self._pushed.keys())  # whatever is said of these
        copied = len(self._pushed) - rows > len(self._produced)
        self._blocks = ()
        if whole and not self._produced:
            self._present = self._all_present
        elif whole and not copied and not self._pooled:
            self._present = self._all_produced
        else:
            present = bytearray(self._all_present if copied else self._all_produced)
            for i in self._left:
                how = PRODUCED if i in self._produced else PUSHED
                present[i] = how if i in self._pushed else ABSENT
            for i in self._pooled:
                present[i] = POOLED
            self._present = bytes(present)
            if self._pooled:
                self._blocks = tuple([self._pooled.get(i, 0) for i in range(len(present))])

    # ---- the step

    def step(self) -> None:
        """One slice's commit, and with the last slice of this worker the next version.

        `scaling` says by what gradients are multiplied (where they are reduced already it was the
        same then), and whether nothing is applied if they are not finite, which `finite` tells.
        """
        self._check_open()
        (scale, check_finite), self.scaling = self.scaling, (None, False)
        started = time.perf_counter()
        if self._first_push and self.store.asynchronous:
            self._spent.hidden_s += started - self._first_push
        self._first_push = 0.0
        self._watch.check()
        if self.keeps_other_state():
            raise RuntimeError(
                "momentum or amsgrad was switched on after DistributedOptimizer was made, and the "
                "servers have no state for it; set it (or make the scheduler) before"
            )
        if self.accumulating:
            raise RuntimeError("step() inside accumulate(): leave it before the last backward")
        flags = CHECK_FINITE if check_finite else 0
        slice_index = self.session.my_slices[self._turn]
        if self._reduced:
            flags |= REDUCED
            self._check_scale(self._scaled if scale is None else scale)
            self._push_edited(slice_index)
        else:
            self._scaled = 1.0 if scale is None else scale
            self._check_gradients()
            self._present_now()
            self._copy_pushed()
        self._check_hyper()
        if self._same_batches.looks:
            self._same_batches.slice_comes(self._gradients_now())
        self.buffers.push(self.store, slice_index)
        self._commit(slice_index, APPLY, flags, self._samples.weight())
        self.store.settle()
        self._forget_pushed()
        self._samples.stepped()
        self._turn += 1
        self.buffers.after_slice(self._turn)
        if self._turn < len(self.session.my_slices):
            self._spent.exposed_s += time.perf_counter() - started
            return
        self._turn = 0
        result = self._wait()
        self.last_norm = result.norm
        self.buffers.take(self.store)
        self.buffers.remember()
        self._forget_reduction()
        self._spent.bytes_pushed += self.store.bytes_pushed - self._bytes_before
        self._bytes_before = self.store.bytes_pushed
        self._spent.exposed_s += time.perf_counter() - started
        self.finite = result.finite
        self.steps += 1
        self._look = self._looks.at(self.steps)
        self._edit_memory.stepped()
        if self._same_batches.looks:
            self._same_batches.stepped()
        if isinstance(self._slots, GradientSlots):
            self._slots.stepped()
        self.session.stepped(result)

    def _check_hyper(self) -> None:
        """All slices of a step have the first one's hyper-parameters."""
        for i in self._tables:
            if self.optimizer.param_groups[self._groups_of[i]]["weight_decay"]:
                raise RuntimeError(
                    f"weight_decay was set for {self._name(i)}, a table with sparse gradients; it "
                    "changes all rows in every step: use a table with sparse=False"
                )
        if len(self.session.my_slices) == 1:
            return
        hyper = hyper_of(self.optimizer, self._apply.hyper)
        if self._turn == 0:
            self._hyper = hyper
        elif hyper != self._hyper:
            raise RuntimeError(
                "the learning rate or another hyper-parameter was changed after slice "
                f"{self._turn} of {len(self.session.my_slices)} that this worker computes in turn. "
                "Step a scheduler once per epoch, or after the last slice of a step: 'if (i + 1) "
                "% len(job.my_slices) == 0' in a loop that counts batches"
            )

    def _push_edited(self, slice_index: int) -> None:
        if self._synchronized is None:
            for i in self._pushed:
                self._check_unchanged(i, self.parameters[i].grad)
            return
        if self.session.replica != 0:
            return
        for i, (gradient, average) in self._synchronized.items():
            if i not in self._left:
                continue
            now = self.parameters[i].grad
            if now is None:
                raise RuntimeError(f"the gradient of {self._name(i)} is gone since synchronize()")
            data = flat_bytes(now.detach(), self.parameters[i])
            # By its bytes: what goes through `.data` leaves no other trace.
            if now is not gradient or not same_bytes(data, average):
                self._count_copied(i, self.store.push(slice_index, i, data))

    def reduce(self, scale: float = 1.0, norm: bool = True) -> float:
        """Averages the gradients on the servers before the step; returns their norm."""
        if len(self.session.my_slices) > 1:
            raise RuntimeError(
                "synchronize() and clip_grad_norm_() need one slice per worker, here are "
                f"{len(self.session.my_slices)}; use max_norm="
            )
        if self._reduced:
            self._check_scale(scale)
            return self.last_norm
        self._watch.check()
        self._scaled = scale
        self._check_gradients()
        self._present_now()
        self._copy_pushed()
        flags = WANT_NORM if norm else 0
        self._commit(self.session.my_slices[0], REDUCE, flags, self._samples.weight())
        result = self._wait()
        self._reduced = True
        self.last_norm = result.norm
        return result.norm

    def check_scalable(self) -> None:
        """Raises ValueError if a gradient has too few bits to be unscaled, as in torch."""
        for i in self.trained:
            if self.parameters[i].dtype == torch.float16:
                raise ValueError(
                    f"parameter {self._name(i)} is float16; a scaler needs float32 parameters "
                    "under autocast"
                )

    def _check_scale(self, scale: float) -> None:
        if scale != self._scaled:
            raise RuntimeError(
                "with a GradScaler call scaler.unscale_(opt) before synchronize() and "
                "clip_grad_norm_()"
            )

    def synchronize(self, scale: float = 1.0) -> None:
        """`.grad` of every trained parameter := the average."""
        if self._synchronized is not None:
            return
        for i in self._tables:
            raise RuntimeError(
                f"the gradient of {self._name(i)} is sparse, and averaged gradients can only be "
                "read and edited where all are dense: to clip use max_norm= or "
                "tw.clip_grad_norm_, for loss scaling scaler.step without unscale_"
            )
        self.reduce(scale)
        for i in self._pushed:
            self._check_unchanged(i, self.parameters[i].grad)
        data = np.empty(self.store.own.size_bytes, np.uint8)
        self.store.read_reduced(data)
        self._synchronized = {}
        everywhere = self.store.layout.trained
        have = self.session.sum([float(self._present[i]) for i in everywhere])
        somewhere = {i for i, workers in zip(everywhere, have, strict=True) if workers}
        for i in self.trained:
            if i not in somewhere:
                continue  # no worker has a gradient for it
            parameter = self.parameters[i]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            average = data[self.store.own.place(i)]
            parameter.grad.copy_(tensor_at(average, parameter))
            if self.session.replica == 0:  # whose gradients count
                self._synchronized[i] = (parameter.grad, average)
        self._forget_pushed()

    def clip(self, max_norm: float) -> float:
        """The averaged gradient is scaled down to `max_norm` in the next step; returns its norm."""
        norm = self.reduce(self._scaled)
        self._next_max_norm = min(self._next_max_norm, max_norm)
        return norm

    # ---- edit, state

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        """Parameters are copies inside; what worker 0 has changed becomes everybody's."""
        self._check_open()
        self.between_steps("edit()")
        self._watch.check()
        self.withdraw()
        self._edit_memory.lend(self.store, self._held)
        before = [_format_of(parameter) for parameter in self.parameters]
        self._edited = True
        try:
            yield
        except BaseException:
            self._restore(before)
            raise
        finally:
            self._edited = False
        self._check_format(before)
        if self._watch.frozen_or_not() is None:
            self._publish(edited=True)
        else:
            if self._ownership is not None:
                self._restore(before)
            self.check_movable("freezing inside edit()")
            self._move(self.optimizer.state_dict())

    def _check_open(self) -> None:
        if self.closed:
            raise RuntimeError(
                "the job of this optimizer was closed, and the model keeps its last values: to go "
                "on, call tw.init() and make the optimizer anew"
            )

    def check_unchanged(self) -> None:
        """Raises RuntimeError if, outside of an edit, a parameter has a value of its own here."""
        if not (self.closed or self._edited):
            self._watch.check()

    def check_movable(self, what: str) -> None:
        """Raises RuntimeError for a split model: its processes would have to agree anew."""
        if self._ownership is not None:
            raise RuntimeError(
                f"{what} is not there for a split model; close the optimizer and make another"
            )

    def _restore(self, before: list[tuple[Any, ...]]) -> None:
        """The store's values again, in the format that they have there."""
        for i, parameter in self._held.items():
            dtype, shape, stride = before[i]
            parameter.data = torch.empty_strided(shape, stride, dtype=dtype)
        self._adopt()

    def _check_format(self, before: list[tuple[Any, ...]]) -> None:
        for i, parameter in self._held.items():
            if _format_of(parameter) != before[i]:
                self._restore(before)
                raise RuntimeError(
                    f"dtype, shape or memory format of parameter {self._name(i)} was changed in "
                    "edit(); change it before DistributedOptimizer. The parameters are as before"
                )

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's own dictionary, filled with the store's state."""
        optimizer = self.optimizer
        found = optimizer_state.read(self.store, self._apply, self._trained_parameters())
        if self._ownership is not None:
            return self._ownership.state_dict(plain(), found)
        entries = {self.parameters[i]: entry for i, entry in found.items()}
        optimizer.state = defaultdict(dict, {**entries, **self._frozen_state})
        try:
            return plain()
        finally:
            optimizer.state = defaultdict(dict)

    def own_state_dict(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the optimizer of this process can load of a state."""
        return given if self._ownership is None else self._ownership.own_state_dict(given)

    def load_whole_state(self, given: dict[str, Any]) -> None:
        """A shared model's state becomes everybody's, from worker 0."""
        assert self._ownership is not None
        if self.session.rank == 0:
            entries = self._ownership.entries(given)
            optimizer_state.write(self.store, self._apply, self._trained_parameters(), entries)
        self.session.barrier()

    def model_state(self) -> dict[str, torch.Tensor]:
        """The `state_dict()` of a shared model, all of it; no other worker takes part."""
        assert self._ownership is not None
        return self._ownership.model_state(self.store, self.buffers.indices)

    def keeps_other_state(self) -> bool:
        """The optimizer's groups ask for other state than the store has, momentum for example."""
        return path_of(self.optimizer) != self.store.layout.spec.optimizer  # type: ignore[no-any-return]

    def load_state(self) -> None:
        """What `optimizer.state` holds now becomes everybody's, from worker 0."""
        entries, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        if self._ownership is not None and entries:
            raise ValueError("of a split model, load the optimizer's state when it is distributed")
        trained = self._trained_parameters()
        ids = {id(parameter) for parameter in trained.values()}
        # Kept for when they are trained again.
        self._frozen_state = {p: entry for p, entry in entries.items() if id(p) not in ids}
        if self.session.rank == 0 and (entries or self.store.counts().any()):
            mine = {i: entries[p] for i, p in trained.items() if p in entries}
            optimizer_state.write(self.store, self._apply, trained, mine)
        self.session.barrier()

    def _trained_parameters(self) -> dict[int, torch.Tensor]:
        """Those of other processes too."""
        return {i: self.parameters[i] for i in self.store.layout.trained}

    def places(self) -> Iterator[Found]:
        """Where the tensors of this process are now, by the addresses at which they arrived."""
        trained = set(self._left)
        for i, parameter in enumerate(self.parameters):
            if id(parameter) not in self._names:
                continue  # another process has it
            placed = None
            if i in trained:
                slots = self._slots
                placed = Placed(False, slots) if isinstance(slots, str) else slots.placed(i)
            copied = self.bytes_copied.get(i)
            if placed is not None and (placed.in_place or placed.reason == NOT_YET):
                if not self._was_in_place.get(i, True):
                    placed = Placed(False, "the script put it there after backward")
            inside = False
            if i in self._held:
                value = self.store.value(i)
                inside = not value.nbytes or parameter.data_ptr() == value.ctypes.data
            yield Found(
                self._names[id(parameter)], parameter, self.store.layout.places[i].start, placed,
                self._shared[i], self._sparse_bytes.get(i, parameter.nbytes), copied, inside,
                i in self._held,
            )  # fmt: skip

    @property
    def never_stepped(self) -> bool:
        """Gradients came, and no step was made of them."""
        return self.steps == 0 and bool(self.bytes_copied)

    @property
    def planning_s(self) -> float:
        """Spent on learning which allocations the gradients are."""
        return self._slots.learning_s if isinstance(self._slots, GradientSlots) else 0.0

    def close(self, private: bool = True) -> None:
        """Parameters become the process's own memory again if `private`; idempotent."""
        self.closed = True
        self._let_go(private)
        self.store.close()

    def drop(self) -> None:
        """As `close`, together with all workers while the job goes on: the servers free it too."""
        self.between_steps("close()")
        self.closed = True
        self.withdraw()
        self._let_go(True)
        self.session.release_store(self.store)

    def _let_go(self, private: bool) -> None:
        self._stop_hooks()
        if private:
            self._make_private()

    def _stop_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if isinstance(self._slots, GradientSlots):
            self._slots.close()


def _format_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter.dtype, tuple(parameter.shape), parameter.stride()
