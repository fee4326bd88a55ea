"""The script of `faults_changes.py`: its parameters count how often each sample was used.

    tensorwire run … faults_changes_job.py FOLDER MODE PACE

Each worker appends the time of each of its steps to FOLDER/steps-RANK. PACE is the seconds that it
sleeps per batch. The job ends with the epoch in which FOLDER/stop exists, and prints the counts.
Nothing here knows that processes are killed, come or go.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tensorwire.torch as tw

SAMPLES, BATCH = {"sync": 96, "async": 2000, "bounded": 2000}, 2
"""Workers wait for each other after an epoch; in async and bounded it therefore lasts 10 s."""
BYTES = 16 << 20  # of parameters, in addition to one for each sample


class _Counts(nn.Module):  # type: ignore[misc]
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = nn.Parameter(torch.zeros(samples))
        self.steps = nn.Parameter(torch.zeros(BYTES // 4))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.samples[numbers].sum() - self.steps.sum()


def main(folder: Path, mode: str, pace_s: float) -> None:
    """Trains until FOLDER/stop exists, then prints the counts."""
    torch.set_num_threads(1)
    options = {"mode": mode, "staleness": 3} if mode == "bounded" else {"mode": mode}
    job = tw.init(seed=3, **options)
    model = _Counts(SAMPLES[mode])
    opt = torch.optim.SGD(model.parameters(), 1.0, momentum=0.0)
    opt = tw.DistributedOptimizer(opt, model)
    job.track(model=model, opt=opt)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES[mode]))
    loader = job.loader(data, BATCH, shuffle=True)
    # In "sync" a step has the mean gradient of all slices, else the gradient of one slice.
    times = job.size if mode == "sync" else 1
    name = folder / f"steps-{os.environ['TENSORWIRE_RANK']}"
    log = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    made = 0
    for epoch in job.epochs(1 << 20):
        for (numbers,) in loader:
            (times * model(numbers)).backward()
            time.sleep(pace_s)
            opt.step()
            opt.zero_grad()
            if job.step_complete:
                os.write(log, f"{time.monotonic()}\n".encode())
        made = epoch + 1
        if job.sum([float((folder / "stop").exists())])[0]:
            break
    with tw.edit(model):
        pass  # after this all workers have the same values
    found = {"used": model.samples.unique().tolist(), "epochs": made}
    print("counted", json.dumps(found), flush=True)
    job.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
