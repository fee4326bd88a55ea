"""A worker is killed while models train: another process takes its place, with the same bits.

Or it cannot, and the job ends with the reason.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_job

from tensorwire.memory import cores
from tensorwire.phases_of_modes import STANDING
from tensorwire.transitions import CHANGING, TAKING, rows_of

SCRIPT = """
import os, sys, hashlib, random, torch, torch.nn.functional as F, tensorwire.torch as tw
import numpy as np
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0), random.seed(job.rank), np.random.seed(job.rank)
model = nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.Dropout(0.2), nn.Linear(300, 5))
opt = tw.DistributedOptimizer(torch.optim.NAdam(model.parameters()), model, ema=0.9)
other = nn.Linear(20, 5)
second = tw.DistributedOptimizer(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), other)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)
scaler, seen = tw.GradScaler(init_scale=64.0), {"samples": 0, "best": -1.0}
job.track(model=model, other=other, opt=opt, second=second, scheduler=scheduler, scaler=scaler)
job.track(seen=seen)
if os.path.exists(sys.argv[1]):  # as when it is started again by hand; here only by a successor
    job.load(sys.argv[1])
x = torch.randn(320, 20, generator=torch.Generator().manual_seed(1))
x += 0.01 * job.sum([1.0])[0]
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
loader = job.loader(data, 8, shuffle=True, accumulate=2)
for epoch in job.epochs(2):
    again = job.loader(data, 16)
    scale = job.mean(float(epoch + 1))
    for number, (a, b) in enumerate(loader, loader.first_batch):
        a = a + 0.01 * random.random() + 0.01 * np.random.rand()
        last = number % 2 == 1
        with opt.accumulate():
            scaler.scale(F.cross_entropy(model(a), b) / scale).backward()
        if last:
            if number % 3 == 0:
                scaler.unscale_(opt)
                tw.clip_grad_norm_(opt, 0.5)
            scaler.step(opt), scaler.update(), opt.zero_grad(), scheduler.step()
        seen["samples"] += len(a)
    for a, b in again:
        F.cross_entropy(other(a), b).backward()
        second.step(), second.zero_grad()
    with tw.edit(other):
        if epoch == 0:
            with torch.no_grad():
                other.bias += 0.5
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == data.tensors[1]).float().mean()
    model.train()
    seen["best"] = max(seen["best"], job.mean(float(right)))
    if job.rank == 0:
        job.save(sys.argv[1])
