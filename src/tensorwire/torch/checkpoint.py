"""Reads and writes a job's checkpoint as one file that torch.load reads too (see `archive.py`).

`checkpoint_folder.py` writes a checkpoint as a directory of several files.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.utils.serialization import config

from . import archive, checkpoint_folder
from .model_index import model_index_of
from .replica.replica import Replica
from .replica.replica_snapshot import ReplicaSnapshot

_FORMAT = 1
_HEAD = "tensorwire"  # in the file, what is the job's own


class Loaded(NamedTuple):
    """The state of the job in a checkpoint.

    Attributes:
        epochs: that are done.
        position: inside the next one, as `Position.saved` returns it.
        name: of the directory, if it was one.
        slices: of the job that saved it; None: an older version did, which did not tell.
    """

    epochs: int
    position: dict[str, Any] | None
    name: str
    slices: int | None = None


def check_trackable(name: str, thing: Any) -> None:
    """Raises TypeError or ValueError for an object that `Job.track` cannot take."""
    if name == _HEAD:
        raise ValueError(f"the job itself saves something as {name!r}; choose another name")
    if not _is_plain(thing) and not (
        hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    ):
        raise TypeError(
            f"{name}, of the class {type(thing).__name__}, has no state_dict() and "
            "load_state_dict(), and is no dict and no list, which job.load could fill: put plain "
            f"values into one of these, as in job.track({name}={{'value': 0.5}})"
        )


def _is_plain(thing: Any) -> bool:
    """Tells whether it is saved and filled directly, not by a state_dict()."""
    return isinstance(thing, dict | list) and not hasattr(thing, "load_state_dict")


class Content:
    """The content of a checkpoint at one moment; the store's part is read from snapshots.

    Args:
        kept, trained, done, seed, position: as of `save`.
        slices: of the job.

    Raises:
        RuntimeError, TypeError: see `Job.save`.
        BusyError, MemoryError, PeerLostError: see `Store.snapshot`.
    """

    def __init__(
        self,
        kept: Mapping[str, Any],
        trained: Sequence[Replica],
        done: int,
        seed: int,
        position: Mapping[str, Any] | None = None,
        slices: int | None = None,
    ) -> None:
        if not kept:
            raise RuntimeError("nothing to save; name it first: job.track(model=…, optimizer=…)")
        _check_trained_are_kept(kept, [each for each in trained if not each.closed])
        for replica in trained:
            if any(_is_model_of(thing, replica) for thing in kept.values()):
                replica.check_unchanged()
        self._models = {name for name, thing in kept.items() if _is_model(thing)}
        self._snapshots: list[ReplicaSnapshot] = []
        try:
            mine: dict[str, list[ReplicaSnapshot]] = {name: [] for name in kept}
            for replica in trained:
                names = [name for name, thing in kept.items() if is_at_servers(thing, replica)]
                if names and not replica.closed:
                    self._snapshots.append(ReplicaSnapshot(replica))
                    for name in names:
                        mine[name].append(self._snapshots[-1])
            self._things = {name: _saved(name, kept[name], mine[name]) for name in kept}
        except BaseException:
            self.release()
            raise
        plain = [name for name, thing in kept.items() if _is_plain(thing)]
        self._things[_HEAD] = {
            "format": _FORMAT, "epochs": done, "seed": seed, "plain": plain, "position": position,
            "slices": slices,
        }  # fmt: skip

    def write(self, path: str | os.PathLike[str], keep: int | None = None) -> Path:
        """Writes the content, then releases it; see `Job.save`. Any thread, once."""
        try:
            for each in self._snapshots:
                each.fetch()
            if keep is not None:
                return checkpoint_folder.save(path, self._things, self._models, keep, _write)
            archive.replace(path, lambda file: _write(self._things, file))
            return Path(path)
        finally:
            self._things = {}
            self.release()

    def release(self) -> None:
        """Gives the memory of the snapshots back; idempotent."""
        for each in self._snapshots:
            each.release()


def save(
    path: str | os.PathLike[str],
    kept: Mapping[str, Any],
    trained: Sequence[Replica],
    done: int,
    seed: int,
    position: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """See `Job.save`."""
    return Content(kept, trained, done, seed, position).write(path, keep)


def _check_trained_are_kept(kept: Mapping[str, Any], trained: Sequence[Replica]) -> None:
    """Checks that trained objects are kept: others would begin anew in a job that goes on.

    Warns of a model or an optimizer that is not; RuntimeError if no trained model is kept.
    """
    models = [each for each in trained if any(_is_model_of(thing, each) for thing in kept.values())]
    if trained and not models:
        raise RuntimeError(
            "no model that is trained was named to job.track, so that the file would have "
            f"{', '.join(kept)} without the parameters: job.track(model=…, optimizer=…)"
        )
    for replica in trained:
        name = type(replica.optimizer).__name__
        missing = [
            what
            for what, is_kept in (
                ("model", replica in models),
                ("optimizer", any(thing is replica.optimizer for thing in kept.values())),
            )
            if not is_kept
        ]
        if missing:
            warnings.warn(
                f"job.track was not given the {' and the '.join(missing)} of {name}: a job that "
                "goes on from this file begins with what its script makes, and not with what was "
                f"trained. If it is to go on: job.track({'=…, '.join(missing)}=…)",
                stacklevel=5,
            )


def is_at_servers(thing: Any, replica: Replica) -> bool:
    """Tells whether it is a distributed optimizer, or the model of one."""
    return thing is replica.optimizer or _is_model_of(thing, replica)


def saved(thing: Any) -> Any:
    """Returns the content of a kept object, which may share its tensors."""
    return thing if _is_plain(thing) else thing.state_dict()


def fill(thing: Any, value: Any) -> None:
    """Fills an object with the value that `saved` has returned.

    Tensors, dicts and lists in a dict or list stay the same objects, since the script may have
    other names for them: they are filled too. Sparse and expanded tensors, and those of another
    shape or type, are replaced.
    """
    if not _is_plain(thing):
        thing.load_state_dict(value)
    elif isinstance(thing, dict):
        filled = {key: _filled(thing.get(key), item) for key, item in value.items()}
        thing.clear()
        thing.update(filled)
    else:
        former = [*thing, *[None] * len(value)]
        thing[:] = [_filled(old, item) for old, item in zip(former, value, strict=False)]


def _filled(old: Any, value: Any) -> Any:
    """Returns the old object filled with a value, or the value if that is impossible."""
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
        if not _can_be_filled(old, value):
            return value
        value = value.to(old.device)
        if not torch.equal(old, value):  # it may be a parameter, which has it already
            with torch.no_grad():
                old.copy_(value)
        return old
    if _is_plain(old) and isinstance(value, dict if isinstance(old, dict) else list):
        fill(old, value)
        return old
    return value


def _can_be_filled(old: torch.Tensor, value: torch.Tensor) -> bool:
    """Tells whether a tensor has a separate element for each of a value's, of the same type."""
    if old.layout != torch.strided or value.layout != torch.strided or 0 in old.stride():
        return False  # sparse or expanded
    return (old.shape, old.dtype) == (value.shape, value.dtype)


