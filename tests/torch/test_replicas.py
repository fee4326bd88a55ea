"""Replicas of a split model train as one model in one process: values, state, memory, errors."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crew import Mlp
from pipelines import (
    BATCH,
    POINTS,
    STEPS,
    alone,
    check,
    close,
    loss_of,
    make,
    optimizer_of,
    samples,
    splitted,
    state_of,
    step,
    train,
    train_all,
)
from team import Team
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.export import Dim

import tensorwire.torch as tw
from tensorwire.torch.loader import seed_of


@pytest.mark.parametrize("transports", ["shm", "tcp"], indirect=True)
@pytest.mark.slow
def test_equal_to_plain_torch(team: Team, transports: Any) -> None:
    results = team.run(train, "mlp", workers=4, pipeline=2, transports=transports)
    check(results, alone("mlp"))
    assert [each["placed"] for each in results] == [(0,), (1,)] * 2
    for each in results:
        assert not any(each["gradients"].values()), each["gradients"]
        size = sum(value.nbytes for value in each["own"].values())
        if transports is None:  # all but those of the first step lie where the server reads them
            assert each["produced"] == size * (STEPS - 1) // STEPS
            assert each["copied"] == size // STEPS
        else:  # sent from registered memory
            assert each["copied"] == 0


def test_tied_weights(team: Team, transports: Any) -> None:
    """Two processes have the embedding; its summed gradient counts once."""
    args = {"workers": 4, "pipeline": 2, "transports": transports}
    results = team.run(train, "transformer", False, True, **args)
    check(results, alone("transformer", adam=True))
    first, last = results[0], results[1]
    assert "embedding.weight" in first["own"]
    assert "embedding.weight" in last["own"]
    # The first of them speaks for it.
    assert "embedding.weight" in first["gradients"]
    assert "embedding.weight" not in last["gradients"]
    for each in results:
        assert not any(each["gradients"].values()), each["gradients"]


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_clipping(team: Team, transports: Any, kind: str) -> None:
    """By the norm over all stages, in which a tied weight counts once."""
    args = (kind, False, False, "1F1B", 0.3)
    results = team.run(train, *args, workers=4, pipeline=2, transports=transports)
    check(results, alone(kind, max_norm=0.3))
    assert len({each["norm"] for each in results}) == 1


def test_groups_of_parameters(team: Team) -> None:
    results = team.run(train, "transformer", True, workers=4, pipeline=2)
    check(results, alone("transformer", True))


def test_several_stages_in_a_process_and_two_servers(team: Team, transports: Any) -> None:
    args = ("four", False, False, "Interleaved1F1B")
    options = {"workers": 4, "pipeline": 2, "servers": 2, "transports": transports}
    results = team.run(train, *args, **options)
    check(results, alone("mlp"))
    assert [each["placed"] for each in results] == [(0, 2), (1, 3)] * 2


@pytest.mark.parametrize(
    ("schedule", "kind", "tied", "by"),
    [
        ("InterleavedZeroBubble", "tied", 2, None),
        ("ZBVZeroBubble", "tied", 1, None),
        ("ZBVZeroBubble", "tied", 1, ["tcp"]),
        ("DualPipeV", "four", 0, None),
    ],
)
def test_backwards_in_two_parts(
    team: Team, schedule: str, kind: str, tied: int, by: list[str] | None
) -> None:
    """Gradients are produced in place all the same. In V shape the first process has both uses of
    the tied weight."""
    args = (kind, False, False, schedule, 0.3)
    results = team.run(train, *args, workers=4, pipeline=2, transports=by)
    check(results, alone("mlp" if kind == "four" else kind, max_norm=0.3))
    in_v = schedule != "InterleavedZeroBubble"
    assert [each["placed"] for each in results] == (
        [(0, 3), (1, 2)] if in_v else [(0, 2), (1, 3)]
    ) * 2
    assert sum("embedding.weight" in each["own"] for each in results[:2]) == tied
    for each in results:
        assert not any(each["gradients"].values()), each["gradients"]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.slow
def test_some_workers_see_the_servers_memory(team: Team, servers: int) -> None:
    """A stand-in for stages of a replica on two hosts, with a server on one of them."""
    options = {"workers": 4, "pipeline": 2, "transports": {1: ["tcp"], 2: ["tcp"]}}
    results = team.run(train, "transformer", servers=servers, **options)
    check(results, alone("transformer"))
    assert [each["produced"] > 0 for each in results] == [True, False, False, True]


def test_the_bits_depend_on_slices_alone(team: Team) -> None:
    """One replica that computes two slices in turn, and a process with the whole model."""
    two = team.run(train, "mlp", workers=4, pipeline=2)
    one = team.run(train_slices, "mlp", workers=2, pipeline=2, slices=2)
    whole = team.alone(train_slices, "mlp", slices=2)
    for each in (*one, whole):
        for name, value in two[0]["model"].items():
            assert np.array_equal(value, each[name]), name


def train_slices(job: tw.Job, kind: str) -> Any:
    split = splitted(job, kind)
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    train_all(job, split, opt, samples(kind), 3)
    return state_of(job, split)


UNEVEN = 2 * BATCH + 5


def train_uneven(job: tw.Job) -> Any:
    """The last step has two samples in one replica and three in the other."""
    shapes = ({0: Dim("batch", min=2, max=BATCH)},)
    split = splitted(job, "mlp", 1, dynamic_shapes=shapes)
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    sizes = []
    for _ in job.epochs(2):
        for x, y in job.loader(samples("mlp", UNEVEN), batch_size=BATCH):
            sizes.append(len(x))
            step(split, x, y)
            opt.step()
            opt.zero_grad()
    return sizes, state_of(job, split)


def test_the_mean_is_over_samples(team: Team) -> None:
    results = team.run(train_uneven, workers=4, pipeline=2)
    assert [sizes for sizes, _ in results] == [[8, 2, 8, 2]] * 2 + [[8, 3, 8, 3]] * 2
    _, expected = alone("mlp", count=UNEVEN, epochs=2)
    for _, state in results:
        close(state, expected)


def train_from(job: tw.Job, kind: str, path: str, load: bool) -> Any:
    """Four steps; saves after two, or begins with what was saved."""
    split = splitted(job, kind)
    opt = tw.DistributedOptimizer(optimizer_of(split.module, True, True), split)
    job.track(model=split, optimizer=opt)
    steps = 4
    if load:
        job.load(path)
        steps = 2
    loader = job.loader(samples(kind), batch_size=BATCH)
    batch = next(iter(loader))
    for number in range(steps):
        step(split, *batch)
        opt.step()
        opt.zero_grad()
        if number == 1 and not load:
            if job.rank == 0:
                job.save(path)
            job.barrier()
    return state_of(job, split)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_a_checkpoint_of_the_whole_model(
    team: Team, transports: Any, tmp_path: Path, kind: str
) -> None:
    """The job goes on here with the same bits, and in plain torch."""
    path = str(tmp_path / "checkpoint")
    options = {"workers": 4, "pipeline": 2, "transports": transports}
    straight = team.run(train_from, kind, path, False, **options)
    resumed = team.run(train_from, kind, path, True, **options)
    for name, value in straight[0].items():
        assert np.array_equal(value, resumed[0][name]), name
        assert np.array_equal(value, resumed[3][name]), name

    saved = torch.load(path, weights_only=True)
    model = make(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved["model"])
    opt = optimizer_of(model, True, True)
    opt.load_state_dict(saved["optimizer"])
    assert len(opt.state) == len(list(model.parameters()))
    x, y = (tensor[: 2 * BATCH] for tensor in samples(kind).tensors)
    for _ in range(2):
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
    close(straight[0], model.state_dict())


def test_a_plain_checkpoint_is_loaded(team: Team, tmp_path: Path) -> None:
    """A checkpoint of plain torch goes on in replicas."""
    path = str(tmp_path / "checkpoint")
    model = make("mlp")
    opt = optimizer_of(model, True, True)
    x, y = (tensor[: 2 * BATCH] for tensor in samples("mlp").tensors)

    def two_steps() -> None:
        for _ in range(2):
            opt.zero_grad()
            loss_of(model(x), y).backward()
            opt.step()

    two_steps()
    head = {"format": 1, "epochs": 0, "seed": 0}
    saved = {"model": model.state_dict(), "optimizer": opt.state_dict(), "tensorwire": head}
    torch.save(saved, path)
    two_steps()
    resumed = team.run(train_from, "mlp", path, True, workers=4, pipeline=2)
    close(resumed[0], model.state_dict())


class Normed(nn.Module):
    """Statistics in the second stage, a buffer in both, a frozen weight, a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.idle = nn.Linear(3, 3)
        self.turned = nn.Parameter(torch.randn(12, 12).t() / 5)  # in another order in memory
        self.fixed = nn.Parameter(torch.randn(12, 12).t() / 5, requires_grad=False)
        self.register_buffer("scale", torch.full((12,), 0.5))
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, x: Any) -> Any:
        x = self.first(x @ self.turned) * self.scale
        return self.norm(self.second(x) @ self.fixed) * self.scale


