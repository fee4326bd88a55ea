"""The common part of the launcher's tests: a place to run, empty of processes afterwards."""

from collections.abc import Generator
from pathlib import Path

import pytest
from launching import Place, eventually


@pytest.fixture
def place(tmp_path: Path) -> Generator[Place]:
    place = Place(tmp_path)
    yield place
    assert eventually(lambda: not place.processes()), f"left running: {place.processes()}"
    assert not list(place.temporary.iterdir())
