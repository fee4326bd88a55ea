"""Training between two machines over RDMA: the same bits, through a link that breaks for a moment,
and an end that names who is lost when a machine loses its power.
"""

from pathlib import Path

import numpy as np
import pytest
from commands import Process
from rig import Machine, Rig

# Importing torch takes half a minute there, so one job shows all of it.
pytestmark = pytest.mark.timeout(600)

START_S = 240.0
SCRIPT = Path(__file__).with_name("training_script.py")


# For two seconds everything goes to a station that does not exist; the link itself stays up. (When
# its link goes down, soft-RoCE ends its connections; a NIC tries again there, too.)
SWALLOW = """
ip neigh replace {0} dev eth0 lladdr 02:00:00:00:00:99 nud permanent
sleep 2
ip neigh del {0} dev eth0
"""


def test_digits(rig: Rig, machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    save_digits(rig.share / "digits.npz")
    here = first.python(SCRIPT, rig.share, "alone", "worker 0")
    there = second.python(
        SCRIPT, rig.share, "server", "worker 1", env={"RIG_ADDRESS": second.address}
    )
    bits = here.wait_for("(?m)^alone: bits (.*)$", START_S)[1]
    for process, role in ((here, "worker 0"), (there, "worker 1")):
        assert process.wait_for(f"(?m)^{role}: bits (.*)$", START_S)[1] == bits
        assert f"{role}: path ['rdma']" in process.output

    first.run(["sh", "-c", SWALLOW.format(second.address)])
    seen = here.output.count("worker 0: step ")
    here.wait_for(rf"(?m)^worker 0: step {seen + 20}$", 60.0)

    second.power_off()
    here.wait_for("(?m)^worker 0: exit 1$", 60.0)
    assert "PeerLostError" in here.output
    assert f"server 0 (pid {pid_of_server(there)} at {second.address})" in here.output


def save_digits(path: Path) -> None:
    """scikit-learn's digits, whose import takes too long in a machine."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(path, x=digits.images.astype("float32") / 16, y=digits.target)


def pid_of_server(process: Process) -> str:
    """The server is the first that its interpreter forks."""
    return str(process.pid + 1)
