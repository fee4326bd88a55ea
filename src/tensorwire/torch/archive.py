"""Writes a checkpoint's file, which is replaced as a whole or not at all, and verifies it.

`checkpoint.py` defines the content; this module knows files, and the zip archives of torch.save.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

from tensorwire.jobs.lockfile import is_there, try_lock

_CHUNK_BYTES = 1 << 20
_MOST_NAME_BYTES = 200  # of a file whose part has its name and 23 bytes; Linux allows 255
_FLAGS = 0x808  # sizes and CRC-32 follow the data; names are UTF-8
_ZIP = b"PK\x03\x04"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_EXPECTED = "a checkpoint is a file that job.save wrote"
_KINDS = (
    (re.compile(rb".{4}\0{4}\{", re.DOTALL), "a safetensors file"),
    (_PICKLE, "a pickle, or a file that torch.save wrote in its older form"),
    (re.compile(rb"\x93NUMPY"), "a numpy array"),
    (re.compile(rb"\x89HDF"), "an HDF5 file"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), "compressed data"),
)

T = TypeVar("T")


# ---- writing


def replace(path: str | os.PathLike[str], write: Callable[[BinaryIO], None]) -> None:
    """Writes a file that appears at `path` complete or not at all, also if the system fails.

    If the path is a symbolic link, its target is replaced. The mode of a file that was there is
    kept. If two processes write at the same time, the last complete file wins.

    Args:
        path: of the file.
        write: writes the content; its errors pass through.

    Raises:
        OSError: it cannot be written; names `path`. An older file stays as it is.
    """
    name = os.fspath(path)
    try:
        target = Path(os.path.realpath(path))
        mode = _mode_of(target)
        remove_parts(target)
        part, file = _new_part(target)
        try:
            with file:
                write(file)
                file.flush()
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
                part.replace(target)  # while it is locked: it is taken for no part left behind
        finally:
            with contextlib.suppress(OSError):
                part.unlink()
        sync_folder(target.parent)
    except OSError as error:
        text = (
            f"cannot save the checkpoint: {reason_of(error, path)}; an older file stays as it was"
        )
        raise OSError(error.errno or errno.EIO, text, name) from error


def reason_of(error: OSError, path: str | os.PathLike[str]) -> str:
    """Returns why a path cannot be written; if a folder is missing, which one."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        for folder in reversed(Path(os.path.realpath(path)).parents):
            if not folder.is_dir():
                what = "no folder" if os.path.lexists(folder) else "missing"
                return f"{reason}: {folder} is {what}"
    return reason


def _mode_of(target: Path) -> int | None:
    """Returns the permissions of a target; None if it does not exist; OSError if it is no file."""
    try:
        found = target.lstat()  # a link that is left after resolving all leads nowhere
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "there is a directory")
    if not stat.S_ISREG(found.st_mode):
        what = "a link that leads to itself" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise OSError(errno.EINVAL, f"there is {what}, which a checkpoint would replace")
    return stat.S_IMODE(found.st_mode)


def _new_part(target: Path) -> tuple[Path, BinaryIO]:
    """Returns a new file beside the target, locked for as long as it is open."""
    while True:
        part = target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.part")
        file = part.open("xb")
        try:
            locked = try_lock(file.fileno())
        except OSError:
            return part, file  # the file system has no locks
        if locked and is_there(part, file.fileno()):
            return part, file
        file.close()  # another process removes it as one that was left, before it was locked


def _stem(target: Path) -> str:
    """Returns the target's name, or a shorter one in its place if a suffix would not fit."""
    name = os.fsencode(target.name)
    return target.name if len(name) <= _MOST_NAME_BYTES else hashlib.sha256(name).hexdigest()


def remove_parts(target: Path) -> None:
    """Removes the remains of killed processes in `replace` beside a file.

    A part is locked by the process that writes it, and that one is left alone; so is every part
    where the file system has no locks, or this process may not remove it.
    """
    pattern = re.compile(re.escape(f".{_stem(target)}.") + r"[0-9a-f]{16}\.part")
    try:
        names = os.listdir(target.parent)
    except OSError:
        return  # opening the file next gives the error of its folder
    for part in (target.with_name(name) for name in names if pattern.fullmatch(name)):
        # Another process may be faster, or this one has no right here: then it stays.
        with contextlib.suppress(OSError), open(part, "rb", opener=_open_at_once) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if regular and _lock(file.fileno()) and is_there(part, file.fileno()):
                part.unlink()


