"""RDMA passes the conformance suite between two machines, as tcp does between two namespaces
(tests/peers/test_network_conformance.py).
"""

from collections.abc import Iterator

import pytest
from actors import MachineGroup, MachineMember, node_options
from elsewhere import serve_checks
from rig import ROOT, Rig

from tensorwire.testing import check_names


@pytest.fixture(scope="module")
def checks(rig: Rig) -> Iterator[MachineMember]:
    """A process in machine a that runs the checks it is told, with targets in machine b."""
    rig.boot()
    near, far = rig.machines
    program = ROOT / "tests" / "rdma" / "elsewhere.py"
    with far.python(program, far.address) as forks, MachineGroup(deadline_s=30.0) as group:
        port = int(forks.wait_for(r"port (\d+)")[1])
        options = node_options(near), node_options(far)
        yield group.start_on(near, serve_checks, (far.address, port), *options)
        assert forks.stderr == ""


@pytest.mark.parametrize("name", check_names("two processes"))
@pytest.mark.parametrize("transport", ["rdma"])
def test_conformance(checks: MachineMember, transport: str, name: str) -> None:
    checks.send((name, transport))
    failure = checks.recv(timeout_s=120.0)
    assert failure is None, failure
