"""Programs that tests of several folders run, and ways to wait for them."""

import os
import subprocess
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
