"""A training job that does small steps until it is killed, and notes when each was done.

Argument: a folder for `steps`, 8 bytes per step: a double, seconds of the monotonic clock; and for
`aim`, the address of the server and the secret.
"""

import os
import struct
import sys
import time
from pathlib import Path

import torch

import tensorwire.torch as tw

folder = Path(sys.argv[1])
torch.set_num_threads(1)
job = tw.init()
model = torch.nn.Linear(500, 100)
optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
if job.rank == 0:
    secret = os.environ["TENSORWIRE_SECRET"].encode().hex()
    (folder / "aim").write_text(f"{os.environ['TENSORWIRE_SERVERS']} {secret}")
with (folder / "steps").open("ab", buffering=0) as steps:
    while True:
        model(torch.ones(4, 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.rank == 0:
            steps.write(struct.pack("d", time.monotonic()))
        time.sleep(0.01)