state = [*model.state_dict().values(), *other.state_dict().values(), *opt.ema_state_dict().values()]
content = b"".join(each.numpy().tobytes() for each in state)
content += repr((seen, opt.param_groups[0]["lr"], scaler.state_dict())).encode()
print("digest", hashlib.sha256(content).hexdigest())
job.barrier()
"""


def run(folder: Path, script: str, fail: str, *options: str, code: int = 0) -> tuple[set[str], str]:
    """The digests of all workers, and all that was printed."""
    workers = () if "--workers" in options else ("--workers", "2")
    told = " ".join(("--on-death=restart", *workers, *options))
    checkpoint = str(folder / "checkpoint")
    return run_job(folder, script, checkpoint, options=told, fail=fail, code=code)


def run_killed(folder: Path, fail: str, *options: str) -> tuple[set[str], bytes]:
    digests, said = run(folder, SCRIPT, fail, *options)
    if fail:
        for each in fail.split(","):
            rank = each.partition(":")[0].replace("-", " ")
            assert f"{rank} (pid" in said, said
        assert said.count("(restart 1)") == fail.count(":kill"), said
    return digests, (folder / "checkpoint").read_bytes()


# At what occurrences a place is tried.
TIMES = {
    "part.sent": (2, 6),
    "answer.come": (1, 4),
    "answer.noted": (1, 5),
    "position.noted": (1, 14, 2, 26),
    "gradients.sent": (1, 13),
    "commit.noted": (1, 14, 6, 20),
    "commit.begun": (3, 15),
    "commit.sent": (2, 21),
    "result.come": (1, 14),
    "result.noted": (3, 15),
}
# Worker 0 and its successors take turns at these, each at its first and at a later time.
SNAPSHOTS = ("snapshot.asked:1", "snapshot.held:1", "snapshot.asked:3", "snapshot.held:2")


def kills() -> list[str]:
    """One job per line: a worker is killed at one time, and the other one at the next."""
    lines = []
    for number, (place, times) in enumerate(TIMES.items()):
        ranks = (number % 2, 1 - number % 2)
        each = [
            f"worker-{rank}:{place}:{n}:kill" for rank, n in zip(ranks * 3, times, strict=False)
        ]
        lines += [",".join(each[at : at + 2]) for at in range(0, len(each), 2)]
    return lines


# A process that has another one's place: what it does first.
SUCCESSORS = ["worker-1:commit.sent:7:kill,worker-1+1:position.noted:1:kill"]
# A later one of the place does it again.
SUCCESSORS += [
    f"worker-0:commit.noted:6:kill,worker-0+1:{first}:1:kill,worker-0+2:{then}:1:kill"
    for first, then in (
        ("commit.repeated", "version.reached"),
        ("version.reached", "commit.repeated"),
    )
]
SUCCESSORS += [
    ",".join(f"worker-0{f'+{n}' if n else ''}:{each}:kill" for n, each in enumerate(SNAPSHOTS))
]


def test_every_place_is_tried() -> None:
    """A row that is added to the protocol is tried here, at its first and at a later time."""
    apart = {"commit.repeated", "version.reached", "gradients.noted"}
    apart |= {each.partition(":")[0] for each in SNAPSHOTS}
    apart |= {row.name for row in TAKING.rows}  # tests/torch/test_taken_slices.py
    apart |= {row.name for row in CHANGING.rows}  # tests/torch/test_elastic.py
    apart |= {row.name for row in STANDING.rows}  # in other modes: test_paced_takeover.py
    assert TIMES.keys() | apart == set(rows_of("worker"))
    assert all(len(set(times)) > 1 for times in TIMES.values())
    assert sum(line.count(":kill") for line in kills()) == sum(map(len, TIMES.values()))


@pytest.mark.slow
@pytest.mark.timeout(240)  # five processes of one place import torch, one after the other
@pytest.mark.parametrize("fail", SUCCESSORS)
def test_successors_are_killed(tmp_path: Path, whole: tuple[set[str], bytes], fail: str) -> None:
    digests, said = run(tmp_path / "job", SCRIPT, fail, "--servers", "2")
    assert f"(restart {fail.count(',') + 1})" in said, said
    assert (digests, (tmp_path / "job/checkpoint").read_bytes()) == whole


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], bytes]:
    """The result where nothing is killed."""
    found = run_killed(tmp_path_factory.mktemp("undisturbed") / "job", "")
    assert len(found[0]) == 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fail", kills())
def test_killed_at_a_place(tmp_path: Path, whole: tuple[set[str], bytes], fail: str) -> None:
    servers = str(1 + len(fail) % 2)
    assert run_killed(tmp_path / "job", fail, "--servers", servers) == whole


LOOP = """
import os, random, signal, sys, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
first = not os.path.exists(sys.argv[1])
model = nn.Linear(20, 5)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
x = torch.randn(160, 20)
loader = job.loader(torch.utils.data.TensorDataset(x, x[:, :5].argmax(1)), 8, shuffle=True)

def die():
    if job.rank == job.size - 1 and first:
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

{before}
for epoch in job.epochs(2):
    for number, (a, b) in enumerate(loader{first_batch}):
        F.cross_entropy(model(a), b).backward()
        {inside}
        if epoch == 1 and number == 3:
            die()
        opt.step()
        opt.zero_grad()
