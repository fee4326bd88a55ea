"""The job of `bench files` whose second worker is one of Python or one of files.

    python files_step_worker.py FOLDER SIZE_BYTES

It trains one parameter `p` of that size while `FOLDER/train` is there, until it is terminated.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import tensorwire.torch as tw


def main(folder: Path, size_bytes: int) -> None:
    """The gradient of worker 1 is twice the parameter; that of worker 0 is another one."""
    torch.set_num_threads(1)
    job = tw.init()
    model = torch.nn.Module()
    model.register_parameter("p", torch.nn.Parameter(torch.linspace(-1, 1, size_bytes // 4)))
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    if job.rank == 0:
        (folder / "ready").touch()
    scale = 1.5 if job.rank == 0 else 1.0
    while True:
        while not (folder / "train").exists():
            time.sleep(0.01)
        optimizer.zero_grad()
        (scale * sum(parameter.square().sum() for parameter in model.parameters())).backward()
        optimizer.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
