"""Models, samples and loops of replicas that share a split model; cases of test_replicas.py."""

from typing import Any

import numpy as np
import torch
from crew import Mlp, Transformer
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.utils.data import TensorDataset

import tensorwire.torch as tw

STEPS = 9  # three epochs of three
BATCH = 8  # of a replica
SAMPLES = 3 * 2 * BATCH

POINTS = {
    "mlp": {"layers.3": SplitPoint.BEGINNING},
    "transformer": {"blocks.1": SplitPoint.BEGINNING},
    "tied": {f"blocks.{at}": SplitPoint.BEGINNING for at in range(3)},
    "four": {f"layers.{at}": SplitPoint.BEGINNING for at in (1, 3, 5)},
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return Transformer() if kind in ("transformer", "tied") else Mlp()


def samples(kind: str, count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    if kind in ("transformer", "tied"):
        words = torch.randint(0, 40, (2, count, 9), generator=generator)
        return TensorDataset(*words)
    return TensorDataset(*torch.randn(2, count, 12, generator=generator))


def loss_of(output: Any, target: Any) -> Any:
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output, target.reshape(-1))


def groups_of(module: nn.Module, several: bool) -> Any:
    """Biases in a group of their own, which decays otherwise."""
    if not several:
        return module.parameters()
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.01},
    ]


def optimizer_of(module: nn.Module, several: bool = False, adam: bool = False) -> Any:
    groups = groups_of(module, several)
    if adam:
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def splitted(job: tw.Job, kind: str, microbatches: int = 4, **options: Any) -> tw.Split:
    """From meta, so that a process has nothing of the rest."""
    values = make(kind).state_dict()
    with torch.device("meta"):
        model = make(kind)
    asked: list[str] = []

    def weights(name: str) -> torch.Tensor:
        asked.append(name)
        return values[name] if job.replica == 0 else torch.zeros_like(values[name])

    x = samples(kind)[0][0]
    split = tw.split(
        model,
        POINTS[kind],
        example=[torch.stack([x] * (BATCH // microbatches))],
        loss=loss_of,
        microbatches=microbatches,
        weights=weights,
        timeout_s=20,
        **options,
    )
    mine = {*dict(split.module.named_parameters()), *dict(split.module.named_buffers())}
    assert {*asked} == mine & {*split.whole.parameters, *split.whole.buffers}
    return split


def step(split: tw.Split, x: Any, y: Any) -> Any:
    inputs = [x] if split.has_first else []
    return split.step(*inputs, target=y if split.has_last else None)


def train_all(job: tw.Job, split: tw.Split, opt: Any, data: TensorDataset, epochs: int = 1) -> None:
    """Trains on all batches of some epochs."""
    for _ in job.epochs(epochs):
        for x, y in job.loader(data, batch_size=BATCH):
            step(split, x, y)
            opt.step()
            opt.zero_grad()


def state_of(job: tw.Job, split: tw.Split) -> dict[str, Any]:
    """Returns the whole model, as any worker reads it, when all have read it."""
    state = {name: value.clone().numpy() for name, value in split.state_dict().items()}
    job.barrier()
    return state


def close(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Checks that a model has the values of another one, but for rounding."""
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


def train(
    job: tw.Job,
    kind: str,
    several: bool = False,
    adam: bool = False,
    schedule: str = "1F1B",
    max_norm: float | None = None,
) -> Any:
    split = splitted(job, kind, schedule=schedule)
    opt = optimizer_of(split.module, several, adam)
    opt = tw.DistributedOptimizer(opt, split, max_norm=max_norm)
    losses = []
    for _ in job.epochs(3):
        for x, y in job.loader(samples(kind), batch_size=BATCH):
            losses.append(job.mean(step(split, x, y)))
            opt.step()
            opt.zero_grad()
    report = job.report()
    own = {n: p.detach().clone().numpy() for n, p in split.module.named_parameters()}
    result = {
        "losses": losses,
        "own": own,
        "model": state_of(job, split),
        "gradients": {row.name: row.reason for row in tw.explain_optimizer(opt).gradients},
        "placed": split.stages,
        "produced": report["bytes_produced_per_step"],
        "copied": report["bytes_copied_per_step"],
        "norm": opt.last_norm,
    }
    job.barrier()
    return result


def alone(
    kind: str,
    several: bool = False,
    adam: bool = False,
    max_norm: float | None = None,
    count: int = SAMPLES,
    epochs: int = 3,
) -> Any:
    """Losses and state of plain torch in this process, on all samples of each step."""
    model = make(kind)
    opt = optimizer_of(model, several, adam)
    losses = []
    xs, ys = samples(kind, count).tensors
    for _ in range(epochs):
        for start in range(0, count, 2 * BATCH):
            x, y = xs[start : start + 2 * BATCH], ys[start : start + 2 * BATCH]
            opt.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            opt.step()
            losses.append(loss.item())
    return losses, {name: value.numpy() for name, value in model.state_dict().items()}


def check(results: Any, expected: Any) -> None:
    losses, state = expected
    for each in results:
        np.testing.assert_allclose(each["losses"], losses, rtol=1e-5)
        assert list(each["model"]) == list(state)
        close(each["model"], state)
        for name, value in each["model"].items():
            assert np.array_equal(value, results[0]["model"][name])
        for name, value in each["own"].items():
            assert np.array_equal(value, each["model"][name])
