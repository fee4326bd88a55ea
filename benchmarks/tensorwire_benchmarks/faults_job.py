"""The script that the jobs of `bench faults` run: small models that train for some seconds.

    tensorwire run --on-death restart faults_job.py SCENARIO FOLDER PACE EPOCHS

Each worker appends a line to FOLDER/events-RANK for every slice of every step, with one write, so
that it survives a kill; at the end it writes FOLDER/final-RANK. It makes FOLDER/joined-RANK when it
has joined the job. A job that saves continues from its last checkpoint, and removes its events of
later steps. Worker 0 writes the number of its steps to FOLDER/progress. PACE is the seconds that a
worker sleeps per batch, which changes no bit. `faults_judge.py` judges the files; nothing here
knows that processes are killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import SplitPoint
from torch.utils.data import TensorDataset

import tensorwire.torch as tw

_FEATURES, _CLASSES, _ROWS = 40, 10, 400


@dataclass
class Training:
    """The models and optimizers of a job, and the functions that train them.

    Attributes:
        models: models whose final values are judged, by name.
        optimizers: distributed optimizers, by name.
        loss: returns the loss of a batch; also makes the backward pass if the model is split.
        after: called after the last slice of a step, before the next.
        before: called before a slice's step.
        schedulers: by name.
    """

    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    loss: Callable[[torch.Tensor, torch.Tensor], Any]
    after: Callable[[], object] = lambda: None
    before: Callable[[], object] = lambda: None
    schedulers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A kind of job.

    Attributes:
        make: makes the models and optimizers.
        samples, batch_size, accumulate: of the loader; no sample is left over.
        init: options of `tw.init`.
        tables: whether inputs are indexes of rows.
        save_every: steps between two checkpoints; the job starts from the last one; 0: none.
    """

    make: Callable[[], Training]
    samples: int = 1280
    batch_size: int = 8
    accumulate: int = 1
    init: Mapping[str, Any] = field(default_factory=dict)
    tables: bool = False
    save_every: int = 0


