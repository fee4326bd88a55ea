"""A stand-in for NVIDIA's driver where there is no GPU: see standin.cc, which is built here."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tensorwire.testing.gpu import missing_gpu

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "cpp"


def build_standin(folder: Path) -> Path:
    """Compiles the stand-in, unless this very source was compiled before."""
    source, header = HERE / "standin.cc", CORE / "gpu/cuda_driver.h"
    digest = hashlib.sha256(source.read_bytes() + header.read_bytes()).hexdigest()[:16]
    library = folder / f"libstandin-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler for the stand-in of NVIDIA's driver")
        partial = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
        include = ["-I", str(CORE), "-o", str(partial)]
        subprocess.run([compiler, *options, *include, str(source)], check=True)
        partial.rename(library)
    return library


@pytest.fixture(scope="session")
def standin(repository: Path) -> Path:
    return build_standin(repository / "build/standin")


@pytest.fixture(autouse=True)
def driver(
    request: pytest.FixtureRequest, clean_environment: None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Which driver the test and its processes use: "real" with --gpu, else the stand-in."""
    if request.config.getoption("--gpu"):
        if reason := missing_gpu():
            pytest.skip(reason)
        return "real"
    if request.node.get_closest_marker("gpu"):
        pytest.skip("needs a GPU, and was not asked to use one: --gpu")
    monkeypatch.setenv("TENSORWIRE_CUDA_LIBRARY", str(request.getfixturevalue("standin")))
    return "standin"
