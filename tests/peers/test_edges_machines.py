"""A numpy graph split over two processes gives the bits that one process gives."""

import edges_program as program
import numpy as np
import pytest

from tensorwire.placement import plan
from tensorwire.testing import Member, PeerGroup

STEPS = 30


def start(group: PeerGroup, transport: str, function: object, *args: object) -> list[Member]:
    members = [group.start(function, m, transport, *args) for m in ("first", "second")]  # type: ignore[arg-type]
    addresses = [member.recv() for member in members]
    for member, other in zip(members, reversed(addresses), strict=True):
        member.send(other)
    return members


def test_the_graph_has_every_protocol() -> None:
    slots = [slot for bucket in plan(program.GRAPH).buckets for slot in bucket.slots]
    assert {slot.protocol for slot in slots} == {"static", "bounded", "unbounded"}


@pytest.mark.cold  # neither imports torch
@pytest.mark.usefixtures("nothing_left")
def test_two_processes_equal_one(transport: str) -> None:
    alone = program.Program()
    program.run(alone, STEPS, None, None)
    with PeerGroup() as group:
        first, second = start(group, transport, program.work, STEPS)
        table, _, answers = first.result(60)
        _, weight, _ = second.result(60)
    assert np.array_equal(table, alone.table)
    assert np.array_equal(weight, alone.weight)
    assert np.array_equal(answers, alone.answers)
    assert len(answers) == STEPS


@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_that_is_killed(transport: str, victim: int) -> None:
    with PeerGroup() as group:
        members = start(group, transport, program.wait_for_the_other)
        for member in members:
            assert member.recv() == "open"
        members[victim].kill()
        error = members[1 - victim].result(30)
    assert error.startswith("PeerLostError: ")
    assert ("first", "second")[victim] in error