def _batchnorm() -> Training:
    model = nn.Sequential(
        nn.Linear(_FEATURES, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, _CLASSES),
    )  # fmt: skip
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    opt = tw.DistributedOptimizer(opt, model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    return Training(
        {"model": model}, {"SGD": opt}, lambda x, y: F.cross_entropy(model(x), y), schedule.step,
        schedulers={"schedule": schedule},
    )  # fmt: skip


def _tables() -> Training:
    table, rest = nn.Embedding(_ROWS, 16, sparse=True), nn.Linear(4 * 16, _CLASSES)
    model = nn.Sequential(table, nn.Flatten(), rest)
    opt = tw.DistributedOptimizer(torch.optim.Adagrad(model.parameters(), 0.1), model)
    return Training({"model": model}, {"Adagrad": opt}, lambda x, y: F.cross_entropy(model(x), y))


def _two_optimizers() -> Training:
    body = nn.Sequential(nn.Linear(_FEATURES, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU())
    head = nn.Linear(100, _CLASSES)
    adam = tw.DistributedOptimizer(torch.optim.Adam(body.parameters(), 1e-3), body, ema=0.9)
    sgd = torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)
    sgd = tw.DistributedOptimizer(sgd, head)
    return Training(
        {"body": body, "head": head},
        {"Adam": adam, "SGD": sgd},
        lambda x, y: F.cross_entropy(head(body(x)), y),
        before=lambda: tw.clip_grad_norm_(sgd, 0.5),
    )


def _whole() -> Training:
    body = nn.Sequential(
        nn.Linear(_FEATURES, 120, bias=False), nn.ReLU(), nn.Linear(120, 80, bias=False), nn.ReLU()
    )
    head = nn.Linear(80, _CLASSES)
    muon = tw.DistributedOptimizer(torch.optim.Muon(body.parameters(), 0.01), body)
    nadam = tw.DistributedOptimizer(torch.optim.NAdam(head.parameters(), 1e-3), head)
    return Training(
        {"body": body, "head": head},
        {"Muon": muon, "NAdam": nadam},
        lambda x, y: F.cross_entropy(head(body(x)), y),
    )


def _large() -> Training:
    """Makes a model with 50 MiB of parameters."""
    model = nn.Sequential(
        nn.Linear(_FEATURES, 3590), nn.ReLU(), nn.Linear(3590, 3590), nn.ReLU(),
        nn.Linear(3590, _CLASSES),
    )  # fmt: skip
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    opt = tw.DistributedOptimizer(opt, model)
    return Training({"model": model}, {"SGD": opt}, lambda x, y: F.cross_entropy(model(x), y))


def _pipeline() -> Training:
    model = nn.Sequential(
        nn.Linear(_FEATURES, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(),
        nn.Linear(100, _CLASSES),
    )  # fmt: skip
    split = tw.split(
        model, {"2": SplitPoint.BEGINNING}, example=[torch.zeros(4, _FEATURES)],
        loss=F.cross_entropy, microbatches=2,
    )  # fmt: skip
    opt = torch.optim.SGD(split.parameters(), 0.1, momentum=0.9)
    opt = tw.DistributedOptimizer(opt, split, max_norm=1.0)
    return Training({"model": split}, {"SGD": opt}, lambda x, y: split.step(x, target=y))


SCENARIOS = {
    "batchnorm": Scenario(_batchnorm, samples=2560, accumulate=2, init={"slices": 4}),
    "tables": Scenario(_tables, tables=True),
    "two optimizers": Scenario(_two_optimizers),
    "whole": Scenario(_whole),
    "large": Scenario(_large, samples=640),
    "launcher": Scenario(_batchnorm, samples=2560, accumulate=2, init={"slices": 4}, save_every=3),
    "pipeline": Scenario(_pipeline, init={"slices": 2, "pipeline": 2}),
}


def main(scenario_name: str, folder: Path, pace_s: float, epochs: int) -> None:
    """Trains, and writes the events and final values that are judged."""
    torch.set_num_threads(1)
    scenario = SCENARIOS[scenario_name]
    job = tw.init(seed=3, **scenario.init)
    (folder / f"joined-{job.rank}").touch()
    training = scenario.make()
    data = _data(scenario)
    split = job.pipeline > 1
    # Each process of a pipeline gets the batches of its replica.
    names = {
        name: f"{name} of stage {job.stage}" if split else name for name in training.optimizers
    }
    log = os.open(folder / f"events-{job.rank}", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    progress = os.open(folder / "progress", os.O_WRONLY | os.O_CREAT, 0o600)
    optimizers = training.optimizers
    kept: dict[str, Any] = {"step": 0, "total": 0.0, "means": []}
    job.track(kept=kept, **training.schedulers)
    checkpoints = folder / "checkpoints"
    if scenario.save_every:
        job.track(**training.models, **optimizers)
    if scenario.save_every:
        if checkpoints.exists():
            job.load(checkpoints)
        _forget(log, kept["step"])
    group = scenario.accumulate * len(job.my_slices)
    for epoch in job.epochs(epochs):
        samples: list[int] = []
        losses: list[float] = []
        loader = job.loader(data, scenario.batch_size, shuffle=True, accumulate=scenario.accumulate)
        for batch, (x, y, indexes) in enumerate(loader, loader.first_batch):
            loss = training.loss(x, y)
            time.sleep(pace_s)
            samples += indexes.tolist()
            losses.append(float("nan") if loss is None else float(loss.detach()))
            last = (batch + 1) % scenario.accumulate == 0
            if not split:
                with ExitStack() as stack:
                    for opt in () if last else optimizers.values():
                        stack.enter_context(opt.accumulate())
                    (loss / scenario.accumulate).backward()
            if not last:
                continue
            training.before()
            place = batch % group // scenario.accumulate
            shared = {
                "epoch": epoch, "step": kept["step"], "slice": job.my_slices[place],
                "samples": samples, "losses": [value.hex() for value in losses],
                "pid": os.getpid(),
            }  # fmt: skip
            for name, opt in optimizers.items():
                opt.step()
                opt.zero_grad()
                line = {"optimizer": names[name], **shared, "at": time.monotonic()}
                os.write(log, json.dumps(line).encode() + b"\n")
            kept["total"] += sum(losses)
            samples, losses = [], []
            if place == len(job.my_slices) - 1:
                kept["step"] += 1
                training.after()
                if job.rank == 0:
                    os.pwrite(progress, b"%10d" % kept["step"], 0)
                if scenario.save_every and job.rank == 0:
                    job.save(checkpoints, every=scenario.save_every, keep=2, wait=False)
        total, kept["total"] = kept["total"], 0.0
        kept["means"].append(job.mean(None if split and total != total else total))
    state: dict[str, Any] = {"means": kept["means"]}
    state |= {name: model.state_dict() for name, model in training.models.items()}
    state |= {f"optimizer {name}": opt.state_dict() for name, opt in optimizers.items()}
    if scenario_name == "two optimizers":
        state["average"] = optimizers["Adam"].ema_state_dict()
    write_final(folder / f"final-{job.rank}", state)
    job.barrier()


def _forget(log: int, steps: int) -> None:
    """Removes from the log all events after the first `steps` steps."""
    size = os.fstat(log).st_size
    lines = os.pread(log, size, 0).splitlines(keepends=True)
    kept = b"".join(line for line in lines if json.loads(line)["step"] < steps)
    os.ftruncate(log, 0)
    os.write(log, kept)


def _data(scenario: Scenario) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    count = scenario.samples
    if scenario.tables:
        x = torch.randint(0, _ROWS, (count, 4), generator=generator)
        y = x.sum(1) % _CLASSES
    else:
        x = torch.randn(count, _FEATURES, generator=generator)
        y = x[:, :_CLASSES].argmax(1)
    return TensorDataset(x, y, torch.arange(count))


def write_final(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a line of JSON, [[name, type, shape, bytes], …], then the bytes of all values."""
    head: list[Sequence[Any]] = []
    bodies: list[bytes] = []
    for name, value in _walk("", state):
        if isinstance(value, torch.Tensor):
            array = value.detach().contiguous().numpy()
            kind, shape, body = str(array.dtype), list(array.shape), array.tobytes()
        else:
            kind, shape = type(value).__name__, []
            body = (value.hex() if isinstance(value, float) else repr(value)).encode()
        head.append([name, kind, shape, len(body)])
        bodies.append(body)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(json.dumps(head).encode() + b"\n" + b"".join(bodies))
    partial.replace(path)


def _walk(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _walk(f"{name}/{key}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _walk(f"{name}/{index}", each)
    else:
        yield name, value


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
