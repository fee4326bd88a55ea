"""Describes a data-flow graph of any framework: tensors, operators, and their machines.

It holds what placement needs and nothing else: the sizes of each tensor, its maker, its users, and
the order of both. It does not know what an operator computes. Everything is checked when it is
made, so a Graph that exists makes sense.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_BYTES = 1 << 48
"""The most bytes of one tensor, and of all slots between two machines.

Sums of offsets stay far below 2**63.
"""

MAX_NAME = 200
MAX_RANK = 16
MAX_SIZE = 1 << 40
MAX_ORDER = (1 << 53) - 1

DTYPES: Mapping[str, int] = {
    **dict.fromkeys(["bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    "complex128": 16,
}
"""Bytes of an element, by the name that numpy and torch use."""


@dataclass(frozen=True, slots=True)
class UpTo:
    """A size that differs from run to run and is never above `most`."""

    most: int


Size = int | UpTo | None
"""A dimension: always the same, bounded, or without a bound."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that one operator makes and others use.

    Attributes:
        name: unique in the graph.
        dtype: one of DTYPES.
        shape: its sizes. The number of dimensions never varies.

    Raises:
        ValueError: a name, dtype or size that makes no sense.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]

    def __post_init__(self) -> None:
        _check_name(self.name, "a tensor's name")
        where = f"tensor {self.name!r}"
        if self.dtype not in DTYPES:
            raise ValueError(f"{where}: no dtype {self.dtype!r}; known are {', '.join(DTYPES)}")
        if type(self.shape) is not tuple or len(self.shape) > MAX_RANK:
            raise ValueError(f"{where}: the shape is a tuple of at most {MAX_RANK} sizes")
        for size in self.shape:
            if size is not None:
                most = size.most if isinstance(size, UpTo) else size
                _check_number(most, f"{where}: a size", 0, MAX_SIZE)
        # Without a bound the sizes that are known still have to fit.
        if self._product(self.shape) > MAX_BYTES:
            raise ValueError(f"{where} has more than 2**48 bytes")

    def _product(self, sizes: tuple[Size, ...]) -> int:
        total = DTYPES[self.dtype]
        for size in sizes:
            total *= 1 if size is None else size.most if isinstance(size, UpTo) else size
        return total

    @property
    def is_static(self) -> bool:
        """True if no size varies from run to run."""
        return all(isinstance(size, int) for size in self.shape)

    @property
    def most_bytes(self) -> int | None:
        """The most bytes that a run can make; None if there is no bound."""
        return None if None in self.shape else self._product(self.shape)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Tells whether a run may make this shape."""
        if shape == self.shape:
            return True
        if len(shape) != len(self.shape):
            return False
        for size, found in zip(self.shape, shape, strict=True):
            most = size.most if isinstance(size, UpTo) else MAX_SIZE if size is None else size
            if not 0 <= found <= most or (isinstance(size, int) and found != size):
                return False
        return True

    def __str__(self) -> str:
        sizes = ", ".join(
            "?" if size is None else f"≤{size.most}" if isinstance(size, UpTo) else str(size)
            for size in self.shape
        )
        return f"{self.dtype} ({sizes})"


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator that makes tensors of others, on one machine.

    Attributes:
        name: unique in the graph.
        machine: where it runs.
        inputs: names of tensors.
        outputs: names of tensors that it makes; no other operator makes them.
        order: a machine runs its operators in this order, so it tells when outputs are ready.

    Raises:
        ValueError: a name or an order that makes no sense.
    """

    name: str
    machine: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    order: int

    def __post_init__(self) -> None:
        _check_name(self.name, "an operator's name")
        where = f"operator {self.name!r}"
        _check_name(self.machine, f"{where}: its machine")
        for side in (self.inputs, self.outputs):
            if type(side) is not tuple:
                raise ValueError(f"{where}: inputs and outputs are tuples of names")
            for each in side:
                _check_name(each, f"{where}: a tensor")
        _check_number(self.order, f"{where}: its order", 0, MAX_ORDER)


@dataclass(frozen=True, slots=True)
class Crossing:
    """A tensor and one machine that uses it and does not make it.

    Attributes:
        tensor: that crosses.
        source: the machine that makes it.
        target: the machine that uses it, by one operator or more.
        ready: order of the operator that makes it.
        needed: order of the first operator at the target that uses it; above `ready`.
    """

    tensor: Tensor
    source: str
    target: str
    ready: int
    needed: int


@dataclass(frozen=True)
class Graph:
    """Tensors and operators: a program's work in every step.

    Every tensor is made by exactly one operator: inputs of the program by operators without inputs.
    An operator has a higher order than those that make its inputs, so there are no cycles.

    Raises:
        ValueError: names that are not unique, operators that use unknown tensors, tensors that no
            operator makes or two make, an order that contradicts the data flow.
    """

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    _makers: dict[str, Operator] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = _unique_names("tensors", self.tensors)
        _unique_names("operators", self.operators)
        makers: dict[str, Operator] = {}
        for operator in self.operators:
            for name in (*operator.inputs, *operator.outputs):
                if name not in known:
                    raise ValueError(f"operator {operator.name!r}: there is no tensor {name!r}")
            for name in operator.outputs:
                if name in makers:
                    raise ValueError(
                        f"tensor {name!r} is made by {makers[name].name!r} and {operator.name!r}"
                    )
                makers[name] = operator
        if orphans := known - makers.keys():
            raise ValueError(f"no operator makes tensor {min(orphans)!r}")
        for operator in self.operators:
            for name in operator.inputs:
                if makers[name].order >= operator.order:
                    raise ValueError(
                        f"operator {operator.name!r} has order {operator.order} and uses "
                        f"{name!r}, which {makers[name].name!r} makes at {makers[name].order}"
                    )
        object.__setattr__(self, "_makers", makers)

    def maker(self, tensor: str) -> Operator:
        """Returns the operator that makes a tensor.

        Raises:
            KeyError: there is no such tensor.
        """
        return self._makers[tensor]

    def crossings(self) -> list[Crossing]:
        """Returns each tensor once per machine that uses it and does not make it, in ready order.

        The order is the same however the graph was declared.
        """
        needed: dict[tuple[str, str], int] = {}
        for operator in self.operators:
            for name in operator.inputs:
                if self._makers[name].machine != operator.machine:
                    key = name, operator.machine
                    needed[key] = min(needed.get(key, operator.order), operator.order)
        tensors = {tensor.name: tensor for tensor in self.tensors}
        found = [
            Crossing(tensors[name], maker.machine, target, maker.order, first)
            for (name, target), first in needed.items()
            for maker in [self._makers[name]]
        ]
        return sorted(found, key=lambda each: (each.ready, each.tensor.name, each.target))


def _unique_names(what: str, named: tuple[Tensor, ...] | tuple[Operator, ...]) -> set[str]:
    """Returns the names of all; ValueError if two have the same."""
    seen: set[str] = set()
    for each in named:
        if each.name in seen:
            raise ValueError(f"two {what} are called {each.name!r}")
        seen.add(each.name)
    return seen


def _check_name(value: str, where: str) -> None:
    if type(value) is not str or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        raise ValueError(f"{where} is a printable text of 1 to {MAX_NAME} characters: {value!r}")


def _check_number(value: int, where: str, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where} is a whole number from {low} to {high}, not {value!r}")
