"""Serializes an optimizer for servers as a text with its class and all it needs.

The numbers of a group (learning rate, …) may change with every step, and travel with it. The fixed
part is in the text: flags that are no numbers, and the names of the state.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from tensorwire.errors import UnavailableError
from tensorwire.parameters import Hyper

METHODS = ("elementwise", "whole", "rows")
"""The parts that a class can be applied to.

Any part of a tensor, flat; whole tensors only; only the rows of tables that have a gradient.
"""

_MALFORMED = (
    AttributeError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_KINDS = "float", "int", "bool"
_RESERVED = frozenset({"params", "param_groups", "state", "defaults"})


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The options of a group besides numbers.

    Attributes:
        constants: options by name, as in `param_groups`.
        states: names of the arrays that the class keeps with these.
    """

    constants: Mapping[str, Any]
    states: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """A class of optimizers and the options of its groups.

    Attributes:
        optimizer: the class, "module:qualified name".
        method: one of METHODS.
        numbers: names of numbers in every group, with "float", "int" or "bool"; of a tuple under
            "betas" these are "betas.0" and "betas.1".
        states: names of the arrays of state of all groups.
        scalars: names of the numbers of state, with the dtype of a tensor, or "int" or "float".
        groups: of each group, or one that stands for all.
        attributes: of the instance, beside those that all optimizers have.
        lazy: the class makes its state in the first step; else every tensor has it from the start.
        edits_gradient: a step changes `.grad`.
        rows: a sparse gradient changes only the rows that it has.
        states_have_shape: arrays of state have their tensor's shape.
        default_dtype: torch's default in the worker, of what a step makes without naming a dtype.
    """

    optimizer: str
    method: str
    numbers: Mapping[str, str]
    states: tuple[str, ...]
    scalars: Mapping[str, str]
    groups: tuple[GroupOptions, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    lazy: bool = True
    edits_gradient: bool = False
    rows: bool = False
    states_have_shape: bool = True
    default_dtype: str = "float32"

    def to_text(self) -> str:
        """Returns the text by which it travels; equal optimizers have equal texts."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_text(text: str) -> OptimizerSpec:
        """Returns the description in another process's text; ValueError names a fault of it."""
        try:
            raw = json.loads(text)
            groups = tuple(
                GroupOptions(_texts_to(each["constants"]), _names(each["states"]))
                for each in raw.pop("groups")
            )
            spec = OptimizerSpec(groups=groups, states=_names(raw.pop("states")), **raw)
            spec._check()
        except _MALFORMED as error:
            raise ValueError(f"not a description of an optimizer: {error!r:.300}") from error
        return spec

    def _check(self) -> None:
        """Raises ValueError or TypeError if a part has the wrong form."""
        if self.method not in METHODS or not self.groups or not isinstance(self.optimizer, str):
            raise ValueError("unknown values")
        for flag in (self.lazy, self.edits_gradient, self.rows, self.states_have_shape):
            if not isinstance(flag, bool):
                raise ValueError(f"{flag!r:.80} is neither true nor false")
        for each in (self.numbers, self.scalars, self.attributes):
            _texts_to(each)
        if not set(_KINDS).issuperset(self.numbers.values()):
            raise ValueError("numbers of unknown types")
        if self.default_dtype not in _SCALAR_DTYPES or "int" in self.default_dtype:
            raise ValueError("an unknown default dtype")
        if not {*_KINDS, *_SCALAR_DTYPES}.issuperset(self.scalars.values()):
            raise ValueError("scalars of unknown types")
        kept = [*self.states, *self.scalars]
        if len(set(kept)) < len(kept):
            raise ValueError("a name is there twice in the state")
        for group in self.groups:
            if not set(self.states).issuperset(group.states):
                raise ValueError("a group has other state than all together")
        options = {name for group in self.groups for name in group.constants}
        if not _RESERVED.isdisjoint({*self.numbers, *self.attributes, *options}):
            raise ValueError(f"one of {sorted(_RESERVED)} is no option or attribute")

    def options_of(self, group: int) -> GroupOptions:
        """Returns the options of a group by its index; ValueError if there is none."""
        if len(self.groups) > 1 and group >= len(self.groups):
            raise ValueError(f"{self.name} is described with {len(self.groups)} groups")
        return self.groups[group if len(self.groups) > 1 else 0]

    def group_of(self, hyper: Hyper) -> dict[str, Any]:
        """Returns the numbers of a group by the names that `param_groups` has for them."""
        found: dict[str, Any] = {}
        for (name, kind), value in zip(self.numbers.items(), hyper, strict=True):
            number = _number(kind, value)
            key, dot, _ = name.partition(".")
            if dot:
                found[key] = (*found.get(key, ()), number)
            else:
                found[key] = number
        return found

    def hyper_of(self, group: Mapping[str, Any]) -> Hyper:
        """Returns the numbers of a group, as `group_of` takes them."""
        found = []
        for name in self.numbers:
            key, dot, index = name.partition(".")
            found.append(float(group[key][int(index)] if dot else group[key]))
        return tuple(found)

    @cached_property
    def name(self) -> str:
        """The class as people write it."""
        return self.optimizer.replace(":", ".")


_SCALAR_DTYPES = ("float32", "float64", "int64", "int32", "bfloat16", "float16")


def _names(raw: Sequence[Any]) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(each, str) for each in raw):
        raise ValueError(f"{raw!r:.80} are no names")
    return tuple(raw)


def _texts_to(raw: Any) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r:.80} has no names")
    return raw


def _number(kind: str, value: float) -> float | int | bool:
    if kind == "bool":
        return bool(value)
    # What was given as 0 may become 0.9.
    return int(value) if kind == "int" and value.is_integer() else value


def class_of(name: str, permitted: Collection[str]) -> type[torch.optim.Optimizer]:
    """Returns the class that `OptimizerSpec.optimizer` names.

    Args:
        name: "module:qualified name".
        permitted: modules from which classes may be imported, besides torch.optim; what is below
            one of them is permitted too.

    Raises:
        ValueError: it is not permitted, or there is none.
    """
    module, _, path = name.partition(":")
    if not is_permitted(module, permitted):
        raise ValueError(f"{name!r} is of a module that this server was not told to import")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a module does
        raise ValueError(f"{name!r} cannot be imported here: {error}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(f"{name!r} is no class of optimizers")
    if not is_permitted(found.__module__, permitted):
        raise ValueError(f"{name!r} is a class of {found.__module__}, which is not permitted")
    return found


def is_permitted(module: str, permitted: Collection[str]) -> bool:
    """Tells whether a server may import a module: torch.optim's, a `permitted` one, or below."""
    return any(
        module == each or module.startswith(f"{each}.") for each in ("torch.optim", *permitted)
    )


def permitted_imports() -> tuple[str, ...]:
    """Returns the modules that `tensorwire run --import` has named, from the environment.

    Raises:
        ValueError: something in TENSORWIRE_IMPORT is no name of a module.
    """
    named = os.environ.get("TENSORWIRE_IMPORT", "").split(",")
    found = tuple(name.strip() for name in named if name.strip())
    for name in found:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"TENSORWIRE_IMPORT names {name!r}, which is no module")
    return found


def import_all(modules: Collection[str]) -> None:
    """Imports modules for the classes in them.

    Raises:
        UnavailableError: one cannot be imported.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever a module does
            raise UnavailableError(
                f"--import {name}: {type(error).__name__}: {error}; servers look where Python "
                "looks for modules, and in the folder of the script"
            ) from error
