"""How `bench files` times a read, and a parameter by a mount of ours.

Beside that are tmpfs and another program that answers FUSE: passthrough_ll, the example of libfuse
whose files are those of a folder, here one on tmpfs. Debian has its source in libfuse3-dev, and it
is compiled here.
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
PASSTHROUGH, PYTHON = "passthrough_ll", "python"
SMALL_BYTES = 4096

Way = Callable[[], float]
"""Does it once; the seconds that it took."""

_SOURCE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")
_MOUNT_S = 10.0


def why_no_mount() -> str:
    """Why nothing can be mounted here; "" if it can."""
    if os.geteuid() != 0:
        return "only root may mount what /dev/fuse answers"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


def why_no_passthrough() -> str:
    """Why libfuse's passthrough_ll cannot be compiled here; "" if it can."""
    for program, package in (("cc", "a C compiler"), ("pkg-config", "pkg-config")):
        if shutil.which(program) is None:
            return f"passthrough_ll is not compiled without {package}"
    has_library = subprocess.run(["pkg-config", "--exists", "fuse3"], check=False).returncode == 0
    if not (has_library and _SOURCE.exists()):
        return "passthrough_ll needs libfuse3-dev with its examples (apt-get install libfuse3-dev)"
    return ""


def compile_c(source: Path, program: Path, *flags: str) -> None:
    """Raises UnavailableError with what the compiler says."""
    if shutil.which("cc") is None:
        raise UnavailableError(f"{source.name} is not compiled without a C compiler (cc)")
    done = subprocess.run(
        ["cc", "-O2", "-o", str(program), str(source), *flags],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise UnavailableError(f"{source.name} cannot be compiled: {done.stderr.strip()}")


def timed(action: Callable[[], object]) -> float:
    """What it makes is thrown away within the time, as a program does that reads on."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def timed_cold(path: Path, action: Callable[[], object]) -> float:
    """Likewise, when the kernel has kept nothing of a file; of tmpfs it keeps all."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found = timed(action)
    os.close(descriptor)
    return found


@contextlib.contextmanager
def mounted(folder: Path, address: str) -> Iterator[tuple[int, bool]]:
    """A job in a folder that is made.

    Yields the process, and whether the kernel reads and maps models itself.
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
    """A folder, by passthrough_ll, in another one that is made. It has libfuse's own settings.

    Yields the process.
    """
    program = folder.with_name("passthrough_ll")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    compile_c(_SOURCE, program, *flags)
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
    """This thread runs on these cores, and all threads of another process on those.

    Linux leaves threads that wake each other where they are, on one core or on two, and that
    decides what a small read takes, whoever answers it.
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
    """A parameter by a mount of ours, by passthrough_ll where that is there, and on tmpfs.

    Args:
        folder: on tmpfs, for what is made.
        address: of the job.
        path: of the parameter in the job.
        file: the same bytes on tmpfs.
        start: where its elements begin.
        size_bytes: of them.
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
        """The whole parameter, by reads of 1 MiB into memory that is there."""
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
        """A block somewhere in it; the mean of 200.

        Who reads and who answers are on one core, or `apart`, on two.
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
                    os.preadv(descriptor, [target], 0)  # all are there now
                    all_ = timed_cold(
                        path, lambda: [os.preadv(descriptor, [target], at) for at in offsets]
                    )
                return all_ / len(offsets)

            return read

        return {system: way(system, path) for system, path in self._mounted().items()}

    def folder(self) -> Path:
        """Our mount, which is there from now on."""
        made = self._folder / "mount"
        if self._passes is None:
            found = self._open.enter_context(mounted(made, self._address))
            self._processes[OURS], self._passes = found
        return made

    def passes_through(self) -> bool:
        """The kernel reads and maps its models itself."""
        self.folder()
        return bool(self._passes)

    def at_end(self, action: Callable[[], object]) -> None:
        """Is called before the mounts are ended."""
        self._open.callback(action)

    def _mounted(self) -> dict[str, Path]:
        """The parameter by each system; the mounts are there from now on."""
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
