"""A reader's lease at a door, and what the door sees of it."""

import time
from collections.abc import Iterator

import pytest

from tensorwire import Node
from tensorwire.files.lease import DoorLease
from tensorwire.parameters.reading import BELL, LOST_S, Ask, AskKind, lease_name
from tensorwire.parameters.server.lending import door as door_module
from tensorwire.parameters.server.lending.door import ReaderLease

ASK = Ask(AskKind.FREE, 7, 5)


@pytest.fixture
def door() -> Iterator[Node]:
    with Node("door", quota_bytes=1 << 20) as node:
        node.allocate(64, name=BELL, access="rw")
        yield node


def test_who_asks_after_a_long_rest_lives(door: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between snapshots a reader shows no life; its request must not come just too late."""
    now = time.monotonic()
    monkeypatch.setattr(door_module.time, "monotonic", lambda: now)
    with Node("reader") as reader:
        lease = DoorLease(reader.connect(door.address), "reader")
        lease.send(ASK)
        seen = ReaderLease(door.region(lease_name("reader")))
        for _ in range(3):
            seen.serve({})
            assert lease.answer(now + 5).text == "the job has no store 7"
            now += LOST_S - 0.1
            assert not seen.has_ended
            lease.send(ASK)
            now += 0.2
            assert not seen.has_ended
        now += LOST_S + 0.1
        assert seen.has_ended
