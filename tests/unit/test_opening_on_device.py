"""A server's share on a device: what is said where that has no memory left."""

from typing import Any

import pytest

from tensorwire.parameters.regions import RegionKind
from tensorwire.parameters.server.opening import Opening


class Full:
    """In place of the regions of a server, and of its device."""

    where = "cuda:0"

    class share:
        size_bytes = 4096

    def allocate(self, *_: Any) -> Any:
        raise MemoryError("cannot allocate 4096 bytes on cuda:0")


def test_a_device_without_memory_names_the_way_out() -> None:
    opening: Any = Opening.__new__(Opening)
    opening.device = opening.regions = Full()
    opening.member = None
    with pytest.raises(MemoryError, match=r'4096 bytes on cuda:0; .*parameters_on="host"'):
        opening.worked_on(RegionKind.STATE, "exp_avg")
