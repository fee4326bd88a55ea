"""Memory that is made ahead for the next snapshot."""

import os
from typing import Any

import pytest
from lent import make_lending

from tensorwire import Node
from tensorwire.parameters.reading import Ask, AskKind
from tensorwire.parameters.server.lending import lending as lending_module
from tensorwire.parameters.server.lending import spare as spare_module
from tensorwire.parameters.server.lending.budget import CopyBudget
from tensorwire.parameters.server.lending.spare import SpareMemory, whole_pages
from tensorwire.parameters.snapshot import RequestOutcome

SIZE = 5 << 20
READER = object()


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the room that was asked for; there is always some."""
    asked: list[int] = []
    monkeypatch.setattr(spare_module, "check_room", asked.append)
    return asked


def pages_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def test_its_pages_are_there_before_they_are_written(room: list[int]) -> None:
    spent: list[float] = []
    spare = SpareMemory(SIZE + 1, spent.append)
    assert spare.size_bytes == whole_pages(SIZE + 1) == SIZE + 4096
    while len(spent) < 3:  # chunks of 2 MiB
        assert not spare.wait(0.01)
    assert room == [2 * spare.size_bytes]
    descriptor = spare.take()
    assert descriptor is not None
    assert pages_of(descriptor) == os.fstat(descriptor).st_size == spare.size_bytes
    assert spare.take() is None
    spare.close()
    os.close(descriptor)  # it is the caller's


def test_it_goes_when_it_was_kept_for_long(room: list[int]) -> None:
    spare = SpareMemory(SIZE, lambda _: None, keep_s=0.01)
    assert spare.wait(10)
    assert spare.take() is None


def test_it_is_none_where_the_host_has_no_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(spare_module, "check_room", refuse)
    spare = SpareMemory(SIZE, lambda _: None)
    assert spare.wait(10)
    assert spare.take() is None


class Spares(list[SpareMemory]):
    """Spare memory that remembers what was made."""

    def __call__(self, size_bytes: int, *rest: Any) -> SpareMemory:
        self.append(SpareMemory(size_bytes, *rest))
        return self[-1]


def test_who_takes_snapshots_again_and_again_gets_memory_that_is_there(
    door: Node, room: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Spares()
    monkeypatch.setattr(lending_module, "SpareMemory", made)
    lending = make_lending(door, CopyBudget())
    lending.open(5, settled=True)

    def take() -> None:
        reply = lending.ask(READER, Ask(AskKind.MAKE, 0, 5))
        assert reply is not None
        assert reply.outcome == RequestOutcome.DONE
        for memory in lending.release(READER):
            memory.free()

    take()
    assert not made  # nobody has come twice
    take()
    assert len(made) == 1
    take()
    assert made[0].wait(10)
    assert made[0].take() is None  # the third snapshot lies in it
    assert len(made) == 2
    lending.idle()  # nobody is connected
    assert made[1].wait(10)
    take()
    assert len(made) == 2
    take()
    assert len(made) == 3
    lending.close()
    assert made[2].wait(10)
