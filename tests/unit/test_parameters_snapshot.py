"""The requests for a snapshot, their answers, and the places in a snapshot."""

import numpy as np
import pytest

from tensorwire.errors import BusyError
from tensorwire.parameters.snapshot import (
    REPLY_BYTES,
    Parts,
    Reply,
    Request,
    RequestKind,
    RequestOutcome,
    busy,
)


@pytest.mark.parametrize("kind", RequestKind)
def test_requests_come_back(kind: RequestKind) -> None:
    request = Request(kind, 7, 1 << 40)
    assert Request.from_bytes(request.to_bytes()) == request


def test_what_is_no_request() -> None:
    with pytest.raises(ValueError, match="9 is not a valid RequestKind"):
        Request.from_bytes(np.array([9, 0, 0], np.int64).view(np.uint8))


def test_replies_come_back_and_are_cut() -> None:
    reply = Reply(RequestOutcome.BUSY, "held by worker 1")
    assert Reply.from_bytes(reply.to_bytes()) == reply
    long = Reply(RequestOutcome.REFUSED, "x" * 1000).to_bytes()
    assert len(long) == REPLY_BYTES
    assert set(Reply.from_bytes(long).text) == {"x"}
    assert isinstance(busy(reply.text), BusyError)


def test_parts_do_not_overlap() -> None:
    sizes = {"values": 100, "state/a": 64, "counts": 0, "scalars": 8}
    parts = Parts.of(3, {name: np.full(size, 7, np.uint8) for name, size in sizes.items()})
    memory = np.zeros(parts.size_bytes, np.uint8)
    parts.write_head(memory)
    for name, size in sizes.items():
        part = memory[parts.place(name)]
        assert len(part) == size
        assert not part.any()
        assert parts.place(name).start % 64 == 0
        part[:] = 1
    found = Parts.read(memory[: Parts.head_bytes()])
    assert found.version == 3
    assert found.size_bytes == parts.size_bytes
    assert [found.place(name) for name in sizes] == [parts.place(name) for name in sizes]
    with pytest.raises(LookupError):
        found.place("state/b")
    with pytest.raises(ValueError, match=r"bytes, and .* fit"):
        Parts.of(1, {f"state/{'x' * 50}{i}": memory[:1] for i in range(99)}).write_head(memory)
