"""Defines `DistributedOptimizer`: a torch optimizer whose parameters live in a store.

The object stays the user's own; only its class gets a subclass with another `step`, `zero_grad`,
`state_dict` and `load_state_dict`. Gradients leave while backward runs, tensor by tensor, from
hooks on the parameters; values move inside `step()` and nowhere else.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from tensorwire.parameters import uncollected

from .job import Job
from .joining import current_job
from .model_checks import check_model, tell_of_model
from .model_index import model_index_of
from .replica.arithmetic import APPLIERS, check_possible
from .replica.closed import ClosedReplica
from .replica.optimizer_state import StateAtServers
from .replica.replica import Replica

if TYPE_CHECKING:
    from .pipeline.pipeline import Split

PLACEMENTS = ("plan", "copy")
SPARSE = ("exact", "lazy")
PARAMETERS_ON = ("auto", "host")
# Options of earlier versions, until 0.1.0.
_EARLIER = {"mode": "tw.init(mode=…)", "shares": "parameters_on=…"}


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | Split,
    *,
    max_norm: float | None = None,
    buffers: str = "broadcast",
    placement: str = "plan",
    apply: str = "auto",
    ema: float | None = None,
    sparse: str = "exact",
    parameters_on: str = "auto",
    **earlier: Any,
) -> Any:
    """Makes a torch optimizer train together with all other workers of the job.

    Every worker calls it with the same model and optimizer; worker 0's values win. Parameters,
    buffers and frozen parameters move into the job's memory; `model` and `optimizer` stay the
    objects they are. `docs/from-ddp.md` tells what differs from DistributedDataParallel.

    An optimizer that has all parameters which an earlier one trains takes its place: that one is
    closed, and its state is gone. So a notebook's cell can be run again.

    Args:
        optimizer: any of torch that makes one update per step (`docs/optimizers.md`); it may have
            state. The same object is returned; schedulers, hooks and `isinstance` go on working.
        model: has all parameters of the optimizer; dense, floating, on the CPU or one CUDA device
            (see `docs/gpu-training.md`). A `Split` where processes
            share a model, on the CPU, with an optimizer of `split.parameters()`. Of tables with
            sparse gradients (`nn.Embedding(sparse=True)`, `nn.EmbeddingBag`) only rows travel; the
            optimizer is then plain SGD, Adagrad or SparseAdam, or see `sparse`.
        max_norm: scale every averaged gradient down to this norm (2-norm over all parameters of
            the optimizer). Costs one more pass over the gradients, on the servers.
        buffers: what happens to buffers such as BatchNorm's statistics after every step:
            "broadcast" (slice 0's win, as in DDP), "average" (mean of the slices; integers as
            broadcast), or "local" (each worker keeps its own).
        apply: "auto": the servers make the optimizer's steps where they can; else worker 0 does,
            with a line on stderr that says why. "servers": an error instead. "worker": worker 0 in
            any case.
        ema: the servers keep an exponential moving average of all values that each parameter has
            had, ema * average + (1 - ema) * value after every step, as torch's AveragedModel does
            with get_ema_multi_avg_fn(ema); see `ema_weights()`. None: there is none.
        sparse: what SGD with momentum or weight decay does to tables with sparse gradients.
            "exact": an error, as it changes all rows in every step. "lazy": a step treats the rows
            that it has a gradient for as if there were no others: the momentum of a row decays, and
            its values decay, only in steps that have the row; its momentum begins at 0.
        placement: "plan": backward produces gradients where the servers on this host read them (in
            the first step those from 64 KiB up), or in registered memory from which they are sent
            to other hosts; "copy": the worker copies each one. The same bits.
        parameters_on: of a model on a GPU. "auto": servers keep parameters and optimizer state on
            that GPU and step there, if the models of all workers are on it (`docs/gpu-training.md`
            has the other conditions; `explain` says what became of it). "host": they keep them in
            the host's memory, so that they take none of the GPU's.
        earlier: takes no option; one that had another name before is an error that says the name.

    Returns:
        `optimizer`, with these additions: `accumulate()`, `synchronize()`, `last_norm`,
        `ema_weights()`, `ema_state_dict()`, `close()`.
        It cannot be copied or pickled; its `state_dict()` can.

    Raises:
        ValueError: a parameter is not the model's, twice there, sparse, or of a dtype that is not
            supported; another optimizer trains it together with others that this one leaves out;
            the optimizer changes all rows of a table with sparse gradients; an argument makes no
            sense.
        UnavailableError: an optimizer of another kind, or parameters on several devices or a
            device other than CUDA's.
        TypeError: `optimizer` is not torch's, as where the arguments are swapped; or an option is
            unknown.
        RuntimeError: `tw.init()` was not called, the optimizer is distributed already, or the other
            workers' model differs (the message says in what).
    """
    for name in earlier:
        now = f": it is {_EARLIER[name]} now" if name in _EARLIER else ""
        raise TypeError(f"DistributedOptimizer has no option {name!r}{now}")
    job = current_job()
    if isinstance(optimizer, DistributedMixin):
        raise RuntimeError(
            "this optimizer is distributed already, or was: go on with it, or make a new one and "
            "give that"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "the first argument of DistributedOptimizer has to be a torch.optim.Optimizer, not "
            f"{type(optimizer).__name__}: DistributedOptimizer(optimizer, model)"
        )
    if max_norm is not None:
        _check_norm(max_norm)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is {' or '.join(map(repr, PLACEMENTS))}, not {placement!r}")
    if apply not in APPLIERS:
        raise ValueError(f"apply is {', '.join(map(repr, APPLIERS))}, not {apply!r}")
    if ema is not None and not (isinstance(ema, float) and 0.0 < ema < 1.0):
        raise ValueError(f"ema is a decay between 0 and 1, as 0.999, not {ema!r}")
    if sparse not in SPARSE:
        raise ValueError(f"sparse is {' or '.join(map(repr, SPARSE))}, not {sparse!r}")
    if parameters_on not in PARAMETERS_ON:
        places = " or ".join(map(repr, PARAMETERS_ON))
        raise ValueError(f"parameters_on is {places}, not {parameters_on!r}")
    check_possible(optimizer)
    index = model_index_of(model)
    if index is not None:
        _check_split(job, model, buffers)
        if ema is not None:
            raise ValueError("a split model has no average of weights; leave out ema=")
    elif job.pipeline > 1:
        raise ValueError(
            f"in this job {job.pipeline} workers share a model: give the Split that tw.split() "
            "made of it"
        )
    own = model if index is None else model.module
    check_model(own)
    _close_replaced(job, optimizer)
    with uncollected():
        core = Replica(
            job.session,
            job.local_replicas,
            optimizer,
            own,
            max_norm,
            buffers,
            placement,
            apply,
            ema or 0.0,
            sparse == "lazy",
            parameters_on,
            index,
        )
    if index is not None:
        model.trained_by(core)
    if job.rank == 0:
        tell_of_model(own, job.slices)
    _change_class(optimizer)
    optimizer._tensorwire = core  # type: ignore[attr-defined]
    # A scheduler that was made before has put a wrapper of the old step there.
    optimizer.__dict__.pop("step", None)
    job.local_replicas.append(core)
    return optimizer


def _close_replaced(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """Closes optimizers whose remaining parameters all are trained by this one."""
    groups = optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    for core in list(job.local_replicas):
        theirs = {id(core.parameters[i]) for i in core.trained}
        left = {id(p) for p in core.model.parameters() if p.requires_grad} & theirs
        if trained & theirs and left <= trained:
            replaced: Any = core.optimizer
            replaced.close()
            replaced._tensorwire = ClosedReplica(
                "this optimizer was closed when another one was made for its parameters; use that "
                "one"
            )


def _check_split(job: Job, split: Any, buffers: str) -> None:
    machines, session = split.machines, job.session
    if machines.size != job.pipeline or (job.pipeline > 1 and machines is not session.machines()):
        raise ValueError(
            f"the model is split over {machines.size} processes that are no pipeline of this job: "
            "call tw.init(pipeline=…), then tw.split() without machines="
        )
    if any(other.shares(split) for other in job.local_replicas):
        raise ValueError("a split model has one distributed optimizer; close() the other first")
    if buffers == "local":
        raise ValueError("a split model's buffers are 'broadcast' or 'average'")


def replica_of(optimizer: Any) -> Replica:
    """Returns the replica that a distributed optimizer trains.

    A closed optimizer has a `ClosedReplica`: to use it raises RuntimeError.
    """
    found: Replica = optimizer._tensorwire
    return found


class DistributedMixin:
    """The methods that `DistributedOptimizer` adds to the optimizer's class."""

    _tensorwire: Replica  # until `close`
    param_groups: list[dict[str, Any]]

    # A compiled function may call these.
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits this slice's gradients and returns with the next version in place.

        Args:
            closure: called once before, with gradients enabled, as torch's SGD, Adam and AdamW do:
                it computes the loss and its gradients. If it raises, nothing is committed.

        Returns:
            What the closure returns; None without one.

        Raises:
            RuntimeError: a gradient was changed after it had left, a parameter was changed outside
                `tw.edit`, or the job has failed; in the first two cases nothing was committed.
            PeerLostError: a server is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what schedulers look for
        self._tensorwire.step()
        return loss

    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients as in torch; gradients that left since the last step are withdrawn."""
        self._tensorwire.withdraw()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def accumulate(self) -> AbstractContextManager[None]:
        """Makes backward only add to `.grad` inside; the first backward outside sends the sum."""
        return self._tensorwire.accumulating()

    def synchronize(self) -> None:
        """Makes every `.grad` the averaged gradient, the same on all workers.

        They may then be read, clipped and edited, by every worker in the same way; `step()` applies
        worker 0's. All workers call it, after backward and before `step()`.

        Raises:
            RuntimeError: workers go at their own pace, a worker has several slices, or a gradient
                is sparse.
        """
        self._tensorwire.synchronize()

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Gives the parameters their averages inside, in this process alone; needs `ema=`.

        To evaluate: no gradient is recorded inside, and the training values of other processes
        stay. Buffers stay as they are. No other worker takes part. Call it between steps.
        `job.save` inside saves the averages as the model.

        Raises:
            RuntimeError: there is no average, or this is between the slices of a step.
        """
        with self._tensorwire.averaged():
            try:
                yield
            except RuntimeError as error:
                if "does not require grad" in str(error):
                    error.add_note("Inside ema_weights() no gradient is recorded: train outside")
                raise

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the model's `state_dict()` with the averages; copies. As `ema_weights()`."""
        core = self._tensorwire
        with core.averaged():
            return {key: value.clone() for key, value in core.model.state_dict().items()}

    @property
    def state(self) -> Any:
        """The optimizer's state where worker 0 applies; at the servers, an error to use."""
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(self.state, StateAtServers):
            self.state.refuse()
        vars(self)["state"] = value

    @property
    def last_norm(self) -> float:
        """The norm of the last averaged gradient before clipping; nan if it was not asked for."""
        return self._tensorwire.last_norm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch, on all workers; parameters are dealt out anew, state is kept.

        After an error the optimizer is as before.
        """
        core = getattr(self, "_tensorwire", None)
        if core is None:
            super().add_param_group(param_group)  # type: ignore[misc]
            return
        core.between_steps("add_param_group()")
        core.meet()
        core.ownership.check_movable("add_param_group()")
        state = core.state.saved()
        super().add_param_group(param_group)  # type: ignore[misc]
        try:
            core.replan(state)
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as in torch, and loadable there, in one version from the servers.

        No other worker takes part. Call it between steps.
        """
        return self._tensorwire.state.state_dict(super().state_dict)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as in torch, on all workers; worker 0's wins."""
        core = self._tensorwire
        core.between_steps("load_state_dict()")
        core.check_unchanged()  # what prepares models and optimizers moves a model, then comes here
        core.meet()
        core.withdraw()
        super().load_state_dict(core.ownership.own_state_dict(state_dict))  # type: ignore[misc]
        if core.ownership.split:
            core.state.load_whole(state_dict)
        elif core.arithmetic.keeps_other_state():
            core.replan(state_dict)
        else:
            core.state.load(state_dict.get("ema"))

    def close(self) -> None:
        """Ends the use of the optimizer: servers and workers free its memory. Idempotent.

        All workers call it at the same place of the program, between steps. Parameters keep their
        last values and become memory of this process; take `state_dict()` before if the state is
        still needed. Afterwards every other method is an error. The end of the job does it too.

        Raises:
            RuntimeError: after some but not all slices of a step; the job has failed; or another
                worker makes another call.
            PeerLostError: a server is gone.
        """
        core = self._tensorwire
        if isinstance(core, ClosedReplica):  # type: ignore[unreachable]
            return
        if not core.session.closed:
            replicas = current_job().local_replicas
            if core in replicas:  # else an earlier call was interrupted at its end
                core.drop()
                replicas.remove(core)
        self._tensorwire = ClosedReplica(  # type: ignore[assignment]
            "this optimizer was closed; make a new one for further steps"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a distributed optimizer cannot be copied or pickled: its parameters and state belong "
            "to the job. Keep opt.state_dict(), make a new optimizer and load it there"
        )


