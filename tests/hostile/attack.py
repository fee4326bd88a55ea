"""Attacks: classes with parameters from a trial's seed, run in processes of their own.

Attackers import nothing of tensorwire: their knowledge of it is in `wire`. A process gets its task
on its command line, says on stdout when it is prepared and what it did, and begins when stdin tells
it to.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401  socket imports it late, when nobody may not read it any more
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import wire
from wire import HungUp, Wire

NOBODY = 65534
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 28, 1 << 29, 1 << 30
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)

# What an attacker must expect of a victim that defends itself.
REPELLED = (HungUp, OSError, AssertionError)


@dataclass(frozen=True)
class Aim:
    """The knowledge of an attacker about its victim.

    Attributes:
        address: where the Node listens, as seen from the attacker.
        secret: of the job, in hexadecimal; strangers do not look at it.
        regions: name -> (id, generation, size) of what members may look up.
        others: incarnations of honest Nodes.
        pid: its process, for the test of the judge alone.
    """

    address: str
    secret: str
    regions: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    others: tuple[int, ...] = ()
    pid: int = 0

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


class Attack:
    """One kind of attack. An heir has a docstring, `draw` and `act`.

    Attributes:
        uids: of which users it may run, one is drawn. It needs root to become another one.
        spaces: of which namespaces, see `enter_space`.
        processes: how many of it run at a time.
        owner: it listens, and the victim connects to it; `address` is then where.
        second: it attacks a second Node of the victim's, which is closed in the middle.
    """

    uids: ClassVar[tuple[int, ...]] = (0,)
    spaces: ClassVar[tuple[str, ...]] = ("here",)
    processes: ClassVar[int] = 1
    owner: ClassVar[str] = ""
    second: ClassVar[bool] = False

    def __init__(self, aim: Aim, random: Random, values: dict[str, Any]) -> None:
        self.aim, self.random, self.values = aim, random, values
        self.acts = 0
        self.until = 0.0

    @classmethod
    def draw(cls, random: Random) -> dict[str, Any]:
        """The parameters of one run, to be printed and passed on; JSON values."""
        return {}

    def prepare(self) -> dict[str, Any]:
        """Prepares the attack, still as root; returns facts for the harness."""
        return {}

    def act(self) -> None:
        """Makes one step; called again and again. The victim's defence may raise errors here."""
        raise NotImplementedError

    def rest(self) -> None:
        """Ends the attack, while nothing has been closed."""

    # ---- for heirs

    @property
    def left_s(self) -> float:
        return max(self.until - time.monotonic(), 0.0)

    def incarnation(self) -> int:
        """The victim's, from the Hello that everybody gets."""
        with wire.dial(self.aim.address) as stream:
            theirs = stream.greet(wire.hello(self.aim.key))
        return int(wire.decode("Hello", theirs)["incarnation"])

    def member(self, transport: str, **values: Any) -> Wire:
        """A stream of a member of the job, ready for frames."""
        return wire.connect(transport, self.aim.address, self.aim.key, **values)

    def pause(self, most_s: float) -> None:
        time.sleep(min(self.random.random() * most_s, self.left_s))


def granted(stream: Wire, name: str) -> dict[str, int]:
    """Region and generation of a region by name, as fields of further frames."""
    answer = stream.ask(wire.LOOKUP, name.encode())
    assert (answer.type, answer.status) == (wire.GRANT, wire.OK)
    return {"region": answer.region, "generation": answer.generation}


def here(address: str) -> bool:
    """True if the victim can be reached by shm, too: it is in the same network namespace."""
    return address.startswith("127.")


def names_of_sockets() -> set[str]:
    """Returns the names of all sockets for descriptors in this network namespace."""
    words = Path("/proc/net/unix").read_text().split()
    return {"\0" + word[1:] for word in words if word.startswith("@tensorwire-")}


def abort(stream: socket.socket) -> None:
    """Closes a TCP stream by a reset."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.close()


# ---- the process


def call(name: str, *arguments: Any) -> None:
    """A function of the C library that returns 0."""
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def apart(run: Callable[..., None], *arguments: Any) -> None:
    """Runs a function in another process, which ends with this one and never goes on as it.

    A failure there is printed to stderr, so that the trial counts as broken.
    """
    if os.fork() == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            run(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def enter_space(space: str) -> None:
    """Moves this process: "here", "mounts and processes", "user", or "network:PATH".

    The second and the third are like containers that share a network namespace with the victim. In
    a user namespace the process calls itself root, whichever user it is outside.
    """
    if space == "mounts and processes":
        call("unshare", CLONE_NEWNS | CLONE_NEWPID)
        if pid := os.fork():
            _wait_for(pid)
    elif space == "user":
        uid = os.geteuid()
        call("unshare", CLONE_NEWUSER)
        with contextlib.suppress(OSError):
            for path, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1")):
                with open(f"/proc/self/{path}", "w") as file:
                    file.write(text)
    elif space.startswith("network:"):
        with open(space.removeprefix("network:"), "rb") as file:
            call("setns", file.fileno(), CLONE_NEWNET)
    else:
        assert space == "here", space


def _wait_for(pid: int) -> None:
    """Ends as a child does: the rest of a process that forked to enter a namespace of processes."""
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def become(uid: int) -> None:
    """Gives up root, for good."""
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


@dataclass(frozen=True)
class Order:
    """The task of one attacker; travels as JSON."""

    attack: str
    seed: str
    values: dict[str, Any]
    aim: Aim
    uid: int = 0
    space: str = "here"
    seconds: float = 1.5

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        values = json.loads(text)
        return cls(**{**values, "aim": Aim(**values["aim"])})


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


@contextlib.contextmanager
def counted(attack: Attack) -> Iterator[None]:
    """An act: what the victim does against it is as it should be."""
    try:
        yield
    except REPELLED:
        time.sleep(0.001)
    attack.acts += 1


def main(kinds: dict[str, type[Attack]]) -> None:
    """The process: one Order as argument; lines of JSON on stdout."""
    order = Order.from_json(sys.argv[1])
    attack = kinds[order.attack](order.aim, Random(order.seed), order.values)
    wire.PATIENCE_S = 1.0
    ready = attack.prepare()
    if order.space == "user":
        become(order.uid)
        enter_space(order.space)
    else:
        enter_space(order.space)
        become(order.uid)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    say(ready=ready)
    sys.stdin.readline()
    attack.until = time.monotonic() + order.seconds
    while attack.left_s > 0:
        with counted(attack):
            attack.act()
    attack.rest()
    say(acts=attack.acts)
    sys.stdout.flush()
    os._exit(0)  # what is open now is closed by the kernel, in its order
