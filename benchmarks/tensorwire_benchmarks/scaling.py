"""Measures how training gets faster with more workers and servers, each on a host of its own.

Hosts are network namespaces at a switch (`link.py`), so that links and not this machine's cores are
scarce: workers sleep where a recorded step of a real model computed, and push each gradient at the
time at which the recorded backward had made it. All replay the same step at the same time;
`modes.py` measures unequal workers. Servers are real ones. In sync the rate of W workers is W times
the rate of one as long as links transfer a burst in time; in async as long as they transfer the
mean. The limit of each row is calculated, with the link's speed by a raw socket in the same run:

    sync    forward + max(backward, push) + pull, both over the busiest link
    async   the same for a worker alone, or the busiest link's time for a step of all workers

The calculation does not see workers that meet at a link by chance, nor packets that a switch drops.
So plain sockets transfer the same bytes at the same times (`scaling_raw.py`), as another limit.
A row is void, and says so, if the cores were busy for more than 70 %.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensorwire.bench.harness import median
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.raw_socket import RawClient, RawServer
from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.command import Told
from tensorwire.parameters import most_threads
from tensorwire_benchmarks import link, scaling_raw, scaling_worker
from tensorwire_benchmarks.link import Host
from tensorwire_benchmarks.systems import LIMIT, OWN, SYNC, System
from tensorwire_benchmarks.team import Team
from tensorwire_benchmarks.traffic import FLOAT_BYTES

MODES = ("sync", "async")
RAW = "raw sockets"
_SOCKETS = System(RAW, "", (), scaling_raw.__name__, {})
BAR = 0.9
MOST_BUSY = 0.7
_WARM = 2  # steps of each worker that do not count
_RAW_BYTES = 4 << 20
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """What to run.

    Attributes:
        modes: some of `MODES`.
        workers, servers: numbers of workers and servers; every pair is a job.
        megabits: Mbit/s of each host's link, in each direction.
        batch: samples of a recorded step.
        steps: counted steps of each worker in each job.
    """

    modes: Sequence[str] = MODES
    workers: Sequence[int] = (1, 2, 4, 8)
    servers: Sequence[int] = (1, 2, 4)
    megabits: int = 200
    batch: int = 128
    steps: int = 12


@dataclass(frozen=True, slots=True)
class Recording:
    """Steps of a real model, and its store; see `scaling_record.py`."""

    model: str
    tensors: list[tuple[str, list[int]]]
    optimizer: str
    hyper_names: list[str]
    hyper: list[float]
    scalars: list[str]
    steps: list[dict[str, Any]]

    @property
    def size_bytes(self) -> int:
        """The size of all gradients."""
        sizes = [shape for _, shape in self.tensors]
        return FLOAT_BYTES * sum(math.prod(shape) for shape in sizes)


@dataclass(frozen=True, slots=True)
class Point:
    """A job: its mode, its workers and its servers."""

    mode: str
    workers: int
    servers: int

    @property
    def case(self) -> str:
        """The job's name in rows."""
        workers, servers = (
            f"{count} {what}{'s' if count > 1 else ''}"
            for count, what in ((self.workers, "worker"), (self.servers, "server"))
        )
        return f"scaling.{self.mode}: {workers}, {servers}"


def limit_seconds(point: Point, recording: Recording, bytes_per_s: float) -> float:
    """Returns the least seconds of a step of each worker, on links of this speed."""
    own_s = recording.size_bytes / bytes_per_s
    shared_s = own_s * point.workers / point.servers
    busiest_s = max(own_s, shared_s) if point.mode == "sync" else own_s
    seconds: list[float] = [
        step["forward_s"] + max(step["backward_s"], busiest_s) + busiest_s
        for step in recording.steps
    ]
    return max(median(seconds), shared_s)


def points(settings: ScalingSettings) -> list[Point]:
    """Returns all jobs, in the order in which they run."""
    return [
        Point(mode, workers, servers)
        for mode in settings.modes
        for servers in settings.servers
        for workers in settings.workers
    ]


def measure(report: Report, settings: ScalingSettings, tell: Told) -> None:
    """Adds rows and verdicts; the rows have the reason if such links are impossible here."""
    every = points(settings)
    report.settings["scaling"] = described = dataclasses.asdict(settings)
    tell(0, len(every), "scaling: records steps")
    try:
        recording = record(settings)
        count = max(settings.workers) + max(settings.servers)
        if reason := link.missing(settings.megabits):
            raise PairError(reason)
        with link.switched_hosts(count, settings.megabits) as hosts:
            speed = raw_speed(hosts[0], hosts[1])
            described |= {"model": recording.model, "link_bytes_per_s": speed}
            for done, point in enumerate(every):
                tell(done, len(every), point.case)
                report.rows += _rows(point, settings, recording, hosts, speed)
    except (PairError, subprocess.CalledProcessError) as error:
        measured = {row.case for row in report.rows}
        report.rows += [
            Row("parameters", point.case, OWN, 0, note=str(error))
            for point in every
            if point.case not in measured
        ]
    report.verdicts += judge(report, settings)


def record(settings: ScalingSettings) -> Recording:
    """Runs the real model in a process of its own, and returns its recorded steps."""
    options = {"batch": settings.batch, "steps": 8}
    with ProcessPair("tensorwire_benchmarks.scaling_record", options) as pair:
        return Recording(**pair.call("record", timeout_s=600.0))


