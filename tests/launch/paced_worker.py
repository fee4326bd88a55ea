"""A worker without torch that goes at its own pace; it writes down what it has adopted.

The gradient of slice i is BASE^i in every element, and servers add up what is applied: so each
number of a version tells how many steps of which slice it has. paced_judge.py reads the log.
"""

import json
import math
import os
import random
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

from tensorwire.membership.collective import Collective
from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World
from tensorwire.parameters import (
    APPLY,
    PUBLISH,
    PUSHED,
    WANT_NORM,
    Commit,
    OwnPaceStore,
    PresentVersion,
    RemoteSnapshot,
    Spec,
    TensorSpec,
    checked_mode,
)

STEPS = int(os.environ.get("TOY_STEPS", "8"))
ROUNDS = int(os.environ.get("TOY_ROUNDS", "2"))
PAUSE_S = float(os.environ.get("TOY_PAUSE_S", "0.004"))
STALENESS = os.environ.get("TOY_STALENESS", "")
FOLDER = Path(os.environ["TOY_FOLDER"])
REST_S = float(os.environ.get("TOY_REST_S", "0"))  # before it leaves
STOPS = os.environ.get("TOY_STOPS", "")  # a rank: that worker is stopped again and again
BASE = 20  # of the steps of five slices float32 has all digits
SHAPES = {"a": (300_000,), "b": (7,), "c": (280_000,)}


def main() -> None:
    world = World.from_environment()
    assert world is not None
    member = WorkerMember.join(world)
    collective = Collective(member)
    if STOPS == str(world.rank):
        threading.Thread(target=stop_now_and_then, daemon=True).start()
    for number, (rounds, steps) in enumerate(((ROUNDS, STEPS), (1, 1))):
        run_store(member, collective, number, rounds, steps)
    time.sleep(REST_S)
    member.close()
    print("done", world.rank, flush=True)


def run_store(
    member: WorkerMember, collective: Collective, number: int, rounds: int, steps: int
) -> None:
    world = member.place
    tensors = tuple(TensorSpec(n, "float32", shape, "trained", 0) for n, shape in SHAPES.items())
    spec = Spec("sum", ("lr",), 1, world.slices, tensors, 1, ("warmth",))
    mode = checked_mode("bounded", int(STALENESS)) if STALENESS else checked_mode("async", None)
    store = OwnPaceStore(member, number, spec, mode)
    for round_ in range(rounds):
        publish(store, world, spec)
        collective.sum([1.0])
        for step in range(steps):
            time.sleep(random.random() * PAUSE_S * (1 + 2 * (world.rank == 1)))
            train(store, world, spec, step)
            if number == 0:
                log(member, store, round_, step)
            if step % 4 == 1 + world.rank % 2:
                read(store)
        collective.sum([1.0])
    with store.still():
        state = np.zeros(store.layout.size_bytes, np.uint8)
        store.read_state("velocity", state)
    found = {digits_of(state, store, spec, tensor) for tensor in range(len(tensors))}
    assert found == {(steps * rounds,) * world.slices}, found
    assert store.counts().tolist() == [steps * rounds * world.slices] * len(tensors)
    store.release()
    assert member.history is not None
    member.history.refuse("a store was freed")  # as `opt.close()` does


def stop_now_and_then() -> None:
    """Stops this process again and again for 0.1 s, longer than it computes."""
    pid = os.getpid()
    while True:
        time.sleep(0.05)
        script = f"kill -STOP {pid}; sleep 0.1; kill -CONT {pid}"
        subprocess.run(["sh", "-c", script], check=True)


def publish(store: OwnPaceStore, world: World, spec: Spec) -> None:
    """Publishes zeros as the first values of all tensors."""
    if 0 in world.my_slices:
        for tensor, each in enumerate(spec.tensors):
            store.push(0, tensor, np.zeros(4 * each.elements, np.uint8))
        store.settle()
    for i in world.my_slices:
        present = bytes([PUSHED if i == 0 else 0]) * len(spec.tensors)
        hyper = ((0.1,),)
        store.commit(i, Commit(store.version + 1, PUBLISH, 0, 1.0, math.inf, 1.0, hyper, present))
    store.wait()


def train(store: OwnPaceStore, world: World, spec: Spec, step: int) -> None:
    flags = WANT_NORM if step % 3 == 2 else 0
    for i in world.my_slices:
        gradients = [np.full(each.elements, float(BASE**i), np.float32) for each in spec.tensors]
        for tensor, gradient in enumerate(gradients):
            store.push(i, tensor, gradient.view(np.uint8))
        store.settle()
        present = bytes([PUSHED]) * len(spec.tensors)
        commit = Commit(store.version + 1, APPLY, flags, 1.0, math.inf, 5.0, ((1.0,),), present)
        store.commit(i, commit)
    result = store.wait()
    if flags:
        elements = sum(each.elements for each in spec.tensors)
        expected = [BASE**i * elements**0.5 for i in world.my_slices]  # of the one applied last
        assert min(abs(result.norm / each - 1) for each in expected) < 1e-5, result.norm


def digits_of(memory: np.ndarray, store: OwnPaceStore, spec: Spec, tensor: int) -> tuple[int, ...]:
    """How many steps of each slice a tensor has; an error if its elements differ."""
    place = store.layout.places[tensor]
    values = np.unique(memory[place.start : place.end].view(np.float32))
    assert len(values) == 1, f"of several versions: {values}"
    return tuple(int(values[0]) // BASE**i % BASE for i in range(spec.slices))


def log(member: WorkerMember, store: OwnPaceStore, round_: int, step: int) -> None:
    assert member.history is not None
    if member.history.replaying:
        return  # a former process has; what is there now is a later version
    memory = np.concatenate([store.value(tensor) for tensor in range(len(SHAPES))])
    values = np.unique(memory.view(np.float32))
    assert len(values) == 1, f"of several versions: {values}"
    pace = store.paces.last
    event = {
        "rank": member.place.rank, "slices": list(member.place.my_slices), "round": round_,
        "step": step,
        "digits": [int(values[0]) // BASE**i % BASE for i in range(member.place.slices)],
        "pace": None if pace is None else list(pace),
    }  # fmt: skip
    with (FOLDER / f"adopted-{member.place.rank}").open("a") as file:
        file.write(json.dumps(event) + "\n")


def read(store: OwnPaceStore) -> None:
    """A version stands still at all servers, with its state, and a snapshot is of that."""
    spec = store.layout.spec
    with store.still():
        state = np.zeros(store.layout.size_bytes, np.uint8)
        store.read_state("velocity", state)
        snapshot = store.snapshot()
        present = PresentVersion(store)
        found, of_state = set(), set()
        for tensor, place in enumerate(store.layout.places):
            parts = snapshot.value(place), snapshot.state("velocity", place)
            assert isinstance(snapshot, RemoteSnapshot)
            snapshot.fetch()
            assert (parts[1] == present.state("velocity", place)).all()
            values = np.unique(parts[0].view(np.float32))
            assert len(values) == 1, f"of several versions: {values}"
            found.add(int(values[0]))
            of_state.add(digits_of(state, store, spec, tensor))
        assert len(found) == len(of_state) == 1, (found, of_state)
        assert max(next(iter(of_state))) <= STEPS * ROUNDS
        counts = sum(next(iter(of_state)))
        assert snapshot.counts().tolist() == store.counts().tolist() == [counts] * len(found) * 3
        snapshot.release()


main()
