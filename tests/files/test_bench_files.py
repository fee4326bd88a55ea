"""The bench of files runs, and judges what it has measured."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tensorwire.bench.rows import Report
from tensorwire.cli import main
from tensorwire.errors import UnavailableError
from tensorwire_benchmarks import files
from tensorwire_benchmarks.files_mount import compile_c


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_rows_of_everything(folder: Path) -> None:
    file = folder / "files.json"
    result = CliRunner().invoke(main, ["bench", "files", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    warnings = report["settings"]["warnings"]
    found = {(row["case"], row["system"]): row for row in report["rows"]}
    expected = {
        *(("parameter", system) for system in ("tensorwire", "copy", "tmpfs")),
        *((case, system) for case in ("random", "mapped") for system in ("tensorwire", "tmpfs")),
        *((case, s) for case in ("snapshot", "snapshot_read") for s in ("tensorwire", "torch")),
        ("snapshot", "copy"),
        *(("training", system) for system in ("tensorwire", "alone")),
    }
    left_out = set()
    if os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK):
        mounts = ["mount", "mount_random"]
        if len(os.sched_getaffinity(0)) > 1:
            mounts.append("mount_random_apart")
        else:
            left_out |= {("mount_random_apart", "tensorwire")}
        expected |= {(case, system) for case in mounts for system in ("tensorwire", "tmpfs")}
        if any("not beside passthrough_ll" in each for each in warnings):
            left_out |= {(case, "passthrough_ll") for case in mounts}
        else:
            expected |= {(case, "passthrough_ll") for case in mounts}
        if shutil.which("cc") is None:
            left_out |= {("step", "tensorwire")}
        else:
            expected |= {("step", system) for system in ("tensorwire", "python")}
        if any("mount_mapped is left out" in each for each in warnings):
            left_out |= {("mount_mapped", "tensorwire")}
        else:
            expected |= {("mount_mapped", system) for system in ("tensorwire", "tmpfs")}
    else:
        mounts = ["mount", "mount_random", "mount_random_apart", "mount_mapped", "step"]
        left_out = {(case, "tensorwire") for case in mounts}
        assert all(any(f"{case} is left out" in w for w in warnings) for case in mounts)
    assert found.keys() == expected | left_out
    assert all(found[key]["seconds_median"] > 0 for key in expected)
    assert all(found[key]["seconds_median"] is None and found[key]["note"] for key in left_out)
    assert "MB/s" in found["training", "tensorwire"]["note"]
    met = [verdict["met"] for verdict in report["verdicts"]]
    assert met[:5] == [None] * 5  # of sizes that are too small
    assert (met[5] is None) == (("mount_random", "passthrough_ll") not in expected)
    assert (met[6] is None) == (("mount_random_apart", "passthrough_ll") not in expected)
    assert met[7] is None
    assert met[8] is not None


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler and without a right to mount there are rows that say so, and no job."""
    no_compiler = Report("files", {}, settings={"warnings": []})
    monkeypatch.setattr(files, "why_no_mount", lambda: "")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert files.is_left_out(no_compiler, "step")
    assert not files.is_left_out(no_compiler, "mount")
    assert [(row.case, row.system, row.note) for row in no_compiler.rows] == [
        ("step", "tensorwire", "there is no C compiler (cc)"),
        ("mount", "passthrough_ll", "passthrough_ll is not compiled without a C compiler"),
    ]
    with pytest.raises(UnavailableError, match="without a C compiler"):
        compile_c(Path("step.c"), Path("step"))
    no_mount = Report("files", {}, settings={"warnings": []})
    monkeypatch.setattr(files, "why_no_mount", lambda: "only root may mount")
    assert all(files.is_left_out(no_mount, case) for case in ("mount", "mount_mapped", "step"))
    assert {row.note for row in no_mount.rows} == {"only root may mount"}
    assert not files.is_left_out(no_mount, "parameter")
    one_core = Report("files", {}, settings={"warnings": []})
    monkeypatch.setattr(files, "why_no_mount", lambda: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert files.is_left_out(one_core, "mount_random_apart")
    assert one_core.settings["warnings"] == ["mount_random_apart is left out: there is one core"]


def test_cases_run_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a snapshot costs nothing, as the mount of a case before it holds one."""
    ran: list[str] = []
    monkeypatch.setattr(files, "is_left_out", lambda *_: False)
    monkeypatch.setattr(files, "running_job", lambda *_: contextlib.nullcontext("address"))
    monkeypatch.setattr(files, "_measure_all", lambda _, __, cases, *___: ran.extend(cases))
    files.run(files.FilesSettings(cases=("mount_mapped", "snapshot")), lambda *_: None)
    assert ran == ["snapshot", "mount_mapped"]


def test_a_program_that_cannot_be_compiled(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source = tmp_path / "wrong.c"
    source.write_text("int main(void) { return nothing; }")
    with pytest.raises(UnavailableError, match=r"(?s)wrong\.c cannot be compiled: .*nothing"):
        compile_c(source, tmp_path / "wrong")
