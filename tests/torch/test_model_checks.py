"""The checks of a model, and their messages."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tensorwire.torch.model_checks import check_model

TOLD = """
import torch, tensorwire.torch as tw
from torch import nn

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("never", None)
        self.line, self.norm = nn.Linear(3, 3), nn.SyncBatchNorm(3)
    def forward(self, x):
        if not self.empty.numel():
            self.empty = x.detach().mean(0)
        return self.norm.forward(self.line(x)) if False else self.line(x)

job = tw.init()
model = Late()
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(2):
    for slice in range(job.slices):
        opt.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        opt.step()
"""
AGAIN = """
import tensorwire.torch as tw
tw.init().close()
tw.init()
"""


def test_what_shares_no_memory_is_right() -> None:
    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    flat = torch.arange(24.0)
    parts = nn.ParameterList([nn.Parameter(flat[:12]), nn.Parameter(flat[12:].view(3, 4))])
    comb = nn.ParameterList([nn.Parameter(flat[::2]), nn.Parameter(flat[1::2])])
    norm = nn.BatchNorm1d(3)
    shown = nn.Module()
    shown.register_buffer("a", flat)
    shown.register_buffer("b", flat[2:])
    nothing = nn.ParameterList([nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 3))])
    with torch.device("meta"):
        meta = nn.Linear(3, 3)
    for model in (tied, parts, comb, norm, shown, nothing, meta, nn.LSTM(4, 5, 2)):
        check_model(model)


@pytest.mark.slow
def test_what_is_told() -> None:
    """Once each, and only where there are several slices."""
    for slices in (1, 2):
        program = TOLD.replace("init()\n", f"init(slices={slices})\n")
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        for line in ("SyncBatchNorm takes its mean", "buffer 'empty' had no elements"):
            assert done.stderr.count(line) == slices - 1, done.stderr
        assert "never" not in done.stderr


def test_a_job_that_was_left_cannot_be_joined_again() -> None:
    """Named for a bug: it said that the servers could not be reached."""
    command = [sys.executable, "-m", "tensorwire", "run", "--workers", "1", "--full-tracebacks"]
    done = subprocess.run(
        [*command, "/dev/stdin"], input=AGAIN, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1, done.stderr
    assert "this process has left its job, which cannot be joined again" in done.stderr