def _open_at_once(path: str, flags: int) -> int:
    """Opens a file that may be another user's: a link is an error; a pipe is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _lock(descriptor: int) -> bool:
    """Tells whether this open file is locked now; never where the file system has no locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return False


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system has no such thing for folders
            raise
    finally:
        os.close(descriptor)


# ---- reading


def read(path: str | os.PathLike[str], load: Callable[[str], T]) -> T:
    """Calls `load` with a path to the file, after the checksums of all of it were found right.

    Both see the same file, even if another one takes its place meanwhile.

    Args:
        path: of the file.
        load: gets another path to it, valid during the call.

    Raises:
        ValueError: it is damaged, cut off, or no archive of torch.save; names `path`.
        OSError: it cannot be read; names `path`.
    """
    name = os.fspath(path)
    remove_parts(Path(os.path.realpath(path)))
    kind = os.stat(path).st_mode
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, f"this is a directory; {_EXPECTED}", name)
    if not stat.S_ISREG(kind):  # not opened: that could wait for ever
        raise ValueError(f"{name} is no regular file; {_EXPECTED}")
    with open(path, "rb", buffering=_CHUNK_BYTES) as file:
        _check(file, name)
        return load(f"/proc/self/fd/{file.fileno()}")


def _check(file: BinaryIO, name: str) -> None:
    head = file.read(512)
    if not head.startswith(_ZIP):
        raise ValueError(f"{name} is {_what_begins(head)}; {_EXPECTED}")
    if b"/data.pkl" not in head:  # the name of torch.save's first record
        raise ValueError(f"{name} is a zip archive that torch.save did not write; {_EXPECTED}")
    try:
        _check_records(file)
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise OSError(error.errno, f"{error.strerror}, while it was read", name) from error
        # Any error of zipfile: a damaged length or offset leads it anywhere.
        raise ValueError(
            f"{name} is damaged: {error or type(error).__name__}. Copy it again, or load an "
            "earlier checkpoint"
        ) from error


def _check_records(file: BinaryIO) -> None:
    """Checks that every record has the length and the CRC-32 that are noted for it."""
    if not zipfile.is_zipfile(file):
        size = os.fstat(file.fileno()).st_size
        raise zipfile.BadZipFile(f"of {size} bytes, the last are not the end of an archive")
    with zipfile.ZipFile(file) as archive:
        # zipfile takes the last archive of a file, and torch the first.
        if min((record.header_offset for record in archive.infolist()), default=1) != 0:
            raise zipfile.BadZipFile("its first bytes are of no record")
        for record in archive.infolist():
            _check_entry(record)
            size = 0
            with archive.open(record) as content:
                while chunk := content.read(_CHUNK_BYTES):
                    size += len(chunk)
            if size != record.file_size:
                raise zipfile.BadZipFile(f"the record {record.filename!r} is cut off")


def _check_entry(record: zipfile.ZipInfo) -> None:
    """Checks the bytes without a checksum: they have to be as torch.save writes them.

    torch reads nothing into a tensor whose record has the attribute of a folder.
    """
    stored = record.compress_type == zipfile.ZIP_STORED
    attributes = record.external_attr, record.internal_attr, record.volume, record.comment
    flags = record.flag_bits & ~_FLAGS
    if not stored or record.file_size != record.compress_size or flags or any(attributes):
        raise zipfile.BadZipFile(f"the record {record.filename!r} is not as torch.save writes it")


def _what_begins(head: bytes) -> str:
    """Returns the kind of file that begins with these bytes, for messages."""
    if not head:
        return "empty"
    for pattern, kind in _KINDS:
        if pattern.match(head):
            return kind
    text = head.decode("utf-8", "ignore")
    if len(text.encode()) > len(head) - 4 and all(c.isprintable() or c.isspace() for c in text):
        return f"a text that begins with {text[:20]!r}"
    return f"something unknown that begins with {head[:8]!r}"
