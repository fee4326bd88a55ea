"""Prints the folders of the torches in an environment, for TENSORWIRE_TORCHES of CMakeLists.txt.

    python tools/torches.py .venv 2.14.1

These are the torch that the environment imports, and the named one. If `make test-torch` has not
installed the latter, pip downloads its wheel without dependencies, and only its headers are kept:
40 MB of several gigabytes.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def second(environment: Path, version: str) -> Path:
    """Returns the folder of a torch, or of its headers; downloads the headers if neither exists."""
    whole, headers = environment / f"torch-{version}", environment / f"torch-headers-{version}"
    if (whole / ".installed").exists():
        return whole / "torch"
    if not (headers / "torch/version.py").exists():  # it is written last
        with tempfile.TemporaryDirectory(dir=environment) as folder:
            command = "pip download -qq --no-deps --no-cache-dir --only-binary :all:".split()
            command += ["-d", folder, f"torch=={version}"]
            subprocess.run([sys.executable, "-m", *command], check=True, stdout=sys.stderr)
            (wheel,) = Path(folder).iterdir()
            with zipfile.ZipFile(wheel) as archive:
                names = archive.namelist()
                archive.extractall(headers, [n for n in names if n.startswith("torch/include/")])
                archive.extract("torch/version.py", headers)
    return headers / "torch"


spec = importlib.util.find_spec("torch")
assert spec is not None, "torch is not installed"
assert spec.origin is not None, "torch is not installed"
found = [Path(spec.origin).parent, second(Path(sys.argv[1]), sys.argv[2])]
print(";".join(str(path.resolve()) for path in found))