def raw_speed(first: Host, second: Host) -> float:
    """Measures bytes per second of a raw socket from one host to another."""

    def within(host: Host, act: Callable[[], Any]) -> Any:
        host.enter()
        return act()

    with ThreadPoolExecutor(1) as here, ThreadPoolExecutor(1) as there:
        server = there.submit(within, second, lambda: RawServer(second.address)).result()
        try:
            port, token = there.submit(server.listen, "send", _RAW_BYTES).result()
            client = here.submit(
                within, first, lambda: RawClient(second.address, port, token, "send", _memory())
            ).result()
            try:
                seconds: list[float] = list(here.submit(client.run, 5).result())
            finally:
                client.close()
        finally:
            server.close()
    return _RAW_BYTES / median(seconds)


# --- one job ------------------------------------------------------------------------------------


def _rows(
    point: Point, settings: ScalingSettings, recording: Recording, hosts: Sequence[Host],
    speed: float,
) -> list[Row]:  # fmt: skip
    """Returns the rows of a job, of plain sockets in its place, and of its limit."""
    size_bytes = recording.size_bytes
    limit_s = limit_seconds(point, recording, speed)
    note = f"{recording.model}; links of {settings.megabits} Mbit/s, a raw socket {speed / 1e6:.1f}"
    limit = Row(
        "parameters", point.case, LIMIT, size_bytes, seconds_median=limit_s, note=f"{note} MB/s"
    )
    sockets = Row("parameters", point.case, RAW, size_bytes)
    try:
        run = partial(_run, point=point, settings=settings, recording=recording, hosts=hosts)
        sockets = sockets.timed(run(_SOCKETS, scaling_raw.__name__)[0])
    except PairError as error:
        sockets = dataclasses.replace(sockets, note=str(error))
    row = Row("parameters", point.case, OWN, size_bytes)
    try:
        seconds, cpu_workers, cpu_servers = run(SYNC, scaling_worker.__name__)
    except PairError as error:
        return [dataclasses.replace(row, note=str(error)), sockets, limit]
    row = row.timed(seconds)
    assert row.seconds_median is not None
    busy = (cpu_workers + cpu_servers) * point.workers / row.seconds_median / (os.cpu_count() or 1)
    note = f"{100 * busy:.0f} % of all cores busy"
    if busy > MOST_BUSY:
        note = f"void, because cores bound it: {note}, {row.seconds_median:.3g} s per step"
        return [Row("parameters", point.case, OWN, size_bytes, note=note), sockets, limit]
    row = dataclasses.replace(
        row,
        ratio_to_limit=limit_s / row.seconds_median,
        cpu_seconds_local=cpu_workers,
        cpu_seconds_remote=cpu_servers,
        note=note,
    )
    return [row, sockets, limit]


def _run(
    system: System, program: str, point: Point, settings: ScalingSettings, recording: Recording,
    hosts: Sequence[Host],
) -> tuple[list[float], float, float]:  # fmt: skip
    """Runs a job; returns seconds of the counted steps, and CPU seconds per worker's step.

    The CPU seconds are of the workers, and of the servers.
    """
    count = _WARM + settings.steps
    plan = {**dataclasses.asdict(recording), "mode": point.mode, "count": count}
    places = hosts[: max(settings.servers)], hosts[max(settings.servers) :]
    team = Team(
        system, "tcp", None, point.workers, "", most_threads(), places, program, point.servers
    )
    with contextlib.closing(team):
        before = team.server_cpu()
        told = team.call("replay", plan, timeout_s=_PATIENCE_S)
        cpu_servers = team.server_cpu() - before
    steps = point.workers * count
    seconds = [second for each, _ in told for second in each[_WARM:]]
    return seconds, sum(cpu for _, cpu in told) / steps, cpu_servers / steps


def _memory() -> Any:
    import numpy as np

    return np.ones(_RAW_BYTES, np.uint8)


# --- bars ---------------------------------------------------------------------------------------


def judge(report: Report, settings: ScalingSettings) -> list[Verdict]:
    """Judges the rate of W workers against W times the rate of one, or less if links allow less."""
    found = {(row.case, row.system): row for row in report.rows}
    verdicts = []
    for point in points(settings):
        if point.workers == 1:
            continue
        alone = dataclasses.replace(point, workers=1)
        name = f"{point.case}: rate by {point.workers} times that of one"

        def linear(system: str, point: Point = point, alone: Point = alone) -> float | None:
            one, all_of_them = (
                row.seconds_median if (row := found.get((each.case, system))) else None
                for each in (alone, point)
            )
            return one / all_of_them if one and all_of_them else None

        own, calculated, sockets = linear(OWN), linear(LIMIT), linear(RAW)
        if own is None or calculated is None:
            rows = (found.get((case, OWN)) for case in (point.case, alone.case))
            notes = (row.note for row in rows if row is not None and not row.measured)
            missing = "; ".join(notes) or "one worker was not measured"
            verdicts.append(Verdict.of(name, ">=", BAR, "", None, None, missing))
            continue
        allowed = min(1.0, calculated, sockets or 1.0)
        detail = f"{own:.3g} of linear"
        if allowed < 1:
            what = "links let through" if allowed == calculated else f"{RAW} reach"
            name += f", or by the {allowed:.2f} of it that {what}"
        verdicts.append(Verdict.of(name, ">=", BAR, "", own / allowed, None, detail))
    return verdicts
