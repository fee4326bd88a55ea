"""The targets of hostile tests: a victim with honest peers that must not notice, and an asker.

The victim is a Node in another process that is written to and read by liars; the asker is one that
connects to liars. Around every test, `unharmed` checks the state afterwards.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import wire
from actor import MIB, PATIENCE_S, Actor, eventually, memory_of, serve, start_actor
from wire import Wire

from tensorwire import Handle, Node, RemoteRegion, TensorwireError
from tensorwire.testing import Channel, Member, PeerGroup

SECRET = b"known to every member"
HANDSHAKE_S = 1.5  # how long the victim lets strangers try
MAX_PEERS = 64
QUOTA_BYTES = 1 << 20
OPEN_BYTES = 65_536
FILL = {"open": 0x11, "read": 0x22, "write": 0x33, "none": 0x44, "secret": 0x55}
GROWTH_BYTES = 24 * MIB  # far less than what the attacks send


class Asker(Actor):
    """Asks a Node that lies, and tells how each question ended: "" or the error as text."""

    def ask(self, what: str, *args: Any) -> str:
        try:
            getattr(self, f"_{what}")(*args)
        except (TensorwireError, ValueError, LookupError, PermissionError, MemoryError) as error:
            if isinstance(error, UnicodeError):
                raise  # a ValueError, but nothing that a user of memory expects
            return f"{type(error).__name__}: {error}"
        return ""

    def _connect(self, address: str, timeout_s: float = PATIENCE_S) -> None:
        self._link = self._node.connect(address, timeout_s=timeout_s)

    def _find(self, name: str = "r") -> None:
        self._remote: RemoteRegion = self._link.region(name)

    def _write(self, size_bytes: int) -> None:
        self._remote[:size_bytes].write(np.full(size_bytes, 7, np.uint8)).wait(PATIENCE_S)

    def _read(self, size_bytes: int) -> None:
        self._remote[:size_bytes].read(np.zeros(size_bytes, np.uint8)).wait(PATIENCE_S)

    def _read_pieces(self, sizes: list[int]) -> None:
        remotes = [self._remote[at << 20 :][:size] for at, size in enumerate(sizes)]
        locals_ = [np.zeros(size, np.uint8) for size in sizes]
        self._link.read(locals_, remotes).wait(PATIENCE_S)
        assert all((local == ord("d")).all() for local in locals_)

    def _signal(self) -> None:
        self._remote.word(0).set(1).wait(PATIENCE_S)

    def _add(self) -> None:
        self._remote.word(0).fetch_add(1)

    def describe(self) -> list[str]:
        """Everything about the peer that a program may print."""
        texts = [repr(self._link), self._link.name, self._link.address, self._link.lost_reason]
        return texts + [repr(peer) for peer in self._node.peers]

    def forget(self) -> None:
        """Drops what it has of the liar, and with it the mapped memory."""
        self.__dict__.pop("_remote", None)
        self.__dict__.pop("_link", None)

    def lost_reason(self) -> str:
        """Waits until the peer is lost."""
        eventually(lambda: self._link.lost, "the liar is dropped")
        return self._link.lost_reason


def serve_asker(channel: Channel, options: dict[str, Any]) -> None:
    """Process function: an Asker that is told what to do until the channel ends."""
    serve(channel, Asker(options))


class HonestPeer:
    """Writes to a region of a Node, reads back and compares, again and again in a thread."""

    SIZE = 20_000

    def __init__(self, address: str, transport: str, secret: bytes) -> None:
        self._node = Node(f"honest {transport}", secret=secret, transports=[transport])
        self._remote = self._node.connect(address).allocate(self.SIZE)
        self.rounds = 0
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"honest {transport}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            payload, back = np.empty(self.SIZE - 64, np.uint8), np.empty(self.SIZE - 64, np.uint8)
            # Not at full speed: it is to be there all the time, not to wear out the machine.
            while not self._over.wait(0.002):
                payload.fill(self.rounds % 251)
                word = self._remote.word(0)
                self._remote[64:].write(payload, signal=(word, self.rounds + 1)).wait(PATIENCE_S)
                self._remote[64:].read(back).wait(PATIENCE_S)
                assert (payload == back).all(), "bytes were changed under way"
                assert word.fetch_add(0) == self.rounds + 1, "the word was changed"
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def goes_on(self) -> None:
        """Waits for some more rounds; raises what has gone wrong, if anything has."""
        before = self.rounds
        eventually(lambda: self._error or self.rounds >= before + 3, "honest traffic goes on")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        self._node.close()


@dataclass
class Victim:
    """A Node with a region of each kind, its process, and the peers that talk to it honestly."""

    address: str
    member: Member
    target: Any
    handles: dict[str, Handle]
    honest: list[HonestPeer]

    def connect(self, transport: str, **values: Any) -> Wire:
        """A member of the job that is about to lie."""
        return wire.connect(transport, self.address, SECRET, **values)

    def dial(self) -> Wire:
        """A stranger, before the handshake."""
        return wire.dial(self.address)

    def unchanged(self, *names: str) -> None:
        """Fails if a byte of these regions is not what it was."""
        for name in names:
            size = self.handles[name].size_bytes
            assert self.target.is_filled(name, 0, size, FILL[name]), f"{name} was changed"

    def peak_bytes(self) -> int:
        """The most memory that the process ever had."""
        return memory_of(self.member.pid)["VmHWM"]

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """After the block: nothing has changed that was not granted for writing, honest traffic
        goes on, liars are forgotten, and no descriptor or much memory is or was held."""
        self.target.fill("open", 0, bytes([FILL["open"]]) * OPEN_BYTES)
        self.target.mark()
        peak_bytes = self.peak_bytes()
        yield
        self.unchanged("read", "write", "none", "secret")
        for peer in self.honest:
            peer.goes_on()
        eventually(lambda: self.target.peer_count() == len(self.honest), "liars are forgotten")
        assert self.target.growth(PATIENCE_S) == []
        assert self.peak_bytes() - peak_bytes < GROWTH_BYTES


@contextlib.contextmanager
def start_victim() -> Iterator[Victim]:
    """A victim, at work."""
    options = {
        "secret": SECRET,
        "quota_bytes": QUOTA_BYTES,
        "max_peers": MAX_PEERS,
        "handshake_timeout_s": HANDSHAKE_S,
    }
    with PeerGroup() as group:
        member, target = start_actor(group, "victim", **options)
        handles = {
            "open": target.allocate("open", OPEN_BYTES, "rw", "open"),
            "read": target.allocate("read", 4096, "r", "read"),
            "write": target.allocate("write", 100, "w", "write"),
            "none": target.allocate("none", 64, "none", "none"),
            "secret": target.allocate("secret", 4096, "rw"),
        }
        for name, handle in handles.items():
            target.fill(name, 0, bytes([FILL[name]]) * handle.size_bytes)
        address = target.address()
        honest = [HonestPeer(address, transport, SECRET) for transport in ("shm", "tcp")]
        for peer in honest:
            peer.goes_on()
        yield Victim(address, member, target, handles, honest)
        for peer in honest:
            peer.close()
