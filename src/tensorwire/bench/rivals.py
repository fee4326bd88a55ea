"""Lists the systems that memory transfers are compared with, and whether they can run here.

A list only: their files are in the repository's `benchmarks`, which no wheel carries. A rival that
is not there or not installed is a row with the reason, never left out.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from tensorwire.bench import checkout


@dataclass(frozen=True, slots=True)
class Rival:
    """A rival as the bench knows it without importing it.

    Attributes:
        name: as in rows and on the command line.
        module: the file with its Driver and serve.
        needs: import names; of each tuple one must be there.
        remedy: what to install.
        cases: which cases it can do, by the word before the first "_".
        options: per wire on which it is measured, what its Driver and serve get.
        polls: as for `ProcessPair`.
    """

    name: str
    module: str
    needs: tuple[tuple[str, ...], ...]
    remedy: str
    cases: tuple[str, ...]
    options: dict[str, dict[str, Any]]
    polls: bool = False

    def missing(self) -> str | None:
        """Returns why it cannot run here, with the remedy; None when it can."""
        if self.module.startswith(checkout.PACKAGE):
            reason = checkout.missing(f"the rival {self.name}", "bench memory")
            if reason is not None:
                return reason
        for choices in self.needs:
            if not any(importlib.util.find_spec(name) for name in choices):
                return f"{' or '.join(choices)} is not installed; {self.remedy}"
        return None


_NIXL = (f"{checkout.PACKAGE}.rivals.nixl", (("nixl", "nixl_cu12", "nixl_cu13"),),
         "pip install nixl-cu12")  # fmt: skip
_TORCH = ((("torch",),), "pip install 'tensorwire[torch]'")
_MOVES = ("write", "read")
_BOTH: dict[str, dict[str, Any]] = {"shm": {"wire": "shm"}, "tcp": {"wire": "tcp"}}

RIVALS: tuple[Rival, ...] = (
    Rival(
        "nixl", *_NIXL, (*_MOVES, "batch"),
        {wire: {**options, "huge": False} for wire, options in _BOTH.items()},
    ),
    Rival("nixl-huge", *_NIXL, _MOVES, {"shm": {"wire": "shm", "huge": True}}),
    Rival(
        "nixl-gpu", _NIXL[0], (*_NIXL[1], ("torch",)), "pip install nixl-cu13 torch",
        ("write",), {"gpu": {"wire": "gpu", "huge": False}},
    ),
    Rival(
        "torch-rpc", f"{checkout.PACKAGE}.rivals.torch_rpc", *_TORCH, _MOVES, _BOTH, polls=True
    ),
    Rival("gloo", f"{checkout.PACKAGE}.rivals.gloo", *_TORCH, _MOVES, _BOTH),
    Rival(
        "grpc", f"{checkout.PACKAGE}.rivals.grpc_unary", (("grpc",),), "pip install grpcio",
        _MOVES, _BOTH,
    ),
)  # fmt: skip
