"""Records the state that one worker has, and no server, for a replacement process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed

from . import checkpoint
from .random_numbers import RandomState, random_state, set_random_state
from .replica.replica import Replica
from .session import Session

_GOES_ON = "The job can go on from its last checkpoint: job.load"


class WorkerState:
    """The state of a job's worker that no server has.

    Args:
        session: of the worker.
        replicas: of its optimizers; more may be added.
        kept: what `job.track` has named; more may be added.
        saves: how often `job.save` was called, by path.
    """

    def __init__(
        self,
        session: Session,
        replicas: Sequence[Replica],
        kept: Mapping[str, Any],
        saves: dict[str, int],
    ) -> None:
        self._session, self._replicas, self._kept, self._saves = session, replicas, kept, saves
        session.rejoin.use(self.save, self.load, session.count, self.is_between_steps)

    def save(self) -> dict[str, Any]:
        """Returns the whole state, for `pickle` at once."""
        session = self._session
        self._find_obstacles()
        for replica in self._replicas:
            replica.held.forget()
        return {
            **session.saved(),
            "torch": tuple(random_state()),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "replicas": [_saved(replica) for replica in self._replicas],
            "kept": {name: checkpoint.saved(self._kept[name]) for name in self._own_kept()},
            "saves": dict(self._saves),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Puts a saved state back.

        Raises:
            RuntimeError: the script has other objects than it had.
        """
        session = self._session
        found = sorted(self._own_kept())
        if found != sorted(state["kept"]) or len(self._replicas) != len(state["replicas"]):
            raise RuntimeError(
                f"worker {session.rank} was killed, and the process in its place has other "
                f"optimizers, or named other objects to job.track before job.epochs: {found} and "
                f"not {sorted(state['kept'])}. {_GOES_ON}"
            )
        session.go_on(state)
        for replica, each in zip(self._replicas, state["replicas"], strict=True):
            _go_on(replica, each)
        for name in found:
            checkpoint.fill(self._kept[name], state["kept"][name])
        self._check_kept()
        self._saves.clear()
        self._saves.update(state["saves"])
        set_random_state(RandomState(*state["torch"]))
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        text = f"worker {session.rank}, in a new process, goes on in epoch {session.epoch + 1}"
        slices = session.my_slices
        if any(replica.store.is_committed(i) for replica in self._replicas for i in slices):
            text += "; the loss that is computed for its first batch differs, the training does not"
        print(f"tensorwire: {text}", file=sys.stderr, flush=True)

    def loaded(self) -> dict[str, Any] | None:
        """Returns the changes of a checkpoint in this process, for `load_again`; None: too many."""
        if any(replica.state.holds_frozen for replica in self._replicas):
            return None  # it may be large
        return {
            **self._session.counts(),
            "replicas": [_saved(replica) for replica in self._replicas],
            "kept": {name: checkpoint.saved(self._kept[name]) for name in self._own_kept()},
        }

    def load_again(self, loaded: Mapping[str, Any]) -> None:
        """Restores the changes that `loaded` returned; the servers have the rest."""
        for replica, each in zip(self._replicas, loaded["replicas"], strict=False):
            _go_on(replica, each)
        for name in set(loaded["kept"]) & set(self._own_kept()):
            checkpoint.fill(self._kept[name], loaded["kept"][name])

    def is_between_steps(self) -> bool:
        """Tells whether no optimizer has committed a part of its slices."""
        return not any(replica.reducer.turn for replica in self._replicas)

    def _own_kept(self) -> list[str]:
        """Returns the names of kept objects that are not at the servers."""
        return [
            name
            for name, thing in self._kept.items()
            if not any(checkpoint.is_at_servers(thing, replica) for replica in self._replicas)
        ]

    def _find_obstacles(self) -> None:
        rejoin = self._session.rejoin
        for replica in self._replicas:
            if replica.arithmetic.by_worker and self._session.rank == 0:
                rejoin.refuse("worker 0 makes the steps of an optimizer in its own memory")
            if replica.buffers.kind == "local" and len(self._session.my_slices) > 1:
                rejoin.refuse('each of its slices has buffers of its own (buffers="local")')
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rejoin.refuse("it uses torch.distributed, whose groups nobody can join later")

    def _check_kept(self) -> None:
        """Raises RuntimeError if an object that changes steps was not kept."""
        if missing := missing_kept(self._kept, self._replicas):
            raise RuntimeError(
                f"worker {self._session.rank} was killed, and no other process can take its place: "
                f"the script does not track {missing}. {_GOES_ON}"
            )


def missing_kept(kept: Mapping[str, Any], replicas: Sequence[Replica]) -> str:
    """Returns an object that changes steps and is unknown to `job.track`; "" if there is none."""
    things = [thing for thing in kept.values() if not isinstance(thing, dict | list)]
    missing = ""
    for replica in replicas:
        scheduled = any("initial_lr" in group for group in replica.optimizer.param_groups)
        known = [getattr(thing, "optimizer", None) for thing in things]
        if scheduled and all(each is not replica.optimizer for each in known):
            missing = "a learning rate scheduler: job.track(scheduler=…)"
        if replica.was_scaled and not any(hasattr(thing, "get_scale") for thing in things):
            missing = "a GradScaler: job.track(scaler=…)"
    return missing


def obstacles(
    session: Session, kept: Mapping[str, Any], replicas: Sequence[Replica]
) -> tuple[str, str]:
    """Returns why no worker could take over slices, and why none could join; "" if one could."""
    joining = session.rejoin.obstacle
    if not joining and (missing := missing_kept(kept, replicas)):
        joining = f"the script does not track {missing}"
    return obstacle(session, replicas), joining


def obstacle(session: Session, replicas: Sequence[Replica]) -> str:
    """Returns why no worker could take over the slices of another one; "" if one could."""
    if session.pipeline > 1:
        return "its model is split over several workers"
    if path := next((each.store.path for each in replicas if each.store.path != "shm"), ""):
        return f"servers are reached by {path}, and only shared memory outlives a process"
    for replica in replicas:
        if replica.arithmetic.by_worker:
            return "worker 0 makes the steps of an optimizer in its own memory"
        if replica.buffers.kind == "local" and replica.buffers.here:
            return 'each worker has buffers of its own (buffers="local")'
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it uses torch.distributed, whose groups do not go on without a member"
    return ""


def _saved(replica: Replica) -> dict[str, Any]:
    """Returns the state of an optimizer that only this worker has."""
    groups = replica.optimizer.param_groups
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    same = replica.same_batches.saved()
    own = {name: each.tobytes() for name, each in replica.buffers.own()}
    return {
        "groups": options, "steps": replica.steps, "same": same, "scaled": replica.was_scaled,
        "buffers": own, "waits": replica.reducer.waits,
    }  # fmt: skip


def _go_on(replica: Replica, saved: Mapping[str, Any]) -> None:
    replica.adopt()
    for group, options in zip(replica.optimizer.param_groups, saved["groups"], strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    replica.buffers.put(replica.store, saved["buffers"])
    replica.steps, replica.was_scaled = saved["steps"], saved["scaled"]
    replica.same_batches.go_on(saved["same"])
    replica.reducer.lacks = saved["waits"]