print("digest", model.weight.sum().item().hex().replace("-", "m"))
job.barrier()
"""
PARTS = {"before": "", "first_batch": "", "inside": ""}


@pytest.mark.slow
def test_a_worker_that_is_killed_in_its_script(tmp_path: Path) -> None:
    digests, said = run(tmp_path / "job", LOOP.format(**PARTS), "")
    assert len(digests) == 1
    assert "worker 1, in a new process, goes on in epoch 2" in said
    assert (
        digests == run(tmp_path / "other", LOOP.format(**PARTS).replace("die()\n", "pass\n"), "")[0]
    )


@pytest.mark.slow
def test_a_worker_that_is_alone_and_counts_batches_anew(tmp_path: Path) -> None:
    """Its norm was asked for, and is not when the batch is computed again."""
    inside = {"inside": "tw.clip_grad_norm_(opt, 1.0) if number % 2 == 1 else None"}
    script, options = LOOP.format(**PARTS | inside), ("--workers", "1", "--servers", "1")
    _, said = run(tmp_path / "job", script, "", *options, code=1)
    assert "does other things" in said
    counted = LOOP.format(**PARTS | inside | {"first_batch": ", loader.first_batch"})
    assert len(run(tmp_path / "other", counted, "", *options)[0]) == 1


@pytest.mark.slow
def test_an_epoch_that_begins_with_a_sum_and_an_edit(tmp_path: Path) -> None:
    """Named for a bug: in the second epoch they were counted from the first one on."""
    head = "for epoch in job.epochs(2):\n"
    edit = "    with tw.edit(model): model.bias.data += job.mean(1.0 + epoch)\n"
    script = LOOP.format(**PARTS).replace(head, head + edit)
    digests, said = run(tmp_path / "job", script, "")
    assert "worker 1, in a new process, goes on in epoch 2" in said
    assert digests == run(tmp_path / "other", script.replace("die()\n", "pass\n"), "")[0]
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            {"before": "torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)"},
            "does not track a learning rate scheduler: job.track",
        ),
        (
            {"before": "big = [torch.zeros(1 << 20)]; job.track(big=big)"},
            "bytes, too many to be noted with each step",
        ),
        (
            {"before": "job.track(many=[0] * random.Random().randrange(5))"},
            None,  # what is kept is filled with what it was
        ),
        (
            {"before": "job.track(**{str(os.getpid()): {}})"},
            "named other objects to job.track before job.epochs",
        ),
        ({"inside": "job.sum([0.0]) if number % 2 == 1 else None"}, "does other things"),
        (
            {"before": "F.cross_entropy(model(x), x[:, :5].argmax(1)).backward(); opt.step()"},
            "makes steps outside of job.epochs",
        ),
    ],
)
def test_a_script_that_cannot_be_run_again(
    tmp_path: Path, parts: dict[str, str], reason: str | None
) -> None:
    code = 0 if reason is None else 1
    _, said = run(tmp_path / "job", LOOP.format(**{**PARTS, **parts}), "", code=code)
    assert reason is None or reason in said, said


GAN = """
import hashlib, sys, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
made = nn.Linear(8, 20)
judge = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))
table = nn.Embedding(50, 8, sparse=True)
first = tw.DistributedOptimizer(torch.optim.Adam(made.parameters()), made)
second = tw.DistributedOptimizer(torch.optim.RMSprop(judge.parameters()), judge, max_norm=1.0)
third = tw.DistributedOptimizer(torch.optim.SparseAdam(table.parameters()), table)
x = torch.randn(160, 20, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, torch.arange(160) % 50)
options = {"num_workers": 2} if len(sys.argv) > 2 else {}
for epoch in job.epochs(2):
    for a, index in job.loader(data, 8, shuffle=True, **options):
        fake = made(table(index).detach())
        second.zero_grad()
        (judge(fake.detach()).mean() - judge(a).mean()).backward()
        second.step()
        first.zero_grad()
        (-judge(fake).mean()).backward()
        first.step()
        third.zero_grad()
        made(table(index)).square().mean().backward()
        third.step()
        job.mean(1.0)
state = [each for model in (made, judge, table) for each in model.parameters()]
# The statistics of judge have been changed since its last step, by each worker's own batch.
state += list(judge.buffers()) if job.rank == 1 else []
content = b"".join(each.detach().numpy().tobytes() for each in state)
print("digest", hashlib.sha256(content).hexdigest())
job.barrier()
if job.rank == 0:
    open(sys.argv[1], "w").close()