def train_buffers(job: tw.Job, kind: str) -> Any:
    torch.manual_seed(3)
    split = tw.split(
        Normed(),
        {"second": SplitPoint.BEGINNING},
        example=[torch.ones(BATCH, 12)],
        loss=loss_of,
        timeout_s=20,
    )
    opt = torch.optim.SGD(split.parameters(), lr=0.1)
    opt = tw.DistributedOptimizer(opt, split, buffers=kind)
    train_all(job, split, opt, samples("mlp"))
    own = {name: value.clone().numpy() for name, value in split.module.named_buffers()}
    return own, state_of(job, split)


@pytest.mark.parametrize("kind", ["broadcast", "average"])
def test_buffers_and_what_no_stage_uses(team: Team, transports: Any, kind: str) -> None:
    options = {"workers": 4, "pipeline": 2, "transports": transports}
    results = team.run(train_buffers, kind, **options)
    torch.manual_seed(3)
    model = Normed()
    state = results[0][1]
    assert list(state) == list(model.state_dict())
    for name in ("idle.weight", "idle.bias", "scale", "fixed"):
        assert np.array_equal(state[name], model.state_dict()[name])
    assert state["norm.num_batches_tracked"] == 3
    for own, each in results:
        for name, value in each.items():
            assert np.array_equal(value, state[name])
            assert name not in own or np.array_equal(own[name], value)
    assert {*results[0][0]} == {"scale", "table"}  # what nobody uses is with the first process
    assert "norm.running_mean" in results[1][0]
    assert np.abs(state["norm.running_mean"]).sum() > 0


