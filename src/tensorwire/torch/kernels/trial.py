"""Tries a class of optimizers on small tensors: servers run it if all bits are equal.

A dozen steps with changing rates and some zero gradients are made twice: by the user's own object,
and as servers would make them, flat and cut into cells, or tensor by tensor, or on the rows of a
sparse gradient alone.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tensorwire.parameters import (
    Bytes,
    Cell,
    Hyper,
    Scalars,
    TableStep,
    TensorSpec,
    Tile,
    padded,
)

from .optimizer_spec import GroupOptions, OptimizerSpec, is_permitted
from .own_step import OwnStepKernel, plain_step_of
from .watching import ShapeWatch

IGNORED = ("foreach", "fused", "capturable", "differentiable")
"""The options that change how torch computes, but not the result: on the servers all are False."""
OF_ALL = frozenset({
    "defaults", "state", "param_groups", "step", "_tensorwire", "_opt_called",
    "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured",
    "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused",
})  # fmt: skip
"""Attributes that every optimizer has, also one whose methods torch has wrapped."""

# Many elements after the last whole vectors of up to 128 bytes, which torch's kernels for 16 bits
# compute otherwise: there servers, whose cells are whole vectors, come to other bits.
_SHAPES: dict[int, tuple[int, ...]] = {0: (), 1: (1023,), 2: (33, 31), 3: (7, 11, 5)}
_OF_MORE = 3, 7, 3, 1  # repeated
# Classes that torch does not have may treat large, square or even ones otherwise.
_LARGER: dict[int, tuple[int, ...]] = {
    1: (4096,),
    2: (128, 128),
    3: (16, 16, 16),
    4: (16, 16, 4, 4),
}
_LARGEST = 1 << 19  # bytes of a parameter whose own shape is tried
_RATES = 1.0, 1.0, 0.5, 0.5, 0.5, 1.5, 1.5, 0.1, 0.1, 2.0, 1.0, 0.7
# Of gradients: some classes cut off what is large, or round what is small.
_SCALES = 0.1, 0.1, 1.0, 0.0, 1e-4, 1e-2, 0.1, 0.0, 10.0, 1e3, 0.1, 1.0
_FLOAT16_SCALE = 10.0  # at most, so that squares are finite
_FIRST_RATE = 0.01  # where the present one is 0, as at the start of a warm-up
_CUTS = 5


class NotOnServersError(Exception):
    """The error for an optimizer that servers cannot run; the message says why."""


class ParameterKind(NamedTuple):
    """The features of a parameter that matter for its treatment by an optimizer."""

    group: int
    dtype: torch.dtype
    dimensions: int
    is_table: bool
    shape: tuple[int, ...] = ()  # which some classes look at


class _Problem(NamedTuple):
    """Parameters of one group and dtype, and their gradients in every step."""

    group: int
    dtype: torch.dtype
    start: list[torch.Tensor]
    gradients: list[list[torch.Tensor]]
    rows: list[torch.Tensor] | None  # of tables, in every step

    def gradient(self, step: int, index: int) -> torch.Tensor:
        """Returns the gradient of a parameter in a step, for the optimizer to keep."""
        values = self.gradients[step][index].clone()
        if self.rows is None:
            return values
        rows = self.rows[step].unsqueeze(0)
        shape = self.start[index].shape
        return torch.sparse_coo_tensor(
            rows, values, shape, dtype=values.dtype, device=values.device, is_coalesced=True,
            check_invariants=False,
        )  # fmt: skip


class _Outcome(NamedTuple):
    """The bytes of each parameter's values and state, after each step."""

    values: list[list[bytes]]
    states: list[list[dict[str, bytes]]]
    scalars: list[list[Scalars]]


