"""The memory that a server lends readers, at a door where they may do what they like."""

import time

import pytest
from lent import make_lending

from tensorwire import Node
from tensorwire.files.lease import DoorLease
from tensorwire.parameters.reading import BELL, Ask, AskKind, lease_name
from tensorwire.parameters.server.lending.budget import CopyBudget
from tensorwire.parameters.server.lending.door import ReaderLease
from tensorwire.parameters.snapshot import RequestOutcome

READER, OTHER = object(), object()


def test_a_copy_waits_until_there_is_time_for_it(door: Node) -> None:
    now = 0.0
    budget = CopyBudget(lambda: now)
    lending = make_lending(door, budget)
    lending.open(5, settled=True)
    shared = lending.ask(READER, Ask(AskKind.MAKE, 0, 5))
    assert shared is not None
    assert shared.outcome == RequestOutcome.DONE
    budget.spend(10.0)
    assert lending.ask(OTHER, Ask(AskKind.MAKE, 0, 5)) == shared  # it is there already
    ask = Ask(AskKind.MAKE, 0, 6)
    assert lending.ask(READER, ask) is None
    lending.begin(6)
    lending.done(6)
    assert lending.held() == [(5, False)]  # training made no copy for it
    assert lending.ask(READER, ask) is None
    now = budget.opens_in_s()
    assert now > 10
    reply = lending.ask(READER, ask)
    assert reply is not None
    assert reply.outcome == RequestOutcome.DONE
    assert lending.held() == [(5, False), (6, False)]
    # A version that has passed meanwhile is told, and takes no time.
    budget.spend(10.0)
    assert lending.ask(READER, Ask(AskKind.MAKE, 0, 3)) is None
    now += budget.opens_in_s()
    assert lending.ask(READER, Ask(AskKind.MAKE, 0, 3)) == (RequestOutcome.PASSED, "6")
    lending.close()


def test_a_copy_takes_of_the_budget(door: Node) -> None:
    now = 0.0

    def clock() -> float:
        return now

    budget = CopyBudget(clock)
    lending = make_lending(door, budget)
    lending.open(5, settled=True)
    copies = 0
    while not budget.opens_in_s():
        reply = lending.ask(READER, Ask(AskKind.MAKE, 0, 5))
        assert reply is not None
        assert reply.outcome == RequestOutcome.DONE
        for memory in lending.release(READER):
            memory.free()
        copies += 1
        assert copies < 100_000
    assert lending.ask(READER, Ask(AskKind.MAKE, 0, 5)) is None
    lending.close()


def test_a_name_that_a_reader_took_leaves_nothing_at_the_door(door: Node) -> None:
    with Node("reader") as reader:
        taken = reader.connect(door.address).allocate(64, "0/facts")
        with pytest.raises(ValueError, match="0/facts"):
            make_lending(door, CopyBudget())
        with pytest.raises(LookupError):
            door.region("0/version")
        taken.free(10)
        make_lending(door, CopyBudget()).close()


def test_memory_that_comes_back_holds_nobody_up(door: Node) -> None:
    """Giving it to the system takes long: neither the store nor the reader waits for it."""
    lending = make_lending(door, CopyBudget())
    lending.open(5, settled=True)
    with Node("reader") as node:
        lease = DoorLease(node.connect(door.address), "reader")
        bell = door.allocate(64, name=BELL, access="rw")
        lease.send(Ask(AskKind.MAKE, 0, 5))
        served = ReaderLease(door.region(lease_name("reader")))
        served.serve({0: lending})
        assert lease.answer(time.monotonic() + 10).outcome == RequestOutcome.DONE
        (memory,) = (copy.regions[0] for copy in lending._copies)
        seen: list[RequestOutcome] = []
        free = memory.free

        def freed() -> None:
            assert not lending._lock.locked()
            seen.append(lease.answer(time.monotonic() + 10).outcome)  # it is there already
            free()

        memory.free = freed  # type: ignore[method-assign]
        lease.send(Ask(AskKind.FREE, 0, 5))
        served.serve({0: lending})
        assert seen == [RequestOutcome.DONE]
        assert lending.held() == []
        assert memory.descriptor == -1
        bell.free()
    lending.close()
