"""`tw.init(durable=…)`: whether the processes of a job are replaced, as the script says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tensorwire.torch as tw
from tensorwire.membership.world import World
from tensorwire.torch import discovery

TRAIN = """
import os, signal, sys, torch, tensorwire.torch as tw
rank = int(os.environ.get("TENSORWIRE_RANK", 0))
job = tw.init(durable={durable})
model = torch.nn.Linear(4, 2)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
job.track(model=model)
for epoch in job.epochs(2):
    for (x,) in job.loader(torch.utils.data.TensorDataset(torch.ones(8, 4)), 4):
        model(x).sum().backward(), opt.step(), opt.zero_grad()
    if job.rank == 0:
        job.save("checkpoints", keep=2)
    job.barrier()
    if epoch == 1 and rank == 1 and "TENSORWIRE_TERM" not in os.environ:
        {end}
print("trained")
"""


def run(folder: Path, durable: str, *options: str, end: str = "pass") -> "tuple[int, str, str]":
    (folder / "train.py").write_text(TRAIN.format(durable=durable, end=end))
    workers = [] if "--workers" in options else ["-w", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "tensorwire", "run", *workers, *options, "train.py"],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "TENSORWIRE_DURABLE"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_script_may_decline(tmp_path: Path) -> None:
    """A killed worker ends the job, which tells how to go on."""
    end = "os.kill(os.getpid(), signal.SIGKILL)"
    code, _, said = run(tmp_path, "False", "--on-death=restart", end=end)
    assert code == 137, said
    assert said.count("this job does not replace processes that are killed") == 1
    assert "(restart 1)" not in said
    last = said.splitlines()[-1]
    assert re.fullmatch(
        r"tensorwire run: resume from checkpoints/checkpoint-\d+: \S+ -m tensorwire run -w 2 "
        r"--on-death=restart train.py \(the script has to load what it finds there, "
        r"by job.load, if it does not yet\)",
        last,
    ), said


@pytest.mark.slow
def test_its_servers_are_not_replaced_either(tmp_path: Path) -> None:
    end = """
        from tensorwire.jobs.job_file import running_servers
        [os.kill(each.pid, signal.SIGKILL) for each in running_servers()
         if each.address == os.environ["TENSORWIRE_SERVERS"]]
        job.barrier()"""
    code, _, said = run(tmp_path, "False", "--on-death=restart", end=end)
    assert code == 137, said
    assert "(restart 1)" not in said
    assert "server 0 (pid" in said


@pytest.mark.slow
def test_true_and_none_are_what_the_launcher_says(tmp_path: Path) -> None:
    code, out, said = run(tmp_path, "True if rank else None", "--on-death=restart")
    assert code == 0, said
    assert out.count("trained") == 2


@pytest.mark.slow
def test_workers_that_disagree_are_named(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "False if rank else None", "--on-death=restart")
    assert code == 1
    assert "worker 1 says tw.init(durable=False), or transports" in said
    assert "without shm, and worker 0" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--workers 2:4", "started with --workers W:MAX or --on-death takeover"),
        ("--on-death takeover", "started with --workers W:MAX or --on-death takeover"),
        ("--servers 1:2", "started with --servers S:MAX or --rebalance"),
        ("--rebalance", "started with --servers S:MAX or --rebalance"),
    ],
)
@pytest.mark.slow
def test_where_members_come_and_go_no_script_may_decline(
    tmp_path: Path, options: str, why: str
) -> None:
    code, _, said = run(tmp_path, "False", *options.split())
    assert code == 1, said
    assert f"{why}, for which killed processes must be replaced" in said


@pytest.mark.slow
def test_what_cannot_be_durable_is_an_error(tmp_path: Path) -> None:
    code, _, said = run(tmp_path, "True", "--on-death=end")
    assert code == 1
    assert "start it by 'tensorwire run --workers 2 --on-death restart SCRIPT'" in said
    with pytest.raises(
        ValueError, match="start it by 'tensorwire run --workers 1 --on-death restart"
    ):
        tw.init(durable=True)


@pytest.mark.slow
def test_where_nobody_asked_a_script_without_shared_memory_trains_as_before(
    tmp_path: Path,
) -> None:
    code, out, said = run(tmp_path, "None, transports=['tcp']")
    assert code == 0, said
    assert out.count("trained") == 2
    assert "replaced" not in said
    code, _, said = run(tmp_path, "None, transports=['tcp']", "--on-death=restart")
    assert code == 0, said
    assert "are killed: its transports are tcp, and only shared memory outlives a process" in said


@pytest.mark.slow
def test_a_worker_that_the_launchers_process_has_started_trains_as_before(tmp_path: Path) -> None:
    """The worker inherits the variables, and not the descriptors."""
    (tmp_path / "train.py").write_text(TRAIN.format(durable="None", end="pass"))
    (tmp_path / "wrapper.py").write_text(
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, 'train.py']).returncode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tensorwire", "run", "-w", "2", "wrapper.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


EDITED = """
import torch, tensorwire.torch as tw
job = tw.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 400), torch.nn.Linear(400, 400))
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), model)
job.track(model=model)
data = torch.utils.data.TensorDataset(torch.randn(64, 30))
for epoch in job.epochs(1):
    for (x,) in job.loader(data, 8):
        model(x).square().mean().backward()
        opt.synchronize()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        opt.step(), opt.zero_grad()
print("sum", sum(each.double().sum().item() for each in model.parameters()).hex())
"""


@pytest.mark.slow
def test_averages_that_a_script_edits_count(tmp_path: Path) -> None:
    """Named for a bug: a durable server kept them elsewhere, and applied what was not edited."""
    found = []
    for fail, option in [("", "--on-death=end"), ("kill", "--on-death=restart")]:
        (tmp_path / "train.py").write_text(EDITED)
        place = "server-0:version.begun:3:kill" if fail else ""
        done = subprocess.run(
            [sys.executable, "-m", "tensorwire", "run", "-w", "2", "-s", "2", option, "train.py"],
            cwd=tmp_path,
            env={**os.environ, "TENSORWIRE_FAIL": place},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert ("takes its place" in done.stderr) == bool(fail), done.stderr
        found += re.findall(r"sum (\S+)", done.stdout)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_where_workers_are_restarted_singly_all_are_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORWIRE_SUPERVISOR", "socket")
    place = World(0, 2, ("127.0.0.1:1",), durable=True)
    with pytest.raises(ValueError, match="'tensorwire serve' replaces workers"):
        discovery.as_durable(place, False)
    assert discovery.as_durable(place, True).durable
