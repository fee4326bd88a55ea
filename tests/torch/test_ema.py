"""An average of weights that the servers keep: torch's own bits, and no other optimizer changes."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from twins import STEPS, adamw, batch, loss, net, sgd

import tensorwire.torch as tw
from tensorwire.errors import UnavailableError

DECAY = 0.9


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def train(job: tw.Job, opt: Any, model: nn.Module, average: AveragedModel, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        opt.zero_grad()
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        average.update_parameters(model)


def same(model: Any, average: AveragedModel) -> bool:
    pairs = zip(model.parameters(), average.module.parameters(), strict=True)
    return all(torch.equal(mine, its) for mine, its in pairs)


def averaging(job: tw.Job, kind: str) -> None:
    model = net()
    plain = torch.optim.NAdam(model.parameters()) if kind == "own" else adamw(model)
    opt, average = tw.DistributedOptimizer(plain, model, ema=DECAY), average_of(model)
    train(job, opt, model, average)
    before = [p.clone() for p in model.parameters()]
    with opt.ema_weights():
        assert same(model, average)
        assert not model(batch(0, 0)).requires_grad
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    other = net()
    other.load_state_dict(opt.ema_state_dict())
    assert same(other, average)
    train(job, opt, model, average, STEPS)
    with opt.ema_weights():
        assert same(model, average)


@pytest.mark.parametrize("kind", ["fused", "own"])
@pytest.mark.parametrize("servers", [1, 2])
def test_it_is_torchs_average(
    team: Team, transports: list[str] | None, servers: int, kind: str
) -> None:
    team.run(averaging, kind, servers=servers, transports=transports)


def test_alone(team: Team) -> None:
    team.alone(averaging, "own")


def only_worker_0_looks(job: tw.Job) -> str:
    """The others are in the middle of their next step meanwhile."""
    model = net()
    opt, average = tw.DistributedOptimizer(sgd(model), model, ema=DECAY), average_of(model)
    train(job, opt, model, average)
    if job.rank == 0:
        with opt.ema_weights():
            assert same(model, average)
    train(job, opt, model, average, STEPS)
    return str([p.sum().item() for p in model.parameters()])


def test_the_others_go_on(team: Team) -> None:
    assert len(set(team.run(only_worker_0_looks))) == 1


def absent_at_first(job: tw.Job) -> None:
    """A parameter without a gradient is averaged too, as in torch."""
    model = net()
    opt, average = tw.DistributedOptimizer(sgd(model), model, ema=DECAY), average_of(model)
    for step in range(STEPS):
        opt.zero_grad()
        part = model[0] if step < 2 else model
        part(batch(step, job.rank)).square().mean().backward()
        opt.step()
        average.update_parameters(model)
    with opt.ema_weights():
        assert same(model, average)


def test_parameters_without_gradients(team: Team) -> None:
    team.run(absent_at_first, servers=2)


def saving(job: tw.Job, path: str) -> None:
    model = net()
    opt, average = tw.DistributedOptimizer(sgd(model), model, ema=DECAY), average_of(model)
    job.track(model=model, optimizer=opt)
    train(job, opt, model, average)
    if job.rank == 0:
        job.save(path)
        torch.save(average.module.state_dict(), f"{path}.average")
        plain = sgd(net())
        plain.load_state_dict(opt.state_dict())  # torch takes it, and ignores the average
    job.barrier()


def loading(job: tw.Job, path: str) -> None:
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model, ema=DECAY)
    job.track(model=model, optimizer=opt)
    job.load(path)
    found, wanted = opt.ema_state_dict(), torch.load(f"{path}.average")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def loading_without(job: tw.Job, path: str) -> None:
    """A state without an average: it begins anew with the next step."""
    model = net()
    opt = tw.DistributedOptimizer(sgd(model), model, ema=DECAY)
    train(job, opt, model, average_of(model))
    state = opt.state_dict()
    del state["ema"]
    opt.load_state_dict(state)
    average = average_of(model)
    train(job, opt, model, average, STEPS)
    with opt.ema_weights():
        assert same(model, average)


def test_checkpoints(team: Team, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    team.run(saving, path)
    team.run(loading, path, servers=2)
    team.run(loading_without, path)


def added(model: Any, opt: Any) -> None:
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})


def switched(wanted: bool, scale: float = 1.0) -> Callable[..., None]:
    """A bias is frozen or not, and has another value."""

    def switch(model: Any, opt: Any) -> None:
        with tw.edit(model), torch.no_grad():
            model[0].bias.mul_(scale).requires_grad_(wanted)

    return switch


def reloaded(model: Any, opt: Any) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


FREEZE, UNFREEZE = switched(False), switched(True)
CHANGES: dict[str, dict[int, Callable[..., None]]] = {
    "group": {3: added},
    "frozen": {3: FREEZE, 5: UNFREEZE},
    "frozen at first": {0: FREEZE, 3: UNFREEZE},
    "frozen and edited": {2: FREEZE, 4: switched(False, 0.5), 6: switched(False, 3.0)},
    "frozen and loaded": {3: FREEZE, 5: reloaded, 6: UNFREEZE},
    "both": {2: FREEZE, 4: added, 6: UNFREEZE},
}


def changing(job: tw.Job, what: str) -> None:
    """torch averages the same values, also of what is frozen; at some steps it is not read."""
    model, average = net(), average_of(net())
    part = added in CHANGES[what].values()
    opt = tw.DistributedOptimizer(sgd(model[0] if part else model), model, ema=DECAY)
    for step in range(8):
        if change := CHANGES[what].get(step):
            change(model, opt)
        opt.zero_grad()
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        average.update_parameters(model)
        if step not in (3, 4):
            found = opt.ema_state_dict()
            for key, value in average.module.state_dict().items():
                assert torch.equal(found[key], value), (step, key)
    assert len(opt.state_dict()["ema"]) == len(list(model.parameters()))


@pytest.mark.parametrize("what", CHANGES)
def test_groups_and_frozen_parameters(team: Team, what: str) -> None:
    """Named for a bug: what was frozen lost its average."""
    team.run(changing, what)


def test_frozen_parameters_elsewhere(team: Team) -> None:
    team.run(changing, "frozen and edited", servers=2)
    team.alone(changing, "frozen and edited")


def wrong(job: tw.Job) -> None:
    model = net()
    for ema in (1.0, 0.0, -0.1, 2, "0.9", float("nan")):
        with pytest.raises(ValueError, match="ema is a decay between 0 and 1"):
            tw.DistributedOptimizer(sgd(model), model, ema=ema)
    with pytest.raises(UnavailableError, match="ema= needs an optimizer that servers apply"):
        tw.DistributedOptimizer(sgd(model), model, ema=DECAY, apply="worker")
    table = nn.Embedding(10, 3, sparse=True)
    plain = torch.optim.SGD(table.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="tables with sparse gradients have no average"):
        tw.DistributedOptimizer(plain, table, ema=DECAY)
    opt = tw.DistributedOptimizer(sgd(model), model)
    for use in (opt.ema_state_dict, lambda: opt.ema_weights().__enter__()):
        with pytest.raises(RuntimeError, match="there is no average of weights"):
            use()
    averaged = net()
    opt = tw.DistributedOptimizer(sgd(averaged), averaged, ema=DECAY)
    inside = r"step\(\) inside edit\(\) or ema_weights\(\)"
    with pytest.raises(RuntimeError, match=inside), opt.ema_weights():
        opt.step()
    with opt.ema_weights(), pytest.raises(RuntimeError, match="leave it first"):
        opt.ema_state_dict()
    with pytest.raises(RuntimeError, match="does not require grad") as caught, opt.ema_weights():
        loss(averaged, batch(0, 0)).backward()
    assert "Inside ema_weights() no gradient is recorded" in caught.value.__notes__[0]
    loss(averaged, batch(0, 0)).backward()
    opt.step()


def test_errors(team: Team) -> None:
    team.alone(wrong)
