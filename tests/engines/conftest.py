"""The common part of tests with real engines: a script, and a Slurm of this machine alone.

`make test-engines` installs the engines and runs them; a test whose engine is missing is skipped.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from programs import TRAINED, output_of

# What every worker does at the end: trains, and prints its place and a figure that all must share.
TRAIN = (
    TRAINED
    + """
import sys

def train(job):
    model, _ = trained(job)
    told = f"done {job.rank} {job.size} {model.weight.sum().item()!r}"
    os.write(1, f"{told}\\n".encode())  # in one piece
    return told
"""
)
# Variables of an engine that the tests themselves may run under.
ENGINES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "RANK", "WORLD_SIZE", "MASTER_")

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command with a script, in which `train(job)` is there; returns what it prints."""

    def run(command: Sequence[str], text: str, code: int = 0, **environment: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(TRAIN + textwrap.dedent(text))
        return output_of(
            [*command, str(script)], tmp_path, code, environ=clean(os.environ), **environment
        )

    return run


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(ENGINES)}


def check_done(text: str, workers: int = 2) -> None:
    """Checks that `workers` workers trained one model."""
    found = set(re.findall(rf"done (\d) {workers} (\S+)$", text, re.MULTILINE))
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(workers)], text
    assert len({figure for _, figure in found}) == 1, text


SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [
        name for name in ("slurmctld", "slurmd", "srun") if not shutil.which(name, path=path)
    ]
    if missing:
        return f"{', '.join(missing)} of Slurm is not installed: make test-engines, as root"
    return None if os.geteuid() == 0 else "the daemons of Slurm need root"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm that ends with the tests; what its commands need in their environment."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    configuration = folder / "slurm.conf"
    with socket.create_server(("", 0)) as a, socket.create_server(("", 0)) as b:
        ports = [each.getsockname()[1] for each in (a, b)]
    configuration.write_text(SLURM_CONF.format(host=host, folder=folder, ports=ports))
    environment = {"SLURM_CONF": str(configuration)}
    env = {**clean(os.environ), **environment, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    log = (folder / "log").open("w+")
    daemons = [
        subprocess.Popen([name, "-D"], env=env, stdout=log, stderr=log)
        for name in ("slurmctld", "slurmd")
    ]
    try:
        deadline = time.monotonic() + 30
        state = ["sinfo", "--noheader", "--format=%t"]
        while (told := subprocess.run(state, env=env, capture_output=True, text=True)).stdout != (
            "idle\n"
        ):
            assert time.monotonic() < deadline, f"{told}\n{(folder / 'log').read_text()[-3000:]}"
            time.sleep(0.1)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)
        log.close()


PYTHON = sys.executable
