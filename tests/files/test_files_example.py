"""The example of docs/files.md runs."""

import re
import sys
from pathlib import Path

import pytest
from programs import output_of


@pytest.mark.slow
def test_files_of_a_job(repository: Path, folder: Path) -> None:
    script = repository / "examples" / "files_of_a_job.py"
    printed = output_of(
        [sys.executable, "-m", "tensorwire", "run", "--workers", "2", str(script)], folder
    )
    versions = [int(each) for each in re.findall(r"version (\d+): weight \(1, 50\)", printed)]
    assert len(versions) == 3
    assert versions == sorted(versions)
    assert re.search(r"/proc/\d+/fd/\d+ is version 62, \d+ bytes", printed)
