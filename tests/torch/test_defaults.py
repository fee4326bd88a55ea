"""A script's choice of torch's default dtype and device changes nothing of its training."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from team import Team
from torch import nn
from twins import batch, loss, make_step, net

import tensorwire.torch as tw

NAMES_DEVICE = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip
NAMES_DTYPE = NAMES_DEVICE - {"arange", "randint", "randperm"}


def test_every_new_tensor_names_its_dtype_and_device() -> None:
    """Otherwise a script's default decides, which is float64 in scientific ones."""
    found = []
    for path in sorted(Path(tw.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) != "torch":
                continue
            missing = {
                kind
                for kind, names in (("device", NAMES_DEVICE), ("dtype", NAMES_DTYPE))
                if node.func.attr in names and kind not in {each.arg for each in node.keywords}
            }
            if missing and "_DeviceBytes" not in ast.unparse(node):  # which has its dtype
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)} lacks {missing}")
    assert not found


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def tables() -> nn.Module:
    torch.manual_seed(3)
    return nn.Embedding(9, 4, sparse=True)


def training(job: tw.Job, dtype: torch.dtype, device: str, path: str) -> list[Any]:
    """Every way in which tensors are made: scaler, clipping, averages, tables, checkpoints."""
    model, table, rows = net(torch.float32), tables(), torch.arange(5)
    x = batch(0, job.rank).float()
    data = torch.arange(8.0).view(-1, 1)
    model.append(nn.BatchNorm1d(3))
    with defaults(dtype, device):
        opt = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model, ema=0.9)
        other = tw.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table)
        scaler, norms = tw.GradScaler(), []
        for _ in range(3):
            scaler.scale(loss(model, x)).backward()
            scaler.unscale_(opt)
            norms.append(tw.clip_grad_norm_(opt, 1.0))
            scaler.step(opt)
            scaler.update()
            table(rows).sum().backward()
            other.step()
            opt.zero_grad()
            other.zero_grad()
        state = opt.state_dict()["state"][0]
        job.track(model=model, optimizer=opt, table=table, other=other)
        job.save(f"{path}-{job.rank}", wait=True)
        job.load(f"{path}-{job.rank}")
        mean = job.mean({"a": torch.ones(2, device="cpu"), "b": 2.0})
        assert all(norm.dtype == torch.float32 and norm.device.type == "cpu" for norm in norms)
        averages = opt.ema_state_dict()
        if device == "cpu":  # torch's own loader knows no other default without an accelerator
            list(job.loader(data, batch_size=2, shuffle=True))  # type: ignore[arg-type]
    weights = [p.detach() for p in (*model.parameters(), *table.parameters())]
    numbers = [*map(float, norms), float(mean["a"].sum()), mean["b"], float(state["step"])]
    return [numbers, *(each.tolist() for each in (*weights, *averages.values()))]


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two"])
def test_a_default_dtype_and_device_of_the_script_changes_nothing(
    team: Team, workers: int, tmp_path: Path
) -> None:
    """Named for a bug: with a default of float64 `tw.GradScaler` ended with torch's error."""
    path = str(tmp_path / "saved")
    expected = team.run(training, torch.float32, "cpu", path, workers=workers)
    assert team.run(training, torch.float64, "cpu", path, workers=workers) == expected
    assert team.run(training, torch.bfloat16, "meta", path, workers=workers) == expected


def counting(job: tw.Job) -> float:
    """The count of steps in the state: 257 is no number of bfloat16."""
    model = nn.Linear(1, 1)
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    for _ in range(257):
        make_step(opt, model(torch.ones(1, 1)).sum())
    with defaults(torch.bfloat16, "cpu"):
        return float(opt.state_dict()["state"][0]["step"])


def test_a_narrow_default_does_not_round_the_count_of_steps(team: Team) -> None:
    assert team.alone(counting) == 257


def with_doubles(job: tw.Job, name: str) -> bool:
    """Tells whether an optimizer with state in the default dtype makes torch's bits."""
    with defaults(torch.float64, "cpu"):
        model, twin = net(), net()
        cls = getattr(torch.optim, name)
        opt = tw.DistributedOptimizer(cls(model.parameters()), model)
        plain = cls(twin.parameters())
        for step in range(4):
            for one, its in ((model, opt), (twin, plain)):
                make_step(its, loss(one, batch(step, 0)))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_servers_have_the_default_dtype_of_the_workers(team: Team, name: str) -> None:
    """Named for a bug: the state of these was float32 there and float64 in a single process."""
    assert team.alone(with_doubles, name)
    assert team.run(with_doubles, name) == [True, True]
