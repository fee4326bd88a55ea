"""Explains for every tensor of a training step where it lies, how it got there, and why.

Nothing is predicted: the rows are read after real steps, from the addresses at which gradients
arrived and the bytes that were counted where they were copied.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import job as jobs
from .allocator.gradient_slots import COPIED, NOT_YET, SPARSE, Outcome
from .devices import is_on_host
from .joining import init, latest_job
from .optimizer import DistributedOptimizer, replica_of
from .replica.gradient_state import Found, GradientState
from .replica.replica import Replica

_WITHIN = "its server has its share on the same device"
_SLOWLY = " by way of the driver's buffer"

STEPS = 2
"""How many steps are made: the first is traced, the second is the first with a plan."""


@dataclass(frozen=True, slots=True)
class ExplainRow:
    """One tensor of a step.

    Attributes:
        name: of the parameter.
        role: "parameter" or "gradient".
        shape, dtype: as in torch.
        arrived: false for a gradient that backward never made.
        bytes: of the tensor; of a sparse gradient, those of the rows that it had.
        offset: of its slot in the store, bytes.
        in_place: it lies where the servers read and write it, in its slot or in the pool, or, for a
            gradient that has to cross a network, in registered memory.
        route: how it gets there.
        copies: that the worker made of it when it left last; one of a part counts as one.
        bytes_copied: in all of these.
        reason: why it was copied, or is in the pool; "" if it is in its slot.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    arrived: bool
    bytes: int
    offset: int
    in_place: bool
    route: str
    copies: int
    bytes_copied: int
    reason: str

    @property
    def state(self) -> str:
        """The fate of the gradient: "in place", "copied", or "no gradient" if none came."""
        if not self.arrived:
            return "no gradient"
        return "in place" if self.in_place else "copied"


