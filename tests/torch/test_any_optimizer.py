"""Any optimizer: trained together it comes to the bits of its class in plain torch."""

from collections.abc import Sequence
from typing import Any

import foreign
import pytest
import torch
from odd import (
    EVEN,
    MATRICES,
    SHAPES,
    Make,
    Odd,
    bits,
    check_same_optimizers,
    plain_gradients,
)
from team import Team
from torch import nn, optim

import tensorwire.torch as tw

STEPS = 7  # RAdam changes its ways after the fifth
Parameters = Sequence[nn.Parameter]


def halves(params: Parameters, **second: Any) -> list[dict[str, Any]]:
    """Two groups; the second has options of its own."""
    return [{"params": params[::2]}, {"params": params[1::2], **second}]


FUSED = "nesterov", "adamw", "unchanged"
ELEMENTWISE: dict[str, Make] = {
    "adagrad": lambda p: optim.Adagrad(
        p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3, weight_decay=0.01
    ),
    "rmsprop": lambda p: optim.RMSprop(halves(p, centered=True, lr=0.03), momentum=0.9),
    "adamax": lambda p: optim.Adamax(p, lr=0.1, weight_decay=0.1, maximize=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: optim.RAdam(halves(p, weight_decay=0.1), lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.01, step_sizes=(1e-5, 1)),
    "adadelta": lambda p: optim.Adadelta(halves(p, rho=0.5, lr=1), lr=0.5),
    "asgd": lambda p: optim.ASGD(halves(p, t0=2, alpha=0.5), lr=0.1, lambd=0.01, weight_decay=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(halves(p, weight_decay=0.3), lr=0.1, amsgrad=True, fused=True),
    "unchanged": foreign.Unchanged,
    "lion": lambda p: foreign.Lion(halves(p, betas=(0.5, 0.6)), lr=0.01, weight_decay=0.1),
    "doubled": lambda p: foreign.Doubled(p, lr=0.1, eps=1e-3),
    "replacing": foreign.Replacing,
}
WHOLE: dict[str, Make] = {
    "adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "trust": foreign.Trust,
    "muon": lambda p: optim.Muon(p, lr=0.1, weight_decay=0.1),
}
BY_WORKER: dict[str, Make] = {
    "float64": foreign.InFloat64,
    "first rate": lambda p: foreign.FirstRate(halves(p, lr=0.03)),
    "clipped": foreign.ClippedTogether,
    "in group": foreign.CountingInGroup,
    "itself": foreign.CountingItself,
    "defaults": foreign.FromDefaults,
    "function": foreign.WithFunction,
}
ALL = {**ELEMENTWISE, **WHOLE, **BY_WORKER}


def odd(name: str, dtype: torch.dtype = torch.float32) -> Odd:
    shapes = MATRICES if name == "muon" else EVEN if name in FUSED else SHAPES
    if name in WHOLE:  # torch's own Adafactor fails for a tensor without elements
        shapes = tuple(shape for shape in shapes if 0 not in shape)
    return Odd(shapes, dtype, turned=name in ELEMENTWISE and dtype != torch.bfloat16)


def made(name: str, model: Odd) -> Any:
    """The optimizer; where ours is fused, torch's is told to be."""
    opt = ALL[name](list(model.all))
    if name in FUSED:
        for group in opt.param_groups:
            group["fused"] = True
    return opt


def way_of(arithmetic: Any) -> str:
    """Returns which process makes the steps, and how."""
    if arithmetic.by_worker:
        return "worker"
    return str(arithmetic.kernel.spec.method) if arithmetic.text.startswith("{") else "fused"


def trained(
    job: tw.Job, name: str, dtype: torch.dtype, expected: str, apply: str = "auto"
) -> list[bytes]:
    """Compares in every step, with a schedule; sometimes there is no gradient."""
    model, twin = odd(name, dtype), odd(name, dtype)
    opt, plain = made(name, model), made(name, twin)
    opt = tw.DistributedOptimizer(opt, model, apply=apply)
    found = opt._tensorwire.arithmetic
    assert way_of(found) in expected, (name, found.text, found.why)
    schedules = [optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (opt, plain)]
    for step in range(STEPS):

        def without(rank: int, step: int = step) -> Sequence[int]:
            """The second tensor comes late, the third from slice 0 alone; once there is nothing."""
            if step == 3:
                return range(9)
            late = name != "nesterov"  # torch's own fused SGD fails where not all have a buffer
            return ([1] if late and step < 2 else []) + ([2] if rank else [])

        for rank in job.my_slices:
            loss = model(step, rank, without(rank))
            if loss.requires_grad:
                loss.backward()
            opt.step()
            opt.zero_grad()
        plain_gradients(twin, step, job.slices, without)
        plain.step()
        plain.zero_grad()
        for schedule in schedules:
            schedule.step()
        assert bits(model) == bits(twin), (name, step)
    if not found.by_worker or job.rank == 0:
        check_same_optimizers(opt, plain)
    opt.close()
    return bits(model)


def all_trained(job: tw.Job, names: Sequence[str], *args: Any) -> list[list[bytes]]:
    return [trained(job, name, *args) for name in names]


PLACES: list[dict[str, Any]] = [
    {"servers": 2},
    {"workers": 0},
    {"transports": ["tcp"]},
    {"servers": 3, "transports": ["tcp"]},
    {"slices": 4},
    {"workers": 0, "slices": 4},
]


def test_some(team: Team) -> None:
    """One of each way, for every day."""
    for names, way in (
        (["rmsprop"], "elementwise"),
        (["adafactor"], "whole"),
        (["itself"], "worker"),
    ):
        team.run(all_trained, names, torch.float32, way, imports="foreign", servers=2)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_element_by_element(team: Team, place: dict[str, Any]) -> None:
    way = "elementwise fused"
    team.run(all_trained, list(ELEMENTWISE), torch.float32, way, imports="foreign", **place)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_whole_tensors(team: Team, place: dict[str, Any]) -> None:
    team.run(all_trained, list(WHOLE), torch.float32, "whole", imports="foreign", **place)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_what_servers_cannot(team: Team, place: dict[str, Any]) -> None:
    team.run(all_trained, list(BY_WORKER), torch.float32, "worker", imports="foreign", **place)


@pytest.mark.slow
@pytest.mark.parametrize("apply", ["auto", "worker"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(team: Team, dtype: torch.dtype, apply: str) -> None:
    """Some kernels compute the rest of bfloat16 after the last whole vector otherwise."""
    ways = {torch.float64: "elementwise fused", torch.bfloat16: "elementwise whole"}
    names = [name for name in ELEMENTWISE if name not in FUSED or dtype == torch.float64]
    way = ways[dtype] if apply == "auto" else "worker"
    team.run(all_trained, names, dtype, way, apply, imports="foreign", servers=2)
    team.run(all_trained, list(WHOLE), dtype, "whole worker", apply, imports="foreign", servers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [{"servers": 2}, {"workers": 0}, {"slices": 4, "transports": ["tcp"]}], ids=str
)
def test_worker_0_is_asked_to(team: Team, place: dict[str, Any]) -> None:
    names = [*ELEMENTWISE, *WHOLE]
    team.run(all_trained, names, torch.float32, "worker", "worker", imports="foreign", **place)
