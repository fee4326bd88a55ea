"""Workers of one host whose servers are on others: they see one copy of the parameters."""

import os
import re
from pathlib import Path
from typing import Any

import pipelines
import pytest
import scripts
import test_rows
import torch
from scripts import digest
from team import Team
from torch import nn
from twins import STEPS, adamw, batch, loss, make_step, mean_gradients, net, same

import tensorwire.torch as tw
from tensorwire.parameters.worker.store import RemoteStore


def training(job: tw.Job) -> tuple[str, int, int]:
    """The bits, whose view it is, and what this process was sent in a step."""
    model, twin = net(), net()
    opt, plain = tw.DistributedOptimizer(adamw(model), model), adamw(twin)
    store, received = opt._tensorwire.store, 0
    assert isinstance(store, RemoteStore)
    for step in range(STEPS):
        before = job.session.member.node.stats()["bytes_received"]
        loss(model, batch(step, job.rank)).backward()
        opt.step()
        received = job.session.member.node.stats()["bytes_received"] - before
        opt.zero_grad()
        mean_gradients(twin, step)
        plain.step()
        plain.zero_grad()
        same(model, twin)
    neighbour = job.session.member.colocation.neighbour()
    return digest(model), job.rank if neighbour is None else neighbour[0], received


def test_a_view_is_shared_and_sent_once(team: Team) -> None:
    size = sum(parameter.nbytes for parameter in net().parameters())
    for servers in (1, 2):
        found = team.run(training, network=True, servers=servers)
        assert [view for _, view, _ in found] == [0, 0]
        (_, _, first), (_, _, second) = found
        assert size <= first
        assert second <= first - size
        apart = team.run(training, transports=["tcp"], servers=servers)
        assert [view for _, view, _ in apart] == [0, 1]
        assert len({bits for bits, _, _ in found + apart}) == 1


def test_who_may_not_share_memory_has_a_view(team: Team) -> None:
    found = team.run(training, network=True, transports={0: ["tcp"], 1: ["shm", "tcp"]})
    assert [view for _, view, _ in found] == [0, 1]


@pytest.mark.parametrize("name", scripts.SCRIPTS)
def test_scripts_give_the_same_bits(team: Team, name: str) -> None:
    (_, here), _ = team.run(scripts.train_ours, name)
    found = team.run(scripts.train_ours, name, network=True, servers=2)
    assert [bits for _, bits in found] == [here] * 2


def test_tables(team: Team) -> None:
    found = team.run(test_rows.training, "step")
    assert team.run(test_rows.training, "step", network=True, servers=2) == found
    team.run(test_rows.everything, network=True)


@pytest.mark.slow
def test_replicas_share_by_stage(team: Team) -> None:
    options: dict[str, Any] = {"workers": 4, "pipeline": 2, "network": True, "servers": 2}
    pipelines.check(team.run(pipelines.train, "mlp", **options), pipelines.alone("mlp"))
    views = team.run(whose_view, **options)
    assert views == [0, 1, 0, 1]


def whose_view(job: tw.Job) -> int:
    neighbour = job.session.member.colocation.neighbour()
    job.barrier()
    return job.rank if neighbour is None else neighbour[0]


def resident(job: tw.Job) -> float:
    """How much of the model's size this process has in memory that it shares, of views."""
    model = nn.Linear(1024, 4096)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        make_step(opt, model(torch.ones(1, 1024)).sum())
    address = model.weight.data_ptr()
    text = Path(f"/proc/{os.getpid()}/smaps").read_text()
    total: dict[str, int] = {}  # by the number of the file
    weight = ""
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        bounds, _, _, _, inode = block.split(maxsplit=5)[:5]
        found = re.search(r"^Pss: +(\d+)", block, re.MULTILINE)
        assert found is not None
        total[inode] = total.get(inode, 0) + int(found[1]) * 1024
        low, high = (int(each, 16) for each in bounds.split("-"))
        weight = inode if low <= address < high else weight
    job.barrier()
    assert weight != "0"
    return total[weight] / model.weight.nbytes


def test_a_host_has_one_copy(team: Team) -> None:
    """Proportional shares of all workers in mappings of the memory in which the weight is."""
    assert sum(team.run(resident, network=True, workers=3)) == pytest.approx(1.0, abs=0.1)


def outliving(job: tw.Job) -> tuple[str, str]:
    """The first worker, whose memory it is, closes while the other still reads."""
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    loss(model, batch(0, job.rank)).backward()
    opt.step()
    before = digest(model)
    job.barrier()
    if job.rank == 0:
        job.close()
    else:
        while not job.session.member.colocation.neighbour()[1].lost:
            pass
        assert digest(model) == before
        job.close()
    return before, digest(model)


def test_parameters_outlive_whose_memory_they_are_in(team: Team) -> None:
    for before, after in team.run(outliving, network=True):
        assert before == after


def dying(job: tw.Job) -> None:
    model = net()
    opt = tw.DistributedOptimizer(adamw(model), model)
    loss(model, batch(0, job.rank)).backward()
    opt.step()
    if job.rank == 0:
        job.session.member.node.close()
        raise RuntimeError("worker 0 fails")
    loss(model, batch(1, job.rank)).backward()
    opt.step()


def test_the_owner_of_a_view_is_lost(team: Team) -> None:
    first, second = team.failures(dying, network=True)
    assert "worker 0 fails" in first.text
    assert "worker 0" in second.text
    assert "was lost" in second.text


def lying(job: tw.Job, view: int) -> None:
    if job.rank == 1:
        job.session.member.colocation._neighbour = view, job.session.member.servers[0]
    model = net()
    tw.DistributedOptimizer(adamw(model), model)


@pytest.mark.parametrize("view", [2, -1, 70], ids=str)
def test_a_view_that_is_not_there(team: Team, view: int) -> None:
    for failure in team.failures(lying, view, network=True):
        assert f"worker 1 cannot share the memory of worker {view}" in failure.text
