"""Python functions in the machines of the rig, talked to as `PeerGroup` talks to processes here.

`MachineGroup.start_on` starts one; what it gives is a `Member`. `start_actor_on` starts an
`Actor` of tests/peers. Arguments and results can be pickled.
"""

import contextlib
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from actor import PATIENCE_S, Actor, serve
from commands import MachineOffError, Process, RigError
from rig import Machine, python_environment

from tensorwire.testing import Channel, Member, PeerGroup
from tensorwire.testing.target import target_elsewhere

SECRET = b"the secret of the tests between machines"


def node_options(machine: Machine, **options: Any) -> dict[str, Any]:
    """Options of a Node that the other machine can reach."""
    return {"listen": f"{machine.address}:0", "secret": SECRET, **options}


class MachineActor(Actor):
    """An Actor that also writes a piece when it is told."""

    def write(self, offset: int, data: bytes, word: int, value: int) -> None:
        """Writes into the remote region, then raises a word, and waits for both."""
        signal_to = self._remote.word(word), value
        self._remote[offset:].write(data, signal=signal_to).wait(PATIENCE_S)


def serve_machine_actor(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: a MachineActor that is told what to do until the channel ends."""
    serve(channel, MachineActor(options))


class MachineMember(Member):
    """A process in a machine; everything of `Member` holds.

    When its machine is powered off, it has ended by SIGKILL, as expected.
    """

    def __init__(self, index: int, name: str, process: Process, connection: Connection) -> None:
        self.process = process
        self._stopped = False
        super().__init__(index, name, cast(Any, _AsPopen(process)), connection, None)

    def stop(self) -> None:
        self.process.signal(signal.SIGSTOP)
        self._stopped = True

    def cont(self) -> None:
        self.process.signal(signal.SIGCONT)
        self._stopped = False

    def log(self) -> str:
        return self.process.output

    def _is_stopped(self) -> bool:
        return self._stopped

    def _stacks(self) -> str:
        if self._stopped:
            return f"{self.log()}(stopped by a signal)"
        size = len(self.log())
        with contextlib.suppress(RigError):
            self.process.signal(signal.SIGUSR1)
        deadline = time.monotonic() + 3.0
        while len(self.log()) == size and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.log()

    def end(self, deadline: float) -> list[str]:
        self._expected_end |= not self.process.machine.is_on
        return super().end(deadline)


class _AsPopen:
    """The part of a process that `Member` uses."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        try:
            return self._process.poll()
        except MachineOffError:
            return -signal.SIGKILL

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._process.wait(60.0 if timeout is None else timeout)
        except MachineOffError:
            return -signal.SIGKILL
        except TimeoutError:
            raise subprocess.TimeoutExpired(self._process.argv, timeout or 60.0) from None


class MachineGroup(PeerGroup):
    """A `PeerGroup` whose processes may run in machines."""

    def start_on(
        self, machine: Machine, function: Callable[..., Any], *args: Any, name: str | None = None
    ) -> MachineMember:
        """Starts a member in a machine, like `start`."""
        command = "from tensorwire.testing.group import _run_member; _run_member({channel})"
        environment = {**python_environment(), **self._environment}
        process, ours = machine.start_with_channel([sys.executable, "-c", command], env=environment)
        connection = Connection(ours.detach())
        index = len(self.members)
        member = MachineMember(index, name or function.__name__, process, connection)
        self.members.append(member)
        agent = 1  # the parent of all processes there
        connection.send((function.__module__, function.__qualname__, pickle.dumps(args), agent))
        return member


def start_actor_on(
    group: MachineGroup, machine: Machine, name: str, **options: Any
) -> tuple[MachineMember, Any]:
    """Starts a process with a MachineActor, whose Node has this name."""
    options = {"name": name, **node_options(machine), **options}
    member = group.start_on(machine, serve_machine_actor, options, name=name)
    return member, target_elsewhere(member)
