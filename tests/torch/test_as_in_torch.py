"""Features of torch that scripts rely on: random numbers, graphs, loaders, compiled steps."""

import warnings
from typing import Any

import pytest
import torch
from team import Team
from torch import nn
from torch.utils.data import Dataset, Subset, get_worker_info
from twins import make_step

import tensorwire.torch as tw

DATA = torch.arange(24.0).view(-1, 1)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(1, 1)


def draws(job: Any, evaluates: bool = False) -> list[float]:
    """Random numbers of the script around the passes of two epochs, and at the end the weight."""
    model = linear()
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    found = []
    for _ in job.epochs(2):
        found.append(torch.rand(()).item())
        chosen = torch.randperm(len(DATA))[:16].tolist()
        for x in job.loader(Subset(DATA, chosen), batch_size=2, shuffle=True):  # type: ignore[arg-type]
            make_step(optimizer, nn.functional.dropout(model(x)).square().mean())
        if evaluates and job.rank == 0:
            with torch.no_grad():
                for _ in job.loader(DATA, batch_size=2):
                    torch.rand(())
        found.append(torch.rand(()).item())
    return [*found, *chosen, model.weight.item()]


def test_outside_of_a_pass_all_workers_draw_the_same_numbers(team: Team) -> None:
    """However many workers there are, and whatever was evaluated."""
    first, second = team.run(draws, slices=2)
    assert first == second
    assert team.alone(draws, slices=2) == first
    assert first[0] != first[2]  # of each epoch others
    assert team.run(draws, True, slices=2)[0] == first


class Noisy(torch.optim.SGD):
    """Draws numbers in its step, which worker 0 makes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each -= group["lr"] * (each.grad + torch.randn(each.shape))


def noisy(job: Any) -> list[float]:
    model = linear()
    optimizer = tw.DistributedOptimizer(Noisy(model.parameters(), lr=1e-4), model, apply="worker")
    for _ in job.epochs(1):
        for x in job.loader(DATA, batch_size=2, shuffle=True):
            make_step(optimizer, nn.functional.dropout(model(x)).square().mean())
    return [each.item() for each in model.parameters()]


def test_an_optimizer_that_draws_numbers(team: Team) -> None:
    first, second = team.run(noisy, slices=2)
    assert first == second
    assert team.alone(noisy, slices=2) == first


def stale_graph(job: Any, apply: str) -> str:
    """A second loss of a graph that was made before the step, as in a wrong actor-critic."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = tw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, apply=apply
    )
    text = ""
    for step in range(4):
        out = model(torch.ones(3, 2))
        out.mean().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            try:
                out.square().mean().backward()
            except RuntimeError as error:
                text = str(error)
            optimizer.zero_grad()
    return text


@pytest.mark.parametrize("apply", ["servers", "worker"])
def test_a_graph_from_before_a_step_is_refused_as_by_torch(team: Team, apply: str) -> None:
    for text in (team.alone(stale_graph, apply), *team.run(stale_graph, apply)):
        assert "modified by an inplace operation" in text


def frozen_part(job: Any) -> float:
    """Parameters that the step has not changed may be used in a graph from before it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].requires_grad_(False)
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    for _ in range(3):
        inputs = torch.ones(3, 2, requires_grad=True)
        out = model[1](inputs)
        make_step(optimizer, model(torch.ones(3, 2)).mean())
        out.mean().backward()  # with the frozen layer's weights
    return float(inputs.grad.sum())  # type: ignore[union-attr]


def test_a_graph_of_frozen_layers_goes_on(team: Team) -> None:
    team.alone(frozen_part)


class Opened(Dataset[torch.Tensor]):
    """A dataset whose files are opened in each process of the loader, as torch's pages show it."""

    opened = 0.0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.opened])

    def open(self, number: int) -> None:
        self.opened = 1.0 + number


