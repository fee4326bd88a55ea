"""Three processes that share a model, for one case after another; and the models of test_split.py.

A case is a function at the top of this module; each process runs it with its `Machines`.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.export import Dim

import tensorwire.torch as tw
from tensorwire import Node
from tensorwire.testing import Channel, Member, PeerGroup

SIZE = 3


class Crew:
    """Runs cases in the first processes of a group."""

    def __init__(self, group: PeerGroup) -> None:
        self.members: list[Member] = [group.start(_serve, rank) for rank in range(SIZE)]

    def start(self, size: int, transport: str, case: Callable[..., Any], *args: Any) -> None:
        members = self.members[:size]
        for member in members:
            member.send((case.__name__, args, transport))
        addresses = dict(enumerate(member.recv(100) for member in members))
        for member in members:
            member.send(addresses)

    def outcomes(self, size: int) -> list[Any]:
        return [member.recv(100) for member in self.members[:size]]

    def run(self, size: int, transport: str, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns the results of the case in each process."""
        self.start(size, transport, case, *args)
        outcomes = self.outcomes(size)
        for kind, value in outcomes:
            assert kind == "result", value
        return [value for _, value in outcomes]

    def failures(
        self, size: int, transport: str, case: Callable[..., Any], *args: Any
    ) -> list[str]:
        """Returns the errors of the case in each process."""
        self.start(size, transport, case, *args)
        outcomes = self.outcomes(size)
        assert all(kind == "error" for kind, _ in outcomes), outcomes
        return [value for _, value in outcomes]


@contextmanager
def make_crew() -> Iterator[Crew]:
    with PeerGroup() as group:
        yield Crew(group)


