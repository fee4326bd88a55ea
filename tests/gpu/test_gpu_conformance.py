"""Every pair of kinds of memory passes the checks of the conformance suite that need a GPU."""

import pytest

from tensorwire.testing import check_names, run_check
from tensorwire.testing.setup import MEMORY_PAIRS

# In one process what differs is that both sides have one driver.
RUNS = [
    *(("shm", "two processes", pair) for pair in MEMORY_PAIRS),
    *(("tcp", "two processes", pair) for pair in (("gpu", "gpu"), ("host", "gpu"))),
    ("shm", "one process", ("gpu", "gpu")),
]
CASES = [
    (transport, memory, place, name)
    for transport, place, memory in RUNS
    for name in check_names(place, memory)
]


@pytest.mark.parametrize(
    ("transport", "memory", "place", "name"),
    CASES,
    ids=["-".join((t, *m, p[:3], n)) for t, m, p, n in CASES],
)
def test_gpu_conformance(transport: str, memory: tuple[str, str], place: str, name: str) -> None:
    run_check(name, transport, place, memory)
