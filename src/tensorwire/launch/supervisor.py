"""Starts the processes of a job, brings their output out, and ends them together.

One thread waits in one `poll` for signals, output and ends of processes; it never waits for one
thing alone. Nothing here knows what the processes do: they are told where the servers are, and
that one has failed they learn from each other.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tensorwire.errors import UnavailableError
from tensorwire.jobs.job_file import running_servers, shown_command
from tensorwire.jobs.job_log import JOB_LOG, JobLog
from tensorwire.launch.escalation import Escalation, passed
from tensorwire.launch.guard import Guard
from tensorwire.launch.keeper import KeeperError
from tensorwire.launch.output import LONGEST_ADDRESS, FirstLine, address_in
from tensorwire.launch.process import MemoryKills, Process, Replaceable, check_pidfd, signal_name
from tensorwire.launch.reports import LONGEST_REPORT, Reports, failure_in
from tensorwire.launch.restarts import Restarts, many_files
from tensorwire.launch.resume import resume_line
from tensorwire.launch.screen import Screen
from tensorwire.launch.signals import StopSignals
from tensorwire.launch.silence import Silence
from tensorwire.launch.spec import JobSpec, Patience, reserve_port
from tensorwire.launch.stragglers import Stragglers

# One Ctrl-C may arrive as two signals (`timeout -s INT` sends two); a person's second is later.
_SECOND_INTERRUPT_S = 0.2


class Supervisor:
    """The supervisor of one job, which it runs once.

    Invariants: every process that runs is in `_running`; of those that have ended, `_ended` has all
    but standbys and those that were replaced; `_failure` is the first failure, and changes only
    where that was a consequence, to its cause; a job that ends early has `_failure` or `_stop` set.
    At most one traceback is shown.

    Args:
        job: what to run.
        prefix: whether lines begin with the name of their process.
        patience: times; default the usual ones.
        command: that started the job, for a user who goes on with it; default this process's.

    Attributes:
        program: what its own lines begin with.
    """

    program = "tensorwire run"

    def __init__(
        self,
        job: JobSpec,
        *,
        prefix: bool = True,
        patience: Patience | None = None,
        command: str = "",
    ) -> None:
        self._job = job
        self._command = command or shlex.join(sys.orig_argv)
        self._patience = patience or Patience()
        self._running: list[Process] = []
        self._ended: list[Process] = []
        self._lost: list[Process] = []  # they have ended and are about to be replaced
        self._environment: dict[str, str] = {}
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._addresses: list[str] = []  # of all servers
        self._screen = Screen(prefix, self.program)
        self._say = self._screen.say
        self._memory_kills = MemoryKills()
        start = self._start_standby, self._start_worker
        self._restarts = Restarts(job, self._patience, *start, self._say, self._note_grant)
        self._silence = Silence(job.silence_s, self._say)
        self._workers_left = job.members  # to be started
        self._failure: tuple[str, int] | None = None
        self._failed: Process | None = None
        self._seeks_cause = False  # the failure is a consequence of an end that is not seen so far
        self._died = False  # a process did, that ended the job
        self._stop: int | None = None
        self._stopped_at = 0.0
        self._escalation = Escalation(self._patience.kill_s)
        self._reports = Reports()
        self._inboxes: dict[str, FirstLine] = {}  # of workers that have not reported
        self._show_at: float | None = None
        self._stragglers = Stragglers(self._restarts, self._reports, self._patience.stuck_s)

    def run(self) -> int:
        """Runs the job; see `tensorwire.launch.run` for its result and errors."""
        check_pidfd()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what was printed before comes before
        with contextlib.ExitStack() as stack:
            stack.callback(self._screen.close)
            self._signals = stack.enter_context(StopSignals())
            self._guard = stack.enter_context(contextlib.closing(Guard()))
            stack.enter_context(contextlib.closing(self._restarts))
            what = shown_command(self._job.command)
            self._log = JobLog(what, self._job.is_durable, self._say)
            stack.callback(lambda: self._log.close(keep=self._failure is not None))
            if self._job.is_durable:
                stack.enter_context(many_files())
            try:
                self._port = stack.enter_context(reserve_port())
                self._start()
                while self._running and not self._escalation.given_up:
                    self._turn()
            except BaseException:  # this program is wrong: still it leaves nothing behind
                for process in self._running:
                    process.kill()
                    process.collect()
                raise
            self._restarts.close()
            with contextlib.suppress(OSError, UnavailableError):
                running_servers()  # removes what killed ones have left
            self._leave()
            self._summarize()
            self._log.close(keep=self._failure is not None)
            self._flush()
        if self._failure is not None:
            return self._failure[1]
        return 0 if self._stop is None else 128 + self._stop

    # --- start ----------------------------------------------------------------------------------

    def _start(self) -> None:
        self._environment = self._job.environment()
        try:
            if not self._start_servers():
                return
            self._start_workers()
            self._restarts.begin()
        except OSError as error:
            self._fail(f"a process cannot be started: {error}", 1)

    def _start_servers(self) -> bool:
        """Starts them, and waits until they listen; false if the job is to end instead."""
        for index in range(self._job.servers):
            if not (address := self._start_server(index, self._addresses)):
                return False
            self._note_address(address)
        return True

    def _note_address(self, address: str) -> None:
        self._addresses.append(address)
        self._log.add("server listens", address=address)

    def _start_workers(self) -> None:
        for rank in range(self._job.members):
            with contextlib.ExitStack() as theirs:
                store_fd = None
                if self._job.is_durable:
                    store = theirs.enter_context(self._restarts.add("worker", rank))
                    store_fd = store.fileno()
                self._note_member(self._start_worker(rank, store_fd))
            self._workers_left -= 1

    def _start_server(self, index: int, addresses: list[str]) -> str | None:
        """Starts one and waits for its address; None if the job is to end instead."""
        arguments = self._job.server_arguments(index, addresses)
        with contextlib.ExitStack() as theirs:
            store_fd = None
            if self._job.is_durable:
                store = theirs.enter_context(self._restarts.add("server", index, arguments))
                store_fd = store.fileno()
            pipe, told = os.pipe(), FirstLine(LONGEST_ADDRESS)
            command = self._job.server_command_for(arguments, pipe[1], store_fd)
            process = self._launch(
                "server", index, command, self._environment, told, pipe, inherited=[store_fd]
            )
        self._note_member(process)
        deadline = time.monotonic() + self._patience.start_s
        while not told.complete and not self._ending and not passed(deadline):
            self._turn(deadline)
            if told.closed:  # it is about to end, or is wrong
                deadline = min(deadline, time.monotonic() + self._patience.alone_s)
        address = address_in(told)
        if address is None:
            said = "closed its address without one"
            if told.text:
                said = f"gave no address but {bytes(told.text[:100])!r}"
            elif not told.closed:
                said = f"gave no address within {self._patience.start_s:g} s"
            self._fail(f"{process} {said}", 1, process)
        return None if self._ending else address

    def _start_standby(self, store_fds: Sequence[int]) -> Process:
        told = self._job.standby_command(store_fds), self._environment
        process = self._launch("standby", 0, *told, inherited=store_fds)
        self._log.add("standby", pid=process.pid)
        return process

    def _start_worker(
        self, rank: int, store_fd: int | None, term: int = 0, joins: int = 0
    ) -> Process:
        told, pipe, port = None, None, self._port.getsockname()[1]
        if self._job.collects_failures:
            told, pipe = FirstLine(LONGEST_REPORT), os.pipe()
            self._inboxes[f"worker {rank}"] = told
        own = self._job.worker_environment(
            self._environment, rank, self._addresses, port, pipe and pipe[1], store_fd, term, joins
        )
        if self._log.path:
            own[JOB_LOG] = self._log.path
        command = self._job.worker_command(rank)
        return self._launch("worker", rank, command, own, told, pipe, inherited=[store_fd])

    def _launch(
        self,
        kind: str,
        index: int,
        command: list[str],
        environment: dict[str, str],
        told: FirstLine | None = None,
        pipe: tuple[int, int] | None = None,
        *,
        inherited: Sequence[int | None] = (),
    ) -> Process:
        """Starts a process; it may tell us something by a pipe of its own. Worker 0 has our stdin.

        Args:
            kind: see `Process`.
            index: see `Process`.
            command: see `Process`.
            environment: see `Process`.
            told: takes what it tells.
            pipe: by which it tells it; the process owns both ends from now on.
            inherited: descriptors that it gets, too; they stay the caller's.
        """
        is_first = (kind, index) == ("worker", 0)
        stdout, stderr = self._screen.consumers(direct=is_first)
        process = Process(
            kind,
            index,
            command,
            environment,
            self._guard,
            self._memory_kills,
            stdin=None if is_first else subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            open_files=self._open_files,
            extra=told,
            extra_pipe=pipe,
            inherited=[each for each in inherited if each is not None],
        )
        self._screen.name_lines(process)
        self._running.append(process)
        return process

    # --- the loop -------------------------------------------------------------------------------

    @property
    def _ending(self) -> bool:
        return self._failure is not None or self._stop is not None

    def _living(self) -> list[int]:
        return [process.index for process in self._workers()]

    def _workers(self) -> list[Process]:
        return [process for process in self._running if process.kind == "worker"]

    def _turn(self, deadline: float = math.inf) -> None:
        """Waits for something to happen, at most until the deadline, and deals with it."""
        wake_at = [*self._escalation.times(), *self._restarts.times(), *self._silence.times()]
        wake_at += [*self._times(), *self._stragglers.times()]
        wake_at += [] if self._show_at is None else [self._show_at]
        ready = self._poll(min([deadline, *wake_at]))
        for number in self._signals.take():
            self._interrupt(number)
        for process in self._running:
            process.read(ready)
        for (kind, index), mistake in self._restarts.exchange(ready):
            self._note_mistake(kind, index, mistake)
        self._attend(ready)
        ended = [process for process in self._running if process.pidfd in ready]
        for process in ended:
            process.collect()
            self._running.remove(process)
            self._log.add("ended", pid=process.pid)
        self._lost = [process for process in ended if self._restarts.can_replace(process)]
        self._take_reports()
        # Of processes that ended together, the one killed by a signal caused the others' end;
        # then the one whose error came first.
        cause = self._reports.cause()
        for process in sorted(ended, key=lambda each: ((each.code or 0) >= 0, each.name != cause)):
            if process not in self._lost:
                self._note_end(process)
        if found := self._stragglers.find(self._workers()):
            self._fail(f"{found[1]} {found[0]}", 1, found[1])
        self._replace_lost()
        if self._ending or not (self._workers_left or self._has_workers):
            self._retire_standby()
        self._restarts.tend()
        watched = self._watched() if self._replaces else ()
        self._silence.tend(filter(self._can_lose, watched))
        self._escalation.tend(self._running)

    def _can_lose(self, process: Replaceable) -> bool:
        """Tells whether the job goes on if a running process is killed now."""
        return self._restarts.could_replace(process)

    def _watched(self) -> Iterable[Replaceable]:
        """Returns the processes that have to run, and are not to be stopped."""
        return self._running

    def _descriptors(self) -> Iterable[int]:
        """Returns more descriptors to wait for, beside processes and their output."""
        return ()

    def _times(self) -> Iterable[float]:
        """Returns the times at which there is something to do, beside the end of processes."""
        return ()

    def _leave(self) -> None:
        """Removes the names by which workers have found the job."""

    def _attend(self, ready: set[int]) -> None:
        """Deals with `_descriptors` and `_times`."""

    def _poll(self, deadline: float) -> set[int]:
        """Waits for something to happen; returns the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._signals.descriptor, select.POLLIN)
        self._restarts.register(poll)
        for descriptor in self._descriptors():
            poll.register(descriptor, select.POLLIN)
        for process in self._running:
            poll.register(process.pidfd, select.POLLIN)
            for stream in process.streams:
                if not stream.full:
                    poll.register(stream.descriptor, select.POLLIN)
        self._screen.register(poll)
        left_s = deadline - time.monotonic()
        timeout = None if left_s == math.inf else max(math.ceil(left_s * 1000), 0)
        ready = {descriptor for descriptor, _ in poll.poll(timeout)}
        self._screen.note_ready()
        return ready

    def _take_reports(self) -> None:
        """Shows at once the first error that no other process has caused; its worker may linger."""
        for name, told in list(self._inboxes.items()):
            if (failure := failure_in(told)) is not None:
                del self._inboxes[name]
                self._reports.add(name, failure)
                self._stragglers.note_failed(name)
                if self._show_at is None and not self._reports.shown:
                    self._show_at = time.monotonic() + self._patience.grace_s
        if cause := self._reports.cause():
            self._show(cause)
        elif passed(self._show_at):
            self._show_at = None
            if self._stop is None:
                self._show(self._reports.first())  # nobody has said why, and it has not ended

    def _show(self, name: str) -> None:
        """Shows the traceback of a worker, unless one was shown."""
        if not name or self._reports.shown:
            return
        self._show_at = None
        for process in self._running:
            if process.name == name:
                process.read_all()  # what it printed before comes before
        self._screen.tell_of(name, self._reports.traceback(name))

    def _note_end(self, process: Process) -> None:
        if process.kind == "standby":
            self._restarts.note_standby(process)
            return
        self._stragglers.note_end(process)
        self._restarts.release(process)
        self._ended.append(process)
        orphans = self._restarts.note_left(process, self._living())
        started = not self._workers_left
        # A server ends with 0 when all workers have said goodbye; before they exist it cannot.
        failed = process.code != 0 or not started
        consequence = failed and self._reports.is_consequence(process)
        blames = self._seeks_cause and not consequence if self._failure else self._stop is None
        if failed and not process.told_to_end and blames:
            code = 1 if consequence else process.code or 1
            when = "" if started else " before the workers were started"
            if self._restarts.has_left(process):
                when = " after it had left the job"
            text = f"{process} {process.ending()}{when}{self._restarts.obstacle(process)}"
            if culprit := self._reports.culprit(process, self._running):
                process, code, consequence = culprit, 1, False
            if code == 1 and self._reports.has(process.name):
                text = f"{process} raised {self._reports.kind(process.name)}"
            hint = f" ({process.hint()})" if process.hint() else ""
            code = code if code > 0 else 128 - code
            self._fail(f"{text}{hint}", code, process, consequence)
        elif orphans and not self._ending:
            text = f"worker {orphans[0]} was killed, and the others have left the job without it"
            self._fail(text, 1)
        elif started and not self._has_workers:
            # Nobody is left for the servers to serve.
            wait_s = self._patience.alone_s if self._ending else self._patience.goodbye_s
            self._escalation.term_within(wait_s)

    # --- processes that die ---------------------------------------------------------------------

    @property
    def _has_workers(self) -> bool:
        """True if a worker runs, or is about to be replaced."""
        return bool(self._workers()) or any(each.kind == "worker" for each in self._lost)

    @property
    def _replaces(self) -> bool:
        """True if the job may replace members: all were started, and it is not ending."""
        return self._has_workers and not (self._workers_left or self._ending)

    def _note_mistake(self, kind: str, index: int, text: str) -> None:
        """Notes the message of a member about a mistake that it has found."""
        for process in self._running:
            if (process.kind, process.index) != (kind, index):
                continue
            if self._job.durable is None:  # nobody has asked for it: the job runs as it would have
                self._stragglers.note_begun(process)
                self._restarts.release(process)
                self._say(f"{process} will not be replaced if it is killed: {text}")
            else:
                self._fail(f"{process} could not be replaced if it were killed: {text}", 1, process)

    def _note_member(self, process: Replaceable) -> None:
        self._log.add("member", kind=process.kind, index=process.index, pid=process.pid)

    def _note_grant(
        self, dead: Replaceable, successor: Replaceable, number: int, term: int, **more: Any
    ) -> bool:
        """Logs a grant, on the disk before the successor knows its term; True for a death."""
        evidence = self._restarts.ending(dead)
        about = {"kind": dead.kind, "index": number, "term": term, "pid": successor.pid, **more}
        self._log.add("grant", sync=True, **about, dead=dead.pid, evidence=evidence)
        return True

    def _replace_lost(self) -> None:
        """Replaces lost members, after all other ends, which may be the end of the job."""
        self._lost.sort(key=lambda each: each.kind != "worker")  # without any there is no job
        while self._lost:
            replaces = self._replaces  # it counts itself, if it is a worker
            process = self._lost.pop(0)
            if replaces:
                self._replace_member(process)
            else:
                self._note_end(process)

    def _replace_member(self, process: Process) -> None:
        """Replaces a member that has ended, unless too many have died in its place."""
        how = f"{process} {self._restarts.ending(process)}"
        code = process.code or 1
        try:
            if told := self._restarts.pass_on(process, self._living()):
                self._say(f"{how}; {told}")
                return
            if told is not None and self._restarts.count(process):
                successor, restarts = self._restarts.replace(process)
                # The new process finds out whether a worker's script can go on.
                place = f"{process.name} is started again as pid {successor.pid}"
                if process.kind == "server":
                    successor.rename("server", process.index)
                    self._screen.name_lines(successor)
                    place = f"{successor} takes its place"
                self._say(f"{how}; {place} (restart {restarts})")
                return
            text = f"{how} {self._restarts.history(process)}"
            text += f" ({process.hint()})" if process.hint() else ""
        except (OSError, KeeperError) as error:
            text = f"{how} and cannot be replaced: {error}"
        self._restarts.release(process)
        self._ended.append(process)
        self._died = True
        self._fail(text, code if code > 0 else 128 - code, process)

    def _retire_standby(self) -> None:
        """Ends the standby, which is not needed any more; it has nothing to clean up."""
        if (standby := self._restarts.retire()) is not None:
            standby.signal(signal.SIGTERM)
        if self._running and all(process.kind == "standby" for process in self._running):
            self._escalation.term_within(0)

    # --- the end --------------------------------------------------------------------------------

    def _fail(
        self, text: str, code: int, process: Process | None = None, consequence: bool = False
    ) -> None:
        """Marks the job as failed: the other processes get their time, then they are ended.

        A consequence may be seen before its cause, as on a busy machine. The cause is to blame.
        """
        if self._ending and not (self._seeks_cause and self._stop is None):
            return
        self._failure, self._seeks_cause = (text, code), consequence
        self._failed = process
        if process is not None:
            killed = process.code is not None and process.code < 0
            self._died |= killed or self._restarts.is_successor(process)
        self._log.add("failed", text=text)
        patience = self._patience
        wait_s = patience.stuck_s if consequence else patience.grace_s
        self._escalation.term_within(wait_s if self._has_workers else patience.alone_s)

    def _interrupt(self, number: int) -> None:
        """Handles a signal to end."""
        now = time.monotonic()
        if self._stop is not None:
            if number == signal.SIGINT and now - self._stopped_at > _SECOND_INTERRUPT_S:
                self._escalation.kill(self._running)
            return
        self._stop, self._stopped_at = number, now
        workers = self._workers()
        if number == signal.SIGINT:
            self._say("SIGINT: the job is being ended; once more Ctrl-C kills it")
        for process in self._running if workers else ():  # before, servers may not have begun
            if process.kind == "server":
                process.signal(signal.SIGINT)  # it goes on, and tells nobody that workers end
        for process in workers:
            process.signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self._escalation.term_within(self._patience.grace_s if workers else 0)

    def _tell_failures(self) -> bool:
        """Shows the errors not shown yet: the one that ended the job in full, the others in a line.

        Returns:
            True if there were lines.
        """
        if self._failed is not None:
            self._show(self._failed.name if self._reports.has(self._failed.name) else "")
        elif self._stop is None:
            self._show(self._reports.first())
        failed = self._failed
        # Workers that disagree learn it from a server, which then ends first and is not to blame.
        blamed = failed is not None and (failed.kind == "worker" or failed.code != 1)
        lines = self._reports.lines(blamed)
        for name, line in lines:
            self._screen.tell_of(name, line)
        return bool(lines)

    def _summarize(self) -> None:
        shortened = self._tell_failures()
        for process in self._running:
            self._say(f"{process} cannot be killed; it hangs in the kernel")
        if self._failure is not None:
            self._say(f"{self._failure[0]}; this ended the job")
            others = [
                f"{process.name} {process.ending()}"
                for process in self._ended
                if process.code != 0 and process is not self._failed
            ]
            if others:
                self._say(f"after that {', '.join(others)}")
            self._advise()
        elif self._stop is not None:
            self._say(f"ended by {signal_name(self._stop)}")
            self._advise()
        else:
            for process in self._ended:
                if process.told_to_end:
                    wait_s = self._patience.goodbye_s
                    text = f"did not end within {wait_s:g} s after the last worker and was ended"
                    if not self._restarts.is_successor(process):
                        text += (
                            "; it waits for workers that have not joined the job: perhaps the "
                            "script never calls tw.init()"
                        )
                    self._say(f"{process} {text}")
        if shortened:
            self._say("--full-tracebacks shows where each of these workers was")
        if self._screen.loss:
            self._say(f"some output was lost: {self._screen.loss}")

    def _advise(self) -> None:
        """Says how another job goes on, if it can."""
        log = self._log.read() if self._log.path else None
        if advice := resume_line(log, self._command, self._died):
            self._say(advice)

    def _flush(self) -> None:
        """Writes pending output. A reader may take its time, but after a signal not for ever."""
        deadline = math.inf if self._stop is None else time.monotonic() + self._patience.kill_s
        while self._screen.pending:
            self._poll(deadline)
            if passed(deadline) or self._signals.take():
                return
