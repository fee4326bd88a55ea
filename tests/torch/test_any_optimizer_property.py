"""Random small models, groups, options and schedules: servers come to the bits of plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from odd import Odd, bits, check_same_optimizers, plain_gradients
from team import Team
from torch import optim

import tensorwire.torch as tw

rates = st.sampled_from([0.0, 0.001, 0.1, 0.5, 1, 1.0])
small = st.sampled_from([0, 0.0, 0.01, 0.3])
betas = st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.5, 0.99]))
yes = st.booleans()
COMMON = {"lr": rates, "weight_decay": small}
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "Adagrad": {**COMMON, "lr_decay": small, "initial_accumulator_value": small, "maximize": yes},
    "RMSprop": {**COMMON, "momentum": small, "centered": yes, "alpha": small, "maximize": yes},
    "Adamax": {**COMMON, "betas": betas, "maximize": yes},
    "NAdam": {**COMMON, "betas": betas, "decoupled_weight_decay": yes, "momentum_decay": small},
    "RAdam": {**COMMON, "betas": betas, "decoupled_weight_decay": yes, "maximize": yes},
    "Rprop": {"lr": rates, "etas": st.sampled_from([(0.5, 1.2), (0.9, 2.0)]), "maximize": yes},
    "Adadelta": {**COMMON, "rho": st.sampled_from([0.5, 0.9]), "maximize": yes},
    "ASGD": {**COMMON, "lambd": small, "t0": st.sampled_from([0, 1, 3.0, 1e6]), "maximize": yes},
    "Adafactor": {**COMMON, "d": st.sampled_from([1, 1.5, 2.0]), "maximize": yes},
}
OF_GROUPS = {name: {k: v for k, v in each.items() if k != "initial_accumulator_value"}
             for name, each in OPTIONS.items()}  # fmt: skip
SHAPES = st.sampled_from([(), (1,), (63,), (64,), (65,), (5, 3), (1, 7), (2, 3, 2), (300, 1000)])
SCHEDULES = [
    ("ExponentialLR", {"gamma": 0.5}),
    ("ConstantLR", {"factor": 0.1, "total_iters": 2}),
    ("LinearLR", {"start_factor": 0.25, "total_iters": 3}),
    ("CosineAnnealingLR", {"T_max": 3}),
    ("StepLR", {"step_size": 2}),
]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """All that a case needs; plain values."""
    name = draw(st.sampled_from(list(OPTIONS)))
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    groups = draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    own = [
        draw(st.fixed_dictionaries({}, optional=OF_GROUPS[name])) if index else {}
        for index in range(max(groups) + 1)
    ]
    return {
        "name": name,
        "shapes": shapes,
        "groups": groups,
        "own": own,
        "options": draw(st.fixed_dictionaries({}, optional=OPTIONS[name])),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "dtype": draw(st.sampled_from(["float32", "float32", "float64", "bfloat16"])),
        "without": draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=5)),
        "saves": draw(yes),
    }


def optimizer(case: dict[str, Any], model: Odd) -> optim.Optimizer:
    groups = []
    for index, own in enumerate(case["own"]):
        members = [p for p, g in zip(model.all, case["groups"], strict=True) if g == index]
        if members:
            groups.append({"params": members, **own})
    return getattr(optim, case["name"])(groups, **case["options"])  # type: ignore[no-any-return]


def one(job: tw.Job, case: dict[str, Any]) -> None:
    dtype = getattr(torch, case["dtype"])
    model, twin = Odd(case["shapes"], dtype), Odd(case["shapes"], dtype)
    opt, plain = optimizer(case, model), optimizer(case, twin)
    opt = tw.DistributedOptimizer(opt, model)
    name, options = case["schedule"]
    schedules = [getattr(optim.lr_scheduler, name)(each, **options) for each in (opt, plain)]
    for step in range(4):

        def without(rank: int, step: int = step) -> list[int]:
            return [index for at, index in case["without"] if at == step and index % 2 == rank]

        for rank in job.my_slices:
            loss = model(step, rank, without(rank))
            if loss.requires_grad:
                loss.backward()
            opt.step()
            opt.zero_grad()
        plain_gradients(twin, step, job.slices, without)
        plain.step()
        plain.zero_grad()
        for each in schedules:
            each.step()
        assert bits(model) == bits(twin), (case, step)
        # Of other dtypes torch gives NAdam's and ASGD's numbers the parameter's when it loads them.
        if step == 1 and case["saves"] and dtype == torch.float32:
            opt.load_state_dict(opt.state_dict())
    check_same_optimizers(opt, plain)
    opt.close()


def all_of(job: tw.Job, several: list[dict[str, Any]]) -> None:
    for case in several:
        one(job, case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{"workers": 0, "slices": 2}, {"servers": 2}], ids=str)
def test_random_optimizers(team: Team, options: dict[str, Any]) -> None:
    @settings(max_examples=4, derandomize=True)
    @given(st.lists(cases(), min_size=1, max_size=3))
    def try_some(several: list[dict[str, Any]]) -> None:
        team.run(all_of, several, **options)

    try_some()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_random_optimizers(team: Team) -> None:
    @settings(max_examples=20, derandomize=True)
    @given(st.lists(cases(), min_size=5, max_size=10))
    def try_some(several: list[dict[str, Any]]) -> None:
        team.alone(all_of, several, slices=2)

    try_some()
