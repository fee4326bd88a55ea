"""The memory that a job needs is the memory that its steps need: no more while it begins.

Measured from outside, in real processes: the private memory of each, and the shared memory of all,
once.
"""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from scripts import digest
from team import Team
from torch import nn

import tensorwire.torch as tw
from tensorwire.torch.replica import residency

MOST = 1.15
"""The most memory before, as a multiple of the memory of later steps."""

LATER = 10
STEPS = 15

# Some 33 million parameters, so that the interpreters weigh less.
SCRIPT = f"""
import sys
import torch
from torch import nn
import tensorwire.torch as tw

job = tw.init()
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
opt = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
for step in range({STEPS}):
    x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(2 * step + job.rank))
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if job.rank == 0:
        with open(sys.argv[1], "a") as steps:
            steps.write(".")
"""


def processes(root: int) -> list[int]:
    """A process and all that descend from it."""
    found, parents = [root], [root]
    while parents:
        children: list[int] = []
        for process in parents:
            try:
                tasks = os.listdir(f"/proc/{process}/task")
                for task in tasks:
                    text = Path(f"/proc/{process}/task/{task}/children").read_text()
                    children += map(int, text.split())
            except OSError:
                continue  # it has ended
        found += children
        parents = children
    return found


def memory(root: int) -> int:
    """Bytes that a process and its descendants have now: their own, and shared memory once."""
    own, shared = 0, {}
    for process in processes(root):
        try:
            status = Path(f"/proc/{process}/status").read_text()
            if anonymous := re.search(r"RssAnon:\s+(\d+) kB", status):
                own += int(anonymous[1]) << 10
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                if os.readlink(descriptor).startswith("/memfd:tensorwire"):
                    about = descriptor.stat()
                    shared[about.st_ino] = about.st_blocks * 512
        except OSError:
            continue  # it has ended, or the descriptor is closed
    return own + sum(shared.values())


@pytest.mark.slow
def test_a_job_needs_no_more_when_it_begins(tmp_path: Path) -> None:
    """Values, the first gradients and state come into being without second copies."""
    script, steps = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(textwrap.dedent(SCRIPT))
    steps.touch()
    # A worker that has to compile the allocator needs memory for the compiler.
    load = "from tensorwire.torch.allocator.library import load; load()"
    subprocess.run([sys.executable, "-c", load], check=True)
    command = [sys.executable, "-m", "tensorwire", "run", "-w", "2"]
    job = subprocess.Popen(
        [*command, str(script), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    begin = later = 0
    try:
        while True:
            done, now = steps.stat().st_size, memory(job.pid)
            if done < LATER:
                begin = max(begin, now)
            else:
                later = max(later, now)
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, _ = job.communicate(timeout=0.01)
                break
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0, said
    assert later > 400 << 20, "the later steps were not seen"
    assert begin <= MOST * later, f"{begin >> 20} MiB, later {later >> 20} MiB"


def moved_in_parts(job: tw.Job) -> tuple[str, str, int]:
    """A small model moves as a large one does; the workers' own values differ."""
    torch.manual_seed(job.rank)
    model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 20))
    model[1].running_mean.uniform_()
    model[2].weight.requires_grad_(False)
    mine = digest(model)
    whole, residency._PART_BYTES = residency._PART_BYTES, 1000
    try:
        opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    finally:
        residency._PART_BYTES = whole
    version = opt._tensorwire.store.version
    found = digest(model)
    model(torch.ones(4, 30)).square().mean().backward()
    opt.step()  # nothing was changed meanwhile
    return mine, found, version


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_moves_in_parts(team: Team, workers: int) -> None:
    (first, *_), *_ = found = team.run(moved_in_parts, workers=workers)
    for _, now, version in found:
        assert now == first
        assert version > 3, "it moved at once"
