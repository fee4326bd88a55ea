"""The systems that tensorwire is compared with, and whether they can run here.

One file per rival; each runs in a pair of processes of its own (`bench.processes`) and is tuned as
its users would tune it. A rival that is not installed is a row with the reason, never left out.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rival:
    """What the bench must know about a rival without importing it.

    Attributes:
        name: as in rows and on the command line.
        module: the file with its Driver and serve.
        needs: import names; of each tuple one must be there.
        remedy: what to install.
        cases: which cases it can do, by the word before the first "_".
        options: per wire on which it is measured, what its Driver and serve get.
    """

    name: str
    module: str
    needs: tuple[tuple[str, ...], ...]
    remedy: str
    cases: tuple[str, ...]
    options: dict[str, dict[str, Any]]

    def missing(self) -> str | None:
        """Why it cannot run here, with the remedy; None when it can."""
        for choices in self.needs:
            if not any(importlib.util.find_spec(name) for name in choices):
                return f"{' or '.join(choices)} is not installed; {self.remedy}"
        return None


_PACKAGE = "tensorwire.bench.rivals"

RIVALS: tuple[Rival, ...] = (
    Rival(
        name="nixl",
        module=f"{_PACKAGE}.nixl",
        needs=(("nixl", "nixl_cu12", "nixl_cu13"),),
        remedy="pip install nixl-cu12",
        cases=("write", "read", "batch"),
        options={"shm": {"wire": "shm", "huge": False}, "tcp": {"wire": "tcp", "huge": False}},
    ),
    Rival(
        name="nixl-huge",
        module=f"{_PACKAGE}.nixl",
        needs=(("nixl", "nixl_cu12", "nixl_cu13"),),
        remedy="pip install nixl-cu12",
        cases=("write", "read"),
        options={"shm": {"wire": "shm", "huge": True}},
    ),
    Rival(
        name="torch-rpc",
        module=f"{_PACKAGE}.torch_rpc",
        needs=(("torch",),),
        remedy="pip install 'tensorwire[torch]'",
        cases=("write", "read"),
        options={"shm": {"wire": "shm"}, "tcp": {"wire": "tcp"}},
    ),
    Rival(
        name="gloo",
        module=f"{_PACKAGE}.gloo",
        needs=(("torch",),),
        remedy="pip install 'tensorwire[torch]'",
        cases=("write", "read"),
        options={"shm": {"wire": "shm"}, "tcp": {"wire": "tcp"}},
    ),
    Rival(
        name="grpc",
        module=f"{_PACKAGE}.grpc_unary",
        needs=(("grpc",),),
        remedy="pip install grpcio",
        cases=("write", "read"),
        options={"shm": {"wire": "shm"}, "tcp": {"wire": "tcp"}},
    ),
)


def rival(name: str) -> Rival:
    """The rival of that name.

    Raises:
        LookupError: there is none.
    """
    for candidate in RIVALS:
        if candidate.name == name:
            return candidate
    raise LookupError(f"no rival {name!r}; known: {', '.join(r.name for r in RIVALS)}")
