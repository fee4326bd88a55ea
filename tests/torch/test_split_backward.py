"""A backward in two halves gives the bits of one, calls hooks as one, no gradient twice."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensorwire.torch.pipeline.split_backward import Later, inputs_first


class Scaled(torch.autograd.Function):
    """Computes all gradients in one call, and counts calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        Scaled.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Added(torch.autograd.Function):
    """Its gradients are in the same memory, which autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Any, flat: Any) -> Any:
        return x + flat.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, gradient.view(-1)


class Case(nn.Module):
    """Each kind is a graph of another form. Takes two inputs, returns what a backward starts at."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.batch = nn.LayerNorm(6), nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.table = nn.Embedding(5, 6, sparse=kind == "sparse")
        self.weight = nn.Parameter(torch.rand(6))
        self.same = nn.Parameter(torch.rand(4, 6))
        self.flat = nn.Parameter(torch.rand(24))
        self.recurrent, self.memory = nn.GRU(6, 6), nn.LSTM(6, 6)
        self.slope = nn.PReLU()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Any, y: Any) -> Any:
        h = torch.tanh(self.first(x))
        match self.kind:
            case "layers":
                h = self.second(self.norm(h) + self.frozen(h))
            case "convolution":
                h = self.batch(self.conv(h[:, None]).sum(1) + y)
            case "attention":
                a = self.second(h)[None]
                h = h + nn.functional.scaled_dot_product_attention(a, a, self.first(h)[None])[0]
            case "used twice":
                h = self.second(self.second(h))
            case "used at several depths":
                h = (h * self.weight).cos() + self.weight.view(1, 6) + (y * self.weight.exp()).sin()
            case "same gradient":
                h = h + self.same
            case "table" | "sparse":
                h = h + self.table(torch.tensor([0, 1, 1, 3]))
            case "recurrent":
                h = self.recurrent(h[:, None])[0][:, 0]
            case "all at once":
                h = self.slope(self.second(self.memory(h[:, None])[0][:, 0]))
            case "keys":
                a = self.table(torch.arange(5)).view(1, 1, 5, 6)
                h = nn.functional.scaled_dot_product_attention(h[None, None], a, a)[0, 0]
            case "function":
                h = Scaled.apply(h, self.weight).sin()
            case "gradient in the same memory":
                h = Added.apply(self.second(h), self.flat).square()
            case "in place":
                h = h * self.weight
                h[:2].mul_(2)
                h = h.relu_()
            case "without inputs":
                h = torch.tanh(self.first(torch.ones(4, 6)))
            case "several roots":
                branch = self.second(self.weight)
                return h * branch, branch, self.norm.weight, x, (h.sum() + y.sum()) * branch.sum()
        return h, h.square().mean()


KINDS = [
    "layers",
    "convolution",
    "attention",
    "used twice",
    "used at several depths",
    "same gradient",
    "table",
    "sparse",
    "recurrent",
    "all at once",
    "keys",
    "function",
    "gradient in the same memory",
    "in place",
    "without inputs",
    "several roots",
]


def made(kind: str) -> tuple[Case, Counter[str]]:
    """A model, and how often each parameter's hooks are called."""
    torch.manual_seed(5)
    case, calls = Case(kind), Counter[str]()
    for name, parameter in case.named_parameters():
        if parameter.requires_grad:

            def before(gradient: Any, name: str = name) -> Any:
                calls[f"{name} before"] += 1
                return gradient if name == "flat" else gradient * 2

            def after(_: Any, name: str = name) -> None:
                calls[f"{name} after"] += 1

            parameter.register_hook(before)
            parameter.register_post_accumulate_grad_hook(after)
    return case, calls


