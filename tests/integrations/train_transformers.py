"""Trains by the Trainer of transformers: `SIDE FOLDER CASE...`; `ours` or `theirs`, its DDP.

Every process writes what it has seen of each case to FOLDER.
"""

import copy
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from tensorwire.torch.integrations.transformers import TensorwireMixin, TensorwireTrainer

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore", message=".*find_unused_parameters.*")
SIDE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
SIZE = int(os.environ.get("WORLD_SIZE", 1))
PLAIN, OTHER = transformers.Trainer, transformers.Seq2SeqTrainer


class Mixed(TensorwireMixin, OTHER):
    pass


class Sentences(Dataset[Any]):
    """Sentences of different lengths, so that tokens are counted across processes."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(2, 50, (12,), generator=generator)
        labels = words.clone()
        labels[12 - index % 5 :] = -100
        return {"input_ids": words, "labels": labels}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    tokens = {"bos_token_id": 0, "eos_token_id": 1}
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(loss_type="ForCausalLMLoss", **sizes, **tokens))


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        names = "loss", "grad_norm", "learning_rate", "eval_loss", "eval_right"
        found = {name: float(logs[name]) for name in names if name in logs}
        if found:
            self.rows.append(found)


def right(prediction: Any) -> dict[str, float]:
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"right": float((guesses == labels)[labels != -100].mean())}


def trainer(name: str, module: Any = None, cls: Any = None, **options: Any) -> Any:
    given = {
        "output_dir": str(FOLDER / name),
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "learning_rate": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    cls = cls or (TensorwireTrainer if SIDE == "ours" else PLAIN)
    arguments: Any = TrainingArguments
    if issubclass(cls, OTHER):
        arguments = transformers.Seq2SeqTrainingArguments
    made = cls(
        module or model(),
        arguments(**{**given, **options}),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=right,
        callbacks=[Losses()],
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def seen(of: Any) -> dict[str, Any]:
    rows = next(c for c in of.callback_handler.callbacks if isinstance(c, Losses)).rows
    values = {name: value.clone() for name, value in of.model.state_dict().items()}
    return {"rows": rows, "steps": of.state.global_step, "values": values}


def trained(name: str, **options: Any) -> dict[str, Any]:
    of = trainer(name, **options)
    of.train()
    return seen(of)


def plain(name: str) -> dict[str, Any]:
    """Without clipping; the norm is told all the same. By a subclass of another Trainer."""
    return trained(name, cls=Mixed if SIDE == "ours" else OTHER, max_grad_norm=0)


def adam(name: str) -> dict[str, Any]:
    """The Trainer's own choice of an optimizer."""
    return trained(name, optim="adamw_torch_fused", optim_args=None, learning_rate=1e-2)


def clipped(name: str) -> dict[str, Any]:
    return trained(name, max_grad_norm=0.1)


def accumulated(name: str) -> dict[str, Any]:
    """Trains with accumulation and an incomplete group at the end of an epoch."""
    return trained(name, gradient_accumulation_steps=2)


def bf16(name: str) -> dict[str, Any]:
    return trained(name, bf16=True)


def resumed(name: str) -> dict[str, Any]:
    """Stops in the middle of an epoch; a new Trainer with another model goes on."""
    trainer(name, save_strategy="steps", save_steps=3, max_steps=3).train()
    other = model()
    with torch.no_grad():
        other.transformer.wpe.weight.zero_()
    second = trainer(name, other)
    second.train(resume_from_checkpoint=True)
    folder = FOLDER / name / "checkpoint-3"
    files = sorted(path.name for path in folder.iterdir())
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    return {**seen(second), "files": files, "optimizer": optimizer["state"]}


def best(name: str) -> dict[str, Any]:
    """The best model is loaded at the end, is evaluated, and trains on."""
    options = {"metric_for_best_model": "eval_right", "load_best_model_at_end": True}
    saving = {"save_strategy": "epoch", "save_only_model": True}
    of = trainer(name, **saving, **options)
    of.train()
    first = {key: value.clone() for key, value in of.model.state_dict().items()}
    evaluated = of.evaluate()["eval_loss"]
    of.train()
    return {**seen(of), "first": first, "evaluated": [evaluated]}


def told(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def misused(name: str) -> dict[str, Any]:
    """Ours only: what cannot work says so, in every process."""
    return {
        "use_cpu": told(lambda: trainer(name, use_cpu=False)),
        "fp16": told(lambda: trainer(name, fp16=True)),
    }


def main() -> None:
    global SIDE
    sides = SIDE.split("+")
    for SIDE in sides:
        for name in sys.argv[3:]:
            found = copy.deepcopy(globals()[name](f"{SIDE}-{name}"))
            torch.save(found, FOLDER / f"{SIDE}-{name}-{RANK}.pt")


if __name__ == "__main__":
    main()
