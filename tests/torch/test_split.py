"""A split model trains as the whole one: schedules, skip edges, tied weights, varying sizes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crew as cases
import numpy as np
import pytest
import torch
from crew import Crew, alone, check_equal, make_crew
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split

import tensorwire.torch as tw
from tensorwire import Node, UnavailableError
from tensorwire.testing import PeerGroup

STEPS = 6


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with make_crew() as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


SCHEDULES = [
    ("GPipe", 2, 2, 4),
    ("1F1B", 2, 2, 4),
    ("1F1B", 3, 3, 5),
    ("GPipe", 3, 3, 1),
    ("Interleaved1F1B", 2, 4, 4),
    ("Interleaved1F1B", 1, 4, 2),
    ("LoopedBFS", 2, 4, 4),
]


@pytest.mark.parametrize(("schedule", "size", "stages", "microbatches"), SCHEDULES)
@pytest.mark.slow
def test_equal_to_the_whole_model(
    crew: Crew, transport: str, schedule: str, size: int, stages: int, microbatches: int
) -> None:
    """Each schedule trains both models, by both transports in turn."""
    number = SCHEDULES.index((schedule, size, stages, microbatches)) + (transport == "tcp")
    args = (("mlp", "transformer")[number % 2], stages, schedule, microbatches, STEPS)
    results = crew.run(size, transport, cases.train, *args)
    check_equal(results, alone(args[0], microbatches, STEPS, False))
    assert all(each[3] == ({"static"} if size > 1 else set()) for each in results)


@pytest.mark.parametrize(
    ("by", "kind", "schedule", "size", "stages", "microbatches", "bound"),
    [
        ("shm", "transformer", "InterleavedZeroBubble", 2, 4, 4, -1),
        ("tcp", "transformer", "ZBVZeroBubble", 2, 4, 4, None),
        ("shm", "transformer", "DualPipeV", 2, 4, 6, 64),
        ("tcp", "mlp", "InterleavedZeroBubble", 3, 3, 6, -1),
        ("shm", "mlp", "ZBVZeroBubble", 3, 6, 4, -1),
        ("shm", "mlp", "DualPipeV", 3, 6, 8, -1),
        ("shm", "mlp", "DualPipeV", 1, 2, 3, -1),
    ],
)
def test_backwards_in_two_parts(
    crew: Crew,
    by: str,
    kind: str,
    schedule: str,
    size: int,
    stages: int,
    microbatches: int,
    bound: int | None,
) -> None:
    """In V shape the first process has the ends of the model, and so its loss and outputs."""
    args = (kind, stages, schedule, microbatches, 3, bound)
    results = crew.run(size, by, cases.train, *args)
    check_equal(results, alone(kind, microbatches, 3, bound != -1))
    in_v = schedule != "InterleavedZeroBubble"
    assert [bool(each[0]) for each in results].index(True) == (0 if in_v else size - 1)


def test_gradients_of_inputs_leave_before_weights_are_computed(crew: Crew) -> None:
    assert all(crew.run(2, "shm", cases.wait_for_the_first, "InterleavedZeroBubble"))


@pytest.mark.parametrize(("bound", "protocol"), [(64, "bounded"), (None, "unbounded")])
@pytest.mark.slow
def test_sizes_that_vary(crew: Crew, transport: str, bound: int | None, protocol: str) -> None:
    args = ("transformer", 2, "1F1B", 4, STEPS, bound)
    results = crew.run(2, transport, cases.train, *args)
    check_equal(results, alone("transformer", 4, STEPS, True))
    assert protocol in results[0][3]


def test_a_model_that_has_its_memory(crew: Crew) -> None:
    """The model is not on meta: its own parameters are trained."""
    args = ("mlp", 2, "1F1B", 2, STEPS, -1, False)
    check_equal(crew.run(2, "shm", cases.train, *args), alone("mlp", 2, STEPS, False))


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_many_kinds_of_values(crew: Crew, transport: str, schedule: str) -> None:
    losses, state = cases.train_odd(None, 4)
    (_, first), (last, second) = crew.run(2, transport, cases.train_odd, 4, schedule)
    np.testing.assert_allclose(last, losses, rtol=2e-2)
    assert {*first, *second} == {*state}
    assert {*first} & {*second} == {"shared"}
    for part in (first, second):
        for name, value in part.items():
            np.testing.assert_allclose(value, state[name], rtol=2e-2, atol=2e-2)


def test_gradients_of_tied_weights_add_up_over_steps(crew: Crew, transport: str) -> None:
    model, loss = cases.make("transformer")
    for step in range(2):
        (x,), (y,) = cases.inputs_of("transformer", step, 1, False)
        loss(model(x), y).backward()
    first, second = crew.run(2, transport, cases.accumulate)
    assert np.array_equal(first, second)
    cases.close_to(first, model.embedding.weight.grad)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_gradients_keep_no_memory_of_others(crew: Crew, transport: str, schedule: str) -> None:
    """A view of a received gradient that autograd keeps would change with the next one."""
    sparse = (schedule == "1F1B") == (transport == "tcp")
    expected = cases.train_broadcast(None, sparse)
    first, second = crew.run(2, transport, cases.train_broadcast, sparse, schedule)
    assert {*first, *second} == {*expected}
    for name, gradient in (first | second).items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_outputs_are_kept(crew: Crew, transport: str) -> None:
    assert crew.run(2, transport, cases.evaluate_through) == [False, True]


def test_processes_that_split_differently(crew: Crew) -> None:
    first, second = crew.failures(2, "shm", cases.differ)
    assert "ValueError" in first or "ValueError" in second
    assert "has another plan" in first + second


@pytest.mark.parametrize(
    ("schedules", "stages"),
    [(["GPipe", "LoopedBFS"], 2), (["DualPipeV", "InterleavedZeroBubble", "DualPipeV"], 6)],
)
def test_processes_with_different_schedules(crew: Crew, schedules: Any, stages: int) -> None:
    failures = crew.failures(len(schedules), "shm", cases.differ_in_schedule, schedules, stages)
    assert any("ValueError: rank" in each and "another schedule" in each for each in failures)


def test_tied_weights_that_were_frozen_at_the_split(crew: Crew) -> None:
    """One may learn first that the other one has closed."""
    failures = crew.failures(2, "shm", cases.thaw)
    refused = "ValueError: 'embedding.weight' is in several processes"
    assert any(each.startswith(refused) for each in failures)
    assert all(each.startswith((refused, "PeerLostError: ")) for each in failures)


def test_inputs_are_the_callers_again_after_a_step(crew: Crew, transport: str) -> None:
    assert crew.run(2, transport, cases.reuse_inputs, 5)[1] == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "victim"), [("shm", 0), ("tcp", 1)])
def test_a_process_that_is_killed(transport: str, victim: int) -> None:
    with PeerGroup() as group:
        members = [group.start(cases.train_until_killed, rank, transport) for rank in range(2)]
        addresses = dict(enumerate(member.recv(100) for member in members))
        for member in members:
            member.send(addresses)
        for member in members:
            assert member.recv(100) == "training"
        members[victim].kill()
        error = members[1 - victim].result(30)
    assert error.startswith("PeerLostError: ")
    assert f"machine '{victim}'" in error


@pytest.mark.slow
def test_the_page_alone(repository: Path, tmp_path: Path) -> None:
    """With processes of torchrun: test_two_hosts.py."""
    script = tmp_path / "script.py"
    page = (repository / "docs" / "split.md").read_text()
    script.write_text(page.partition("```python\n")[2].partition("```")[0])
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"loss {cases.page_alone():.4f} with 1 processes\n"


TWICE = """
import os, time
import torch
import tensorwire.torch as tw
from torch import nn
from torch.distributed.pipelining import SplitPoint

