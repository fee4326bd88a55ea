"""Orders the stages of a machine by PyTorch's pipeline schedules, by their names.

Pure: numbers in, order out. PyTorch's own classes carry out their orders with two-sided messages of
a process group and cannot be given another way to send.

InterleavedZeroBubble and ZBVZeroBubble come from Qi et al., "Zero bubble pipeline parallelism"
(arXiv:2401.10241); DualPipeV from DualPipe in the DeepSeek-V3 technical report
(arXiv:2412.19437).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of work on a stage and a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"  # of the backward, the part for the stage's inputs
    WEIGHT = "W"  # the rest of that backward


class Action(NamedTuple):
    """One stage's forward, or its backward or a part of that, of one micro-batch."""

    kind: Kind
    stage: int
    microbatch: int


SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_STAGES = {"GPipe": 1, "1F1B": 1, "ZBVZeroBubble": 2, "DualPipeV": 2}  # in each process
_V = ("ZBVZeroBubble", "DualPipeV")

_NAMES = {each.lower(): each for each in SCHEDULES}


def deal(name: str, machines: int, stages: int) -> tuple[int, ...]:
    """Returns the machine of every stage.

    Stages go round the machines; in the schedules that are named after the letter V there and back
    again, so that the first machine has the first stage and the last.

    Args:
        name: one of SCHEDULES, in any case.
        machines: how many.
        stages: a multiple of machines; where the schedule has one or two on each machine, as many,
            or any number on one machine.

    Raises:
        ValueError: there is no such schedule, or it cannot have these numbers.
    """
    if name.lower() not in _NAMES:
        raise ValueError(f"no schedule {name!r}; known are {', '.join(SCHEDULES)}")
    name = _NAMES[name.lower()]
    if stages % machines or not stages:
        raise ValueError(f"{stages} stages cannot be dealt equally to {machines} processes")
    wanted = _STAGES.get(name)
    if machines > 1 and wanted and stages != wanted * machines:
        raise ValueError(
            f"{name} has {'one stage' if wanted == 1 else 'two stages'} on each process, not "
            f"{stages} on {machines}; Interleaved1F1B, LoopedBFS and InterleavedZeroBubble can "
            "have any number"
        )
    there = tuple(range(machines))
    return there + there[::-1] if name in _V and machines > 1 else there * (stages // machines)


def order(name: str, machine: int, machines: int, stages: int, microbatches: int) -> list[Action]:
    """Returns the actions of one machine in a step, with the stages that `deal` gives it.

    Forwards come in the order of micro-batches in every stage, and so do backwards and each of
    their parts; in LoopedBFS backwards come in the opposite order in every stage. A crossing value
    is known by its turn alone, so stages that have a value in common have to agree. A machine that
    is alone with numbers of stages or micro-batches that the schedule cannot have runs them as
    Interleaved1F1B, or as InterleavedZeroBubble if the schedule is one in V shape.

    Args:
        name: one of SCHEDULES, in any case.
        machine: which.
        machines: how many.
        stages: as for `deal`.
        microbatches: at least 1; for DualPipeV as many as stages; for the interleaved ones a
            multiple of microbatches // machines, if that is not 0.

    Raises:
        ValueError: there is no such schedule, or it cannot have these numbers.
    """
    if microbatches < 1:
        raise ValueError(f"a step has at least one micro-batch, not {microbatches}")
    homes = deal(name, machines, stages)
    own = [stage for stage, home in enumerate(homes) if home == machine]
    name = _NAMES[name.lower()]
    too_few = name == "DualPipeV" and microbatches < stages
    if too_few and machines > 1:
        raise ValueError(
            f"DualPipeV has as many micro-batches as stages or more, not {microbatches} with "
            f"{stages} stages"
        )
    if _STAGES.get(name, len(own)) != len(own) or too_few:
        name = "InterleavedZeroBubble" if name in _V else "Interleaved1F1B"
    if name == "LoopedBFS":
        return _looped(own, microbatches)
    if name == "Interleaved1F1B":
        hops = 2 * (machines - 1 - machine)
        return _interleaved(name, own, machines, microbatches, hops, Kind.BACKWARD)
    if name == "InterleavedZeroBubble":
        hops = machines - 1 - machine
        actions = _interleaved(name, own, machines, microbatches, hops, Kind.INPUT)
        return _with_weights(actions, machine)
    if name in _V:
        pattern = (_zero_bubble_v if name == "ZBVZeroBubble" else _dual_pipe_v)(
            machine, machines, microbatches
        )
        return [each for each in _written(pattern, own) if each.microbatch < microbatches]
    ahead = microbatches if name == "GPipe" else min(microbatches, stages - machine)
    forwards = [Action(Kind.FORWARD, own[0], i) for i in range(microbatches)]
    backwards = [Action(Kind.BACKWARD, own[0], i) for i in range(microbatches)]
    return _alternate(forwards, backwards, ahead)


def flights(name: str, machines: int, stages: int, microbatches: int) -> int:
    """Returns how many copies of a crossing value's memory there must be, so that no sender waits.

    A receiver has memory from a stage's forward until its backward or the weights' part of it. Say
    that no stage is more than `ahead` forwards ahead of its backwards, and weights are at most
    `late` after inputs. Before a stage's forward t, its input part t - ahead is done, so the same
    part of each later stage is, whose weight part t - ahead - late is then done too: its memory is
    free. Gradients on their way back find their memory free by the same steps.
    """
    ahead = late = 0
    for machine in range(machines):
        forwards: Counter[int] = Counter()  # by stage, without a backward
        pending: Counter[int] = Counter()  # input parts without weights
        for kind, stage, _ in order(name, machine, machines, stages, microbatches):
            forwards[stage] += {Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(kind, -1)
            pending[stage] += {Kind.INPUT: 1, Kind.WEIGHT: -1}.get(kind, 0)
            ahead, late = max(ahead, forwards[stage]), max(late, pending[stage])
    return min(microbatches, ahead + late)


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """Returns `ahead` forwards, then backwards and forwards in turn, then the backwards left."""
    actions = forwards[:ahead]
    for at, backward in enumerate(backwards):
        actions.append(backward)
        actions += forwards[ahead + at : ahead + at + 1]
    return actions


def _looped(own: Sequence[int], microbatches: int) -> list[Action]:
    """Returns the actions stage by stage, forward and then back the same way."""
    forwards = [Action(Kind.FORWARD, stage, at) for stage in own for at in range(microbatches)]
    return forwards + [Action(Kind.BACKWARD, stage, at) for _, stage, at in reversed(forwards)]


def _interleaved(
    name: str, own: Sequence[int], machines: int, microbatches: int, hops: int, backward: Kind
) -> list[Action]:
    """Returns the actions of rounds of micro-batches, which go through the stages in turn.

    Args:
        name: of the schedule.
        own: stages of this machine.
        machines: how many.
        microbatches: how many.
        hops: forwards that this machine is ahead of the last one before its first backward.
        backward: the kind of backwards: whole ones, or their parts for inputs.
    """
    rounds = max(1, microbatches // machines)
    if microbatches % rounds:
        raise ValueError(
            f"{name} on {machines} processes has a multiple of {rounds} micro-batches here, not "
            f"{microbatches}"
        )
    per_round = microbatches // rounds
    total = len(own) * microbatches
    ahead = min((len(own) - 1) * per_round + hops, total)

    def actions(kind: Kind, stages: Sequence[int]) -> list[Action]:
        seen: Counter[int] = Counter()
        made = []
        for step in range(total):
            stage = stages[(step // per_round) % len(stages)]
            made.append(Action(kind, stage, seen[stage]))
            seen[stage] += 1
        return made

    # After `ahead` forwards a forward comes first, then its backward.
    forwards, backwards = actions(Kind.FORWARD, own), actions(backward, own[::-1])
    return _alternate(forwards, backwards, min(ahead + 1, total))


def _with_weights(actions: Sequence[Action], late: int) -> list[Action]:
    """Adds, after each input part, the weights part of the one `late` before it; then the rest."""
    made: list[Action] = []
    pending: deque[Action] = deque()
    for action in actions:
        made.append(action)
        if action.kind is Kind.INPUT:
            pending.append(action._replace(kind=Kind.WEIGHT))
            if len(pending) > late:
                made.append(pending.popleft())
    return [*made, *pending]


def _zero_bubble_v(machine: int, machines: int, microbatches: int) -> list[tuple[str, int]]:
    """Returns forwards until the first micro-batch is back, then all parts of both stages in turn.

    At the end `machine` weight parts of each stage are left for the time in which others finish.
    The order is for as many micro-batches as fill the V, or more; with fewer, the caller leaves
    out the actions of those that are not there.
    """
    count = max(microbatches, 2 * machines - 1)
    behind = machines - machine
    return [
        ("F0", 2 * behind - 1),
        ("F1 F0", machine),
        ("F1 I1 W1", behind),
        ("F0 I0 W0 F1 I1 W1", count - 2 * machines + machine + 1),
        ("I0 W0 F1 I1 W1", behind - 1),
        ("I0 I1", machine),
        ("I0 W0", behind),
        ("W1", machine),
        ("W0", machine),
    ]


def _dual_pipe_v(machine: int, machines: int, microbatches: int) -> list[tuple[str, int]]:
    """Returns forwards of one stage beside backwards of the other; at both ends in two parts.

    From the middle of the last `machine` + 1 pairs of backwards on, weights wait, and come in the
    order of their input parts.
    """
    behind = machines - machine - 1
    half, odd = divmod(machine + 1, 2)
    return [
        ("F0", 2 * behind),
        ("F0 F1", machine + 1),
        ("I1 W F1", behind),
        ("F0 B1 F1 B0", microbatches - 2 * machines + machine + 1),
        ("B1 F1 B0", behind),
        ("B1 B0", half),
        ("B1 I0", odd),
        ("I1 I0", half),
        ("W I0", behind),
        ("W", machine + 1),
    ]


def _written(pattern: Sequence[tuple[str, int]], own: Sequence[int]) -> list[Action]:
    """Returns actions from the notation of `_zero_bubble_v`: kinds, each with a number of `own`.

    Each kind takes the micro-batches of a stage one after another. W is for the oldest input part,
    of the stage or without a number of any, that has not had its weights.
    """
    actions: list[Action] = []
    begun: Counter[tuple[bool, int]] = Counter()
    pending: list[Action] = []
    for word in (word for words, times in pattern for _ in range(times) for word in words.split()):
        kind, stages = Kind(word[0]), [own[int(word[1:])]] if word[1:] else own
        if kind is Kind.WEIGHT:
            oldest = next(each for each in pending if each.stage in stages)
            pending.remove(oldest)
            actions.append(oldest._replace(kind=kind))
            continue
        key = kind is Kind.FORWARD, stages[0]
        actions.append(Action(kind, stages[0], begun[key]))
        begun[key] += 1
        if kind is Kind.INPUT:
            pending.append(actions[-1])
    return actions