class Wide(nn.Sequential):
    """A small stage and a large one."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 100), nn.Tanh(), nn.Linear(100, 5000), nn.Linear(5000, 12))


def count_bytes(job: tw.Job) -> Any:
    """Bytes that come from the servers in ten steps; of views; of this worker's parameters."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Wide()
    split = tw.split(
        model,
        {"2": SplitPoint.BEGINNING},
        example=[torch.ones(BATCH, 12)],
        loss=loss_of,
        weights=lambda name: torch.full(model.get_parameter(name).shape, 0.01),
        timeout_s=20,
    )
    opt = tw.DistributedOptimizer(torch.optim.SGD(split.parameters(), lr=0.1), split)
    batch = next(iter(job.loader(samples("mlp"), batch_size=BATCH)))
    node = opt._tensorwire.store._member.node
    before = node.stats()["bytes_received"]
    for _ in range(10):
        step(split, *batch)
        opt.step()
        opt.zero_grad()
    received = node.stats()["bytes_received"] - before
    regions = opt._tensorwire.store._regions
    memory = {region.name.partition("/")[2]: region.size_bytes for region in regions}
    own = sum(p.nbytes for p in split.parameters())
    job.barrier()
    return received, memory, own, opt._tensorwire.store.layout.size_bytes


@pytest.mark.parametrize("servers", [1, 2])
def test_over_a_network_a_worker_gets_its_own_values_alone(team: Team, servers: int) -> None:
    options = {"workers": 4, "pipeline": 2, "servers": servers, "transports": ["tcp"]}
    for received, memory, own, whole in team.run(count_bytes, **options):
        assert 0 < own < whole
        assert own * 10 <= received <= own * 10 + 10 * 8192 * servers  # and results
        assert own <= memory["view"] <= own + 64 * 4
        assert sum(size for name, size in memory.items() if name.startswith("sent")) <= own + 256