def begun(case: Case, microbatch: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Roots, their gradients, and inputs."""
    generator = torch.Generator().manual_seed(microbatch)
    inputs = [torch.rand(4, 6, generator=generator).requires_grad_() for _ in range(2)]
    roots = case(*inputs)
    seeds = [torch.rand(each.shape, generator=generator) if each.dim() else None for each in roots]
    return list(roots), seeds, inputs


def rest(later: Later) -> None:
    for _ in later.rest():
        pass


def dense(gradient: Any) -> Any:
    return gradient if gradient is None else gradient.to_dense()


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_and_hooks_are_those_of_one_backward(kind: str) -> None:
    """Also when other micro-batches come in between."""
    whole, expected_calls = made(kind)
    halves, calls = made(kind)
    batches = [begun(whole, at) for at in range(3)]
    for roots, seeds, _ in batches:
        torch.autograd.backward(roots, seeds)
    expected = [each.grad for _, _, inputs in batches for each in inputs]
    batches = [begun(halves, at) for at in range(3)]
    later = [inputs_first(*batch) for batch in batches]
    found = [each.grad for _, _, inputs in batches for each in inputs]
    del batches
    for each in later:
        rest(each)
    for mine, their in zip(found, expected, strict=True):
        assert (mine is None) == (their is None)
        assert mine is None or torch.equal(mine, their)
    for (name, mine), their in zip(halves.named_parameters(), whole.parameters(), strict=True):
        assert (mine.grad is None) == (their.grad is None), name
        assert mine.grad is None or torch.equal(dense(mine.grad), dense(their.grad)), name
    assert calls == expected_calls
    assert calls


class Operators(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def products(work: Callable[[], Any]) -> int:
    """How many matrix products it computes."""
    with Operators() as operators:
        work()
    return operators.counts["aten.mm.default"]


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("layers", 3, 2), ("used twice", 5, 1), ("attention", 5, 1), ("without inputs", 0, 1)],
)
def test_nothing_is_computed_twice(kind: str, first: int, second: int) -> None:
    """A matrix product for the chain and one for the weight, of each layer. Weights that several
    nodes use are computed with the first half."""
    case, _ = made(kind)
    roots, seeds, inputs = begun(case, 0)
    one = products(lambda: torch.autograd.backward(roots, seeds))
    roots, seeds, inputs = begun(case, 0)
    found: list[Later] = []
    assert products(lambda: found.append(inputs_first(roots, seeds, inputs))) == first
    assert products(lambda: rest(found[0])) == second
    assert one == first + second


@pytest.mark.parametrize(
    ("kind", "operators"),
    [
        ("all at once", ("mkldnn_rnn_layer_backward", "_prelu_kernel_backward")),
        ("keys", ("_scaled_dot_product_flash_attention_for_cpu_backward",)),
    ],
)
def test_operators_that_compute_all_gradients_run_once(
    kind: str, operators: tuple[str, ...]
) -> None:
    def counts(work: Callable[[], Any]) -> Counter[str]:
        with Operators() as found:
            work()
        return found.counts

    case, _ = made(kind)
    roots, seeds, _ = begun(case, 0)
    one = counts(lambda: torch.autograd.backward(roots, seeds))
    batch = begun(case, 0)
    two = counts(lambda: rest(inputs_first(*batch)))
    for each in operators:
        name = f"aten.{each}.default"
        assert one[name] == two[name] == 1, (each, one)


def test_a_function_in_python_is_called_once() -> None:
    case, _ = made("function")
    Scaled.calls = 0
    later = inputs_first(*begun(case, 0))
    assert Scaled.calls == 1
    assert later.done == [case.weight]
    rest(later)
    assert Scaled.calls == 1
    assert case.first.weight.grad is not None


def test_weights_wait() -> None:
    case, calls = made("layers")
    roots, seeds, inputs = begun(case, 0)
    later = inputs_first(roots, seeds, inputs)
    assert inputs[0].grad is not None
    assert not calls
    assert all(parameter.grad is None for parameter in case.parameters())
    order = [
        [n for n, p in case.named_parameters() if any(p is x for x in piece.leaves)]
        for piece in later.rest()
    ]
    assert order == [
        ["second.weight", "second.bias"],
        ["norm.weight", "norm.bias"],
        ["first.weight", "first.bias"],
    ]


def test_hooks_of_tensors_change_gradients_once() -> None:
    """A tensor's hook belongs to the node that made it, which both halves enter."""

    def gradients(halves: bool) -> Any:
        torch.manual_seed(1)
        layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
        out = layer(x)
        out.register_hook(lambda gradient: gradient * 3)
        if halves:
            rest(inputs_first([out.sum()], [None], [x]))
        else:
            out.sum().backward()
        return x.grad, layer.weight.grad, layer.bias.grad

    for mine, their in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, their)


def test_memory_goes_with_the_rest() -> None:
    """Subgraph by piece, and without a look for cycles what forward has saved, as inputs."""
    case, _ = made("layers")
    roots, seeds, inputs = begun(case, 0)
    later = inputs_first(roots, seeds, inputs)
    saved = weakref.ref(inputs[0])
    gc.disable()
    try:
        del roots, seeds, inputs
        kept = []
        for piece in later.rest():
            kept += map(weakref.ref, piece.kept())
            assert sum(each() is not None for each in kept) == 1
            assert saved() is not None
        del piece
        assert len(kept) == 3
        assert saved() is None
    finally:
        gc.enable()


def test_nothing_needs_a_gradient() -> None:
    rest(inputs_first([], [], [torch.ones(2, requires_grad=True)]))
