"""Trains with the wheel of `make wheel`, installed by itself and without a compiler.

    python tools/test_wheel.py .venv 2.14.1

The packages that it needs come from the environment, without the environment's own tensorwire. Runs
with the torch of the environment, and with the second torch if `make test-torch` has installed it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE, SECOND = Path(sys.argv[1]).resolve(), sys.argv[2]

SCRIPT = """
import sys
import torch
import tensorwire
import tensorwire.torch as tw
from tensorwire.torch.allocator import library

job = tw.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
optimizer = tw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
inputs = torch.full((8, 256), 1.0 + job.rank)
first = last = 0.0
for step in range(20):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    first, last = first or loss.item(), loss.item()
rows = tw.explain_optimizer(optimizer).gradients
assert all(row.in_place for row in rows), [row.reason for row in rows]
assert last < first
assert tensorwire.__file__.startswith(sys.prefix), tensorwire.__file__
assert library.find().startswith("prebuilt, "), library.find()
assert library.find_compiler() is None
if job.rank == 0:
    print(f"torch {torch.__version__}: {library.find()}; loss {first:.4f} to {last:.4f}")
"""


def main() -> None:
    """Installs the wheel and runs the script with each torch."""
    (wheel,) = (ROOT / "dist").glob("tensorwire-*.whl")
    # Folders of .pth files too.
    paths = "import sys; print(*[p for p in sys.path if 'site-packages' in p], sep=':')"
    seen = subprocess.check_output([HERE / "bin/python", "-I", "-c", paths], text=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare")
        python = bare / "bin/python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        (packages,) = bare.glob("lib/python*/site-packages")
        install = ["-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", packages]
        subprocess.run([HERE / "bin/python", *install, wheel], check=True)
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        second = HERE / f"torch-{SECOND}"
        torches = [[], [str(second)]] if (second / ".installed").exists() else [[]]
        for front in torches:
            path = [str(packages), *front, seen]
            environment = {
                "PATH": str(bare / "bin"),
                "PYTHONPATH": os.pathsep.join(path),
                "HOME": folder,
                "TMPDIR": folder,
            }
            command = [python, "-m", "tensorwire", "run", "-w", "2", "-s", "1", script]
            subprocess.run(command, check=True, env=environment, cwd=folder, timeout=300)
        if len(torches) == 1:
            print(f"torch {SECOND}: not tried, as it is not installed (make test-torch)")


main()
