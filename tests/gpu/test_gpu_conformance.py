"""Every pair of kinds of memory passes the checks of the conformance suite that need a GPU."""

import pytest

from tensorwire.testing import check_names, run_check
from tensorwire.testing.setup import MEMORY_PAIRS

CASES = [
    (memory, place, name)
    for place in ("one process", "two processes")
    for memory in MEMORY_PAIRS
    for name in check_names(place, memory)
]


@pytest.mark.parametrize(
    ("memory", "place", "name"), CASES, ids=["-".join((*m, p[:3], n)) for m, p, n in CASES]
)
def test_gpu_conformance(memory: tuple[str, str], place: str, name: str) -> None:
    run_check(name, "shm", place, memory)
