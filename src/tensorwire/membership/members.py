"""Who is in the job, and how to reach the servers.

The processes' side of the environment variables that a launcher sets; docs/launch.md lists them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorwire.errors import PeerLostError, TensorwireError, UnavailableError
from tensorwire.memory import Node, Peer

from .engines import MAX_WORKERS, number

RANK, WORKERS, SERVERS, SLICES = (
    "TENSORWIRE_RANK",
    "TENSORWIRE_WORKERS",
    "TENSORWIRE_SERVERS",
    "TENSORWIRE_SLICES",
)

LOOPBACK = ("127.", "[::1]", "localhost")
"""How addresses begin that name this host."""

CONTROL = "control"
"""Region at every server: one word per worker, CONTROL_BYTES apart."""
CONTROL_BYTES = 64
GOODBYE = 1 << 62
"""Value of a worker's control word when it has left in good order."""

_MOST_NAMES = 8  # that one message lists


def why_lost(peer: Peer) -> str:
    """The reason alone, for a message that names the peer already."""
    reason = peer.lost_reason.rpartition("): ")[2]
    if "closed by its user" in reason:
        return "it ended before the others; its own messages tell why"
    return reason


def called(peer: Peer) -> str:
    """For messages: "worker 1 (pid 77)", on another host "worker 1 (pid 77 at 10.0.0.2)"."""
    host = peer.address.rpartition(":")[0]
    here = peer.path.transport == "shm" or host.startswith(LOOPBACK)
    where = "" if here else f" at {host}"
    return f"{peer.name.replace('-', ' ')} (pid {peer.pid}{where})"


def turn_away(peer: Peer, here: str, reason: str) -> None:
    """Ends a connection that is none of the job's; the other side and a line here tell why.

    Args:
        peer: who has connected and proved the secret.
        here: the member that says it.
        reason: why, with the names that are expected.
    """
    text = f"{here} turned away {peer.name!r} (pid {peer.pid} at {peer.address}): {reason}"
    peer.close(text)
    print(text, file=sys.stderr, flush=True)


def listed(names: Sequence[str]) -> str:
    """For messages: "worker-0, worker-1 and 7 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def check_name(peer: Peer, name: str, address: str) -> None:
    """Raises UnavailableError, and closes the connection, if another Node listens there."""
    if peer.name != name:
        peer.close()
        raise UnavailableError(f"{peer.name!r} (pid {peer.pid}) listens at {address}, not {name}")


def introductions_in(numbers: Sequence[float]) -> list[tuple[int, int]]:
    """Every worker's `WorkerMember.introduction`, of the sums over what all have told.

    Raises:
        ValueError: one of them is none.
    """
    found = list(zip(numbers[::2], numbers[1::2], strict=True))
    for rank, (host, port) in enumerate(found):
        whole = host.is_integer() and port.is_integer()
        if not (whole and 0 <= host < 1 << 48 and 0 <= port < 1 << 16):
            raise ValueError(
                f"worker {rank} introduced itself with host {host:g} and port {port:g}, which "
                "makes no sense; all workers are of one version of tensorwire"
            )
    return [(int(host), int(port)) for host, port in found]


def worker_name(rank: int) -> str:
    """The name of a worker's Node."""
    return f"worker-{rank}"


def server_name(index: int) -> str:
    """The name of a server's Node."""
    return f"server-{index}"


