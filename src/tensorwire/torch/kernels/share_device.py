"""Keeps a server's share on a GPU, or in host memory that is treated like a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensorwire.errors import UnavailableError
from tensorwire.memory import Region
from tensorwire.parameters import Bytes, DeviceBytes, ModelDevice

from ..devices import PageLocks, host_tensor

_STAGED = ModelDevice("staged cpu", "cpu")


def model_device(device: torch.device) -> ModelDevice:
    """Returns a device as all processes know it, however each of them counts its devices."""
    if device.type == "cpu":
        return _STAGED
    number = torch.cuda._utils._get_device_index(device, True)
    about = torch.cuda.get_device_properties(number)
    return ModelDevice(f"cuda {about.name} {about.uuid}", f"cuda:{number}")


class TorchDevice:
    """A device of a share, see `parameters.ShareDevice`.

    All work is done in the current stream of the calling thread. In a server, whose threads choose
    none, it is the device's default stream; in a worker that trains alone it is the script's.

    Args:
        name: of `model_device`. If this process does not see it, another one of its kind is taken.

    Attributes:
        name, where: as of `parameters.ShareDevice`.

    Raises:
        UnavailableError: torch sees no such device in this process.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.where: str | None = None
        self._device = torch.device("cpu")
        if name != _STAGED.name:
            self.name, self.where = _like(name)
            self._device = torch.device(self.where)
        self._locks = PageLocks(self._device)

    def over(self, region: Region, size_bytes: int) -> DeviceBytes:
        """See `parameters.ShareDevice.over`."""
        return region.tensor()[:size_bytes]

    def empty(self, size_bytes: int) -> DeviceBytes:
        """See `parameters.ShareDevice.empty`."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)

    def lock(self, memories: Sequence[Bytes]) -> None:
        """See `parameters.ShareDevice.lock`."""
        self._locks.lock(memories)

    def copy(self, target: Bytes | DeviceBytes, source: Bytes | DeviceBytes) -> None:
        """See `parameters.ShareDevice.copy`."""
        _tensor(target).copy_(_tensor(source), non_blocking=True)

    def synchronize(self) -> None:
        """See `parameters.ShareDevice.synchronize`."""
        if self.where is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See `parameters.ShareDevice.close`."""
        self._locks.release()


def _tensor(memory: Any) -> torch.Tensor:
    return memory if isinstance(memory, torch.Tensor) else host_tensor(memory)


def _like(name: str) -> ModelDevice:
    """Returns the device of that name in this process, or the first of its kind."""
    if not torch.cuda.is_available():
        raise UnavailableError(f"torch {torch.__version__} cannot use CUDA in this process")
    found = [model_device(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
    for each in found:
        if each.name == name:
            return each
    kind = name.rpartition(" ")[0]
    for each in found:
        if each.name.rpartition(" ")[0] == kind:
            return each
    raise UnavailableError(
        f"this server has no {kind.partition(' ')[2]}, which the workers have, and other hardware "
        "may give other bits: let all servers see such a GPU (CUDA_VISIBLE_DEVICES)"
    )
