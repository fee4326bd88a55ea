"""A worker of `durable_cost.py`: it exchanges gradients that are there already, turn by turn.

`durable_worker.py ADDRESS OPTIMIZER TENSORS`; a tensor has 1 MiB. The bench sends a line of JSON
with the steps of a turn and the seconds that each of them computes (here: sleeps), and gets one
with the seconds of the turn and the bytes of notes that the job's report tells.
"""

from __future__ import annotations

import sys
import time

import torch

import tensorwire.torch as tw
from tensorwire_benchmarks.worker_link import WorkerLink

_SHAPE = 512, 512


def main(address: str, optimizer: str, tensors: int) -> None:
    """Runs turns until the bench says that there is none."""
    torch.set_num_threads(1)
    job = tw.init(seed=1)
    torch.manual_seed(1)
    model = torch.nn.ParameterList(torch.randn(_SHAPE) for _ in range(tensors))
    inner: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    if optimizer == "momentum":
        inner = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    opt = tw.DistributedOptimizer(inner, model)
    gradients = [torch.randn(_SHAPE) * 0.01 for _ in range(tensors)]
    link = WorkerLink(address, job.rank)
    while count := (turn := link.order())["steps"]:
        started = time.perf_counter()
        for _ in range(count):
            time.sleep(turn["compute_s"])
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient
            opt.step()
        seconds = time.perf_counter() - started
        # Another checkout may be older than what is looked for.
        link.answer(seconds=seconds, notes=job.report().get("bytes_of_notes", 0))
    job.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
