"""One process of a program that saves or loads a sharded checkpoint by torch's own functions.

Arguments: save or load, the checkpoint's address, rank, number of processes, a file that they meet
at, a seed.
"""

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

verb, address, rank, world, meeting, seed = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(world)
)
mesh = init_device_mesh("cpu", (int(world),))


def state(fill: bool) -> dict[str, Any]:
    torch.manual_seed(int(seed))
    made: dict[str, Any] = {}
    for name, shape in {"a": (1003, 700), "b": (16, 3)}.items():
        full = torch.randn(shape) if fill else torch.zeros(shape)
        made[name] = distribute_tensor(full, mesh, [Shard(0)])
    made["step"] = int(seed) if fill else 0
    return made


if verb == "save":
    dcp.save(state(True), checkpoint_id=address)
elif verb == "die":  # behind its own part, before the checkpoint is complete
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    def die(self: FsspecWriter, *_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    FsspecWriter.finish = die  # type: ignore[method-assign]
    dcp.save(state(True), checkpoint_id=address)
else:
    found, wanted = state(False), state(True)
    dcp.load(found, checkpoint_id=address)
    for name in ("a", "b"):
        assert torch.equal(found[name].full_tensor(), wanted[name].full_tensor()), name
    assert found["step"] == wanted["step"]
dist.destroy_process_group()
