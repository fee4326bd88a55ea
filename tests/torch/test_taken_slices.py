"""Workers are killed and not started again: others compute their slices, with the same bits.

Or they cannot, and the job ends with the reason.
"""

import re
from pathlib import Path

import pytest
from programs import run_job

from tensorwire.phases_of_modes import STANDING
from tensorwire.transitions import CHANGING, TAKING, rows_of

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
job.track(model=model, other=other, opt=opt, second=second, scheduler=scheduler, scaler=scaler)
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
        other[2].bias += torch.rand(5, generator=job.generator(0))
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
    options = options or "--workers 3 --servers 2"
    if "--on-death" not in options:
        options += " --on-death takeover"
    return run_job(folder, script, *arguments, options=options, fail=fail, code=code)


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
    """Returns the result of a job in which no worker is killed."""
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
    # Two workers and a server in the same instant, and a server later.
    "worker-2:commit.begun:10:kill,worker-1:commit.begun:10:kill,"
    "server-0:version.gathered:9:kill,server-1:version.told:25:kill",
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
    """A row of a worker in a job without replacements is tried here, by a kill after it."""
    tried = {place for line in KILLS for place in re.findall(r"worker-\d:([a-z.]+):", line)}
    # Notes are for a process in the place of a worker.
    noted = {"position.noted", "gradients.noted", "commit.noted", "answer.noted", "result.noted"}
    noted |= {"commit.repeated", "version.reached"}
    noted |= {row.name for row in STANDING.rows}  # of other modes, which refuse it
    noted |= {row.name for row in CHANGING.rows}  # tests/torch/test_elastic.py
    assert tried | noted == set(rows_of("worker"))
    assert {row.name for row in TAKING.rows} <= tried


LOOP = """
import hashlib, os, signal, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
own_rank = job.rank

def die(rank):
    if own_rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)

model = nn.Linear(20, 5)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
x = torch.randn(160, 20, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
loader = job.loader(data, 8, shuffle=True)
{before}
for epoch in job.epochs(2):
    for number, (a, b) in enumerate(loader):
        opt.zero_grad()
        F.cross_entropy(model(a), b).backward()
        {inside}
        if epoch == 1 and number == 3:
            {here}
        opt.step()
        {after}
    {behind}
print("digest", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""
PARTS = {"before": "", "inside": "", "here": "die(1)", "after": "", "behind": ""}
SECOND = (
    "second = nn.Linear(20, 5); "
    "other = tw.DistributedOptimizer(torch.optim.SGD(second.parameters(), 0.1), second)"
)

# What a script does, the exit code, and what is said.
REFUSED = {
    "a scheduler for each batch": (
        {
            "before": "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)",
            "after": "scheduler.step()",
        },
        1,
        "Step a scheduler once per epoch, or after the last slice of a step: 'if job.step_compl",
    ),
    "a loop that is left while a batch is due": (
        {"after": "if (epoch, number) == (1, 3): break"},
        1,
        "the script ends while slice 1 of this step is due",
    ),
    "several optimizers in a batch": (
        {
            "before": SECOND,
            "after": "other.zero_grad(); second(a).square().mean().backward(); other.step()",
        },
        137,
        "takes over its slices: several optimizers make steps with one batch",
    ),
    "batches of another loader": (
        {"before": "loader = list(torch.utils.data.DataLoader(data, 8))"},
        137,
        "takes over its slices: it makes steps with batches that no job.loader has given",
    ),
    "a worker that dies before the epochs": (
        {"before": "die(1)"},
        137,
        "no other worker takes over its slices: it had not come to job.epochs",
    ),
    "worker 0 in an edit": (
        {"here": "pass", "behind": "with tw.edit(model): die(0)"},
        1,
        "worker 0 was killed inside edit(), load() or another call in which its values become",
    ),
    "worker 0 while it loads states": (
        {
            "here": "pass",
            "behind": "state = opt.state_dict(); "
            "job.local_replicas[0].store.set_counts = lambda counts: die(0); "
            "opt.load_state_dict(state)",
        },
        1,
        "worker 0 was killed inside load_state_dict() or load(), and what it has written of the",
    ),
    "an optimizer that is made afterwards": (
        {"behind": SECOND},
        1,
        "no optimizer can be made or get other groups any more",
    ),
    "workers that die one after the other": (
        {"after": "die(0) if (epoch, number) == (1, 5) else None"},
        137,
        "was killed by SIGKILL and no worker is left to go on for it",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_over(tmp_path: Path, what: str) -> None:
    parts, code, text = REFUSED[what]
    script = LOOP.format(**{**PARTS, **parts})
    _, said = run(tmp_path / "job", script, "", options="--workers 2 --servers 1", code=code)
    assert text in said, said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tables_and_slices(tmp_path: Path) -> None:
    """Several slices per worker, sparse gradients, and steps of batches that the script counts."""
    table = "model = nn.EmbeddingBag(20, 5, sparse=True)"
    inside = "if number % 2 == 0: continue"
    script = LOOP.replace("model = nn.Linear(20, 5)", table).replace("0.1)", "0.1), max_norm=1.0")
    script = script.replace("0.1), max_norm=1.0, model)", "0.1), model, max_norm=1.0)")
    script = script.replace("model(a)", "model(a.abs().argsort(1)[:, :4])")
    script = script.replace("opt.zero_grad()", "opt.zero_grad() if number % 2 == 0 else None")
    options = "--workers 2 --servers 2 --slices 4"
    parts = {**PARTS, "inside": inside}
    whole, _ = run(tmp_path / "a", script.format(**{**parts, "here": "pass"}), "", options=options)
    assert len(whole) == 1
    digests, said = run(tmp_path / "b", script.format(**parts), "", options=options)
    assert "worker 0 computes its slices from now on" in said
    assert digests == whole


@pytest.mark.slow
def test_only_a_durable_job(tmp_path: Path) -> None:
    for options, text in (
        ("--workers 2:2 --on-death end", "leave it out"),
        ("--workers 2 --transports tcp", "add shm, or let workers be restarted"),
        ("--workers 2 --on-death takeover:0", "1 or more are needed, or let workers be restarted"),
        ("--workers 1", "start several, or name more: --workers 1:MAX"),
    ):
        _, said = run(tmp_path / options, "", "", options=options, code=2)
        assert "no worker can take over the slices" in said
        assert text in " ".join(said.replace("│", "").split())
