"""Describes a user's optimizer for servers, by trying it, or says why they cannot run it.

A class outside the known ones is tried on small tensors, a dozen steps with changing rates and some
zero gradients: once by the user's own object, and once as servers would do it, flat and cut into
cells, or tensor by tensor. Only equal bits count.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch

from tensorwire.parameters import Hyper

from .fused import fused_path_of
from .optimizer_spec import GroupOptions, OptimizerSpec, class_of, is_permitted
from .trial import IGNORED, OF_ALL, NotOnServersError, ParameterKind, Trial

_PLAIN = (bool, int, float, str, type(None))
_OF_SCHEDULERS = frozenset({
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
    "swa_lr",
})  # fmt: skip
"""The entries that torch puts into groups besides options."""
_HARMLESS = frozenset({"_is_hf_initialized"})
"""Attributes of parameters that no optimizer looks at."""


class Options(NamedTuple):
    """The present options of an optimizer's groups; where they are equal, the description is.

    Attributes:
        numbers: names of numbers and their types, as of `OptimizerSpec`.
        constants: of each group.
        nonzero: of each group, which of its numbers are not zero.
        default_dtype: of torch, which a class may look at.
    """

    numbers: tuple[tuple[str, str], ...]
    constants: tuple[str, ...]
    nonzero: tuple[tuple[bool, ...], ...]
    default_dtype: str


def options_of(optimizer: torch.optim.Optimizer) -> tuple[Options, tuple[Hyper, ...]]:
    """Returns the options of an optimizer's groups, and the numbers of each.

    Raises:
        NotOnServersError: an option is neither a number nor a plain value.
    """
    types: dict[str, str] = {}
    rows: list[dict[str, float]] = []
    constants = []
    groups = optimizer.param_groups
    keys = {*optimizer.defaults} - {*IGNORED}
    more: set[str] = set()
    if not is_permitted(plain_class_of(optimizer).__module__, ()):
        # A group may have options of its own; torch's own classes look at no others.
        more = {key for group in groups for key in group} - {*keys, *IGNORED, *_OF_SCHEDULERS}
    in_some = {key for key in more if any(key not in group for group in groups)}
    for group in groups:
        row: dict[str, float] = {}
        others: dict[str, Any] = {}
        for key in sorted((keys | more) & group.keys()):
            numbers = None if key in in_some else _numbers(key, group[key])
            if numbers is None:
                others[key] = _plain(f"option {key!r}", group[key])
            for name, value, kind in numbers or ():
                row[name] = value
                # A number that is whole in one group and not in another is not whole.
                types[name] = kind if types.get(name, kind) == kind else "float"
        rows.append(row)
        others |= dict.fromkeys((key for key in IGNORED if key in group), False)
        constants.append(json.dumps(others, sort_keys=True))
    names = sorted(types)
    if any(row.keys() != types.keys() for row in rows):
        raise NotOnServersError("its groups have different options")
    hyper = tuple(tuple(row[name] for name in names) for row in rows)
    nonzero = tuple(tuple(bool(number) for number in row) for row in hyper)
    kinds = tuple((n, types[n]) for n in names)
    default = str(torch.get_default_dtype()).removeprefix("torch.")
    return Options(kinds, tuple(constants), nonzero, default), hyper


def _numbers(key: str, value: Any) -> list[tuple[str, float, str]] | None:
    """Returns an option as numbers with names and types; None if it is none."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return [(key, float(value), "float")]
    if isinstance(value, Real | np.bool_):
        kind = "float"
        if isinstance(value, bool | np.bool_):
            kind = "bool"
        elif isinstance(value, Integral):
            kind = "int"
        return [(key, float(value), kind)]
    if isinstance(value, tuple | list) and value and len(value) <= 10:
        found = [_numbers(f"{key}.{i}", each) for i, each in enumerate(value)]
        if all(each is not None and len(each) == 1 for each in found) and "." not in key:
            return [each[0] for each in found if each]
    return None


