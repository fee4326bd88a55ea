"""Runs one stage of a split model: forward and backward of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge

from .capture import StageGraph, Value
from .split_backward import Cut, Later, inputs_first, own, storages, take_own


class Stage:
    """One stage in this process.

    Args:
        index: its number.
        part: what it computes.
        values: all that cross, by name.
        own: the module that holds the parameters and buffers of this process.

    Attributes:
        index: its number.
        inputs: names of what it uses.
        outputs: names of what it makes for other stages.
    """

    def __init__(
        self, index: int, part: StageGraph, values: Mapping[str, Value], own: nn.Module
    ) -> None:
        self.index = index
        self.inputs = tuple(part.inputs)
        self.outputs = tuple(part.outputs)
        self._values = values
        # In the first stage the inputs are the model's, and also values if others use them.
        self._received = self.inputs if index else ()
        self._module = fx.GraphModule(own, part.graph)
        self._kept: dict[int, tuple[dict[str, Any], list[Any]]] = {}
        self._cuts: dict[int, Cut] = {}
        self._later: dict[int, tuple[Later, set[int], set[int]]] = {}

    def forward(
        self, microbatch: int, inputs: Mapping[str, Any], keep: bool, parts: bool = False
    ) -> tuple[dict[str, Any], list[Any]]:
        """Runs a micro-batch.

        Args:
            microbatch: its number.
            inputs: by name; tensors are used where they are.
            keep: for `backward`.
            parts: for `backward_inputs` instead.

        Returns:
            What others use, by name, and in the last stage the model's outputs.
        """
        leaves = dict(inputs)
        for name in self._received:
            if keep and self._values[name].needs_grad:
                leaves[name] = inputs[name].detach().requires_grad_()
        with torch.set_grad_enabled(keep):
            results = self._module(*(leaves[name] for name in self.inputs))
        made = list(results[: len(self.outputs)])
        if keep:
            for name, value in zip(self.outputs, made, strict=True):
                self._check_gradient(name, value)
            self._kept[microbatch] = leaves, made
        returned = list(results[len(made) :])
        if keep and parts and returned:
            cut = self._cuts[microbatch] = Cut()
            returned = cut.through(returned)
        return dict(zip(self.outputs, made, strict=True)), returned

    def _check_gradient(self, name: str, value: Any) -> None:
        """Checks that a value which needs a gradient was planned so; else nothing would train."""
        if getattr(value, "requires_grad", False) and not self._values[name].needs_grad:
            raise RuntimeError(
                f"{name!r}, which stage {self.index} makes for others, needs a gradient, and did "
                "not when the model was split: were its parameters frozen then? Call tw.split() "
                "again"
            )

    def backward(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], loss: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Adds to the gradients of parameters.

        Args:
            microbatch: as in `forward`.
            gradients: of what others use, by name. Nothing keeps their memory, or the inputs',
                afterwards.
            loss: in the last stage.

        Returns:
            The gradient of every input that needs one, by name; zeros where nothing depends on it.
        """
        leaves, roots, seeds = self._begin(microbatch, gradients, loss)
        if roots:
            torch.autograd.backward(roots, seeds)
        lent = self._lent(leaves, gradients)
        leaving = self._leaving(leaves)
        take_own(self._module.parameters(), lent | leaving)
        return self._back(leaves, lent)

    def backward_inputs(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], loss: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Runs the part of `backward` for the inputs; `backward_weights` is the rest.

        Args:
            microbatch: as in `backward`.
            gradients: as there, but their memory and the inputs' is used until the rest.
            loss: as there.

        Returns:
            As `backward`.
        """
        cut = self._cuts.pop(microbatch, None)
        found = None
        if cut is not None and loss is not None and loss.requires_grad:
            found = cut.backward(loss)
        of_loss: list[torch.Tensor] = []
        leaves, roots, seeds = self._begin(microbatch, gradients, None if found else loss)
        if found is not None:
            of_outputs, their_seeds, of_loss = found
            roots, seeds = [*roots, *of_outputs], [*seeds, *their_seeds]
        needed = [leaves[name] for name in self._received if self._values[name].needs_grad]
        later = inputs_first(roots, seeds, needed)
        lent = self._lent(leaves, gradients)
        leaving = self._leaving(leaves)
        take_own([*of_loss, *later.done], lent | leaving)
        self._later[microbatch] = later, storages(self._tensors(leaves)), lent | leaving
        return self._back(leaves, lent)

    def backward_weights(self, microbatch: int) -> None:
        """Adds the rest of `backward_inputs` to the gradients of parameters.

        Nothing keeps the memory of gradients and inputs afterwards.
        """
        later, received, others = self._later.pop(microbatch)
        for piece in later.rest():
            # Gradients that it does not keep may be freed, and their addresses used anew.
            take_own(piece.leaves, received | others & storages(piece.kept()))

    def _begin(
        self, microbatch: int, gradients: Mapping[str, torch.Tensor], loss: torch.Tensor | None
    ) -> tuple[dict[str, Any], list[torch.Tensor | GradientEdge], list[torch.Tensor | None]]:
        """Returns the leaves of a micro-batch, the roots of its backward, and their gradients."""
        leaves, made = self._kept.pop(microbatch)
        roots: list[torch.Tensor | GradientEdge] = []
        seeds: list[torch.Tensor | None] = []
        for name, tensor in zip(self.outputs, made, strict=True):
            if name in gradients and tensor.requires_grad:
                roots.append(tensor)
                seeds.append(gradients[name])
        if loss is not None and loss.requires_grad:
            roots.append(loss)
            seeds.append(None)
        return leaves, roots, seeds

    def _tensors(self, leaves: Mapping[str, Any]) -> list[torch.Tensor]:
        received = [leaves[name] for name in self._received]
        return [each for each in received if isinstance(each, torch.Tensor)]

    def _lent(self, leaves: Mapping[str, Any], gradients: Mapping[str, torch.Tensor]) -> set[int]:
        """Returns memory that others use again."""
        return storages([*gradients.values(), *self._tensors(leaves)])

    def _leaving(self, leaves: Mapping[str, Any]) -> set[int]:
        """Returns memory of gradients that leave, which the next micro-batch must not change."""
        found = [each.grad for each in self._tensors(leaves)]
        return storages([each for each in found if each is not None])

    def _back(self, leaves: Mapping[str, Any], lent: set[int]) -> dict[str, torch.Tensor]:
        back = {}
        for name in self._received:
            if self._values[name].needs_grad:
                grad = leaves[name].grad
                back[name] = torch.zeros_like(leaves[name]) if grad is None else own(grad, lent)
        return back

    def forget(self) -> None:
        """Drops all that was kept for `backward`, after a failure."""
        self._kept.clear()
        self._cuts.clear()
        self._later.clear()
