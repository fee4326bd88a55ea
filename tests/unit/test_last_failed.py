"""Reruns of failed tests, after a run that an error of pytest itself has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROKEN = "def pytest_runtest_makereport(item, call):\n    raise SystemError('broken')\n"


def run(folder: Path, *options: str) -> int:
    """Returns pytest's exit code for a file of the repository, with a cache of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={folder / 'cache'}"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    file = "tests/unit/test_mailbox.py"
    done = subprocess.run(
        [*command, file, *options], cwd=ROOT, env=environment, capture_output=True
    )
    return done.returncode


def test_a_run_that_has_not_ended_is_not_well_done(tmp_path: Path) -> None:
    """Named for a bug: a rerun of what had failed passed, since nothing was known to have."""
    (tmp_path / "broken.py").write_text(BROKEN)
    rerun = ("--last-failed", "--last-failed-no-failures=none")
    assert run(tmp_path, "-p", "broken") == pytest.ExitCode.INTERNAL_ERROR
    assert run(tmp_path, *rerun) == pytest.ExitCode.NO_TESTS_COLLECTED
    assert run(tmp_path) == pytest.ExitCode.OK
    assert run(tmp_path, *rerun) == pytest.ExitCode.OK