@dataclass(frozen=True, slots=True)
class World:
    """This worker's place in its job.

    Attributes:
        rank: 0 to workers - 1.
        workers: how many.
        servers: addresses, in order; empty when the process is alone.
        slices: parts of a step, a multiple of replicas.
        pipeline: workers that share one copy of a model, consecutive ones: a replica.
    """

    rank: int = 0
    workers: int = 1
    servers: tuple[str, ...] = ()
    slices: int = 1
    pipeline: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.workers // self.pipeline

    @property
    def stage(self) -> int:
        """Which process of its pipeline this is."""
        return self.rank % self.pipeline

    @property
    def my_slices(self) -> range:
        """Those that this worker's replica computes."""
        each = self.slices // self.replicas
        replica = self.rank // self.pipeline
        return range(replica * each, (replica + 1) * each)

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> World | None:
        """What the launcher said; None if there is no launcher.

        Raises:
            ValueError: a variable is missing or makes no sense.
        """
        if SERVERS not in environ:
            _check_unsaid(environ)
            slices = _number(environ, SLICES, "1", 1, MAX_WORKERS)
            return World(slices=slices) if slices > 1 else None
        workers = _number(environ, WORKERS, None, 1, MAX_WORKERS)
        rank = _number(environ, RANK, None, 0, workers - 1)
        slices = _number(environ, SLICES, str(workers), 1, MAX_WORKERS)
        addresses = tuple(filter(None, (a.strip() for a in environ[SERVERS].split(","))))
        if not addresses:
            raise ValueError(f"{SERVERS} is empty; it lists the servers' addresses")
        return World(rank, workers, addresses, slices)

    def check(self) -> None:
        """Raises ValueError if workers cannot be dealt to pipelines, or slices to replicas."""
        if self.pipeline < 1 or self.workers % self.pipeline:
            raise ValueError(
                f"{self.workers} workers cannot be dealt to pipelines of {self.pipeline}; start a "
                "multiple"
            )
        if self.slices % self.replicas:
            whom = "workers" if self.pipeline == 1 else "replicas"
            raise ValueError(
                f"{self.slices} slices cannot be dealt equally to {self.replicas} {whom}; "
                "choose a multiple"
            )


def _number(environ: Mapping[str, str], name: str, default: str | None, low: int, high: int) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ValueError(f"{SERVERS} is set and {name} is not; start the script by a launcher")
    return number(name, text, low, high)


class WorkerMember:
    """A worker on the fabric, connected to every server.

    Attributes:
        place: its place.
        node: its Node.
        servers: Peers, in order.
    """

    def __init__(self, place: World, node: Node, servers: tuple[Peer, ...]) -> None:
        self.place = place
        self.node = node
        self.servers = servers
        self._introductions: Sequence[tuple[int, int]] = ()
        self._neighbour: tuple[int, Peer] | None = None
        offset = CONTROL_BYTES * place.rank
        self._control = [peer.region(CONTROL).word(offset) for peer in servers]

    @staticmethod
    def join(place: World, timeout_s: float = 60.0) -> WorkerMember:
        """Connects to the servers.

        Raises:
            UnavailableError: a server cannot be reached; the message names it.
            ValueError: the environment makes no sense.
        """
        place.check()
        node = _worker_node(place)
        try:
            peers = []
            for index, address in enumerate(place.servers):
                try:
                    peers.append(node.connect(address, timeout_s=timeout_s))
                    check_name(peers[-1], server_name(index), address)
                except TensorwireError as error:
                    raise UnavailableError(
                        f"worker {place.rank} cannot join: server {index} at {address}: {error}"
                    ) from error
            return WorkerMember(place, node, tuple(peers))
        except BaseException:
            node.close()
            raise

    def introduction(self) -> tuple[int, int]:
        """What the others have to know to find neighbours: this host, and a port on it.

        Host is 0 where a view cannot or need not be shared: a server is here, or memory must not be
        shared.
        """
        here = any(peer.path.transport == "shm" for peer in self.servers)
        if here or "shm" not in self.node.transports:
            return 0, 0
        return this_host(), int(self.node.address.rpartition(":")[2])

    def introduce(self, introductions: Sequence[tuple[int, int]]) -> None:
        """Takes the introductions of all workers, by rank."""
        self._introductions = introductions

    def neighbour(self) -> tuple[int, Peer] | None:
        """Rank and Peer of the worker of this host whose view of the parameters this one shares.

        Over a network, what a server sends is then sent once per host. It is the first worker of
        the host, or with pipelines the first with the same part of the model; None: this one has a
        view of its own, or a server on this host has. Called when all open a store.
        """
        place, told = self.place, self._introductions
        if self._neighbour is not None or not told or not told[place.rank][0]:
            return self._neighbour
        for rank in range(place.stage, place.rank, place.pipeline):
            if told[rank][0] == told[place.rank][0]:
                # Hosts can look the same and not be; then each worker has its view, as elsewhere.
                with contextlib.suppress(TensorwireError):
                    peer = self.node.connect(f"127.0.0.1:{told[rank][1]}")
                    if peer.path.transport == "shm" and peer.name == worker_name(rank):
                        self._neighbour = rank, peer
                    else:
                        peer.close()
                break
        self._introductions = ()
        return self._neighbour

    def tell(self, value: int) -> None:
        """Raises this worker's control word at every server."""
        for word in self._control:
            word.set(value).wait(30.0)

    def close(self, goodbye: bool = True) -> None:
        """Leaves. Without `goodbye` the others learn that this worker failed. Idempotent."""
        if self.node.closed:
            return
        for word in self._control if goodbye else ():
            # The first server that has everybody's goodbye ends; the others still wait for theirs.
            with contextlib.suppress(TensorwireError):
                word.set(GOODBYE).wait(30.0)
        self.node.close()


