"""One team of processes for all tests of this folder; the tests of training run on every path."""

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


@pytest.fixture(params=["shm", "tcp"])
def transports(request: pytest.FixtureRequest) -> list[str] | None:
    """For tests that must not depend on the path."""
    return None if request.param == "shm" else ["tcp"]