def _plain(what: str, value: Any) -> Any:
    """Returns an option or attribute that can travel."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list) and all(isinstance(each, _PLAIN) for each in value):
        return list(value)
    raise NotOnServersError(f"its {what} is a {type(value).__name__}")


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of an optimizer, without the ones that all optimizers have.

    Raises:
        NotOnServersError: one is no plain value.
    """
    own = _own_attributes(optimizer)
    return {key: _plain(f"attribute {key!r}", value) for key, value in own.items()}


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in OF_ALL and not key.startswith("_optimizer_")
    }


def has_other_attributes(optimizer: torch.optim.Optimizer, described: Mapping[str, Any]) -> bool:
    """Tells whether attributes changed that a class may look at; torch's own look at none."""
    if is_permitted(plain_class_of(optimizer).__module__, ()):
        return False
    try:
        return repr(sorted(attributes_of(optimizer).items())) != repr(sorted(described.items()))
    except NotOnServersError:
        return True


def plain_class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the user's class, also of a distributed optimizer."""
    cls = type(optimizer)
    found: type[torch.optim.Optimizer] = getattr(cls, "_plain_class", cls)
    return found


def _check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Raises NotOnServersError if a class may look at a parameter's attributes."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if odd := vars(parameter).keys() - _HARMLESS:
                raise NotOnServersError(
                    f"a parameter has the attribute {min(odd)!r}, which its step() may look at"
                )


def ignored_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Returns the options that ask for another way of computing, which servers do not have."""
    names = ("capturable", "differentiable")
    groups = optimizer.param_groups
    return [name for name in names if any(group.get(name) for group in groups)]


def describe(
    optimizer: torch.optim.Optimizer,
    kinds: Iterable[ParameterKind],
    permitted: Collection[str] | None,
    lazy_rows: bool = False,
) -> str:
    """Returns the text by which an optimizer travels; `kernel_of` makes its arithmetic.

    Args:
        optimizer: whose step() is described.
        kinds: of its trained parameters.
        permitted: modules that servers may import besides torch.optim; None: the optimizer runs in
            this process, where its class is already.
        lazy_rows: as of `fused_path_of`.

    Raises:
        NotOnServersError: servers cannot run it.
        UnavailableError: of torch.optim's Adam, the groups contradict each other.
    """
    cls = plain_class_of(optimizer)
    if path := fused_path_of(optimizer, cls, lazy_rows):
        return path
    name = _importable_name(cls, permitted)
    options, hyper = options_of(optimizer)
    if not is_permitted(cls.__module__, ()):
        _check_parameters(optimizer)
    attributes = attributes_of(optimizer)
    groups = tuple(GroupOptions(json.loads(each), ()) for each in options.constants)
    spec = OptimizerSpec(
        name, "elementwise", dict(options.numbers), (), {}, groups, attributes,
        default_dtype=options.default_dtype,
    )  # fmt: skip
    # Groups with equal options differ in nothing that a trial could find.
    alike: dict[tuple[object, ...], int] = {}
    stands_for = [
        alike.setdefault(key, group)
        for group, key in enumerate(zip(options.constants, options.nonzero, strict=True))
    ]
    tried = {kind._replace(group=stands_for[kind.group]) for kind in kinds}
    return Trial(optimizer, cls, spec, hyper, tried).find(stands_for).to_text()


def alike(text: str, other: str) -> bool:
    """Tells whether a description serves for another one: a rate of 1 may become one of 0.5."""
    if text == other or not (text.startswith("{") and other.startswith("{")):
        return text == other
    forms = []
    for each in (text, other):
        raw = json.loads(each)
        raw["numbers"] = {name: kind == "bool" for name, kind in raw["numbers"].items()}
        forms.append(raw)
    return bool(forms[0] == forms[1])


def _importable_name(cls: type, permitted: Collection[str] | None) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if permitted is None:
        return name
    if cls.__module__ == "__main__" or "<locals>" in name:
        raise NotOnServersError("its class is defined in the script, which servers do not run")
    if not is_permitted(cls.__module__, permitted):
        top = cls.__module__.partition(".")[0]
        raise NotOnServersError(
            f"servers import its module only if they are told to: tensorwire run --import {top}"
        )
    if class_of(name, permitted) is not cls:
        raise NotOnServersError(f"{name!r} names another class")
    return name
