"""The schedules are PyTorch's, and no machine ever waits for one that waits for it."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from tensorwire.torch.schedules import SCHEDULES, Action, flights, order

SIZES = [1, 2, 3, 4]
SEVERAL = ["Interleaved1F1B", "LoopedBFS"]  # stages on each of several machines


def numbers(name: str, machines: int, local: int, microbatches: int) -> list[list[Action]]:
    stages = machines * local
    return [order(name, m, machines, stages, microbatches) for m in range(machines)]


def possible(machines: int, microbatches: int) -> bool:
    return microbatches % max(1, microbatches // machines) == 0


def actions_of(operations: list[Any]) -> list[Action]:
    """Operations of PyTorch, in which None is a machine that waits."""
    kinds = theirs._ComputationType
    assert {each.computation_type for each in operations if each} == {
        kinds.FORWARD,
        kinds.FULL_BACKWARD,
    }
    return [
        Action(
            each.computation_type == kinds.FULL_BACKWARD, each.stage_index, each.microbatch_index
        )
        for each in operations
        if each
    ]


@pytest.mark.parametrize("machines", SIZES)
@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 8])
def test_interleaved_is_that_of_pytorch(machines: int, local: int, microbatches: int) -> None:
    if not possible(machines, microbatches):
        with pytest.raises(ValueError, match="a multiple of"):
            numbers("Interleaved1F1B", machines, local, microbatches)
        return
    rounds = max(1, microbatches // machines)
    their = SimpleNamespace(
        n_local_stages=local,
        microbatches_per_round=microbatches // rounds,
        pp_group_size=machines,
        _n_microbatches=microbatches,
    )
    for machine, found in enumerate(numbers("Interleaved1F1B", machines, local, microbatches)):
        calculate = theirs.ScheduleInterleaved1F1B._calculate_single_rank_operations
        assert found == actions_of(calculate(their, machine))


@pytest.mark.parametrize("machines", SIZES)
@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5])
def test_looped_is_that_of_pytorch(machines: int, local: int, microbatches: int) -> None:
    their = SimpleNamespace(
        _stages=[None] * local, pp_group_size=machines, _n_microbatches=microbatches
    )
    for machine, found in enumerate(numbers("LoopedBFS", machines, local, microbatches)):
        calculate = theirs.ScheduleLoopedBFS._calculate_single_rank_operations
        assert found == actions_of(calculate(their, machine))


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
        self.actions.append(Action(False, self.stage_index, at))

    def backward_one_chunk(self, at: int, loss: object, last_backward: bool) -> None:
        self.actions.append(Action(True, self.stage_index, at))

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


def line(name: str, backward: bool, microbatches: int) -> list[int]:
    """The order of micro-batches in every stage: that of the turns of what crosses."""
    return list(range(microbatches))[:: -1 if backward and name == "LoopedBFS" else 1]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("machines", SIZES)
@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_every_action_comes_once_and_in_an_order_that_works(
    name: str, machines: int, local: int, microbatches: int
) -> None:
    """A stage needs the one before it, its backward the one behind it. Values go to every later
    stage, gradients to every earlier one; both are released by backward, and no sender is further
    ahead than there are flights. Two steps, because the second uses the memory of the first."""
    if local > 1 and machines > 1 and name not in SEVERAL:
        with pytest.raises(ValueError, match="has one stage on each process"):
            numbers(name, machines, local, microbatches)
        return
    if name == "Interleaved1F1B" and not possible(machines, microbatches):
        return
    stages = machines * local
    step = numbers(name, machines, local, microbatches)
    room = flights(name, stages, microbatches)
    lines = {backward: line(name, backward, microbatches) for backward in (False, True)}
    for stage in range(stages):
        for backward in (False, True):
            mine = [a.microbatch for a in step[stage % machines] if a[:2] == (backward, stage)]
            assert mine == lines[backward]
    left = [[(at, action) for at in range(2) for action in each] for each in step]
    done: set[tuple[int, Action]] = set()

    def can_run(at: int, action: Action) -> bool:
        backward, stage, microbatch = action
        if not backward and stage == 0:
            before = None
        elif backward and stage == stages - 1:
            before = Action(False, stage, microbatch)
        else:
            before = Action(backward, stage + (1 if backward else -1), microbatch)
        old = at * microbatches + lines[backward].index(microbatch) - room
        old_step, turn = divmod(old, microbatches)
        receivers = range(stage) if backward else range(stage + 1, stages)
        free = old < 0 or all(
            (old_step, Action(True, each, lines[backward][turn])) in done for each in receivers
        )
        return free and (before is None or (at, before) in done)

    while any(left):
        able = [each for each in left if each and can_run(*each[0])]
        assert able, "every machine waits for another"
        for each in able:
            done.add(each.pop(0))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("machines", SIZES)
@pytest.mark.parametrize("local", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_flights_are_enough_and_not_too_many(
    name: str, machines: int, local: int, microbatches: int
) -> None:
    if local > 1 and (machines == 1 or name not in SEVERAL):
        return
    if name == "Interleaved1F1B" and not possible(machines, microbatches):
        return
    most = 0
    for actions in numbers(name, machines, local, microbatches):
        between = [0] * (machines * local)
        for backward, stage, _ in actions:
            between[stage] += -1 if backward else 1
            most = max(most, between[stage])
    found = flights(name, machines * local, microbatches)
    assert most <= found if name == "Interleaved1F1B" else most == found


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"no schedule 'zigzag'; known are GPipe, 1F1B, "):
        order("zigzag", 0, 1, 1, 1)
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        with pytest.raises(ValueError, match=f"no schedule '{name}'.*a backward in two parts"):
            order(name, 0, 2, 4, 4)
    with pytest.raises(ValueError, match=r"GPipe has one .* 4 on 2; .* and LoopedBFS can"):
        order("gpipe", 0, 2, 4, 4)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        order("GPipe", 0, 1, 1, 0)
    with pytest.raises(ValueError, match="3 stages cannot be dealt equally to 2"):
        order("Interleaved1F1B", 0, 2, 3, 4)
