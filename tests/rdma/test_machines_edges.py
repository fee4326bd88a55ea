"""Edges of a graph between two machines over RDMA: every protocol, as in one process."""

import edges_program as program
import numpy as np
from actors import MachineGroup, node_options
from rig import Machine

STEPS = 10
START_S = 100.0


def test_two_machines_equal_one_process(
    machines: tuple[Machine, Machine], group: MachineGroup
) -> None:
    alone = program.Program()
    program.run(alone, STEPS, None, None)
    members = [
        group.start_on(machine, program.work, name, "rdma", STEPS, node_options(machine), name=name)
        for machine, name in zip(machines, ("first", "second"), strict=True)
    ]
    addresses = [member.recv(START_S) for member in members]
    for member, other in zip(members, reversed(addresses), strict=True):
        member.send(other)
    table, _, answers = members[0].result(START_S)
    _, weight, _ = members[1].result(START_S)
    assert np.allclose(table, alone.table, rtol=1e-4)
    assert np.allclose(weight, alone.weight, rtol=1e-4)
    assert np.allclose(answers, alone.answers, rtol=1e-4)
