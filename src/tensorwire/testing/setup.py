"""Sets up a check: a near Node here, connected to a Target, wherever that is.

Also defines the helpers that checks are written with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensorwire.memory import Node, Peer, RemoteRegion, RemoteWord, Transfer, Word

from .gpu import GpuArray, pinned_array
from .group import Member, PeerGroup
from .target import Target, beside, serve_target, target_elsewhere

# Generous: on a busy machine only the order of events may matter, never their speed.
WAIT_S = 30.0

PLACES = ("one process", "two processes")

HOST = ("host", "host")
# Kinds of memory on the local and on the remote side.
MEMORY_PAIRS = (
    HOST,
    ("host", "gpu"),
    ("pinned", "host"),
    ("pinned", "gpu"),
    ("gpu", "host"),
    ("gpu", "gpu"),
)

ErrorT = TypeVar("ErrorT", bound=Exception)


@dataclass(frozen=True)
class Elsewhere:
    """A place for targets that only the caller can start processes in: another host.

    Attributes:
        start: gives a process that runs `serve_target` with these options, and ends it with the
            block. Of a `Member` it needs `send`, `recv`, `log`, `kill`, `stop` and `cont`.
        near: more options of the Nodes here, such as where they listen and the secret.
        far: more options of the Nodes there.
        name: for messages.
    """

    start: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Member]]
    near: Mapping[str, Any]
    far: Mapping[str, Any]
    name: str = "two hosts"


@dataclass
class CheckSetup:
    """The surroundings of a check.

    Attributes:
        transport: the one that both Nodes may use.
        place: "one process", "two processes", or the name of an `Elsewhere`.
        near: the Node that connected.
        peer: the target as `near` sees it.
        target: tells the far side what to do.
        member: the target's process, None in one process.
        options: of the near Node, for a check that needs a further Node.
        memory: the kinds of memory on both sides, for checks that are for each pair.
    """

    transport: str
    place: str
    near: Node
    peer: Peer
    target: Target
    member: Member | None
    options: dict[str, Any] = field(default_factory=dict)
    memory: tuple[str, str] = HOST

    def remote(
        self, key: str, size_bytes: int, access: str = "rw", *, on: str = "host"
    ) -> RemoteRegion:
        """Lets the target allocate a region on "host" or "gpu"; returns it as it is seen here."""
        device = "cuda:0" if on == "gpu" else None
        return self.peer.region(self.target.allocate(key, size_bytes, access, None, device))

    def local(self, data: NDArray[np.uint8]) -> Any:
        """Returns a copy of these bytes in the local kind of memory; slices of it are local too."""
        if self.memory[0] == "gpu":
            return GpuArray(data)
        return data.copy() if self.memory[0] == "host" else pinned_array(data)

    def value(self, local: Any) -> NDArray[np.uint8]:
        """Returns the bytes in an object that `local` gave."""
        if isinstance(local, GpuArray):
            return np.frombuffer(local.tobytes(), np.uint8)
        return np.asarray(local)

    def refill(self, local: Any, data: NDArray[np.uint8]) -> None:
        """Puts other bytes into memory of the host that `local` gave, also from a stream."""
        local[:] = data

    @contextlib.contextmanager
    def third(self) -> Iterator[Peer]:
        """Yields the target as one more Node sees it."""
        with Node("third", **self.options) as node:
            yield node.connect(self.target.address())

    @contextlib.contextmanager
    def rounds(self, sizes: list[int]) -> Iterator[tuple[RemoteRegion, Word]]:
        """Makes the target check rounds of these sizes; see `Target.answer_rounds`.

        Yields its region, and the word that it raises after each round.
        """
        remote = self.remote("r", 64 + max(sizes))
        with self._rounds(sizes, "r") as reply:
            yield remote, reply

    @contextlib.contextmanager
    def rounds_apart(self, sizes: list[int]) -> Iterator[tuple[RemoteRegion, RemoteWord, Word]]:
        """Runs rounds like `rounds`, in memory of the remote kind, with a separate region of words.

        Yields the region, the word that announces a round, and the word that answers it.
        """
        remote = self.remote("r", max(sizes), on=self.memory[1])
        word = self.remote("words", 64).word(0)
        with self._rounds(sizes, "words") as reply:
            yield remote, word, reply

    @contextlib.contextmanager
    def _rounds(self, sizes: list[int], words: str) -> Iterator[Word]:
        reply = self.near.allocate(64, name="reply").word(0)
        self.target.accept()
        finish_target = self.target.begin("answer_rounds", "r", sizes, "reply", words)
        yield reply
        assert finish_target() == []


@functools.cache
def warm_up(transport: str) -> None:
    """Uses a transport once: objects that its library keeps for ever are there then."""
    if transport == "rdma":
        with Node(transports=[transport]) as near, Node(transports=[transport]) as far:
            near.connect(far.address)


@functools.cache
def warm_up_gpu() -> None:
    """Uses the GPU once: objects that the driver keeps for ever are there then."""
    with Node(transports=["shm"]) as near, Node(transports=["shm"]) as far:
        peer = near.connect(far.address)
        remote = peer.region(far.allocate(8, device="cuda:0").handle())
        for local in (b"12345678", GpuArray(b"12345678"), pinned_array(np.ones(8, np.uint8))):
            remote.write(local).wait(WAIT_S)


@contextlib.contextmanager
def setup(
    transport: str, place: str | Elsewhere, memory: tuple[str, str] = HOST, **options: Any
) -> Iterator[CheckSetup]:
    """Builds a CheckSetup and takes it down, whatever the check has left of it."""
    options = {"transports": [transport], **options}
    with contextlib.ExitStack() as stack:
        if isinstance(place, Elsewhere):
            member = stack.enter_context(place.start({**options, **place.far}))
            target = target_elsewhere(member)
            options, place = {**options, **place.near}, place.name
        elif place == "one process":
            member, target = None, Target(options)
            stack.callback(target.close)
        else:
            group = stack.enter_context(PeerGroup())
            member = group.start(serve_target, options, name="target")
            target = target_elsewhere(member)
        near = stack.enter_context(Node("near", **options))
        peer = near.connect(target.address())
        yield CheckSetup(transport, place, near, peer, target, member, options, memory)


def pattern(size_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    """Returns bytes that differ everywhere and between seeds; always the same ones."""
    return np.random.default_rng(seed + 1).integers(0, 256, size_bytes, np.uint8)


def finish(transfer: Transfer) -> None:
    """Waits for a transfer that must succeed."""
    transfer.wait(WAIT_S)
    assert transfer.done()
    assert transfer.code == 0


def failure_of(start: Callable[..., Any], *args: Any, **options: Any) -> Exception | None:
    """Calls something, waits if it gives a transfer, and returns the error of either, or None."""
    try:
        result = start(*args, **options)
        if isinstance(result, Transfer):
            result.wait(WAIT_S)
    except Exception as error:
        return error
    return None


def operations_on(remote: RemoteRegion) -> list[Callable[[], object]]:
    """Returns every kind of operation on the memory of a peer; makes their memory now."""
    word, writing = remote.word(0), remote.peer.prepare_write([b"x"], [remote])
    return [
        lambda: remote.write(b"x"),
        lambda: remote.read(bytearray(1)),
        lambda: remote.peer.write([b"x"], [remote]),
        lambda: writing.start(),
        lambda: word.set(1),
        lambda: word.fetch_add(1, WAIT_S),
    ]


def all_must_fail(kind: type[Exception], *starts: Callable[[], Any]) -> None:
    """Checks that each of these calls fails, like `must_fail`."""
    for start in starts:
        must_fail(kind, start)


def run_threads(*bodies: Callable[[], object]) -> None:
    """Runs functions in parallel to their end, and raises the first error of any."""
    for running in [beside(body) for body in bodies]:
        running.result(2 * WAIT_S)


def must_fail(kind: type[ErrorT], start: Callable[..., Any], *args: Any, **options: Any) -> ErrorT:
    """Checks that a call fails with an error of this kind that has a message; returns it."""
    error = failure_of(start, *args, **options)
    assert isinstance(error, kind), f"expected {kind.__name__}, got {error!r}"
    assert str(error), f"{kind.__name__} without a message"
    return error