def gradients(job: tw.Job) -> Any:
    """Averaged gradients by name, the norm that clipping tells, parameters after edits."""
    split = splitted(job, "transformer")
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    x, y = next(iter(job.loader(samples("transformer"), batch_size=BATCH)))
    step(split, x, y)
    opt.synchronize()
    found = {n: p.grad.clone().numpy() for n, p in split.module.named_parameters()}
    for parameter in split.parameters():
        parameter.grad.zero_()
    before = {name: value.clone() for name, value in split.state_dict().items()}
    job.barrier()
    opt.step()
    opt.zero_grad()
    after = split.state_dict()
    still = all(torch.equal(before[name], after[name]) for name in before)
    job.barrier()
    step(split, x, y)
    norm = tw.clip_grad_norm_(split, 0.5)
    opt.step()
    opt.zero_grad()
    with tw.edit(split), torch.no_grad():
        for parameter in split.parameters():
            parameter.fill_(0.25 if job.replica == 0 else 7.0)
    edited = {name: value.clone().numpy() for name, value in split.state_dict().items()}
    job.barrier()
    return found, still, norm.item(), edited


def test_gradients_and_edits(team: Team, transports: Any) -> None:
    options = {"workers": 4, "pipeline": 2, "transports": transports}
    results = team.run(gradients, **options)
    model = make("transformer")
    x, y = (tensor[: 2 * BATCH] for tensor in samples("transformer").tensors)
    loss_of(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, still, told, edited in results:
        for name, gradient in found.items():
            wanted = model.get_parameter(name).grad
            np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-6, err_msg=name)
        assert still  # momentum was not there yet: what is applied is what all have set to zero
        np.testing.assert_allclose(told, norm, rtol=1e-5)
        parameters = {name: edited[name] for name, _ in model.named_parameters()}
        assert all((value == 0.25).all() for value in parameters.values())


def scaled(job: tw.Job) -> Any:
    """Only the last stage's process sees the loss; all decide the same."""
    scaler = tw.GradScaler(init_scale=4.0, growth_interval=100)
    split = tw.split(
        make("mlp"),
        POINTS["mlp"],
        example=[torch.ones(BATCH, 12)],
        loss=lambda output, target: scaler.scale(loss_of(output, target)),
        timeout_s=20,
    )
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    for number, (x, y) in enumerate(job.loader(samples("mlp"), batch_size=BATCH)):
        if number == 1 and job.replica == 1:
            y = y * torch.inf
        step(split, x, y)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return scaler.get_scale(), state_of(job, split)


def test_a_scaler(team: Team) -> None:
    results = team.run(scaled, workers=4, pipeline=2)
    model = make("mlp")
    opt = optimizer_of(model)
    xs, ys = samples("mlp").tensors
    for start in (0, 4 * BATCH):  # the step between them is skipped
        opt.zero_grad()
        loss_of(model(xs[start : start + 2 * BATCH]), ys[start : start + 2 * BATCH]).backward()
        opt.step()
    for scale, state in results:
        assert scale == 2.0
        close(state, model.state_dict())


def train_again(job: tw.Job) -> Any:
    """Two splits with optimizers one after another, and gradients that add up over two steps."""
    first = splitted(job, "mlp")
    opt = tw.DistributedOptimizer(optimizer_of(first.module), first)
    x, y = next(iter(job.loader(samples("mlp"), batch_size=BATCH)))
    for _ in range(2):
        step(first, x, y)
    opt.step()
    state = state_of(job, first)
    opt.close()
    first.close()
    second = splitted(job, "transformer")
    opt = tw.DistributedOptimizer(optimizer_of(second.module), second)
    step(second, *next(iter(job.loader(samples("transformer"), batch_size=BATCH))))
    opt.step()
    return state


def test_one_model_after_another(team: Team) -> None:
    results = team.run(train_again, workers=4, pipeline=2)
    model = make("mlp")
    opt = optimizer_of(model)
    x, y = (tensor[: 2 * BATCH] for tensor in samples("mlp").tensors)
    for _ in range(2):
        loss_of(model(x), y).backward()
    opt.step()
    for state in results:
        close(state, model.state_dict())


def train_half(job: tw.Job) -> Any:
    """The first stage is frozen: its process trains nothing, and its samples count."""
    torch.manual_seed(7)
    model = Mlp()
    for at in range(3):
        model.layers[at].requires_grad_(False)
    x = torch.ones(2, 12)
    split = tw.split(model, POINTS["mlp"], example=[x], loss=loss_of, microbatches=4, timeout_s=20)
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    train_all(job, split, opt, samples("mlp"), 3)
    momentum = sorted(opt.state_dict()["state"])
    return state_of(job, split), momentum


