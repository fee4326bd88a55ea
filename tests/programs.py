"""Programs that tests of several folders run, and ways to wait for them."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# For scripts: trains a small model, with another one to begin with and other data in each worker.
TRAINED = """
import os
import torch
import tensorwire.torch as tw

def trained(job):
    torch.set_num_threads(1)
    torch.manual_seed(job.rank)
    model = torch.nn.Linear(30, 3)
    opt = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(3):
        model(torch.full((2, 30), job.rank + 1.0)).sum().backward()
        opt.step()
        opt.zero_grad()
    return model, opt
"""


def output_of(
    command: Sequence[str],
    folder: Path,
    code: int = 0,
    environ: Mapping[str, str] = os.environ,
    limit_s: float = 100,
    **environment: str,
) -> str:
    """All that a command prints in `folder`; it must end with this exit code in time."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def run_job(
    folder: Path, script: str, *arguments: str, options: str = "", fail: str = "", code: int = 0
) -> tuple[set[str], str]:
    """Runs a script in a job, in a folder that it makes, with a TENSORWIRE_FAIL.

    Returns:
        The digests that the workers print, and all that was printed.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "tensorwire", "run", *options.split(), str(path), *arguments]
    said = output_of(command, folder, code, limit_s=200, TENSORWIRE_FAIL=fail)
    return set(re.findall(r"digest (\w+)", said)), said
