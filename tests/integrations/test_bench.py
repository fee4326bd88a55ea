"""`tensorwire bench parameters --libraries`: steps of other libraries' loops, beside their DDP."""

import json
import sys
from pathlib import Path

import pytest
from conftest import skip_without
from programs import output_of

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_job_is_measured_beside_ddp(library: str, tmp_path: Path) -> None:
    """The bench itself fails where the losses of both sides differ."""
    skip_without(library)
    path = tmp_path / "rows.json"
    bench = [sys.executable, "-m", "tensorwire", "bench", "parameters", "--quick"]
    output_of([*bench, "--libraries", library, "--json", str(path)], tmp_path)
    report = json.loads(path.read_text())
    rows = {row["system"]: row for row in report["rows"]}
    assert rows.keys() == {"tensorwire", "ddp-gloo"}
    for row in rows.values():
        assert row["case"] == f"{library}.digits.step"
        assert row["operations"] == 960, row["note"]
    assert [item["pairs"] for item in report["comparisons"]] == [24]
