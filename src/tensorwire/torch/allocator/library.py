"""Compiles, loads and calls the allocator that produces gradients in their slots.

`allocator.cc` needs one library per minor version of torch. A wheel brings the libraries for tested
versions. For another version one process of a host compiles it, against the headers of the
installed torch, for all processes of this user, when it is first needed. It knows addresses and
bytes; `gradient_slots.py` knows which gradient belongs where.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch

from tensorwire.errors import UnavailableError
from tensorwire.jobs.folder import cache_folder, runtime_folder
from tensorwire.jobs.lockfile import tell

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "allocator.cc"
_TIMEOUT_S = 300.0
_SILENT_S = 1.0  # before the user is told that another process compiles
_NO_COMPILER = (
    "no C++ compiler was found to compile the allocator for this torch; install one "
    "(Debian: g++), or name it in CXX"
)


class Allocator:
    """The functions of the library; `allocator.cc` has their contracts. Any thread."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        number, address, size = ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint64

        def function(
            name: str, result: type | None, *arguments: type
        ) -> Callable[..., int]:  # functions without a result give None, which is not used
            found: Callable[..., int] = library[f"tensorwire_allocator_{name}"]
            found.restype, found.argtypes = result, arguments  # type: ignore[attr-defined]
            return found

        whole = ctypes.c_int
        self.install = function("install", whole)
        self.installed = function("installed", whole)
        self.add_pool = function("add_pool", number)
        self.add_slot = function("add_slot", number, number, address, size, address)
        self.add_block = function("add_block", number, number, address, size)
        self.miss = function("miss", None, number, whole)
        self.retire = function("retire", whole, number)
        self.remove = function("remove", None, number)
        self.trim = function("trim", None, number)
        self.held = function("held", whole, number)
        self.predicted = function("predicted", whole, number)
        self.add_context = function("add_context", number, number)
        self.begin = function("begin", None, number)
        self.enter = function("enter", None, number)
        self.leave = function("leave", None)
        self.learn = function("learn", whole, number, address)
        self.forget = function("forget", None, number)
        self.placed = function("placed", size)


@functools.lru_cache(maxsize=1)
def load() -> Allocator:
    """Returns the library for this torch, compiled if need be, with its allocator installed.

    Raises:
        UnavailableError: it cannot be had here; the message says what is missing.
    """
    allocator = Allocator(_open())
    outcome = allocator.install()
    if outcome == 3:
        raise UnavailableError("this torch lacks a function that the allocator calls")
    if outcome:
        raise UnavailableError(
            "torch's CPU allocator was replaced by another library, which ours cannot work beside"
        )
    return allocator


def _open() -> ctypes.PyDLL:
    # Calls take less than giving up the interpreter's lock and getting it again.
    mode = os.RTLD_LOCAL | os.RTLD_NODELETE
    brought, why = _brought(), ""
    if brought.exists() and torch._C._GLIBCXX_USE_CXX11_ABI:
        try:
            return ctypes.PyDLL(str(brought), mode)
        except OSError as error:  # of another libc or libstdc++: it is compiled here
            why = f" (the one that came with tensorwire cannot be loaded: {error})"
    try:
        return ctypes.PyDLL(str(_compiled()), mode)
    except OSError as error:
        raise UnavailableError(f"the allocator library cannot be loaded: {error}{why}") from error
    except UnavailableError as error:
        raise UnavailableError(f"{error}{why}") from error


def find() -> str:
    """Returns how `load` would get the library, in words; compiles nothing and installs nothing.

    Raises:
        UnavailableError: it would not get one.
    """
    brought, why = _brought(), ""
    if brought.exists() and torch._C._GLIBCXX_USE_CXX11_ABI:
        try:
            ctypes.PyDLL(str(brought), os.RTLD_LOCAL | os.RTLD_NODELETE)
            return f"prebuilt, {brought.name}"
        except OSError as error:
            why = f"; the prebuilt one cannot be loaded: {error}"
    if path := _built_before():
        return f"compiled before, {path}{why}"
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(f"{_NO_COMPILER}{why}")
    return f"compiled at first use, by {compiler[0]}{why}"


