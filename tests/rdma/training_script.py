"""What test_machines_training.py runs in the machines: a small network on digits.

training_script.py FOLDER [for ever]
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tensorwire.torch as tw

STEPS = 20

torch.set_num_threads(1)
data = np.load(Path(sys.argv[1]) / "digits.npz")
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
        print(f"step {step}", flush=True)
        if step == STEPS * (1 if job.size > 1 else len(job.my_slices)):
            values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            print("path", *job.report()["paths"], flush=True)
            print("bits", hashlib.sha256(values).hexdigest(), flush=True)
            if len(sys.argv) < 3:
                sys.exit()