def _serve(channel: Channel, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        name, args, transport = channel.recv(None)
        with Node(tw.machine_name(rank), transports=[transport]) as node:
            channel.send(node.address)
            machines = tw.connect(node, rank, channel.recv())
            try:
                outcome = "result", globals()[name](machines, *args)
            except Exception as error:
                trace = "".join(traceback.format_exception(error))
                outcome = "error", f"{type(error).__name__}: {error}\n{trace}"
        channel.send(outcome)


class Mlp(nn.Module):
    """The first layer's result goes to the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Any) -> Any:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:-1]:
            x = x + torch.tanh(layer(x))
        return self.layers[-1](self.norm(x + first))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        query, key, value = self.query(self.norm(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed)


class Transformer(nn.Module):
    """Positions by number, the embedding is the head too; splits itself if told so."""

    def __init__(self, splits: bool = False) -> None:
        super().__init__()
        self.splits = splits
        self.embedding = nn.Embedding(40, 16)
        self.position = nn.Parameter(torch.randn(64, 16) / 10)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, words: Any) -> Any:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.embedding(words) + self.position[places]
        for at, block in enumerate(self.blocks):
            if self.splits and at:
                pipe_split()
            x = block(x)
        return self.head(x * self.scale).reshape(words.shape[0] * words.shape[1], -1)


def mean_square(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


def entropy(output: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(output, target.reshape(-1))


def inputs_of(kind: str, step: int, microbatches: int, varying: bool) -> tuple[Any, Any]:
    """Lists: one input and target for each micro-batch."""
    random = torch.Generator().manual_seed(100 + step)
    inputs, targets = [], []
    for at in range(microbatches):
        if kind == "mlp":
            inputs.append(torch.randn(4, 12, generator=random))
            targets.append(torch.randn(4, 12, generator=random))
        else:
            length = 5 + (7 * step + 11 * at) % 30 if varying else 9
            inputs.append(torch.randint(0, 40, (2, length), generator=random))
            targets.append(torch.randint(0, 40, (2, length), generator=random))
    return inputs, targets


def make(kind: str, splits: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    return (Mlp(), mean_square) if kind == "mlp" else (Transformer(splits), entropy)


SPECS = {
    ("mlp", 2): {"layers.3": SplitPoint.BEGINNING},
    ("mlp", 3): {"layers.1": SplitPoint.END, "layers.4": SplitPoint.BEGINNING},
    ("mlp", 4): {f"layers.{at}": SplitPoint.BEGINNING for at in (1, 3, 5)},
    ("mlp", 6): {f"layers.{at}": SplitPoint.BEGINNING for at in range(1, 6)},
    ("transformer", 2): {"blocks.1": SplitPoint.BEGINNING},
    ("transformer", 3): None,
    ("transformer", 4): {f"blocks.{at}": SplitPoint.BEGINNING for at in range(3)},
}


def shapes(bound: int | None) -> Any:
    return ({1: Dim("length", min=2, max=bound)},) if bound else ({1: Dim("length", min=2)},)


def optimizer(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def alone(kind: str, microbatches: int, steps: int, varying: bool) -> tuple[Any, Any, Any]:
    """Losses, parameters and an evaluation of the model in one process."""
    model, loss = make(kind)
    opt = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        opt.zero_grad()
        batches = zip(*inputs_of(kind, step, microbatches, varying), strict=True)
        total = sum(loss(model(x), y) for x, y in batches) / microbatches
        total.backward()
        opt.step()
        losses.append(total.item())
    with torch.no_grad():
        outputs = [model(x).numpy() for x in inputs_of(kind, 99, microbatches, varying)[0]]
    return losses, {n: p.detach().numpy() for n, p in model.named_parameters()}, outputs


def train(
    machines: tw.Machines,
    kind: str,
    stages: int,
    schedule: str,
    microbatches: int,
    steps: int,
    bound: int | None = -1,
    on_meta: bool = True,
) -> Any:
    """(losses, parameters, outputs, protocols, statistics) of this process."""
    varying = bound != -1
    model, loss = make(kind, splits=SPECS[kind, stages] is None)
    asked: list[str] = []
    weights = None
    if on_meta:
        values = model.state_dict()
        model = model.to("meta")
        if kind == "transformer":  # Module.to unties
            model.head.weight = model.embedding.weight

        def weights(name: str) -> torch.Tensor:
            asked.append(name)
            return values[name]

    with tw.split(
        model,
        SPECS[kind, stages],
        example=inputs_of(kind, 0, 1, False)[0],
        loss=loss,
        microbatches=microbatches,
        schedule=schedule,
        dynamic_shapes=shapes(bound) if varying else None,
        weights=weights,
        machines=machines,
        timeout_s=30,
    ) as split:
        opt = optimizer(split.parameters())
        losses = []
        for step in range(steps):
            opt.zero_grad()
            x, y = inputs_of(kind, step, microbatches, varying)
            result = split.step(
                *([x] if split.has_first else []), target=y if split.has_last else None
            )
            opt.step()
            assert (result is not None) == split.has_last
            if result is not None:
                losses.append(result.item())
        x, _ = inputs_of(kind, 99, microbatches, varying)
        outputs = split.evaluate(*([x] if split.has_first else []))
        own = {n: p.detach().numpy() for n, p in split.module.named_parameters()}
        if on_meta:
            mine = {*own, *(name for name, _ in split.module.named_buffers())}
            assert set(asked) == mine
            assert all(each.is_meta for each in model.parameters())
        protocols = {slot.protocol for bucket in split.plan.buckets for slot in bucket.slots}
        return (
            losses,
            own,
            None if outputs is None else [each.numpy() for each in outputs],
            protocols,
            split.stats(),
        )


def close_to(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def check_equal(results: Sequence[Any], expected: tuple[Any, Any, Any]) -> None:
    """All parameters are somewhere, those in several processes are the same to the bit."""
    losses, parameters, outputs = expected
    seen: dict[str, Any] = {}
    for _, own, _, _, _ in results:
        for name, value in own.items():
            close_to(value, parameters[name])
            assert np.array_equal(value, seen.setdefault(name, value))
    assert set(seen) == set(parameters)
    ends = [each for each in results if each[2] is not None]
    assert len(ends) == 1
    close_to(ends[0][0], losses)
    for found, wanted in zip(ends[0][2], outputs, strict=True):
        close_to(found, wanted)


class Odd(nn.Module):
    """Two inputs, two outputs of which one is made early; a frozen weight; not only floats move."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.second = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.shared = nn.Parameter(torch.ones(8, dtype=torch.bfloat16), requires_grad=False)
        self.norm = nn.BatchNorm1d(8, dtype=torch.bfloat16)

    def forward(self, x: Any, keep: Any) -> Any:
        largest, where = (x * self.shared).max(1)
        early = self.first(x)
        pipe_split()
        mixed = self.norm(early) * self.shared + where[:, None] + largest[:, None]
        late = torch.where(keep, self.second(mixed), mixed)
        return {"late": late, "early": early}


def odd_loss(output: Any, target: Any) -> Any:
    return (output["late"].float() - target).pow(2).mean() + output["early"].float().abs().mean()


def odd_inputs(step: int) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(6, 8, generator=random).bfloat16()
    return x, torch.rand(6, 8, generator=random) > 0.3, torch.randn(6, 8, generator=random)


def train_odd(machines: tw.Machines | None, steps: int, schedule: str = "1F1B") -> Any:
    """With machines split, without whole; gradients are summed over two steps each."""
    torch.manual_seed(3)
    model = Odd()
    module: nn.Module = model
    if machines is not None:
        split = tw.split(
            model,
            example=[each[:3] for each in odd_inputs(0)[:2]],
            loss=odd_loss,
            microbatches=2,
            schedule=schedule,
            machines=machines,
            timeout_s=30,
        )
        module = split.module
    opt = optimizer(each for each in module.parameters() if each.requires_grad)
    losses = []
    for step in range(steps):
        if step % 2 == 0:
            opt.zero_grad()
        x, keep, target = odd_inputs(step)
        if machines is not None:
            result = split.step(
                *([x, keep] if machines.rank == 0 else []),
                target=target if machines.rank == 1 else None,
            )
        else:
            parts = zip(*(each.chunk(2) for each in (x, keep, target)), strict=True)
            result = sum(odd_loss(model(a, b), c) for a, b, c in parts) / 2
            result.backward()
        if step % 2:
            opt.step()
        losses.append(None if result is None else result.item())
    state = {name: value.float().numpy() for name, value in module.state_dict().items()}
    if machines is not None:
        split.close()
    return losses, state


def accumulate(machines: tw.Machines) -> Any:
    """The gradient of the tied weight after two steps without zeroing."""
    model, loss = make("transformer")
    with tw.split(
        model,
        SPECS["transformer", 2],
        example=inputs_of("transformer", 0, 1, False)[0],
        loss=loss,
        machines=machines,
    ) as split:
        for step in range(2):
            x, y = inputs_of("transformer", step, 1, False)
            split.step(
                *([x] if machines.rank == 0 else []), target=y if machines.rank == 1 else None
            )
        assert split.module.get_parameter("embedding.weight") is model.embedding.weight
        return model.embedding.weight.grad.numpy()


def thaw(machines: tw.Machines) -> None:
    """A weight that both have is frozen when the model is split, and not any more in the step."""
    model, loss = make("transformer")
    model.embedding.weight.requires_grad_(False)
    x, y = inputs_of("transformer", 0, 1, False)
    split = tw.split(model, SPECS["transformer", 2], example=x, loss=loss, machines=machines)
    split.module.get_parameter("embedding.weight").requires_grad_(True)
    split.step(*([x] if machines.rank == 0 else []), target=y)


class Passed(nn.Module):
    """A model whose first stage trains nothing, and whose second one needs its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        y = self.first(x[:, :4])
        pipe_split()
        return self.head(y).sum() * 0 + x.sum()


def reuse_inputs(machines: tw.Machines, steps: int) -> list[float]:
    """The loss of each step; the input's memory gets the next one's values right after a step."""
    x = torch.ones(16, 1 << 18)
    losses = []
    with tw.split(Passed(), example=[x], loss=lambda out, _: out, machines=machines) as split:
        for step in range(steps):
            x.fill_(step)
            loss = split.step(*([x] if machines.rank == 0 else []), target=torch.ones(1))
            losses += [] if loss is None else [loss.item() / x.numel()]
    return losses


class Broadcast(nn.Module):
    """Gradients of parameters are views of what a stage gets: of gradients, of numbers of rows."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(5))
        self.table = nn.Embedding(9, 5, sparse=sparse)
        self.late = nn.Embedding(9, 5, sparse=sparse)
        self.layer = nn.Linear(5, 5)

    def forward(self, words: Any) -> Any:
        words = words * 1
        x = self.table(words) + self.bias.view(1, 5)
        pipe_split()
        return self.layer(x) + self.late(words)


def train_broadcast(machines: tw.Machines | None, sparse: bool, schedule: str = "1F1B") -> Any:
    """Gradients after steps that are not zeroed, by name."""
    torch.manual_seed(5)
    model = Broadcast(sparse)
    batches = [torch.tensor([at]) for at in range(6)]
    target = torch.ones(1, 5)
    if machines is None:
        for _ in range(2):
            (sum(mean_square(model(x), target) for x in batches) / 6).backward()
        return {name: each.grad.to_dense().numpy() for name, each in model.named_parameters()}
    with tw.split(
        model,
        example=[batches[0]],
        loss=mean_square,
        microbatches=6,
        schedule=schedule,
        machines=machines,
    ) as split:
        for _ in range(2):
            split.step(
                *([batches] if machines.rank == 0 else []),
                target=[target] * 6 if machines.rank == 1 else None,
            )
        named = split.module.named_parameters()
        return {name: each.grad.to_dense().numpy() for name, each in named}


class Through(nn.Module):
    """The second stage returns what it got, as it is and as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        pipe_split()
        return x, x.reshape(-1)


def evaluate_through(machines: tw.Machines) -> Any:
    """Outputs stay what they are while later ones come."""
    torch.manual_seed(1)
    model = Through()
    batches = [torch.full((2, 4), float(at)) for at in range(8)]
    with tw.split(
        model, example=[batches[0]], microbatches=8, machines=machines, timeout_s=30
    ) as split:
        outputs = split.evaluate(*([batches] if machines.rank == 0 else []))
    if outputs is not None:
        for batch, (plain, view) in zip(batches, outputs, strict=True):
            assert torch.equal(plain, model.layer(batch))
            assert torch.equal(view, plain.reshape(-1))
    return outputs is not None


def differ(machines: tw.Machines) -> None:
    """Each process splits at another place."""
    model, loss = make("mlp")
    spec = {f"layers.{machines.rank + 1}": SplitPoint.BEGINNING}
    example = inputs_of("mlp", 0, 1, False)[0]
    tw.split(model, spec, example=example, loss=loss, machines=machines, timeout_s=5)


def differ_in_schedule(machines: tw.Machines, schedules: list[str], stages: int) -> None:
    """Both orders fit the same edges, but their backwards go through micro-batches differently; or
    stages are in other processes."""
    model, loss = make("mlp")
    x, _ = inputs_of("mlp", 0, 1, False)
    tw.split(
        model,
        SPECS["mlp", stages],
        example=x,
        loss=loss,
        microbatches=6,
        schedule=schedules[machines.rank],
        machines=machines,
        timeout_s=5,
    )


def wait_for_the_first(machines: tw.Machines, schedule: str) -> int:
    """The second process does not go on to its weights until the first one has its own gradient."""
    model, loss = make("mlp")
    x, y = inputs_of("mlp", 0, 1, False)
    with tw.split(
        model, SPECS["mlp", 2], example=x, loss=loss, schedule=schedule, machines=machines
    ) as split:
        count = 0

        def arrived(_: Any) -> None:
            nonlocal count
            count += 1
            if machines.rank == 0 and count == 1:
                machines.node.allocate(64, name="arrived", access="r")
            elif machines.rank == 1:
                machines.peers[0].wait_region("arrived", 20)

        for parameter in split.parameters():
            parameter.register_post_accumulate_grad_hook(arrived)
        split.step(*([x] if split.has_first else []), target=y if split.has_last else None)
        return count


def train_until_killed(channel: Channel, rank: int, transport: str) -> str:
    """Trains until the other process is killed; returns the error of the surviving one."""
    with Node(tw.machine_name(rank), transports=[transport]) as node:
        channel.send(node.address)
        machines = tw.connect(node, rank, channel.recv())
        model, loss = make("mlp")
        x, y = inputs_of("mlp", 0, 2, False)
        split = tw.split(
            model,
            SPECS["mlp", 2],
            example=x[:1],
            loss=loss,
            microbatches=2,
            machines=machines,
        )
        channel.send("training")
        try:
            while True:
                split.step(*([x] if rank == 0 else []), target=y if rank else None)
        except ConnectionError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            split.close()


def page_alone() -> float:
    """The last loss of the program in docs/split.md, in plain torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = torch.arange(16.0).reshape(4, 4) / 16, torch.ones(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    return loss.item()
