"""The fixtures of conformance: a system, and its two ends."""

from collections.abc import Iterator

import pytest

pytest.importorskip("grpc")

from ends import SYSTEMS, Ends, System


@pytest.fixture(params=SYSTEMS, ids=lambda system: system.name)
def system(request: pytest.FixtureRequest) -> System:
    chosen: System = request.param
    return chosen


@pytest.fixture
def ends(system: System) -> Iterator[Ends]:
    made = Ends(system)
    yield made
    made.close()
