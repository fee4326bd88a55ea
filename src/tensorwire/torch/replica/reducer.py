"""Sends gradients to the servers while backward runs, from hooks.

A gradient leaves when it is complete, or it lies where the servers read it; what a commit says of
each is known here. The protocol of a step is the `Replica`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tensorwire.durability.history import NoteKind
from tensorwire.memory import same_bytes
from tensorwire.parameters import (
    ABSENT,
    POOLED,
    PRODUCED,
    PUSHED,
    Bytes,
    LocalStore,
    Place,
    Store,
)

from ..allocator.gradient_slots import (
    COPIED,
    NO_PLACE,
    NOT_YET,
    SLOT,
    SPARSE,
    GradientSlots,
    Outcome,
    try_slots,
)
from ..devices import device_of, is_on_host
from ..session import Session
from ..views import TensorsOver, address_of, flat_bytes, tensor_at
from .device_gradients import DeviceGradients
from .gradient_checks import GradientChecks, gradient_changed, sum_of
from .gradient_state import GradientState, Left, count_copied
from .mutation_guard import MutationGuard
from .sample_count import SampleCount
from .table_gradients import TableGradients


class Reducer:
    """The gradients of one optimizer that this process speaks for.

    Backward may run in another thread than the rest.

    Args:
        session: of the worker.
        store: gets the gradients.
        parameters: all of the store.
        states: of the gradients that this process makes and speaks for.
        sent: for each tensor of the store 1 if this process speaks for it, else 0.
        guard: of the parameters.
        placement: as of `DistributedOptimizer`.
        split: several processes have the model.

    Attributes:
        states: as given.
        accumulating: backward only adds to `.grad`.
        sealed: the gradients of this step were averaged already.
        reduced: this slice's were committed to be averaged, and another slice is due first.
        turn: which of this worker's slices is being computed.
        samples: weight of the slice.
        waits: a gradient has come that was not committed.
        lacks: a gradient had come to the process that this one replaces, and is not here.
        begun: how often gradients were committed or withdrawn.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        parameters: Sequence[torch.Tensor],
        states: Sequence[GradientState],
        sent: np.ndarray[Any, np.dtype[np.uint8]],
        guard: MutationGuard,
        placement: str,
        split: bool,
    ) -> None:
        self.states = states
        self.accumulating = False
        self.sealed = self.reduced = False
        self.turn = 0
        self.waits = self.lacks = False
        self.begun = 0
        self._waits_since = 0  # versions that were repeated before the first of them came
        self._is_back = False  # `put_back` was called
        self.samples = SampleCount(session)
        self._session = session
        self._store = store
        self._guard = guard
        self._split = split
        self._of = {id(state.parameter): state for state in states}
        self._statistics = session.statistics
        self._first_push = 0.0
        self._steps = 0
        self._all_pushed = (sent * PUSHED).tobytes()
        self._all_produced = (sent * PRODUCED).tobytes()
        self._views = self._find_views()
        self._copies = placement == "copy"
        self._places: dict[int, Sequence[Place | str]] = {}
        self._tables = TableGradients(store, self._statistics)
        self._on_device: dict[int, DeviceGradients] = {}  # by slice, or -1: of all
        self._besides: set[int] = set()  # slices of these whose gradients a predecessor left
        self._device = device_of(state.parameter for state in states)
        self._slots: GradientSlots | str = "what another process has left there counts"
        self._later: Callable[[], GradientSlots | str] | None = None
        self._later = partial(self._find_slots, parameters, placement)
        if not store.lies_ahead(NoteKind.GRADIENTS):
            self._slots, self._later = self._later(), None
        dense = [state for state in states if not state.is_table]
        self._checks = GradientChecks({state.index: state.parameter.nbytes for state in dense})
        self._looked_at = self._checks.at(0)
        self._hooks = [
            state.parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for state in states
        ]

    def _find_views(self) -> list[dict[int, torch.Tensor]]:
        """Returns, for a process that trains alone, each slice's tensors over the store."""
        store = self._store
        if not isinstance(store, LocalStore):
            return []
        starts = [(state, store.own.place(state.index).start) for state in self.states]
        return [
            {state.index: over.at(start, state.parameter) for state, start in starts}
            for over in map(TensorsOver, map(store.slot, self._session.my_slices))
        ]

    def _places_of(self, slice_index: int) -> Sequence[Place | str]:
        """Returns the places of a slice's gradients, which the store makes once."""
        if slice_index not in self._places:
            self._places[slice_index] = self._store.places(slice_index)
        return self._places[slice_index]

    def _find_slots(
        self, parameters: Sequence[torch.Tensor], placement: str
    ) -> GradientSlots | str:
        """Returns the slots in which gradients are produced, or why there are none."""
        if placement == "copy":
            return 'placement="copy"'
        if len(self._session.my_slices) > 1:
            # A gradient that stays where it is would be there when the next slice is computed.
            return "this worker computes several slices of a step"
        places = self._places_of(self._session.my_slices[0])
        wanted: list[Place | str] = [NO_PLACE] * len(parameters)
        for state in self.states:
            place = SPARSE if state.is_table else places[state.index]
            if not state.on_host:
                place = SPARSE if state.is_table else COPIED
            wanted[state.index] = place
            state.shared = isinstance(place, Place) and place.shared
        if not any(isinstance(each, Place) for each in wanted):
            return next((str(wanted[state.index]) for state in self.states), NO_PLACE)
        return try_slots(parameters, wanted)

    # ---- while backward runs

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.samples.gradient_comes()
        if not self.waits:
            self.waits, self._waits_since = True, self._session.rejoin.repeated
        state, gradient = self._of[id(parameter)], parameter.grad
        assert gradient is not None
        slots, where = self._slots, None
        if isinstance(slots, GradientSlots) and gradient.layout == torch.strided:
            where = slots.arrived(state.index, gradient)
        if not state.shared:
            where = None  # it is sent
        if self.accumulating:
            if state.forget():
                self._store.settle()  # what left before is not the sum; it leaves later
            return
        if where is not None or self._views:
            self._push(state, gradient, where)  # nothing leaves before step()
            return
        started = time.perf_counter()
        self._push(state, gradient, None)
        self._first_push = self._first_push or started
        self._statistics.exposed_s += time.perf_counter() - started

    def _push(
        self, state: GradientState, gradient: torch.Tensor, where: int | None, late: bool = False
    ) -> None:
        on_host, dense = is_on_host(gradient), gradient.layout == torch.strided
        if gradient.dtype != state.dtype or on_host != state.on_host:
            self._guard.check()
        if not dense:
            self._check_layout(state, gradient)
        state.bytes_copied = 0
        if state.left is not None:
            self._store.settle()  # what left before is being replaced
        if self.sealed or self.reduced:
            raise RuntimeError(
                "backward() after synchronize() or clip_grad_norm_(): call step() or zero_grad() "
                "first"
            )
        state.block = None if state.is_table else where
        if state.is_table:
            self._tables.leave(state, self.slice_index, gradient)
        elif where is not None:
            self._statistics.bytes_produced += gradient.nbytes
        elif not on_host:
            self._leave_device(state, gradient)
        elif not self._views:
            data = flat_bytes(gradient.detach(), state.parameter)
            copied = 0 if data.ctypes.data == gradient.data_ptr() else data.nbytes
            if data.nbytes:
                copied += self._store.push(self.slice_index, state.index, data)
            count_copied(self._statistics, state, copied)
        at_server = where is not None or state.block is not None
        state.was_in_place = at_server or self._is_in_place(state, gradient)
        looked = None
        if not late and state.index in self._looked_at:
            looked = self._look_at(state, gradient)
        address = gradient.data_ptr() if dense else address_of(gradient)
        state.left = Left(gradient, gradient._version, address, looked, late)

    def _look_at(self, state: GradientState, gradient: torch.Tensor) -> int | torch.Tensor | None:
        return sum_of(gradient, state.parameter, self._looked_at.get(state.index))

    def _leave_device(self, state: GradientState, gradient: torch.Tensor) -> None:
        """Sends a gradient on a device, which is copied while backward goes on; see `_arrive`."""
        there = self._device_gradients()
        there.leave(state.index, gradient)
        state.within = there.is_within(state.index)
        state.slow = "" if state.within else there.locks.why_not
        state.block = SLOT if there.is_shared(state.index) else None
        count_copied(self._statistics, state, gradient.nbytes)

    def _device_gradients(self) -> DeviceGradients:
        """Returns the gradients of the present slice; slices that only push share one memory."""
        index, pushes = self.slice_index, self._copies or self._session.turns.grows
        key = -1 if pushes else index
        if (found := self._on_device.get(key)) is None:
            assert self._device is not None
            states = (s for s in self.states if not s.is_table and not s.on_host)
            dense = {state.index: state.parameter for state in states}
            places: Sequence[Place | str] = [NO_PLACE] * len(self._all_pushed)
            if not pushes and (self._later is not None or self._store.is_committed(index)):
                self._besides.add(key)  # in the places is what another process has left
            elif not pushes:
                places = self._places_of(index)
            found = self._on_device[key] = DeviceGradients(self._device, dense, places)
        return found

    def _arrive(self) -> None:
        """Waits for gradients that left a device; pushes the ones that servers do not see.

        Raises:
            RuntimeError: a gradient was changed after it had left.
        """
        for there in self._on_device.values():
            there.start()
        self._tables.arrive()
        for there in self._on_device.values():
            for index, memory, shared in there.arrive():
                if not shared:
                    self._store.push(self.slice_index, index, memory)
            if (changed := there.changed()) is not None:
                raise gradient_changed(next(s for s in self.states if s.index == changed).name)

    def _check_layout(self, state: GradientState, gradient: torch.Tensor) -> None:
        by_rows = gradient.layout == torch.sparse_coo and gradient.sparse_dim() == 1
        if not state.is_table or not by_rows:
            where = "of a model that is split" if self._split else "of this model alone"
            what = "it is" if self._split else "it is not"
            raise RuntimeError(
                f"the gradient of {state.name} is {gradient.layout}, and {what} the weight "
                f"of an nn.Embedding(sparse=True) or nn.EmbeddingBag(sparse=True) {where}, or it "
                "is not sparse by rows; make it dense"
            )

    def _is_in_place(self, state: GradientState, gradient: torch.Tensor) -> bool:
        """Tells whether a gradient that is to be sent lies where it was to be produced."""
        slots = self._slots
        if state.shared or state.is_table or not isinstance(slots, GradientSlots):
            return False
        return slots.find(state.index, gradient) is not None

    # ---- before a commit

    @property
    def slice_index(self) -> int:
        """The slice that is being computed."""
        return self._session.turns.slice_of(self.turn)

    def take(self, commits: bool) -> None:
        """Sends the gradients in `.grad` that have not left yet, and forgets withdrawn ones.

        Args:
            commits: a commit follows at once, and with it the step: the script cannot change a
                gradient that leaves now, so its bytes are not checked. If the step is interrupted
                before, it leaves again.

        Raises:
            RuntimeError: a gradient was changed after it had left.
        """
        slots = self._slots
        for state in self.states:
            gradient = state.parameter.grad
            if gradient is None:
                state.forget()
                self._tables.forget(state.index)
            elif state.left is None or state.left.late:
                where = None
                if state.shared and isinstance(slots, GradientSlots):
                    where = slots.find(state.index, gradient)
                self._push(state, gradient, where, commits)
            else:
                self.check_unchanged(state)
        self._copy()
        self._arrive()

    def _copy(self) -> None:
        """Copies all gradients into the slot with one call; alone, they need not leave early."""
        if not self._views:
            return
        views = self._views[self.turn]
        targets, gradients = [], []
        for state in self.states:
            if state.left is not None and state.block is None and not state.is_table:
                targets.append(views[state.index])
                gradients.append(state.left.gradient)
                count_copied(self._statistics, state, targets[-1].nbytes)
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, gradients)

    def check_scalable(self) -> None:
        """Raises ValueError if a gradient has too few bits to be unscaled, as in torch."""
        for state in self.states:
            if state.parameter.dtype == torch.float16:
                raise ValueError(
                    f"parameter {state.name} is float16; a scaler needs float32 parameters "
                    "under autocast"
                )

    def check_all_unchanged(self) -> None:
        """Raises RuntimeError if a gradient was changed after it had left."""
        for state in self.states:
            if state.left is not None:
                self.check_unchanged(state)
        self._arrive()

    def check_unchanged(self, state: GradientState) -> None:
        """Raises RuntimeError if a gradient, which has left, was changed since."""
        left, gradient = state.left, state.parameter.grad
        assert left is not None
        if (
            gradient is not left.gradient
            or gradient._version != left.version
            or address_of(gradient) != left.address
            or (left.checksum is not None and self._looks_different(state, left))
        ):
            raise gradient_changed(state.name)

    def _looks_different(self, state: GradientState, left: Left) -> bool:
        """Compares bytes: a change by way of `.grad.data` leaves no other trace."""
        now = self._look_at(state, left.gradient)
        if isinstance(now, torch.Tensor) and isinstance(left.checksum, torch.Tensor):
            self._device_gradients().compare(state.index, left.checksum, now)
            return False  # `_arrive` tells
        return now != left.checksum

    def gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the gradients that parameters have, with the index of each parameter."""
        for state in self.states:
            if (gradient := state.parameter.grad) is not None:
                yield state.index, gradient

    def present(self) -> tuple[bytes, tuple[int, ...]]:
        """Returns each tensor's entry in a commit, and the blocks of gradients in the pool."""
        missing = copied = produced = pooled = False
        for state in self.states:
            if state.left is None:
                missing = True
            elif state.block is None:
                copied = copied or not state.is_table  # either entry will do for tables
            else:
                produced = True
                pooled = pooled or state.block != SLOT
        if not missing and not produced:
            return self._all_pushed, ()
        if not (missing or copied or pooled):
            return self._all_produced, ()
        present = bytearray(self._all_pushed if copied else self._all_produced)
        for state in self.states:
            if state.left is None:
                present[state.index] = ABSENT
            elif state.block is None:
                present[state.index] = PUSHED
            else:
                present[state.index] = PRODUCED if state.block == SLOT else POOLED
        if not pooled:
            return bytes(present), ()
        blocks = [0] * len(present)
        for state in self.states:
            if state.left is not None and state.block not in (None, SLOT):
                blocks[state.index] = state.block or 0
        return bytes(present), tuple(blocks)

    def watch(self, callback: Callable[[torch.Tensor], None]) -> None:
        """Calls `callback` with each gradient that comes, before it is added to `.grad`."""
        self._hooks += [state.parameter.register_hook(callback) for state in self.states]

    def lying(self) -> tuple[bytes, tuple[int, ...]] | None:
        """Returns the values of `present`; None where a gradient is missing or not dense."""
        if not self.waits or self.sealed or self._differ:
            return None
        for state in self.states:
            left = None if state.left is None else state.left.gradient
            if state.parameter.grad is not left or (state.is_table and left is not None):
                return None
        self._arrive()
        return self.present()

    def put_back(self, present: bytes, blocks: Sequence[int]) -> None:
        """Restores the gradients that another process has left at the servers."""
        for state in self.states:
            state.forget()
            how, parameter = present[state.index], state.parameter
            if how == ABSENT:
                parameter.grad = None
                continue
            block = blocks[state.index] if how == POOLED else 0
            data = self._store.read_gradient(self.slice_index, state.index, how, block)
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            with torch.no_grad():
                parameter.grad.copy_(tensor_at(data, parameter))
        self.lacks, self._is_back = False, True

    def push_edited(
        self, averages: dict[int, tuple[torch.Tensor, Bytes]], spoiled: bool = False
    ) -> None:
        """Sends the averaged gradients that the script has edited.

        Args:
            averages: by index, `.grad` and its bytes as they were before.
            spoiled: they were not finite before, so what is sent is not either: a GradScaler's
                step is skipped even if the script has clipped what was infinite.

        Raises:
            RuntimeError: one is gone.
        """
        for state in self.states:
            if state.index not in averages:
                continue
            gradient, average = averages[state.index]
            now = state.parameter.grad
            if now is None:
                raise RuntimeError(f"the gradient of {state.name} is gone since synchronize()")
            data = flat_bytes(now.detach(), state.parameter)
            if spoiled:
                data = flat_bytes(torch.full_like(now.detach(), math.nan), state.parameter)
            # By its bytes: what goes through `.data` leaves no other trace.
            if now is not gradient or not same_bytes(data, average):
                self._session.rejoin.refuse_twice("it changes averaged gradients")
                count_copied(self._statistics, state, self._store.push_reduced(state.index, data))

    # ---- between steps

    def withdraw(self) -> None:
        """Withdraws all gradients sent since the last step."""
        if any(state.left is not None for state in self.states):
            self._store.settle()
        self._tables.withdraw()
        for each in self._on_device.values():
            each.withdraw()
        self.forget()
        self._begin()
        self.reduced = False  # a script that skips steps without a norm has dropped the gradients
        self.samples.withdraw()
        if isinstance(self._slots, GradientSlots):
            self._slots.begin()

    def forget(self) -> None:
        """Forgets gradients that were committed or withdrawn."""
        for state in self.states:
            state.left, state.block = None, None

    def _begin(self) -> None:
        """Begins anew: no gradient waits."""
        self.waits = self.lacks = self._is_back = False
        self.begun += 1

    @property
    def _differ(self) -> bool:
        """True if the gradients differ from those of the process that this one replaces.

        It computes its last step again. If one optimizer had made it and this one had not, this
        one's gradients were made with new parameters of the other.
        """
        if self._is_back:
            return False
        repeated = self._session.rejoin.repeated
        return self.lacks or (self.waits and repeated != self._waits_since)

    def check_repeated(self) -> None:
        """Raises RuntimeError if gradients would have to be another process's."""
        if self._differ and not self.sealed:
            raise RuntimeError(
                f"worker {self._session.rank} was killed when one optimizer had stepped and "
                "another had gradients that cannot be computed again: they were added up in "
                "accumulate() or by several backward passes, or are sparse. Let an optimizer have "
                "none when another one steps: make backward() and step() of one, then of the next, "
                "and drop with opt.zero_grad() what does not count. The job can go on from its "
                "last checkpoint: job.load"
            )

    def begin_step(self, now: float) -> None:
        """Begins a `step()`; until then pushes went on beside the script's computation."""
        if self._first_push and self._store.asynchronous:
            self._statistics.hidden_s += now - self._first_push
        self._first_push = 0.0

    def slice_committed(self) -> bool:
        """Begins the next slice; tells whether all slices of the step are committed."""
        self._store.settle()
        self.forget()
        self.samples.stepped()
        self.turn = self._session.turns.after(self.turn)
        self._begin()
        return self.turn == 0

    def leave_slots(self) -> None:
        """Copies gradients out of their slots and closes these: more slices are computed here."""
        if isinstance(self._slots, str) and self._later is None:
            return
        for state in self.states:
            state.shared = False
            if state.parameter.grad is not None:
                state.parameter.grad = state.parameter.grad.clone()
        if isinstance(self._slots, GradientSlots):
            self._slots.close()
        self._slots, self._later = "this worker computes several slices of a step", None

    def stepped(self) -> None:
        """Notes a new version."""
        self._steps += 1
        self._looked_at = self._checks.at(self._steps)
        while self._besides:
            self._on_device.pop(self._besides.pop()).close()
        if self._later is not None:
            self._slots, self._later = self._later(), None
        elif isinstance(self._slots, GradientSlots):
            self._slots.stepped()

    # ---- for people

    def outcome(self, state: GradientState) -> Outcome:
        """Returns the outcome of the last gradient."""
        slots = self._slots
        found = Outcome(False, slots) if isinstance(slots, str) else slots.outcome(state.index)
        if not state.was_in_place and (found.in_place or found.reason == NOT_YET):
            return Outcome(False, "the script put it there after backward")
        return found

    @property
    def planning_s(self) -> float:
        """Seconds spent on learning which allocations the gradients are."""
        return self._slots.learning_s if isinstance(self._slots, GradientSlots) else 0.0

    @property
    def came(self) -> bool:
        """True if a gradient has come in any step."""
        return any(state.bytes_copied is not None for state in self.states)

    def close(self) -> None:
        """Removes all hooks, so that gradients belong to the script again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._tables.withdraw()
        for each in self._on_device.values():
            each.close()
        self._on_device.clear()
        if isinstance(self._slots, GradientSlots):
            self._slots.close()
