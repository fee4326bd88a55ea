"""`tensorwire bench parameters --libraries`: steps of other libraries' loops, beside their DDP."""

import sys
from pathlib import Path

import pytest
from conftest import skip_without
from programs import output_of

from tensorwire.bench.rows import Report

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_job_is_measured_beside_ddp(library: str, tmp_path: Path) -> None:
    """The bench itself fails where the losses of both sides differ."""
    skip_without(library)
    path = tmp_path / "rows.json"
    bench = [sys.executable, "-m", "tensorwire", "bench", "parameters", "--quick"]
    output_of([*bench, "--libraries", library, "--json", str(path)], tmp_path)
    report = Report.load(path)
    assert [row.system for row in report.rows] == ["tensorwire", "ddp-gloo"]
    assert [row.operations for row in report.rows] == [960, 960], report.rows
    assert [item.pairs for item in report.comparisons] == [24]
