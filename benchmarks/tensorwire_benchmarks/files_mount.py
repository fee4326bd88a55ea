"""The clock of `bench files`, and its ways to read a parameter by a mount.

Its rivals are tmpfs and passthrough_ll, the example of libfuse that mirrors a folder, here one on
tmpfs. Debian has its source in libfuse3-dev; it is compiled here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from tensorwire.errors import UnavailableError

MIB = 1 << 20
OURS, COPY, TMPFS, TORCH, ALONE = "tensorwire", "copy", "tmpfs", "torch", "alone"
PASSTHROUGH = "passthrough_ll"
SMALL_BYTES = 4096

Way = Callable[[], float]
"""A function that does one thing once and returns its seconds."""

_SOURCE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")
_MOUNT_S = 10.0


def why_no_mount() -> str:
    """Returns the reason why no mount is possible here, or ""."""
    if os.geteuid() != 0:
        return "only root may mount what /dev/fuse answers"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


def why_no_passthrough() -> str:
    """Returns the reason why libfuse's passthrough_ll cannot be compiled here, or ""."""
    for program, package in (("cc", "a C compiler"), ("pkg-config", "pkg-config")):
        if shutil.which(program) is None:
            return f"passthrough_ll is not compiled without {package}"
    has_library = subprocess.run(["pkg-config", "--exists", "fuse3"], check=False).returncode == 0
    if not (has_library and _SOURCE.exists()):
        return "passthrough_ll needs libfuse3-dev with its examples (apt-get install libfuse3-dev)"
    return ""


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds of `action`, including the time to free its result."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def timed_cold(path: Path, action: Callable[[], object]) -> float:
    """Returns the seconds of `action` with no page of the file in the kernel's cache.

    A file on tmpfs stays in memory all the same.
    """
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found = timed(action)
    os.close(descriptor)
    return found


@contextlib.contextmanager
def mounted(folder: Path, address: str) -> Iterator[tuple[int, bool]]:
    """Mounts a job in a new folder.

    Yields the process id, and whether the kernel reads and maps models itself.

    Raises:
        UnavailableError: the mount has not started.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "tensorwire", "mount", str(folder), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if "is mounted" not in process.stdout.readline():
                raise UnavailableError("the mount of the bench has not started")
            yield process.pid, "reads and maps models itself" in process.stdout.readline()
        finally:
            process.terminate()


@contextlib.contextmanager
def passed_through(folder: Path, source: Path) -> Iterator[int]:
    """Mounts `source` by passthrough_ll, with its default settings, in a new folder.

    Yields the process id.

    Raises:
        UnavailableError: it cannot be compiled, or has mounted nothing.
    """
    program = folder.with_name("passthrough_ll")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    done = subprocess.run(
        ["cc", "-O2", "-o", str(program), str(_SOURCE), *flags],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise UnavailableError(f"{_SOURCE.name} cannot be compiled: {done.stderr.strip()}")
    folder.mkdir()
    command = [str(program), "-f", "-o", f"source={source}", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _MOUNT_S
            while not os.path.ismount(folder):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError("passthrough_ll has mounted nothing")
                time.sleep(0.02)
            yield process.pid
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
            process.terminate()


@contextlib.contextmanager
def placed(mine: set[int], pid: int | None, its: set[int]) -> Iterator[None]:
    """Runs this thread on the cores `mine`, and all threads of process `pid` on the cores `its`.

    Linux keeps threads that wake each other on one core or on two, and that decides the time of a
    small read more than the program that answers it.
    """
    before = os.sched_getaffinity(0)
    try:
        _place(pid, its)
        os.sched_setaffinity(0, mine)
        yield
    finally:
        os.sched_setaffinity(0, before)
        _place(pid, before)


def _place(pid: int | None, cores: set[int]) -> None:
    for thread in [] if pid is None else os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


class MountWays:
    """The ways to read a parameter by our mount, by passthrough_ll if available, and on tmpfs.

    Args:
        folder: a folder on tmpfs for mounts and files.
        address: of the job.
        path: of the parameter in the job.
        file: a file on tmpfs with the same bytes.
        start: the offset of the first element.
        size_bytes: the bytes of all elements.
    """

    def __init__(
        self, folder: Path, address: str, path: str, file: Path, start: int, size_bytes: int
    ) -> None:
        self._folder, self._address, self._path, self._file = folder, address, path, file
        self._start, self._size = start, size_bytes
        self._random = np.random.default_rng(0)
        self._open = contextlib.ExitStack()
        self._passes: bool | None = None
        self._paths: dict[str, Path] = {}
        self._processes: dict[str, int] = {}

    def close(self) -> None:
        """Ends the mounts."""
        self._open.close()

    def all(self) -> Mapping[str, Way]:
        """Returns ways to read the whole parameter by reads of 1 MiB into existing memory."""
        target = memoryview(np.ones(self._size + MIB, np.uint8).data)

        def read(path: Path) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            at = 0
            while count := os.preadv(descriptor, [target[at : at + MIB]], at):
                at += count
            os.close(descriptor)

        def way(path: Path) -> Way:
            return lambda: timed_cold(path, lambda: read(path))

        return {system: way(path) for system, path in self._mounted().items()}

    def random(self, apart: bool) -> Mapping[str, Way]:
        """Returns ways to read 4 KiB at a random place of the parameter; the mean of 200.

        The reader and the process that answers are on one core, or on two if `apart`.
        """
        cores = sorted(os.sched_getaffinity(0))
        mine, its = {cores[0]}, {cores[1 if apart else 0]}

        def way(system: str, path: Path) -> Way:
            descriptor = os.open(path, os.O_RDONLY)
            self._open.callback(os.close, descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            target = memoryview(bytearray(SMALL_BYTES))

            def read() -> float:
                places = self._random.integers(0, self._size - SMALL_BYTES, 200) + self._start
                offsets = [int(each) for each in places]
                with placed(mine, self._processes.get(system), its):
                    os.preadv(descriptor, [target], 0)  # all threads run now
                    all_ = timed_cold(
                        path, lambda: [os.preadv(descriptor, [target], at) for at in offsets]
                    )
                return all_ / len(offsets)

            return read

        return {system: way(system, path) for system, path in self._mounted().items()}

    def folder(self) -> Path:
        """Returns the folder of our mount, and mounts it on the first call."""
        made = self._folder / "mount"
        if self._passes is None:
            found = self._open.enter_context(mounted(made, self._address))
            self._processes[OURS], self._passes = found
        return made

    def passes_through(self) -> bool:
        """Returns whether the kernel reads and maps the mount's models itself."""
        self.folder()
        return bool(self._passes)

    def at_end(self, action: Callable[[], object]) -> None:
        """Calls `action` before the mounts end."""
        self._open.callback(action)

    def _mounted(self) -> dict[str, Path]:
        """Returns the path of the parameter in each system, and mounts on the first call."""
        if not self._paths:
            self._paths = {OURS: self.folder() / self._path, TMPFS: self._file}
            if not why_no_passthrough():
                source = self._folder / "source"
                source.mkdir()
                (source / self._file.name).write_bytes(self._file.read_bytes())
                theirs = self._folder / "passthrough"
                started = self._open.enter_context(passed_through(theirs, source))
                self._processes[PASSTHROUGH] = started
                self._paths[PASSTHROUGH] = theirs / self._file.name
        return self._paths
