"""A server is killed while models train: the job ends with the same bits.

tests/launch/test_takeover.py kills servers at every place, without torch.
"""

import json
from pathlib import Path

import pytest
from programs import run_job

SCRIPT = """
import sys, hashlib, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 5))
other = nn.Linear(20, 5)
opt = tw.DistributedOptimizer(torch.optim.NAdam(model.parameters()), model, ema=0.9)
second = tw.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), other)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
job.track(model=model, other=other, opt=opt, second=second, scheduler=scheduler)
generator = torch.Generator().manual_seed(1)
x = torch.randn(320, 20, generator=generator)
loader = job.loader(torch.utils.data.TensorDataset(x, x[:, :5].argmax(1)), 8, shuffle=True)
values = []
for epoch in job.epochs(3):
    for number, (a, b) in enumerate(loader, loader.first_batch):
        F.cross_entropy(model(a), b).backward()
        F.cross_entropy(other(a), b).backward()
        if number % 3 == 0:
            tw.clip_grad_norm_(opt, 0.5)
        opt.step(), second.step(), opt.zero_grad(), second.zero_grad(), scheduler.step()
    values.append(job.mean(float(number)))
    if epoch == 1:
        second.close()
        second = tw.DistributedOptimizer(torch.optim.Adam(other.parameters()), other)
        job.track(second=second)
if job.rank == 0:
    job.save(sys.argv[1])
    job.report(sys.argv[2])
state = [*model.state_dict().values(), *other.state_dict().values(), *opt.ema_state_dict().values()]
content = b"".join(each.numpy().tobytes() for each in state) + repr(values).encode()
print("digest", hashlib.sha256(content).hexdigest())
"""


def run(folder: Path, fail: str, *options: str) -> tuple[set[str], str]:
    files = str(folder / "checkpoint"), str(folder / "report.json")
    told = " ".join(("--workers 2 --servers 2", *options))
    return run_job(folder, SCRIPT, *files, options=told, fail=fail)


@pytest.mark.slow
def test_a_job_goes_on(tmp_path: Path) -> None:
    whole, said = run(tmp_path / "undisturbed", "", "--on-death=end")
    assert len(whole) == 1
    folder = tmp_path / "disturbed"
    fail = "server-0:cell.changed:9:kill,server-1:version.published:20:kill"
    digests, said = run(folder, fail)  # durable is the default
    assert said.count("takes its place (restart 1)") == 2
    assert digests == whole
    report = json.loads((folder / "report.json").read_text())
    assert len(report["server_takeovers_s"]) == 2
    assert report["worker_returns_s"] == []
    assert 0 < report["server_notes_s"] < report["server_work_s"]
    assert report["bytes_of_notes"] > 2 * 4 * 20 * 300
    saved = tmp_path / "undisturbed/checkpoint"
    assert (folder / "checkpoint").read_bytes() == saved.read_bytes()


@pytest.mark.slow
def test_a_worker_that_was_replaced_reports_all(tmp_path: Path) -> None:
    fail = "server-0:cell.changed:9:kill,worker-0:position.noted:16:kill"
    digests, said = run(tmp_path / "job", fail)
    assert len(digests) == 1
    assert said.count("takes its place (restart 1)") == 1
    assert said.count("is started again as pid ") == 1
    report = json.loads((tmp_path / "job/report.json").read_text())
    assert len(report["server_takeovers_s"]) == 1
    assert len(report["worker_returns_s"]) == 1
    assert 0 < report["worker_returns_s"][0] < 90