def _change_class(optimizer: torch.optim.Optimizer) -> None:
    cls = type(optimizer)
    # torch wraps a class's step for hooks and the profiler when it is first instantiated.
    step = torch.optim.Optimizer.profile_hook_step(DistributedMixin.step)
    step.hooked = True  # type: ignore[attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    added = {"step": step, "_plain_class": cls}
    # torch's own scaler must not leave the scale to a step that does not know it.
    optimizer._step_supports_amp_scaling = False
    optimizer.__class__ = type(cls.__name__, (DistributedMixin, cls), added)


@contextmanager
def edit(model: nn.Module | Split) -> Iterator[None]:
    """Permits changes of parameters and buffers inside, by all workers; worker 0's win.

        with tw.edit(model), torch.no_grad():
            model.fc.weight.mul_(0.5)

    Raises:
        RuntimeError: no distributed optimizer has parameters of `model`.
    """
    with current_job().editing(model):
        yield


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the averaged gradient down to `max_norm` (2-norm), before `step()` applies it.

    As `torch.nn.utils.clip_grad_norm_`, on the servers: `.grad` itself is left as it is. All
    workers call it between backward and `step()`.

    Args:
        parameters: the distributed optimizer, the model, or all parameters of the optimizer. If
            several distributed optimizers train a model's parameters, the norm is of all of them.
        max_norm: a positive number. Infinity changes nothing: only the norm is computed.
        norm_type: 2, the only one that servers compute.

    Returns:
        The norm before clipping, the same on all workers.

    Raises:
        ValueError: `max_norm` is 0, negative or NaN; another norm is asked for; or these are
            not all parameters of one distributed optimizer or of several.
        TypeError: `max_norm` is no number.
        RuntimeError: workers go at their own pace, or a worker has several slices.
    """
    _check_norm(max_norm)
    if norm_type != 2.0:
        raise ValueError(
            f"servers compute the 2-norm, and norm_type is {norm_type!r}: call opt.synchronize(), "
            "then torch.nn.utils.clip_grad_norm_, on all workers"
        )
    cores = _cores_of(parameters)
    if len(cores) == 1:
        return _as_norm(cores[0].clip(float(max_norm)), cores)
    norms = [core.clip(math.inf) for core in cores]
    norm = math.hypot(*norms)
    scale = max_norm / (norm + _TINY)
    for core, own in zip(cores, norms, strict=True):
        if not math.isfinite(norm):  # what is finite becomes nothing, as where the norm is infinite
            core.clip(sys.float_info.min)
        elif scale < 1.0:
            core.clip((own + _TINY) * scale)
    return _as_norm(norm, cores)


def _as_norm(norm: float, cores: list[Replica]) -> torch.Tensor:
    """Returns a norm as torch does: its dtype is the parameters', whatever the default is."""
    dtypes = {core.parameters[i].dtype for core in cores for i in core.trained}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return torch.tensor(norm, dtype=wide, device="cpu")


