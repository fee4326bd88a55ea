"""The rig for all tests of this folder: booted once, set right again before each test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "peers"))  # its actors run in machines, too

from actors import MachineGroup
from rig import POWERED_OFF, Machine, Rig


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Emulated machines boot and import slowly where this host is busy."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(170))


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """Two machines. A test that uses `machines` finds them on and joined."""
    with Rig() as made:
        yield made


@pytest.fixture
def machines(rig: Rig) -> Iterator[tuple[Machine, Machine]]:
    """Both machines, on and joined. Processes that the test leaves there are killed.

    A machine that ends by itself fails the test, unless the test then powers it off.
    """
    rig.boot()
    first, second = rig.machines
    before = {machine: set(machine.processes) for machine in rig.machines}
    yield first, second
    for machine in rig.machines:
        if machine.is_on:
            machine.link(True)
            for id_ in set(machine.processes) - before[machine]:
                machine.processes[id_].kill()
        assert machine.is_on or machine.why_off == POWERED_OFF, machine.why_off


@pytest.fixture
def group() -> Iterator[MachineGroup]:
    """Starts Python functions in machines; they end with the test."""
    with MachineGroup(deadline_s=30.0) as made:
        yield made
