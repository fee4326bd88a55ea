"""Compiles, loads and calls the allocator that produces gradients in their slots.

`allocator.cc` needs one library per minor version of torch. A wheel brings those of the versions
that it was built beside; for another one it is compiled against the headers of the installed torch
when it is first needed, and kept in the user's cache, one library per version. It knows addresses
and bytes; which gradient belongs where is `gradient_slots.py`'s business.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tensorwire.errors import UnavailableError
from tensorwire.membership import cache_folder

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "allocator.cc"
_TIMEOUT_S = 120.0
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
        ) -> Callable[..., int]:  # those without a result give None, which nobody looks at
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
    """The library for this torch, compiled if there is none yet, and its allocator installed.

    Raises:
        UnavailableError: it cannot be had here; the message says what is missing.
    """
    allocator = Allocator(_open())
    if allocator.install():
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
    """How `load` would get the library, in words; compiles nothing and installs nothing.

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
    compiler = find_compiler()
    path = _folder() / _name(compiler or ["c++"])
    if path.exists():
        return f"compiled before, {path}{why}"
    if compiler is None:
        raise UnavailableError(f"{_NO_COMPILER}{why}")
    return f"compiled at first use, by {compiler[0]}{why}"


def _brought() -> Path:
    """Returns where a wheel has the library for this minor version of torch (CMakeLists.txt)."""
    minor = ".".join(torch.__version__.split(".")[:2])
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    return _FOLDER / f"allocator-{minor}-{digest}.so"


def _compiled() -> Path:
    compiler = find_compiler()
    path = _folder() / _name(compiler or ["c++"])
    if path.exists():
        return path
    if compiler is None:
        raise UnavailableError(_NO_COMPILER)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as file:
        made = Path(file.name)
    try:
        command = [*_command(compiler), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        made.replace(path)  # whole or not at all: other workers may be doing the same
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else "no reason")
        raise UnavailableError(f"the allocator does not compile for this torch: {why}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"the allocator cannot be compiled: {error}") from error
    finally:
        made.unlink(missing_ok=True)
    return path


def find_compiler() -> list[str] | None:
    """The C++ compiler of this machine, CXX with its words where that is set; None if none is.

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


def _name(compiler: Sequence[str]) -> str:
    command = " ".join(_command(compiler)).encode()
    digest = hashlib.sha256(_SOURCE.read_bytes() + command).hexdigest()[:16]
    return f"allocator-{torch.__version__}-{digest}.so"


def _command(compiler: Sequence[str]) -> list[str]:
    home = Path(torch.__file__).parent
    return [
        *compiler,
        *("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{home / 'include'}",
        str(_SOURCE),
        f"-L{home / 'lib'}",
        *("-lc10", "-ltorch_cpu"),
    ]


def _folder() -> Path:
    """Returns a folder in which only this user can put a library; makes it if need be."""
    if (base := cache_folder()) is None:
        return _private_folder()
    folder = base / "tensorwire"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _private_folder()


@functools.lru_cache(maxsize=1)
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="tensorwire-"))