def open_own(number: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.open(number)


def opened(job: Any, context: str) -> list[float]:
    loader = job.loader(
        Opened(),
        batch_size=2,
        num_workers=1,
        worker_init_fn=open_own,
        multiprocessing_context=context,
    )
    assert (len(loader.dataset), loader.batch_size) == (8, 2)
    with torch.no_grad():
        return torch.cat(list(loader)).flatten().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_what_a_process_of_a_loader_does_first(team: Team, context: str) -> None:
    assert team.alone(opened, context) == [1.0] * 8


def compiled(job: Any) -> list[float]:
    """A step inside of what is compiled, as in torch's recipes."""
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(inner)
    optimizer = tw.DistributedOptimizer(inner, model)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        make_step(optimizer, loss)
        return loss

    def step() -> None:
        optimizer.step()
        scheduler.step()

    train, step = torch.compile(train, backend="eager"), torch.compile(step, backend="eager")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            found.append(train(DATA).item())
            model(DATA).mean().backward()
            step()
            optimizer.zero_grad()
    return found


def test_a_step_in_a_compiled_function(team: Team) -> None:
    first = team.alone(compiled)
    assert first == sorted(first, reverse=True)
    assert team.run(compiled) == [first, first]


def quantized(job: Any) -> list[Any]:
    """Frozen parameters of dtypes in which nothing is averaged."""
    model = linear()
    kinds = {"q": torch.int8, "b": torch.bool, "c": torch.complex64, "i": torch.int64}
    for name, dtype in kinds.items():
        values = (torch.arange(6).view(2, 3).t() + job.rank).to(dtype)
        model.register_parameter(name, nn.Parameter(values, requires_grad=False))
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    model(DATA).mean().backward()
    optimizer.step()
    return [getattr(model, name).tolist() for name in kinds]


def test_frozen_parameters_of_any_dtype(team: Team) -> None:
    first, second = team.run(quantized)
    assert first == second == team.alone(quantized)
    assert first[0] == [[0, 3], [1, 4], [2, 5]]


def ordered(job: Any) -> None:
    """The workers have the elements of a frozen parameter in other orders."""
    model = linear()
    values = torch.arange(6, dtype=torch.int8).view(2, 3)
    values = values.t().contiguous().t() if job.rank else values
    model.register_parameter("q", nn.Parameter(values, requires_grad=False))
    tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)


def test_frozen_parameters_in_other_orders_are_refused(team: Team) -> None:
    for failure in team.failures(ordered):
        assert "strides (3, 1)" in failure.text
        assert "strides (1, 2)" in failure.text


def behind_two(job: Any) -> list[float]:
    """Numbers after passes of two loaders, one of which was left and is collected late."""
    model = linear()
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), model)
    found = []
    for _ in job.epochs(1):
        left = iter(job.loader(DATA, batch_size=4))
        next(left)
        for loader in (job.loader(DATA, batch_size=4), job.loader(DATA, batch_size=4)):
            for x in loader:
                make_step(optimizer, model(x).square().mean())
            found.append(torch.rand(()).item())
        before = torch.get_rng_state()
        del left
        assert torch.equal(before, torch.get_rng_state())
    return found


def test_behind_each_loader_others_are_drawn(team: Team) -> None:
    first, second = team.alone(behind_two)
    assert first != second


def together(job: Any) -> float:
    """Workers that have made different steps edit together."""
    model = linear()
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    for _ in range(2 + job.rank):
        optimizer.param_groups[0]["lr"] /= 2
        make_step(optimizer, model(DATA).mean())
    job.barrier()
    with tw.edit(model), torch.no_grad():
        model.weight.fill_(5.0)
    return model.weight.item()


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_an_edit_of_workers_with_other_learning_rates(team: Team, mode: str) -> None:
    options: dict[str, Any] = {"staleness": 5} if mode == "bounded" else {}
    assert team.run(together, mode=mode, **options) == [5.0, 5.0]
