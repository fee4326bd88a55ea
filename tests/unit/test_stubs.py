"""The committed stubs of the extension are those of the extension that was built."""

import subprocess
import sys
from pathlib import Path

import pytest


def read_stubs(folder: Path) -> dict[str, str]:
    paths = [folder / "_core.pyi", *(folder / "_core").glob("**/*.pyi")]
    return {str(p.relative_to(folder)): p.read_text() for p in paths if p.exists()}


@pytest.mark.slow
def test_stubs_are_current(repository: Path, tmp_path: Path) -> None:
    command = ["-m", "nanobind.stubgen", "-q", "-r", "-m", "tensorwire._core", "-O", str(tmp_path)]
    subprocess.run([sys.executable, *command], check=True)
    generated = read_stubs(tmp_path)
    assert generated
    assert read_stubs(repository / "src/tensorwire") == generated, "run `make stubs`"
