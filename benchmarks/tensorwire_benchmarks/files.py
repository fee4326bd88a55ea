"""What does it cost to read a running job as files?

A job of one worker and one server with a model of 512 MiB stands still; in the last case one of
64 MiB trains. Each way takes turns with what it is measured beside.

parameter: a parameter of 64 MiB by fsspec, beside copying the same bytes into a fresh `bytes` (the
limit), and beside a file on tmpfs. random: 4 KiB of it, beside tmpfs. mapped: safetensors maps the
sealed model and reads one tensor of 64 MiB, beside the same file on tmpfs. snapshot: a version is
taken until its tensors are here, beside torch.save to tmpfs and torch.load; snapshot_read: and
every byte of them is read, on both sides. mount: the parameter by a mount, opened anew, of which
the kernel has kept nothing, beside tmpfs; mount_random: 4 KiB of it, likewise. training: steps per
second while somebody reads 100 MB/s of parameters by fsspec, beside steps that nobody looks at.

Not measured: TCP, other hosts; what the kernel has kept of a file of a mount, which is as fast as
tmpfs. Where nothing can be mounted the cases of a mount are left out, with a warning.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.bench import machine
from tensorwire.bench.harness import paired_ratio
from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire.bench.verdicts import Bar
from tensorwire.command import Told
from tensorwire.errors import UnavailableError
from tensorwire.files import SealedModel
from tensorwire.membership import running_servers

MIB = 1 << 20
OURS, COPY, TMPFS, TORCH, ALONE = "tensorwire", "copy", "tmpfs", "torch", "alone"
PARAMETER, RANDOM, MAPPED, SNAPSHOT, SNAPSHOT_READ, MOUNT, MOUNT_RANDOM, TRAINING = CASES = (
    "parameter", "random", "mapped", "snapshot", "snapshot_read", "mount", "mount_random",
    "training",
)  # fmt: skip
_SMALL_BYTES = 4096
_READ_BYTES_PER_S = 100e6
_START_S = 120.0

Way = Callable[[], float]
"""Does it once; the seconds that it took."""


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """What to run.

    Attributes:
        cases: of `CASES`.
        large_mib: of the parameter that is read.
        total_mib: of the model.
        rounds: how often each way takes its turn.
        window_s: of each turn of training.
    """

    cases: Sequence[str] = CASES
    large_mib: int = 64
    total_mib: int = 512
    rounds: int = 16
    window_s: float = 4.0


def run(settings: FilesSettings, tell: Told) -> Report:
    """Measures everything in turns; Ctrl-C ends it with the rows so far."""
    about = machine.describe()
    described: dict[str, Any] = {
        "cases": list(settings.cases),
        "large_mib": settings.large_mib,
        "total_mib": settings.total_mib,
        "rounds": settings.rounds,
        "interrupted": False,
        "warnings": machine.warnings_about(about),
    }
    report = Report("files", about, settings=described)
    left_out: list[str] = []
    if reason := _why_no_mount():
        left_out = [case for case in settings.cases if case in (MOUNT, MOUNT_RANDOM)]
        described["warnings"] += [f"{case} is left out: {reason}" for case in left_out]
    try:
        still = [case for case in settings.cases if case not in (TRAINING, *left_out)]
        for cases in (still, [TRAINING] if TRAINING in settings.cases else []):
            if cases:
                total_mib = settings.total_mib if cases is still else settings.large_mib
                with (
                    tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
                    _job(Path(folder), settings.large_mib, total_mib) as address,
                ):
                    _measure_all(report, settings, cases, Path(folder), address, tell)
    except KeyboardInterrupt:
        report.settings["interrupted"] = True
    report.settings["load_average_after"] = machine.load_average()
    report.verdicts = [bar.judge(report) for bar in BARS]
    return report


def _measure_all(
    report: Report,
    settings: FilesSettings,
    cases: Sequence[str],
    folder: Path,
    address: str,
    tell: Told,
) -> None:
    ways = _Ways(folder, address, settings.large_mib * MIB)
    total = settings.total_mib // settings.large_mib * settings.large_mib * MIB
    makes: dict[str, tuple[int, Callable[[], Mapping[str, Way]]]] = {
        PARAMETER: (settings.large_mib * MIB, ways.parameter),
        RANDOM: (_SMALL_BYTES, ways.random),
        MAPPED: (settings.large_mib * MIB, ways.mapped),
        SNAPSHOT: (total, partial(ways.snapshot, False)),
        SNAPSHOT_READ: (total, partial(ways.snapshot, True)),
        MOUNT: (settings.large_mib * MIB, ways.mount),
        MOUNT_RANDOM: (_SMALL_BYTES, ways.mount_random),
    }
    with contextlib.closing(ways):
        for case in cases:
            tell(settings.cases.index(case), len(settings.cases), case)
            if case == TRAINING:
                _measure_training(report, settings, folder, ways)
            else:
                size, make = makes[case]
                _measure(report, case, size, make(), settings.rounds)


def _measure(report: Report, case: str, size: int, ways: Mapping[str, Way], rounds: int) -> None:
    """The first of the ways is ours; the others are what it is beside."""
    seconds: dict[str, list[float]] = {system: [] for system in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for system, way in ways.items():
            seconds[system].append(way())
    for system, each in seconds.items():
        row = Row("files", case, system, size).timed(each, moves=True)
        if system == OURS and COPY in seconds:
            row = row.beside(paired_ratio(seconds[COPY], each))
        report.rows.append(row)
        if system not in (OURS, COPY):
            ratio = paired_ratio(each, seconds[OURS])
            if ratio is not None:
                found = (ratio.median, ratio.interval, ratio.pairs)
                report.comparisons.append(Comparison(case, size, OURS, system, *found))


def _measure_training(report: Report, settings: FilesSettings, folder: Path, ways: _Ways) -> None:
    """Time per step with a reader and without, window by window."""
    (folder / "train").touch()
    steps: dict[str, list[float]] = {OURS: [], ALONE: []}
    moved = 0
    _steps_in(folder, settings.window_s)
    for _ in range(max(6, settings.rounds // 2)):
        for system in (ALONE, OURS):
            with ways.reading(system == OURS) as count:
                steps[system].append(_steps_in(folder, settings.window_s))
            moved += count[0]
    (folder / "train").unlink()
    rate = moved / (len(steps[OURS]) * settings.window_s)
    for system, each in steps.items():
        note = f"beside a reader of {rate / 1e6:.0f} MB/s" if system == OURS else ""
        report.rows.append(Row("files", TRAINING, system, 0, note=note).timed(each))
    ratio = paired_ratio(steps[ALONE], steps[OURS])
    if ratio is not None:
        found = (ratio.median, ratio.interval, ratio.pairs)
        report.comparisons.append(Comparison(TRAINING, 0, OURS, ALONE, *found))


class _Ways:
    """How the bytes of a job are read, and what that is beside."""

    def __init__(self, folder: Path, address: str, large_bytes: int) -> None:
        from tensorwire.files.filesystem import TensorwireFileSystem

        self._folder, self._large = folder, large_bytes
        self._fs = TensorwireFileSystem(address, skip_instance_cache=True)
        self._path = "params/p0.npy"
        self._file = folder / "p0.npy"
        data = self._fs.cat_file(self._path)
        self._file.write_bytes(data)
        self._start = len(data) - large_bytes
        self._random = np.random.default_rng(0)
        self._kept: SealedModel | None = None
        self._mounting: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """Ends the connection, and the mount."""
        self._fs.close()
        if self._mounting is not None:
            with self._mounting as process:
                process.terminate()

    def parameter(self) -> Mapping[str, Way]:
        """The whole parameter."""
        memory = np.fromfile(self._file, np.uint8).data
        return {
            OURS: lambda: _timed(lambda: self._fs.cat_file(self._path)),
            COPY: lambda: _timed(lambda: bytes(memory)),
            TMPFS: lambda: _timed(self._file.read_bytes),
        }

    def random(self) -> Mapping[str, Way]:
        """A block somewhere in it; the mean of 200."""
        descriptor = os.open(self._file, os.O_RDONLY)

        def ours(at: int) -> object:
            return self._fs.cat_file(self._path, at, at + _SMALL_BYTES)

        def theirs(at: int) -> object:
            return os.pread(descriptor, _SMALL_BYTES, at)

        def mean(read: Callable[[int], object]) -> float:
            places = self._random.integers(0, self._large - _SMALL_BYTES, 200) + self._start
            return _timed(lambda: [read(int(at)) for at in places]) / len(places)

        return {OURS: lambda: mean(ours), TMPFS: lambda: mean(theirs)}

    def mapped(self) -> Mapping[str, Way]:
        """One tensor of a file that is mapped, opened anew."""
        from safetensors import safe_open

        reader = self._fs.tree.reader
        model = reader.sealed_model()
        if model.is_copy:
            raise UnavailableError("the server's copy of the model is no file of this host")
        file = self._folder / "model.safetensors"
        file.write_bytes(Path(model.path).read_bytes())

        def read(path: str) -> None:
            with safe_open(path, framework="np") as opened:
                opened.get_tensor("p0").sum()

        self._kept = model
        return {
            OURS: lambda: _timed(lambda: read(model.path)),
            TMPFS: lambda: _timed(lambda: read(str(file))),
        }

    def snapshot(self, read: bool) -> Mapping[str, Way]:
        """All of a version, from the wish until its tensors are here; `read`: every byte of them.

        Ours are mapped when they are here, those of torch.load are in memory of their own.
        """
        import torch
        from safetensors import safe_open

        if self._kept is not None:
            self._kept.close()
        reader = self._fs.tree.reader
        with reader.sealed_model() as model, safe_open(model.path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}
        file = self._folder / "model.pt"

        def use(found: Mapping[str, Any]) -> None:
            for tensor in found.values() if read else ():
                tensor.sum()

        def ours() -> None:
            with reader.sealed_model() as model, safe_open(model.path, framework="pt") as opened:
                use({name: opened.get_tensor(name) for name in opened.keys()})

        def theirs() -> None:
            torch.save(tensors, file)
            use(torch.load(file))

        return {OURS: lambda: _timed(ours), TORCH: lambda: _timed(theirs)}

    def mount(self) -> Mapping[str, Way]:
        """The whole parameter, by reads of 1 MiB into memory that is there."""
        target = memoryview(np.ones(self._large + MIB, np.uint8).data)
        mounted = self._mounted()

        def read(path: Path) -> None:
            descriptor = os.open(path, os.O_RDONLY)
            at = 0
            while count := os.preadv(descriptor, [target[at : at + MIB]], at):
                at += count
            os.close(descriptor)

        def way(path: Path) -> Way:
            return lambda: _timed_cold(path, lambda: read(path))

        return {OURS: way(mounted), TMPFS: way(self._file)}

    def mount_random(self) -> Mapping[str, Way]:
        """A block somewhere in it; the mean of 200."""

        def way(path: Path) -> Way:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            target = memoryview(bytearray(_SMALL_BYTES))

            def read() -> float:
                places = self._random.integers(0, self._large - _SMALL_BYTES, 200) + self._start
                offsets = [int(each) for each in places]
                all_ = _timed_cold(
                    path, lambda: [os.preadv(descriptor, [target], at) for at in offsets]
                )
                return all_ / len(offsets)

            return read

        return {OURS: way(self._mounted()), TMPFS: way(self._file)}

    def _mounted(self) -> Path:
        """The parameter in a mount, which there is from now on."""
        folder = self._folder / "mount"
        if self._mounting is None:
            folder.mkdir()
            self._mounting = subprocess.Popen(
                [sys.executable, "-m", "tensorwire", "mount", str(folder), self._fs.address],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert self._mounting.stdout is not None
            if "is mounted" not in self._mounting.stdout.readline():
                raise UnavailableError("the mount of the bench has not started")
        return folder / self._path

    @contextlib.contextmanager
    def reading(self, busy: bool) -> Iterator[list[int]]:
        """Somebody reads parameters, 100 MB/s of them, in a process of his own."""
        count = [0]
        if not busy:
            yield count
            return
        script = Path(__file__).with_name("files_reader.py")
        command = [sys.executable, str(script), self._fs.address, self._path]
        command.append(str(_READ_BYTES_PER_S))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != b"reads\n":
                raise UnavailableError("the reader of the bench has not started")
            try:
                yield count
            finally:
                process.stdin.close()
                told = process.stdout.read()
        count[0] = int(told)  # or it has failed


def _why_no_mount() -> str:
    """Why nothing can be mounted here; "" if it can."""
    if os.geteuid() != 0:
        return "only root may mount what /dev/fuse answers"
    return "" if os.access("/dev/fuse", os.R_OK | os.W_OK) else "there is no /dev/fuse"


def _timed_cold(path: Path, action: Callable[[], object]) -> float:
    """Likewise, when the kernel has kept nothing of a file; of tmpfs it keeps all."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    found = _timed(action)
    os.close(descriptor)
    return found


