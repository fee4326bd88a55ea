"""Declares the tensors of an optimizer's store, or names a tensor that cannot be in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from tensorwire.errors import UnavailableError
from tensorwire.parameters import ITEM_BYTES, TensorSpec

from ..devices import KINDS
from ..views import memory_format_of


class Holder(Protocol):
    """Another optimizer's replica of the same model."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Tells whether the replica has a parameter in its store."""

    def release(self, parameter: nn.Parameter) -> None:
        """Gives up a parameter that does not change with this replica."""


class Declared(NamedTuple):
    """One parameter of the whole model; `like` is on meta."""

    name: str
    like: torch.Tensor
    kind: str
    group: int


class Declaration(NamedTuple):
    """The declaration of a replica to the servers, in the order of the store.

    Attributes:
        tensors: the parameters as the servers know them.
        parameters: the same here; on meta where another process has one.
    """

    tensors: list[TensorSpec]
    parameters: list[torch.Tensor]


def declare_all(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Sequence[Holder],
) -> Declaration:
    """Returns every parameter of the model, the optimizer's first.

    Args:
        model: of the optimizer.
        optimizer: whose groups are trained.
        others: of other optimizers, which give up what does not change with them.

    Raises:
        ValueError: a parameter that is not the model's, or cannot be distributed.
        UnavailableError: it is on another device.
    """
    named = list(model.named_parameters())
    names = {id(parameter): name for name, parameter in named}
    tables = tables_of(model)
    tensors, parameters = [], []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            _check_known(names, parameter, index)
            for other in others:
                other.release(parameter)
            kind = "trained" if parameter.requires_grad else "constant"
            if parameter.requires_grad and id(parameter) in tables and parameter.numel():
                kind = "rows"
                if not parameter.is_contiguous():
                    raise ValueError(
                        f"parameter {names[id(parameter)]!r} is a table with sparse gradients and "
                        f"has strides {parameter.stride()}; make it contiguous first"
                    )
            _check_device(names[id(parameter)], parameter)
            tensors.append(_declare(names[id(parameter)], parameter, kind, index))
            parameters.append(parameter)
    seen = {id(parameter) for parameter in parameters}
    for name, parameter in named:
        if id(parameter) not in seen and not any(other.holds(parameter) for other in others):
            _check_device(name, parameter)
            tensors.append(_declare(name, parameter, "constant", 0))
            parameters.append(parameter)
    return Declaration(tensors, parameters)


def declare_whole(
    own: Mapping[str, nn.Parameter], agreed: Sequence[Declared], optimizer: torch.optim.Optimizer
) -> Declaration:
    """Returns every parameter of a model that processes share.

    Args:
        own: this process's parameters, by name.
        agreed: all parameters, in the model's order.
        optimizer: of this process's parameters.

    Raises:
        As `declare_all`.
    """
    names = {id(parameter): name for name, parameter in own.items()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            _check_known(names, parameter, index)
    tensors, parameters = [], []
    for name, like, kind, group in agreed:
        tensors.append(_declare(name, like, kind, group))
        parameters.append(own.get(name, like))
        if name in own and own[name].device.type != "cpu":
            raise UnavailableError(
                f"parameter {name!r} is on {own[name].device}; a model that is split over "
                "processes can only be on the CPU so far"
            )
    return Declaration(tensors, parameters)


def tables_of(model: nn.Module) -> set[int]:
    """Returns the `id` of each parameter that gets sparse gradients: tables that nothing else uses.

    A table that something else uses too gets a dense gradient.
    """
    found: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for name, parameter in module._parameters.items():
            (found if is_table and name == "weight" else others).add(id(parameter))
    return found - others


def _check_known(names: dict[int, str], parameter: torch.Tensor, group: int) -> None:
    if id(parameter) not in names:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} in group {group} of the optimizer "
            "is not the model's; give the model that has all of them"
        )


def _check_device(name: str, parameter: torch.Tensor) -> None:
    if parameter.device.type not in KINDS:
        raise UnavailableError(
            f"parameter {name!r} is on {parameter.device}; only parameters on the CPU and on CUDA "
            "devices can be distributed"
        )


def _declare(name: str, parameter: torch.Tensor, kind: str, group: int) -> TensorSpec:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES and kind not in ("trained", "rows"):  # frozen: travels as bytes
        if parameter.is_conj() or parameter.is_neg():
            raise ValueError(f"parameter {name!r} is a conjugated view: give it resolve_conj()")
        strides = memory_format_of(parameter)  # a worker with another order must not agree
        name = f"{name} of {dtype} {tuple(parameter.shape)}, strides {strides}"
        return TensorSpec(name, "uint8", (parameter.nbytes,), kind, group)
    if dtype not in ITEM_BYTES or (
        kind in ("trained", "rows") and not parameter.is_floating_point()
    ):
        raise ValueError(
            f"parameter {name!r} is {dtype}; float32, float64, bfloat16 and float16 can be "
            "distributed"
        )
    order: tuple[int, ...] = ()
    if not parameter.is_contiguous():
        strides = memory_format_of(parameter)
        name = f"{name}, strides {strides}"  # a worker with another order must not agree
        order = tuple(sorted(range(parameter.dim()), key=lambda i: (-strides[i], i)))
    return TensorSpec(name, dtype, tuple(parameter.shape), kind, group, order)