class Trial:
    """A trial of an optimizer on small tensors.

    Args:
        optimizer: the user's.
        cls: its class.
        spec: what is known of it: class, numbers, constants, attributes.
        hyper: the present numbers of every group.
        kinds: of the parameters that it is tried with.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cls: type[torch.optim.Optimizer],
        spec: OptimizerSpec,
        hyper: Sequence[Hyper],
        kinds: Iterable[ParameterKind],
    ) -> None:
        self._optimizer, self._cls, self._spec, self._hyper = optimizer, cls, spec, hyper
        self._rate = list(spec.numbers).index("lr") if "lr" in spec.numbers else None
        self._is_torchs = is_permitted(cls.__module__, ())
        self._watch = ShapeWatch()
        order = sorted(kinds, key=lambda each: (each.group, str(each.dtype), each.is_table))
        self._problems = []
        for key, some in groupby(order, lambda each: (each.group, each.dtype, each.is_table)):
            alike = list(some)
            dimensions = sorted({kind.dimensions for kind in alike})
            more = [] if self._is_torchs or key[2] else _more_shapes(alike)
            self._problems.append(_problem(*key, dimensions, more))

    def find(self, stands_for: Sequence[int]) -> OptimizerSpec:
        """Returns the whole description.

        Args:
            stands_for: of each group, which one was tried in its place.

        Raises:
            NotOnServersError: no way in which servers could run it makes the optimizer's own bits.
        """
        threads = torch.get_num_threads()
        on_host = torch.device("cpu")  # as on a server
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(), on_host:
            # What warns in one worker alone, as it has done so in another, must change nothing.
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)  # as on a server
            try:
                return self._find(stands_for)
            finally:
                torch.set_num_threads(threads)

    def _find(self, stands_for: Sequence[int]) -> OptimizerSpec:
        states: dict[int, set[str]] = defaultdict(set)
        by_method: dict[str, list[tuple[_Problem, _Outcome]]] = {"dense": [], "rows": []}
        for problem in self._problems:
            outcome = self._reference(problem)
            by_method["dense" if problem.rows is None else "rows"].append((problem, outcome))
            states[problem.group].update(*(entry for step in outcome.states for entry in step))
        everything = sorted(set().union(*states.values()))
        options = self._spec.groups
        if not self._spec.states_have_shape:
            # Which arrays a tensor has depends on its shape: they are looked up for each.
            states = defaultdict(lambda: set(everything))
        spec = replace(
            self._spec,
            states=tuple(everything),
            groups=tuple(
                GroupOptions(each.constants, tuple(sorted(states[stands_for[group]])))
                for group, each in enumerate(options)
            ),
        )
        tables, dense = by_method["rows"], by_method["dense"]
        spec = replace(spec, rows=bool(tables))
        if not dense:
            spec = replace(spec, method="rows")
        if any(self._differs(spec, *each, _on_rows) for each in tables):
            # Rows that come later may need what the class makes of all of them at the start.
            made = replace(spec, lazy=False)
            fails = any(self._differs(made, *each, _on_rows) for each in tables)
            spec = replace(spec, rows=False) if fails else made
        if not dense:
            return spec
        # Of 16-bit numbers torch rounds differently after the last whole vector of a tensor.
        by_shape = not spec.states_have_shape or (self._watch.seen and not self._is_torchs)
        if not by_shape and all(each.dtype.itemsize >= 4 for each, _ in dense):
            found = [self._differs(spec, *each, _in_cells) for each in dense]
            if not any(found):
                return spec
        spec = replace(spec, method="whole")
        for each in dense:
            if why := self._differs(spec, *each, _by_tensor):
                raise NotOnServersError(why)
        return spec

    # ---- the user's object

    def _reference(self, problem: _Problem) -> _Outcome:
        """Runs the optimizer itself, and learns its state."""
        try:
            return self._run_reference(problem, lazy=True)
        except NotOnServersError:
            raise
        except Exception as error:  # whatever a class may do
            first = error
        try:
            outcome = self._run_reference(problem, lazy=False)
        except NotOnServersError:
            raise
        except Exception:
            raise NotOnServersError(
                f"its step() fails in a trial: {type(first).__name__}: {first}"
            ) from first
        self._spec = replace(self._spec, lazy=False)
        return outcome

    def _run_reference(self, problem: _Problem, lazy: bool) -> _Outcome:
        made, parameters = self._object_for(problem, lazy)
        decoy = made.param_groups[0]["params"][0]
        outcome = _Outcome([], [], [])
        before = _options_and_attributes(made)
        for number, gradients in enumerate(problem.gradients):
            if self._rate is not None:
                made.param_groups[1]["lr"] = self._hyper_at(problem.group, number)[self._rate]
                before = _options_and_attributes(made)
            for index, parameter in enumerate(parameters):
                parameter.grad = problem.gradient(number, index)
            decoy.grad = problem.gradient(number, 0)
            with torch.no_grad(), self._watch:
                plain_step_of(self._cls)(made)
            if problem.rows is None:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if parameter.grad is None or not torch.equal(parameter.grad, gradient):
                        self._spec = replace(self._spec, edits_gradient=True)
            if changed := _difference(before, _options_and_attributes(made)):
                raise NotOnServersError(f"its step() changes {changed}")
            for key in made.state:
                if not isinstance(key, torch.Tensor):
                    raise NotOnServersError(f"its state has {key!r}, which is no parameter")
            entries = [self._entry(made.state[each], each) for each in parameters]
            outcome.values.append([_bytes(each) for each in parameters])
            outcome.states.append([arrays for arrays, _ in entries])
            outcome.scalars.append([scalars for _, scalars in entries])
            if any(
                a.keys() != b.keys()
                for a, b in zip(outcome.states[0], outcome.states[-1], strict=True)
            ):
                raise NotOnServersError("its state has other entries after some steps")
        self._check_without_gradient(problem, made, parameters)
        return outcome

    def _check_without_gradient(
        self, problem: _Problem, made: torch.optim.Optimizer, parameters: list[nn.Parameter]
    ) -> None:
        """Checks that a step leaves a parameter without gradient alone, as servers do."""
        for index, parameter in enumerate(parameters):
            parameter.grad = problem.gradient(0, index)
        left = parameters[-1]
        entry: dict[str, Any]
        for entry in made.state.pop(left), {}:
            made.state[left], left.grad = entry, None
            before = _bytes(left), repr(self._entry(entry, left) if entry else entry)
            with torch.no_grad():
                plain_step_of(self._cls)(made)
            entry = made.state[left]
            if before != (_bytes(left), repr(self._entry(entry, left) if entry else entry)):
                raise NotOnServersError("its step() changes parameters that have no gradient")

    def _object_for(
        self, problem: _Problem, lazy: bool
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Returns an object like the user's without state and hooks, and its other parameters.

        A group before theirs has one more parameter and another rate: a class that looks at more
        than one group at a time does not come to the bits of servers, which have one.
        """
        group, optimizer = problem.group, self._optimizer
        options = dict(optimizer.param_groups[group])
        for key, value in self._spec.group_of(self._hyper[group]).items():
            if not isinstance(options[key], bool | int | float):
                options[key] = value  # of tensors
        options |= {key: False for key in IGNORED if key in options}
        first = {**options, "params": [nn.Parameter(problem.start[0].clone())]}
        if self._rate is not None:
            first["lr"] = 3.0 * self._hyper_at(group, 0)[self._rate]
        parameters = [nn.Parameter(each.clone()) for each in problem.start]
        groups = [first, {**options, "params": parameters}]
        attributes = deepcopy(dict(self._spec.attributes))
        if not lazy:
            known = {key: options[key] for key in options if key in optimizer.defaults}
            built = self._cls(groups, **known)
            vars(built).update(attributes)
            return built, parameters
        made: Any = object.__new__(self._cls)
        ignored = {key: False for key in IGNORED if key in optimizer.defaults}
        made.__setstate__(
            {
                "defaults": {**optimizer.defaults, **ignored},
                "state": defaultdict(dict),
                "param_groups": groups,
                **attributes,
            }
        )
        return made, parameters

    def _hyper_at(self, group: int, step: int) -> Hyper:
        """Returns the numbers of a group in a step of the trial; the learning rate changes."""
        numbers = list(self._hyper[group])
        if self._rate is not None:
            numbers[self._rate] = (numbers[self._rate] or _FIRST_RATE) * _RATES[step]
        return tuple(numbers)

    def _entry(
        self, entry: Mapping[str, Any], parameter: torch.Tensor
    ) -> tuple[dict[str, bytes], Scalars]:
        """Returns the arrays and the numbers of a parameter's state."""
        arrays, scalars, kinds = {}, [], {}
        for name, value in sorted(entry.items()):
            if isinstance(value, bool | int | float):
                kinds[name] = type(value).__name__
                scalars.append(float(value))
            elif (
                isinstance(value, torch.Tensor)
                and value.dim() == 0
                and (parameter.dim() or name in self._spec.scalars)
            ):
                kinds[name] = str(value.dtype).removeprefix("torch.")
                scalars.append(float(value))
            elif (
                isinstance(value, torch.Tensor)
                and value.dtype == parameter.dtype
                and (value.numel() <= parameter.numel() and value.layout == torch.strided)
            ):
                arrays[name] = _bytes(value)
                if value.shape != parameter.shape:
                    self._spec = replace(self._spec, states_have_shape=False)
            else:
                what = type(value).__name__
                if isinstance(value, torch.Tensor):
                    what = f"tensor of {tuple(value.shape)} and {value.dtype}"
                raise NotOnServersError(
                    f"it keeps {name!r}, a {what}, of a parameter of {tuple(parameter.shape)} and "
                    f"{parameter.dtype}"
                )
        if self._spec.scalars and self._spec.scalars != kinds:
            raise NotOnServersError("it keeps different numbers of different parameters")
        self._spec = replace(self._spec, scalars=kinds)
        return arrays, tuple(scalars)

    # ---- as servers would do it

    def _differs(
        self, spec: OptimizerSpec, problem: _Problem, expected: _Outcome, run: _Run
    ) -> str:
        """Returns how a way of running it differs from the optimizer itself; "" if it does not."""
        kernel = OwnStepKernel(self._cls, OptimizerSpec.from_text(spec.to_text()))
        hyper = [self._hyper_at(problem.group, number) for number in range(len(_RATES))]
        entries: list[dict[str, Any]] = []
        if not spec.lazy:
            made, parameters = self._object_for(problem, lazy=False)
            entries = [made.state[each] for each in parameters]
        try:
            for number, found in enumerate(run(kernel, problem, hyper, entries)):
                wanted = tuple(each[number] for each in expected)
                for what, mine, its in zip(_Outcome._fields, found, wanted, strict=True):
                    if mine != its:
                        return f"after {number + 1} steps its {what} depend on how tensors are cut"
        except Exception as error:  # whatever a class may do
            return f"its step() fails in a trial: {type(error).__name__}: {error}"
        return ""


