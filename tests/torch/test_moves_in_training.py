"""Shares move from server to server while models train: the job ends with the same bits.

tests/launch/test_moves.py moves them at every place, without torch.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Between clip_grad_norm_() and step() the averaged rows of a table are in a server's own memory.
SCRIPT = """
import sys, hashlib, pathlib, time, torch, tensorwire.torch as tw
from torch import nn

job = tw.init(seed=3)
torch.manual_seed(0)
folder = pathlib.Path(sys.argv[1])
table = nn.EmbeddingBag(5000, 16, sparse=True)
model = nn.Sequential(table, nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 5))
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.0), model)
job.keep(model=model, opt=opt)
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


WAIT_S = 8.0
"""So long nothing must move; new servers need a part of it until they could."""


@pytest.mark.slow
def test_tables_do_not_move_while_a_server_alone_has_their_average(tmp_path: Path) -> None:
    one, other = tmp_path / "undisturbed", tmp_path / "moved"
    for folder in (one, other):
        folder.mkdir(mode=0o700)
    (one / "go on").touch()
    expected, _ = digest(start(one))
    job = start(other, "--shares", "3")
    try:
        deadline = time.monotonic() + 60
        while not (other / "averaged").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        asking = run(other, "scale", "--servers", "3")
        assert asking.stdout is not None
        assert "server 1 (pid" in asking.stdout.readline()
        time.sleep(WAIT_S)
        assert asking.poll() is None
        (other / "go on").touch()
        answer, _ = asking.communicate(timeout=60)
        assert "3 servers, 2 shares moved" in answer
        found, said = digest(job)
    finally:
        job.kill()
    assert found == expected
    assert said.count("goes from server") == 2
    assert (other / "saved").read_bytes() == (one / "saved").read_bytes()
    assert json.loads((other / "report.json").read_text())["server_takeovers_s"]
