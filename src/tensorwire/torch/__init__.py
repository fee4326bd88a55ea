"""Training with PyTorch on a tensorwire job: `import tensorwire.torch as tw`.

The same script runs alone, under `tensorwire run` and under torchrun.
docs/training.md is the guide.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    from tensorwire.errors import UnavailableError

    raise UnavailableError(
        "tensorwire.torch needs PyTorch 2.13 or newer: pip install 'tensorwire[torch]'"
    ) from _error

from tensorwire import _core

from .explanation import Explanation, explain_model, explain_optimizer
from .job import Job, init
from .loader import Loader
from .optimizer import DistributedOptimizer, clip_grad_norm_, edit
from .placing import PlacementWarning
from .scaler import GradScaler

# Tensors over our memory may outlive the interpreter, in torch's own globals.
_core.expect_leaks()

__all__ = [
    "DistributedOptimizer",
    "Explanation",
    "GradScaler",
    "Job",
    "Loader",
    "PlacementWarning",
    "clip_grad_norm_",
    "edit",
    "explain_model",
    "explain_optimizer",
    "init",
]
