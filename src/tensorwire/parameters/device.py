"""Defines a device with memory of its own, for the tensors that a server's steps change.

The parameters, the optimizer's state and the gradients that workers bring are there; the values of
each version are copied to memory of the host, where all other readers find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tensorwire.memory import Region

from .layout import WITH_GRADIENT, Spec, padded
from .messages import Bytes

DeviceBytes = Any
"""An array of uint8 in memory of a device. It is sliced, and parts of it are assigned, as with
numpy; a part of it becomes a part of another one, of the same device."""


class ModelDevice(NamedTuple):
    """The device of a worker's model, where servers may have their shares too.

    Attributes:
        name: by which all processes know it. Devices of one kind have names that differ in the last
            word alone.
        here: as `RemoteRegion.device` has it in this process.
    """

    name: str
    here: str


class ShareDevice(Protocol):
    """A device as a server needs it, beside a kernel that computes there.

    Calls begin their work in the order of the calls, by one thread at a time, which waits for it by
    `synchronize`.

    Attributes:
        name: of the device, as `ModelDevice` has it.
        where: of regions on it, for `Node.allocate`; None: they are in memory of the host.
    """

    name: str
    where: str | None

    def over(self, region: Region, size_bytes: int) -> DeviceBytes:
        """Returns the first bytes of a region that was allocated on it."""

    def empty(self, size_bytes: int) -> DeviceBytes:
        """Returns zeroed memory on it, which belongs to this process."""

    def lock(self, memories: Sequence[Bytes]) -> None:
        """Locks pages of the host's memory, so that the device copies from and to it by itself."""

    def copy(self, target: Bytes | DeviceBytes, source: Bytes | DeviceBytes) -> None:
        """Begins to copy bytes; at least one of both is on the device."""

    def synchronize(self) -> None:
        """Returns when all that this thread has begun is done."""

    def close(self) -> None:
        """Unlocks the locked pages."""


def suits_device(spec: Spec) -> bool:
    """Tells whether a device may hold all shares of a store, so that their number changes no bit.

    It may not where there are tables, since steps change their rows on the host, nor where tensors
    without a gradient have most of the bytes: each array there has room for these too, in vain.
    """
    trained = sum(padded(each.size_bytes) for each in spec.tensors if each.kind in WITH_GRADIENT)
    rest = sum(padded(each.size_bytes) for each in spec.tensors) - trained
    return rest <= trained and all(each.kind != "rows" for each in spec.tensors)
