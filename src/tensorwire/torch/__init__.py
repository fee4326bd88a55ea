"""Training with PyTorch on a tensorwire job: `import tensorwire.torch as tw`.

The same script runs alone, under `tensorwire run`, torchrun, Slurm, MPI and other launchers.
docs/training.md is the guide.
"""

from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    from tensorwire.errors import UnavailableError

    raise UnavailableError(
        "tensorwire.torch needs PyTorch 2.13 or newer: pip install 'tensorwire[torch]'"
    ) from _error

from tensorwire import _core

from .allocator.gradient_slots import PlacementWarning
from .explanation import Explanation, explain_model, explain_optimizer
from .group import Machines, connect, machine_name, machines
from .job import Job
from .joining import current_job, init
from .loader import Loader
from .optimizer import DistributedOptimizer, clip_grad_norm_, edit
from .replica.same_batches import SameBatchesWarning
from .replica.sample_count import UnevenStepWarning
from .scaler import GradScaler

if TYPE_CHECKING:
    from .pipeline.pipeline import Split, split

# Tensors over our memory may outlive the interpreter, in torch's own globals.
_core.expect_leaks()

__all__ = [
    "DistributedOptimizer",
    "Explanation",
    "GradScaler",
    "Job",
    "Loader",
    "Machines",
    "PlacementWarning",
    "SameBatchesWarning",
    "Split",
    "UnevenStepWarning",
    "clip_grad_norm_",
    "connect",
    "current_job",
    "edit",
    "explain_model",
    "explain_optimizer",
    "init",
    "machine_name",
    "machines",
    "split",
]


def __getattr__(name: str) -> Any:
    if name in ("Split", "split"):  # when asked for: what it needs of torch takes a second to load
        from .pipeline import pipeline as splitting

        return getattr(splitting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
