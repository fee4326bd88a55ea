"""The stage of trials: the victim and the honest parties, each a process; a training job beside.

`Ground` is the network they stand on and lives as long as the run; a `Stage` is built on it and
serves trial after trial until somebody was harmed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, ClassVar

import distance
import honest
import hosts
from actor import memory_of
from attack import Aim
from judge import Evidence

from tensorwire.testing import Member, PeerGroup

SECRET = b"known to every member"
QUOTA_BYTES = 16 << 20
HERE = Path(__file__).parent
CALL_S = 6.0  # for a call to a process
START_S = 60.0  # for a process to start, on a machine that others use
SETTLE_S = 3.0  # to forget attackers and to give everything back
UNDISTURBED_S = 0.6
FILL = {"open": 0x11, "read": 0x22, "write": 0x33, "none": 0x44, "secret": 0x55}
ACCESS = {"open": "rw", "read": "r", "write": "w", "none": "none", "secret": "rw"}
CHANGEABLE = ("open", "write")


class Ground(contextlib.ExitStack):
    """Two network namespaces, if this machine makes them: all stand in one, attackers may be away.

    Attributes:
        away: path of the other namespace; None if there is one network only.
        why: the reason for that.
        host: the address of the victim as seen from away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.away: str | None = None
        self.host = "127.0.0.1"
        self.why = hosts.missing()
        if self.why is None:
            home, away = self.enter_context(hosts.two_hosts())
            self.enter_context(hosts.enter(home.path))
            self.away, self.host = away.path, home.address


class Stage:
    """A victim with honest parties, at work. `begin` and `end` enclose an attack."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.job: Job | None = None  # while it is the job that is attacked
        self._stack = contextlib.ExitStack()
        try:
            self._build()
            self._undisturbed: dict[tuple[str, str], float] = {}
            self._undisturbed = self._look_undisturbed()
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        # What is left to end is killed: a victim that was harmed may not end by itself.
        group = self._stack.enter_context(_Killed())
        options = {"name": "victim", "secret": SECRET, "quota_bytes": QUOTA_BYTES,
                   "listen": "0.0.0.0:0", "advertise": "127.0.0.1"}  # fmt: skip
        self.victim = group.start(honest.victim, options, name="victim")
        address = call(self.victim, "address", within_s=START_S)
        handles = {}
        for name, fill in FILL.items():
            size = 65_536
            access = ACCESS[name]
            handle = self.ask("allocate", name, size, access, None if name == "secret" else name)
            handles[name] = (handle.id, handle.generation, size)
            self.ask("fill", name, 0, bytes([fill]) * size)
        for name in ("shm", "tcp", "newcomer", "distant"):
            size = 64 + honest.PAYLOAD_BYTES
            self.ask("allocate", f"for {name}", size, "rw", f"for {name}")
        self.port = int(address.rpartition(":")[2])
        self.parties: dict[str, Member] = {}
        incarnations = [self.ask("incarnation")]
        for transport in ("shm", "tcp"):
            member = group.start(honest.pair, address, transport, SECRET, name=transport)
            where, incarnation = member.recv(START_S)
            incarnations.append(incarnation)
            self.ask("answer", transport, where)
            member.send("go")
            self.parties[transport] = member
        self.aim = Aim(address, SECRET.hex(), handles, tuple(incarnations), self.victim.pid)
        far = group.start(distance.relay, address, name="distance").recv(START_S)
        for name, where, how in (("newcomer", address, ["shm", "tcp"]), ("distant", far, ["tcp"])):
            self.parties[name] = group.start(honest.newcomer, name, where, how, SECRET, name=name)
        echo = group.start(honest.plain_echo, name="echo")
        self.plain = group.start(honest.plain, echo.recv(START_S), name="plain")
        self.ask("work")
        for member in (*self.parties.values(), self.plain):
            call(member, "begin", within_s=START_S)

    def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the victim."""
        return call(self.victim, method, *args)

    def _look_undisturbed(self) -> dict[tuple[str, str], float]:
        time.sleep(0.2)
        self._all("begin")
        time.sleep(UNDISTURBED_S)
        seen = self._all("end")
        errors = [error for party in seen.values() for error in party.errors]
        assert not errors, f"honest parties fail before any attack: {errors[:3]}"
        self._rest()
        self.ask("reasons_missing")
        self.ask("mark")
        self._peers = self.ask("peer_count")
        self._memory_bytes = self.ask("rss_bytes")
        self._peak_bytes = memory_of(self.victim.pid)["VmHWM"]
        self._go_on()
        return {
            (name, kind): timed.median_s
            for name, party in seen.items()
            for kind, timed in party.operations.items()
        }

    def _all(self, method: str) -> dict[str, Any]:
        everybody = {**self.parties, "victim": self.victim}
        return {name: call(member, method) for name, member in everybody.items()}

    def _rest(self) -> None:
        for name, rests in self._all("rest").items():
            assert rests, f"{name} does not come to rest"

    def _go_on(self) -> None:
        self._all("go_on")

    # ---- a trial

    def begin(self) -> None:
        """Tells all honest parties that the attack begins."""
        self._all("begin")
        call(self.plain, "begin")
        if self.job:
            self.job.begin()
        self._begun, self._waited = time.monotonic(), waited(self.victim.pid)

    def end(self) -> Evidence:
        """Ends the attack and returns the evidence; its processes may still live."""
        after, seconds = waited(self.victim.pid), time.monotonic() - self._begun
        parties: dict[str, Any] = {}
        facts = []
        for name, member in {**self.parties, "victim": self.victim}.items():
            try:
                parties[name] = call(member, "end")
            except Exception as error:
                facts.append(f"{name}: does not answer: {str(error).splitlines()[0]}")
        evidence = Evidence(parties, call(self.plain, "end"), seconds=seconds, facts=facts)
        evidence.undisturbed = self._undisturbed
        evidence.waited_s = max(
            (after_s - self._waited.get(thread, 0.0) for thread, after_s in after.items()),
            default=0.0,
        )
        if self.job:
            evidence.job_steps = self.job.steps()
            evidence.job_undisturbed_s = self.job.undisturbed_s
            evidence.facts += self.job.ended()
        return evidence

    def settle(self, evidence: Evidence) -> None:
        """No attacker is left: what is still held, changed or missing is added to the evidence."""
        try:
            self._settle(evidence)
        except Exception as error:
            evidence.facts.append(f"afterwards: {' '.join(str(error).split())[:200]}")

    def _settle(self, evidence: Evidence) -> None:
        self._rest()
        deadline = time.monotonic() + SETTLE_S
        while (count := self.ask("peer_count")) != self._peers:
            if time.monotonic() > deadline:
                evidence.facts.append(f"{count} peers are left where {self._peers} were")
                break
            time.sleep(0.01)
        for name, fill in FILL.items():
            size = self.aim.regions[name][2]
            if name not in CHANGEABLE and not self.ask("is_filled", name, 0, size, fill):
                evidence.facts.append(f"the region {name!r} was changed")
        evidence.facts += self.ask("reasons_missing")[:3]
        evidence.growth = self.ask("growth", SETTLE_S)
        evidence.memory_bytes = self.ask("rss_bytes") - self._memory_bytes
        evidence.peak_bytes = memory_of(self.victim.pid)["VmHWM"] - self._peak_bytes
        evidence.idle_share = processor_share(self.victim.pid, 0.15)
        self._go_on()


