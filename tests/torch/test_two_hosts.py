"""Training between two hosts on Ethernet: nothing is shared but the network.

The hosts are network namespaces; shm is forbidden, since they share a kernel.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts
import pipelines
import pytest
import scripts
from crew import page_alone
from hosts import Host
from team import Team

WHY_NOT = hosts.missing()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    with hosts.two_hosts() as made:
        yield made


@pytest.mark.parametrize("name", scripts.SCRIPTS)
def test_same_bits_as_on_one_host(team: Team, pair: tuple[Host, Host], name: str) -> None:
    (_, here), _ = team.run(scripts.train_ours, name)
    for servers in (1, 2):
        options = {"transports": ["tcp"], "hosts": pair, "servers": servers}
        assert [bits for _, bits in team.run(scripts.train_ours, name, **options)] == [here] * 2


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
@pytest.mark.slow
def test_replicas_whose_stages_are_on_two_hosts(
    team: Team, pair: tuple[Host, Host], kind: str
) -> None:
    options = {"workers": 4, "pipeline": 2, "transports": ["tcp"], "hosts": pair, "servers": 2}
    pipelines.check(team.run(pipelines.train, kind, **options), pipelines.alone(kind))


def run_under_torchrun(pair: tuple[Host, Host], script: Path, **environment: str) -> list[str]:
    """Returns the script's output on each host: one agent and one process per host."""
    port = 20000 + secrets.randbelow(20000)
    agents = []
    for index, host in enumerate(pair):
        command = ["ip", "netns", "exec", host.name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={index}"]
        command += [f"--master-addr={pair[0].address}", f"--master-port={port}", str(script)]
        agents.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **environment},
            )
        )
    try:
        return [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


@pytest.mark.slow
def test_torchrun_on_two_hosts(pair: tuple[Host, Host], tmp_path: Path) -> None:
    """A server is beside the first worker of each host."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch
import tensorwire.torch as tw
job = tw.init(transports=["tcp"])
torch.manual_seed(job.rank)
model = torch.nn.Linear(30, 3)
opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(5):
    model(torch.ones(2, 30)).sum().backward()
    opt.step()
    opt.zero_grad()
servers = opt._tensorwire.store._member.place.servers
print("done", job.rank, job.size, len(servers), float(model.weight.sum()), flush=True)
"""
    )
    outputs = run_under_torchrun(pair, script)
    text = "\n".join(outputs)
    lines = [
        line.split() for out in outputs for line in out.splitlines() if line.startswith("done ")
    ]
    assert sorted(line[1:4] for line in lines) == [["0", "2", "2"], ["1", "2", "2"]], text
    assert lines[0][4] == lines[1][4]


@pytest.mark.slow
def test_a_split_model_on_two_hosts(
    pair: tuple[Host, Host], repository: Path, tmp_path: Path
) -> None:
    """The program of docs/split.md."""
    page = (repository / "docs" / "split.md").read_text()
    script = tmp_path / "split.py"
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    text = "".join(run_under_torchrun(pair, script, TENSORWIRE_TRANSPORTS="tcp"))
    assert f"loss {page_alone():.4f} with 2 processes\n" in text, text
