"""Compares a server's work per MiB with torch's own step, for every optimizer.

Both step the same bytes in this process with one thread, in turns: a server's shard of 1 MiB cells
with one slice's gradients, and the class in plain torch on tensors of 1 MiB (`foreach=False`, or
fused where servers use the fused kernel). A time is for all bytes. The limit is torch's step.

Not measured: the exchange of gradients and parameters, which is the same for every optimizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorwire.bench.harness import time_each
from tensorwire.bench.measuring import add_rows, take_turns
from tensorwire.bench.rows import Report, Verdict
from tensorwire.bench.verdicts import Bar

CASES = (
    "SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "Rprop", "Adadelta",
    "ASGD", "Muon", "Adafactor",
)  # fmt: skip
OWN, TORCH = "tensorwire", "torch"
BAR = 0.8
_FUSED = ("SGD", "Adam", "AdamW")
_SHAPE = 512, 512  # 1 MiB
_OPTIONS = {"SGD": {"lr": 1e-3, "momentum": 0.9}}


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What to measure.

    Attributes:
        cases: classes of torch.optim.
        tensors: the number of tensors of 1 MiB.
        pairs: steps of each way.
    """

    cases: Sequence[str] = CASES
    tensors: int = 16
    pairs: int = 40


def measure(report: Report, settings: OptimizerSettings, tell: Callable[[str], None]) -> None:
    """Adds a row for the server's work and one for torch's own step of each class."""
    torch: Any = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in settings.cases:
            tell(name)
            _measure_one(torch, report, name, settings)
    finally:
        torch.set_num_threads(threads)


def judge(report: Report, cases: Sequence[str]) -> list[Verdict]:
    """Judges whether a server's work takes at most 1.25 times as long as torch's own step."""
    return [
        Bar(f"{name}: work per MiB beside torch's own step", ">=", BAR, "x", name, OWN).judge(
            report
        )
        for name in cases
    ]


def _measure_one(torch: Any, report: Report, name: str, settings: OptimizerSettings) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(_SHAPE) * 0.01 for _ in range(settings.tensors)]
    plain = _plain(torch, name, settings.tensors)
    for parameter, gradient in zip(plain.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient
    own = _server_step(torch, name, plain, gradients)
    ways = {OWN: lambda: time_each(own, 1)[0], TORCH: lambda: time_each(plain.step, 1)[0]}
    note = "one thread; fused kernel" if name in _FUSED else "one thread; the class's own step()"
    samples = take_turns(ways, settings.pairs, warm=2)  # state is made, and memory touched
    notes = dict.fromkeys(ways, note)
    add_rows(report, name, settings.tensors << 20, samples, notes, limit=TORCH, moves=True)


def _plain(torch: Any, name: str, tensors: int) -> Any:
    parameters = [torch.nn.Parameter(torch.randn(_SHAPE)) for _ in range(tensors)]
    cls = getattr(torch.optim, name)
    made = cls(parameters, **_OPTIONS.get(name, {}))
    group = made.param_groups[0]
    if name in _FUSED:
        group["fused"] = True
    elif "foreach" in group:
        group["foreach"] = False
    return made


def _server_step(
    torch: Any, name: str, plain: Any, gradients: Sequence[Any]
) -> Callable[[], object]:
    """Returns a function that makes a step of a server, with the gradients of one slice."""
    parameters: Any = importlib.import_module("tensorwire.parameters")
    kernels: Any = importlib.import_module("tensorwire.torch.kernels")
    kind = kernels.ParameterKind(0, torch.float32, 2, False)
    kernel = kernels.kernel_of(kernels.describe(plain, [kind], ()))
    whole = getattr(getattr(kernel, "spec", None), "method", "") == "whole"
    tensors = tuple(
        parameters.TensorSpec(f"{i}", "float32", _SHAPE, "whole" if whole else "trained")
        for i in range(len(gradients))
    )
    spec = parameters.Spec(name, kernel.hyper, 1, 1, tensors, 1, kernel.scalars)
    store = parameters.LocalStore(spec, kernel)
    slot = store.slot(0)
    for place, gradient in zip(store.layout.places, gradients, strict=True):
        slot[place.start : place.end] = gradient.view(-1).view(torch.uint8).numpy()
    hyper, present = kernel.hyper_of(plain), bytes([parameters.PUSHED]) * len(tensors)

    def step() -> None:
        head = store.version + 1, parameters.APPLY, 0, 1.0, float("inf"), 1.0
        store.commit(0, parameters.Commit(*head, hyper, present))
        store.wait()

    return step
