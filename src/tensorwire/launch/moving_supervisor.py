"""Runs a job whose servers have shares that can move from one to another.

All else is a `RunSupervisor`'s. A server is started as a process that waits for what to serve, and
gets its shares one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tensorwire.launch.balance import Balance, Reading
from tensorwire.launch.keeper import Keeper, KeeperError
from tensorwire.launch.moving import Moves
from tensorwire.launch.output import LONGEST_ADDRESS, FirstLine
from tensorwire.launch.process import Process, Replaceable
from tensorwire.launch.run_supervisor import RunSupervisor
from tensorwire.launch.scaling import Handler
from tensorwire.launch.spec import JobSpec


class MovingSupervisor(RunSupervisor):
    """The supervisor of one job whose shares can move; see `Supervisor`."""

    def __init__(self, job: JobSpec, **options: Any) -> None:
        self._ready: dict[int, FirstLine] = {}  # by process, what it tells when it could begin
        super().__init__(job, **options)
        self._balance = Balance() if job.rebalance else None
        self._look_at: float | None = None

    def _handlers(self) -> Mapping[str, Handler]:
        return {**super()._handlers(), "servers": self._moving}

    @cached_property
    def _moving(self) -> Moves:
        return Moves(self._restarts, self._is_ready, self._name, self._say, self._note_line)

    # --- start ----------------------------------------------------------------------------------

    def _start_servers(self) -> bool:
        job, dealt = self._job, self._moving.dealt
        for number in range(job.servers):
            process, sockets = self._restarts.start_server()
            dealt.run(number, process, sockets)
            self._name(process, number)
        for share in range(job.dealt):
            number = share * job.servers // job.dealt
            owner = dealt.servers.get(number)
            if owner is None or not self._start_share(share, owner):
                return False
        return not self._ending

    def _start_share(self, share: int, process: Process) -> bool:
        """Starts a share at a server and waits until it listens; False if the job is to end."""
        arguments = self._job.server_arguments(share, self._addresses)
        try:
            keeper = self._restarts.add_share(share, process, arguments)
            deadline = time.monotonic() + self._patience.start_s
            self._await_listening(keeper, deadline)
        except KeeperError as error:
            self._fail(f"{process.name} cannot be told what to serve: {error}", 1, process)
            return False
        if self._ending:
            return False
        if not keeper.address:
            wait_s = self._patience.start_s
            text = f"{process} did not listen for share {share} within "
            self._fail(f"{text}{wait_s:g} s", 1, process)
            return False
        self._note_address(keeper.address)
        self._log.add("member", kind="share", index=share, pid=process.pid, server=process.index)
        return True

    def _await_listening(self, keeper: Keeper, deadline: float) -> None:
        while not (keeper.restorable or self._ending) and time.monotonic() < deadline:
            self._turn(deadline)

    def _start_standby(self, store_fds: Sequence[int]) -> Process:
        told, pipe = FirstLine(LONGEST_ADDRESS), os.pipe()
        command = self._job.standby_command(store_fds, pipe[1])
        process = self._launch(
            "standby", 0, command, self._environment, told, pipe, inherited=store_fds
        )
        self._ready[process.pid] = told
        return process

    def _is_ready(self, process: Process) -> bool:
        told = self._ready.get(process.pid)
        return told is not None and told.complete

    def _name(self, process: Process, number: int) -> None:
        process.rename("server", number)
        self._screen.name_lines(process)

    # --- the loop -------------------------------------------------------------------------------

    def _times(self) -> Iterator[float]:
        yield from super()._times()
        if not self._moving.idle:
            yield time.monotonic() + self._moving.look_s
        if self._look_at is not None and self._replaces:
            yield self._look_at

    def _watched(self) -> Iterable[Replaceable]:
        return (process for process in super()._watched() if not self._moves_from(process))

    def _moves_from(self, process: Replaceable) -> bool:
        return isinstance(process, Process) and self._moving.gives(process)

    def _attend(self, ready: set[int]) -> None:
        super()._attend(ready)
        if not self._replaces:
            return
        self._moving.go_on()
        if self._balance is not None:
            self._rebalance(self._balance)

    def _rebalance(self, balance: Balance) -> None:
        now = time.monotonic()
        if not self._moving.idle:
            balance.begin_again()
            self._look_at = None
            return
        if self._look_at is not None and now < self._look_at:
            return
        self._look_at = now + self._patience.rebalance_s
        owners = self._moving.dealt.owners
        if found := balance.look(owners, {share: self._read(share) for share in owners}):
            self._moving.suggest(found)
            balance.begin_again()

    def _read(self, share: int) -> Reading:
        keeper = self._restarts.share(share)
        counted = (keeper.counted(name).values() for name in ("progress", "work", "size"))
        return Reading(*map(sum, counted))

    # --- processes that end ---------------------------------------------------------------------

    def _note_grant(
        self, dead: Replaceable, successor: Replaceable, number: int, term: int, **more: Any
    ) -> bool:
        if dead.kind == "server":
            more["kind"] = "share"
        if moves := self._moves_from(dead) and self._moving.has_ended_giver:
            more["moves"] = True  # nobody has died
        super()._note_grant(dead, successor, number, term, **more)
        return not moves

    def _note_end(self, process: Process) -> None:
        self._ready.pop(process.pid, None)
        if process.kind == "server" and self._moving.is_idle(process) and not self._workers_left:
            self._moving.note_end(process)
            return
        super()._note_end(process)

    def _replace_member(self, process: Process) -> None:
        self._ready.pop(process.pid, None)
        if self._balance is not None:
            self._balance.begin_again()
        if not (process.kind == "server" and self._moving.gives(process)):
            super()._replace_member(process)
            return
        try:
            self._moving.hand_over(process)
        except (OSError, KeeperError) as error:
            text = f"what {process} had cannot be given to others: {error}"
            self._restarts.release(process)
            self._ended.append(process)
            self._fail(text, 1, process)

    def _retire_standby(self) -> None:
        self._moving.stop()
        super()._retire_standby()
