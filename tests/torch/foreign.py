"""Optimizers that torch does not have, as people write them; servers import it where they may."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Parameters = Any


class Lion(Optimizer):
    """Steps by the sign of what it has averaged: element by element."""

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            near, far = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["mean"] * near + p.grad * (1 - near)).sign(), alpha=-group["lr"])
                state["mean"].mul_(far).add_(p.grad, alpha=1 - far)


class Unchanged(torch.optim.Adam):
    """An optimizer like Adam, with other defaults."""

    def __init__(self, params: Parameters, lr: float = 0.02) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.9))


class Doubled(torch.optim.Adam):
    """An optimizer like Adam on twice the gradient, which the step changes in place."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(2)
        return super().step(closure)


class Trust(Optimizer):
    """An optimizer like LAMB: a tensor's step is as long as the tensor, which must be whole."""

    def __init__(self, params: Parameters, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"], state["mean"] = 0, torch.zeros_like(p)
                state["count"] += 1
                mean = state["mean"].lerp_(p.grad, 1 - group["beta"])
                update = mean / (1 - group["beta"] ** state["count"])
                longer = p.norm() / update.norm().clamp(min=1e-6)
                p.add_(update * longer.clamp(max=10), alpha=-group["lr"])


class Bare(Optimizer):
    """Steps by the gradient; what others make more of."""

    def __init__(self, params: Parameters, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class Replacing(Bare):
    """Gives a parameter other memory in every step."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * p.grad


class Growing(Bare):
    """Keeps one more array with every step."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(p, group)
        state = self.state[p]
        state[f"gradient {len(state)}"] = p.grad.clone()


class InFloat64(Bare):
    """Keeps its mean in float64."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float64))
        mean.mul_(0.9).add_(p.grad)
        p.add_(mean.to(p.dtype), alpha=-group["lr"])


class Noisy(Bare):
    """Adds noise to the gradient."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad + torch.randn_like(p), alpha=-group["lr"])


class FirstRate(Bare):
    """Steps all groups with the rate of the first."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(p, self.param_groups[0])


class ClippedTogether(Bare):
    """Scales all gradients by the norm of all of them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, 0.01)
        super().step()


class CountingInGroup(Bare):
    """Counts its steps in the group, and steps less and less far."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
        super().step()

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.mul_(0.5).add_(p.grad)
        p.add_(mean, alpha=-group["lr"] / group["k"])


class CountingItself(Bare):
    """Counts its steps in an attribute, and steps less and less far."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.made = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made += 1
        super().step()

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] / self.made)


class FromDefaults(Bare):
    """Steps with the rate that it was made with, whatever the group's is."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        super().update(p, self.defaults)


class Failing(Bare):
    """Raises in its 15th step."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 15:
            raise ArithmeticError("fifteen is too much")
        super().update(p, group)


class LaterState(Bare):
    """Keeps an array more from its 20th step on."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 20:
            state["late"] = torch.zeros_like(p)
        super().update(p, group)


class LaterOtherwise(Bare):
    """From its 20th step on it steps half as far."""

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        p.add_(p.grad, alpha=-group["lr"] / (1 if state["count"] < 20 else 2))


class WithFunction(Bare):
    """Has an attribute that is no plain value."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.shape_of = lambda rate: rate / 2

    def update(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-self.shape_of(group["lr"]))


class NeedsClosure(Bare):
    """Evaluates the model by itself."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class ScheduleFree(Bare):
    """Has other parameters for training and for evaluation."""

    def train(self) -> None:
        """Would change parameters."""

    def eval(self) -> None:
        """Would change parameters."""
