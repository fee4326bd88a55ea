"""Entry point of a server process, `python -m tensorwire.torch.server`: launchers start it.

It runs no user code except the modules that the launcher was told to import for optimizers: the
kernels are torch's, the rest is `tensorwire.parameters`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.optim  # now: a standby that takes a server's place must not wait for it

from tensorwire.parameters import Kernel, serve

from .kernels import OwnStepKernel, import_all, kernel_of, permitted_imports


def main(arguments: list[str] | None = None) -> int:
    """Serves one job; returns the exit code, 0 when all workers have left in good order."""
    # A collection would look through all of torch's modules, a tenth of a second each time.
    gc.freeze()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    # Else torch warns at steps with sparse gradients that these checks are neither on nor off.
    torch.sparse.check_sparse_tensor_invariants.disable()
    return serve(arguments, "tensorwire.torch.server", _make_kernels)


def _make_kernels(options: argparse.Namespace) -> Callable[[str], Kernel]:
    imports = permitted_imports()
    if imports and options.import_from:
        sys.path.append(options.import_from)
    import_all(imports)
    return partial(_make_kernel, imports)


def _make_kernel(imports: tuple[str, ...], text: str) -> Kernel:
    kernel = kernel_of(text, imports)
    if isinstance(kernel, OwnStepKernel):
        torch.set_default_dtype(getattr(torch, kernel.spec.default_dtype))  # as in the workers
    return kernel


if __name__ == "__main__":
    sys.exit(main())
