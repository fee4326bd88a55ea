"""Measures the cost of reading a running job as files.

A job of one worker and one server with a model of 512 MiB stands still; in the case `training` a
job with 64 MiB trains. Each way takes turns with its rivals and its limit.

    parameter           a parameter of 64 MiB by fsspec; a copy of the bytes into a fresh `bytes`
                        (the limit); a file on tmpfs
    mapped              safetensors maps the sealed model and reads one tensor of 64 MiB; the same
                        file on tmpfs
    snapshot            a reader that took snapshots before takes one and loads its tensors;
                        torch.save to tmpfs and torch.load; writing the bytes into existing memory
                        (the limit)
    snapshot_first      a reader that took no snapshot for long; the limit writes fresh memory
    mount               the parameter by a mount whose process answers each read, with nothing in
                        the kernel's cache; tmpfs; libfuse's passthrough_ll on tmpfs
    mount_random        4 KiB of it, with all threads on one core
    mount_random_apart  the same, with reader and mount on different cores
    mount_mapped        the model by a mount, mapped by the kernel; the same file on tmpfs
    training            steps while a process reads 100 MB/s of parameters by fsspec; without it

Not measured: TCP, other hosts; files of a mount from the kernel's cache, which are as fast as
tmpfs. A case that cannot be measured here is left out, with a warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tensorwire.bench.measuring import add_rows, measuring, take_turns
from tensorwire.bench.rows import Report, Row
from tensorwire.bench.verdicts import Bar
from tensorwire.command import Told
from tensorwire.errors import UnavailableError
from tensorwire.files import SealedModel
from tensorwire.jobs.job_file import running_servers
from tensorwire.parameters.server.lending.spare import KEEP_S
from tensorwire_benchmarks.jobs import LinkedJob, run_command, script

from .files_mount import (
    ALONE,
    COPY,
    MIB,
    OURS,
    PASSTHROUGH,
    SMALL_BYTES,
    TMPFS,
    TORCH,
    MountWays,
    Way,
    timed,
    why_no_mount,
    why_no_passthrough,
)

CASES = (
    PARAMETER, MAPPED, SNAPSHOT, SNAPSHOT_FIRST, MOUNT, MOUNT_RANDOM, MOUNT_RANDOM_APART,
    MOUNT_MAPPED, TRAINING,
) = (
    "parameter", "mapped", "snapshot", "snapshot_first", "mount", "mount_random",
    "mount_random_apart", "mount_mapped", "training",
)  # fmt: skip
QUICK_CASES = tuple(case for case in CASES if case != SNAPSHOT_FIRST)
_BY_MOUNT = (MOUNT, MOUNT_RANDOM, MOUNT_RANDOM_APART, MOUNT_MAPPED)
_BESIDE_PASSTHROUGH = (MOUNT, MOUNT_RANDOM, MOUNT_RANDOM_APART)
_FIRST_ROUNDS = 6  # at most; an interval needs six
_READ_BYTES_PER_S = 100e6
_REST_S = 1.5  # before a snapshot, so that the server may copy for a reader at once
_GIVING_BACK_S = 0.5  # after a snapshot, while the server returns memory
_LONG_REST_S = KEEP_S + 1.0  # after which the server keeps no memory for a snapshot
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class FilesSettings:
    """What to run.

    Attributes:
        cases: some of `CASES`.
        large_mib: the size of the parameter that is read.
        total_mib: the size of the model.
        rounds: the number of turns of each way.
        window_s: seconds of each turn of `training`.
    """

    cases: Sequence[str] = CASES
    large_mib: int = 64
    total_mib: int = 512
    rounds: int = 16
    window_s: float = 2.0


def run(settings: FilesSettings, tell: Told) -> Report:
    """Measures everything in turns; Ctrl-C ends it with the rows so far."""
    with measuring("files", dataclasses.asdict(settings)) as report:
        # In this order: a model that a mount holds open would spare later cases their snapshot.
        wanted = [case for case in CASES if case in settings.cases]
        cases = [case for case in wanted if not is_left_out(report, case)]
        still = [case for case in cases if case != TRAINING]
        for several in (still, [TRAINING] if TRAINING in cases else []):
            if several:
                count = settings.total_mib // settings.large_mib if several is still else 1
                size = settings.large_mib * MIB
                with (
                    tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
                    running_job(Path(folder), size, max(1, count)) as (job, address),
                ):
                    with contextlib.closing(_Ways(Path(folder), address, size)) as ways:
                        _measure_all(report, settings, several, job, ways, tell)
                    job.end()
    report.verdicts = [bar.judge(report) for bar in BARS]
    return report


@contextlib.contextmanager
def running_job(folder: Path, size_bytes: int, count: int) -> Iterator[tuple[LinkedJob, str]]:
    """Runs a job of `job_worker.py`; yields it with the address of its server.

    Args:
        folder: of the job.
        size_bytes: the size of a parameter.
        count: the number of parameters.

    Raises:
        PairError: it has not started.
    """
    words = script("job_worker.py", LinkedJob.ADDRESS, "sgd", count, size_bytes)
    before = {each.address for each in running_servers()}
    with LinkedJob([*run_command("--workers", "1"), *words], folder, 1) as job:
        (address,) = {
            each.address
            for each in running_servers()
            if each.address not in before and str(folder) in each.command
        }
        yield job, address


def step_s(job: LinkedJob, window_s: float) -> float:
    """Returns seconds per step over about `window_s`, after two steps that are not counted."""

    def turn(steps: int) -> float:
        (answer,) = job.turn(steps=steps, compute_s=0.0, backward=True)
        return float(answer["seconds"]) / steps

    return turn(max(1, int(window_s / turn(2))))


def is_left_out(report: Report, case: str) -> bool:
    """Returns whether a case cannot be measured here; then adds a row and a warning."""
    reason = why_no_mount() if case in _BY_MOUNT else ""
    if case == MOUNT_RANDOM_APART and len(os.sched_getaffinity(0)) < 2:
        reason = reason or "there is one core"
    if reason:
        report.settings["warnings"].append(f"{case} is left out: {reason}")
        report.rows.append(Row("files", case, OURS, 0, note=reason))
    elif case in _BESIDE_PASSTHROUGH and (missing := why_no_passthrough()):
        report.settings["warnings"].append(f"{case} is not beside {PASSTHROUGH}: {missing}")
        report.rows.append(Row("files", case, PASSTHROUGH, 0, note=missing))
    return bool(reason)


def _measure_all(
    report: Report,
    settings: FilesSettings,
    cases: Sequence[str],
    job: LinkedJob,
    ways: _Ways,
    tell: Told,
) -> None:
    total = settings.total_mib // settings.large_mib * settings.large_mib * MIB
    makes: dict[str, tuple[int, Callable[[], Mapping[str, Way]]]] = {
        PARAMETER: (settings.large_mib * MIB, ways.parameter),
        MAPPED: (settings.large_mib * MIB, ways.mapped),
        SNAPSHOT: (total, ways.snapshot),
        SNAPSHOT_FIRST: (total, partial(ways.snapshot, rest_s=_LONG_REST_S)),
        MOUNT: (settings.large_mib * MIB, ways.mounts.all),
        MOUNT_RANDOM: (SMALL_BYTES, partial(ways.mounts.random, apart=False)),
        MOUNT_RANDOM_APART: (SMALL_BYTES, partial(ways.mounts.random, apart=True)),
        MOUNT_MAPPED: (settings.large_mib * MIB, ways.mount_mapped),
    }
    for case in cases:
        tell(settings.cases.index(case), len(settings.cases), case)
        if case == TRAINING:
            _measure_training(report, settings, job, ways)
        elif case == MOUNT_MAPPED and not ways.mounts.passes_through():
            note = "the kernel passes nothing through here: it asks the mount for each page"
            report.settings["warnings"].append(f"{case} is left out: {note}")
            report.rows.append(Row("files", case, OURS, 0, note=note))
        else:
            size, make = makes[case]
            is_slow = case == SNAPSHOT_FIRST
            rounds = min(settings.rounds, _FIRST_ROUNDS) if is_slow else settings.rounds
            turns = take_turns(make(), rounds)  # the first of the ways is ours
            add_rows(report, case, size, turns, limit=COPY, moves=True)


def _measure_training(
    report: Report, settings: FilesSettings, job: LinkedJob, ways: _Ways
) -> None:  # fmt: skip
    """Adds the rows of time per step with a reader and without, in turns."""
    rates: list[float] = []

    def window(told: list[float] | None) -> float:
        with ways.reading(told):
            return step_s(job, settings.window_s)

    both = {OURS: partial(window, rates), ALONE: partial(window, None)}
    steps = take_turns(both, max(6, 3 * settings.rounds // 2))
    note = f"beside a reader of {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f} MB/s"
    add_rows(report, TRAINING, 0, steps, {OURS: note})


class _Ways:
    """The ways to read the bytes of a job at an address, with their rivals and limits."""

    def __init__(self, folder: Path, address: str, large_bytes: int) -> None:
        from tensorwire.files.filesystem import TensorwireFileSystem

        self._folder, self._address = folder, address
        self._fs = TensorwireFileSystem(address, skip_instance_cache=True)
        self._path = "params/p0.npy"
        self._file = folder / "p0.npy"
        data = self._fs.cat_file(self._path)
        self._file.write_bytes(data)
        start = len(data) - large_bytes
        self._kept: SealedModel | None = None
        self.mounts = MountWays(folder, address, self._path, self._file, start, large_bytes)

    def close(self) -> None:
        """Ends the connection, and the mounts."""
        self.mounts.close()
        self._fs.close()

    def parameter(self) -> Mapping[str, Way]:
        """Returns ways to read the whole parameter."""
        memory = np.fromfile(self._file, np.uint8).data
        return {
            OURS: lambda: timed(lambda: self._fs.cat_file(self._path)),
            COPY: lambda: timed(lambda: bytes(memory)),
            TMPFS: lambda: timed(self._file.read_bytes),
        }

    def mapped(self) -> Mapping[str, Way]:
        """Returns ways to open and map a model and read one tensor.

        Raises:
            UnavailableError: the sealed model is no file of this host.
        """
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
            OURS: lambda: timed(lambda: read(model.path)),
            TMPFS: lambda: timed(lambda: read(str(file))),
        }

    def mount_mapped(self) -> Mapping[str, Way]:
        """Returns ways to open and map a model and read one tensor, ours in a mount."""
        from safetensors import safe_open

        mounted = self.mounts.folder() / "model.safetensors"
        file = self._folder / "model.safetensors"
        file.write_bytes(mounted.read_bytes())

        def read(path: Path) -> None:
            with safe_open(path, framework="np") as opened:
                opened.get_tensor("p0").sum()

        held = os.open(mounted, os.O_RDONLY)  # keeps the snapshot, as the sealed model does
        self.mounts.at_end(partial(os.close, held))
        paths = {OURS: mounted, TMPFS: file}
        return {system: partial(timed, partial(read, path)) for system, path in paths.items()}

    def snapshot(self, rest_s: float = _REST_S) -> Mapping[str, Way]:
        """Returns ways to take a snapshot and load its tensors.

        A server copies for readers during at most a quarter of its time, so each turn begins with a
        rest of `rest_s`, in which the server also prepares memory for the next snapshot. The limit
        writes the bytes into existing memory, or into fresh memory if the rest is longer than the
        server keeps memory. Our tensors are mapped; torch.load copies into its own memory. Each of
        our turns then waits while the server returns memory, so that no other turn is disturbed.
        """
        import torch
        from safetensors import safe_open

        if self._kept is not None:
            self._kept.close()
        reader = self._fs.tree.reader
        with reader.sealed_model() as model, safe_open(model.path, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}
        file = self._folder / "model.pt"

        def ours() -> object:
            with reader.sealed_model() as model, safe_open(model.path, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}

        def theirs() -> object:
            torch.save(tensors, file)
            return torch.load(file)

        def rested() -> float:
            time.sleep(rest_s)
            seconds = timed(ours)
            time.sleep(_GIVING_BACK_S)
            return seconds

        return {
            OURS: rested,
            COPY: partial(_into_memory, list(tensors.values()), is_there=rest_s < KEEP_S),
            TORCH: lambda: timed(theirs),
        }

    @contextlib.contextmanager
    def reading(self, rates: list[float] | None) -> Iterator[None]:
        """Runs a process that reads parameters, and appends its bytes/s; None: no process.

        Raises:
            UnavailableError: the process has not started.
        """
        if rates is None:
            yield
            return
        script = Path(__file__).with_name("files_reader.py")
        command = [sys.executable, str(script), self._address, self._path]
        command.append(str(_READ_BYTES_PER_S))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.readline() != b"reads\n":
                raise UnavailableError("the reader of the bench has not started")
            try:
                yield
            finally:
                process.stdin.close()
                told = process.stdout.read()
        rates.append(float(told))  # fails if the process has failed


def _into_memory(tensors: Sequence[Any], is_there: bool) -> float:
    """Returns the seconds of writing tensors into a memfd with a thread per core.

    With `is_there` the memory is allocated before.
    """
    descriptor = os.memfd_create("tensorwire bench", os.MFD_CLOEXEC)

    def write(chunk: tuple[int, memoryview]) -> None:
        at, data = chunk
        while data:
            done = os.pwrite(descriptor, data, at)
            at, data = at + done, data[done:]

    def write_all() -> None:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(write, chunks))

    try:
        chunks: list[tuple[int, memoryview]] = []
        size = 0
        for tensor in tensors:
            data = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(data), _CHUNK_BYTES):
                part = data[start : start + _CHUNK_BYTES]
                chunks.append((size, part))
                size += len(part)
        os.ftruncate(descriptor, size)
        if is_there:
            os.posix_fallocate(descriptor, 0, size)
        return timed(write_all)
    finally:
        os.close(descriptor)


BARS = (
    Bar("fsspec, a parameter, of copying into fresh bytes", ">=", 0.8, "", PARAMETER, OURS,
        least=64 * MIB),
    Bar("sealed safetensors of a mapped file on tmpfs", ">=", 0.95, "", MAPPED, OURS, rival=TMPFS,
        least=64 * MIB),
    Bar("a snapshot taken and loaded, against torch.save and torch.load on tmpfs", ">=", 3.0,
        "x as fast", SNAPSHOT, OURS, rival=TORCH, least=400 * MIB),
    Bar("a first snapshot, against torch.save and torch.load on tmpfs", ">=", 3.0, "x as fast",
        SNAPSHOT_FIRST, OURS, rival=TORCH, least=400 * MIB),
    *(
        Bar(f"{name} of {PASSTHROUGH} on tmpfs", ">=", 0.8, "", case, OURS, rival=PASSTHROUGH,
            least=least)
        for case, name, least in (
            (MOUNT, "plain FUSE, a parameter,", 64 * MIB),
            (MOUNT_RANDOM, "plain FUSE, 4 KiB, on one core", 0),
            (MOUNT_RANDOM_APART, "plain FUSE, 4 KiB, on two cores", 0),
        )
    ),
    Bar("a model that a mount passes through, of a mapped file on tmpfs", ">=", 0.95, "",
        MOUNT_MAPPED, OURS, rival=TMPFS, least=64 * MIB),
    Bar("steps beside a reader of 100 MB/s, of steps alone", ">=", 0.95, "", TRAINING, OURS,
        rival=ALONE),
)  # fmt: skip
