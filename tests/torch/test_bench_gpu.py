"""`bench gpu-training`: its rows, what it says without a GPU, and a whole run where one is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tensorwire.bench.rows import Report
from tensorwire_benchmarks.gpu_training import ALONE, DDP, _add


def test_rows_are_beside_one_process_and_beside_ddp() -> None:
    report = Report("gpu-training", {}, settings={})
    own = "tensorwire, 1 server"
    _add(report, "alexnet", {ALONE: [2.0, 2.0, 4.0], DDP: [9.0], own: [6.0, 6.0, 7.0]})
    rows = {row.system: row for row in report.rows}
    assert rows[own].seconds_median == 6.0
    assert rows[own].ratio_to_limit == pytest.approx(1 / 3)
    assert rows[own].gb_per_s is None, "a step is no transfer"
    (found,) = report.comparisons
    assert (found.system, found.ratio) == (own, 1.5)


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tensorwire", "bench", "gpu-training", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = bench()
    assert done.returncode == 1
    assert "this bench needs a CUDA device, and torch sees none" in done.stderr


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_every_side_has_a_row(tmp_path: Path) -> None:
    done = bench("--models", "alexnet", "--steps", "2", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 4
    assert all(row["seconds_median"] > 0 for row in rows)