rank = int(os.environ["RANK"])

def weight(name):
    if name.startswith("1."):
        time.sleep(1.5)
    return torch.ones((4, 4) if name.endswith("weight") else 4)

for use in range(2):
    if use and rank == 0:
        time.sleep(1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"loss": lambda out, target: out.sum(), "timeout_s": 2.0, "weights": weight}
    spec = {"1": SplitPoint.BEGINNING}
    with tw.split(model, spec, example=[torch.ones(2, 4)], **options) as split:
        loss = split.step(*[torch.ones(2, 4)] * split.has_first, target=torch.ones(2))
        if loss is not None:
            print(float(loss))
"""


@pytest.mark.slow
def test_several_splits_one_of_whose_parts_loads_for_long(tmp_path: Path) -> None:
    """Longer than `timeout_s`. The second use does not find the addresses of the first."""
    script = tmp_path / "script.py"
    script.write_text(TWICE)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *start, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "168.0\n" * 2


class Thawed(nn.Module):
    """A model in which `kind` needs a gradient after the split point."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        if self.kind == "view":
            out = torch.zeros(x.shape[0], 8)
            out[:, :4] = made
            made = torch.relu(out)[:, :4]
        elif self.kind == "complex":
            made = torch.fft.fft(made).real
        elif self.kind == "complex crossing":
            made = torch.fft.fft(made)
        pipe_split()
        return self.head(made.real if made.is_complex() else made)


