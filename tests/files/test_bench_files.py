"""The bench of files has all rows that can be had here, and says what is missing."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire_benchmarks import files


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_rows_of_everything(folder: Path) -> None:
    file = folder / "files.json"
    result = CliRunner().invoke(main, ["bench", "files", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = Report.load(file)
    told = " ".join(report.settings["warnings"])
    missing = {(row.case, row.system) for row in report.rows if not row.measured}
    for case, system in missing:
        assert f"{case} is left out" in told or f"{case} is not beside {system}" in told
    found = {row.case for row in report.rows if row.measured and row.system == "tensorwire"}
    assert found | {case for case, _ in missing} == set(files.QUICK_CASES)
    assert len(report.verdicts) == 9
    assert report.verdicts[-1].met is not None


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler and without a right to mount there are rows that say so, and no job."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for reason, case, system, note in (
        ("", "mount", "passthrough_ll", "passthrough_ll is not compiled without a C compiler"),
        ("only root may mount", "mount_mapped", "tensorwire", "only root may mount"),
    ):
        monkeypatch.setattr(files, "why_no_mount", lambda reason=reason: reason)
        report = Report("files", {}, settings={"warnings": []})
        assert files.is_left_out(report, case) == (system == "tensorwire")
        assert [(row.case, row.system, row.note) for row in report.rows] == [(case, system, note)]
