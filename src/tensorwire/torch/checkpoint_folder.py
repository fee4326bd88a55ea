"""Manages a folder of checkpoints, each a directory that appears complete or not at all.

`checkpoint-000007` has a safetensors file (https://github.com/huggingface/safetensors) for each
model, `state.pt` with all else, as `checkpoint.py` writes it, and `checkpoint.json` with the size
and the SHA-256 of each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tensorwire.errors import UnavailableError
from tensorwire.jobs.lockfile import is_there, try_lock

from .archive import reason_of, sync_folder

FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{6,18})")
_PART = re.compile(r"\.checkpoint-\d{6,}\.[0-9a-f]{16}\.part")
_INDEX, _STATE, _MODEL = "checkpoint.json", "state.pt", ".safetensors"
_CHUNK_BYTES = 1 << 20
_MOST_INDEX_BYTES = 1 << 20


def save(
    folder: str | os.PathLike[str],
    content: Mapping[str, Any],
    models: Set[str],
    keep: int,
    write: Callable[[dict[str, Any], BinaryIO], None],
) -> Path:
    """Writes a checkpoint into a folder, which is made, and removes the oldest ones.

    Args:
        folder: it may hold other things; they stay.
        content: by the names that were kept.
        models: the names of states of models; all else goes through `write`, and so does a state
            for which safetensors has no form.
        keep: how many are there afterwards, the new one included.
        write: writes a dict to a file.

    Returns:
        The new directory.

    Raises:
        OSError: it cannot be written; the earlier ones stay as they were.
        UnavailableError: safetensors is not installed.
    """
    tensors = {key: content[key] for key in models if _has_form(key, content[key])}
    rest = {key: state for key, state in content.items() if key not in tensors}
    try:
        Path(folder).mkdir(exist_ok=True)
        _remove_parts(Path(folder))
        with _part(Path(folder)) as part:
            for model, state in tensors.items():
                _write_model(part / f"{model}{_MODEL}", state)
            with open(part / _STATE, "xb") as file:
                write(rest, file)
            _write_index(part)
            made = _publish(part)
    except OSError as error:
        raise _error(
            folder, error, "cannot save the checkpoint", "earlier ones stay as they were"
        ) from error
    try:
        for number in sorted(_numbers(Path(folder)))[:-keep]:
            _remove(_directory(Path(folder), number))
    except OSError as error:
        raise _error(
            folder, error, "cannot remove an older checkpoint", f"{made} is complete"
        ) from error
    return made


def load(
    path: str | os.PathLike[str], read: Callable[[str], dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Loads a checkpoint, or the last one in a folder; returns the content and its name.

    Its files are compared with their checksums before anything is used.

    Args:
        path: of a folder, or of a checkpoint in it.
        read: reads a file that `write` has written, by a path that is valid during the call.

    Raises:
        ValueError: it is damaged, or there is none.
        OSError: it cannot be read.
    """
    found = _find(Path(path))
    with contextlib.ExitStack() as stack:
        index = _read_index(found)
        files = {
            name: stack.enter_context(open(found / name, "rb", opener=_open_file)) for name in index
        }
        for name, expected in index.items():
            if _sum_of(files[name]) != expected:
                raise _damaged(found, f"{name} is not what was saved")
        paths = {name: f"/proc/self/fd/{file.fileno()}" for name, file in files.items()}
        content = read(paths[_STATE])
        for name, there in paths.items():
            if name.endswith(_MODEL):
                model = name.removesuffix(_MODEL)
                if model in content:
                    raise _damaged(found, f"{name} and {_STATE} both have {model!r}")
                content[model] = _read_model(found, name, there)
    return content, found.name


def is_unused(path: str | os.PathLike[str]) -> bool:
    """Tells whether a path is a folder without a completed checkpoint or any other content.

    It is empty, or has only the remains of processes that were killed in their first `save`.
    """
    folder = Path(path)
    if not folder.is_dir() or _NAME.fullmatch(folder.name):
        return False
    return all(map(_PART.fullmatch, os.listdir(folder)))


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise UnavailableError(
            "checkpoints in a folder need safetensors: pip install 'tensorwire[torch]'"
        ) from error
    return safetensors.torch


# ---- writing


def _error(folder: str | os.PathLike[str], error: OSError, what: str, rest: str) -> OSError:
    text = f"{what}: {reason_of(error, folder)}; {rest}"
    return OSError(error.errno or errno.EIO, text, os.fspath(folder))


def _has_form(name: str, state: Any) -> bool:
    """Tells whether a safetensors file can have a state: tensors by name, and nothing else."""
    return (
        name.isidentifier()
        and isinstance(state, dict)
        and len(state) > 0
        and all(
            isinstance(key, str)
            and isinstance(tensor, torch.Tensor)
            and tensor.layout == torch.strided
            and not tensor.is_quantized
            and tensor.dtype != torch.complex128
            for key, tensor in state.items()
        )
    )


