"""Saving what a job keeps: one file that torch.load reads, complete or not there."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .whole import whole_of

_FORMAT = 1


def save(path: str | os.PathLike[str], kept: Mapping[str, Any], done: int, seed: int) -> None:
    """See `Job.save`."""
    if not kept:
        raise RuntimeError("nothing to save; name it first: job.keep(model=…, optimizer=…)")
    target = Path(path)
    content = {name: _copied(thing.state_dict()) for name, thing in kept.items()}
    content["tensorwire"] = {"format": _FORMAT, "epochs": done, "seed": seed}
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(
    path: str | os.PathLike[str],
    kept: Mapping[str, Any],
    optimizers: list[Any],
    seed: int,
    mapped: bool = False,
) -> int:
    """See `Job.load`; returns the number of epochs that are done.

    With `mapped` only what is used of the file is read.
    """
    try:
        content = torch.load(path, weights_only=True, mmap=mapped or None)
        head = content["tensorwire"]
        done, made_with = int(head["epochs"]), int(head["seed"])
        if head["format"] != _FORMAT:
            raise ValueError("written by another version of tensorwire")
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} is no checkpoint: {error}") from error
    if made_with != seed:
        raise ValueError(
            f"{os.fspath(path)} was made by a job with seed {made_with}, this one has {seed}: "
            f"samples and random numbers would not go on; call tw.init(seed={made_with})"
        )
    names = set(content) - {"tensorwire"}
    if names != set(kept):
        raise ValueError(
            f"{os.fspath(path)} has {sorted(names)}, the job keeps {sorted(kept)}; keep the same"
        )
    for name, thing in kept.items():
        if any(_is_model_of(thing, opt) for opt in optimizers):
            from .optimizer import edit

            with edit(thing):
                thing.load_state_dict(content[name])
        else:
            thing.load_state_dict(content[name])
    return done


def _is_model_of(thing: Any, optimizer: Any) -> bool:
    is_model = isinstance(thing, torch.nn.Module) or whole_of(thing) is not None
    return is_model and optimizer._tensorwire.shares(thing)


def _copied(value: Any) -> Any:
    """Tensors that share memory with others become their own: the file has no more than them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        result = copy.copy(value)  # of its own kind: a Counter, a model's OrderedDict
        for key, item in value.items():
            result[key] = _copied(item)
        return result
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
