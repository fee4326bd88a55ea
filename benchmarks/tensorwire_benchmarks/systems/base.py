"""What a system is to a worker: how it wraps a model, and how it exchanges after backward.

A worker's loop is the same for every system (`training.worker`); a Trainer adds what its
users would write around it. Trainers run in a worker process, one each, with torch imported.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
PLAIN_SGD = "plain-sgd"
ADAGRAD = "adagrad"


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """Where a Trainer finds itself.

    Attributes:
        torch: the module.
        rank, workers: this worker and how many there are.
        optimizer: "sgd" (with momentum), "plain-sgd" (without), "adamw" or "adagrad".
        folder: a directory of this team, for sockets and rendezvous.
        server: the address that the system's server gave; "" without one.
        barrier: returns when all workers have called it.
        learning_rate: of the optimizer.
    """

    torch: Any
    rank: int
    workers: int
    optimizer: str
    folder: str
    server: str
    barrier: Callable[[], None]
    learning_rate: float = LEARNING_RATE


class Trainer(ABC):
    """One worker's part of a system.

    Attributes:
        module: what forward is called on.
        note: how the system is tuned, for the note of its rows.
        tuned: what `tune` has found, for `use`.
    """

    module: Any
    note: str = ""
    tuned: Any = None

    @abstractmethod
    def exchange(self) -> None:
        """After backward: returns when this worker may read the updated parameters."""

    def zero_grad(self) -> None:
        """Clears the gradients, as the system's users would."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Around backward: nothing leaves inside, so that `exchange` does all of it.

        Raises:
            NotImplementedError: the system cannot (`System.holds`).
        """
        raise NotImplementedError("this system exchanges during backward")

    def tune(self, run: Callable[[int], float]) -> None:
        """Looks for the best settings; all workers call it together.

        `run` runs that many steps on all workers and returns the median seconds that one took this
        worker.
        """
        del run

    def use(self, tuned: Any) -> None:
        """Takes the settings that `tune` found for the same model; all workers call it together."""
        del tuned

    def settle(self) -> None:  # noqa: B027 (most are there anyway)
        """After the last step of all workers: returns when the module has what they have made."""

    def hidden_s(self) -> float:
        """Since the start, for how long gradients were on their way while backward went on."""
        return 0.0

    def in_place(self) -> float | None:
        """The share of gradient bytes that the last step produced in place, if it has places."""
        return None

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Ends the worker's part; the process ends right after it."""


class Computation(Trainer):
    """A worker that only computes: forward and backward as beside any system, and then nothing.

    What a step of another system takes longer is its communication. Parameters stay as they are.
    """

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        del place
        self.module = module

    def exchange(self) -> None:
        pass


class Plain(Computation):
    """A worker that trains by itself: the optimizer of torch, and no exchange."""

    def __init__(self, place: TrainerPlace, module: Any) -> None:
        super().__init__(place, module)
        self._optimizer = make_optimizer(
            place.torch, place.optimizer, module.parameters(), place.learning_rate, fused=False
        )

    def exchange(self) -> None:
        self._optimizer.step()


def make_optimizer(
    torch: Any, name: str, parameters: Any, learning_rate: float = LEARNING_RATE, *, fused: bool
) -> Any:
    """The optimizer of torch itself, with the same constants for every system.

    Of these "plain-sgd", where it is not fused, and "adagrad" take sparse gradients.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=fused)
    if name == ADAGRAD:  # the fused one takes no sparse gradients
        return torch.optim.Adagrad(parameters, lr=learning_rate, foreach=False)
    momentum = {"sgd": MOMENTUM, PLAIN_SGD: 0.0}.get(name)
    if momentum is None:
        raise ValueError(f"no optimizer {name!r}; known: sgd, {PLAIN_SGD}, adamw, {ADAGRAD}")
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, fused=fused)
