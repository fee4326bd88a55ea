from collections.abc import Iterator

import pytest

from tensorwire import Node


@pytest.fixture
def door() -> Iterator[Node]:
    """A Node at which readers connect."""
    with Node("door", quota_bytes=1 << 20) as node:
        yield node
