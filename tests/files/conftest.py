from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from files.jobs import JobAtWork
    from files.mounts import Mounted
    from files.shelves import Shelf

pytest.importorskip("torch")
pytest.importorskip("fsspec")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a job runs, which is also the runtime folder of its user."""
    return make_runtime_folder(tmp_path, monkeypatch)


def make_runtime_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    for name in ("SECRET", "SECRET_FILE", "READ_SECRET", "READ_SECRET_FILE"):
        monkeypatch.delenv(f"TENSORWIRE_{name}", raising=False)
    return path


@pytest.fixture(scope="module")
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobAtWork]:
    """A job of one worker for all tests of a module, which leave it as it was.

    A module's JOB has more options of `JobAtWork`.
    """
    from files.jobs import training

    options = {"PAUSE": "0.01", **getattr(request.module, "JOB", {})}
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = make_runtime_folder(tmp_path_factory.mktemp("job"), monkeypatch)
        with training(folder, "--workers", "1", **options) as made:
            yield made


@pytest.fixture
def made(job: JobAtWork, tmp_path: Path) -> Iterator[Mounted]:
    """A mount of that job."""
    from files.mounts import mounted

    with mounted(tmp_path, job.address) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_instance_stays() -> Iterator[None]:
    from tensorwire.files.filesystem import TensorwireFileSystem

    yield
    TensorwireFileSystem.clear_instance_cache()


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """A server that lends memory for checkpoints, without a job."""
    from files.shelves import Shelf

    made = Shelf()
    yield made
    made.close()