def _saved(name: str, thing: Any, snapshots: Sequence[ReplicaSnapshot]) -> Any:
    """Returns the file's content for a kept object; raises for things that `load` would refuse."""

    def taken(tensor: torch.Tensor) -> torch.Tensor:
        for each in snapshots:
            if (found := each.take(tensor)) is not None:
                return found
        return _own(tensor)

    try:
        if _is_plain(thing):
            # Of a class of its own only what is in it.
            state = _copied(dict(thing) if isinstance(thing, dict) else list(thing))
            _check_loadable(name, state)
        else:
            with ExitStack() as stack:
                for each in snapshots:
                    stack.enter_context(each.reading())
                state = _copied(thing.state_dict(), taken)
            _check_loadable(f"the state_dict() of {name}", state)
    except RecursionError:
        raise TypeError(f"{name} contains itself, or is too deep to be saved") from None
    return state


def _check_loadable(what: str, state: Any) -> None:
    """Raises, before anything is written, for objects that `load` would refuse."""
    outline = io.BytesIO()
    try:
        torch.save(
            _copied(state, lambda tensor: torch.empty(0, dtype=tensor.dtype, device="cpu")), outline
        )
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"{what} holds what cannot be saved: {error}") from error
    outline.seek(0)
    try:
        torch.load(outline, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        raise TypeError(
            f"{what} holds {found[1] if found else 'Python objects'}, which job.load would "
            "refuse: it may hold tensors, numbers (not numpy's: float(x) makes one), texts and "
            "containers of these, and what torch.serialization.add_safe_globals was told"
        ) from error


class _Output:
    """A file that remembers why writing failed: torch raises an error of its own instead."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(content: dict[str, Any], file: BinaryIO) -> None:
    output = _Output(file)
    try:
        with config.patch("save.compute_crc32", True):  # `load` compares
            torch.save(content, output)  # type: ignore[arg-type]
    except Exception as error:
        if output.error is None:
            raise
        raise output.error from error


def load(
    path: str | os.PathLike[str],
    kept: Mapping[str, Any],
    trained: Sequence[Replica],
    editing: Callable[[Any], AbstractContextManager[None]],
    seed: int,
    mapped: bool = False,
) -> Loaded | None:
    """See `Job.load`; None: nothing was saved in a folder so far, and nothing is loaded.

    With `mapped` only what is used of the file stays in memory.
    """
    if checkpoint_folder.is_unused(path):
        return None
    name, found = os.fspath(path), ""

    def read(there: str) -> dict[str, Any]:
        return _content(there, name, mapped)

    if os.path.isdir(path):
        content, found = checkpoint_folder.load(path, read)
    else:
        content = archive.read(path, read)
    head = content.pop(_HEAD)
    if head["seed"] != seed:
        raise ValueError(
            f"{name} was made by a job with seed {head['seed']}, this one has {seed}: "
            f"samples and random numbers would not go on; call tw.init(seed={head['seed']})"
        )
    if set(content) != set(kept):
        raise ValueError(
            f"{name} has {sorted(map(str, content))}, the job tracks {sorted(kept)}; track the same"
        )
    for key, thing in kept.items():
        there = _kind(content[key], key in head["plain"])
        if there != _kind(thing, _is_plain(thing)):
            raise ValueError(
                f"{key} is {there} in {name}, and not {_kind(thing, _is_plain(thing))} as here; "
                "track the same"
            )
    plain = {key: thing for key, thing in kept.items() if _is_plain(thing)}
    for key, thing in kept.items():
        if key in plain:
            continue
        is_trained = any(_is_model_of(thing, replica) for replica in trained)
        with editing(thing) if is_trained else nullcontext():
            thing.load_state_dict(content[key])
    for key, thing in plain.items():
        fill(thing, _copied(content[key]))  # with `mapped` it lies in the file
    return Loaded(int(head["epochs"]), head["position"], found, head["slices"])


def _kind(thing: Any, plain: bool) -> str:
    """Returns the name that messages give to a kept object, or to its part of a file."""
    if not plain:
        return "what state_dict() returns"
    return "a dict" if isinstance(thing, dict) else "a list"


def _content(there: str, name: str, mapped: bool) -> dict[str, Any]:
    """Reads the content that `save` has written to the file `there`, called `name`."""
    try:
        # The job that saved it may have had other devices.
        content = torch.load(there, map_location="cpu", weights_only=True, mmap=mapped or None)
    except pickle.UnpicklingError as error:
        # Not torch's text: it advises to run whatever the file holds.
        raise ValueError(
            f"{name} is no checkpoint: it holds other Python objects than tensors, numbers, texts "
            "and containers of these, so job.save did not write it"
        ) from error
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        raise ValueError(f"{name} is damaged or no checkpoint: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get(_HEAD), dict):
        has = f"with {_some(content)}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(
            f"{name} is no checkpoint but something else that torch.save wrote: {has}; a "
            "checkpoint is a file that job.save wrote"
        )
    head = content[_HEAD]
    if head.get("format") != _FORMAT:
        raise ValueError(
            f"{name} is no checkpoint of this version of tensorwire: it has the format "
            f"{head.get('format')!r}, this version reads {_FORMAT}"
        )
    if not all(isinstance(head.get(key), int) for key in ("epochs", "seed")):
        raise ValueError(f"{name} is no checkpoint: it tells no epochs or no seed")
    position = head.setdefault("position", None)  # older files have none, and nothing plain
    if position is not None and not _is_position(position):
        raise ValueError(f"{name} is no checkpoint: it does not tell where in its data it was")
    if not isinstance(head.setdefault("slices", None), int | None):
        raise ValueError(f"{name} is no checkpoint: it does not tell its slices")
    plain = head.setdefault("plain", [])
    for key in plain if isinstance(plain, list) else [None]:
        if not isinstance(key, str) or not isinstance(content.get(key), dict | list):
            raise ValueError(f"{name} is no checkpoint: it does not tell what is plain in it")
    return content


def _is_position(position: Any) -> bool:
    """Tells whether it has the form that `Position.saved` returns."""
    if not isinstance(position, dict) or position.keys() != {"epoch", "passes", "over"}:
        return False
    passes, over = position["passes"], position["over"]
    return (
        isinstance(position["epoch"], int)
        and isinstance(passes, dict)
        and all(
            isinstance(each, list) and [type(part) for part in each] == [int, int, str]
            for each in passes.values()
        )
        and isinstance(over, dict)
        and all(isinstance(number, int) for number in over.values())
    )


def _some(content: dict[Any, Any]) -> str:
    keys = [repr(key) for key in content]
    return ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")


def _is_model_of(thing: Any, replica: Replica) -> bool:
    return _is_model(thing) and replica.shares(thing)


def _is_model(thing: Any) -> bool:
    return isinstance(thing, torch.nn.Module) or model_index_of(thing) is not None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host, so that a file has no devices."""
    return tensor.detach().cpu() if tensor.is_cuda else tensor.detach().clone()


def _copied(value: Any, of: Callable[[torch.Tensor], torch.Tensor] = _own) -> Any:
    """Returns a copy whose tensors have memory of their own, so that a file has no more."""
    if isinstance(value, torch.Tensor):
        return of(value)
    if isinstance(value, dict):
        result = copy.copy(value)  # of its own kind: a Counter, a model's OrderedDict
        for key, item in value.items():
            result[key] = _copied(item, of)
        return result
    if isinstance(value, list | tuple):
        items = [_copied(item, of) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
