"""A worker of `scaling.py`, without torch: it sleeps where a recorded step computed.

Each gradient is pushed at the moment at which the recorded backward had made it. It reads a line
of JSON, and prints one with the seconds of its steps.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.parameters import (
    APPLY,
    PUBLISH,
    PUSHED,
    Commit,
    Mode,
    OwnPaceStore,
    RemoteStore,
    Spec,
    TensorSpec,
)
from tensorwire_benchmarks.scaling_raw import replay


def main() -> None:
    """Trains so many steps of one job."""
    plan = json.loads(sys.stdin.readline())
    world = World.from_environment()
    assert world is not None
    member = WorkerMember.join(world)
    tensors = tuple(
        TensorSpec(name, "float32", tuple(shape), "trained", 0) for name, shape in plan["tensors"]
    )
    spec = Spec(
        plan["optimizer"], tuple(plan["hyper_names"]), 1, world.slices, tensors, 1,
        tuple(plan["scalars"]),
    )  # fmt: skip
    if plan["mode"] == "sync":
        store = RemoteStore(member, 0, spec)
    else:
        store = OwnPaceStore(member, 0, spec, Mode(plan["mode"]))
    random = np.random.default_rng(world.rank)
    gradients = [
        random.standard_normal(each.elements).astype(np.float32).view(np.uint8) for each in tensors
    ]
    (mine,) = world.my_slices
    hyper = (tuple(plan["hyper"]),)
    all_pushed = bytes([PUSHED]) * len(tensors)

    def advance(operation: int, present: bytes) -> None:
        version = store.version + 1
        store.commit(mine, Commit(version, operation, 0, 1.0, float("inf"), 1.0, hyper, present))
        store.wait()

    if mine == 0:
        for tensor, values in enumerate(gradients):
            store.push(0, tensor, values)
    advance(PUBLISH, all_pushed if mine == 0 else bytes(len(tensors)))
    seconds, cpu_s = replay(
        plan,
        lambda tensor: store.push(mine, tensor, gradients[tensor]),
        lambda: advance(APPLY, all_pushed),
    )
    store.release()
    member.close()
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