def _timed(action: Callable[[], object]) -> float:
    """What it makes is thrown away within the time, as a program does that reads on."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _steps_in(folder: Path, window_s: float) -> float:
    """Seconds per step over a window."""
    file = folder / "steps"
    while not file.exists():
        time.sleep(0.01)
    first, started = int(file.read_text()), time.perf_counter()
    while (now := int(file.read_text())) == first:
        time.sleep(0.001)
    first, started = now, time.perf_counter()
    while time.perf_counter() - started < window_s:
        time.sleep(0.01)
    last = now = int(file.read_text())
    while now == last:  # until the end of a step
        time.sleep(0.001)
        now = int(file.read_text())
    return (time.perf_counter() - started) / (now - first)


@contextlib.contextmanager
def _job(folder: Path, large_mib: int, total_mib: int) -> Iterator[str]:
    """A job, standing still; the address of its server."""
    script = Path(__file__).with_name("files_worker.py")
    command: list[Any] = [sys.executable, "-m", "tensorwire", "run", "--workers", "1", script]
    command += [folder, large_mib, total_mib]
    before = {each.address for each in running_servers()}
    with subprocess.Popen(list(map(str, command))) as process:
        try:
            deadline = time.monotonic() + _START_S
            while not (folder / "ready").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError("the job that is to be read has not started")
                time.sleep(0.05)
            mine = [
                each
                for each in running_servers()
                if each.address not in before and str(folder) in each.command
            ]
            yield mine[0].address
        finally:
            (folder / "end").touch()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.terminate()


BARS = (
    Bar("fsspec, a parameter, of copying into fresh bytes", ">=", 0.8, "", PARAMETER, OURS,
        least=64 * MIB),
    Bar("sealed safetensors of a mapped file on tmpfs", ">=", 0.95, "", MAPPED, OURS, rival=TMPFS,
        least=64 * MIB),
    Bar("a snapshot taken and loaded, against torch.save and torch.load on tmpfs", ">=", 3.0,
        "x as fast", SNAPSHOT, OURS, rival=TORCH, least=400 * MIB),
    Bar("steps beside a reader of 100 MB/s, of steps alone", ">=", 0.95, "", TRAINING, OURS,
        rival=ALONE),
)  # fmt: skip
