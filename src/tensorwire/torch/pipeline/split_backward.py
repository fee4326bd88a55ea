"""Splits backward in two: first the gradients of inputs, later the gradients of everything else.

The method comes from zero-bubble pipelines (Qi et al., arXiv:2401.10241), on autograd's graph. Its
nodes that lead to an input are the chain; the nodes beside it, down to parameters, are branches.
The first half runs the chain alone and keeps the gradients that arrive where a branch leaves it.
The second half enters each of these nodes again, for the branch alone. Knows no stages, and moves
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_LEAF = "torch::autograd::AccumulateGrad"
# Operators that compute gradients of all that they use, also when one of them is asked for.
_AT_ONCE = {
    f"{name}Backward0"
    for name in (
        "ConvTbc",
        "EuclideanDist",
        "FakeQuantizeLearnablePerChannelAffine",
        "FakeQuantizeLearnablePerTensorAffine",
        "GridSampler2DCpuFallback",
        "IndexReduce",
        "LinalgHouseholderProduct",
        "MkldnnRnnLayer",
        "Polar",
        "PreluKernel",
        "ScaledDotProductFlashAttentionForCpu",
        "ScatterReduce",
    )
}


@dataclass
class Subgraph:
    """A part that is computed at once: branches from one node of the chain, or from none.

    Attributes:
        leaves: at the ends of the branches.
        roots, seeds: of the backward, where they are in the branches.
        door: the node; None if the branches begin at roots.
        arrived: the gradients that have arrived at the node.
    """

    leaves: list[torch.Tensor] = field(default_factory=list)
    roots: list[torch.Tensor | GradientEdge] = field(default_factory=list)
    seeds: list[torch.Tensor | None] = field(default_factory=list)
    door: Node | None = None
    arrived: tuple[torch.Tensor | None, ...] = ()

    def kept(self) -> list[torch.Tensor]:
        """Returns the gradients with which its backward begins."""
        return [each for each in (*self.seeds, *self.arrived) if each is not None]

    def run(self) -> None:
        """Adds to `.grad` of the leaves."""
        kept = [(at, each) for at, each in enumerate(self.arrived) if each is not None]
        edges = [GradientEdge(self.door, at) for at, _ in kept]
        if not edges and not self.roots:
            return
        arrived, hook = self.arrived, None
        if self.door is not None:
            # Hooks of a tensor run again now, on what they have made already.
            hook = self.door.register_prehook(lambda _: arrived)
        try:
            torch.autograd.backward(
                [*self.roots, *edges],
                [*self.seeds, *(each for _, each in kept)],
                inputs=self.leaves,
            )
        finally:
            if hook is not None:
                hook.remove()


class Later:
    """The rest of a backward, for later. Made by `inputs_first`.

    Attributes:
        done: leaves besides the inputs whose gradient is complete already.
    """

    def __init__(self, done: list[torch.Tensor], pieces: list[Subgraph]) -> None:
        self.done = done
        self._pieces = pieces

    def rest(self) -> Iterator[Subgraph]:
        """Computes the rest, piece by piece; yields a piece when its leaves have all of `.grad`."""
        pending = Counter(at for piece in self._pieces for at in storages(piece.kept()))
        while self._pieces:
            piece = self._pieces.pop(0)
            pending -= Counter(storages(piece.kept()))
            piece.run()
            take_own(piece.leaves, pending)
            yield piece


class _Through(torch.autograd.Function):
    """A function that passes values through unchanged, and notes which gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, arrived: list[torch.Tensor | None], start: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in given)

    @staticmethod
    def backward(ctx: Any, *arrived: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.arrived[:] = arrived
        return (None, None, *arrived)


class Cut:
    """A cut between outputs and a loss of them, so that the loss has a backward of its own.

    So tensors that the loss has saved are freed, hooks that it sets on the outputs run once, and
    functions can be used that run backward only once, as compiled ones.
    """

    def __init__(self) -> None:
        # Backward is asked for the gradient of this, and so ends after the node.
        self._start = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)
        self._arrived: list[torch.Tensor | None] = []
        self._node: Node | None = None

    def through(self, outputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs as a loss takes them, in the same memory.

        They are not cut off if one comes from another, whose hooks have to see its gradient too, or
        if they share memory: autograd has to know that a change of one changes both.
        """
        tensors = {
            id(each): each
            for each in outputs
            if isinstance(each, torch.Tensor) and each.requires_grad
        }
        nodes = [get_gradient_edge(each).node for each in tensors.values()]
        parents = _parents(nodes) if len(nodes) > 1 else {}
        together = len(storages(tensors.values())) < len(tensors)
        if not tensors or together or any(parents.get(node) for node in nodes):
            return list(outputs)
        with torch.enable_grad():
            passed = _Through.apply(self._arrived, self._start, *tensors.values())  # type: ignore[no-untyped-call]
        self._node = passed[0].grad_fn
        found = dict(zip(tensors, passed, strict=True))
        return [found.get(id(each), each) for each in outputs]

    def backward(
        self, loss: torch.Tensor
    ) -> tuple[list[GradientEdge], list[torch.Tensor], list[torch.Tensor]] | None:
        """Adds to `.grad` of leaves that the loss has beside the outputs.

        Returns:
            Roots and seeds of the backward from the outputs, and the leaves. None, and nothing is
            computed, if the loss has nodes in common with the outputs: one backward of the loss
            would add their gradients before it accumulates them and runs hooks.
        """
        if self._node is None:
            return None
        beside = set(_parents([get_gradient_edge(loss).node], {self._node})) - {self._node}
        edges = [GradientEdge(node, at) for node, at in self._node.next_functions[1:]]
        if beside & set(_parents(edge.node for edge in edges)):
            return None
        leaves = [node.variable for node in beside if node.name() == _LEAF]
        torch.autograd.backward([loss], inputs=[self._start, *leaves])
        arrived = zip(edges, self._arrived, strict=False)  # nothing if it depends on no output
        pairs = [(edge, seed) for edge, seed in arrived if seed is not None]
        seeds = [seed for _, seed in pairs]
        self._arrived.clear()
        take_own(leaves, storages(seeds))
        return [edge for edge, _ in pairs], seeds, leaves


def inputs_first(
    roots: Sequence[torch.Tensor | GradientEdge],
    seeds: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> Later:
    """Adds to `.grad` of the inputs the result of `torch.autograd.backward(roots, seeds)`.

    With the additions of `Later.rest`, `.grad` of all leaves is the same as of one backward, to the
    bit, and hooks of each leaf run once. No gradient is computed twice. So a leaf does not wait for
    `rest` if several nodes of the chain use it, of which the upper one would be asked for the chain
    again; nor if a node does that computes all gradients in one call: a Function of a user, and the
    operators in _AT_ONCE. Where leaves are left for `rest`, hooks of the tensor that the node has
    made run again then, for nothing; after `retain_grad` its `.grad` counts that too.

    The tensors that forward has saved stay until the last of `rest` is computed or forgotten.

    Args:
        roots: tensors that need gradients, or their edges.
        seeds: their gradients; None for a number. They must not change until the end of `rest`.
        inputs: leaves that need gradients.
    """
    starts = [_edge(root).node for root in roots]
    parents = _parents(starts)
    ends = {get_gradient_edge(each).node: each for each in inputs}
    reached = [node for node in ends if node in parents]
    chain = _reachable(reached, parents.__getitem__)
    done: list[torch.Tensor] = []
    at_roots = Subgraph()
    at_doors: dict[Node, Subgraph] = {}
    now = [at for at, start in enumerate(starts) if start in chain]
    for branch in _branches(parents, chain):
        leaves = [node.variable for node in branch if node.name() == _LEAF]
        doors = {parent for node in branch for parent in parents[node]} & chain
        begun = [at for at, start in enumerate(starts) if start in branch]
        if not leaves:
            continue
        if len(doors) > 1 or any(_is_at_once(door) for door in doors):
            done += leaves
            now += begun
            continue
        piece = at_roots
        for door in doors:
            piece = at_doors.setdefault(door, Subgraph(door=door))
        piece.leaves += leaves
        piece.roots += [roots[at] for at in begun]
        piece.seeds += [seeds[at] for at in begun]
    targets = [*(ends[node] for node in reached), *done]
    pieces = [at_roots] if at_roots.leaves else []
    if targets:
        hooks = [_keep(piece, pieces) for piece in at_doors.values()]
        try:
            torch.autograd.backward(
                [roots[at] for at in now],
                [seeds[at] for at in now],
                retain_graph=bool(at_doors),
                inputs=targets,
            )
        finally:
            for hook in hooks:
                hook.remove()
    # The next backward adds to these in place, and a Function may have returned a view of what
    # arrived, on which a piece still depends.
    take_own(targets, storages(each for piece in pieces for each in piece.kept()))
    return Later(done, pieces)


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Returns the addresses of dense tensors' storages."""
    dense = (each for each in tensors if each.layout == torch.strided)
    return {each.untyped_storage().data_ptr() for each in dense}


def take_own(leaves: Iterable[torch.Tensor], lent: Collection[int]) -> None:
    """Lets the gradients of tensors lie in memory of their own."""
    for leaf in leaves:
        if leaf.grad is not None:
            leaf.grad = own(leaf.grad, lent)


def own(tensor: torch.Tensor, lent: Collection[int]) -> torch.Tensor:
    """Returns a tensor in memory of its own: autograd may keep a view of the given one."""
    parts = [tensor]
    if tensor.is_sparse:
        parts = [tensor._values(), tensor._indices()]
    is_view = any(each.untyped_storage().data_ptr() in lent for each in parts)
    return tensor.clone() if is_view else tensor


def _keep(piece: Subgraph, pieces: list[Subgraph]) -> Any:
    """Lets a piece keep the gradient at its node; it joins `pieces` when backward gets there."""

    def keep(arrived: tuple[torch.Tensor | None, ...]) -> None:
        piece.arrived = arrived
        pieces.append(piece)

    assert piece.door is not None
    return piece.door.register_prehook(keep)


def _is_at_once(node: Node) -> bool:
    """Tells whether a node is a user's function, in Python or C++, or one of _AT_ONCE."""
    name = node.name()
    return isinstance(node, BackwardCFunction) or name in _AT_ONCE or "CppNode" in name


def _edge(root: torch.Tensor | GradientEdge) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _parents(starts: Iterable[Node], ends: Collection[Node] = ()) -> dict[Node, list[Node]]:
    """Returns all nodes that a backward from `starts` to `ends` can reach, and from where."""
    found: dict[Node, list[Node]] = {start: [] for start in starts}
    left = list(found)
    while left:
        node = left.pop()
        if node in ends:
            continue
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in found:
                found[below] = []
                left.append(below)
            found[below].append(node)
    return found


def _reachable(starts: Iterable[Node], beside: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Returns the nodes `starts` and all to which steps from a node to those `beside` it lead."""
    found = set(starts)
    left = list(found)
    while left:
        for node in beside(left.pop()):
            if node not in found:
                found.add(node)
                left.append(node)
    return found


def _branches(parents: dict[Node, list[Node]], chain: set[Node]) -> Iterator[set[Node]]:
    """Yields nodes beside the chain, those together that are connected there."""

    def beside(node: Node) -> Iterator[Node]:
        for each in (*parents[node], *(below for below, _ in node.next_functions)):
            if each is not None and each not in chain:
                yield each

    seen = set(chain)
    for start in parents:
        if start not in seen:
            branch = _reachable([start], beside)
            seen |= branch
            yield branch
