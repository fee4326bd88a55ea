"""The job that `bench files` reads: a model of so many MiB, whose steps the bench lets go.

    python files_worker.py FOLDER LARGE_MIB TOTAL_MIB

It trains while `FOLDER/train` is there, and ends when `FOLDER/end` is. How many steps it has made
is in `FOLDER/steps`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import tensorwire.torch as tw

_MIB = 1 << 20


def main(folder: Path, large_mib: int, total_mib: int) -> None:
    """Trains one parameter of `large_mib`, and others of the same size up to `total_mib`."""
    torch.set_num_threads(1)
    job = tw.init()
    model = torch.nn.Module()
    for index in range(max(1, total_mib // large_mib)):
        value = torch.randn(large_mib * _MIB // 4)
        model.register_parameter(f"p{index}", torch.nn.Parameter(value))
    optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6), model)
    steps = 0
    (folder / "ready").touch()
    while not (folder / "end").exists():
        if not (folder / "train").exists():
            time.sleep(0.02)
            continue
        optimizer.zero_grad()
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        steps += 1
        (folder / "steps.part").write_text(str(steps))
        (folder / "steps.part").replace(folder / "steps")
    optimizer.close()
    job.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
