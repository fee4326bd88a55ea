"""Joins the job that this process was started for: `tw.init()`; knows the job of this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from tensorwire.membership.world import SLICES
from tensorwire.parameters import checked_mode

from . import discovery
from .job import Job
from .loader import checked_seed
from .modes import check_slices, place_in

_current: Job | None = None


def init(
    *,
    slices: int | None = None,
    seed: int = 0,
    transports: Sequence[str] | None = None,
    pipeline: int = 1,
    rank: int | None = None,
    world_size: int | None = None,
    durable: bool | None = None,
    mode: str = "sync",
    staleness: int | None = None,
) -> Job:
    """Joins the job that this process was started for; alone, it makes a job of one worker.

    The place given by `tensorwire run` or `tensorwire serve` counts first; then `rank` and
    `world_size`; then an initialised default process group of torch.distributed; then the variables
    of an engine: torchrun and all that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, MPI, or a
    step of Slurm. Where neither `tensorwire run` nor `tensorwire serve` has started servers, the
    first worker of each host starts one beside it. docs/launchers.md has the engines one by one.
    Seeds torch's default generator with `seed`. All workers call it, and it returns when all have.

    Called again with the same arguments it returns the job that is there, and seeds again; no other
    worker takes part. A `with` block of it closes that job too.

    Args:
        slices: parts of a step, each with its own samples, random numbers and gradients; a
            multiple of the number of replicas, which is the default. The result of a job depends
            on it and not on the number of workers.
        seed: of everything random in the job; worker 0's counts.
        transports: of "shm", "rdma", "tcp"; None allows all.
        pipeline: how many workers share one model that is split (`tw.split`): workers 0 to
            pipeline - 1 are replica 0, and so on. A worker that is alone has all of it.
        rank: of this worker, where the program knows it itself, as a function does that
            `torch.multiprocessing.spawn` calls. Without a process group the workers meet at
            MASTER_ADDR and MASTER_PORT.
        world_size: number of workers; given with `rank`. 1: alone, whatever the environment says.
        durable: whether a process of the job that is killed is replaced (docs/fault-tolerance.md).
            None: as the launcher says; False: none is, and servers note nothing; True: an error
            where the launcher replaces none. The same in all workers.
        mode: "sync": a version is made of the gradients of all slices. "async": each worker steps
            when it is done, with parameters of its own, and adopts the newest version in its
            `step()`; "bounded": it waits there while it is more than `staleness` steps ahead of
            the slowest. docs/modes.md. The same in all workers.
        staleness: a number of steps from 0 up, for "bounded".

    Raises:
        RuntimeError: there is a job that was made with other arguments, `job.close()` it first; or
            this process is a fork of one that has a job; or another process is this worker, as
            where this process has inherited the environment of a worker.
        ValueError: the environment or an argument makes no sense, or a variable says that there
            are other workers and not enough to find them.
        UnavailableError: a server cannot be reached, or a worker did not come.
    """
    global _current
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size are given together, or neither")
    seed, checked = checked_seed(seed), checked_mode(mode, staleness)
    if not isinstance(pipeline, int) or pipeline < 1:
        raise ValueError(f"pipeline is a number of workers from 1 up, not {pipeline!r}")
    given = {
        "slices": slices,
        "seed": seed,
        "transports": None if transports is None else tuple(transports),
        "pipeline": pipeline,
        "rank": rank,
        "world_size": world_size,
        "durable": durable,
        "mode": mode,
        "staleness": staleness,
    }
    if _current is not None and not _current.closed:
        _current.check_same(given)
        torch.manual_seed(_current.seed)
        _current.session.position.orders.clear()  # cells that run again shuffle alike
        return _current
    if transports is not None:
        os.environ["TENSORWIRE_TRANSPORTS"] = ",".join(transports)
    try:
        place = discovery.find_place(rank, world_size)
        place = place_in(place, checked, durable, pipeline)
        place = replace(place, pipeline=1 if place.workers == 1 else pipeline)
        if slices is not None:
            place = replace(place, slices=slices)
        elif place.workers > 1 and SLICES not in os.environ:
            place = replace(place, slices=place.replicas)
        place.check()
        check_slices(place, checked)
        _current = Job(place, seed, checked, given)
    except BaseException:
        discovery.leave(orderly=False)
        raise
    return _current


def current_job() -> Job:
    """Returns the job that `tw.init()` has made in this process, for code that cannot reach it.

    Raises:
        RuntimeError: `tw.init()` was not called, or the job was closed.
    """
    if _current is None or _current.closed:
        raise RuntimeError("call tw.init() first")
    return _current


def latest_job() -> Job | None:
    """Returns the job of this process, also when it was closed; None if there was none."""
    return _current