_silent: list[Member] = []  # who did not answer a call in time


class _Killed(PeerGroup):
    """A group whose processes are killed at the end."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.kill()
        super().__exit__(kind, error, trace)


def call(member: Member, method: str, *args: Any, within_s: float = CALL_S) -> Any:
    """Calls a method of the object in another process.

    Raises:
        TimeoutError, MemberError: there is no answer in time, or the process has ended. It is not
            asked again: a late answer would be taken for one to another question.
    """
    if member in _silent:
        raise TimeoutError(f"{member.name} did not answer before")
    member.send((method, args))
    try:
        error, result = member.recv(within_s)
    except TimeoutError:
        _silent.append(member)
        raise
    if error is not None:
        raise AssertionError(f"{method} in {member.name}: {error}")
    return result


def processor_share(pid: int, seconds: float) -> float:
    """How much of a core a process uses in the next seconds."""

    def used_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / float(os.sysconf("SC_CLK_TCK"))

    before_s, start = used_s(), time.monotonic()
    time.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - start)


def waited(pid: int) -> dict[str, float]:
    """Seconds that each thread of a process was ready to run and had no core, so far."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the kernel does not count
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) * 1e-9
    return found


class Job:
    """A small training job that goes on all the time: two workers and a server, `training.py`."""

    START_S: ClassVar = 240.0

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            self._log = stack.enter_context((folder / "log").open("w+"))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tensorwire", "run", "--workers", "2", "--transports",
                 "shm,tcp", str(HERE / "training.py"), str(folder)],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                start_new_session=True,
            )  # fmt: skip
            stack.callback(self._stop)
            self._steps = folder / "steps"
            self._wait_for_steps(20)
            address, secret = (folder / "aim").read_text().split()
            self.aim = Aim(address, secret)
            self.begin()
            self._wait_for_steps(60)
            self.undisturbed_s = median(self.steps())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + self.START_S
        while len(self._times()) < count:
            assert not self.ended(), self.ended()[0]
            assert time.monotonic() < deadline, f"the job does no step in {self.START_S:g} s"
            time.sleep(0.05)

    def _times(self) -> list[float]:
        with contextlib.suppress(FileNotFoundError):
            data = self._steps.read_bytes()
            return [time_s for (time_s,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]
        return []

    def begin(self) -> None:
        self._begun = time.monotonic()

    def steps(self) -> list[float]:
        """Seconds between two steps since `begin`; the last one is still under way."""
        times = [time_s for time_s in self._times() if time_s >= self._begun]
        ends = [self._begun, *times, time.monotonic()]
        gaps = [after - before for before, after in itertools.pairwise(ends)]
        return gaps if times else [math.inf]

    def ended(self) -> list[str]:
        """Returns a complaint if it does not run any more."""
        if self._process.poll() is None:
            return []
        self._log.flush()
        text = Path(self._log.name).read_text()[-600:]
        return [f"the job ended with {self._process.returncode}: {' '.join(text.split())}"]