@pytest.mark.parametrize("kind", ["view", "complex", "complex crossing"])
def test_gradients_through_views_and_complex_numbers(kind: str) -> None:
    model = Thawed(kind)
    inputs = torch.rand(2, 4)
    expected = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
    with split_alone(model, loss=lambda out, _: out.square().mean()) as split:
        split.step(inputs, target=inputs)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient)


class Aliased(nn.Module):
    """In its second stage autograd gives an input and a parameter the same memory as gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        pipe_split()
        return torch.relu(made.view(8) + self.offset.view(8))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gradient_that_leaves_is_not_that_of_a_parameter(parts: int) -> None:
    model = Aliased()
    with split_alone(model, loss=lambda out, _: out.sum()) as split:
        stage = split._stages[1]
        values = {name: torch.rand(2, 4) for name in stage.inputs}
        (output,) = stage.forward(0, values, True)[1]
        if parts == 1:
            (leaving,) = stage.backward(0, {}, output.sum()).values()
        else:
            (leaving,) = stage.backward_inputs(0, {}, output.sum()).values()
            assert model.offset.grad is None
            stage.backward_weights(0)
    assert model.offset.grad is not None
    assert leaving.untyped_storage().data_ptr() != model.offset.grad.untyped_storage().data_ptr()


def test_a_failure_between_the_parts_of_a_backward() -> None:
    """No value of the micro-batches that were on their way is kept."""
    model = Aliased()

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    model.first.weight.register_post_accumulate_grad_hook(fail)
    options = {"loss": lambda out, _: out.sum(), "microbatches": 3, "schedule": "ZBVZeroBubble"}
    with split_alone(model, **options) as split:
        inputs = [torch.ones(2, 4)] * 3
        with pytest.raises(ZeroDivisionError):
            split.step(inputs, target=inputs)
        assert not any(stage._kept or stage._later for stage in split._stages.values())
        with pytest.raises(RuntimeError, match="an earlier step of this Split failed"):
            split.step(inputs, target=inputs)


def test_what_was_frozen_at_the_split_cannot_be_trained_behind_its_back() -> None:
    model = Thawed("plain")
    model.first.requires_grad_(False)
    split = split_alone(model, loss=lambda out, _: out.sum())
    split.step(torch.ones(2, 4), target=torch.ones(2))
    model.first.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"stage 0.*needs a gradient.*split\(\) again"):
        split.step(torch.ones(2, 4), target=torch.ones(2))


def test_a_step_trains_also_where_gradients_are_switched_off() -> None:
    model = Thawed("plain")
    with split_alone(model, loss=lambda out, _: out.sum()) as split, torch.no_grad():
        split.step(torch.ones(2, 4), target=torch.ones(2))
    assert model.first.weight.grad is not None
    assert model.first.weight.grad.any()


def test_a_loss_without_a_gradient_is_an_error() -> None:
    split = split_alone(Thawed("plain"), loss=lambda out, _: out.detach().sum())
    with pytest.raises(ValueError, match="does not depend on the model's outputs"):
        split.step(torch.ones(2, 4), target=torch.ones(2))


def test_nothing_is_trained_in_inference_mode() -> None:
    with split_alone(Thawed("plain"), loss=lambda out, _: out.sum()) as split:
        with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
            split.step(torch.ones(2, 4), target=torch.ones(2))
        split.step(torch.ones(2, 4), target=torch.ones(2))


class InPlace(nn.Module):
    """The second stage changes what the first has made and the third uses."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        x = self.layer(x) + self.count
        pipe_split()
        y = x * 1
        if self.of == "value":
            x[0].add_(1)
        elif self.of == "buffer":
            self.count.add_(1)
        else:
            y.add_(1)
        pipe_split()
        return x + y


def split_alone(model: nn.Module, **options: Any) -> Any:
    options = {"example": [torch.ones(2, 4)]} | options
    return tw.split(model, machines=tw.Machines(), **options)


