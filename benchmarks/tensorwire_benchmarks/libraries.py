"""Compares steps of Lightning's and Hugging Face's Trainer on a job with their own DDP over gloo.

A side is two workers under their launcher: `tensorwire run`, or torchrun with the library's own
DistributedDataParallel, tuned as its users would. Both sides of a case live at the same time and
take turns; a worker waits between turns (`library_worker.py`). A step is a whole iteration of the
library's loop, with its data, its optimizer and its extras: Hugging Face's Trainer clips gradients
by their norm. The slower worker's time of a step counts. Both sides must have the same losses after
their first steps, or the case fails. Later their bits may differ where gradients are clipped: the
norm is summed in another order, and training makes the difference larger.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tensorwire.bench.harness import laps_of, median
from tensorwire.bench.processes import PairError
from tensorwire.bench.rows import Report, Row
from tensorwire_benchmarks.jobs import LinkedJob, linked, script
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
_CLOSE = 1e-4  # relative difference of the losses after the first steps, at most
_WARM = 3  # steps before the first turn


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What to measure.

    Attributes:
        libraries: some of `LIBRARIES`.
        models: models that each library trains.
        turns: of each side; they share the steps of a model.
    """

    libraries: Sequence[str] = LIBRARIES
    models: Sequence[Workload] = LIBRARY_MODELS
    turns: int = 24

    def cases(self) -> list[tuple[str, str, Workload]]:
        """Returns name, library and model of each case."""
        return [
            (f"{library}.{model.name}.step", library, model)
            for library in self.libraries
            for model in self.models
        ]


def measure(report: Report, settings: LibrarySettings, tell: Callable[[str], None]) -> None:
    """Adds a row for each side of each case, and their comparison.

    The rows of a case that cannot be measured have the reason.
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
        middles = [list(map(median, turns[side])) for side in (RIVAL, OWN)]
        report.compare(case, model.size_bytes, OWN, RIVAL, *middles)


def _measure(library: str, model: Workload, turns: int) -> dict[str, list[list[float]]]:
    """Returns per side and turn the seconds of each step.

    Raises:
        PairError: the library is not installed, a side failed, or the losses differ.
    """
    if importlib.util.find_spec(library) is None:
        raise PairError(f"{library} is not installed; pip install 'tensorwire[integrations]'")
    laps = laps_of(model.steps, turns)
    order = json.dumps({"library": library, "model": model.name, "tiny": model.tiny,
                        "steps": _WARM + sum(laps)})  # fmt: skip
    found: dict[str, list[list[float]]] = {OWN: [], RIVAL: []}
    with linked({name: partial(_side, name, order) for name in found}) as sides:
        for turn, count in enumerate((_WARM, *laps)):
            losses = {}
            for name in (OWN, RIVAL) if turn % 2 else (RIVAL, OWN):
                answers = sides[name].turn(steps=count)
                losses[name] = [answer["loss"] for answer in answers]
                if turn:
                    each = (answer["seconds"] for answer in answers)
                    found[name].append(list(map(max, zip(*each, strict=True))))
            if not turn:
                _compare(losses[OWN], losses[RIVAL])
    return found


def _compare(own: Sequence[float], rival: Sequence[float]) -> None:
    for ours, theirs in zip(own, rival, strict=True):
        if not math.isclose(ours, theirs, rel_tol=_CLOSE):
            raise PairError(f"the losses differ: {ours} on a job, {theirs} of DDP")


def _side(name: str, order: str, folder: Path) -> LinkedJob:
    """Makes the job of one side."""
    module, *options = _LAUNCHERS[name]
    words = script("library_worker.py", name, LinkedJob.ADDRESS, order)
    command = [sys.executable, "-m", module, *options, *words]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    return LinkedJob(command, folder, _WORKERS, **quiet)
