"""Prints requirements that pyproject.toml declares, one per line, for `pip install -r`.

python tools/requirements.py NAME...   where NAME is `build`, `run` or an extra. This lets the
Makefile install the tools before (and without) building the extension.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    with open(Path(__file__).parents[1] / "pyproject.toml", "rb") as file:
        pyproject = tomllib.load(file)
    project = pyproject["project"]
    named = {
        "build": pyproject["build-system"]["requires"],
        "run": project["dependencies"],
        **project["optional-dependencies"],
    }
    for name in sys.argv[1:]:
        print(*named[name], sep="\n")


if __name__ == "__main__":
    main()
