"""Trains through Lightning: `SIDE FOLDER CASE...`; the side is `ours` or `theirs`, Lightning's DDP.

Every process writes what it has seen of each case to FOLDER.
"""

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tensorwire.torch as tw
from tensorwire.torch.integrations.lightning import TensorwireStrategy

torch.set_num_threads(1)
SIDE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
SIZE = int(os.environ.get("WORLD_SIZE", 1))


def data(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


class Classifier(pl.LightningModule):
    def __init__(self, adam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.adam = adam
        self.losses: list[float] = []
        self.validations: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.validations.append(float(self.trainer.callback_metrics["validation"]))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def trainer(name: str, **options: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "strategy": TensorwireStrategy() if SIDE == "ours" else "ddp",
        "accelerator": "cpu",
        "devices": os.environ.get("DEVICES", "auto" if SIDE == "ours" else SIZE),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": FOLDER / name,
    }
    return pl.Trainer(**{**given, **options})


def loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=6, shuffle=shuffle)


def fitted(name: str, module: Any = None, **options: Any) -> dict[str, Any]:
    pl.seed_everything(7)
    module = module or Classifier()
    of = trainer(name, **options)
    of.fit(module, loader(), loader(False))
    return seen(module)


def seen(module: Any) -> dict[str, Any]:
    return {
        "losses": module.losses,
        "validations": module.validations,
        "values": {name: value.clone() for name, value in module.state_dict().items()},
    }


def plain(name: str) -> dict[str, Any]:
    return fitted(name)


def adam(name: str) -> dict[str, Any]:
    return fitted(name, Classifier(adam=True))


def clipped(name: str) -> dict[str, Any]:
    return fitted(name, gradient_clip_val=0.05)


def clipped_by_value(name: str) -> dict[str, Any]:
    return fitted(name, gradient_clip_val=0.01, gradient_clip_algorithm="value")


def accumulated(name: str) -> dict[str, Any]:
    """With a rest of an epoch, and with clipping."""
    return fitted(name, accumulate_grad_batches=2, gradient_clip_val=0.05)


def bf16(name: str) -> dict[str, Any]:
    return fitted(name, precision="bf16-mixed")


def resumed(name: str) -> dict[str, Any]:
    """Two epochs, a checkpoint, and two more in a new Trainer with a new model."""
    folder = FOLDER / name
    pl.seed_everything(7)
    first, of = Classifier(), trainer(name)
    of.fit(first, loader(), loader(False))
    of.save_checkpoint(folder / "middle.ckpt")
    second = Classifier()
    with torch.no_grad():
        second.layers[0].weight.zero_()
    trainer(name, max_epochs=4).fit(
        second, loader(), loader(False), ckpt_path=folder / "middle.ckpt"
    )
    saved = torch.load(folder / "middle.ckpt", weights_only=False)
    return {**seen(second), "optimizer": saved["optimizer_states"][0]["state"]}


def written(name: str) -> dict[str, Any]:
    """Logs and checkpoints come from one process."""
    log = CSVLogger(FOLDER / name, name="log")
    keep = pl.callbacks.ModelCheckpoint(monitor="validation", save_top_k=2)
    options = {"logger": log, "enable_checkpointing": True, "log_every_n_steps": 1}
    found = fitted(name, callbacks=[keep], **options)
    torch.distributed.barrier()
    files = sorted(str(p.relative_to(FOLDER / name)) for p in (FOLDER / name).rglob("*.*"))
    rows = (FOLDER / name / "log" / "version_0" / "metrics.csv").read_text().count("\n")
    return {**found, "files": files, "rows": rows}


def evaluated(name: str) -> dict[str, Any]:
    """A test, and two fits of one model."""
    pl.seed_everything(7)
    module = Classifier()
    of = trainer(name, max_epochs=1)
    of.fit(module, loader(), loader(False))
    (first,) = of.test(module, loader(False), verbose=False)
    again = trainer(name, max_epochs=1)
    again.fit(module, loader(), loader(False))
    (second,) = again.test(module, loader(False), verbose=False)
    return {**seen(module), "tests": [first["test"], second["test"]]}


class Adversaries(pl.LightningModule):
    """Two optimizers that take turns, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(4, 8), nn.Linear(8, 1)
        self.losses: list[float] = []
        self.validations: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            self.toggle_optimizer(optimizer)
            loss = sign * self.judge(self.maker(batch[0][:, :4]) + batch[0]).tanh().mean()
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: Any, index: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.maker, self.judge)]


def manual(name: str) -> dict[str, Any]:
    options = {} if SIDE == "ours" else {"strategy": "ddp_find_unused_parameters_true"}
    return fitted(name, Adversaries(), **options)


class Same(IterableDataset[Any]):
    """Gives every process the same, as Lightning does not deal out such data."""

    def __iter__(self) -> Any:
        return iter(data(40))


def told(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misused(name: str) -> dict[str, Any]:
    """Ours only: what cannot work says so, in every process."""
    half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    results = {
        "scaler": told(lambda: fitted(name, plugins=[half])),
        "devices": told(lambda: trainer(name, devices=SIZE + 2)),
        "as many": told(lambda: trainer(name, devices=SIZE)),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(name).fit(Classifier(), DataLoader(Same(), batch_size=5))
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
