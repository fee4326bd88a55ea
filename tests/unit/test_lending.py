"""What a server lends readers, at a door where they may do what they like."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorwire import Node
from tensorwire.parameters import Layout, Spec, TensorSpec
from tensorwire.parameters.reading import Ask, AskKind
from tensorwire.parameters.server.budget import CopyBudget
from tensorwire.parameters.server.lending import Lending
from tensorwire.parameters.server.sealed import SealedMemory
from tensorwire.parameters.snapshot import RequestOutcome


@pytest.fixture
def door() -> Iterator[Node]:
    with Node("door", quota_bytes=1 << 20) as node:
        yield node


def make_lending(door: Node, budget: CopyBudget, store: int = 0) -> Lending:
    layout = Layout(SPEC)
    share = layout.deal(1)[0]
    regions: Any = SimpleNamespace(share=share, server=0, servers=1)
    master = np.zeros(share.size_bytes, np.uint8)
    memory: Any = SimpleNamespace(states=(), average=None, master=master)
    return Lending(door, store, regions, memory, dict, {}, {}, lambda: None, budget)


SPEC = Spec("sgd", (), 1, 1, (TensorSpec("t", "float32", (1000,), "trained"),))
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
        lending.free(READER)
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


def test_memory_that_comes_back_holds_no_step_up(
    door: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving it to the system takes long, and the store needs the lock for its next version."""
    lending = make_lending(door, CopyBudget())
    lending.open(5, settled=True)
    assert lending.ask(READER, Ask(AskKind.MAKE, 0, 5)) is not None
    held: list[bool] = []
    free = SealedMemory.free

    def freed(memory: SealedMemory) -> None:
        held.append(lending._lock.locked())
        free(memory)

    monkeypatch.setattr(SealedMemory, "free", freed)
    lending.free(READER)
    assert held == [False]
    assert lending.held() == []
    lending.close()
