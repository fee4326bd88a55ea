"""A worker of `libraries.py`: a library's own loop, which waits for the bench between turns.

`library_worker.py SIDE ADDRESS ORDER`; the order is JSON with the keys library, model, tiny and
steps. The bench sends a line with the number of steps of a turn; the answer has the seconds of each
step and the last loss. One more step, which is not timed, follows the last turn.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from tensorwire_benchmarks.systems.base import make_optimizer
from tensorwire_benchmarks.worker_link import WorkerLink
from tensorwire_benchmarks.workloads.catalog import LIBRARY_MODELS, Workload, named

_SAMPLES = 64  # different ones
_EPOCH = 1 << 20
_PR_SET_PDEATHSIG = 1


class Gate:
    """A gate at the beginning of each step, where the worker waits between turns.

    Attributes:
        loss: of this worker's last batch.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._link = WorkerLink(address, rank)
        self.loss = torch.zeros(())
        self._seconds: list[float] = []
        self._left = self._begun = 0.0

    def step(self) -> None:
        """Ends a step and begins another; between two turns waits for the bench's order."""
        now = time.monotonic()
        if self._left:
            self._seconds.append(now - self._begun)
            self._left -= 1
            if not self._left:
                self._link.answer(seconds=self._seconds, loss=self.loss.item())
                self._seconds = []
        if not self._left:
            self._left = self._link.order()["steps"]  # 0: the last step
        self._begun = time.monotonic()


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Some samples of a workload, repeated so that an epoch is longer than the bench."""

    def __init__(self, model: Workload) -> None:
        random = torch.Generator().manual_seed(1000)
        batches = [model.sample(random) for _ in range(_SAMPLES // model.batch or 1)]
        self._inputs, self._labels = (torch.cat(part) for part in zip(*batches, strict=True))

    def __len__(self) -> int:
        return _EPOCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        index %= len(self._inputs)
        return {"inputs": self._inputs[index], "labels": self._labels[index]}


def train_lightning(gate: Gate, own: bool, model: Workload, steps: int) -> None:
    """Trains by Lightning's Trainer."""
    import lightning.pytorch as pl

    class OfLightning(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss = model.build(torch), model.loss(torch)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.loss(self.network(batch["inputs"]), batch["labels"])
            gate.loss = loss.detach()
            return loss

        def on_train_batch_start(self, batch: object, index: int) -> None:
            gate.step()

        def configure_optimizers(self) -> Any:
            return make_optimizer(torch, model.optimizer or "sgd", self.parameters(), fused=True)

    if own:
        adapter = importlib.import_module("tensorwire.torch.integrations.lightning")
        strategy = adapter.TensorwireStrategy()
    else:
        strategies = importlib.import_module("lightning.pytorch.strategies")
        strategy = strategies.DDPStrategy(
            process_group_backend="gloo", gradient_as_bucket_view=True, static_graph=True
        )
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Samples(model), model.batch, shuffle=False)
    trainer.fit(OfLightning(), loader)


def train_transformers(gate: Gate, own: bool, model: Workload, steps: int) -> None:
    """Trains by Hugging Face's Trainer."""
    import transformers

    class OfTransformers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.loss = model.build(torch), model.loss(torch)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = self.loss(self.network(inputs), labels)
            gate.loss = loss.detach()
            return {"loss": loss}

    class Begin(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: object, **others: object) -> None:
            gate.step()

    cls = transformers.Trainer
    if own:
        adapter = importlib.import_module("tensorwire.torch.integrations.transformers")
        cls = adapter.TensorwireTrainer
    module = OfTransformers()
    optimizer = make_optimizer(torch, model.optimizer or "sgd", module.parameters(), fused=True)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = transformers.TrainingArguments(
        "out", use_cpu=True, max_steps=steps, per_device_train_batch_size=model.batch,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        ddp_find_unused_parameters=False, ddp_backend="gloo",
    )  # fmt: skip
    trainer = cls(
        module, arguments, train_dataset=Samples(model), optimizers=(optimizer, constant),
        callbacks=[Begin()],
    )  # fmt: skip
    trainer.train()


LOOPS = {"lightning": train_lightning, "transformers": train_transformers}


def main() -> None:
    """Reads the arguments, and trains by the library's loop."""
    # torchrun starts it in a session of its own, so the bench cannot kill it with its group.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    side, address, order = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    torch.set_num_threads(1)
    model = named(order["model"], LIBRARY_MODELS)
    gate = Gate(address, int(os.environ["RANK"]))
    LOOPS[order["library"]](
        gate, side == "tensorwire", model.reduced() if order["tiny"] else model, order["steps"] + 1
    )


if __name__ == "__main__":
    main()
