"""Measures how long a save delays the next step: a model of 100 MB with Adam, each way in turns.

    tensorwire run --workers 2 benchmarks/tensorwire_benchmarks/saving.py FOLDER

Steps of worker 1, which does not save, are timed: one without a save, and one during which worker 0
saves; also the seconds of worker 0's call, and until the file exists. Files go to FOLDER, so the
speed of its disk counts. The first file of each kind is not measured, as it replaces none.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import tensorwire.torch as tw

REPEATS = 5
QUIET_STEPS = 4  # after each save, once its file exists
PATIENCE_S = 60.0


def main() -> None:
    """Trains and saves in each way; worker 0 prints a row of medians for each."""
    folder = Path(sys.argv[1])
    job = tw.init()
    model = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(4)))
    opt = tw.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    job.track(model=model, opt=opt)
    ways = {"no save": None, "wait=True": True, "wait=False": False}
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}

    def step() -> float:
        started = time.perf_counter()
        sum((p * p).sum() for p in model.parameters()).backward()
        opt.step()
        opt.zero_grad()
        return time.perf_counter() - started

    for repeat in range(REPEATS + 1):
        for way, wait in ways.items():
            path = folder / f"checkpoint {way}"
            before = path.stat().st_mtime_ns if path.exists() else 0
            job.barrier()
            started, called = time.perf_counter(), 0.0
            if job.rank == 0 and wait is not None:
                # The default is not passed, for versions without the option.
                job.save(path, **({} if wait else {"wait": False}))
                called = time.perf_counter() - started
            delayed, written = step(), 0.0
            while wait is not None and job.rank == 0:
                if path.exists() and path.stat().st_mtime_ns != before:
                    written = time.perf_counter() - started
                    break
                assert time.perf_counter() - started < PATIENCE_S, f"{path} was not written"
                time.sleep(0.005)
            for _ in range(QUIET_STEPS):
                step()
            if repeat:
                sums = job.sum([delayed if job.rank == 1 else 0.0, called, written])
                found[way].append((sums[0], sums[1], sums[2]))
            else:
                job.barrier()
    if job.rank != 0:
        return
    for way, each in found.items():
        medians = [statistics.median(column) for column in zip(*each, strict=True)]
        print(
            f"{way:12} step {medians[0]:.3f} s, call {medians[1]:.3f} s, there {medians[2]:.3f} s"
        )


if __name__ == "__main__":
    main()