def test_a_frozen_stage(team: Team) -> None:
    model = make("mlp")
    for at in range(3):
        model.layers[at].requires_grad_(False)
    opt = optimizer_of(model)
    xs, ys = samples("mlp").tensors
    for _ in range(3):
        for x, y in zip(xs.split(2 * BATCH), ys.split(2 * BATCH), strict=True):
            opt.zero_grad()
            loss_of(model(x), y).backward()
            opt.step()
    for state, momentum in team.run(train_half, workers=4, pipeline=2):
        assert momentum == sorted(opt.state_dict()["state"])
        close(state, model.state_dict())


def seeds(job: tw.Job) -> Any:
    """Returns torch's numbers in each process after it got a batch, and the batch."""
    batches = iter(job.loader(samples("mlp"), batch_size=BATCH, shuffle=True))
    x, _ = next(batches)
    drawn = torch.rand(1).item()
    evaluated = [float(each[0].sum()) for each in job.shard(samples("mlp"))]
    return x.numpy(), drawn, evaluated, (job.replica, job.stage, job.replicas)


def test_what_processes_of_a_replica_share(team: Team) -> None:
    a, b, c, d = team.run(seeds, workers=4, pipeline=2)
    assert np.array_equal(a[0], b[0])
    assert np.array_equal(c[0], d[0])
    assert not np.array_equal(a[0], c[0])
    assert len({each[1] for each in (a, b, c, d)}) == 4
    assert a[2] == b[2] != c[2] == d[2]
    assert [each[3] for each in (a, b, c, d)] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]


# ---- what does not work is an error


def together(job: tw.Job, kind: str) -> tw.Split:
    """The next common call fails in all of them."""
    split = splitted(job, kind)
    job.barrier()
    return split


def plain_model(job: tw.Job) -> None:
    model = make("mlp")
    tw.DistributedOptimizer(optimizer_of(model), model)


def no_optimizer(job: tw.Job) -> None:
    split = together(job, "mlp")
    torch.optim.SGD(split.parameters(), lr=0.1)
    step(split, *samples("mlp")[:BATCH])


def other_groups(job: tw.Job) -> None:
    """The tied weight decays in one process and not in the other."""
    split = splitted(job, "transformer")
    tied = split.module.get_parameter("embedding.weight")
    rest = [p for p in split.parameters() if p is not tied]
    first, second = ([tied], rest) if job.stage == 0 else (rest, [tied])
    opt = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.1)
    tw.DistributedOptimizer(opt, split)


def other_samples(job: tw.Job) -> None:
    """The second process of each pipeline does not ask the loader."""
    split = splitted(job, "mlp")
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    x, y = samples("mlp")[:BATCH]
    if job.stage == 0:
        x, _ = next(iter(job.loader(samples("mlp"), batch_size=BATCH)))
    step(split, x, y)
    opt.step()


def two_optimizers(job: tw.Job) -> None:
    split = splitted(job, "mlp")
    tw.DistributedOptimizer(optimizer_of(split.module), split)
    tw.DistributedOptimizer(optimizer_of(split.module), split)


def own_buffers(job: tw.Job) -> None:
    split = together(job, "mlp")
    tw.DistributedOptimizer(optimizer_of(split.module), split, buffers="local")


def own_buffers_alone(job: tw.Job) -> None:
    split = splitted(job, "mlp")
    with pytest.raises(ValueError, match="'broadcast' or 'average'"):
        tw.DistributedOptimizer(optimizer_of(split.module), split, buffers="local")


def test_own_buffers_of_a_split_alone(team: Team) -> None:
    team.alone(own_buffers_alone, slices=2)


def added_group(job: tw.Job) -> None:
    split = splitted(job, "mlp")
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def frozen_later(job: tw.Job) -> None:
    split = splitted(job, "mlp")
    tw.DistributedOptimizer(optimizer_of(split.module), split)
    with tw.edit(split):
        next(split.parameters()).requires_grad_(False)


def part_of_a_state(job: tw.Job) -> None:
    split = splitted(job, "mlp")
    opt = tw.DistributedOptimizer(optimizer_of(split.module), split)
    opt.load_state_dict(optimizer_of(split.module).state_dict())


