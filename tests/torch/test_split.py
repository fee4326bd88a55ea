"""A split model trains as the whole one: schedules, skip edges, tied weights, varying sizes."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import crew as cases
from crew import Crew, alone, check_equal, make_crew

STEPS = 6


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with make_crew() as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


SCHEDULES = [
    ("GPipe", 2, 2, 4),
    ("1F1B", 2, 2, 4),
    ("1F1B", 3, 3, 5),
    ("GPipe", 3, 3, 1),
    ("Interleaved1F1B", 2, 4, 4),
    ("Interleaved1F1B", 1, 4, 2),
]


@pytest.mark.parametrize(("schedule", "size", "stages", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_equal_to_the_whole_model(
    crew: Crew,
    transport: str,
    kind: str,
    schedule: str,
    size: int,
    stages: int,
    microbatches: int,
) -> None:
    results = crew.run(size, transport, cases.train, kind, stages, schedule, microbatches, STEPS)
    check_equal(results, alone(kind, microbatches, STEPS, False))
    assert all(each[3] == ({"static"} if size > 1 else set()) for each in results)


@pytest.mark.parametrize(("bound", "protocol"), [(64, "bounded"), (None, "unbounded")])
def test_sizes_that_vary(crew: Crew, transport: str, bound: int | None, protocol: str) -> None:
    args = ("transformer", 2, "1F1B", 4, STEPS, bound)
    results = crew.run(2, transport, cases.train, *args)
    check_equal(results, alone("transformer", 4, STEPS, True))
    assert protocol in results[0][3]