def _more_shapes(kinds: Sequence[ParameterKind]) -> list[tuple[int, ...]]:
    """Returns shapes to try that torch does not try: larger tensors, and the user's own."""
    sizes = {
        kind.shape: kind.dtype.itemsize * torch.Size(kind.shape).numel()
        for kind in kinds
        if len(kind.shape) == kind.dimensions
    }
    own = sorted(
        (shape for shape, size in sizes.items() if shape and 0 < size <= _LARGEST),
        key=lambda shape: (sizes[shape], shape),
    )
    larger = [_LARGER[each] for each in sorted({k.dimensions for k in kinds}) if each in _LARGER]
    return list(dict.fromkeys([*larger, *own[:1], *own[-1:]]))


def _problem(
    group: int,
    dtype: torch.dtype,
    is_table: bool,
    dimensions: list[int],
    more: list[tuple[int, ...]],
) -> _Problem:
    generator = torch.Generator().manual_seed(0)

    def draw(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    # One with dimensions comes first: it shows what of the state are numbers.
    order = [*filter(None, dimensions), *(each for each in dimensions if not each)]
    shapes = [_SHAPES.get(each, (_OF_MORE * each)[:each]) for each in order if any(dimensions)]
    shapes = shapes or [_SHAPES[1], _SHAPES[0]]
    shapes += more
    shapes += shapes[:1]  # two at least, as some classes look at all tensors together
    start = [draw(shape) for shape in shapes]
    gradients, rows = [], []
    for step in range(len(_RATES)):
        scale = _SCALES[step]
        if dtype == torch.float16:
            scale = min(scale, _FLOAT16_SCALE)
        here = None
        if is_table:
            drawn = torch.randperm(shapes[0][0], generator=generator, device="cpu")
            here = drawn[:9].sort()[0]
        if here is not None:
            rows.append(here)
        formats = shapes if here is None else [(len(here), shape[1]) for shape in shapes]
        gradients.append([draw(shape) * scale for shape in formats])
    return _Problem(group, dtype, start, gradients, rows if is_table else None)


def _options_and_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns values that a step must not change, as the servers' objects are not the user's."""
    found = {
        f"its option {key!r}": value
        for key, value in optimizer.param_groups[1].items()
        if key != "params"
    }
    kept = {
        f"its attribute {key!r}": value
        for key, value in vars(optimizer).items()
        if key not in OF_ALL and not key.startswith("_optimizer_")
    }
    return deepcopy({**found, **kept})


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Returns the first entry that has changed; "" if there is none."""
    if before.keys() != after.keys():
        return min(before.keys() ^ after.keys())
    return next((key for key in before if repr(before[key]) != repr(after[key])), "")


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


_Step = tuple[list[bytes], list[dict[str, bytes]], list[Scalars]]
_Run = Callable[
    [OwnStepKernel, _Problem, list[Hyper], list[dict[str, Any]]],
    Iterator[_Step],
]


class _Memory:
    """The memory of some tensors as a server has it, one after the other."""

    def __init__(
        self,
        kernel: OwnStepKernel,
        problem: _Problem,
        hyper: Hyper,
        entries: list[dict[str, Any]],
    ) -> None:
        self.dtype = str(problem.dtype).removeprefix("torch.")
        self.places, stop = [], 0
        for each in problem.start:
            self.places.append(slice(stop, stop + each.nbytes))
            stop += padded(each.nbytes)
        self.size = stop
        self.master, self.slot = np.zeros(stop, np.uint8), np.zeros(stop, np.uint8)
        self.states = {name: np.zeros(stop, np.uint8) for name in kernel.states}
        self.arrays = []  # where each tensor's state lies
        for each, place in zip(problem.start, self.places, strict=True):
            shapes = kernel.state_shapes(problem.group, hyper, tuple(each.shape), problem.dtype)
            self.arrays.append(
                {
                    name: slice(place.start, place.start + size.numel() * each.element_size())
                    for name, size in shapes.items()
                }
            )
        self.scalars: list[Scalars] = [(0.0,) * len(kernel.scalars)] * len(problem.start)
        self.put(self.master, problem.start)
        for index, entry in enumerate(entries):
            for name, there in self.arrays[index].items():
                self.states[name][there] = np.frombuffer(_bytes(entry[name]), np.uint8)
            self.scalars[index] = tuple(float(entry[name]) for name in kernel.scalars)

    def put(self, target: Bytes, tensors: Iterable[torch.Tensor]) -> None:
        """Copies tensors into their places."""
        for place, each in zip(self.places, tensors, strict=True):
            target[place] = np.frombuffer(_bytes(each), np.uint8)

    def read(self) -> _Step:
        """Returns the present values and state."""
        values = [self.master[place].tobytes() for place in self.places]
        states = [
            {name: self.states[name][there].tobytes() for name, there in each.items()}
            for each in self.arrays
        ]
        return values, states, self.scalars

    def bind(
        self, kernel: OwnStepKernel, group: int, part: slice, shape: Sequence[int] | None
    ) -> Tile:
        """Binds a part of it as a cell."""
        cell = Cell(0, "trained", group, self.dtype, part.start, part.stop, ())
        states = {name: state[part] for name, state in self.states.items()}
        slot = self.slot[part]
        return kernel.bind(cell, shape, self.master[part], [slot], states, slot)


def _in_cells(
    kernel: OwnStepKernel,
    problem: _Problem,
    hyper: list[Hyper],
    entries: list[dict[str, Any]],
) -> Iterator[_Step]:
    memory = _Memory(kernel, problem, hyper[0], entries)
    step = padded(memory.size // _CUTS)
    cuts = range(0, memory.size, step)
    parts = [slice(start, min(start + step, memory.size)) for start in cuts]
    tiles = [memory.bind(kernel, problem.group, part, None) for part in parts]
    for number, gradients in enumerate(problem.gradients):
        memory.put(memory.slot, gradients)
        after = {
            _advance(tile, part, number, memory.scalars[0], hyper)
            for tile, part in zip(tiles, parts, strict=True)
        }
        if len(after) > 1:
            raise ValueError("its numbers depend on how tensors are cut")
        memory.scalars = list(after) * len(memory.scalars)
        yield memory.read()


def _by_tensor(
    kernel: OwnStepKernel,
    problem: _Problem,
    hyper: list[Hyper],
    entries: list[dict[str, Any]],
) -> Iterator[_Step]:
    memory = _Memory(kernel, problem, hyper[0], entries)
    parts = [slice(place.start, padded(place.stop)) for place in memory.places]
    tiles = [
        memory.bind(kernel, problem.group, part, each.shape)
        for part, each in zip(parts, problem.start, strict=True)
    ]
    for number, gradients in enumerate(problem.gradients):
        memory.put(memory.slot, gradients)
        memory.scalars = [
            _advance(tile, part, number, scalars, hyper)
            for tile, part, scalars in zip(tiles, parts, memory.scalars, strict=True)
        ]
        yield memory.read()


def _advance(tile: Tile, part: slice, number: int, scalars: Scalars, hyper: list[Hyper]) -> Scalars:
    size = part.stop - part.start
    tile.reduce([(0, 1.0)], 0, size, False)
    return tile.step(hyper[number], number + 1, scalars, 0, size, False, 1.0)


def _on_rows(
    kernel: OwnStepKernel,
    problem: _Problem,
    hyper: list[Hyper],
    entries: list[dict[str, Any]],
) -> Iterator[_Step]:
    assert problem.rows is not None
    memory = _Memory(kernel, problem, hyper[0], entries)
    tables = [
        kernel.bind_rows(
            TensorSpec("table", memory.dtype, tuple(each.shape), "rows", problem.group),
            memory.master[place],
            {name: state[place] for name, state in memory.states.items()},
        )
        for each, place in zip(problem.start, memory.places, strict=True)
    ]
    height = problem.start[0].shape[0]
    for number, (gradients, rows) in enumerate(zip(problem.gradients, problem.rows, strict=True)):
        after = []
        for table, each, scalars in zip(tables, gradients, memory.scalars, strict=True):
            values = np.frombuffer(bytearray(_bytes(each)), np.uint8)
            table.reduce([(rows.numpy(), values, 1.0)])
            parts = [TableStep(0, height, number + 1, scalars)]
            after += table.step(hyper[number], parts, 1.0)
        memory.scalars = after
        yield memory.read()
