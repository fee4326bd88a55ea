"""The schedules are PyTorch's, and no machine ever waits for one that waits for it."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from tensorwire.torch.pipeline.schedules import SCHEDULES, Action, Kind, deal, flights, order

SIZES = [1, 2, 3, 4]
SEVERAL = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]  # any number on each machine
IN_V = ["ZBVZeroBubble", "DualPipeV"]
FORWARD, BACKWARD, INPUT, WEIGHT = Kind


def numbers(name: str, machines: int, local: int, microbatches: int) -> list[list[Action]]:
    stages = machines * local
    return [order(name, m, machines, stages, microbatches) for m in range(machines)]


def possible(name: str, machines: int, local: int, microbatches: int) -> bool:
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // machines) == 0
    return name != "DualPipeV" or microbatches >= machines * local or machines == 1


def actions_of(operations: list[Any]) -> list[Action]:
    """Operations of PyTorch, in which None is a machine that waits. Two at once come in turn."""
    kinds = {
        theirs.FORWARD: FORWARD,
        theirs.FULL_BACKWARD: BACKWARD,
        theirs.BACKWARD_INPUT: INPUT,
        theirs.BACKWARD_WEIGHT: WEIGHT,
    }
    return [
        Action(kinds[part.computation_type], part.stage_index, part.microbatch_index)
        for each in operations
        if each
        for part in each.sub_actions or [each]
    ]


def their_schedule(name: str, machines: int, local: int, microbatches: int) -> Any:
    """One of PyTorch, made as by its users, with stages that have nothing but numbers."""
    stages: Any = [
        SimpleNamespace(submod=None, group_size=machines, group_rank=0, num_stages=machines * local)
        for _ in range(local)
    ]
    return theirs.get_schedule_class(name)(stages, microbatches)


@pytest.mark.parametrize("name", [*SEVERAL, *IN_V])
@pytest.mark.parametrize("machines", [*SIZES, 6])
def test_schedules_of_several_stages_are_those_of_pytorch(name: str, machines: int) -> None:
    for local, microbatches in itertools.product([2] if name in IN_V else [1, 2, 3], range(1, 15)):
        if name == "DualPipeV" and machines == 1 and microbatches < local:
            continue  # which PyTorch refuses
        if not possible(name, machines, local, microbatches):
            with pytest.raises(ValueError, match=r"multiple of|at least as many microbatches"):
                their_schedule(name, machines, local, microbatches)
            with pytest.raises(ValueError, match=r"a multiple of|as many micro-batches as stages"):
                numbers(name, machines, local, microbatches)
            continue
        their = their_schedule(name, machines, local, microbatches)
        for machine, found in enumerate(numbers(name, machines, local, microbatches)):
            assert found == actions_of(their.pipeline_order[machine])
        homes = dict(enumerate(deal(name, machines, machines * local)))
        assert homes == their.stage_index_to_group_rank


@pytest.mark.parametrize("name", IN_V)
@pytest.mark.parametrize("local", [1, 3])
def test_a_schedule_in_v_shape_has_two_stages_on_each_machine(name: str, local: int) -> None:
    with pytest.raises(ValueError, match="requires exactly 2 stages per rank"):
        their_schedule(name, 2, local, 8)
    with pytest.raises(ValueError, match=f"{name} has two stages on each process, not {2 * local}"):
        numbers(name, 2, local, 8)


class Recorder:
    """A stage that notes what a schedule of PyTorch makes it do."""

    is_last = False

    def __init__(self, index: int) -> None:
        self.stage_index = index
        self.actions: list[Action] = []

    def _no_messages(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages

    def forward_one_chunk(self, at: int, *args: object, save_forward_output: bool) -> None:
        self.actions.append(Action(FORWARD, self.stage_index, at))

    def backward_one_chunk(self, at: int, loss: object, last_backward: bool) -> None:
        self.actions.append(Action(BACKWARD, self.stage_index, at))

    def perform_reduce_grad(self, factor: int) -> None:
        pass


@pytest.mark.parametrize(("name", "cls"), [("GPipe", "ScheduleGPipe"), ("1F1B", "Schedule1F1B")])
@pytest.mark.parametrize("machines", SIZES)
@pytest.mark.parametrize("microbatches", [1, 3, 4, 7])
def test_single_stages_are_those_of_pytorch(
    name: str, cls: str, machines: int, microbatches: int
) -> None:
    for machine, found in enumerate(numbers(name, machines, 1, microbatches)):
        schedule = object.__new__(getattr(theirs, cls))
        schedule.__dict__.update(
            _stage=Recorder(machine),
            _n_microbatches=microbatches,
            _num_stages=machines,
            _loss_fn=None,
            _internal_losses=[],
            scale_grads=False,
            _check_inputs=lambda *args: ([()] * microbatches, [{}] * microbatches),
            _initialize_stage=lambda *args: None,
        )
        schedule._step_microbatches()
        assert found == schedule._stage.actions


def each_possible(name: str) -> Any:
    """(machines, stages on each, micro-batches) with which there is such a schedule."""
    for machines, local, microbatches in itertools.product(SIZES, [1, 2, 3], [1, 2, 4, 8, 12]):
        fits = name in SEVERAL or machines == 1 or local == 1 + (name in IN_V)
        if fits and possible(name, machines, local, microbatches):
            yield machines, local, microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_comes_once_and_in_an_order_that_works(name: str) -> None:
    for machines, local, microbatches in each_possible(name):
        check_order(name, machines, local, microbatches)


def check_order(name: str, machines: int, local: int, microbatches: int) -> None:
    """Checks that stages get their values in order, and memory without waiting.

    A stage needs the one before it, its backward the one after it. Values go to every later stage,
    gradients to every earlier one; both are released by backward or its part for weights, and no
    sender is further ahead than there are flights. Two steps, because the second uses the memory of
    the first. Nobody ever waits for memory: it is there before anything else that is needed.
    """
    stages = machines * local
    homes = deal(name, machines, stages)
    step = numbers(name, machines, local, microbatches)
    room = flights(name, machines, stages, microbatches)
    up, down = list(range(microbatches)), list(range(microbatches))
    if name == "LoopedBFS":
        down.reverse()
    done: set[tuple[int, str, int, int]] = set()  # F, I and W; all of a backward is I and W
    for stage in range(stages):
        mine = [each for each in step[homes[stage]] if each.stage == stage]
        for kinds, line in (("F", up), ("IB", down), ("WB", down)):
            assert [each.microbatch for each in mine if each.kind in kinds] == line

    def can_run(at: int, action: Action) -> bool:
        kind, stage, microbatch = action
        if kind is WEIGHT:
            return (at, "I", stage, microbatch) in done
        part, line = ("F", up) if kind is FORWARD else ("I", down)
        before = stage - 1 if kind is FORWARD else stage + 1
        if kind is not FORWARD and stage == stages - 1:
            ready = (at, "F", stage, microbatch) in done
        else:
            ready = before < 0 or (at, part, before, microbatch) in done
        old_step, turn = divmod(at * microbatches + line.index(microbatch) - room, microbatches)
        receivers = range(stage) if kind is not FORWARD else range(stage + 1, stages)
        used = [(old_step, "W", each, line[turn]) for each in receivers] if old_step >= 0 else []
        assert not ready or all(each in done for each in used), f"{action} waits for memory"
        return ready

    left = [[(at, action) for at in range(2) for action in each] for each in step]
    while any(left):
        able = [each for each in left if each and can_run(*each[0])]
        assert able, "every machine waits for another"
        for each in able:
            at, (kind, stage, microbatch) = each.pop(0)
            done |= {(at, part, stage, microbatch) for part in ("IW" if kind == "B" else kind)}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("GPipe", 16),
        ("1F1B", 4),
        ("Interleaved1F1B", 8),
        ("LoopedBFS", 16),
        ("InterleavedZeroBubble", 12),
        ("ZBVZeroBubble", 12),
        ("DualPipeV", 10),
    ],
)
def test_flights(name: str, most: int) -> None:
    """At least what a stage has between forward and backward; no more than micro-batches."""
    assert flights(name, 4, 4 if name in ("GPipe", "1F1B") else 8, 16) == most
    for machines, local, microbatches in each_possible(name):
        between = [0] * (machines * local)
        found = flights(name, machines, machines * local, microbatches)
        for actions in numbers(name, machines, local, microbatches):
            for kind, stage, _ in actions:
                between[stage] += {FORWARD: 1, INPUT: 0}.get(kind, -1)
                assert between[stage] <= found <= microbatches


def test_a_machine_that_is_alone_takes_any_schedule() -> None:
    for name, stages, microbatches in itertools.product(SCHEDULES, [1, 2, 3, 5], [1, 2, 3, 4]):
        actions = order(name, 0, 1, stages, microbatches)
        done = {each[1:] for each in actions if each.kind in (BACKWARD, WEIGHT)}
        assert done == {*itertools.product(range(stages), range(microbatches))}
        check_order(name, 1, stages, microbatches)


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"no schedule 'zigzag'; known are GPipe, 1F1B, "):
        order("zigzag", 0, 1, 1, 1)
    with pytest.raises(ValueError, match=r"GPipe has one stage .* 4 on 2; .* can have any number"):
        order("gpipe", 0, 2, 4, 4)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        order("GPipe", 0, 1, 1, 0)
    with pytest.raises(ValueError, match="3 stages cannot be dealt equally to 2"):
        order("Interleaved1F1B", 0, 2, 3, 4)
    with pytest.raises(ValueError, match="as many micro-batches as stages or more, not 3 with 4"):
        order("dualpipev", 1, 2, 4, 3)
