"""Training between two machines over RDMA: the same bits, past two seconds in which one answers
nothing, and an end that names who is lost when it loses its power.
"""

import time
from pathlib import Path

import numpy as np
import pytest
from commands import Process
from rig import Machine, Rig

# Importing torch takes half a minute there, so one job shows all of it.
pytestmark = pytest.mark.timeout(600)

START_S = 240.0
SCRIPT = Path(__file__).with_name("training_script.py")


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

    # The NICs try again for some seconds. (When the link itself goes down, soft-RoCE does not.)
    second.monitor("stop")
    time.sleep(2.0)
    seen = here.output.count("worker 0: step ")
    second.monitor("cont")
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