@dataclass(frozen=True)
class Explanation:
    """The tensors of one optimizer, after its last step.

    Attributes:
        model: its class; where a job has several optimizers, with what tells it apart: the name
            under which `job.track` has it, or a number.
        rows: gradients first, in the order of the model, then parameters.
        planning_s: spent on learning which allocations the gradients are, since the start.
    """

    model: str
    rows: tuple[ExplainRow, ...]
    planning_s: float

    @property
    def gradients(self) -> tuple[ExplainRow, ...]:
        """The rows of gradients, also of those that never came."""
        return tuple(row for row in self.rows if row.role == "gradient")

    @property
    def arrived(self) -> tuple[ExplainRow, ...]:
        """The gradients that came; the totals count these."""
        return tuple(row for row in self.gradients if row.arrived)

    @property
    def missing(self) -> tuple[ExplainRow, ...]:
        """The gradients that never came."""
        return tuple(row for row in self.gradients if not row.arrived)

    @property
    def bytes(self) -> int:
        """Bytes of all gradients that came."""
        return sum(row.bytes for row in self.arrived)

    @property
    def bytes_in_place(self) -> int:
        """Bytes of the gradients that were produced in place."""
        return sum(row.bytes for row in self.gradients if row.in_place)

    @property
    def bytes_copied(self) -> int:
        """The bytes of gradients that the worker copied; a second copy counts twice."""
        return sum(row.bytes_copied for row in self.gradients)

    def to_json(self) -> dict[str, Any]:
        """Returns the dictionary that `tensorwire explain --json` writes."""
        gradients = self.arrived
        return {
            "model": self.model,
            "tensors": len(gradients),
            "bytes": self.bytes,
            "bytes_in_place": self.bytes_in_place,
            "tensors_in_place": sum(row.in_place for row in gradients),
            "bytes_copied": self.bytes_copied,
            "tensors_without_gradient": len(self.missing),
            "bytes_without_gradient": sum(row.bytes for row in self.missing),
            "planning_seconds": self.planning_s,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def drawing(self, width: int = 72) -> list[tuple[str, int]]:
        """Returns the store from its first byte to its last, in `width` cells.

        Returns:
            Per cell the state of the gradient that has most of its bytes ("in place", "copied", "no
            gradient"; "none" without a tensor), and the number of that gradient in the store's
            order, from 0; -1 for none.
        """
        gradients = sorted(self.gradients, key=lambda row: row.offset)
        end = max((row.offset + row.bytes for row in gradients), default=0)
        cells: list[tuple[str, int]] = []
        for cell in range(width if end else 0):
            first, last = end * cell // width, end * (cell + 1) // width
            shares = [
                (min(row.offset + row.bytes, last) - max(row.offset, first), i)
                for i, row in enumerate(gradients)
            ]
            most, index = max(shares, default=(0, -1))
            if most <= 0:
                cells.append(("none", -1))
            else:
                cells.append((gradients[index].state, index))
        return cells

    def __str__(self) -> str:
        share = 100 * self.bytes_in_place / self.bytes if self.bytes else 0.0
        in_place = sum(row.in_place for row in self.arrived)
        none = f"; {len(self.missing)} never came" if self.missing else ""
        lines = [
            f"{self.model}: {in_place} of {len(self.arrived)} gradients in place, "
            f"{self.bytes_in_place} of {self.bytes} bytes ({share:.2f} %){none}"
        ]
        for row in self.gradients:
            how = f"{row.route}: {row.reason}" if row.reason else "in place"
            lines.append(f"  {row.name}  {row.shape}  {row.bytes} bytes  {how}")
        return "\n".join(lines)


def explain_optimizer(optimizer: Any) -> Explanation:
    """Explains the last step of a distributed optimizer, tensor by tensor.

    Args:
        optimizer: from `DistributedOptimizer`, after at least two steps.
    """
    core = replica_of(optimizer)
    gradients, parameters = [], []
    within = bool(core.store.on_device())
    for found in core.tensors():
        parameter, state = found.parameter, found.gradient
        dtype = str(parameter.dtype).removeprefix("torch.")
        shape, offset = tuple(parameter.shape), found.offset
        if state is not None:
            outcome = core.reducer.outcome(state)
            size_bytes = parameter.nbytes if state.size_bytes is None else state.size_bytes
            copied = state.bytes_copied or 0
            copies = -(-copied // size_bytes) if copied else 0
            arrived = state.bytes_copied is not None
            gradients.append(
                ExplainRow(
                    found.name, "gradient", shape, dtype, arrived, size_bytes, offset,
                    outcome.in_place and arrived, _route(state, outcome), copies, copied,
                    _reason(state, outcome) if arrived else NOT_YET,
                )
            )  # fmt: skip
        parameters.append(_parameter_row(found, within and state is not None))
    return Explanation(_name_of(core), tuple(gradients + parameters), core.reducer.planning_s)


def _reason(gradient: GradientState, outcome: Outcome) -> str:
    return _WITHIN if gradient.within else gradient.slow or outcome.reason


def _parameter_row(found: Found, within: bool) -> ExplainRow:
    parameter = found.parameter
    why = "it is being edited" if found.held else "another optimizer has it"
    row = ExplainRow(
        found.name, "parameter", tuple(parameter.shape),
        str(parameter.dtype).removeprefix("torch."), True, parameter.nbytes, found.offset,
        found.inside, "read in place", 0, 0, "" if found.inside else why,
    )  # fmt: skip
    if is_on_host(parameter) or not found.inside:
        return row
    route = f"copied {'within' if within else 'to'} {parameter.device}"
    if found.slow and not within:
        route += _SLOWLY
    return dataclasses.replace(
        row, in_place=False, route=route, copies=1, bytes_copied=parameter.nbytes,
        reason=_WITHIN if within else found.slow or COPIED,
    )  # fmt: skip


def _name_of(core: Replica) -> str:
    """Returns the model's class; with several optimizers in the job also its name or number."""
    job = latest_job()
    cores = job.local_replicas if job is not None and job.session is core.session else []
    if job is None or len(cores) < 2:
        return core.ownership.model_name
    names = [_kept_name(job, each) for each in cores]
    alike = [each for each, name in zip(cores, names, strict=True) if name == _kept_name(job, core)]
    if len(alike) < 2:
        return _kept_name(job, core)
    kept = job.tracked_name(core.optimizer)
    which = kept or str(1 + next(i for i, each in enumerate(alike) if each is core))
    return f"{_kept_name(job, core)} {which}"


def _kept_name(job: jobs.Job, core: Replica) -> str:
    name = job.tracked_name(core.model)
    return f"{name} ({core.ownership.model_name})" if name else core.ownership.model_name


def _route(gradient: GradientState, outcome: Outcome) -> str:
    if gradient.bytes_copied is None:
        return "never came"
    if not gradient.parameter.nbytes:
        return "none"
    if outcome.reason == SPARSE:
        return "rows sent"
    if not is_on_host(gradient.parameter):
        route = f"copied {'within' if gradient.within else 'from'} {gradient.parameter.device}"
        route += _SLOWLY if gradient.slow else ""
        return route + (" into its server's memory" if gradient.was_in_place else ", then sent")
    if not outcome.in_place:
        return "copied by the worker" if gradient.bytes_copied else "sent"
    if not gradient.shared:
        return "produced in registered memory, sent from there"
    return "produced in the pool, read there" if outcome.reason else "produced in place"


class _EnoughError(BaseException):
    """Raised when enough steps were seen; not an Exception, so that no script catches it."""


def explain_script(path: str, arguments: Sequence[str] = ()) -> list[Explanation]:
    """Runs a training script alone until its optimizers made two steps each.

    Returns:
        One for each of its distributed optimizers; none if it ended before.

    Raises:
        Whatever the script raises.
    """
    found: list[Explanation] = []

    def stepped(job: jobs.Job) -> None:
        if all(replica.steps >= STEPS for replica in job.local_replicas):
            found.extend(explain_optimizer(optimizer) for optimizer in job.optimizers)
            raise _EnoughError

    argv, sys.argv = sys.argv, [path, *arguments]
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)  # as python does for a script
    jobs.on_step = stepped
    try:
        runpy.run_path(path, run_name="__main__")
    except (_EnoughError, SystemExit):
        pass
    finally:
        jobs.on_step = None
        sys.argv = argv
        sys.path.remove(folder)
        if (job := latest_job()) is not None:
            job.close()
    return found


def explain_model(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], *, name: str = ""
) -> Explanation:
    """Trains a model for two steps in this process and tells where its tensors were.

    Args:
        model: to be trained; its values change.
        step: computes the loss of a batch with the model.
        name: of the model, its class's by default.

    Raises:
        RuntimeError: this process is in a job already.
    """
    if (job := latest_job()) is not None and not job.closed:
        raise RuntimeError(
            "explain_model trains in a job of its own, and this process is in one: close() that "
            "first, or let explain_optimizer(opt) tell of an optimizer that trains in it"
        )
    with init():
        optimizer: Any = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        optimizer = DistributedOptimizer(optimizer, model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
        result = explain_optimizer(optimizer)
    return dataclasses.replace(result, model=name or result.model)
