"""Moves shares from server to server while a job trains: for `tensorwire scale`, or by itself.

A server gives shares away by its end: it is killed, and what it had goes to others, which have the
memory at once and go on as in the place of a server that died. So a move is safe wherever that is,
and no thread of the giver can go on beside the taker. Before that, all takers are started and have
imported everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorwire.failpoints import failpoint
from tensorwire.jobs.asking import ScaleError
from tensorwire.launch.balance import Suggestion
from tensorwire.launch.dealt import Dealt, deal_anew
from tensorwire.launch.process import Process
from tensorwire.launch.restarts import Restarts
from tensorwire.launch.scaling import RequestPart

_LOOK_S, _STOP_S = 0.05, 0.001
_TRIES = 3
"""How often a server is started if it ends each time before it has got a share."""


class Moves:
    """The moves of one job: of one request, or of one suggestion, at a time.

    It is the handler of the part "servers" of what `tensorwire scale` asks.

    Args:
        restarts: knows all shares, and the server of each.
        is_ready: a process that waits for what to serve could begin at once.
        name: gives a process that waited the name of a server.
        say: prints a line.
        note: writes a line into the log of the job.
    """

    def __init__(
        self,
        restarts: Restarts,
        is_ready: Callable[[Process], bool],
        name: Callable[[Process, int], None],
        say: Callable[[str], None],
        note: Callable[..., None],
    ) -> None:
        assert restarts.dealt is not None
        self._restarts, self._dealt = restarts, restarts.dealt
        self._is_ready, self._name, self._say, self._note = is_ready, name, say, note
        self._plan: dict[int, int] = {}  # the owners of all shares then; empty: nothing moves
        self._why = ""
        self._giver: Process | None = None
        self._killed = False  # the giver is
        self._started: dict[int, int] = {}  # servers without a share, and how often
        self._moved = 0
        self._error = ""
        self._tell: Callable[[str], None] = lambda text: None

    @property
    def dealt(self) -> Dealt:
        """The owner of each share."""
        return self._dealt

    @property
    def look_s(self) -> float:
        """How soon `go_on` has something to do, while something moves."""
        return _LOOK_S if self._giver is None else _STOP_S

    @property
    def idle(self) -> bool:
        """True if nothing moves."""
        return not self._plan and self._giver is None

    @property
    def has_ended_giver(self) -> bool:
        """True if the server that gives shares away was ended for that; else it may have died."""
        return self._giver is not None and self._killed

    # --- what is asked --------------------------------------------------------------------------

    def check(self, asked: RequestPart) -> None:
        """See `Handler`."""
        count, most = asked.get("count", 0), len(self._dealt.owners)
        if "drain" in asked:
            raise ScaleError("workers can be named that leave, and servers cannot: leave out drain")
        if not 1 <= count <= most:
            raise ScaleError(
                f"the job can have 1 to {most} servers, as it was started with --servers S:{most}, "
                f"not {count}"
            )

    def begin(self, asked: RequestPart, say: Callable[[str], None]) -> None:
        """See `Handler`."""
        self.check(asked)
        count, most = asked["count"], len(self._dealt.owners)
        present = sorted(set(self._dealt.owners.values()))
        free = (number for number in range(most) if number not in present)
        servers = [*present[:count], *(next(free) for _ in range(count - len(present)))]
        self._begin(deal_anew(self._dealt.owners, servers), f"tensorwire scale --servers {count}")
        self._tell = say

    def suggest(self, found: Suggestion) -> None:
        """Begins the move of a share that a measurement suggests."""
        self._begin({**self._dealt.owners, found.share: found.to}, found.why)

    def _begin(self, plan: dict[int, int], why: str) -> None:
        self._plan, self._why, self._error = plan, why, ""
        self._moved, self._started = 0, {}

    def tend(self) -> dict[str, Any] | None:
        """See `Handler`."""
        self.go_on()
        if self._error:
            raise ScaleError(self._error)
        if self._plan:
            return None
        servers = sorted(set(self._dealt.owners.values()))
        shares = {number: self._dealt.shares_of(number) for number in servers}
        told = "; ".join(f"server {n}: {_listed(each)}" for n, each in shares.items())
        count = f"{len(servers)} server{'s' if len(servers) > 1 else ''}"
        moved = f"{self._moved} share{'' if self._moved == 1 else 's'} moved"
        text = f"{count}, {moved} ({told})"
        return {"servers": {"text": text, "shares": shares, "moved": self._moved}}

    def cancel(self, why: str) -> None:
        """Cancels the request, see `Handler`; shares that have moved stay where they are."""
        if self._plan:
            self._give_up(f"{why}; {self._moved} shares had moved, and stay where they are")

    def stop(self) -> None:
        """Stops all moves, because the job is ending."""
        self.cancel("the job is ending")
        if self._giver is not None and self._giver.code is None and not self._killed:
            self._giver.go_on()
        self._giver = None
        self.end_idle()

    def _give_up(self, why: str) -> None:
        self._plan, self._error, self._tell = {}, why, lambda text: None
        self.end_idle()

    # --- step by step ---------------------------------------------------------------------------

    def go_on(self) -> None:
        """Takes the steps that are possible now; called in every turn."""
        if self._giver is not None:
            if self._giver.code is None:
                self._end_giver(self._giver)
                return
            self._giver = None
        if not self._plan or not self._restarts.all_taken():
            return
        owners = self._dealt.owners
        pending = [share for share, to in self._plan.items() if owners[share] != to]
        if not pending:
            self._plan = {}
            self.end_idle()
            return
        try:
            self._prepare(owners[pending[0]])
        except OSError as error:
            self._give_up(f"a server cannot be started: {error}")

    def _prepare(self, giver: int) -> None:
        """Starts needed servers; when all are ready, the giver ends."""
        process = self._dealt.servers.get(giver)
        takers = {self._plan[share] for share in self._dealt.shares_of(giver)}
        for number in sorted(takers - self._dealt.servers.keys()):
            self._start(number)
        if not self._plan or process is None or process.has_ended:
            return
        ready = [self._dealt.servers[number] for number in takers if number != giver]
        if giver in takers:  # the standby goes on with the shares that it keeps
            ready.append(self._restarts.standby())
        if all(self._dealt.has_served(each) or self._is_ready(each) for each in ready):
            failpoint("takers.ready")
            self._giver, self._killed = process, False
            process.pause()
            self._end_giver(process)

    def _end_giver(self, giver: Process) -> None:
        """Kills it as soon as it stands still, so that no thread of it goes on."""
        if self._killed or giver.has_ended or not giver.stands_still:
            return
        if not self._plan:
            self._giver = None
            giver.go_on()
            return
        self._killed = True
        giver.fence("ended, to give shares away")
        failpoint("giver.killed")

    def _start(self, number: int) -> None:
        tries = self._started[number] = self._started.get(number, 0) + 1
        if tries > _TRIES:
            self._give_up(f"server {number} ended {_TRIES} times before it had got a share")
            return
        process, sockets = self._restarts.start_server()
        self._dealt.run(number, process, sockets)
        self._name(process, number)
        self._tell(f"{process} is started")

    def gives(self, process: Process) -> bool:
        """Tells whether this process is about to give shares away, or has ended for that."""
        return process is self._giver

    def hand_over(self, process: Process) -> None:
        """Hands the planned shares of an ended server to others, the rest to its successor.

        Raises:
            OSError, KeeperError: that cannot be.
        """
        giver = process.index
        given: dict[int, list[int]] = {}
        for share in self._dealt.shares_of(giver):
            to = self._plan.get(share, giver)
            given.setdefault(to if to in self._dealt.servers else giver, []).append(share)
        for to, shares in sorted(given.items()):
            if to != giver:
                self._restarts.replace(process, shares, self._dealt.servers[to])
                for share in shares:
                    self._tell_moved(share, giver, to)
                failpoint("shares.moved")
        if giver in given:
            successor, _ = self._restarts.replace(process, given[giver])
            self._name(successor, giver)
        else:
            self._dealt.forget(giver)
            self._say(f"{process} has given away all shares and is gone")

    def _tell_moved(self, share: int, giver: int, to: int) -> None:
        keeper = self._restarts.share(share)
        versions = {
            key.removeprefix("region ").partition("/")[0]: version
            for key, version in keeper.counted("progress").items()
        }
        size, held = sum(keeper.counted("size").values()), keeper.held_bytes
        self._moved += 1
        self._note(
            "moved",
            share=share, giver=giver, taker=to, size=size, memory=held, versions=versions,
            why=self._why,
        )  # fmt: skip
        at = ", ".join(f"{version} of store {store}" for store, version in versions.items())
        text = (
            f"share {share} ({size} bytes) goes from server {giver} to server {to} after version "
            f"{at or '0'}: {self._why}"
        )
        self._say(text)
        self._tell(text)

    # --- servers without shares -----------------------------------------------------------------

    def is_idle(self, process: Process) -> bool:
        """Tells whether a server has no share, or has lost its number to another process."""
        number = process.index
        return self._dealt.servers.get(number) is not process or not self._dealt.shares_of(number)

    def note_end(self, process: Process) -> None:
        """Notes that a server without a share has ended."""
        if self._dealt.servers.get(process.index) is process:
            self._dealt.forget(process.index)

    def end_idle(self) -> None:
        """Lets servers without a share end."""
        for number in list(self._dealt.servers):
            if not self._dealt.shares_of(number):
                self._dealt.forget(number)


def _listed(shares: list[int]) -> str:
    return ("shares " if len(shares) > 1 else "share ") + ", ".join(map(str, shares))
