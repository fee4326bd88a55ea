"""Split models under optimizers beyond SGD and Adam: the bits of the whole model's."""

from typing import Any

import pytest
import torch
from odd import Make, check_same_state
from pipelines import BATCH, make, samples, splitted, train_all
from team import Team
from torch import nn, optim
from twins import make_step

import tensorwire.torch as tw


def rmsprop(params: Any) -> optim.Optimizer:
    return optim.RMSprop(params, lr=0.01, momentum=0.9)


def adafactor(params: Any) -> optim.Optimizer:
    return optim.Adafactor(params, lr=0.01)


def train(job: tw.Job, optimizer: Make, apply: str = "auto", path: str = "") -> Any:
    """Values and state of the whole model, as worker 0 sees them; or goes on from a file."""
    split = splitted(job, "mlp")
    opt = optimizer(list(split.module.parameters()))
    opt = tw.DistributedOptimizer(opt, split, apply=apply)
    job.track(model=split, optimizer=opt)
    train_all(job, split, opt, samples("mlp"))
    state, values = opt.state_dict(), split.state_dict()
    job.barrier()
    return state, {name: value.clone() for name, value in values.items()}


def plain(optimizer: Make) -> Any:
    model = make("mlp")
    opt = optimizer(list(model.parameters()))
    loaded = samples("mlp")
    for start in range(0, len(loaded), 2 * BATCH):
        x, y = loaded[start : start + 2 * BATCH]
        make_step(opt, nn.functional.mse_loss(model(x), y))
    return opt.state_dict(), model.state_dict()


@pytest.mark.parametrize("optimizer", [rmsprop, adafactor])
@pytest.mark.slow
def test_as_the_whole_model(team: Team, optimizer: Make) -> None:
    state, values = team.run(train, optimizer, workers=4, pipeline=2, servers=2)[0]
    wanted, expected = plain(optimizer)
    torch.testing.assert_close(values, dict(expected), rtol=1e-3, atol=1e-5)
    assert state["param_groups"] == wanted["param_groups"]
    assert state["state"].keys() == wanted["state"].keys()
    for index, entry in state["state"].items():
        assert entry.keys() == wanted["state"][index].keys()
    for options in {"workers": 2, "slices": 2}, {"workers": 4, "transports": ["tcp"]}:
        for mine in team.run(train, optimizer, pipeline=2, **options):
            check_same_state(mine, (state, values))


def test_worker_0_has_no_whole_model(team: Team) -> None:
    for failure in team.failures(train, rmsprop, "worker", workers=2, pipeline=2):
        assert failure.kind == "UnavailableError"
        assert "worker 0 cannot apply" in failure.text
        assert "a model that is split" in failure.text
