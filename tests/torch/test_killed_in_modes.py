"""Servers and workers are killed while each worker trains at its own pace: each sample counts once.

Parameters are counters: one of each sample, and many of all steps, at two servers.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_job

SCRIPT = """
import sys, random, time, torch, tensorwire.torch as tw
from torch import nn

mode = {"mode": "bounded", "staleness": int(sys.argv[2])} if sys.argv[2] else {"mode": "async"}
job = tw.init(seed=3, **mode)
SAMPLES, EPOCHS = 96, 2

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.samples = nn.Parameter(torch.zeros(SAMPLES))
        self.steps = nn.Parameter(torch.zeros(600_000))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, ids):
        self.norm(ids.float().unsqueeze(1))
        return -self.samples[ids].sum() - self.steps.sum()

model = Counts()
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0, momentum=0.0), model)
seen = {"steps": 0}
job.track(model=model, opt=opt, seen=seen)
data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
loader = job.loader(data, 4, shuffle=True)
for epoch in job.epochs(EPOCHS):
    assert job.mean(1.0) == 1.0
    for number, (ids,) in enumerate(loader, loader.first_batch):
        time.sleep(random.random() * 0.004)
        model(ids).backward()
        opt.step()
        opt.zero_grad()
        seen["steps"] += 1
        assert len(model.steps.unique()) == 1, "of several versions"
        if job.rank == 0 and number % 6 == 1:
            job.save(sys.argv[1], wait=number % 4 == 1)
            opt.state_dict()
with tw.edit(model):
    pass
report = job.report()
print("result", {
    "samples": model.samples.unique().tolist(), "steps": model.steps.unique().tolist(),
    "own": seen["steps"], "clock": report["clock"], "staleness": report["staleness_max"],
    "adopted": sum(report["staleness"].values()),
})
job.barrier()
"""


def run(
    folder: Path, fail: str, staleness: str = "", workers: int = 2, servers: int = 2
) -> tuple[list[dict[str, Any]], str]:
    """Returns the final values of each worker, and all output."""
    options = f"--on-death=restart --workers {workers} --servers {servers}"
    _, said = run_job(folder, SCRIPT, str(folder / "file"), staleness, options=options, fail=fail)
    assert said.count("(restart ") == fail.count(":kill"), said
    results = [eval(text) for text in re.findall(r"result (\{.*\})", said)]
    assert len(results) == workers, said
    for each in results:
        assert each["samples"] == [2.0], "each sample counts once in each epoch"
        assert each["steps"] == [48.0], "each step is applied once"
        assert each["own"] == each["clock"] == each["adopted"] == 48 // workers
        assert not staleness or each["staleness"] <= int(staleness)
    saved = torch.load(folder / "file", weights_only=True)["model"]
    assert saved["steps"].unique().tolist() == [saved["samples"].sum().item() / 4]
    return results, said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fail", "staleness"),
    [
        ("worker-1:commit.sent:7:kill,server-0:event.made:40:kill", "2"),
        ("worker-0:pause.held:2:kill,server-1:event.made:30:kill", ""),
        ("worker-0:snapshot.asked:2:kill,worker-1:position.noted:9:kill", "1"),
    ],
)
def test_each_sample_counts_once(tmp_path: Path, fail: str, staleness: str) -> None:
    run(tmp_path, fail, staleness)
