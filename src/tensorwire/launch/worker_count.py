"""Changes how many workers a running job has: `tensorwire scale --workers N`.

New workers are started first, and run their script to its first epoch while the others train. Then
all present workers are asked how many steps they have made, and wait before they go more than one
step further; they are told after which step they change, and which places each has from there on.
At that step the lowest worker notes where the script is, for the new ones; the leaving ones end.
docs/internals/fault-tolerance.md has the protocol, membership/takeovers.py the workers' part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tensorwire.failpoints import failpoint
from tensorwire.jobs.asking import ScaleError
from tensorwire.launch.keeper import Keeper, KeeperError
from tensorwire.launch.process import Process, Replaceable
from tensorwire.launch.restarts import Restarts
from tensorwire.launch.scaling import RequestPart
from tensorwire.launch.spec import JobSpec
from tensorwire.launch.takeovers import PassedSlices
from tensorwire.membership.takeovers import ChangeWord, PlannedChange

_SWITCHED = ChangeWord.SWITCHED
_HISTORY = "region history"  # the key under which a worker keeps its history
_NOT_ELASTIC = (
    "the workers of this job are started again when they are killed, and their number stays: start "
    "it with tensorwire run --workers W:MAX, in mode sync"
)


class Staff(Protocol):
    """The processes of the job's workers; a supervisor."""

    def living_workers(self) -> list[Process]:
        """Returns the running workers, also workers that have not joined so far."""

    def start_joiner(self, rank: int, joins: int) -> Process:
        """Starts one more worker, for a place in which this many workers have joined, with it.

        Raises:
            OSError: it cannot be started.
        """


