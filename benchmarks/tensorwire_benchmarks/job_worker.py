"""A worker of jobs that make steps, turn by turn, on orders of a bench.

`job_worker.py ADDRESS OPTIMIZER TENSORS SIZE_BYTES`: the model has TENSORS parameters `p0`, `p1`
and so on, of SIZE_BYTES each. The bench sends a line of JSON with the steps of a turn, the seconds
that a step computes (here: sleeps), and whether a backward pass makes the gradients or they are
made once before. The answer has the seconds of the turn, and the bytes of notes from the job's
report.
"""

from __future__ import annotations

import sys
import time

import torch

import tensorwire.torch as tw
from tensorwire_benchmarks.worker_link import WorkerLink


def main(address: str, optimizer: str, tensors: int, size_bytes: int) -> None:
    """Runs turns until the bench sends one without steps."""
    torch.set_num_threads(1)
    job = tw.init(seed=1)
    torch.manual_seed(1)
    model = torch.nn.Module()
    for index in range(tensors):
        value = torch.randn(size_bytes // 4)
        model.register_parameter(f"p{index}", torch.nn.Parameter(value))
    parameters = list(model.parameters())
    inner: torch.optim.Optimizer = torch.optim.Adam(parameters, 1e-3)
    if optimizer != "adam":
        momentum = 0.9 if optimizer == "momentum" else 0.0
        inner = torch.optim.SGD(parameters, 1e-3 if momentum else 1e-6, momentum=momentum)
    opt = tw.DistributedOptimizer(inner, model)
    gradients = [torch.randn_like(parameter) * 0.01 for parameter in parameters]
    link = WorkerLink(address, job.rank)
    while count := (turn := link.order())["steps"]:
        started = time.perf_counter()
        for _ in range(count):
            if turn["compute_s"]:
                time.sleep(turn["compute_s"])
            if turn["backward"]:
                opt.zero_grad()
                sum(parameter.square().sum() for parameter in parameters).backward()
            else:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            opt.step()
        seconds = time.perf_counter() - started
        # An older checkout does not report it.
        link.answer(seconds=seconds, notes=job.report().get("bytes_of_notes", 0))
    job.barrier()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
