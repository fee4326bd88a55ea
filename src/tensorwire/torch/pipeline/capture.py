"""Cuts a PyTorch model into stages and the values that cross between them.

`torch.export` traces the model once, on its meta or real tensors, and the trace is cut where
`pipe_split` stands. Knows no machines and moves nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy

from tensorwire.placement import Size, Tensor, UpTo

_SPLIT = torch.ops.pippy._pipe_split.default
_MOST = 1 << 40


@dataclass
class Value:
    """A value that one stage makes and later ones use.

    Attributes:
        tensor: its name and sizes. A size (a number that depends on shapes) is an int64 of no
            dimensions.
        maker: index of the stage.
        users: indices of stages, ascending.
        is_size: it is a number.
        needs_grad: a gradient comes back from every user.
    """

    tensor: Tensor
    maker: int
    is_size: bool
    needs_grad: bool
    users: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Input:
    """An input of the model, as it was traced.

    Attributes:
        name: in the trace.
        dtype: of its elements.
        sizes: for every dimension the least, the most (None: no bound), and its symbol; sizes with
            the same symbol are equal in a micro-batch. "" is no symbol.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[tuple[int, int | None, str], ...]

    def check(self, given: torch.Tensor, symbols: dict[str, int]) -> None:
        """Raises ValueError if the trace does not hold for it; `symbols` collects sizes."""
        if given.dtype != self.dtype:
            raise ValueError(
                f"input {self.name!r} was traced as {self.dtype}, and is {given.dtype}: convert it "
                f"by .to({self.dtype}), or split the model with such an example"
            )
        fits = given.dim() == len(self.sizes)
        for size, (low, high, symbol) in zip(given.shape, self.sizes, strict=False):
            fits = fits and low <= size and (high is None or size <= high)
            fits = fits and (not symbol or symbols.setdefault(symbol, size) == size)
        if not fits:
            wanted = ", ".join(
                str(low) if low == high else f"{symbol or 'n'}: {low} to {high or 'any'}"
                for low, high, symbol in self.sizes
            )
            raise ValueError(
                f"input {self.name!r} was traced as ({wanted}), and is {tuple(given.shape)}; say "
                "in dynamic_shapes= which sizes vary"
            )


@dataclass
class StageGraph:
    """A stage of a model, as a graph.

    Attributes:
        graph: what it computes: first placeholders for `inputs`, then its nodes; it returns
            `outputs`, and in the last stage the model's outputs after them.
        inputs: names of values, in the first stage of the model's inputs.
        outputs: names of values.
        tensors: parameters, buffers and constants that it uses, by their first name.
    """

    graph: fx.Graph
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)


@dataclass
class Capture:
    """A model in stages.

    Attributes:
        parts: the stages.
        values: what crosses between them, by name.
        inputs: the model's, in order.
        output_spec: how the model's outputs are packed.
        names: every name of a parameter or buffer, and the first one of the same tensor.
        others: constants and modules of the trace, by name.
    """

    parts: list[StageGraph]
    values: dict[str, Value]
    inputs: list[Input]
    output_spec: Any
    names: dict[str, str]
    others: dict[str, Any]


def capture(
    model: nn.Module,
    split_spec: Mapping[str, SplitPoint] | None,
    example: Sequence[torch.Tensor],
    dynamic_shapes: Any = None,
) -> Capture:
    """Traces a model and cuts it.

    Raises:
        ValueError: there is no split point, a name is no module, or stages would change each
            other's values in place.
    """
    on_meta = any(each.is_meta for each in [*model.parameters(), *model.buffers()])
    if on_meta:
        example = [each.to("meta") for each in example]
    with _marked(model, split_spec or {}):
        program = torch.export.export(
            model, tuple(example), dynamic_shapes=dynamic_shapes, strict=False
        )
    traced = program.module(check_guards=False)
    if on_meta:
        for module in traced.modules():
            if isinstance(module, fx.GraphModule):
                _replace_device(module)
    cutter = _Cutter(model, traced, dict(program.range_constraints))
    return cutter.cut(program.call_spec.out_spec)


