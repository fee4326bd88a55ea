"""The job that `bench files` reads: parameters of so many bytes, whose steps the bench lets go.

    python files_worker.py FOLDER SIZE_BYTES COUNT

`FOLDER/ready` is there when it has begun. It trains while `FOLDER/train` is there, and ends when
`FOLDER/end` is. The gradient of the last worker is twice the parameter, as that of the program in C
is which may be in its place.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import tensorwire.torch as tw


def main(folder: Path, size_bytes: int, count: int) -> None:
    """Trains parameters `p0`, `p1` and so on."""
    torch.set_num_threads(1)
    job = tw.init()
    model = torch.nn.Module()
    for index in range(count):
        value = torch.randn(size_bytes // 4)
        model.register_parameter(f"p{index}", torch.nn.Parameter(value))
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    if job.rank == 0:
        (folder / "ready").touch()
    scale = 1.0 if job.rank == job.size - 1 else 1.5
    while not (folder / "end").exists():
        if not (folder / "train").exists():
            time.sleep(0.01)
            continue
        optimizer.zero_grad()
        (scale * sum(parameter.square().sum() for parameter in model.parameters())).backward()
        optimizer.step()
    optimizer.close()
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
