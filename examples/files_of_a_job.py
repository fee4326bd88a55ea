"""Reads a running job as files: any program of this host can do so while the job trains.


    tensorwire run --workers 2 examples/files_of_a_job.py

Two workers train a small model. Worker 0 plays the other program: it knows only the address of the
job's first server, opens files by fsspec, and maps the newest version by safetensors.
"""

import os

import fsspec
import numpy as np
import torch
from safetensors import safe_open

import tensorwire.torch as tw
from tensorwire.files import JobReader

STEPS = 60


def look(address: str) -> None:
    """Reads a parameter by fsspec, as any program can; the job does not wait for it."""
    with fsspec.open(f"tw://{address}/params/2.weight.npy") as file:
        weight = np.load(file)
    fs = fsspec.filesystem("tw", address=address)
    version = fs.info("params/2.weight.npy")["version"]
    print(f"version {version}: weight {weight.shape}, norm {np.linalg.norm(weight):.3f}")


def check(address: str, model: torch.nn.Module) -> None:
    """Checks that the newest version, mapped and not copied, equals this worker's parameters."""
    with JobReader(address) as reader, reader.sealed_model() as newest:
        with safe_open(newest.path, framework="pt") as file:
            for name, parameter in model.named_parameters():
                assert torch.equal(file.get_tensor(name), parameter), name
        print(f"{newest.path} is version {newest.version}, {newest.size_bytes} bytes")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = tw.init()
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    optimizer = tw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
    address = os.environ["TENSORWIRE_SERVERS"].split(",")[0]
    generator = torch.Generator().manual_seed(job.rank)
    for step in range(STEPS):
        inputs = torch.randn(64, 20, generator=generator)
        loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.rank == 0 and step % 20 == 0:
            look(address)
    if job.rank == 0:
        check(address, model)
    optimizer.close()
    job.close()


if __name__ == "__main__":
    main()