def part_of_a_model(job: tw.Job) -> None:
    together(job, "mlp").load_state_dict({"layers.0.weight": torch.ones(12, 12)})


def state_without_servers(job: tw.Job) -> None:
    together(job, "mlp").state_dict()


ERRORS = [
    (plain_model, "ValueError", "2 workers share a model: give the Split"),
    (no_optimizer, "RuntimeError", "2 replicas would train without each other"),
    (other_groups, "ValueError", "'embedding.weight' is in another group"),
    (other_samples, "RuntimeError", r"computed slice 0 of \[8.0, 1.0\] samples"),
    (two_optimizers, "ValueError", "one distributed optimizer"),
    (own_buffers, "ValueError", "'broadcast' or 'average'"),
    (added_group, "RuntimeError", r"add_param_group\(\) is not possible for a split model"),
    (frozen_later, "RuntimeError", r"freezing inside edit\(\) is not possible for a split"),
    (part_of_a_state, "ValueError", "of other groups of parameters than the whole model's"),
    (part_of_a_model, "ValueError", "not the whole model's"),
    (state_without_servers, "RuntimeError", "no DistributedOptimizer trains it"),
]


@pytest.mark.parametrize(("case", "kind", "message"), ERRORS, ids=lambda each: str(each)[:20])
def test_errors(team: Team, case: Any, kind: str, message: str) -> None:
    failures = team.failures(case, workers=4, pipeline=2)
    # Who is late may hear first that another worker has ended by its error.
    told = [each for each in failures if not re.search(r"worker \d .* was lost", each.text)]
    assert told
    for failure in told:
        assert failure.kind == kind, failure.trace
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(failure.text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": 3}, "4 workers cannot be dealt to pipelines of 3"),
        ({"pipeline": 2, "slices": 3}, "3 slices cannot be dealt equally to 2 replicas"),
        ({"pipeline": 0}, "pipeline is a number of workers"),
    ],
    ids=["multiple", "slices", "none"],
)
def test_pipelines_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, options: Any, message: str
) -> None:
    monkeypatch.setenv("TENSORWIRE_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("TENSORWIRE_WORKERS", "4")
    monkeypatch.setenv("TENSORWIRE_RANK", "0")
    with pytest.raises(ValueError, match=message):
        tw.init(**options)


def test_a_job_without_pipelines(team: Team) -> None:
    failures = team.failures(split_without_pipeline, workers=2)
    assert all("has 2 workers and no pipelines" in f.text for f in failures)


def split_without_pipeline(job: tw.Job) -> None:
    splitted(job, "mlp")


def one_replica(job: tw.Job) -> Any:
    """Each process has an optimizer of its own, no server knows of them."""
    split = splitted(job, "mlp")
    opt = optimizer_of(split.module)
    losses = []
    for x, y in job.loader(samples("mlp"), batch_size=2 * BATCH):
        opt.zero_grad()
        loss = step(split, x[:BATCH], y[:BATCH])
        opt.step()
        losses.append(loss)
    return split.stages, losses[-1] is None


def test_a_job_of_one_replica_needs_no_servers_optimizer(team: Team) -> None:
    assert team.run(one_replica, workers=2, pipeline=2) == [((0,), True), ((1,), False)]


def page_alone() -> float:
    """The loss that the program about replicas in docs/split.md ends with, in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.arange(128.0).reshape(32, 4) / 128
    y = x.sum(1, keepdim=True)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        order = torch.randperm(32, generator=torch.Generator().manual_seed(seed_of(0, epoch)))
        for chosen in order.split(16):
            opt.zero_grad()
            loss_of(model(x[chosen]), y[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
    return loss_of(model(x), y).item()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["tensorwire run", "python"])
def test_the_page(repository: Path, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    blocks = (repository / "docs" / "split.md").read_text().split("```python\n")[1:]
    programs = [block.partition("```")[0] for block in blocks]
    (program,) = (each for each in programs if "pipeline=" in each)
    script.write_text(program)
    start = {
        "tensorwire run": ["-m", "tensorwire", "run", "--workers", "4", "--no-prefix"],
        "python": [],
    }
    done = subprocess.run(
        [sys.executable, *start[launcher], str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert f"loss {page_alone():.4f}\n" in done.stdout
    assert (tmp_path / "checkpoint").exists()
