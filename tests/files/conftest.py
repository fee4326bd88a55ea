from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from files.shelves import Shelf

pytest.importorskip("torch")
pytest.importorskip("fsspec")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a job runs, which is also the runtime folder of its user."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("SECRET", "SECRET_FILE", "READ_SECRET", "READ_SECRET_FILE"):
        monkeypatch.delenv(f"TENSORWIRE_{name}", raising=False)
    return tmp_path


@pytest.fixture
def shelf() -> Iterator["Shelf"]:
    """A server that lends memory for checkpoints, without a job."""
    from files.shelves import Shelf

    made = Shelf()
    yield made
    made.close()
