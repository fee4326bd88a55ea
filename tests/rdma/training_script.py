"""The script of test_machines_training.py in the machines: a small network on digits.

training_script.py FOLDER ROLE...

Importing torch takes half a minute there, so one interpreter does it and forks the roles: "alone",
"server" or "worker RANK". Each line that a role prints begins with its name.
"""

import contextlib
import hashlib
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tensorwire.torch as tw
from tensorwire.torch.server import main as serve

STEPS = 20

folder, secret = Path(sys.argv[1]), "the secret of the job"


def train(role: str) -> None:
    """Tells the bits after STEPS steps; a worker goes on for ever."""
    torch.set_num_threads(1)
    data = np.load(folder / "digits.npz")
    x, y = torch.from_numpy(data["x"])[:, None], torch.from_numpy(data["y"])
    job = tw.init()
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    )
    opt = tw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    loader = job.loader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
    step = 0
    while True:
        for inputs, targets in loader:
            F.cross_entropy(model(inputs), targets).backward()
            opt.step()
            opt.zero_grad()
            step += 1
            say(role, f"step {step}")
            if step == STEPS * len(job.my_slices):
                values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                say(role, f"path {job.report()['paths']}")
                say(role, f"bits {hashlib.sha256(values).hexdigest()}")
                if role == "alone":
                    return


def run(role: str) -> None:
    """One role, in a process of its own."""
    if role == "alone":
        os.environ["TENSORWIRE_SLICES"] = "2"
        return train(role)
    os.environ.update(TENSORWIRE_SECRET=secret, TENSORWIRE_TRANSPORTS="rdma")
    if role == "server":
        descriptor = os.open(folder / "address", os.O_WRONLY | os.O_CREAT)
        host = os.environ["RIG_ADDRESS"]
        arguments = ["--index=0", "--workers=2", f"--listen={host}:0"]
        sys.exit(serve([*arguments, f"--address-fd={descriptor}"]))
    address = ""
    while not address.endswith("\n"):
        time.sleep(0.1)
        with contextlib.suppress(FileNotFoundError):
            address = (folder / "address").read_text()
    os.environ.update(
        TENSORWIRE_RANK=role.split()[1], TENSORWIRE_WORKERS="2", TENSORWIRE_SERVERS=address.strip()
    )
    train(role)


def say(role: str, text: str) -> None:
    """Prints a line in one piece."""
    os.write(1, f"{role}: {text}\n".encode())


def forked(role: str) -> int:
    """Starts a role; the parent gets its number."""
    if pid := os.fork():
        return pid
    code = 0
    try:
        run(role)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        say(role, traceback.format_exc())
        code = 1
    say(role, f"exit {code}")
    os._exit(code)


children = [forked(role) for role in sys.argv[2:]]
for child in children:
    os.waitpid(child, 0)