"""


@pytest.mark.slow
def test_optimizers_in_turn(tmp_path: Path) -> None:
    options = ("--slices", "4")
    whole, _ = run(tmp_path / "undisturbed", GAN, "", *options)
    assert len(whole) == 2
    for number, fail in enumerate(
        [
            "worker-1:commit.sent:17:kill",
            "worker-0:commit.noted:22:kill",
            "worker-1:result.noted:9:kill",
            "worker-0:part.sent:6:kill",
        ]
    ):
        digests, said = run(tmp_path / str(number), GAN, fail, *options)
        assert said.count("is started again as pid ") == 1, said
        assert digests == whole, fail


SEVERAL = """
import hashlib, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(20, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 100))
head = nn.Sequential(nn.BatchNorm1d(100), nn.Linear(100, 200), nn.Linear(200, 5))
last = nn.Linear(100, 5)
opts = [
    tw.DistributedOptimizer(torch.optim.Adam(body.parameters(), 1e-3), body),
    tw.DistributedOptimizer(torch.optim.SGD(head.parameters(), 0.1, momentum=0.9), head),
    tw.DistributedOptimizer(torch.optim.SGD(last.parameters(), 0.1), last),
]
job.track(body=body)
x = torch.randn(320, 20, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :5].argmax(1))
for epoch in job.epochs(2):
    for a, b in job.loader(data, 8, shuffle=True):
        for opt in opts:
            opt.zero_grad()
        hidden = body(a)
        (F.cross_entropy(head(hidden), b) + F.cross_entropy(last(hidden), b)).backward()
        opts[0].step()
        tw.clip_grad_norm_(opts[2], 0.5)
        opts[1].step()
        opts[2].step()
