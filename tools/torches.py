"""Prints the folders of the torches in an environment, for TENSORWIRE_TORCHES of CMakeLists.txt."""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("torch")
found = [Path(spec.origin).parent] if spec and spec.origin else []
found += [path.parent for path in sorted(Path(sys.argv[1]).glob("torch-*/torch/version.py"))]
print(";".join(map(str, [path.resolve() for path in found])))
