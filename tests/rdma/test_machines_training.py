"""Training between two machines over RDMA: the same bits, through a link that breaks for a moment,
and an end that names who is lost when a machine loses its power.
"""

import secrets
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
    environment = {"TENSORWIRE_SECRET": secrets.token_hex(16), "TENSORWIRE_TRANSPORTS": "rdma"}
    alone = first.python(SCRIPT, rig.share, env={"TENSORWIRE_SLICES": "2"})
    server = second.python(
        "tensorwire.torch.server",
        *("--index", 0, "--workers", 2, "--listen", f"{second.address}:0", "--address-fd", 1),
        env=environment,
    )
    address = server.wait_for(r"(?m)^[\d.]+:\d+$", START_S)[0]
    workers = [
        machine.python(
            SCRIPT,
            *(rig.share, "for ever"),
            env={
                **environment,
                "TENSORWIRE_RANK": str(rank),
                "TENSORWIRE_WORKERS": "2",
                "TENSORWIRE_SERVERS": address,
            },
        )
        for rank, machine in enumerate(machines)
    ]
    bits = [bits_of(process) for process in (alone, *workers)]
    assert alone.check(60.0)
    assert bits[1:] == bits[:1] * 2
    for worker in workers:
        assert worker.wait_for("path (.*)", START_S)[1] == "rdma"

    first.link(False)
    seen = steps_of(workers[0])
    machines[0].run(["sleep", "2"])
    first.link(True)
    workers[0].wait_for(rf"(?s)step {seen + 20}\b", 60.0)

    second.power_off()
    assert workers[0].wait(60.0) == 1
    assert "PeerLostError" in workers[0].stderr or "server 0" in workers[0].stderr
    assert second.address in workers[0].stderr


def save_digits(path: Path) -> None:
    """scikit-learn's digits, whose import takes too long in a machine."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    np.savez(path, x=digits.images.astype("float32") / 16, y=digits.target)


def bits_of(process: Process) -> str:
    """The checksum that the script prints after its first steps."""
    return process.wait_for("bits (.*)", START_S)[1]


def steps_of(process: Process) -> int:
    """How many steps the script has told of."""
    return process.output.count("step ")
