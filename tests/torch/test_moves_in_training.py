"""Shares move from server to server while models train: the job ends with the same bits.

tests/launch/test_moves.py moves them at every place, without torch.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_killed_in_modes

# Between clip_grad_norm_() and step() the averaged rows of a table are in a server's own memory: a
# successor averages them again.
SCRIPT = """
import sys, hashlib, pathlib, time, torch, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
folder = pathlib.Path(sys.argv[1])
table = nn.EmbeddingBag(5000, 16, sparse=True)
model = nn.Sequential(table, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5))
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.0), model)
job.track(model=model, opt=opt)
generator = torch.Generator().manual_seed(1)
x = torch.randint(0, 5000, (240, 6), generator=generator)
loader = job.loader(torch.utils.data.TensorDataset(x, x[:, 0] % 5), 4, shuffle=True)
for epoch in job.epochs(3):
    for number, (a, b) in enumerate(loader, loader.first_batch):
        nn.functional.cross_entropy(model(a), b).backward()
        if number % 4:
            tw.clip_grad_norm_(opt, 0.5)
            if (epoch, number) == (1, 5):
                (folder / "averaged").touch()
                while not (folder / "go on").exists():
                    time.sleep(0.01)
        opt.step(), opt.zero_grad()
if job.rank == 0:
    job.save(folder / "saved")
    job.report(folder / "report.json")
content = b"".join(each.numpy().tobytes() for each in model.state_dict().values())
print("digest", hashlib.sha256(content).hexdigest())
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return run(folder, "run", "--workers", "2", *options, str(script), str(folder))


def run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tensorwire", *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def digest(job: subprocess.Popen[str]) -> tuple[str, str]:
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    digests = re.findall(r"digest (\w+)", said)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    return digests[0], said


@pytest.mark.slow
def test_who_has_averaged_tables_gives_them_away_and_is_killed(tmp_path: Path) -> None:
    one, other = tmp_path / "undisturbed", tmp_path / "moved"
    for folder in (one, other):
        folder.mkdir(mode=0o700)
    (one / "go on").touch()
    expected, _ = digest(start(one))
    job = start(other, "--servers", "1:3")
    try:
        deadline = time.monotonic() + 60
        while not (other / "averaged").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answer, _ = run(other, "scale", "--servers", "3").communicate(timeout=60)
        assert "3 servers, 2 shares moved" in answer
        told = json.loads(run(other, "status", "--json").communicate(timeout=60)[0])
        servers = {each["pid"] for each in told[0]["members"] if each["kind"] == "share"}
        assert len(servers) == 3
        for server in servers:
            os.kill(server, signal.SIGKILL)
        (other / "go on").touch()
        found, said = digest(job)
    finally:
        job.kill()
    assert found == expected
    assert said.count("goes from server") == 2
    assert said.count("was killed by SIGKILL") == 3
    assert (other / "saved").read_bytes() == (one / "saved").read_bytes()
    assert json.loads((other / "report.json").read_text())["server_takeovers_s"]


def moved(folder: Path, script: str, *options: str) -> str:
    """Returns the output of a job whose workers touch `begun`, and end with `moved`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "script.py").write_text(script)
    job = run(folder, "run", *options, str(folder / "script.py"), str(folder))
    try:
        deadline = time.monotonic() + 60
        while not (folder / "begun").exists():
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for count in (3, 1):
            answer, _ = run(folder, "scale", "--servers", str(count)).communicate(timeout=60)
            assert re.search(rf"^{count} servers?, \d shares? moved", answer, re.MULTILINE), answer
        (folder / "moved").touch()
        said, _ = job.communicate(timeout=100)
    finally:
        job.kill()
        job.communicate()
    assert job.returncode == 0, said
    assert said.count("goes from server") == 3
    return said


WAIT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])

def wait(step, last):  # steps are slow until the shares have moved, and the last of these waits
    if step == 3:
        (folder / "begun").touch()
    until = time.monotonic() + 0.3
    while 3 <= step <= last and not (folder / "moved").exists():
        if step < last and time.monotonic() > until:
            break
        time.sleep(0.01)
"""


@pytest.mark.slow
def test_moves_where_each_worker_trains_at_its_own_pace(tmp_path: Path) -> None:
    """Parameters are counters: each sample counts once in each of the two epochs."""
    script = test_killed_in_modes.SCRIPT
    for old, new in (
        ("import sys, random", WAIT + "import random"),
        ('mode = {"mode": "bounded", "staleness": int(sys.argv[2])} if sys.argv[2] else '
         '{"mode": "async"}', ""),
        ("**mode", "mode='bounded', staleness=2"),
        ("random.random() * 0.004)", "random.random() * 0.1)\n        wait(seen['steps'], 20)"),
        ("job.save(sys.argv[1],", "job.save(folder / 'file',"),
    ):  # fmt: skip
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    said = moved(tmp_path, script, "--workers", "2", "--servers", "2:4")
    results = [eval(text) for text in re.findall(r"result (\{.*\})", said)]
    assert [(each["samples"], each["steps"]) for each in results] == [([2.0], [48.0])] * 2


SPLIT = (
    WAIT
    + """
import torch, tensorwire.torch as tw
from torch.distributed.pipelining import SplitPoint
from torch import nn

job = tw.init(pipeline=2, seed=3)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(400, 600), nn.ReLU(), nn.Linear(600, 300))
x = torch.rand(64, 400, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :300])
split = tw.split(
    model, {"2": SplitPoint.BEGINNING}, example=[x[:2]], loss=nn.functional.mse_loss, microbatches=4
)
opt = torch.optim.SGD(split.parameters(), lr=0.1, momentum=0.9)
opt = tw.DistributedOptimizer(opt, split, max_norm=1.0)
job.track(model=split, optimizer=opt)
step = 0
for epoch in job.epochs(4):
    for inputs, targets in job.loader(data, 8, shuffle=True):
        split.step(inputs, target=targets)
        opt.step()
        opt.zero_grad()
        step += 1
        wait(step, 24)
if job.rank == 0:
    job.save(folder / "saved")
"""
)


@pytest.mark.slow
def test_moves_while_a_split_model_trains(tmp_path: Path) -> None:
    one, other = tmp_path / "undisturbed", tmp_path / "moved"
    one.mkdir(mode=0o700)
    (one / "script.py").write_text(SPLIT)
    (one / "moved").touch()
    job = run(one, "run", "--workers", "2", str(one / "script.py"), str(one))
    said, _ = job.communicate(timeout=100)
    assert job.returncode == 0, said
    moved(other, SPLIT, "--workers", "2", "--servers", "2:4")
    assert (other / "saved").read_bytes() == (one / "saved").read_bytes()
