"""Misuse ends with a clear error in every worker, also alone, and no worker hangs."""

import contextlib
import os
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from team import Failure, Team
from torch import nn

import tensorwire.torch as tw
from tensorwire.membership.identity import LOST_MEMBER_CODE

Case = Callable[..., None]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def ready(job: tw.Job, **options: Any) -> tuple[Any, Any]:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, tw.DistributedOptimizer(opt, model, **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 4)).square().mean().backward()


# ---- the same alone and together

CASES: dict[str, tuple[str, str]] = {}


def case(kind: str, text: str) -> Callable[[Case], Case]:
    """The function must raise an error of this kind whose message has this text."""

    def add(function: Case) -> Case:
        CASES[function.__name__] = kind, text
        return function

    return add


@case("RuntimeError", "gradient of '0.bias' was changed after it had left")
def gradient_changed(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    model[0].bias.grad.mul_(0.5)
    opt.step()


@case("RuntimeError", "use tensorwire.torch.integrations.accelerate in its place")
def prepared_by_accelerate(job: tw.Job) -> None:
    """The model is moved, and the optimizer's state is loaded again, as by its prepare()."""
    model, opt = ready(job)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as model.to("cpu:0") does
    sys.modules["accelerate"] = types.ModuleType("accelerate")
    try:
        opt.load_state_dict(opt.state_dict())
    finally:
        del sys.modules["accelerate"]


@case("RuntimeError", "keep it outside of the model that DistributedOptimizer is given")
def target_in_the_model(job: tw.Job) -> None:
    """BYOL's: a frozen copy in the model, which the script lets follow the other part."""
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)])
    opt = tw.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    model[0](torch.ones(3, 4)).sum().backward()
    with torch.no_grad():
        model[1].weight.lerp_(model[0].weight, 0.1)  # type: ignore[arg-type]
    opt.step()


@case("RuntimeError", "parameter '0.weight' has other memory since the model was moved")
def moved_after(job: tw.Job) -> None:
    """A move is no edit, and the message says so."""
    model, opt = ready(job)
    model.to("cpu:0")
    backward(model)
    opt.step()