class WorkerCount:
    """The handler of the part "workers" of a request; see `Handler`.

    Args:
        job: that runs.
        restarts: what is held of its workers.
        staff: their processes.
        say: prints a line.
        note: writes a line into the log of the job.
    """

    def __init__(
        self,
        job: JobSpec,
        restarts: Restarts,
        staff: Staff,
        say: Callable[[str], None],
        note: Callable[..., None],
    ) -> None:
        self._job, self._restarts, self._staff = job, restarts, staff
        self._say, self._note, self._keeper = say, note, restarts.keeper
        self._round = self._left = 0  # of questions; the last change after which all have left
        self._joins: dict[int, int] = {}  # how many have joined in each place
        self._clear()

    def _clear(self) -> None:
        self._state = ""
        self._tell: Callable[[str], None] = lambda text: None
        self._drain: list[int] = []
        self._joining: dict[int, Process] = {}  # that have not joined so far
        self._came: list[int] = []
        self._asked: list[int] = []
        self._number = self._step = self._before = 0
        self._donor: int | None = None
        self._gone: list[str] = []  # what has become of workers that were to join
        self._told_to_go = self._kept = False  # kept: somebody wanted it back, too late
        self._table: dict[int, list[int]] = {}
        self._owners: dict[int, int] = {}

    @property
    def _takeovers(self) -> PassedSlices:
        assert self._restarts.takeovers is not None  # `check` has looked
        return self._restarts.takeovers

    # ---- the request

    def check(self, asked: RequestPart) -> None:
        """See `Handler`."""
        count, drain = asked.get("count"), asked.get("drain", [])
        if count is None:
            raise ScaleError('the request has no "count", the number of workers')
        if self._joining or self._state == "switching":
            raise ScaleError(
                "a change that failed is still being taken back; try again in a moment", busy=True
            )
        if self._restarts.takeovers is None:
            raise ScaleError(_NOT_ELASTIC)
        places = self._job.places
        if not 1 <= count <= places:
            raise ScaleError(
                f"this job can have 1 to {places} workers, as many as its slices, and not {count}; "
                "the most is told when it is started: tensorwire run --workers W:MAX"
            )
        present = self._takeovers.present()
        if unknown := [rank for rank in drain if rank not in present]:
            there = ", ".join(map(str, present))
            raise ScaleError(f"there is no worker {unknown[0]}; those that could leave are {there}")
        if len(drain) > max(len(present) - count, 0):
            raise ScaleError(
                f"--drain names {len(drain)} of the {len(present)} workers, and --workers {count} "
                f"leaves no room for that many to go: at most {max(len(present) - count, 0)}"
            )
        self._check(present, count > len(present))

    def begin(self, asked: RequestPart, say: Callable[[str], None]) -> None:
        """See `Handler`."""
        self.check(asked)
        places = self._job.places
        count, drain, present = (
            asked["count"],
            set(asked.get("drain", [])),
            self._takeovers.present(),
        )
        self._clear()
        self._tell, self._before = say, len(present)
        stay = [rank for rank in present if rank not in drain]
        self._drain = sorted([*drain, *stay[count:]])
        free = [place for place in range(places) if place not in present]
        self._state = "starting"
        for rank in free[: max(count - len(present), 0)]:
            if self._state == "starting":
                self._start(rank)
        if self._joining:
            names = ", ".join(f"{rank} (pid {p.pid})" for rank, p in self._joining.items())
            self._tell(f"started: worker {names}; the others train on")

    def _check(self, present: Iterable[int], adds: bool) -> None:
        """Raises ScaleError if workers cannot come or go now."""
        for rank in present:
            keeper = self._keeper(rank)
            if keeper.left is not None:
                raise ScaleError(f"worker {rank} has left the job, which is ending")
            if why := self._takeovers.reason_against(keeper):
                why = why if keeper.offer else "it has not come to job.epochs; try again then"
                raise ScaleError(f"the slices of worker {rank} cannot become another one's: {why}")
        donor = self._keeper(self._takeovers.owner_of(0))
        if adds and donor.joins:
            raise ScaleError(f"no worker can join: {donor.joins}")

    def _start(self, rank: int) -> None:
        history = self._keeper(self._takeovers.owner_of(0)).held(_HISTORY)
        if history is None:
            self._abandon("no worker can join: what the others have noted is not held")
            return
        self._joins[rank] = self._joins.get(rank, 0) + 1
        try:
            self._joining[rank] = self._staff.start_joiner(rank, self._joins[rank])
            keeper = self._keeper(rank)
            keeper.tell({"start": [], "term": 0, "restarts": 0, "messages": 1})
            keeper.tell({"kept": [["donor", {}]]}, [history])
        except (OSError, KeeperError) as error:
            self._abandon(f"worker {rank} cannot be started: {error}")

    def cancel(self, why: str) -> None:
        """See `Handler`."""
        if self._state in ("starting", "asking"):
            self._abandon(why)
        elif self._state == "switching" and not self._kept:
            self._kept = True
            self._tell(f"all workers know of step {self._step}; this is not taken back any more")

    # ---- under way

    def tend(self) -> dict[str, Any] | None:
        """See `Handler`."""
        self._look_at_end()
        if self._gone and self._state in ("starting", "asking"):
            self._abandon(self._gone[0])
        if self._state == "abandoned" and not self._joining:
            raise ScaleError(self._gone[0])
        if self._state == "starting":
            if not all(ChangeWord.READY in self._keeper(rank).said for rank in self._joining):
                return None
            if not (self._joining or self._drain):
                return self._outcome()
            self._ask()
        if self._state == "asking":
            self._plan()
        return self._await_change() if self._state == "switching" else None

    def _present(self) -> list[int]:
        """Returns the workers that are in the job, without those that join."""
        return [
            r for r in self._takeovers.present() if r not in self._joining and r not in self._came
        ]

    def _look_at_end(self) -> None:
        """Gives up if the job is about to end before the change."""
        if self._state == "abandoned":
            return
        if not self._present():
            self._abandon("the workers have left the job, which is ending")
        for rank in self._present():
            keeper = self._keeper(rank)
            switched = self._state == "switching" and self._has_switched(keeper)
            if keeper.left is not None and not switched:
                self._abandon(f"worker {rank} has left the job before the change; it is ending")
                return

    def _ask(self) -> None:
        """Asks how many steps the workers have made; from now on they go at most one further."""
        self._state, self._round = "asking", self._round + 1
        self._asked = self._present()
        for rank in self._asked:
            self._send(self._keeper(rank), {ChangeWord.PREPARE: self._round})
        failpoint("change.asked")

    def _plan(self) -> None:
        """Tells all workers after which step they change, when all have answered."""
        present = self._present()
        told = [self._keeper(rank).said.get(ChangeWord.AT, {}) for rank in present]
        if any(each.get("number") != self._round for each in told):
            return
        stay = [rank for rank in present if rank not in self._drain]
        if not stay:
            self._abandon("the workers that were to stay were killed meanwhile; ask again")
            return
        self._step = max(int(each[ChangeWord.AT]) for each in told) + 1
        self._donor = self._takeovers.owner_of(0) if self._joining else None
        keepers = {rank: self._keeper(rank) for rank in self._joining}
        table = self._table = self._takeovers.plan([*stay, *self._joining], keepers)
        self._number = self._takeovers.number
        owners = self._owners = {rank: rank for rank in self._joining}
        for rank in (each for each in self._drain if each in present):
            owners[rank] = next(owner for owner, places in table.items() if rank in places)
        self._state = "switching"
        for rank in present:
            self._send(self._keeper(rank), self._message(ChangeWord.PLAN, rank))
        self._tell(f"the change takes place after step {self._step} of the job")
        failpoint("change.planned")

    def _await_change(self) -> dict[str, Any] | None:
        present = self._present()
        self._tell_left(present)
        if self._joining and not self._told_to_go:
            self._let_go()
        for rank in [r for r in self._joining if ChangeWord.JOINED in self._keeper(r).said]:
            process = self._joining.pop(rank)
            self._came.append(rank)
            self._note("joined", index=rank, pid=process.pid, step=self._step)
            self._say(f"{process} has joined, after step {self._step}")
        waits = [r for r in present if not self._has_switched(self._keeper(r))]
        running = {process.index for process in self._staff.living_workers()}
        if waits or self._joining or running & {r for r in self._drain if r not in self._came}:
            return None
        self._takeovers.finish()
        return self._outcome()

    def _has_switched(self, keeper: Keeper) -> bool:
        return keeper.said.get(_SWITCHED, {}).get(_SWITCHED) == self._number

    def _message(self, word: ChangeWord, rank: int) -> dict[str, Any]:
        """Returns the message with the change of one worker."""
        mine = self._table.get(rank, [])
        plan = PlannedChange(self._number, self._step, mine, self._owners, self._donor)
        return plan.to_message(word)

    def _tell_left(self, present: Sequence[int]) -> None:
        """Lets the remaining workers continue after the step, once the leaving ones are gone."""
        stay = [rank for rank in present if rank not in self._drain]
        leaving = [rank for rank in present if rank in self._drain]
        if self._left < self._number and all(
            self._has_switched(self._keeper(rank)) for rank in leaving
        ):
            self._left = self._number
            for rank in stay:
                self._send(self._keeper(rank), {ChangeWord.LEFT: self._number})

    def _let_go(self) -> None:
        """Lets the joining workers go on, once the donor has noted where the script is."""
        assert self._donor is not None  # there is one where workers join
        donor = self._keeper(self._donor)
        history, obstacle = donor.held(_HISTORY), ""
        if self._has_switched(donor):
            obstacle = str(donor.said[_SWITCHED].get("obstacle", ""))
        elif self._donor in self._present():
            return
        else:
            obstacle = f"worker {self._donor}, which was to note where the script is, was killed"
        self._told_to_go = True
        if obstacle or history is None:
            self._gone.append(f"no worker can join: {obstacle or 'its history is not held'}")
            for process in self._joining.values():
                process.fence("was ended")
            return
        for rank in self._joining:
            message = self._message(ChangeWord.GO, rank)
            self._send(self._keeper(rank), message, [history])
        failpoint("change.handed")

    def _outcome(self) -> dict[str, Any]:
        now = len(self._takeovers.present())
        went = [rank for rank in self._drain if rank not in self._takeovers.present()]
        for rank in went:
            self._note("drained", index=rank, step=self._step)
        if self._gone:
            text = f"{self._gone[0]}; the job has {now} worker{'' if now == 1 else 's'}"
            self._clear()
            raise ScaleError(text)
        changed = []
        for ranks, what in ((self._came, "joined"), (went, "left")):
            if ranks:
                has = "have" if ranks[1:] else "has"
                listed = ", ".join(map(str, sorted(ranks)))
                changed.append(f"worker{'s' if ranks[1:] else ''} {listed} {has} {what}")
        text = f"{now} worker{'' if now == 1 else 's'}"
        if changed:
            text += f" after step {self._step}: {', '.join(changed)}"
        else:
            text += ", as before"
        outcome = {"text": text, "before": self._before, "now": now, "step": self._step}
        outcome |= {"came": sorted(self._came), "went": went}
        self._clear()
        return {"workers": outcome}

    # ---- ends

    def joins(self, process: Replaceable) -> bool:
        """Tells whether a process is a worker that has not joined so far."""
        return process.kind == "worker" and self._joining.get(process.index) is process

    def takes_end(self, process: Process) -> bool:
        """Notes the end of a worker; tells whether it concerns this change alone, not the job."""
        rank = process.index
        if process.kind != "worker":
            return False
        if self._joining.get(rank) is process:
            del self._joining[rank]
            if self._state != "abandoned":
                how = f"{process} {process.ending()} before it had joined"
                self._gone.append(how)
                self._say(f"{how}; the job goes on without it")
            if self._number:
                living = [each.index for each in self._staff.living_workers()]
                if self._takeovers.pass_on(rank, living) is None:
                    return False
            self._restarts.release(process)
            return True
        if self._state == "switching" and rank in self._drain and rank not in self._came:
            keeper = self._keeper(rank)
            with contextlib.suppress(KeeperError):
                keeper.read_all()
            if self._has_switched(keeper):
                rest = "" if process.code == 0 else f"; it {process.ending()}"
                self._say(f"{process} has left, after step {self._step}{rest}")
                self._takeovers.note_end(
                    rank, [each.index for each in self._staff.living_workers()]
                )
                self._restarts.release(process)
                return True
        return False

    def _abandon(self, why: str) -> None:
        """Abandons the change; it is over when the joining workers have ended."""
        self._gone, self._state = [why], "abandoned"
        for rank in self._present():
            self._send(self._keeper(rank), {ChangeWord.CANCEL: self._round})
        self._end_joiners()

    def _end_joiners(self) -> None:
        for process in self._joining.values():
            process.kill()

    @staticmethod
    def _send(keeper: Keeper, message: dict[str, Any], descriptors: Iterable[int] = ()) -> None:
        with contextlib.suppress(KeeperError):  # its process ends, which is noticed
            keeper.tell(message, list(descriptors))