def _check_unsaid(environ: Mapping[str, str]) -> None:
    """Raises ValueError if a launcher's variables say that there are others, but not the servers.

    One worker needs nobody.
    """
    told = [name for name in (RANK, WORKERS) if environ.get(name)]
    if told and (environ.get(WORKERS) != "1" or environ.get(RANK, "0") != "0"):
        names = " and ".join(told)
        raise ValueError(
            f"{names} say that this is a worker of a job and {SERVERS} is not set, so that it "
            f"cannot join the others: unset {names}, or pass {SERVERS} on too; "
            "tw.init(rank=0, world_size=1) if this process is to train alone"
        )


def this_host() -> int:
    """The same for all processes that can share memory and a loopback interface; 48 bits, or 0."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        text = f"{boot} {os.readlink('/proc/self/ns/net')} {os.geteuid()}"
    except OSError:
        return 0  # nobody can tell
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little") or 1


def _worker_node(place: World) -> Node:
    """Only workers of this host connect to a worker, so it is not seen on the network.

    Such a Node does not look for rdma by itself; where servers are on other hosts it does.
    """
    name, listen = worker_name(place.rank), "127.0.0.1:0"
    elsewhere = not all(address.startswith(LOOPBACK) for address in place.servers)
    if elsewhere and not os.environ.get("TENSORWIRE_TRANSPORTS"):
        # Else by tcp; a PathWarning tells it if the servers have rdma.
        with contextlib.suppress(UnavailableError, MemoryError):
            return Node(name, listen=listen, transports=["shm", "rdma", "tcp"])
    return Node(name, listen=listen)


class ServerMember:
    """A server on the fabric.

    Args:
        index: its place among the servers.
        workers: how many there are.
        node: its Node.
        count: how many servers there are; None: nobody knows yet, they come one after another.

    Attributes:
        index: its place among the servers.
        node: its Node.
        workers: Peers by rank, complete after `gather`.
        servers: Peers of the other servers by index.
    """

    def __init__(self, index: int, workers: int, node: Node, count: int | None = None) -> None:
        self.index = index
        self.node = node
        self.count = workers
        self._servers = count
        self._ranks = {worker_name(rank): rank for rank in range(workers)}
        self.workers: dict[int, Peer] = {}
        self.servers: dict[int, Peer] = {}
        self.control = node.allocate(CONTROL_BYTES * workers, name=CONTROL, access="w")
        self.words = [self.control.word(CONTROL_BYTES * rank) for rank in range(workers)]

    def connect(self, addresses: tuple[str, ...], timeout_s: float = 60.0) -> None:
        """Connects to the servers that were started before this one."""
        for index, address in enumerate(addresses):
            peer = self.node.connect(address, timeout_s=timeout_s)
            check_name(peer, server_name(index), address)
            self.servers[index] = peer

    def gather(self) -> None:
        """Waits until every worker has connected, and servers that came later.

        Where nobody knows how many servers there are, later ones have connected before any worker
        was started. Who is not expected, or is here already, is turned away.

        Raises:
            PeerLostError: one that had connected is gone.
        """
        while len(self.workers) < self.count or (self._servers and self._next_servers()):
            try:
                peer = self.node.accept(timeout_s=1.0)
            except TimeoutError:
                self.check()
            else:
                self._admit(peer)

    def _next_servers(self) -> list[int]:
        """Who of the servers may come now."""
        if self._servers is None:
            return [len(self.servers) + 1]  # earlier ones are here, later ones come in turn
        return [i for i in range(self.index + 1, self._servers) if i not in self.servers]

    def _admit(self, peer: Peer) -> None:
        missing = {
            name: (self.workers, rank)
            for name, rank in self._ranks.items()
            if rank not in self.workers
        }
        missing |= {server_name(i): (self.servers, i) for i in self._next_servers()}
        if peer.name in missing:
            table, number = missing[peer.name]
            table[number] = peer
            return
        known = [*self.workers.values(), *self.servers.values()]
        here = [called(other) for other in known if other.name == peer.name]
        why = f"{here[0]} is here already" if here else "it is no member of this job"
        self._turn_away(peer, f"{why}; expected: {listed(list(missing))}")

    def _turn_away(self, peer: Peer, reason: str) -> None:
        turn_away(peer, f"server {self.index}", reason)

    def returned(self) -> tuple[Peer, Peer] | None:
        """A worker that came back while the job runs: as it was, and as it is. After `gather`.

        It is another incarnation, which knows nothing of the job; the first one is gone, or cannot
        be heard although it was not yet missed. On one host an end is seen at once, so that a
        second one of a name is none of the job's; it is turned away, as strangers are.
        """
        with contextlib.suppress(TimeoutError):
            while True:
                peer = self.node.accept(timeout_s=0)
                before = self.workers.get(self._ranks.get(peer.name, -1))
                if before is None:
                    self._turn_away(peer, "it is no member of this job, which runs")
                elif before.lost or before.path.transport != "shm":
                    return before, peer
                else:
                    self._turn_away(peer, f"{called(before)} is here already, and the job runs")
        return None

    def name_of(self, peer: Peer) -> str:
        """For messages; see `called`."""
        return called(peer)

    def await_ends(self, timeout_s: float) -> None:
        """Waits until the processes of lost workers are gone, so that their end is seen first.

        A launcher then blames them, and not those who end because of them.
        """
        deadline = time.monotonic() + timeout_s
        for rank, peer in self.workers.items():
            while (peer.lost or self.has_left(rank)) and time.monotonic() < deadline:
                if not os.path.exists(f"/proc/{peer.pid}"):
                    break
                time.sleep(0.01)

    def has_left(self, rank: int) -> bool:
        """The worker said goodbye."""
        return self.words[rank].value >= GOODBYE

    def check(self) -> None:
        """Raises PeerLostError if a worker is gone without a goodbye, or a server is gone."""
        for rank, peer in self.workers.items():
            if peer.lost and not self.has_left(rank):
                raise PeerLostError(f"{self.name_of(peer)} was lost: {why_lost(peer)}")
        for peer in self.servers.values():
            if peer.lost and not self._all_leave(2.0):
                raise PeerLostError(f"{self.name_of(peer)} was lost: {why_lost(peer)}")

    def _all_leave(self, timeout_s: float) -> bool:
        """A server that is lost may have had all goodbyes; those to this one are on their way."""
        deadline = time.monotonic() + timeout_s
        while not all(self.has_left(rank) for rank in range(self.count)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True
