"""Steps of Lightning's Trainer and of Hugging Face's, on a job and beside their own DDP over gloo.

A side is two workers under their launcher: `tensorwire run`, or torchrun with the library's own
DistributedDataParallel, tuned as its users would. Both sides of a case live at the same time and
take turns; a worker waits between turns (`library_worker.py`). A step is a whole iteration of the
library's loop, with its data, its optimizer and what the library does by itself: Hugging Face's
Trainer clips gradients by their norm. The slower worker's time of a step counts. Both sides must
have the same losses after their first steps, or the case fails. Later their bits may differ where
gradients are clipped: the norm is summed in another order, and training makes that larger.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorwire.bench.harness import laps_of
from tensorwire.bench.processes import PairError
from tensorwire.bench.rows import Comparison, Report, Row
from tensorwire_benchmarks.figures import turn_ratio
from tensorwire_benchmarks.workloads.catalog import LIBRARY_MODELS, Workload

LIBRARIES = ("lightning", "transformers")
OWN, RIVAL = "tensorwire", "ddp-gloo"
_WORKERS = 2
_LAUNCHERS = {
    OWN: ("tensorwire", "run", "--on-death=end", f"--workers={_WORKERS}", "--no-prefix"),
    RIVAL: ("torch.distributed.run", f"--nproc-per-node={_WORKERS}", "--standalone"),
}
_NOTES = {
    OWN: "shared memory, one server",
    RIVAL: "loopback TCP; gradient_as_bucket_view, static_graph or no look for unused parameters",
}
_SCRIPT = Path(__file__).with_name("library_worker.py")
_PATIENCE_S = 180.0  # that a side has to come up, and for a turn
_END_S = 30.0
_CLOSE = 1e-4  # how near the losses of both sides are after the first steps, relatively
_WARM = 3  # steps before the first turn
# Variables of a launcher that the bench itself may run under.
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What to measure.

    Attributes:
        libraries: some of `LIBRARIES`.
        models: that each of them trains.
        turns: of each side; the steps of a model are dealt to them.
    """

    libraries: Sequence[str] = LIBRARIES
    models: Sequence[Workload] = LIBRARY_MODELS
    turns: int = 24

    def cases(self) -> list[tuple[str, str, Workload]]:
        """Name, library and model of each case."""
        return [
            (f"{library}.{model.name}.step", library, model)
            for library in self.libraries
            for model in self.models
        ]


def measure(report: Report, settings: LibrarySettings, tell: Callable[[str], None]) -> None:
    """Adds a row for each side of each case, and how the sides compare.

    Where a case cannot be measured, its rows have the reason.
    """
    for case, library, model in settings.cases():
        tell(case)
        rows = [Row(report.bench, case, side, model.size_bytes) for side in (OWN, RIVAL)]
        try:
            turns = _measure(library, model, settings.turns)
        except PairError as error:
            report.rows += [dataclasses.replace(row, note=str(error)) for row in rows]
            continue
        for row in rows:
            samples = [sample for turn in turns[row.system] for sample in turn]
            report.rows.append(row.timed(samples, note=_NOTES[row.system]))
        if ratio := turn_ratio(turns[RIVAL], turns[OWN]):
            found = ratio.median, ratio.interval, ratio.pairs
            report.comparisons.append(Comparison(case, model.size_bytes, OWN, RIVAL, *found))


def _measure(library: str, model: Workload, turns: int) -> dict[str, list[list[float]]]:
    """Per side and turn, the seconds of each step."""
    if importlib.util.find_spec(library) is None:
        raise PairError(f"{library} is not installed; pip install 'tensorwire[integrations]'")
    laps = laps_of(model.steps, turns)
    order = json.dumps({"library": library, "model": model.name, "tiny": model.tiny,
                        "steps": _WARM + sum(laps)})  # fmt: skip
    found: dict[str, list[list[float]]] = {OWN: [], RIVAL: []}
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(_Side(name, order)) for name in (OWN, RIVAL)}
        for turn, count in enumerate((_WARM, *laps)):
            losses = {}
            for name in (OWN, RIVAL) if turn % 2 else (RIVAL, OWN):
                seconds, losses[name] = sides[name].run(count)
                if turn:
                    found[name].append(seconds)
            if not turn:
                _compare(losses[OWN], losses[RIVAL])
        for side in sides.values():
            side.end()
    return found


