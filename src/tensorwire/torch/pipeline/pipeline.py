"""Runs a model that is split over processes: each has stages, and a plan moves tensors between.

`split` captures, plans and materialises; a `Split` runs steps. Activations and their gradients are
edges of a graph (tensorwire.edges); so are the gradients of weights that several processes have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree as pytree

from tensorwire.edges import wait_opened
from tensorwire.errors import PeerLostError
from tensorwire.placement import Graph, Operator, Tensor, plan

from ..group import Machines
from ..group import machines as find_machines
from ..model_index import ModelIndex
from ..session import present_session
from .activations import Activations, array_of, graph_of, open_edges, tensor_of
from .capture import Capture, capture
from .schedules import Action, Kind, deal, flights, order
from .stage import Stage

if TYPE_CHECKING:
    from ..replica.replica import Replica

Weights = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]

_EXPLAIN_S = 2.0  # for the servers to tell which process ended


def split(
    model: nn.Module,
    split_spec: Mapping[str, SplitPoint] | None = None,
    *,
    example: Sequence[torch.Tensor],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    microbatches: int = 1,
    schedule: str = "1F1B",
    dynamic_shapes: Any = None,
    weights: Weights | None = None,
    machines: Machines | None = None,
    timeout_s: float | None = 60.0,
) -> Split:
    """Splits a model into stages and keeps those of this process.

    All processes call it with the same arguments, in the same order if there are several models.
    In a job they are those of its pipelines: `tw.init(pipeline=…)`. The model is traced once by
    `torch.export`. Stage s belongs to process s modulo their number; with "ZBVZeroBubble" and
    "DualPipeV" stages s and 2P - 1 - s of P processes are together.

    Args:
        model: on the CPU, or on the meta device, where it takes no memory; the stages get its mode
            (train or eval).
        split_spec: names of modules, to begin a stage before or after; None if the model itself
            calls `torch.distributed.pipelining.pipe_split()`.
        example: positional inputs of one micro-batch; only shapes and dtypes count.
        loss: of (output, target) of a micro-batch; the mean over the micro-batches is trained.
        microbatches: parts of a step.
        schedule: as in torch.distributed.pipelining. In several processes "GPipe" and "1F1B" have
            one stage in each, "ZBVZeroBubble" and "DualPipeV" two, "Interleaved1F1B", "LoopedBFS"
            and "InterleavedZeroBubble" any number.
        dynamic_shapes: as for `torch.export.export`: which sizes differ between micro-batches. Give
            a bound (`Dim("t", max=512)`) where there is one.
        weights: of a model on meta: parameters and buffers by name. Only those of this process are
            asked for.
        machines: the processes; by default those of this job's pipeline, or without a job those
            that torchrun started.
        timeout_s: for the others to get here, and for a value to come from another process; None
            waits for ever. Loading weights may take any time.

    Raises:
        ValueError: the model, the schedule, or the processes' arguments do not fit together.
        UnavailableError: a process cannot be reached.
        TimeoutError, PeerLostError: another process did not come so far.
    """
    job = present_session()
    own = machines is None and job is None
    if machines is None:
        machines = find_machines() if job is None else job.machines()
    try:
        taken = capture(model, split_spec, example, dynamic_shapes)
        return Split(taken, model, machines, own, loss, microbatches, schedule, weights, timeout_s)
    except BaseException:
        if own:
            machines.close()
        raise


class Split:
    """The stages of this process; made by `split`.

    Attributes:
        module: holds the parameters and buffers of this process under their first names.
        stages: indices of the stages here.
        plan: of what moves in each micro-batch.
        machines: the processes.
        whole: names and formats of all tensors of the model.
    """

    def __init__(
        self,
        taken: Capture,
        model: nn.Module,
        machines: Machines,
        owns_machines: bool,
        loss: Callable[[Any, Any], torch.Tensor] | None,
        microbatches: int,
        schedule: str,
        weights: Weights | None,
        timeout_s: float | None,
    ) -> None:
        count, size, rank = len(taken.parts), machines.size, machines.rank
        homes = deal(schedule, size, count)
        self._actions = order(schedule, rank, size, count, microbatches)
        self._taken = taken
        self._loss = loss
        self._microbatches = microbatches
        self._owns_machines = owns_machines
        self._failed = False
        self.machines = machines
        self.stages = tuple(stage for stage, home in enumerate(homes) if home == rank)
        self.whole = ModelIndex.of(model, [part.tensors for part in taken.parts], homes)
        self._core: Replica | None = None
        self._last = count - 1
        self.plan = plan(graph_of(taken, homes))
        ties = plan(_ties_graph(self.whole))
        number = machines.next_split()
        _check_schedules(machines, f"split/{number}", schedule, microbatches, timeout_s)
        turns = flights(schedule, size, count, microbatches)
        with ExitStack() as undo:
            edges = open_edges(machines, self.plan, f"split/{number}", turns, timeout_s)
            undo.callback(edges.close)
            self._edges = Activations(taken.values, self.stages, edges)
            self._ties = open_edges(machines, ties, f"split/{number}/ties", 1, timeout_s)
            undo.callback(self._ties.close)
            # All have come here; loading weights may take each of them any time.
            self.module = self._load(model, weights, f"split/{number}/loaded")
            undo.pop_all()
        self._stages = {s: Stage(s, taken.parts[s], taken.values, self.module) for s in self.stages}
        self._tied = {name: ranks for name, ranks in self.whole.tied().items() if rank in ranks}

    def _load(self, model: nn.Module, weights: Weights | None, label: str) -> nn.Module:
        used = self.whole.had_by(self.machines.rank)
        try:
            module = _materialised(model, self._taken, used, weights)
        except BaseException:
            self.machines.meet(label, failed=True)
            raise
        self.machines.meet(label)
        return module

    @property
    def _sends_inputs(self) -> bool:
        """True if others read the caller's memory, and no gradient comes back to tell they did."""
        return self.has_first and any(
            value.maker == 0 and not value.needs_grad and set(value.users) - set(self.stages)
            for value in self._taken.values.values()
        )

    @property
    def has_first(self) -> bool:
        """True if inputs are given here."""
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        """True if targets are given here, and the loss and outputs come out here."""
        return self._last in self.stages

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of this process, for its optimizer."""
        yield from self.module.parameters()

    def _trainer(self) -> Replica | None:
        return None if self._core is None or self._core.closed else self._core

    def trained_by(self, core: Replica) -> None:
        """Gives the gradients of steps to a DistributedOptimizer, which calls this."""
        self._core = core

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the state dict of the whole model. No other worker takes part.

        The parts of other processes are read from the servers, as of this moment.

        Raises:
            RuntimeError: other processes have parts of it, and no DistributedOptimizer trains it.
        """
        if core := self._trainer():
            return core.state.model_state(core.buffers.indices)
        if self.machines.size > 1:
            raise RuntimeError(
                "other processes have parts of this model, and no DistributedOptimizer trains it; "
                "split.module.state_dict() is what this one has"
            )
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {key: own[name].detach() for key, name in self.whole.keys.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes this process's part of the whole model's; all processes call it.

        With a DistributedOptimizer inside `tw.edit(split)`.

        Raises:
            ValueError: it is not this model's.
        """
        self.whole.take(self.module, state_dict)

    def step(self, *inputs: Any, target: Any = None) -> torch.Tensor | None:
        """Runs forward and backward of all micro-batches; every process calls it.

        Gradients are added to `.grad`, as by one backward of the mean loss. A weight that several
        processes have gets the same sum in each, so that equal optimizers keep it equal.

        Args:
            inputs: on the process of the first stage: tensors, cut along their first dimension into
                equal micro-batches, or lists with one tensor for each.
            target: on the process of the last stage: in the same forms.

        Returns:
            The mean loss on the process of the last stage, None elsewhere.

        Raises:
            ValueError: the inputs cannot be cut or are not as they were traced, or there is no
                loss. Nothing was done.
            TimeoutError, PeerLostError: another process did not send. After these, and errors of
                the model, this Split cannot be used any more.
            RuntimeError: an earlier step failed.
        """
        if self._loss is None:
            raise ValueError("a step needs the loss=... of split()")
        if torch.is_inference_mode_enabled():
            raise ValueError("a step inside torch.inference_mode(): nothing can be trained there")
        for name in self._unfrozen():
            raise ValueError(
                f"{name!r} is in several processes and was frozen when the model was split, so "
                "they would not add up its gradients: call tw.split() again"
            )
        return self._run(self._actions, inputs, target, True)

    def evaluate(self, *inputs: Any) -> Any:
        """Runs forward alone; every process calls it, as `step`.

        Returns:
            On the process of the last stage the outputs of all micro-batches, in a list.

        Raises:
            ValueError, TimeoutError, PeerLostError, RuntimeError: as of `step`.
        """
        forwards = [action for action in self._actions if action.kind is Kind.FORWARD]
        return self._run(forwards, inputs, None, False)

    def _run(
        self, actions: Sequence[Action], inputs: Sequence[Any], target: Any, train: bool
    ) -> Any:
        if self._failed:
            raise RuntimeError("an earlier step of this Split failed; make a new one")
        job, core = present_session(), self._trainer() if train else None
        if train and core is None and job is not None and job.replicas > 1:
            raise RuntimeError(
                f"{job.replicas} replicas would train without each other: make a "
                "tw.DistributedOptimizer(optimizer, split)"
            )
        batches = self._cut(inputs) if self.has_first else []
        targets = _chunks(target, self._microbatches, "target") if self.has_last and train else []
        try:
            with core.splitting() if core else nullcontext():
                kept = self._put_aside() if train else {}
                losses, outputs = self._go(actions, batches, targets, train)
                if train:
                    self._sum_ties(kept)
                if not train or self._sends_inputs:
                    self._edges.edges.settle()
        except BaseException as error:
            self._failed = True
            for each in self._stages.values():
                each.forget()
            if isinstance(error, PeerLostError) and job is not None:
                explained = job.explain_loss(error, _EXPLAIN_S)
                if explained is not error:
                    raise explained from error
            raise
        if not self.has_last:
            return None
        return sum(loss.detach() for loss in losses.values()) if train else outputs

    def _go(
        self, actions: Sequence[Action], batches: Sequence[Any], targets: Sequence[Any], train: bool
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Returns losses and outputs of the micro-batches, where the last stage is."""
        losses: dict[int, torch.Tensor] = {}
        outputs: list[Any] = []
        in_parts = {(stage, at) for kind, stage, at in actions if kind is Kind.INPUT}
        for kind, stage, at in actions:
            if kind is Kind.WEIGHT:
                self._stages[stage].backward_weights(at)
                self._edges.release(stage, at)
                continue
            if kind is not Kind.FORWARD:
                self._backward(kind, stage, at, losses[at] if stage == self._last else None)
                if stage == self._last:
                    losses[at] = losses[at].detach()  # without what forward has saved
                continue
            results = self._forward(
                stage, at, batches[at] if stage == 0 else {}, train, (stage, at) in in_parts
            )
            if stage != self._last:
                continue
            output = pytree.tree_unflatten(results, self._taken.output_spec)
            if train:
                losses[at] = self._loss_of(output, targets[at])
            else:
                outputs.append(self._edges.kept(output))
                self._edges.release(stage, at)
            del results, output  # they keep what forward has saved
        return losses, outputs

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor:
        """Returns a micro-batch's part of the mean loss."""
        assert self._loss is not None
        with torch.enable_grad():  # as in the stages
            loss = self._loss(output, target) / self._microbatches
        tensors = [each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]
        if not loss.requires_grad and any(each.requires_grad for each in tensors):
            raise ValueError(
                "the loss does not depend on the model's outputs as far as autograd knows; was "
                "it computed from detached tensors?"
            )
        return loss

    def _unfrozen(self) -> Iterator[str]:
        """Yields weights that others have too, and that were frozen when ties were planned."""
        for name, parameter in self.module.named_parameters():
            shared = len(self.whole.ranks[name]) > 1
            if shared and parameter.requires_grad and name not in self._tied:
                yield name

    def _cut(self, inputs: Sequence[Any]) -> list[dict[str, Any]]:
        wanted = self._taken.inputs
        names = [each.name for each in wanted]
        if len(inputs) != len(names):
            raise ValueError(f"the model has {len(names)} inputs, {names}; given are {len(inputs)}")
        cut = [
            _chunks(each, self._microbatches, name)
            for name, each in zip(names, inputs, strict=True)
        ]
        batches = [dict(zip(names, each, strict=True)) for each in zip(*cut, strict=True)]
        for batch in batches:
            symbols: dict[str, int] = {}
            for each in wanted:
                each.check(batch[each.name], symbols)
        return batches

    def _forward(
        self, index: int, at: int, inputs: dict[str, Any], train: bool, parts: bool
    ) -> list[Any]:
        stage = self._stages[index]
        if index:
            inputs = {name: self._edges.get(name, at) for name in stage.inputs}
        made, outputs = stage.forward(at, inputs, train, parts)
        for name, value in made.items():
            self._edges.put(name, value, at)
        if not train and index != self._last:
            self._edges.release(index, at)
        return outputs

    def _backward(self, kind: Kind, index: int, at: int, loss: torch.Tensor | None) -> None:
        stage = self._stages[index]
        gradients = self._edges.gradients(stage, at)
        if kind is Kind.INPUT:  # and the rest still needs this memory
            back = stage.backward_inputs(at, gradients, loss)
        else:
            back = stage.backward(at, gradients, loss)
            # First: the sender may be waiting for this memory before it can take gradients.
            self._edges.release(index, at)
        for name, gradient in back.items():
            self._edges.put_gradient(name, index, gradient, at)

    def _put_aside(self) -> dict[str, torch.Tensor | None]:
        """Takes the earlier gradients of tied weights away, so that only this step's are summed."""
        kept = {}
        for name in self._tied:
            parameter = self.module.get_parameter(name)
            kept[name], parameter.grad = parameter.grad, None
        return kept

    def _sum_ties(self, kept: Mapping[str, torch.Tensor | None]) -> None:
        rank = self.machines.rank
        mine = {}
        for name in self._tied:
            parameter = self.module.get_parameter(name)
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if gradient.layout != torch.strided:
                raise ValueError(f"{name!r} is in several processes; its gradient must be dense")
            mine[name] = gradient.contiguous()
            self._ties.put(f"{rank} {name}", array_of(mine[name]))
        if not self._tied:
            return
        for name, ranks in self._tied.items():
            if ranks[0] != rank:
                self._sum_tie(name, mine[name], kept[name])
        # The first process of a tie adds to what it has sent, so the others must be done with it.
        # They are, without waiting for this one.
        self._ties.settle()
        for name, ranks in self._tied.items():
            if ranks[0] == rank:
                self._sum_tie(name, mine[name], kept[name])

    def _sum_tie(self, name: str, mine: torch.Tensor, before: torch.Tensor | None) -> None:
        total: torch.Tensor | None = None
        for other in self._tied[name]:  # in this order everywhere, so that the bits are the same
            if other == self.machines.rank:
                total = mine if total is None else total.add_(mine)
                continue
            arrival = self._ties.get(f"{other} {name}")
            part = tensor_of(arrival.value, mine.dtype)
            total = part.clone() if total is None else total.add_(part)
            arrival.release()
        self.module.get_parameter(name).grad = total if before is None else before.add_(total)

    def stats(self) -> dict[str, int]:
        """Returns `Edges.stats` of activations and their gradients."""
        return self._edges.edges.stats()

    def close(self) -> None:
        """Ends the Split here, when others have taken all sent values; parameters stay. Idempotent.

        Raises:
            TimeoutError, PeerLostError: another process did not; it is closed in any case.
        """
        try:
            if not self._failed and not self._edges.edges.closed:
                self._edges.edges.settle()
        finally:
            self._edges.edges.close()
            self._ties.close()
            if self._owns_machines:
                self.machines.close()

    def __enter__(self) -> Split:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._failed = self._failed or kind is not None
        self.close()


def _check_schedules(
    machines: Machines, label: str, schedule: str, microbatches: int, timeout_s: float | None
) -> None:
    """Checks that all processes have the same schedule.

    Each makes a region that is named by the schedule before one that tells that it did. Edges count
    turns: with another order of backwards they would mix up micro-batches. And where stages lie
    differently, a process would wait for edges that another does not have.
    """
    mine, made = f"{label}/{schedule.lower()}/{microbatches}", f"{label}/schedule"
    if machines.node is not None:
        for name in (mine, made):
            machines.node.allocate(64, name=name, access="r")
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for rank, peer in (machines.peers or {}).items():
        wait_opened(peer, made, deadline, f"rank {rank} ({peer.name})")
        try:
            peer.region(mine)
        except LookupError:
            raise ValueError(
                f"rank {rank} has another schedule than this rank, {schedule} of {microbatches} "
                "micro-batches: give all ranks the same"
            ) from None


def _ties_graph(whole: ModelIndex) -> Graph:
    """Returns the graph of a step's end: each owner of a tied weight sends its gradient."""
    tensors, makes, uses = [], [], []
    for name, ranks in whole.tied().items():
        parameter = whole.parameters[name]
        dtype = str(parameter.dtype).removeprefix("torch.")
        for rank in ranks:
            part = Tensor(f"{rank} {name}", dtype, tuple(parameter.shape))
            tensors.append(part)
            makes.append(Operator(f"make {part.name}", str(rank), (), (part.name,), 0))
        names = tuple(f"{rank} {name}" for rank in ranks)
        uses += [Operator(f"sum {rank} {name}", str(rank), names, (), 1) for rank in ranks]
    return Graph(tuple(tensors), (*makes, *uses))


def _materialised(
    model: nn.Module, taken: Capture, used: Sequence[str], weights: Weights | None
) -> nn.Module:
    """Returns a module with the tensors of this process alone, with storage."""
    own = nn.Module()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name in used:
        *way, last = name.split(".")
        holder = own
        for part in way:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if name in parameters:
            given = parameters[name]
            if given.is_meta:
                value = _value(name, given, weights)
                given = nn.Parameter(value, requires_grad=given.requires_grad)
            holder.register_parameter(last, given)
        elif name in buffers:
            given = buffers[name]
            if given.is_meta:
                given = _value(name, given, weights)
            elif 0 in given.stride():  # expanded: it cannot be written to
                given = given.contiguous()
            holder.register_buffer(last, given)
        elif isinstance(taken.others[name], torch.Tensor):
            holder.register_buffer(last, taken.others[name], persistent=False)
        else:
            setattr(holder, last, taken.others[name])
    return own


def _value(name: str, wanted: torch.Tensor, weights: Weights | None) -> torch.Tensor:
    """Returns the value of a tensor that is on meta, in memory of its own."""
    if weights is None:
        raise ValueError(f"{name!r} is on the meta device: give its value by weights=")
    try:
        value = weights(name) if callable(weights) else weights[name]
    except KeyError:
        raise ValueError(
            f"{name!r} is on the meta device, and weights has no such tensor"
        ) from None
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise ValueError(
            f"{name!r} is {wanted.dtype} {tuple(wanted.shape)}; weights has {value.dtype} "
            f"{tuple(value.shape)}"
        )
    return torch.empty_like(wanted, device="cpu").copy_(value.detach())


def _chunks(given: Any, count: int, name: str) -> list[Any]:
    """Returns a tensor cut along its first dimension, or a list as it is."""
    if isinstance(given, list | tuple):
        if len(given) != count:
            raise ValueError(
                f"{name} has {len(given)} tensors: give one for each of {count} micro-batches"
            )
        return list(given)
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} is a tensor or a list of them, not {type(given).__name__}")
    if not given.dim() or given.shape[0] % count:
        raise ValueError(
            f"{name} of shape {tuple(given.shape)} cannot be cut into {count} equal micro-batches; "
            "pass a list of tensors"
        )
    return list(given.chunk(count)) if given.shape[0] else [given] * count
