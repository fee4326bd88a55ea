"""Limits the memory of payload, the sizes that travel beside messages, and the time that they wait.

The only object of limits that users make. Knows no channels and no servers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from .route import chosen_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The memory that a channel or server grants to the other end, and rules for its own payload.

    Attributes:
        threshold_bytes: a message whose payload is smaller travels as it is. None: the value of
            TENSORWIRE_RPC_THRESHOLD_BYTES, else the best size for the transport (docs/rpc.md).
        pool_bytes: memory here that the other end, of a server each client, may write into.
        patience_s: how long a message waits for memory at the other end before it travels as it is.
        max_attachments: of a server: clients at a time whose payload travels beside messages;
            others get plain gRPC. A channel does not heed it.

    Raises:
        ValueError: a value, or the variable, is out of its range or of another type.
    """

    threshold_bytes: int | None = None
    pool_bytes: int = 1 << 30
    patience_s: float = 1.0
    max_attachments: int = 64

    def __post_init__(self) -> None:
        if self.threshold_bytes is not None:
            self._keep("threshold_bytes", _whole("threshold_bytes", self.threshold_bytes, 0))
        self._keep("pool_bytes", _whole("pool_bytes", self.pool_bytes, 1))
        self._keep("max_attachments", _whole("max_attachments", self.max_attachments, 0))
        patience: Any = self.patience_s
        if not isinstance(patience, Real) or not float(patience) >= 0:
            raise ValueError(f"patience_s is a number of seconds from 0 up, not {patience!r}")
        self._keep("patience_s", float(patience))
        self._keep("threshold_bytes", chosen_threshold(self.threshold_bytes))

    def _keep(self, name: str, value: float | None) -> None:
        object.__setattr__(self, name, value)


def given_limits(limits: Limits | None) -> Limits:
    """Returns the limits that a user gave; None stands for the defaults.

    Raises:
        ValueError: they are of another type, or TENSORWIRE_RPC_THRESHOLD_BYTES is no number.
    """
    if limits is None:
        return Limits()
    if not isinstance(limits, Limits):
        raise ValueError(f"limits is a tensorwire.rpc.Limits, not {limits!r}")
    return limits


def _whole(name: str, value: Any, least: int) -> int:
    """Checks a whole number; 1e9 is none, as it is a float."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is a whole number from {least} up, not {value!r}")
    return number
