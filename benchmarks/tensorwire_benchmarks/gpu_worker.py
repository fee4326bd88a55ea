"""One process of `bench gpu-training`: trains workloads on the GPU and writes its times.

`python -m tensorwire_benchmarks.gpu_worker SYSTEM FOLDER NAME:BATCH:STEPS …`, where SYSTEM is
alone (one process, torch's own optimizer), ddp (torch.distributed with gloo) or tensorwire. If the
first NAME is `deterministic`, only kernels that give the same bits in each run are used.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorwire_benchmarks.systems.base import make_optimizer
from tensorwire_benchmarks.workloads.catalog import Workload, workload

_WARM_UP = 5


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_to(each, device) for each in value)
    if isinstance(value, dict):
        return {name: _to(each, device) for name, each in value.items()}
    return value.to(device)


def _trainer(
    torch: Any, system: str, what: Workload, module: Any, rank: int
) -> tuple[Any, Any, Callable[[], None]]:
    """Returns module and optimizer of the system, and a function that ends them."""
    name = what.optimizer or "adamw"
    has_sparse = any(getattr(each, "sparse", False) for each in module.modules())
    if system == "tensorwire":
        tw = importlib.import_module("tensorwire.torch")
        made = make_optimizer(torch, name, module.parameters(), 1e-4, fused=not has_sparse)
        optimizer = tw.DistributedOptimizer(made, module)
        return module, optimizer, optimizer.close
    if system == "ddp":
        parallel = importlib.import_module("torch.nn.parallel")
        module = parallel.DistributedDataParallel(
            module, gradient_as_bucket_view=not has_sparse, static_graph=not has_sparse
        )
    optimizer = make_optimizer(torch, name, module.parameters(), 1e-4, fused=not has_sparse)
    return module, optimizer, lambda: None


def _pool_by_products(torch: Any, module: Any) -> None:
    """Replaces `nn.AdaptiveAvgPool2d`, which adds up in any order, by products of matrices."""

    def means(inputs: int, outputs: int) -> Any:
        made = torch.zeros(outputs, inputs)
        for i in range(outputs):
            start, stop = i * inputs // outputs, -(-(i + 1) * inputs // outputs)
            made[i, start:stop] = 1 / (stop - start)
        return made

    def forward(size: int, images: Any) -> Any:
        height, width = (means(each, size).to(images) for each in images.shape[-2:])
        return height @ images @ width.T

    for each in module.modules():
        if isinstance(each, torch.nn.AdaptiveAvgPool2d):
            each.forward = partial(forward, each.output_size)


def _values(module: Any) -> dict[str, Any]:
    """Returns a digest of all parameters, and some fifty values of each."""
    digest, some = hashlib.sha256(), []
    for parameter in module.parameters():
        flat = parameter.detach().cpu().contiguous().flatten()
        digest.update(flat.numpy().tobytes())
        some += flat[:: max(1, flat.numel() // 50)].tolist()
    return {"digest": digest.hexdigest(), "values": some}


def measure(torch: Any, system: str, what: Workload, rank: int) -> dict[str, Any]:
    """Trains; returns the seconds of each step up to the end of GPU work, and the values."""
    device = torch.device("cuda", 0)
    module = what.build(torch).to(device)
    if torch.are_deterministic_algorithms_enabled():
        _pool_by_products(torch, module)
    batches = [_to(each, device) for each in what.batches(torch, rank)]
    loss_of = what.loss(torch)
    module, optimizer, end = _trainer(torch, system, what, module, rank)
    seconds = []
    for step in range(what.steps + _WARM_UP):
        inputs, labels = batches[step % len(batches)]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss_of(module(inputs), labels).backward()
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    values = _values(module)
    end()
    return {"seconds": seconds[_WARM_UP:], **values}


def main(system: str, folder: str, *names: str) -> None:
    """Trains each workload, and writes its seconds and values to FOLDER/SYSTEM-RANK.json."""
    torch = importlib.import_module("torch")
    if names[0] == "deterministic":
        names = names[1:]
        torch.use_deterministic_algorithms(True)
    rank, job = int(os.environ.get("TENSORWIRE_RANK", os.environ.get("RANK", "0"))), None
    if system == "ddp":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
        )
    elif system == "tensorwire":
        job = importlib.import_module("tensorwire.torch").init(seed=1)
    found = {}
    for name in names:
        which, batch, steps = name.split(":")
        what = replace(workload(which), batch=int(batch), steps=int(steps))
        found[which] = measure(torch, system, what, rank)
        torch.cuda.empty_cache()
        Path(folder, f"{system}-{rank}.json").write_text(json.dumps(found))
    if job is not None:
        job.close()
    if system == "ddp":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