def _write_model(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    library = _safetensors()
    tensors = {key: tensor.contiguous() for key, tensor in state.items()}
    try:
        library.save_file(tensors, path, metadata={"format": "pt"})
    except Exception as error:
        found = re.search(r"os error (\d+)", str(error))  # of its own class, and not an OSError
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from error


def _write_index(part: Path) -> None:
    """Brings all files to the disk, and writes the index of their sizes and checksums."""
    files = {}
    for path in sorted(part.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            files[path.name] = _sum_of(file)
    with open(part / _INDEX, "x") as index:
        json.dump({"format": FORMAT, "files": files}, index, indent=1)
        index.flush()
        os.fsync(index.fileno())
    sync_folder(part)


def _sum_of(file: BinaryIO) -> dict[str, Any]:
    found, size = hashlib.sha256(), 0
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        found.update(chunk)
        size += len(chunk)
    return {"bytes": size, "sha256": found.hexdigest()}


@contextlib.contextmanager
def _part(folder: Path) -> Iterator[Path]:
    """Yields a new directory that others leave alone as long as it is locked."""
    part, descriptor = _new_part(folder)
    try:
        yield part
    finally:
        os.close(descriptor)
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)


def _new_part(folder: Path) -> tuple[Path, int]:
    """Makes a directory; returns its path, and a descriptor that locks it if that is possible."""
    while True:
        part = _directory(folder, _next_number(folder), secrets.token_hex(8))
        part.mkdir()
        try:
            descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process took it for one that was left, before it was locked
        try:
            locked = try_lock(descriptor)
        except OSError:
            locked = True
        if locked and is_there(part, descriptor):
            return part, descriptor
        os.close(descriptor)


def _publish(part: Path) -> Path:
    """Gives the directory its name, the next that is free."""
    while True:
        target = _directory(part.parent, _next_number(part.parent))
        try:
            part.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            continue  # another process was faster
        sync_folder(part.parent)
        return target


def _next_number(folder: Path) -> int:
    names = map(_NAME.fullmatch, os.listdir(folder))  # of whatever kind
    return max((int(match[1]) for match in names if match), default=0) + 1


def _directory(folder: Path, number: int, part: str = "") -> Path:
    name = f"checkpoint-{number:06d}"
    return folder / (f".{name}.{part}.part" if part else name)


def _numbers(folder: Path) -> list[int]:
    """Returns the numbers of the checkpoints in a folder."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.append(int(match[1]))
    return found


def _remove(directory: Path) -> None:
    """Removes a checkpoint; as long as it has its name it is complete."""
    if not (directory / _INDEX).exists():
        return  # not of `save`
    part = _directory(
        directory.parent, int(directory.name.rpartition("-")[2]), secrets.token_hex(8)
    )
    with contextlib.suppress(FileNotFoundError):  # another process removes it
        directory.rename(part)
        shutil.rmtree(part, ignore_errors=True)


def _remove_parts(folder: Path) -> None:
    """Removes the remains of killed processes, which are not locked any more."""
    for name in filter(_PART.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            descriptor = os.open(folder / name, flags)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder / name, ignore_errors=True)
            finally:
                os.close(descriptor)


# ---- reading


def _find(path: Path) -> Path:
    if (path / _INDEX).exists() or _NAME.fullmatch(path.name):
        return path
    numbers = _numbers(path)
    if not numbers:
        raise ValueError(
            f"{path} is a directory without checkpoints, and has other things in it; "
            "job.save(path, keep=3) writes such ones, and job.save(path) a file"
        )
    return _directory(path, max(numbers))


def _read_model(found: Path, name: str, there: str) -> dict[str, torch.Tensor]:
    library = _safetensors()
    try:
        state: dict[str, torch.Tensor] = library.load_file(there)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of its own class
        raise _damaged(found, f"{name} is no safetensors file: {error}") from error
    return state


def _open_file(path: str, flags: int) -> int:
    """Opens a regular file of a checkpoint; a pipe is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_index(found: Path) -> dict[str, Any]:
    """Reads the index of a checkpoint: its files with their checksums."""
    try:
        with open(found / _INDEX, "rb", opener=_open_file) as file:
            index = json.loads(file.read(_MOST_INDEX_BYTES))
    except FileNotFoundError:
        raise _damaged(found, f"{_INDEX} is missing") from None
    except ValueError as error:
        raise _damaged(found, f"{_INDEX} cannot be read: {error}") from error
    if not isinstance(index, dict):
        raise _damaged(found, f"{_INDEX} does not tell its files")
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{found} is no checkpoint of this version of tensorwire: it has the format "
            f"{index.get('format')!r}, this version reads {FORMAT}"
        )
    files = index.get("files")
    if not isinstance(files, dict) or _STATE not in files:
        raise _damaged(found, f"{_INDEX} does not tell its files")
    for name in files:
        if "/" in name or name in ("", ".", ".."):
            raise _damaged(found, f"{_INDEX} names {name!r}")
        if not (found / name).is_file():
            raise _damaged(found, f"{name} is missing")
    return files


def _damaged(found: Path, what: str) -> ValueError:
    earlier = [
        number for number in _numbers(found.parent) if _directory(found.parent, number) != found
    ]
    other = f", as {_directory(found.parent, max(earlier))}" if earlier else ""
    return ValueError(
        f"{found} is damaged: {what}. Copy it again, or load an earlier checkpoint{other}"
    )