@pytest.mark.parametrize(
    ("of", "name"), [("value", "'add' in place"), ("buffer", "'count' in place")]
)
def test_changes_in_place_that_would_be_lost_are_refused(of: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        split_alone(InPlace(of))


def test_changes_in_place_within_a_stage_are_fine() -> None:
    model = InPlace("own")
    with split_alone(model) as split:
        (output,) = split.evaluate(torch.ones(2, 4))
    with torch.no_grad():
        assert torch.equal(output, model(torch.ones(2, 4)))


class Sequence2(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


BEGIN = {"split_spec": {"1": SplitPoint.BEGINNING}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no split point"),
        ({"split_spec": {"7": SplitPoint.END}}, "no module '7'"),
        ({"split_spec": {"1": "end"}}, "split_spec has 'end' for '1'"),
        (BEGIN | {"schedule": "none"}, "no schedule 'none'"),
        (BEGIN | {"microbatches": 0}, "at least one micro-batch"),
    ],
)
def test_splits_that_are_refused(options: Any, message: str) -> None:
    model = Sequence2()
    with pytest.raises(ValueError, match=message):
        split_alone(model, **options)
    assert "forward" not in vars(model[1])  # the model is as it was


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda split: split.step(torch.ones(4, 4), target=torch.ones(4, 4)), "a step needs"),
        (lambda split: split.evaluate(), "has 1 inputs"),
        (lambda split: split.evaluate(torch.ones(3, 4)), "equal micro-batches"),
        (lambda split: split.evaluate([torch.ones(2, 4)]), "give one for each of 2 micro-batches"),
        (lambda split: split.evaluate(torch.ones(8, 4)), r"traced as \(2, 4\)"),
        (lambda split: split.evaluate(torch.ones(4, 4).double()), "is torch.float64"),
        (lambda split: split.evaluate(7), "a tensor or a list of them, not int"),
    ],
    ids=range(7),
)
def test_steps_that_are_refused(act: Any, message: str) -> None:
    with split_alone(Sequence2(), **BEGIN, microbatches=2) as split:
        with pytest.raises(ValueError, match=message):
            act(split)
        assert len(split.evaluate(torch.ones(4, 4))) == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "give its value by weights="),
        ({}, "weights has no such tensor"),
        (lambda name: torch.ones(3), r"weights has torch.float32 \(3,\)"),
    ],
    ids=["none", "missing", "shape"],
)
def test_weights_that_do_not_fit(weights: Any, message: str) -> None:
    with torch.device("meta"):
        model = Sequence2()
    with pytest.raises(ValueError, match=message):
        split_alone(model, **BEGIN, weights=weights)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not set"),
        (
            {
                "TENSORWIRE_SERVERS": "127.0.0.1:1",
                "TENSORWIRE_WORKERS": "2",
                "TENSORWIRE_RANK": "0",
            },
            r"use torchrun, or tw\.connect",
        ),
    ],
    ids=["another launcher", "tensorwire run"],
)
def test_processes_that_cannot_find_each_other(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: str
) -> None:
    """Each would train the whole model."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((UnavailableError, ValueError), match=words):
        tw.split(Sequence2(), **BEGIN, example=[torch.ones(2, 4)])


def test_addresses_that_make_no_sense() -> None:
    with Node(tw.machine_name(0)) as node:
        with pytest.raises(ValueError, match="ranks are 0 to n - 1"):
            tw.connect(node, 0, {1: node.address})
        with pytest.raises(ValueError, match="named 'machine-1'"):
            tw.connect(node, 1, {0: node.address, 1: node.address})
        with pytest.raises(UnavailableError, match=r"rank 0 waits for ranks \[1\]"):
            tw.connect(node, 0, {0: node.address, 1: "127.0.0.1:1"}, timeout_s=0.1)


class Quiet(nn.Module):
    """Part of it has no gradient, and makes a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        with torch.no_grad():
            places = torch.arange(4, device=x.device) + x.detach().abs().mean()
        pipe_split()
        return self.second(x + places)


def test_a_part_without_gradients_on_meta() -> None:
    torch.manual_seed(2)
    whole = Quiet()
    with torch.device("meta"):
        model = Quiet()
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    options = {"loss": nn.functional.mse_loss, "weights": whole.state_dict()}
    with split_alone(model, **options) as split:
        loss = split.step(x, target=y)
    expected = nn.functional.mse_loss(whole(x), y)
    expected.backward()
    assert torch.allclose(loss, expected)
    for name, parameter in whole.named_parameters():
        assert torch.allclose(split.module.get_parameter(name).grad, parameter.grad)


