"""In which order a machine of a pipeline runs its stages: PyTorch's schedules, by their names.

Pure: numbers in, order out. PyTorch's own classes carry out their orders with two-sided messages of
a process group and cannot be given another way to send.
"""

from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """One stage's forward or backward of one micro-batch."""

    backward: bool
    stage: int
    microbatch: int


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def order(name: str, machine: int, machines: int, stages: int, microbatches: int) -> list[Action]:
    """What one machine does in a step. Stage s is on machine s modulo machines.

    Forwards come in the order of micro-batches in every stage, and so do backwards; in LoopedBFS
    backwards come in the opposite order in every stage. What crosses is known by its turn alone, so
    stages that have a value in common have to agree. A machine that is alone with several stages
    runs them as Interleaved1F1B where the schedule itself has one on each machine.

    Args:
        name: one of SCHEDULES, in any case.
        machine: which.
        machines: how many.
        stages: a multiple of machines; for GPipe and 1F1B as many, or any number on one machine.
        microbatches: at least 1.

    Raises:
        ValueError: there is no such schedule, or it cannot have these numbers.
    """
    known = {each.lower(): each for each in SCHEDULES}
    if name.lower() not in known:
        raise ValueError(
            f"no schedule {name!r}; known are {', '.join(SCHEDULES)}, and none that computes a "
            "backward in two parts (zero bubble, DualPipeV)"
        )
    name = known[name.lower()]
    if microbatches < 1:
        raise ValueError(f"a step has at least one micro-batch, not {microbatches}")
    if stages % machines or not stages:
        raise ValueError(f"{stages} stages cannot be dealt equally to {machines} processes")
    if name == "LoopedBFS":
        return _looped(range(machine, stages, machines), microbatches)
    if name == "Interleaved1F1B" or (machines == 1 and stages > 1):
        return _interleaved(machine, machines, stages // machines, microbatches)
    if stages != machines:
        raise ValueError(
            f"{name} has one stage on each process, not {stages} on {machines}; "
            "Interleaved1F1B and LoopedBFS can have more"
        )
    ahead = microbatches if name == "GPipe" else min(microbatches, stages - machine)
    forwards = [Action(False, machine, i) for i in range(microbatches)]
    backwards = [Action(True, machine, i) for i in range(microbatches)]
    return _alternate(forwards, backwards, ahead)


def flights(name: str, stages: int, microbatches: int) -> int:
    """How many micro-batches are between a stage's forward and its backward, at most."""
    return min(microbatches, stages) if name.lower() == "1f1b" else microbatches


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    actions = forwards[:ahead]
    for at, backward in enumerate(backwards):
        actions.append(backward)
        actions += forwards[ahead + at : ahead + at + 1]
    return actions


def _looped(stages: range, microbatches: int) -> list[Action]:
    """A stage after the other, forward and then back the same way."""
    forwards = [Action(False, stage, at) for stage in stages for at in range(microbatches)]
    return forwards + [Action(True, stage, at) for _, stage, at in reversed(forwards)]


def _interleaved(machine: int, machines: int, local: int, microbatches: int) -> list[Action]:
    rounds = max(1, microbatches // machines)
    if microbatches % rounds:
        raise ValueError(
            f"Interleaved1F1B on {machines} processes has a multiple of {rounds} micro-batches "
            f"here, not {microbatches}"
        )
    per_round = microbatches // rounds
    total = local * microbatches
    ahead = min((local - 1) * per_round + 2 * (machines - 1 - machine), total)

    def actions(backward: bool) -> list[Action]:
        seen = [0] * local
        made = []
        for step in range(total):
            at = (step // per_round) % local
            at = local - 1 - at if backward else at
            made.append(Action(backward, at * machines + machine, seen[at]))
            seen[at] += 1
        return made

    forwards, backwards = actions(False), actions(True)
    # After `ahead` forwards a forward comes first, then its backward.
    return _alternate(forwards, backwards, min(ahead + 1, total))
