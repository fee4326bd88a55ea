"""The bench of files runs, and judges what it has measured."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.cli import main


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_rows_of_everything(folder: Path) -> None:
    file = folder / "files.json"
    result = CliRunner().invoke(main, ["bench", "files", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    beside_tmpfs = ["random", "mapped"]
    if os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK):
        beside_tmpfs += ["mount", "mount_random"]
    else:
        assert any("mount is left out" in each for each in report["settings"]["warnings"])
    found = {(row["case"], row["system"]): row for row in report["rows"]}
    assert found.keys() == {
        *(("parameter", system) for system in ("tensorwire", "copy", "tmpfs")),
        *((case, system) for case in beside_tmpfs for system in ("tensorwire", "tmpfs")),
        *((case, s) for case in ("snapshot", "snapshot_read") for s in ("tensorwire", "torch")),
        *(("training", system) for system in ("tensorwire", "alone")),
    }
    assert all(row["seconds_median"] > 0 for row in report["rows"])
    assert "MB/s" in found["training", "tensorwire"]["note"]
    met = [verdict["met"] for verdict in report["verdicts"]]
    assert met[:3] == [None] * 3  # of sizes that are too small
    assert met[3] is not None