def _compare(own: Sequence[float], rival: Sequence[float]) -> None:
    for ours, theirs in zip(own, rival, strict=True):
        if not math.isclose(ours, theirs, rel_tol=_CLOSE):
            raise PairError(f"the losses differ: {ours} on a job, {theirs} of DDP")


class _Side:
    """The processes of one side, from their start until the block ends. It is for one thread.

    Raises:
        PairError: from all methods, with what a process has said last. The side is over then.
    """

    def __init__(self, name: str, order: str) -> None:
        self._name, self._order = name, order

    def __enter__(self) -> _Side:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorwire-bench-"))
            server = stack.enter_context(socket.socket(socket.AF_UNIX))
            server.bind(os.path.join(folder, "bench"))
            server.listen(_WORKERS)
            server.settimeout(1.0)
            self._said = Path(folder, "said")
            self._process = self._start(server.getsockname())
            stack.callback(self._kill)
            links = [stack.enter_context(self._accept(server)) for _ in range(_WORKERS)]
            for link in links:
                link.settimeout(_PATIENCE_S)
            self._files = [stack.enter_context(link.makefile("rw")) for link in links]
            self._files.sort(key=lambda file: self._read(file)["rank"])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(self, count: int) -> tuple[list[float], list[float]]:
        """Lets the workers make so many steps; the seconds of each, and their last losses."""
        for file in self._files:
            self._write(file, count)
        answers = [self._read(file) for file in self._files]
        seconds = map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
        return list(seconds), [answer["loss"] for answer in answers]

    def end(self) -> None:
        """Lets the workers go on to the end of their script, and waits for it."""
        for file in self._files:
            self._write(file, 0)
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired as error:
            raise PairError(f"{self._name} did not end in {_END_S:g} s") from error
        if code:
            raise self._failed(f"exit code {code}")

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        module, *options = _LAUNCHERS[self._name]
        environ = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN)}
        folders = [str(_SCRIPT.parents[1]), *filter(None, [environ.get("PYTHONPATH")])]
        environ |= {
            "PYTHONPATH": os.pathsep.join(folders),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        command = [sys.executable, "-m", module, *options, str(_SCRIPT)]
        with open(self._said, "wb") as said:
            return subprocess.Popen(
                [*command, self._name, address, self._order],
                cwd=self._said.parent, env=environ, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    def _accept(self, server: socket.socket) -> socket.socket:
        for _ in range(int(_PATIENCE_S)):
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
            if self._process.poll() is not None:
                raise self._failed(f"exit code {self._process.returncode}")
        raise self._failed("it did not start in time")

    def _write(self, file: Any, count: int) -> None:
        try:
            file.write(f"{count}\n")
            file.flush()
        except OSError as error:
            raise self._failed(str(error)) from error

    def _read(self, file: Any) -> dict[str, Any]:
        try:
            line = file.readline()
        except OSError as error:
            raise self._failed(str(error)) from error
        if not line:
            raise self._failed("a worker has ended")
        found: dict[str, Any] = json.loads(line)
        return found

    def _failed(self, why: str) -> PairError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)  # so that it has said why
        lines = self._said.read_text(errors="replace").splitlines()
        # Behind the error of a worker torchrun prints errors of its own, a table and a ruler.
        said = [line for line in lines if "Error:" in line][:1] or lines[-1:]
        return PairError(f"{self._name}: {why}" + "".join(f"; it said: {line}" for line in said))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