def test_sizes_out_of_range() -> None:
    shapes = ({0: torch.export.Dim("batch", min=2, max=5)},)
    with split_alone(Sequence2(), **BEGIN, dynamic_shapes=shapes) as split:
        assert split.evaluate([torch.ones(5, 4)])[0].shape == (5, 4)
        with pytest.raises(ValueError, match=r"s\d+: 2 to 5, 4"):
            split.evaluate([torch.ones(6, 4)])


class Answers(nn.Module):
    """Several outputs, one twice and one a number; where asked for, they come from each other, or
    are views of each other, and one is the stage's input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        pipe_split()
        z, other = self.second(y), self.third(y)
        last = (other * y).sin() * 1
        if "of each other" in self.kind:
            return z, z, y, z.argmax(1), last * z, (last * z).cos()
        return z, z, other - 1, z.argmax(1), last, last[:, :1] if "view" in self.kind else y.exp()


class Saved(torch.autograd.Function):
    """Gives two gradients in the same memory."""

    @staticmethod
    def forward(ctx: Any, output: Any, flat: Any) -> Any:
        return output + flat.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient * 2
        return gradient, gradient.view(-1)


def loss_of(kind: str, module: nn.Module, own: nn.Parameter, seen: list[Any]) -> Any:
    compiled = torch.compile(lambda z, y: (z.tanh() * y.exp()).sum(), backend="aot_eager")

    def loss(outputs: Any, target: Any) -> Any:
        z, same, y, most, last, part = outputs
        match kind:
            case "hooks":
                z.register_hook(lambda gradient: seen.append(gradient.clone()))
                last.retain_grad()
                last.register_hook(lambda gradient: gradient * 2)
                seen.append(last)
            case "hooks, of each other":
                z.register_hook(lambda gradient: gradient * 3)
            case "weights of its own":
                return (last * own.view(2, 4)).sum() + (z * own.view(2, 4)).square().sum()
            case "weights of the model":
                weight = module.get_parameter("second.weight")
                return last.sum() + (z @ weight).sum() + weight.square().sum()
            case "no outputs":
                return own.square().sum()
            case "in place":
                last += 1
                last *= own.view(2, 4)
                return last.square().sum()
            case "in place in a view":
                part *= 3
            case "same memory":
                return Saved.apply(last, own).square().sum()
            case "compiled":
                return compiled(z.detach(), last)
        index = torch.nn.functional.one_hot(most, 4)
        return (z * same * index).sum() + (y * z).sum() + (last.square() + part).sum() + z.sum()

    return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "plain, of each other",
        "hooks",
        "hooks, of each other",
        "weights of its own",
        "weights of the model",
        "no outputs",
        "in place",
        "in place in a view",
        "same memory",
        "compiled",
    ],
)
def test_backward_of_a_loss_is_as_in_one_part(kind: str) -> None:
    """The bits, and what hooks see."""

    def trained(schedule: str) -> list[Any]:
        torch.manual_seed(4)
        model, own = Answers(kind), nn.Parameter(torch.rand(8))
        seen: list[Any] = []
        model.second.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        own.register_hook(lambda gradient: seen.append(gradient.clone()))
        options = {"microbatches": 3, "schedule": schedule}
        loss = loss_of(kind, model, own, seen)
        with split_alone(model, loss=loss, **options) as split:
            seen.append(split.step(torch.rand(6, 4), target=torch.ones(6)))
        gradients = [each.grad for each in (*model.parameters(), own)]
        return [*gradients, *(each.grad if each.requires_grad else each for each in seen)]

    one, parts = trained("Interleaved1F1B"), trained("InterleavedZeroBubble")
    assert len(one) == len(parts)

    def place(each: Any) -> float:  # hooks may run in another order
        return 0.0 if each is None else float(each.double().sum())

    for mine, their in zip(sorted(parts, key=place), sorted(one, key=place), strict=True):
        assert (mine is None) == (their is None)
        assert mine is None or torch.equal(mine, their)


def test_after_an_error_a_split_is_not_used() -> None:
    def loss(output: Any, target: Any) -> Any:
        raise ArithmeticError("no loss today")

    with split_alone(Sequence2(), **BEGIN, loss=loss) as split:
        with pytest.raises(ArithmeticError, match="no loss today"):
            split.step(torch.ones(2, 4), target=torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="an earlier step of this Split failed"):
            split.evaluate(torch.ones(2, 4))


@pytest.mark.slow
def test_import_of_tensorwire_torch_leaves_out_what_only_a_split_needs() -> None:
    command = (
        "import sys, tensorwire.torch as tw; print('torch.distributed.pipelining' in sys.modules)"
    )
    command += "; tw.split; print('torch.distributed.pipelining' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
