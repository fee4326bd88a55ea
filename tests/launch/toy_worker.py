"""A worker without torch that uses all that servers do; prints a digest of what came out of it.

It makes a store, versions with and without a norm, a reduction that is applied later, an edit of
parameters, sums with others, a snapshot of a version that is read when there are later ones, and a
second store after the first was freed. Into TOY_FOLDER, if there is one, it writes what
benchmarks/tensorwire_benchmarks/faults_judge.py reads. Before its last four steps, or before the
step TOY_GATE_STEP, it waits for TOY_GATE, a file.
"""

import hashlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np

from tensorwire.membership.collective import Collective
from tensorwire.membership.entry import SUPERVISOR, enter_job
from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.parameters import (
    APPLY,
    PRODUCED,
    PUBLISH,
    PUSHED,
    REDUCE,
    REDUCED,
    WANT_NORM,
    Commit,
    PresentVersion,
    Readable,
    RemoteSnapshot,
    RemoteStore,
    Spec,
    TensorSpec,
)

STEPS = int(os.environ.get("TOY_STEPS", "12"))
STORES = int(os.environ.get("TOY_STORES", "2"))
PAUSE_S = float(os.environ.get("TOY_PAUSE_S", "0"))
FOLDER = os.environ.get("TOY_FOLDER", "")
GATE = os.environ.get("TOY_GATE", "")
GATE_STEP = int(os.environ.get("TOY_GATE_STEP", STEPS - 4))


def main() -> None:
    if SUPERVISOR in os.environ:
        enter_job()
    world = World.from_environment()
    assert world is not None
    member = WorkerMember.join(world)
    digest, collective = hashlib.sha256(), Collective(member)
    for number in range(STORES):
        train(member, collective, number, digest)
    total = collective.sum([float(world.rank)])
    digest.update(repr(total).encode())
    member.close()
    if FOLDER:
        head = json.dumps([["digest", "bytes", [], digest.digest_size]]).encode()
        Path(FOLDER, f"final-{world.rank}").write_bytes(head + b"\n" + digest.digest())
    print("digest", digest.hexdigest()[:16], flush=True)


def contents(store: RemoteStore, version: Readable) -> bytes:
    """Returns the contents of a version: parameters, state, counts, numbers."""
    found = [version.counts().tobytes(), version.scalars().tobytes()]
    for place in store.layout.places:
        parts = version.value(place), version.state("velocity", place)
        if isinstance(version, RemoteSnapshot):
            version.fetch()
        found += [part.tobytes() for part in parts]
    return b"".join(found)


def log(world: World, number: int, step: int, norms: list[str]) -> None:
    for i in world.my_slices:
        event = {
            "optimizer": f"store {number}", "epoch": 0, "step": step, "slice": i,
            "samples": [step * world.slices + i], "losses": norms,
        }  # fmt: skip
        with Path(FOLDER, f"events-{world.rank}").open("a") as file:
            file.write(json.dumps(event) + "\n")


def train(
    member: WorkerMember, collective: Collective, number: int, digest: "hashlib._Hash"
) -> None:
    world = member.place
    shapes = {"a": (300_000,), "b": (700, 501), "table": (4000, 16)}
    tensors = tuple(
        TensorSpec(name, "float32", shape, "rows" if name == "table" else "trained", 0)
        for name, shape in shapes.items()
    )
    # Numbers of each tensor begin at 0; with the decay of averages left out, as tables want it.
    spec = Spec("toy", ("lr",), 1, world.slices, tensors, 1, ("warmth",))
    store = RemoteStore(member, number, spec)
    places = {i: store.places(i) for i in world.my_slices}
    version, norms = 1, list[str]()

    def commit(operation: int, present: bytes, flags: int = 0, max_norm: float = math.inf) -> None:
        nonlocal version
        version += 1
        for i in world.my_slices:
            mine = present if operation != PUBLISH or i == 0 else bytes(len(tensors))
            store.commit(
                i, Commit(version, operation, flags, 1.0, max_norm, 1.0 + i, ((0.1,),), mine)
            )
        result = store.wait()
        norms.append(result.norm.hex())
        digest.update(repr((result.finite, result.norm)).encode())

    def publish(seed: int) -> None:
        random = np.random.default_rng(seed)
        for tensor, spec in enumerate(tensors):
            values = random.standard_normal(spec.elements).astype(np.float32)
            if 0 in world.my_slices:
                store.push(0, tensor, values.view(np.uint8))
            store.settle()
        commit(PUBLISH, bytes([PUSHED]) * len(tensors))

    publish(1)
    for step in range(STEPS):
        while GATE and step == GATE_STEP and not Path(GATE).exists():
            time.sleep(0.01)
        present = bytearray([PUSHED]) * len(tensors)
        for i in world.my_slices:
            random = np.random.default_rng((number, step, i))
            for tensor, each in enumerate(tensors):
                if each.kind == "rows":
                    rows = np.flatnonzero(random.random(each.shape[0]) < 0.1).astype(np.int64)
                    values = random.standard_normal((len(rows), each.shape[1]))
                    flat = values.astype(np.float32).reshape(-1).view(np.uint8)
                    store.push_rows(i, tensor, rows, flat)
                    continue
                gradient = random.standard_normal(each.elements).astype(np.float32)
                place = places[i][tensor]
                if step % 2 and not isinstance(place, str) and place.shared:
                    place.memory[:] = gradient.view(np.uint8)
                    present[tensor] = PRODUCED
                else:
                    store.push(i, tensor, gradient.view(np.uint8))
                    store.settle()
        if step % 4 == 1:
            commit(APPLY, bytes(present), WANT_NORM, 0.5)
        elif step % 4 == 3:
            commit(REDUCE, bytes(present))
            reduced = np.zeros(store.own.size_bytes, np.uint8)
            store.read_reduced(reduced)
            digest.update(reduced[: 4 * 300_000].tobytes())
            commit(APPLY, bytes(present), REDUCED, 0.7)
        else:
            commit(APPLY, bytes(present))
        if step == STEPS // 2:
            publish(2)
            digest.update(repr(collective.sum([1.0, float(world.rank)])).encode())
        if step == STEPS // 3:
            snapshot = store.snapshot()
            kept = contents(store, PresentVersion(store))
        elif step == 2 * STEPS // 3:
            digest.update(contents(store, snapshot))
            assert contents(store, snapshot) == kept
            assert contents(store, PresentVersion(store)) != kept
            snapshot.release()
        if FOLDER:
            log(world, number, step, norms)
        norms.clear()
        time.sleep(PAUSE_S)
    values = np.zeros(store.layout.size_bytes, np.uint8)
    store.read_values(values)
    digest.update(values.tobytes())
    store.read_state("velocity", values)
    digest.update(values.tobytes())
    digest.update(store.counts().tobytes() + store.scalars().tobytes())
    digest.update(repr(collective.gather(b"x")).encode())
    store.release()


main()
