"""Finds the benches that are in tensorwire's repository and that no wheel carries.

They are the package `tensorwire_benchmarks` in the folder `benchmarks`, beside `src`. Where
tensorwire is installed editable from a checkout, this file lies in that checkout, so the folder is
found from its path. The current directory is not searched: it may hold another version than the
tensorwire that runs, and the place where a command is typed must not decide which code it runs. A
package on PYTHONPATH comes first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGE = "tensorwire_benchmarks"
_FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def found() -> bool:
    """Tells whether the package can be imported; in a checkout it can be after this call."""
    if (_FOLDER / PACKAGE).is_dir() and str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))  # last: it hides nothing
    return importlib.util.find_spec(PACKAGE) is not None


def missing(what: str, command: str) -> str | None:
    """Returns why `what` cannot run here and what can run `tensorwire command`; None if it can.

    The sentence begins with `what`.
    """
    if found():
        return None
    return (
        f"{what} is in tensorwire's repository, and no wheel carries it: clone the repository, run "
        f"'make build' there, and then '.venv/bin/tensorwire {command}'"
    )


def load(module: str) -> Any:
    """Returns a module of the package, by its name there; `found` must be true."""
    assert found(), "the benches of the repository are not here"
    return importlib.import_module(f"{PACKAGE}.{module}")
