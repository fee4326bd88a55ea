"""Measures one model over one wire: the teams of all systems, their turns, and their rows.

All systems are resident and take turns of some steps, so that a disturbance of the machine
disturbs all; ratios are paired turn by turn. The limit takes its turn too. Where memory does not
suffice, systems run in groups, one group after the other; turns of different groups are then paired
by number, and the notes say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from tensorwire.bench import machine
from tensorwire.bench.harness import laps_of, median
from tensorwire.bench.processes import PairError, ProcessPair
from tensorwire.bench.rows import Comparison, Row, format_seconds
from tensorwire.parameters import CELL_BYTES, threads_for
from tensorwire_benchmarks import link
from tensorwire_benchmarks.bench import OPTIMIZER, Bench, Settings
from tensorwire_benchmarks.figures import End, Turns, extra_seconds, limit_over_wire, turn_ratio
from tensorwire_benchmarks.link import Hosts
from tensorwire_benchmarks.systems import COMPUTATION, LIMIT, LIMIT_COPIES, System
from tensorwire_benchmarks.team import Team
from tensorwire_benchmarks.traffic import FLOAT_BYTES
from tensorwire_benchmarks.workloads.catalog import Workload

_CHECK_STEPS = 3
_SAME = 1e-4  # relative; a wrong learning rate or a sum for a mean is far above it
_WARM = 1  # first steps of each turn, which are not counted
_LONGEST_SEARCH = 200  # steps that a system may take to find its best settings
_OF_MEMORY = 0.85  # the part of the free memory that teams may fill
_PROCESS_BYTES = 256 << 20  # torch and the like, per process


class WireContest:
    """A contest of systems with one model over one wire: call `measure`, then read the results.

    Attributes:
        bench: the bench that it is part of.
        names: systems that take part, and the limit, in the order of their turns.
        turns: per system that ran, and of the limit.
        ends: per system that ran to its end.
        warnings: one sentence each.
        tell: called with a text about progress, never while a turn runs.
    """

    def __init__(self, bench: Bench, settings: Settings, model: Workload, wire: str) -> None:
        self.bench = bench
        self._settings = settings
        self._model = model
        self._traffic = model.traffic(settings.workers)
        self._optimizer = model.optimizer or OPTIMIZER
        self._wire = wire
        known = {system.name: system for system in bench.systems}
        self._systems = {name: known[name] for name in settings.systems if name in known}
        self.names = [
            name
            for name in bench.names
            if name in settings.systems and (name == LIMIT or name in self._systems)
        ]
        self._running: dict[str, Team | ProcessPair] = {}
        self._limit_parts: list[tuple[float, float, float]] = []
        self._failed: dict[str, str] = {}
        self._each_s: dict[str, float] = {}
        self._notes: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self._hosts: Hosts | None = None
        self.turns: dict[str, Turns] = {}
        self.ends: dict[str, End] = {}
        self.warnings: list[str] = []
        self.tell: Callable[[str], None] = lambda _: None

    def close(self) -> None:
        """Ends all processes of the contest."""
        for running in self._running.values():
            running.close()
        self._running.clear()

    # --- measuring ------------------------------------------------------------------------------

    def measure(self) -> None:
        """Starts the systems of each group in turn, and lets them take their turns.

        A system that fails takes no further part; its rows have the reason.
        """
        megabits = self.bench.links.get(self._wire)
        if megabits is None:
            self._measure()
            return
        reason = link.missing(megabits)
        if reason is not None:
            self._failed.update(dict.fromkeys(self.names, reason))
            return
        with link.two_hosts(megabits) as self._hosts:
            try:
                self._measure()
            finally:
                self.close()

    def _measure(self) -> None:
        groups = self._groups(machine.memory_bytes("MemAvailable"))
        for group in groups:
            for name in group:
                self.tell(f"starts {name}")
                with self._failing(name):
                    self._start_limit() if name == LIMIT else self._start(self._systems[name])
                if len(groups) > 1 and name in self._notes:
                    parts = (self._notes[name], f"resident with {_others(group, name)}")
                    self._notes[name] = "; ".join(filter(None, parts))
            self._take_turns(group)
            for name in group:
                with self._failing(name):
                    if isinstance(team := self._running.get(name), Team):
                        self.ends[name] = team.end()
                self._end(name)
        self._check()

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Ends the part of `name` in the contest if the body raises PairError; notes the reason."""
        try:
            yield
        except PairError as error:
            self._failed[name] = str(error)
            self._end(name)

    def _end(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            running.close()

    def _groups(self, free_bytes: int | None) -> list[list[str]]:
        """Returns groups of names whose processes fit together in the free memory."""
        room = _OF_MEMORY * free_bytes if free_bytes else float("inf")
        groups: list[list[str]] = []
        left = 0.0
        for name in self.names:
            copies = LIMIT_COPIES if name == LIMIT else self._systems[name].copies
            need = copies * self._model.size_bytes + (self._settings.workers + 1) * _PROCESS_BYTES
            if not groups or need > left:
                groups.append([])
                left = room
            groups[-1].append(name)
            left -= need
        return groups

    def _start(self, system: System) -> None:
        reason = system.missing()
        if reason is not None:
            raise PairError(reason)
        team = Team(
            system, self._wire, self._model, self._settings.workers, self._optimizer,
            self._settings.server_threads,
            hosts=None if self._hosts is None else (self._hosts[:1], self._hosts[1:]),
        )  # fmt: skip
        self._running[system.name] = team
        times, _, _ = team.run(_CHECK_STEPS)
        if system.exchanges:
            self._digest(system.name, team.digest())
        team.prepare(300 + _LONGEST_SEARCH * (times[0][-1].end - times[0][-1].begin))
        times, _, _ = team.run(2)
        self._each_s[system.name] = max(t.end - t.begin for t in times[0])
        megabits = self.bench.links.get(self._wire)
        carries = system.carries if megabits is None else {self._wire: f"TCP, {megabits} Mbit/s"}
        over = f"over {carries[self._wire]}" if system.carries else ""
        needs = f"optimizer {self._optimizer}" if self._model.optimizer and over else ""
        self._notes[system.name] = "; ".join(filter(None, (team.note, over, needs)))
        self.turns[system.name] = Turns()

    def _digest(self, name: str, digests: list[float]) -> None:
        if max(digests) - min(digests) > _SAME * max(digests):
            raise PairError(f"after {_CHECK_STEPS} steps the workers' parameters differ: {digests}")
        self._sums[name] = digests[0]

    def _check(self) -> None:
        """Warns if the systems' parameters differed after the first steps with the same inputs."""
        sums = {name: value for name, value in self._sums.items() if name not in self._failed}
        if sums and max(sums.values()) - min(sums.values()) > _SAME * max(sums.values()):
            self.warnings.append(
                f"{self.case('exchange')}: after {_CHECK_STEPS} steps the systems have "
                f"different parameters, sums of magnitudes {sums}"
            )

    def _limit_threads(self) -> int:
        """Returns the number of threads that tensorwire's server uses for this model."""
        cells = -(-FLOAT_BYTES * self._traffic.elements // CELL_BYTES)
        return threads_for(cells, self._settings.server_threads)

    def _start_limit(self) -> None:
        options = {
            "wire": self._wire,
            "traffic": self._traffic,
            "workers": self._settings.workers,
            "threads": self._limit_threads(),
            "optimizer": self._optimizer,
            "hosts": self._hosts,
        }
        self._running[LIMIT] = ProcessPair("tensorwire_benchmarks.limit", options)
        self.turns[LIMIT] = Turns()

    def _take_turns(self, group: Sequence[str]) -> None:
        steps = self._settings.steps or self._model.steps
        turns = laps_of(steps, self._settings.turns)
        for index, count in enumerate(turns):
            self.tell(f"turn {index + 1} of {len(turns)}")
            for name in group if index % 2 == 0 else reversed(group):
                if running := self._running.get(name):
                    with self._failing(name):
                        self._turn(name, running, count)

    def _turn(self, name: str, running: Team | ProcessPair, count: int) -> None:
        turns = self.turns[name]
        if isinstance(running, ProcessPair):
            samples, local, remote = running.call("block", count, timeout_s=60 + 10 * count)
            turns.samples["exchange"].append([limit_over_wire(*sample) for sample in samples])
            turns.cpu_exchange_s += local
            turns.cpu_server_s += remote
            turns.steps_with_cpu += count
            self._limit_parts += samples
            return
        timeout_s = 60 + 20 * self._each_s[name] * (count + _WARM)
        taken = running.run(count + _WARM, timeout_s)
        holds = self._systems[name].holds
        held = running.run(count + _WARM, timeout_s, held=True) if holds else None
        turns.add(*taken, _WARM)
        if held is not None:
            workers, _, cpu_server_s = held
            turns.add_isolated(workers, cpu_server_s, _WARM)

    # --- rows -----------------------------------------------------------------------------------

    def case(self, what: str) -> str:
        """Returns the name of the case of a measured quantity."""
        return self.bench.case(self._wire, self._model.name, what)

    def rows(self) -> list[Row]:
        """Returns rows of step and both exchanges for each system, with the reason if it failed."""
        rows = [
            self._row(what, name)
            for what in ("step", "exchange", "isolated")
            for name in sorted(self.names, key=lambda name: name == LIMIT)  # the limit comes last
            if self._takes_part(name, what)
        ]
        if COMPUTATION.name in self.ends:
            alone = self.turns[COMPUTATION.name]
            names = [name for name in self.names if name in self.ends and name != COMPUTATION.name]
            rows += [self._exposed(name, alone) for name in names]
        return rows

    def _exposed(self, name: str, computation: Turns) -> Row:
        """Returns the row of a step's time beyond that of workers that only compute."""
        own, alone = (turns.samples["step"] for turns in (self.turns[name], computation))
        extra = extra_seconds(list(map(median, own)), list(map(median, alone)))
        note = "the median of the differences of turns"
        if extra.interval is not None:
            note += f"; 95 % interval {extra.interval[0]:.3g} to {extra.interval[1]:.3g} s"
        return dataclasses.replace(
            self._empty("exposed", name),
            seconds_median=extra.seconds,
            operations=sum(map(len, own)),
            note=note,
        )

    def _takes_part(self, name: str, what: str) -> bool:
        if name == LIMIT:
            return what == "exchange"
        system = self._systems[name]
        return {"step": True, "exchange": system.exchanges, "isolated": system.holds}[what]

    def _empty(self, what: str, name: str) -> Row:
        """Returns a row without figures, with the reason why there are none."""
        row = Row(self.bench.name, self.case(what), name, self._traffic.up_bytes)
        return dataclasses.replace(row, note=self._failed.get(name, "it took no turn"))

    def _row(self, what: str, name: str) -> Row:
        row = self._empty(what, name)
        turns = self.turns.get(name)
        if name in self._failed or turns is None or not turns.steps_with_cpu:
            return row
        row = row.timed(turns.all(what), moves=what != "step")
        if what != "step" and name != LIMIT and LIMIT in self.turns:
            limit = self.turns[LIMIT].samples["exchange"]
            row = row.beside(turn_ratio(limit, turns.samples[what]))
        if what == "isolated":
            return dataclasses.replace(
                row,
                cpu_seconds_local=turns.cpu_isolated_s / turns.steps_isolated,
                cpu_seconds_remote=turns.cpu_isolated_server_s / turns.steps_isolated,
                note="all gradients are there when it begins",
            )
        note = self._limit_note() if name == LIMIT else self._note(name, turns)
        local = turns.cpu_exchange_s if what == "exchange" else turns.cpu_workers_s
        return dataclasses.replace(
            row,
            cpu_seconds_local=local / turns.steps_with_cpu,
            cpu_seconds_remote=turns.cpu_server_s / turns.steps_with_cpu,
            note=note,
        )

    def _note(self, name: str, turns: Turns) -> str:
        apart = f"last gradients {format_seconds(median(turns.all('skew')))} apart"
        return "; ".join(filter(None, (self._notes[name], apart)))

    def _limit_note(self) -> str:
        apply_s, into_s, out_s = (median(part) for part in zip(*self._limit_parts, strict=True))
        threads = self._limit_threads()
        on = "1 thread" if threads == 1 else f"{threads} threads"
        note = f"a C loop on {on}: {format_seconds(apply_s)}"
        if self._hosts is not None:
            note = f"the larger of {note}, and raw socket, both ways at once: "
            note += format_seconds(into_s)
        elif self._wire == "tcp":
            note = (
                f"the larger of {note}, and raw socket: gradients in {format_seconds(into_s)} plus "
                f"parameters out {format_seconds(out_s)}"
            )
        if self._traffic.looked_up:
            note += (
                "; of tables only the rows that are looked up, one behind the other: "
                f"{self._traffic.up_bytes / 1e6:.3g} MB of gradients per worker, indices included, "
                f"{self._traffic.down_bytes / 1e6:.3g} MB of new values"
            )
        return note

    def comparisons(self) -> list[Comparison]:
        """Returns the paired ratios of the bench's own system to each rival."""
        name = self.bench.own
        own = self.turns.get(name)
        if own is None or name in self._failed:
            return []
        found = []
        for rival, turns in self.turns.items():
            if rival in (name, LIMIT, *self._failed) or not self._systems[rival].exchanges:
                continue
            for what in ("step", "exchange", "isolated"):
                ratio = turn_ratio(turns.samples[what], own.samples[what])
                if ratio is not None:
                    found.append(
                        Comparison(
                            self.case(what), self._traffic.up_bytes, name, rival, ratio.median,
                            ratio.interval, ratio.pairs,
                        )
                    )  # fmt: skip
        return found


def _others(group: Sequence[str], name: str) -> str:
    others = [other for other in group if other != name]
    who = ", ".join(others) if others else "nobody"
    return f"{who} for lack of memory; pairs with the others are of their turns by number"