def _brought() -> Path:
    """Returns where a wheel has the library for this minor version of torch (CMakeLists.txt)."""
    minor = ".".join(torch.__version__.split(".")[:2])
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    return _FOLDER / f"allocator-{minor}-{digest}.so"


def _compiled() -> Path:
    """Returns the library, which one process of this user on this host compiles for all.

    Raises:
        UnavailableError: there is none, and none can be made; the message says why.
    """
    if path := _built_before():
        return path
    compiler = find_compiler()
    if compiler is None:
        raise UnavailableError(_NO_COMPILER)
    refusals = []
    for folder in _places():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_safe(folder.stat()):
                refusals.append(f"others may write to {folder}")
                continue
            with (folder / "allocator.lock").open("a") as lock:
                path = folder / _name()
                _await(lock, path)
                if not _is_whole(path):
                    _compile(compiler, path)
                return path
        except OSError as error:
            refusals.append(str(error))
    raise UnavailableError(f"the allocator cannot be kept anywhere: {'; '.join(refusals)}")


def _await(lock: TextIO, path: Path) -> None:
    """Waits for the lock; tells the user when that takes long, since another process compiles."""
    deadline = time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    tell(f"waiting for another process, which compiles {path} for this torch")
    fcntl.flock(lock, fcntl.LOCK_EX)


def _compile(compiler: Sequence[str], path: Path) -> None:
    """Makes the library and ends it with its digest; `path` is the whole of it or as it was."""
    tell(
        f"compiling {path} with {compiler[0]}, once for torch {torch.__version__}; this may take a "
        "minute"
    )
    part = path.with_suffix(".part")
    try:
        command = [*_command(compiler), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        with part.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        part.chmod(0o700)
        part.replace(path)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "no reason")
        raise UnavailableError(f"the allocator does not compile for this torch: {why}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"the allocator cannot be compiled: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _built_before() -> Path | None:
    """Returns the library that a process has left in one of the places; None if none has."""
    return next((path for each in _places() if _is_whole(path := each / _name())), None)


def _is_whole(path: Path) -> bool:
    """Returns whether there is a library as `_compile` left it, in a folder without strangers.

    To load a damaged one would end the process.
    """
    try:
        about = path.lstat()
        if not (stat.S_ISREG(about.st_mode) and _is_safe(about) and _is_safe(path.parent.stat())):
            return False
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _is_safe(about: os.stat_result) -> bool:
    """Returns whether only this user or root can have written a file."""
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def find_compiler() -> list[str] | None:
    """Returns the command of this machine's C++ compiler, from CXX if set; None without one.

    Raises:
        UnavailableError: what CXX names is not there.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if found := shutil.which(wanted[0]):
            return [found, *wanted[1:]]
        raise UnavailableError(f"CXX names {wanted[0]!r}, which is not there; unset it or name one")
    return next(
        ([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None
    )


def _name() -> str:
    # Of the compiler there is nothing in it: another process may have had one where this has none.
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_flags()).encode()).hexdigest()[:16]
    return f"allocator-{torch.__version__}-{digest}.so"


def _flags() -> list[str]:
    return [
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,defs"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]


def _command(compiler: Sequence[str]) -> list[str]:
    include = Path(torch.__file__).parent / "include"
    return [*compiler, *_flags(), "-isystem", str(include), str(_SOURCE), "-ldl"]


def _places() -> Iterator[Path]:
    """Yields the folders in which the library is looked for and kept, the same in all processes.

    The user's cache, and where that cannot be written the folder of running jobs.
    """
    if (base := cache_folder()) is not None:
        yield base / "tensorwire"
    try:
        yield runtime_folder()
    except UnavailableError:
        return
