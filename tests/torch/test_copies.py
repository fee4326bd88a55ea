"""The copies that are told are those that were made: counted where they are made, and beside that
by the core, which carries them on shared memory.
"""

from typing import Any

import pytest
import torch
from team import Team
from test_gradient_slots import batch, loss_of, net, wrap
from torch import nn
from twins import make_step

import tensorwire.torch as tw

STEPS = 4
COMMIT_BYTES = 4096  # more than what a commit of these models writes


class Reordered(nn.Module):
    """A layer, and a parameter whose gradient the script makes, in another order of elements.

    (Backward itself brings gradients into the order of their parameters.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(36, 20))
        self.last = nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.grad = torch.ones(20, 36).t()
        return self.last(x.flatten(1))  # type: ignore[no-any-return]


def told_and_seen(job: tw.Job, model: nn.Module, placement: str) -> dict[str, Any]:
    """By the explanation, by the job's report and by the core, of one step."""
    opt = wrap(model, placement)
    written = counted = 0
    for step in range(STEPS):
        counted = job.statistics.bytes_copied
        written = job.session.member.node.stats()["bytes_written"] if job.session.member else 0
        make_step(opt, loss_of(model, batch(job, step)))
    found = tw.explain_optimizer(opt)
    return {
        "copies": {row.name: row.copies for row in found.gradients},
        "told": found.bytes_copied,
        "json": found.to_json()["bytes_copied"],
        "counted": job.statistics.bytes_copied - counted,
        "written": (job.session.member.node.stats()["bytes_written"] if job.session.member else 0)
        - written,
        "size": sum(p.nbytes for p in model.parameters()),
    }


def of_net(job: tw.Job, placement: str) -> dict[str, Any]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 50), nn.Tanh(), nn.Linear(50, 3))
    return told_and_seen(job, model, placement)


def of_reordered(job: tw.Job, placement: str) -> dict[str, Any]:
    return told_and_seen(job, Reordered(), placement)


@pytest.mark.parametrize("placement", ["plan", "copy"])
def test_the_core_carries_what_is_told(team: Team, placement: str) -> None:
    for found in team.run(of_net, placement):
        wanted = found["size"] if placement == "copy" else 0
        assert found["told"] == found["json"] == found["counted"] == wanted
        assert wanted <= found["written"] <= wanted + COMMIT_BYTES


@pytest.mark.parametrize("placement", ["plan", "copy"])
def test_over_a_network_nothing_is_copied_in_memory(team: Team, placement: str) -> None:
    for found in team.run(of_net, placement, transports=["tcp"]):
        assert found["told"] == found["counted"] == 0
        assert found["written"] >= found["size"]


def test_a_gradient_in_another_order(team: Team) -> None:
    """Into the order of its parameter, and on shared memory from there into its place."""
    for transports, copies in (None, 2), (["tcp"], 1):
        for found in team.run(of_reordered, "plan", transports=transports):
            assert found["copies"] == {"weight": copies, "last.weight": 0, "last.bias": 0}
            assert found["told"] == found["counted"] == copies * 36 * 20 * 4
    assert team.alone(of_reordered, "plan")["copies"]["weight"] == 1


def of_batch_norm(job: tw.Job, placement: str) -> dict[str, Any]:
    return told_and_seen(job, net(), placement)


def test_buffers_are_no_gradients(team: Team) -> None:
    for found in (*team.run(of_batch_norm, "copy"), team.alone(of_batch_norm, "copy")):
        assert found["told"] == found["counted"] == found["size"]


def of_replaced(job: tw.Job) -> list[tuple[bool, int, str]]:
    """The script replaces a gradient that was produced in place, before anything leaves."""
    model = nn.Linear(36, 20)
    opt = wrap(model, "plan")
    for step in range(STEPS):
        with opt.accumulate():
            loss_of(model, batch(job, step).flatten(1)).backward()
        model.weight.grad = model.weight.grad * 0.5
        opt.step()
        opt.zero_grad()
    rows = tw.explain_optimizer(opt).gradients
    return [(row.in_place, row.bytes_copied, row.reason) for row in rows]


def test_a_gradient_that_the_script_replaces(team: Team) -> None:
    reason = "the script put it there after backward"
    assert team.alone(of_replaced) == [(False, 36 * 20 * 4, reason), (True, 0, "")]
    for found in team.run(of_replaced):
        assert found == [(False, 36 * 20 * 4, reason), (True, 0, "")]
