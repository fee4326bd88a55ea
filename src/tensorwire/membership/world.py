"""Reads which worker this process is, of how many, and where the servers are.

A launcher tells it in environment variables; docs/internals/launch.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tensorwire.jobs.engines import MAX_WORKERS, number

RANK, WORKERS, SERVERS, SLICES, DURABLE, TAKEOVER, PRESENT = (
    "TENSORWIRE_RANK",
    "TENSORWIRE_WORKERS",
    "TENSORWIRE_SERVERS",
    "TENSORWIRE_SLICES",
    "TENSORWIRE_DURABLE",
    "TENSORWIRE_TAKEOVER",
    "TENSORWIRE_PRESENT",
)
SHARES_MOVE = "TENSORWIRE_SHARES_MOVE"


@dataclass(frozen=True, slots=True)
class World:
    """This worker's place in its job.

    Attributes:
        rank: 0 to workers - 1.
        workers: how many; where workers may come and go, the most that there can be.
        servers: addresses, in order; empty when the process is alone.
        slices: parts of a step, a multiple of replicas.
        pipeline: workers that share one copy of a model, consecutive ones: a replica.
        durable: a server or worker that is killed is replaced by one that has its memory.
        asked: the user has asked for `durable`, and is told what prevents it.
        takeover: a worker that is killed is not replaced: another one computes its slices, and
            workers may come and go.
        present: how many workers the job began with, the first ones; 0: all.
    """

    rank: int = 0
    workers: int = 1
    servers: tuple[str, ...] = ()
    slices: int = 1
    pipeline: int = 1
    durable: bool = False
    asked: bool = False
    takeover: bool = False
    present: int = 0

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        return self.workers // self.pipeline

    @property
    def stage(self) -> int:
        """Which process of its pipeline this is."""
        return self.rank % self.pipeline

    @property
    def my_slices(self) -> range:
        """The slices that this worker's replica computes."""
        return self.slices_of(self.rank)

    def slices_of(self, rank: int) -> range:
        """Returns the slices that the replica of a worker computes, as long as it lives."""
        each = self.slices // self.replicas
        replica = rank // self.pipeline
        return range(replica * each, (replica + 1) * each)

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> World | None:
        """Returns the place that the launcher has given; None if there is no launcher.

        Raises:
            ValueError: a variable is missing or makes no sense.
        """
        if SERVERS not in environ:
            _check_unsaid(environ)
            slices = _number(environ, SLICES, "1", 1, MAX_WORKERS)
            return World(slices=slices) if slices > 1 else None
        workers = _number(environ, WORKERS, None, 1, MAX_WORKERS)
        rank = _number(environ, RANK, None, 0, workers - 1)
        slices = _number(environ, SLICES, str(workers), 1, MAX_WORKERS)
        addresses = tuple(filter(None, (a.strip() for a in environ[SERVERS].split(","))))
        if not addresses:
            raise ValueError(f"{SERVERS} is empty; it lists the servers' addresses")
        if (said := environ.get(DURABLE, "0")) not in ("0", "1", "default"):
            raise ValueError(f"{DURABLE} is {said!r}; it is 1, default or 0")
        durable, asked = said != "0", said == "1"
        if (takes := environ.get(TAKEOVER, "0")) not in ("0", "1") or (
            takes == "1" and not durable
        ):
            raise ValueError(f"{TAKEOVER} is {takes!r}; it is 1 in a durable job, or 0")
        present = _number(environ, PRESENT, str(workers), 1, workers) if takes == "1" else 0
        return World(
            rank, workers, addresses, slices, durable=durable, asked=asked, takeover=takes == "1",
            present=present,
        )  # fmt: skip

    def check(self) -> None:
        """Raises ValueError if workers cannot be dealt to pipelines, or slices to replicas."""
        if self.pipeline < 1 or self.workers % self.pipeline:
            raise ValueError(
                f"{self.workers} workers cannot be dealt to pipelines of {self.pipeline}; start a "
                "multiple"
            )
        if self.slices % self.replicas:
            whom = "workers" if self.pipeline == 1 else "replicas"
            raise ValueError(
                f"{self.slices} slices cannot be dealt equally to {self.replicas} {whom}; "
                "choose a multiple"
            )


def _number(environ: Mapping[str, str], name: str, default: str | None, low: int, high: int) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ValueError(f"{SERVERS} is set and {name} is not; start the script by a launcher")
    return number(name, text, low, high)


def _check_unsaid(environ: Mapping[str, str]) -> None:
    """Raises ValueError if a launcher's variables say that there are others, but not the servers.

    One worker needs nobody.
    """
    told = [name for name in (RANK, WORKERS) if environ.get(name)]
    if told and (environ.get(WORKERS) != "1" or environ.get(RANK, "0") != "0"):
        names = " and ".join(told)
        raise ValueError(
            f"{names} say that this is a worker of a job and {SERVERS} is not set, so that it "
            f"cannot join the others: unset {names}, or pass {SERVERS} on too, or "
            "TENSORWIRE_SUPERVISOR where 'tensorwire serve' runs; tw.init(rank=0, world_size=1) "
            "if this process is to train alone"
        )
