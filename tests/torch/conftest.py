"""One team of processes for all tests of this folder; the tests of training run on every path."""

import zlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from team import Team, make_team


def pytest_report_header() -> str:
    import torch

    return f"torch: {torch.__version__} in {torch.__path__[0]}"


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    with make_team() as made:
        yield made


@pytest.fixture
def transports(request: pytest.FixtureRequest) -> list[str] | None:
    """The path of a test: drawn by its name, or both, where the path decides what happens."""
    drawn = ("shm", "tcp")[zlib.crc32(request.node.name.encode()) % 2]
    return None if getattr(request, "param", drawn) == "shm" else ["tcp"]
