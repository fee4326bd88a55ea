"""One model over one wire: the teams of all systems, their turns, and the rows that come of them.

All systems are resident and take turns in blocks of steps, so that whatever disturbs the machine
disturbs all; ratios are paired turn by turn. The limit takes its turn too. Where memory does not
suffice, systems live in groups, one after the other; turns of different groups are then pairs all
the same, and the notes say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorwire.bench import machine
from tensorwire.bench.harness import laps_of, median
from tensorwire.bench.processes import Pair, PairError
from tensorwire.bench.rows import Comparison, Row, format_seconds
from tensorwire.parameters import CELL_BYTES, threads_for
from tensorwire_benchmarks import link
from tensorwire_benchmarks.bench import Bench, Settings
from tensorwire_benchmarks.figures import End, Turns, limit_over_wire, turn_ratio
from tensorwire_benchmarks.link import Hosts
from tensorwire_benchmarks.models import Model
from tensorwire_benchmarks.systems import LIMIT, LIMIT_COPIES, System
from tensorwire_benchmarks.team import Team
from tensorwire_benchmarks.traffic import FLOAT_BYTES

_CHECK_STEPS = 3
_SAME = 1e-4  # relative; a wrong learning rate or a sum for a mean is far above it
_WARM = 1  # steps of each turn that wake its processes up and are not counted
_LONGEST_SEARCH = 200  # steps that a system may take to find its best settings
_OF_MEMORY = 0.85  # the part of the free memory that teams may fill
_PROCESS_BYTES = 256 << 20  # torch and the like, per process


@dataclass(slots=True)
class _LimitTurns:
    """What the limit gave: its samples per turn, their parts, and the CPU time for all of them."""

    samples: list[list[float]] = field(default_factory=list)
    parts: list[tuple[float, float, float]] = field(default_factory=list)
    cpu_local_s: float = 0.0
    cpu_remote_s: float = 0.0


class Stage:
    """Runs by `measure`; then `rows`, `comparisons` and what the attributes have.

    Attributes:
        bench: what it is part of.
        names: of those that take part, the limit too, in the order of their turns.
        turns: per system that ran.
        ends: per system that ran to its end.
        warnings: one sentence each.
        tell: called with what is being done, never while a turn runs.
    """

    def __init__(self, bench: Bench, settings: Settings, model: Model, wire: str) -> None:
        self.bench = bench
        self._settings = settings
        self._model = model
        self._traffic = model.traffic(settings.workers)
        self._optimizer = model.optimizer or settings.optimizer
        self._wire = wire
        known = {system.name: system for system in bench.systems}
        self._systems = {name: known[name] for name in settings.systems if name in known}
        self.names = [
            name
            for name in bench.names
            if name in settings.systems and (name == LIMIT or name in self._systems)
        ]
        self._teams: dict[str, Team] = {}
        self._pair: Pair | None = None
        self._limit = _LimitTurns()
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
        """Ends all processes of the stage."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()
        if self._pair is not None:
            self._pair.close()

    # --- measuring ------------------------------------------------------------------------------

    def measure(self) -> None:
        """Starts everything, then lets all take turns; group by group."""
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
                self._start_limit() if name == LIMIT else self._start(self._systems[name])
                if len(groups) > 1 and name in self._notes:
                    parts = (self._notes[name], f"resident with {_others(group, name)}")
                    self._notes[name] = "; ".join(filter(None, parts))
            self._take_turns(group)
            for name in group:
                self._end(name)
        self._check()

    def _groups(self, free_bytes: int | None) -> list[list[str]]:
        """Names that live at the same time, by what their processes need at most."""
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

    def _take_turns(self, group: Sequence[str]) -> None:
        steps = self._settings.steps or self._model.steps
        turns = laps_of(steps, self._settings.turns)
        for index, count in enumerate(turns):
            self.tell(f"turn {index + 1} of {len(turns)}")
            order = [name for name in group if name in self._teams or name == LIMIT]
            for name in order if index % 2 == 0 else reversed(order):
                if name == LIMIT:
                    self._limit_turn(count)
                elif name in self._teams:
                    self._turn(name, count)

    def _start(self, system: System) -> None:
        reason = system.missing()
        if reason is not None:
            self._failed[system.name] = reason
            return
        try:
            team = Team(
                system,
                self._wire,
                self._model,
                self._settings.workers,
                self._optimizer,
                self._settings.server_threads,
                hosts=self._hosts,
            )
            self._teams[system.name] = team
            times, _, _ = team.run(_CHECK_STEPS)
            if system.exchanges:
                self._digest(system.name, team.digest())
            team.prepare(300 + _LONGEST_SEARCH * (times[0][-1].end - times[0][-1].begin))
            times, _, _ = team.run(2)
        except PairError as error:
            self._fail(system.name, error)
            return
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
        """All systems began with the same values and inputs: they were at the same place then."""
        sums = {name: value for name, value in self._sums.items() if name not in self._failed}
        if sums and max(sums.values()) - min(sums.values()) > _SAME * max(sums.values()):
            self.warnings.append(
                f"{self.case('exchange')}: after {_CHECK_STEPS} steps the systems have "
                f"different parameters, sums of magnitudes {sums}"
            )

    def _limit_threads(self) -> int:
        """Those that the server uses for so many bytes."""
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
        try:
            self._pair = Pair("tensorwire_benchmarks.limit", options)
        except PairError as error:
            self._fail(LIMIT, error)

    def _fail(self, name: str, error: PairError) -> None:
        self._failed[name] = str(error)
        team = self._teams.pop(name, None)
        if team is not None:
            team.close()

    def _turn(self, name: str, count: int) -> None:
        timeout_s = 60 + 20 * self._each_s[name] * (count + _WARM)
        try:
            team = self._teams[name]
            workers, cpu_workers, cpu_server = team.run(count + _WARM, timeout_s)
            if self._systems[name].holds:
                held, _, _ = team.run(count + _WARM, timeout_s, held=True)
        except PairError as error:
            self._fail(name, error)
            return
        self.turns[name].add(workers, cpu_workers, cpu_server, _WARM)
        if self._systems[name].holds:
            self.turns[name].add_isolated(held, _WARM)

    def _limit_turn(self, count: int) -> None:
        if self._pair is None or self._pair.closed:
            return
        try:
            samples, local, remote = self._pair.call("block", count, timeout_s=60 + 10 * count)
        except PairError as error:
            self._fail(LIMIT, error)
            return
        self._limit.samples.append([limit_over_wire(*sample) for sample in samples])
        self._limit.parts += samples
        self._limit.cpu_local_s += local
        self._limit.cpu_remote_s += remote

    def _end(self, name: str) -> None:
        """The system's last word; its processes end."""
        if name == LIMIT and self._pair is not None:
            self._pair.close()
        if name not in self._teams:
            return
        try:
            self.ends[name] = self._teams[name].end()
        except PairError as error:
            self._fail(name, error)
            return
        self._teams.pop(name).close()

    # --- rows -----------------------------------------------------------------------------------

    def case(self, what: str) -> str:
        """The name of the case of what was measured."""
        return self.bench.case(self._wire, self._model.name, what)

    def rows(self) -> list[Row]:
        """A row per system for the step and both exchanges, failed ones with the reason."""
        found = []
        for what in ("step", "exchange", "isolated"):
            for name in self.names:
                if name != LIMIT and self._takes_part(name, what):
                    found.append(self._row(what, name))
            if what == "exchange" and LIMIT in self.names:
                found.append(self._limit_row())
        return found

    def _takes_part(self, name: str, what: str) -> bool:
        system = self._systems[name]
        return {"step": True, "exchange": system.exchanges, "isolated": system.holds}[what]

    def empty(self, what: str, name: str) -> Row:
        """A row without figures and with the reason for that, if there is one."""
        row = Row(self.bench.name, self.case(what), name, self._traffic.up_bytes)
        return dataclasses.replace(row, note=self._failed.get(name, "it took no turn"))

    def _row(self, what: str, name: str) -> Row:
        row = self.empty(what, name)
        turns = self.turns.get(name)
        if name in self._failed or turns is None or not turns.step:
            return row
        mine = turns.of(what)
        row = row.timed([s for turn in mine for s in turn], moves=what != "step")
        if what != "step":
            row = row.beside(turn_ratio(self._limit.samples, mine))
        if what == "isolated":
            return dataclasses.replace(row, note="all gradients are there when it begins")
        steps = max(1, turns.steps_with_cpu)
        cpu_workers_s = turns.cpu_exchange_s if what == "exchange" else turns.cpu_workers_s
        apart = f"last gradients {format_seconds(median(turns.skew))} apart"
        return dataclasses.replace(
            row,
            cpu_seconds_local=cpu_workers_s / steps,
            cpu_seconds_remote=turns.cpu_server_s / steps,
            note="; ".join(filter(None, (self._notes[name], apart))),
        )

    def _limit_row(self) -> Row:
        row = self.empty("exchange", LIMIT)
        samples = [sample for turn in self._limit.samples for sample in turn]
        if LIMIT in self._failed or not samples:
            return row
        apply_s, into_s, out_s = (median(part) for part in zip(*self._limit.parts, strict=True))
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
        return row.timed(
            samples,
            moves=True,
            cpu_seconds_local=self._limit.cpu_local_s / len(samples),
            cpu_seconds_remote=self._limit.cpu_remote_s / len(samples),
            note=note,
        )

    def comparisons(self) -> list[Comparison]:
        """Paired ratios of our own system to each rival, for the step and both exchanges."""
        name = self.bench.own
        own = self.turns.get(name)
        if own is None or name in self._failed:
            return []
        found = []
        for rival, turns in self.turns.items():
            if rival == name or rival in self._failed or not self._systems[rival].exchanges:
                continue
            for what in ("step", "exchange", "isolated"):
                ratio = turn_ratio(turns.of(what), own.of(what))
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