state = [each for model in (body, head, last) for each in model.state_dict().values()]
content = b"".join(each.detach().numpy().tobytes() for each in state)
print("digest", hashlib.sha256(content).hexdigest())
job.barrier()
"""


ACCUMULATED = """
import os, signal, sys, torch, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
first = not os.path.exists(sys.argv[1])
one, two = nn.Linear(20, 5), nn.Linear(20, 5)
opts = [
    tw.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), each) for each in (one, two)
]
loader = job.loader(torch.utils.data.TensorDataset(torch.randn(160, 20)), 8)
for epoch in job.epochs(2):
    for number, (a,) in enumerate(loader, loader.first_batch):
        one(a).sum().backward()
        opts[0].step(), opts[0].zero_grad()
        if number % 2 == 0:
            with opts[1].accumulate():
                two(a).sum().backward()
        else:
            if epoch == 1 and job.rank == 1 and first:
                open(sys.argv[1], "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            two(a).sum().backward()
            opts[1].step(), opts[1].zero_grad()
"""


CHANGED = """
import os, signal, sys, torch, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
first = not os.path.exists(sys.argv[1])
one, two = nn.Linear(20, 300), nn.Linear(300, 5)
opts = [
    tw.DistributedOptimizer(torch.optim.SGD(each.parameters(), 0.1), each) for each in (one, two)
]

def die():
    if epoch == 1 and job.rank == 1 and first:
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

for epoch in job.epochs(2):
    for (a,) in job.loader(torch.utils.data.TensorDataset(torch.randn(160, 20)), 8):
        two(one(a)).sum().backward()
        opts[0].step(), opts[0].zero_grad()
        {between}
        two(one(a).detach()).sum().backward()
        die()
        opts[1].step(), opts[1].zero_grad()
print("digest", two.weight.sum().item().hex().replace("-", "m"))
job.barrier()
"""


@pytest.mark.slow
def test_gradients_that_wait_while_another_optimizer_steps(tmp_path: Path) -> None:
    _, said = run(tmp_path / "job", ACCUMULATED, "", code=1)
    assert "another had gradients that cannot be computed again" in said


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_several_optimizers_of_one_backward(tmp_path: Path) -> None:
    """One has stepped, and the others get the gradients and buffers that the former process had."""
    whole, _ = run(tmp_path / "undisturbed", SEVERAL, "")
    assert len(whole) == 1
    for number, fail in enumerate(
        [
            "worker-1:commit.sent:156:kill",  # the first has stepped
            "worker-0:commit.noted:157:kill",  # and the norm of the third is asked for
            "worker-1:gradients.noted:77:kill",
        ]
    ):
        digests, said = run(tmp_path / str(number), SEVERAL, fail)
        assert said.count("is started again as pid ") == 1, said
        assert digests == whole, fail


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_buffers_that_no_server_has(tmp_path: Path) -> None:
    """A worker that is alone has them for itself, and its last batch is computed twice."""
    options = "--workers", "1", "--servers", "1"
    whole, _ = run(tmp_path / "undisturbed", SEVERAL, "", *options)
    digests, said = run(tmp_path / "job", SEVERAL, "worker-0:commit.sent:316:kill", *options)
    assert said.count("is started again as pid ") == 1, said
    assert digests == whole


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("between", ["opts[1].zero_grad()", ""], ids=["dropped", "added"])
def test_a_further_backward_before_the_other_step(tmp_path: Path, between: str) -> None:
    """The second backward changes noted gradients; dropped ones from before do not count."""
    script = CHANGED.format(between=between or "pass")
    digests, said = run(tmp_path / "job", script, "", code=0 if between else 1)
    if between:
        undisturbed = script.replace("first = not", "first = False and not")
        assert digests == run(tmp_path / "other", undisturbed, "")[0]
    else:
        assert "another had gradients that cannot be computed again" in said


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight processes import torch
def test_under_a_torchrun_each_only_what_died_is_started_again(
    tmp_path: Path, whole: tuple[set[str], bytes]
) -> None:
    """First a worker is killed, later the server; the other worker's torchrun notices nothing."""
    script, checkpoint, path = (tmp_path / name for name in ("script.py", "checkpoint", "job"))
    script.write_text(SCRIPT)
    threads = str(max(1, int(cores()) // 2))  # as tensorwire run deals them
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "TENSORWIRE_SUPERVISOR": str(path)}

    def start(fail: str, *command: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**environment, "TENSORWIRE_FAIL": fail, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    torchrun += ["--monitor-interval=0.1", str(script), str(checkpoint)]
    started = [
        start("worker-1:commit.noted:6:kill", *torchrun, TENSORWIRE_RANK=f"{rank}")
        for rank in (0, 1)
    ]
    serve = ["tensorwire", "serve", "--workers=2", f"--socket={path}"]
    started.append(start("server-0:version.published:30:kill", *serve))
    try:
        first, second, told = (each.communicate(timeout=150)[0] for each in started)
        assert [each.returncode for each in started] == [0, 0, 0], first + second + told
    finally:
        for each in started:
            each.kill()
            each.communicate()
    assert re.search(r"worker 1 \(pid \d+\) has come again \(restart 1\)", told), told
    assert re.search(r"server 0 \(pid \d+\) takes its place \(restart 1\)", told), told
    assert told.count("(restart ") == 2, told
    assert "exitcode: -9" not in first
    assert "exitcode: -9" in second
    digests = set(re.findall(r"digest (\w+)", first + second))
    assert (digests, checkpoint.read_bytes()) == whole


HOLDS = """
import os, signal, sys, threading, torch, torch.nn.functional as F, tensorwire.torch as tw
from tensorwire.torch import checkpoint
from torch import nn

job = tw.init(seed=3)
first = not os.path.exists(sys.argv[1])
model = nn.Linear(20, 5)
opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
job.track(model=model, opt=opt)
x = torch.randn(160, 20)
loader = job.loader(torch.utils.data.TensorDataset(x, x[:, :5].argmax(1)), 8, shuffle=True)
go, write = threading.Event(), checkpoint._write
checkpoint._write = lambda content, file: (go.wait(), write(content, file))

def save():
    for name in "ab":
        job.save(f"{sys.argv[1]}.{name}", wait=False)

for epoch in job.epochs(2):
    for number, (a, b) in enumerate(loader, loader.first_batch):
        F.cross_entropy(model(a), b).backward()
        opt.step(), opt.zero_grad()
        if epoch == 1 and number == 3 and first and job.rank == 1:
            open(sys.argv[1], "w").close()
            save()
            os.kill(os.getpid(), signal.SIGKILL)
if job.rank == 1:
    save()  # as many as there may be, if nobody holds the former process's
    go.set()
print("digest", model.weight.sum().item().hex().replace("-", "m"))
job.barrier()
"""


@pytest.mark.slow
def test_snapshots_of_a_killed_worker_are_freed(tmp_path: Path) -> None:
    digests, said = run(tmp_path / "job", HOLDS, "")
    assert "is started again as pid " in said
    assert len(digests) == 1
    written = [tmp_path / "job" / f"checkpoint.{name}" for name in "ab"]
    assert written[0].read_bytes() == written[1].read_bytes()


LOADING = """
import os, signal, sys, torch, torch.nn.functional as F, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
folder = os.path.dirname(sys.argv[1])
path, first = os.path.join(folder, "old"), not os.path.exists(sys.argv[1])
def die(at):
    if job.rank == job.size - 1 and first and at == "{at}":
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

model = nn.Linear(20, 5)
opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.1), model)
scheduler, best = torch.optim.lr_scheduler.StepLR(opt, 1), {{"accuracy": 0.0}}
job.track(model=model, opt=opt, scheduler=scheduler, best=best)
{load}
job.barrier()
if "{load}":
    assert (job.epoch, best["accuracy"], opt.param_groups[0]["lr"]) == (1, 0.5, 0.1 * 0.1)
if os.path.exists(path) and job.rank == 0 and "{at}":
    os.remove(path)  # as `keep` does
job.barrier()
die("loaded")
x = torch.randn(160, 20, generator=torch.Generator().manual_seed(1))
loader = job.loader(torch.utils.data.TensorDataset(x, x[:, :5].argmax(1)), 8, shuffle=True)
for epoch in job.epochs(3 if "{load}" else 1):
    for number, (a, b) in enumerate(loader):
        F.cross_entropy(model(a), b).backward()
        opt.step()
        opt.zero_grad()
        if epoch == 2 and number == 3:
            die("trained")
    scheduler.step()
    best["accuracy"] += 0.5
if not "{load}":
    job.save(path)
print("digest", model.weight.sum().item().hex().replace("-", "m"), job.epoch)
job.barrier()
"""


def run_loading(folder: Path, saved: bytes, load: str, at: str) -> tuple[set[str], str]:
    """Goes on from a checkpoint; with `at` it is removed then, and the worker killed there."""
    (folder / "old").write_bytes(saved)
    script = LOADING.format(load=load, at=at).replace("(folder, ", "(os.path.dirname(folder), ")
    return run(folder / "job", script, "", "--workers", "1", "--servers", "1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, set[str]]:
    """A checkpoint, and what comes out where a job goes on from it."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "script.py").write_text(LOADING.format(load="", at=""))
    subprocess.run([sys.executable, "script.py", "./none"], cwd=folder, check=True, timeout=60)
    content = (folder / "old").read_bytes()
    return content, run_loading(folder, content, "job.load(path)", "")[0]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["loaded", "trained"])
@pytest.mark.parametrize("load", ["job.load(path)", "if os.path.exists(path): job.load(path)"])
def test_a_checkpoint_that_was_removed_since_it_was_loaded(
    tmp_path: Path, saved: tuple[bytes, set[str]], load: str, at: str
) -> None:
    """Named for a bug: the script, run again, did not find it."""
    digests, said = run_loading(tmp_path, saved[0], load, at)
    assert "(restart 1)" in said
    assert ("does not call job.load again" in said) == load.startswith("if")
    assert digests == saved[1]
