"""Workers are killed and not started again: others compute their slices, with the same bits.

Or they cannot, and the job ends with the reason.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.transitions import TAKING, rows_of

SCRIPT = """
import os, sys, hashlib, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 5))
opt = tw.DistributedOptimizer(
    torch.optim.NAdam(model.parameters()), model, ema=0.9, buffers="average"
)
other = nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))
second = tw.DistributedOptimizer(
    torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), other, max_norm=1.0
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
scaler = tw.GradScaler(init_scale=64.0)
job.keep(model=model, other=other, opt=opt, second=second, scheduler=scheduler, scaler=scaler)
x = torch.randn(312, 20, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
loader = job.loader(data, 8, shuffle=True, accumulate=2, num_workers=int(sys.argv[2]))
for epoch in job.epochs(2):
    again = job.loader(data, 16)
    for number, (a, b) in enumerate(loader):
        with opt.accumulate():
            scaler.scale(F.cross_entropy(model(a), b)).backward()
        if number % 2 == 1:
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt), scaler.update(), opt.zero_grad()
            if job.step_complete:
                scheduler.step()
    steps = 0
    for a, b in again:
        second.zero_grad()
        F.cross_entropy(other(a), b).backward()
        if steps % 3 == 0:
            tw.clip_grad_norm_(second, 0.5)
        second.step()
        steps += job.step_complete
        if steps == 5 and job.step_complete:
            break
    total = job.sum([1.0] * 5000)
    assert len(set(total)) == 1, "its messages are of different workers"
    with tw.edit(other), torch.no_grad():
        other[2].bias += 0.5
    model.eval()
    shard = job.shard(data)
    with torch.no_grad():
        batches = torch.utils.data.DataLoader(shard, 50)
        right = sum(int((model(a).argmax(1) == b).sum()) for a, b in batches)
    model.train()
    accuracy = job.mean(right / len(shard), weight=len(shard))
    if job.rank == 0:
        job.save(sys.argv[1])
job.barrier()
state = [*model.state_dict().values(), *other.state_dict().values(), *opt.ema_state_dict().values()]
state += [each["exp_avg"] for each in opt.state_dict()["state"].values()]
content = b"".join(each.numpy().tobytes() for each in state)
content += repr((opt.param_groups[0]["lr"], scaler.state_dict())).encode()
if job.rank == 0:
    print("accuracy", accuracy)
print("digest", hashlib.sha256(content).hexdigest())
job.barrier()
"""


def run(
    folder: Path, script: str, fail: str, *arguments: str, options: str = "", code: int = 0
) -> tuple[set[str], str]:
    """The digests of all workers, and all that was printed."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "tensorwire", "run", "--no-restart-workers"]
    options = options or "--workers 3 --servers 2"
    done = subprocess.run(
        [*command, *options.split(), str(folder / "script.py"), *arguments],
        env={**os.environ, "TENSORWIRE_FAIL": fail},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return set(re.findall(r"digest (\w+)", done.stdout)), done.stdout


def run_killed(folder: Path, fail: str, readers: str = "0") -> tuple[set[str], set[str], bytes]:
    """The digests, the accuracy, and the checkpoint."""
    digests, said = run(folder, SCRIPT, fail, str(folder / "checkpoint"), readers)
    for number, each in enumerate(re.findall(r"worker-(\d)", fail), 1):
        assert f"worker {each} (pid" in said, said
        assert f"(takeover {number})" in said, said
    accuracy = set(re.findall(r"accuracy (\S+)", said))
    checkpoint, lost = folder / "checkpoint", f"{folder / 'checkpoint'}, may not be there"
    assert said.count(lost) == fail.count(":snapshot."), said
    return digests, accuracy, checkpoint.read_bytes() if checkpoint.exists() else b""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str], bytes]:
    """What comes out where nobody is killed."""
    found = run_killed(tmp_path_factory.mktemp("undisturbed") / "job", "")
    assert len(found[0]) == len(found[1]) == 1
    return found


# In each line two of three workers are killed, one after the other or at once.
KILLS = [
    # Commits of a step whose gradients are in the average, and of the average, at one server.
    "worker-0:commit.begun:4:kill,worker-1:commit.begun:25:kill",
    # Gradients of the last step of a pass; when all wait for the average.
    "worker-2:gradients.sent:13:kill,worker-0:part.sent:17:kill",
    # It has the average; between the messages of a sum.
    "worker-0:result.come:7:kill,worker-1:part.sent:14:kill",
    # At the end of a pass that is left early; the edit is at one server.
    "worker-2:commit.sent:21:kill,worker-0:commit.begun:22:kill",
    # While it saves, who then saves in its place too; the second time nobody is left who would.
    "worker-0:snapshot.asked:1:kill,worker-1:snapshot.held:1:kill",
    # Who takes over is killed when the servers know it,
    "worker-2:commit.begun:9:kill,worker-0:owner.told:1:kill",
    # when it has sent what was missing,
    "worker-0:commit.begun:9:kill,worker-1:commit.forwarded:1:kill",
    # and when the slices are its own.
    "worker-1:answer.come:15:kill,worker-0:slices.adopted:1:kill",
    # Two workers and a server in the same instant.
    "worker-2:commit.begun:10:kill,worker-1:commit.begun:10:kill,server-0:version.gathered:9:kill",
]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fail", KILLS)
def test_killed_at_a_place(
    tmp_path: Path, whole: tuple[set[str], set[str], bytes], fail: str
) -> None:
    readers = "2" if "forwarded" in fail else "0"
    found = run_killed(tmp_path / "job", fail, readers)
    assert found[:2] == whole[:2]
    assert found[2] == (b"" if "snapshot" in fail else whole[2])


def test_every_place_is_tried() -> None:
    """A row that a worker runs where nobody has its place is tried here, by a kill behind it."""
    tried = {place for line in KILLS for place in re.findall(r"worker-\d:([a-z.]+):", line)}
    # Notes are for a process in the place of a worker.
    noted = {"position.noted", "gradients.noted", "commit.noted", "answer.noted", "result.noted"}
    noted |= {"commit.repeated", "version.reached"}
    assert tried | noted == set(rows_of("worker"))
    assert {row.name for row in TAKING.rows} <= tried