@case("RuntimeError", "gradient of '0.bias' was changed after it had left")
def gradient_replaced(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    model[0].bias.grad = torch.zeros(6)
    opt.step()


@case("RuntimeError", "gradient of '0.weight' was changed after it had left")
def clipped_by_torch(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    opt.step()


@case("UnavailableError", "'0.weight' and '2.weight' of the model share memory")
def tied_by_data(job: tw.Job) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    model[2].weight.data = model[0].weight.data.t()
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@case("UnavailableError", "'0.weight' and 'shown' of the model share memory")
def buffer_of_a_parameter(job: tw.Job) -> None:
    model = net()
    model.register_buffer("shown", model[0].weight.detach()[1:])
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@case("TypeError", "of several models make one, as torch.nn.ModuleList(models)")
def several_models(job: tw.Job) -> None:
    models = [net(), net()]
    opt = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    tw.DistributedOptimizer(opt, models)  # type: ignore[arg-type]


@case("TypeError", "inner is wrapped in DistributedDataParallel")
def wrapped(job: tw.Job) -> None:
    class DistributedDataParallel(nn.Sequential):
        """A stand-in for torch's class, which needs a process group."""

    DistributedDataParallel.__module__ = "torch.nn.parallel.distributed"
    model = nn.Sequential()
    model.add_module("inner", DistributedDataParallel(net()))
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@case("UnavailableError", "as SGD(model.parameters(), …)")
def zero_redundancy(job: tw.Job) -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """A stand-in for torch's class, which needs a process group."""

    model = net()
    opt = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    opt.optim = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[attr-defined]
    tw.DistributedOptimizer(opt, model)


@case("RuntimeError", "parameter '2.weight' was changed outside step()")
def parameter_changed(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    opt.step()


@case("RuntimeError", "parameter '0.weight' was changed outside step()")
def parameters_loaded(job: tw.Job) -> None:
    model, opt = ready(job)
    model.load_state_dict(net().state_dict())
    backward(model)
    opt.step()


@case("RuntimeError", "torch.float64 on cpu since the model was moved")
def parameters_moved(job: tw.Job) -> None:
    model, opt = ready(job)
    model.double()
    model(torch.ones(3, 4).double()).sum().backward()
    opt.step()


@case("RuntimeError", "a scaler takes no closure")
def closure_of_a_scaler(job: tw.Job) -> None:
    model, opt = ready(job)
    tw.GradScaler().step(opt, lambda: backward(model))


@case("ValueError", "max_norm is a positive number, not nan")
def clipped_to_nan(job: tw.Job) -> None:
    model, _ = ready(job)
    backward(model)
    tw.clip_grad_norm_(model, float("nan"))


@case("ValueError", "max_norm is a positive number, not -1.0")
def clipped_to_a_negative_norm(job: tw.Job) -> None:
    model, _ = ready(job)
    backward(model)
    tw.clip_grad_norm_(model, -1.0)


@case("RuntimeError", "leave it before the last backward")
def step_inside_accumulate(job: tw.Job) -> None:
    model, opt = ready(job)
    with opt.accumulate():
        backward(model)
        opt.step()


@case("RuntimeError", "backward() after synchronize()")
def backward_after_synchronize(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    opt.synchronize()
    backward(model)


class Functional(nn.Module):
    """A table that looks like any other parameter before its gradient comes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


@case("RuntimeError", "'weight' is torch.sparse_coo, and it is not the weight of an nn.Embedding")
def sparse_by_a_function(job: tw.Job) -> None:
    model = Functional()
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 2])).sum().backward()


@case("ValueError", "'weight' is a table with sparse gradients, and momentum")
def sparse_with_momentum(job: tw.Job) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tw.DistributedOptimizer(opt, model)


@case("ValueError", "'weight' is a table with sparse gradients")
def sparse_with_adam(job: tw.Job) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)


@case("ValueError", "'weight' is a table with sparse gradients")
def sparse_with_decay(job: tw.Job) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    tw.DistributedOptimizer(opt, model)


@case("ValueError", "'weight' is a table with sparse gradients and has strides (1, 4)")
def sparse_and_transposed(job: tw.Job) -> None:
    model = nn.Embedding.from_pretrained(torch.ones(3, 4).t(), freeze=False, sparse=True)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@case("RuntimeError", "or it is not sparse by rows; make it dense")
def sparse_by_elements(job: tw.Job) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.gather(model.weight, 0, torch.tensor([[3, 1, 2]]), sparse_grad=True).sum().backward()


def table(job: tw.Job) -> tuple[nn.Embedding, tw.DistributedOptimizer]:
    model = nn.Embedding(10, 3, sparse=True)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.tensor([1, 2])).sum().backward()
    return model, opt


@case("RuntimeError", "weight_decay was set for 'weight', a table")
def decay_of_a_table_later(job: tw.Job) -> None:
    _, opt = table(job)
    opt.param_groups[0]["weight_decay"] = 0.1
    opt.step()


@case("RuntimeError", "the gradient of 'weight' is sparse, and averaged gradients")
def synchronize_a_table(job: tw.Job) -> None:
    _, opt = table(job)
    opt.synchronize()


@case("RuntimeError", "gradient of 'weight' was changed after it had left")
def sparse_gradient_changed(job: tw.Job) -> None:
    model, opt = table(job)
    model.weight.grad.mul_(2)
    opt.step()


@case("UnavailableError", "LBFGS evaluates the model several times per step")
def lbfgs(job: tw.Job) -> None:
    model = net()
    tw.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), model)


@case("TypeError", "Sequential")
def no_optimizer(job: tw.Job) -> None:
    model = net()
    tw.DistributedOptimizer(model, model)  # type: ignore[arg-type]


@case("UnavailableError", "'weight' is on meta; only parameters on the CPU and on CUDA")
def on_a_device(job: tw.Job) -> None:
    model = nn.Linear(2, 2, device="meta")
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


@case("ValueError", "complex64")
def complex_numbers(job: tw.Job) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


@case("ValueError", "not dense")
def overlapping(job: tw.Job) -> None:
    model = nn.Linear(2, 2)
    model.more = nn.Parameter(torch.ones(3).expand(4, 3))
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


@case("RuntimeError", "distributed already")
def twice(job: tw.Job) -> None:
    model, opt = ready(job)
    tw.DistributedOptimizer(opt, model)


@case("RuntimeError", "closed when another one was made for its parameters")
def two_for_one(job: tw.Job) -> None:
    model, opt = ready(job)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)
    opt.step()


@case("ValueError", "'2.weight' is trained by another optimizer, together with others")
def two_for_a_part(job: tw.Job) -> None:
    model, _ = ready(job)
    tw.DistributedOptimizer(torch.optim.SGD(model[2].parameters()), model)


@case("ValueError", "is not the model's")
def other_model(job: tw.Job) -> None:
    tw.DistributedOptimizer(torch.optim.SGD(net().parameters()), net())


@case("ValueError", "no parameter of the optimizer requires a gradient")
def all_frozen(job: tw.Job) -> None:
    model = net().requires_grad_(False)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


@case("TypeError", "DistributedOptimizer has no option 'mode': it is tw.init(mode=…) now")
def mode_of_an_optimizer(job: tw.Job) -> None:
    ready(job, mode="async")


@case("TypeError", "DistributedOptimizer has no option 'shares': it is parameters_on=… now")
def earlier_name_of_an_option(job: tw.Job) -> None:
    ready(job, shares="host")


@case("TypeError", "DistributedOptimizer has no option 'momentum'")
def unknown_option(job: tw.Job) -> None:
    ready(job, momentum=0.9)


@case("AttributeError", "job.keep is job.track now")
def earlier_name_of_track(job: tw.Job) -> None:
    job.keep(best={})


@case("ValueError", "buffers is 'broadcast'")
def bad_buffers(job: tw.Job) -> None:
    ready(job, buffers="sum")


@case("ValueError", "max_norm is a positive number")
def bad_max_norm(job: tw.Job) -> None:
    ready(job, max_norm=0.0)


@case("ValueError", "max_norm is a positive number")
def bad_clip(job: tw.Job) -> None:
    tw.clip_grad_norm_(ready(job)[1], -1.0)


@case("TypeError", "max_norm is a positive number, not '1'")
def max_norm_as_text(job: tw.Job) -> None:
    """Named for a bug: '>' not supported between instances of 'str' and 'int'."""
    ready(job, max_norm="1")


@case("TypeError", "not Sequential: DistributedOptimizer(optimizer, model)")
def arguments_swapped(job: tw.Job) -> None:
    model = net()
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model).close()
    tw.DistributedOptimizer(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]


@case("ValueError", "clips all parameters")
def clip_of_a_part(job: tw.Job) -> None:
    model, _ = ready(job)
    backward(model)
    tw.clip_grad_norm_(model[0].parameters(), 1.0)


@case("ValueError", "batch_size")
def bad_batch_size(job: tw.Job) -> None:
    job.loader([1, 2, 3], batch_size=0)  # type: ignore[arg-type]


@case("ValueError", "as each needs one")
def too_few_samples(job: tw.Job) -> None:
    job.loader([], batch_size=1)  # type: ignore[arg-type]


@case("ValueError", "norm_type is 1: call opt.synchronize()")
def another_norm(job: tw.Job) -> None:
    _, opt = ready(job)
    tw.clip_grad_norm_(opt, 1.0, norm_type=1)


@case("TypeError", "itertools.islice(data, job.replica, None, job.replicas)")
def shard_of_a_stream(job: tw.Job) -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(9))

    job.shard(Stream())


@case("ValueError", "generator= cannot be given")
def own_generator(job: tw.Job) -> None:
    job.loader([1, 2, 3], batch_size=1, generator=torch.Generator())


@case("RuntimeError", "has joined a job already, by tw.init(seed=0), and now seed is 5: close()")
def init_twice(job: tw.Job) -> None:
    tw.init(**{**job._given, "seed": 5})


@case("RuntimeError", "call tw.init() first")
def after_close(job: tw.Job) -> None:
    job.close()
    ready(job)


@case("RuntimeError", "edit it freely")
def edit_of_another(job: tw.Job) -> None:
    ready(job)
    with tw.edit(net()):
        pass


@case("RuntimeError", "nothing to save")
def save_nothing(job: tw.Job) -> None:
    job.save("nowhere")


@case("RuntimeError", "the file would have best without the parameters")
def save_without_a_model(job: tw.Job) -> None:
    ready(job)
    job.track(best={"accuracy": 0.5})
    job.save("nowhere")


@case("TypeError", "and is no dict and no list, which job.load could fill")
def keep_anything(job: tw.Job) -> None:
    job.track(best={}, number=3)


@case("ValueError", "choose another name")
def keep_under_the_name_of_the_job(job: tw.Job) -> None:
    job.track(tensorwire={})


@case("ValueError", "weight")
def bad_weight(job: tw.Job) -> None:
    job.mean(1.0, weight=float("nan"))


def check(failure: Failure, kind: str, text: str) -> None:
    assert (failure.kind, text in failure.text) == (kind, True), failure.trace


@pytest.mark.parametrize("name", CASES)
def test_misuse_alone(team: Team, name: str) -> None:
    check(team.failure_alone(globals()[name]), *CASES[name])


def all_cases(job: tw.Job) -> dict[str, Failure | None]:
    """All in one job; the one that closes it comes last."""
    outcomes: dict[str, Failure | None] = {}
    for name in sorted(CASES, key=lambda name: name == "after_close"):
        try:
            outcomes[name] = globals()[name](job)
        except Exception as error:
            outcomes[name] = Failure(type(error).__name__, str(error), traceback.format_exc())
        job.local_replicas.clear()
    return outcomes


@pytest.mark.slow
def test_misuse_together(team: Team, transports: list[str] | None) -> None:
    for outcomes in team.run(all_cases, transports=transports):
        for name, failure in outcomes.items():
            assert failure is not None, f"{name}: no error"
            check(failure, *CASES[name])


def buffer_that_grows(job: tw.Job) -> None:
    model = net()
    model.register_buffer("cache", torch.zeros(3))
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)
    backward(model)
    model.cache = torch.zeros(4)
    opt.step()


def test_a_buffer_that_grows(team: Team) -> None:
    """Worker 0 sends it and sees it; worker 1 hears of worker 0's end at least."""
    first, second = team.failures(buffer_that_grows)
    check(first, "RuntimeError", "'cache' was removed or has another shape")
    assert "worker 0" in second.text


# ---- workers that do not agree


def other_shape(job: tw.Job) -> None:
    model = nn.Linear(3, 2 + job.rank)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


def other_order(job: tw.Job) -> None:
    """Named for a bug: weights with other strides were taken in the wrong order."""
    model = nn.Conv2d(3, 3, 3)
    if job.rank == 1:
        model = model.to(memory_format=torch.channels_last)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


def other_frozen(job: tw.Job) -> None:
    model = net()
    model[0].bias.requires_grad_(job.rank == 0)
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters()), model)


def other_class(job: tw.Job) -> None:
    model = net()
    cls = torch.optim.SGD if job.rank else torch.optim.Adam
    tw.DistributedOptimizer(cls(model.parameters()), model)


def other_rate(job: tw.Job) -> None:
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1 + job.rank)
    opt = tw.DistributedOptimizer(opt, model)
    backward(model)
    opt.step()


def other_call(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    if job.rank == 0:
        opt.synchronize()
    opt.step()


def other_slices(job: tw.Job) -> None:
    ready(job)


def fewer_steps(job: tw.Job) -> None:
    model, opt = ready(job)
    for _ in range(2 + job.rank):
        backward(model)
        opt.step()
        opt.zero_grad()
    if job.rank == 0:
        job.close()
        raise RuntimeError("every worker makes the same number of steps")


def no_optimizer_here(job: tw.Job) -> None:
    if job.rank == 0:
        ready(job)
    job.close()
    raise RuntimeError("left while others make an optimizer")


def mean_for_step(job: tw.Job) -> None:
    """The usual fault: one worker has fewer batches and goes on to the evaluation."""
    model, opt = ready(job)
    for _ in range(2 + job.rank):
        backward(model)
        opt.step()
        opt.zero_grad()
    job.mean(1.0)


def optimizer_for_step(job: tw.Job) -> None:
    model, opt = ready(job)
    if job.rank == 0:
        other = net()
        tw.DistributedOptimizer(torch.optim.SGD(other.parameters()), other)
    backward(model)
    opt.step()


def raises(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    if job.rank == 1:
        raise RuntimeError("worker 1 (of a user)")
    opt.step()


DISAGREEMENTS: dict[str, str] = {
    "other_shape": "shape (2, 3)",
    "other_order": "strides",
    "other_frozen": "'0.bias'",
    "other_class": "torch.optim.",
    "other_rate": "a hyper-parameter (learning rate, …) is 0.1 in worker 0, 1.1 in worker 1",
    "other_call": "synchronize()",
    "fewer_steps": "same number of steps",
    "mean_for_step": "has no more data, or calls mean(), sum(), barrier() or load(), while",
    "optimizer_for_step": "makes another optimizer",
    "no_optimizer_here": "left while others make an optimizer",
    "raises": "worker 1",
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_workers_that_disagree(team: Team, transports: list[str] | None, name: str) -> None:
    for failure in team.failures(globals()[name], transports=transports):
        assert DISAGREEMENTS[name] in failure.text, failure.trace


# ---- several slices in one process


def mean_between(job: tw.Job) -> float:
    model, opt = ready(job)
    for _ in job.my_slices:
        backward(model)
        opt.step()
        if job.rank == 1:
            time.sleep(1.3)  # longer than a server waits before it looks for a deadlock
        result = job.mean(1.0)
    return result


def test_a_mean_between_slices_is_no_deadlock(team: Team) -> None:
    """Named for a bug: a worker that waited for a slow one was taken for one that went astray."""
    assert team.run(mean_between, slices=4) == [1.0, 1.0]


def edit_between(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    opt.step()
    with tw.edit(model):
        pass


def synchronize_slices(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    opt.synchronize()


def load_between(job: tw.Job) -> None:
    model, opt = ready(job)
    backward(model)
    opt.step()
    opt.load_state_dict(opt.state_dict())


def add_between(job: tw.Job) -> None:
    model = net()
    opt = torch.optim.SGD(model[0].parameters(), lr=0.1)
    tw.DistributedOptimizer(opt, model)
    backward(model)
    opt.step()
    opt.add_param_group({"params": model[2].parameters()})


def rate_between(job: tw.Job) -> None:
    model, opt = ready(job)
    for _ in job.my_slices:
        backward(model)
        opt.step()
        opt.param_groups[0]["lr"] *= 0.5


BETWEEN = {
    "edit_between": "complete steps",
    "load_between": "complete steps",
    "add_between": "complete steps",
    "synchronize_slices": "one slice per worker",
    "rate_between": "'if job.step_complete:'",
}


@pytest.mark.parametrize("name", BETWEEN)
def test_between_slices(team: Team, name: str) -> None:
    """Named for a bug: edit() took the place of the step of the other slices."""
    failure = team.failure_alone(globals()[name], slices=2)
    assert BETWEEN[name] in failure.text, failure.trace


# ---- before there is a job


def before_init(rank: int) -> str:
    try:
        ready(None)  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return ""


def slices_no_multiple(rank: int) -> str:
    os.environ.update(
        TENSORWIRE_RANK=str(rank), TENSORWIRE_WORKERS="2", TENSORWIRE_SERVERS="127.0.0.1:1"
    )
    try:
        tw.init(slices=3)
    except ValueError as error:
        return str(error)
    return ""


def test_before_init(team: Team) -> None:
    assert team.without_job(before_init) == ["call tw.init() first"] * 2


def test_slices_are_a_multiple_of_the_workers(team: Team) -> None:
    assert all("choose a multiple" in text for text in team.without_job(slices_no_multiple))


def one_leaves_before_mean(job: tw.Job) -> float:
    if job.rank == 1:
        return 0.0
    return float(job.mean(1.0))


def test_mean_after_another_has_left(team: Team) -> None:
    """Named for a bug: the others waited for ever, because a goodbye is no loss."""
    outcomes, codes = team._run(one_leaves_before_mean, ())
    assert outcomes[0].kind == "RuntimeError"
    assert "worker 1 (pid " in outcomes[0].text
    assert (
        "has left the job, and others call mean(), sum(), barrier() or load()" in outcomes[0].text
    )
    assert codes == [LOST_MEMBER_CODE]


def momentum_comes_later(job: tw.Job) -> None:
    model = nn.Linear(4, 3)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()


def test_momentum_that_comes_later(team: Team) -> None:
    assert (
        "or another option that decides what servers keep was changed"
        in team.failure_alone(momentum_comes_later).text
    )
    for failure in team.failures(momentum_comes_later):
        assert "or another option that decides what servers keep was changed" in failure.text


def format_changes(job: tw.Job) -> None:
    model = nn.Conv2d(2, 3, 3)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with contextlib.suppress(RuntimeError), tw.edit(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model(torch.ones(1, 2, 5, 5)).sum().backward()
    opt.step()  # everything is as it was
    opt.zero_grad()
    with tw.edit(model):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_the_memory_format_stays(team: Team) -> None:
    assert "memory format" in team.failure_alone(format_changes).text


def groups_that_decay_differently(job: tw.Job) -> None:
    model = nn.Linear(4, 3)
    groups = [
        {"params": [model.weight], "decoupled_weight_decay": True},
        {"params": [model.bias]},
    ]
    tw.DistributedOptimizer(torch.optim.Adam(groups, weight_decay=0.1), model)


def test_groups_that_decay_differently(team: Team) -> None:
    failure = team.failure_alone(groups_that_decay_differently)
    assert "decoupled_weight_decay" in failure.text
