"""The conformance suite between two machines: targets in one, the checks in the other.

Importing numpy takes seconds in a machine, so neither side starts an interpreter per check: one
process forks the targets, which is safe because it never has a Node, and one runs the checks.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

from tensorwire.testing import Channel, Elsewhere, Member, run_check
from tensorwire.testing.target import serve_target

ENDING_S = 20.0


def serve_forks(address: str) -> None:
    """Program of the targets' machine: forks a Target per connection, and passes signals on."""
    with socket.create_server((address, 0), backlog=64) as listener:
        print("port", listener.getsockname()[1], flush=True)
        while True:
            accepted, _ = listener.accept()
            with Connection(accepted.detach()) as connection:
                what, value = connection.recv()
                if what == "target":
                    fork_target(listener, connection, value)
                else:
                    connection.send(pass_on(*value))


def fork_target(listener: socket.socket, connection: Connection, options: dict[str, Any]) -> None:
    if os.fork() != 0:
        return
    code = 1
    try:
        listener.close()
        connection.send(("value", os.getpid()))
        serve_target(Channel(connection), options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def pass_on(pid: int, number: int) -> int | None:
    """Sends a signal to a target; 0 waits for its end. Returns its exit code if it has ended."""
    if number:
        os.kill(pid, number)
    if number == signal.SIGSTOP:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if number in (0, signal.SIGKILL):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None


class FarMember(Channel):
    """A forked target, as the machine of the checks sees it."""

    def __init__(self, address: tuple[str, int], options: dict[str, Any]) -> None:
        super().__init__(ask(address, "target", options))
        self._address = address
        self.pid = self.recv()
        self.killed = False

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.killed = True

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def cont(self) -> None:
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> int | None:
        with ask(self._address, "signal", (self.pid, number)) as connection:
            if not connection.poll(ENDING_S):
                raise TimeoutError(f"no answer to signal {number} within {ENDING_S:g} s")
            return cast(int | None, connection.recv())

    def log(self) -> str:
        return "(its log is with the process that forks the targets)"

    def close(self) -> None:
        self._connection.close()


def ask(address: tuple[str, int], what: str, value: Any) -> Connection:
    connection = Connection(socket.create_connection(address, timeout=ENDING_S).detach())
    os.set_blocking(connection.fileno(), True)
    connection.send((what, value))
    return connection


@contextlib.contextmanager
def far_target(address: tuple[str, int], options: dict[str, Any]) -> Iterator[Member]:
    """Starts a Target and ends it with the block."""
    member = FarMember(address, options)
    try:
        yield cast(Member, member)
    except BaseException:
        if not member.killed:
            member.kill()
        raise
    finally:
        member.close()
    if not member.killed:
        assert member.signal(0) == 0, "the target ended with an error"


def serve_checks(
    channel: Channel, address: tuple[str, int], near: dict[str, Any], far: dict[str, Any]
) -> None:
    """Process function of the other machine: runs the checks that it is told, one by one."""
    place = Elsewhere(lambda options: far_target(address, options), near, far, "two machines")
    with contextlib.suppress(EOFError):
        while True:
            name, transport = channel.recv(None)
            failure = None
            try:
                run_check(name, transport, place)
            except Exception:
                failure = traceback.format_exc()
            channel.send(failure)


if __name__ == "__main__":
    serve_forks(sys.argv[1])
