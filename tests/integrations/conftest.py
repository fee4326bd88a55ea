"""The common part of tests of integrations: scripts that train through a library, run once each.

`make test-integrations` installs the libraries and runs them; a test without its library is
skipped.
"""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import output_of

FOLDER = Path(__file__).parent
TENSORWIRE = [sys.executable, "-m", "tensorwire", "run", "--workers=2", "--no-prefix"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
# Variables of a launcher that the tests themselves may run under.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")


class Runs:
    """The output of one library's script, by the way the processes were started."""

    def __init__(self, library: str, folder: Path) -> None:
        self._library, self._folder = library, folder
        self._done: dict[str, Path] = {}

    def run(self, way: str, command: list[str], side: str, *cases: str, **environment: str) -> None:
        """Runs cases of the script, once for each way."""
        if way in self._done:
            return
        folder = self._folder / way
        folder.mkdir()
        clean = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
        script = str(FOLDER / f"train_{self._library}.py")
        # Nothing is looked for on the network.
        offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        output_of(
            [*command, script, side, str(folder), *cases],
            folder, environ=clean, **offline, **environment,
        )  # fmt: skip
        self._done[way] = folder

    def seen(self, way: str, side: str, case: str) -> list[dict[str, Any]]:
        """The observations of a case by each process."""
        found = sorted(self._done[way].glob(f"{side}-{case}-*.pt"))
        return [torch.load(path, weights_only=True) for path in found]


@pytest.fixture(scope="session")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Runs]:
    made: dict[str, Runs] = {}

    def runs_of(library: str) -> Runs:
        if library not in made:
            made[library] = Runs(library, tmp_path_factory.mktemp(library))
        return made[library]

    return runs_of


def skip_without(library: str) -> None:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed: make test-integrations")