@contextmanager
def _marked(model: nn.Module, spec: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Puts `pipe_split` before or after modules, for as long as the context lasts."""
    changed: list[tuple[nn.Module, Any]] = []
    try:
        for name, point in spec.items():
            try:
                module = model.get_submodule(name)
            except AttributeError:
                raise ValueError(f"the model has no module {name!r} to split at") from None
            if not isinstance(point, SplitPoint):
                raise ValueError(
                    f"split_spec has {point!r} for {name!r}: give SplitPoint.BEGINNING or .END"
                )
            changed.append((module, module.__dict__.get("forward")))
            module.forward = _splitting(module.forward, point)
        yield
    finally:
        for module, before in reversed(changed):
            if before is None:
                del module.forward
            else:
                module.forward = before


def _splitting(forward: Any, point: SplitPoint) -> Any:
    def split_forward(*args: Any, **kwargs: Any) -> Any:
        if point == SplitPoint.BEGINNING:
            _SPLIT()
        result = forward(*args, **kwargs)
        if point == SplitPoint.END:
            _SPLIT()
        return result

    return split_forward


def _replace_device(module: fx.GraphModule) -> None:
    """Replaces the device of the example by the CPU in the trace."""

    def replaced(value: Any) -> Any:
        is_meta = isinstance(value, torch.device) and value.type == "meta"
        return torch.device("cpu") if is_meta else value

    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, replaced)
        node.kwargs = fx.node.map_aggregate(node.kwargs, replaced)
    module.recompile()


class _Cutter:
    """One use of `capture`."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule, ranges: dict[Any, Any]) -> None:
        self._traced = traced
        self._ranges = ranges
        self._names = _first_names(model)
        self._trained = {n for n, p in model.named_parameters() if p.requires_grad}
        self._others: dict[str, Any] = {}
        self._stage: dict[fx.Node, int] = {}
        self._grads: set[fx.Node] = set()
        self._values: dict[str, Value] = {}
        self._inputs: list[fx.Node] = []

    def cut(self, output_spec: Any) -> Capture:
        nodes = list(self._traced.graph.nodes)
        last = self._number(nodes)
        if last == 0:
            raise ValueError("the model has no split point: name one, or call pipe_split() in it")
        outputs: Sequence[Any] = pytree.tree_leaves(nodes[-1].args)
        for node in nodes:
            users = {self._stage[user] for user in node.users if user in self._stage}
            if any(node is each for each in outputs):
                users.add(last)
            self._add_value(node, users)
        self._check_in_place(nodes)
        parts = [self._part(nodes, stage, ()) for stage in range(last)]
        parts.append(self._part(nodes, last, outputs))
        inputs = [self._input(node) for node in self._inputs]
        return Capture(parts, self._values, inputs, output_spec, self._names, self._others)

    def _number(self, nodes: Sequence[fx.Node]) -> int:
        """Gives every node its stage, and notes which need gradients; returns the last stage."""
        stage = 0
        for node in nodes:
            if node.op == "placeholder":
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise ValueError(f"the model's input {node.name!r} is no tensor")
                self._inputs.append(node)
                self._stage[node] = 0
            elif node.op == "get_attr":
                if self._names.get(node.target) in self._trained:
                    self._grads.add(node)
            elif node.target is _SPLIT:
                stage += 1
            elif node.op != "output":
                self._stage[node] = stage
                if node.target is operator.getitem:  # parts of a result stay with it
                    self._stage[node] = self._stage[node.args[0]]
                self._add_gradient(node)
        return stage

    def _add_gradient(self, node: fx.Node) -> None:
        """Gives a value a gradient if one of its sources, or a value written into it, has one."""
        inputs = node.all_input_nodes
        if not any(each in self._grads or _base(each) in self._grads for each in inputs):
            return
        for each in (node, *(_base(changed) for changed in _changed_by(node))):
            val = each.meta.get("val")
            if not isinstance(val, torch.Tensor) or val.is_floating_point() or val.is_complex():
                self._grads.add(each)

    def _add_value(self, node: fx.Node, users: set[int]) -> None:
        maker = self._stage.get(node)
        if maker is None or not users - {maker}:
            return
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            dtype = str(val.dtype).removeprefix("torch.")
            tensor = Tensor(node.name, dtype, tuple(self._size(size) for size in val.shape))
            value = Value(tensor, maker, False, node in self._grads)
        elif isinstance(val, torch.SymInt | int):
            value = Value(Tensor(node.name, "int64", ()), maker, True, False)
        else:
            raise ValueError(f"stage {maker} would have to send {node.name!r}, which is {val!r}")
        value.users = sorted(users - {maker})
        self._values[node.name] = value

    def _size(self, size: Any) -> Size:
        low, high = self._range(size)
        if isinstance(size, int):
            return low
        return None if high is None else UpTo(high)

    def _range(self, size: Any) -> tuple[int, int | None]:
        if isinstance(size, int):
            return size, size
        found = bound_sympy(size.node.expr, self._ranges)
        low, high = (
            int(each) if each.is_Integer and 0 <= int(each) < _MOST else None
            for each in (found.lower, found.upper)
        )
        return low or 0, high

    def _input(self, node: fx.Node) -> Input:
        val = node.meta["val"]
        sizes = []
        for size in val.shape:
            plain = isinstance(size, int) or not size.node.expr.is_Symbol
            sizes.append((*self._range(size), "" if plain else str(size.node.expr)))
        return Input(node.name, val.dtype, tuple(sizes))

    def _check_in_place(self, nodes: Sequence[fx.Node]) -> None:
        """Raises ValueError for changes in place of values that other stages use, as copies."""
        for node in nodes:
            for changed in _changed_by(node):
                base = _base(changed)
                users = {self._stage[u] for u in base.users if u in self._stage}
                users.add(self._stage.get(base, self._stage[node]))
                if users != {self._stage[node]}:
                    raise ValueError(
                        f"{node.name!r} in stage {self._stage[node]} changes {base.name!r} in "
                        f"place, which stages {sorted(users)} use; change a copy"
                    )

    def _part(self, nodes: Sequence[fx.Node], stage: int, outputs: Sequence[Any]) -> StageGraph:
        graph = fx.Graph()
        part = StageGraph(graph)
        copies: dict[fx.Node, fx.Node] = {}
        foreign = self._inputs if stage == 0 else self._foreign(nodes, stage)
        for node in foreign:
            copies[node] = graph.placeholder(node.name)
            part.inputs.append(node.name)
        for node in nodes:
            used = any(self._stage.get(user) == stage for user in node.users)
            if node.op == "get_attr" and (used or any(node is each for each in outputs)):
                target = self._names.get(node.target, node.target)
                if target not in self._names:
                    self._others[target] = operator.attrgetter(target)(self._traced)
                part.tensors.add(target)
                copies[node] = graph.get_attr(target)
            elif self._stage.get(node) == stage and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        part.outputs = [n.name for n in nodes if n.name in self._values and self._stage[n] == stage]
        results: list[Any] = [copies[node] for node in nodes if node.name in part.outputs]
        results += [copies[each] if isinstance(each, fx.Node) else each for each in outputs]
        graph.output(tuple(results))
        return part

    def _foreign(self, nodes: Sequence[fx.Node], stage: int) -> list[fx.Node]:
        return [n for n in nodes if n.name in self._values and stage in self._values[n.name].users]


def _first_names(model: nn.Module) -> dict[str, str]:
    """Returns every name of a parameter or buffer, and the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _changed_by(node: fx.Node) -> list[fx.Node]:
    """Returns arguments that an operator writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    changed = []
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            if isinstance(value, fx.Node):
                changed.append(value)
    return changed


def _base(node: fx.Node) -> fx.Node:
    """Returns the node whose memory this one is a view of, or itself."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        schema = getattr(node.target, "_schema", None)
        views = schema is not None and any(r.alias_info is not None for r in schema.returns)
        if not views and node.target is not operator.getitem:
            break
        node = node.args[0]
    return node