def _check_norm(max_norm: Any) -> None:
    if not hasattr(max_norm, "__float__"):
        raise TypeError(f"max_norm is a positive number, not {max_norm!r}")
    if not max_norm > 0:
        raise ValueError(f"max_norm is a positive number, not {max_norm!r}")


_TINY = 1e-6  # what torch and the servers add to a norm before they divide by it


def _cores_of(what: Any) -> list[Replica]:
    """Returns the replicas of these parameters; each is of one distributed optimizer."""
    if isinstance(what, DistributedMixin):
        return [what._tensorwire]
    cores = current_job().local_replicas
    for core in cores:
        if model_index_of(what) is not None and core.shares(what):
            return [core]
    if isinstance(what, nn.Module):
        what = what.parameters()
    elif isinstance(what, torch.Tensor):
        what = [what]
    given = {id(p) for p in what if p.requires_grad}
    own = {core: {id(core.parameters[i]) for i in core.trained} for core in cores}
    found = [core for core in cores if given & own[core]]
    if not found:
        raise ValueError("these are no parameters of a distributed optimizer")
    if given != set().union(*(own[core] for core in found)):
        raise ValueError(
            "clip_grad_norm_ clips all parameters of distributed optimizers together; for some of "
            "them call opt.synchronize() and clip .grad yourself"
        )
    return found
