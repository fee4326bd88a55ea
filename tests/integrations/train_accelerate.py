"""Trains through Accelerate: `SIDE FOLDER CASE...`; the side is `ours` or `theirs`, its DDP.

Every process writes what it has seen of each case to FOLDER.
"""

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    set_seed,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensorwire.torch as tw
from tensorwire.torch.integrations.accelerate import TensorwireAccelerator

torch.set_num_threads(1)
SIDE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
SIZE = int(os.environ.get("WORLD_SIZE", 1))


def data(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))


def accelerator(**options: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)  # as if another process began
    GradientState._reset_state()
    if SIDE == "ours":
        return TensorwireAccelerator(**options)
    return accelerate.Accelerator(cpu=True, **options)


class Signed(torch.optim.Optimizer):
    """Servers may not import this program, and worker 0 applies it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    before = self.state[parameter].get("mean", 0.0)
                    mean = self.state[parameter]["mean"] = 0.9 * before + parameter.grad
                    parameter.sub_(mean.tanh(), alpha=group["lr"])


class Run:
    """The common part of most scripts for Accelerate."""

    def __init__(self, adam: bool = False, signed: bool = False, **options: Any) -> None:
        self.accelerator = accelerator(**options)
        set_seed(7)
        self.model: Any = net()
        optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        if adam:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        if signed:
            optimizer = Signed(self.model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        loader = DataLoader(data(), batch_size=6, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, optimizer, loader, schedule
        )
        self.evaluation = self.accelerator.prepare(DataLoader(data(31), batch_size=6))
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.accuracies: list[float] = []

    def epoch(self, clip: str = "") -> None:
        self.model.train()
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.clip(clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        self.model.eval()
        with torch.no_grad():
            found = [(self.model(x).argmax(1), y) for x, y in self.evaluation]
        pairs = [self.accelerator.gather_for_metrics(pair) for pair in found]
        right = [(guess == y).float() for guess, y in pairs]
        self.accuracies.append(torch.cat(right).sum().item())

    def clip(self, way: str) -> None:
        parameters = self.model.parameters()
        if way == "value":
            self.accelerator.clip_grad_value_(parameters, 0.01)
        elif way == "part":
            part = list(parameters)[:2]
            self.norms.append(self.accelerator.clip_grad_norm_(part, 0.05).item())
        elif way:
            options = {"norm": (0.05, 2), "max": (0.01, float("inf")), "none": (float("inf"), 2)}
            norm = self.accelerator.clip_grad_norm_(parameters, *options[way])
            self.norms.append(norm.item())

    def seen(self) -> dict[str, Any]:
        whole = self.accelerator.unwrap_model(self.model).state_dict()
        return {
            "losses": self.losses,
            "norms": self.norms,
            "accuracies": self.accuracies,
            "values": {name: value.clone() for name, value in whole.items()},
        }


def trained(clip: str = "", **options: Any) -> dict[str, Any]:
    run = Run(**options)
    run.epoch(clip)
    run.epoch(clip)
    return run.seen()


def plain(name: str) -> dict[str, Any]:
    return trained()


def adam(name: str) -> dict[str, Any]:
    return trained(adam=True)


def clipped(name: str) -> dict[str, Any]:
    return trained("norm")


def clipped_by_value(name: str) -> dict[str, Any]:
    return trained("value")


def clipped_in_part(name: str) -> dict[str, Any]:
    return trained("part")


def clipped_by_largest(name: str) -> dict[str, Any]:
    return trained("max")


def norm_alone(name: str) -> dict[str, Any]:
    return trained("none")


def accumulated(name: str) -> dict[str, Any]:
    """Trains with accumulation and an incomplete group at the end of an epoch."""
    return trained("norm", gradient_accumulation_steps=2)


def bf16(name: str) -> dict[str, Any]:
    return trained(mixed_precision="bf16")


def resumed(name: str, signed: bool = False) -> dict[str, Any]:
    """An epoch, a checkpoint, another epoch that is undone by loading it, and the same again."""
    first = Run(signed=signed, project_dir=str(FOLDER / name))
    first.epoch()
    first.accelerator.save_state(FOLDER / name / "state")
    first.accelerator.wait_for_everyone()
    first.epoch()
    first.accelerator.load_state(FOLDER / name / "state")
    loaded = {k: v.clone() for k, v in first.seen()["values"].items()}
    first.epoch()
    files = sorted(p.name for p in (FOLDER / name / "state").iterdir())
    # Which one process has alone where worker 0 applies.
    state = {} if signed else first.optimizer.state_dict()["state"]
    return {**first.seen(), "loaded": loaded, "files": files, "optimizer": state}


def applied_by_one(name: str) -> dict[str, Any]:
    return resumed(name, signed=True)


def several(name: str) -> dict[str, Any]:
    """Two models with an optimizer each, one after another; each in a fold of its own."""
    losses = []
    values = {}
    for fold in range(2):
        using = accelerator()
        set_seed(7 + fold)
        first, second = net(), net()
        one = torch.optim.SGD(first.parameters(), lr=0.1)
        two = torch.optim.Adam([*second.parameters()], lr=0.01)
        loader = DataLoader(data(), batch_size=6, shuffle=True)
        first, second, one, two, loader = using.prepare(first, second, one, two, loader)
        for x, y in loader:
            loss = F.cross_entropy(first(x) + second(x), y)
            using.backward(loss)
            using.clip_grad_norm_([*first.parameters(), *second.parameters()], 0.05)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        values = {
            f"{i}.{key}": value.clone()
            for i, model in enumerate((first, second))
            for key, value in using.unwrap_model(model).state_dict().items()
        }
        first, second, one, two, loader = using.free_memory(first, second, one, two, loader)
    return {"losses": losses, "values": values}


def told(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misused(name: str) -> dict[str, Any]:
    """Ours only: what cannot work says so, in every process."""

    def forgotten() -> None:
        using = accelerator()
        using.backward(using.prepare(net())(torch.ones(2, 8)).sum())

    def optimizer_alone() -> None:
        accelerator().prepare(torch.optim.SGD(net().parameters(), lr=0.1))

    def hook() -> Any:
        handler = DistributedDataParallelKwargs(comm_hook="fp16")
        return accelerator(kwargs_handlers=[handler])

    def too_early() -> None:
        run = Run(gradient_accumulation_steps=2)
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(run.model(torch.ones(2, 8)).sum())
            run.accelerator.clip_grad_norm_(run.model.parameters(), 1.0)

    def sharded() -> Any:
        try:
            return accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        finally:
            os.environ.pop("ACCELERATE_USE_FSDP", None)  # which Accelerate sets

    def uneven() -> None:
        with (run := Run()).accelerator.join_uneven_inputs([run.model], even_batches=False):
            pass

    def by_hand() -> None:
        tw.current_job()
        model = net()
        optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            accelerate.Accelerator(cpu=True).prepare(model, optimizer)
        finally:
            tw.current_job().optimizers[-1].close()

    results = {
        "cpu": told(lambda: accelerator(cpu=False)),
        "fp16": told(lambda: accelerator(mixed_precision="fp16")),
        "fsdp": told(sharded),
        "hook": told(hook),
        "forgotten": told(forgotten),
        "optimizer": told(optimizer_alone),
        "early": told(too_early),
        "uneven": told(uneven),
        "by hand": told(by_hand),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        using = accelerator()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = using.prepare(model, optimizer)  # and not the loader
        for x, y in DataLoader(data(), batch_size=6):
            using.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    results["same"] = " ".join(
        str(w.message) for w in caught if w.category is tw.SameBatchesWarning
    )
    return results


def main() -> None:
    global SIDE
    sides = SIDE.split("+")
    for SIDE in sides:
        for name in sys.argv[3:]:
            found = copy.deepcopy(globals()[name](f"{SIDE}-{name}"))
            torch.save(found, FOLDER / f"{SIDE}-{name}-{RANK}.pt")


if __name__ == "__main__":
    main()
