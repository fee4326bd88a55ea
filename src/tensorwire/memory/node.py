"""Defines the Node, this process on the fabric, and its settings from arguments and environment.

Peers and regions are defined elsewhere; this module joins them to the core's Node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path as FilePath
from time import monotonic
from typing import Any

from tensorwire import _core
from tensorwire._core import Transfer

from .arguments import byte_count, descriptor_number, name_text, seconds, whole_number
from .bandwidth import source_address
from .gpu import gpu_number
from .handle import Handle, access_flags, join_address, split_address
from .lent import LentRegion
from .open_node import OpenNode
from .path_warning import warn_if_slower
from .peer import Peer
from .region import Region, Word, adoptable

TRANSPORTS = ("shm", "rdma", "tcp")
MIN_SECRET_BYTES = 16
_RESOLVE_S = 10.0


class Node:
    """This process as others see it: owns regions, listens for peers, and drives all transfers.

    One per process is enough; several are allowed. It has one background thread, which works only
    while no thread of yours waits. Any thread may use it. In a forked child it is unusable: every
    method raises `ClosedError` there; start a Node of its own in the child.

    Args:
        name: shown to peers; default host name and process number. At most 63 bytes.
        listen: "host:port" to accept peers on; port 0 chooses a free one. A name is resolved when
            the Node is made, for at most 10 s; its first address is taken.
        advertise: the host that others reach this Node by, for `address` and handles. Default: the
            host of `listen`; for a wildcard ("0.0.0.0", "[::]") the address of the interface with
            the default route.
        secret: what every process of the job shares, at least 16 bytes. Default: the content of the
            file named by TENSORWIRE_SECRET_FILE (surrounding white space is removed), else
            TENSORWIRE_SECRET. Without one, only a loopback address is accepted.
        transports: which may be used, of "shm", "rdma", "tcp". Default: TENSORWIRE_TRANSPORTS
            (separated by commas), else shm and tcp, and rdma too if `listen` is not loopback and
            this host has an active RDMA port and UCX. Named here, rdma is an error where it cannot
            be had.
        rdma_device: the NIC for rdma by name: "mlx5_0", "mlx5_0:1" (with its port) or its network
            interface. Default: TENSORWIRE_RDMA_DEVICE, else every active port. Naming one makes it
            an error if it cannot be used.
        quota_bytes: how much all peers together may allocate here with `Peer.allocate`. Default:
            4 GiB, or half of the memory that this process may have (its control group's limit, the
            host's memory) if that is less.
        max_peers: how many connections are held at a time.
        handshake_timeout_s: how long a new connection may take to prove itself.
        peer_timeout_s: a link that is silent for that long counts as lost; from 3 to 86400 (a day).
            Default: TENSORWIRE_PEER_TIMEOUT, else 10.
        incarnation: of the Node of an earlier process that this one goes on as, see `restore`: 1 to
            2**64 - 1. There must never be two at a time. Default: 64 random bits.
        listener: descriptor of a TCP socket that is bound and listens, see `Node.listener`: peers
            are accepted there, first the ones that came before this Node. `listen` and `advertise`
            then only give the host of `address`; the port is the socket's. The Node takes a
            duplicate; the descriptor stays the caller's, and its socket becomes non-blocking.

    Attributes:
        name: the name that peers see.
        address: "host:port" to connect to, with the real port.
        transports: which may be used, besides rdma where that is looked for by itself.
        incarnation: 64 random bits that identify this Node among all that ever lived. Only a Node
            that goes on as an earlier one has its number.

    Raises:
        ValueError: a malformed address, an unknown transport, a secret that is too short, a
            TENSORWIRE_TLS that is none or is "on" without a secret, a timeout that is no number
            above 0, an address other than loopback without a secret, an incarnation out of range,
            or a listener that is no listening TCP socket.
        UnavailableError: a transport is known but not available here, the address cannot be
            listened on, or others than this host may connect and OpenSSL cannot be loaded.
        TimeoutError: the name in `listen` was not resolved in time.
        BusyError: a system limit is reached.
    """

    __slots__ = (
        "__weakref__",
        "_core",
        "_free_choice",
        "_open",
        "address",
        "incarnation",
        "name",
        "transports",
    )

    def __init__(
        self,
        name: str | None = None,
        *,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        secret: bytes | None = None,
        transports: Iterable[str] | None = None,
        rdma_device: str | None = None,
        quota_bytes: int | None = None,
        max_peers: int = 1024,
        handshake_timeout_s: float = 10.0,
        peer_timeout_s: float | None = None,
        incarnation: int | None = None,
        listener: int | None = None,
    ) -> None:
        host, port = split_address(listen)
        secret = _choose_secret(secret)
        # Resolved once, so that what is checked is what is listened on.
        if listener is None:
            addresses = _resolve(host)
        else:
            listener = descriptor_number(listener)
            addresses = [_core.listening_host(listener)]
        if incarnation is not None:
            incarnation = whole_number(incarnation, 1, (1 << 64) - 1, "an incarnation")
        loopback = all(ip_address(each).is_loopback for each in addresses)
        if not secret and not loopback:
            shown = host if listener is None else addresses[0]
            raise ValueError(
                f"without a secret a Node listens on loopback only, not on {shown}: pass secret=, "
                "or set TENSORWIRE_SECRET_FILE to a file with at least "
                f"{MIN_SECRET_BYTES} random bytes that every process of the job can read"
            )
        advertised = advertise or _reachable_host(host)
        split_address(join_address(advertised, port))
        chosen, try_rdma = _choose_transports(transports)
        device = rdma_device or os.environ.get("TENSORWIRE_RDMA_DEVICE", "")
        if device and try_rdma:
            chosen, try_rdma = [*chosen, "rdma"], False
        # A caller who restricts the paths knows that others would be faster.
        self._free_choice = transports is None and not os.environ.get("TENSORWIRE_TRANSPORTS")
        if quota_bytes is None:
            quota_bytes = min(4 << 30, _core.memory_limit()[0] // 2)
        # Names of hosts are up to 64 bytes long, names of Nodes 63.
        name = name or f"{os.uname().nodename[:50]}-{os.getpid()}"
        if not isinstance(device, str):
            raise TypeError(f"rdma_device is the name of a device, not {device!r}")
        self._core = _core.Node(
            name_text(name, "Node"),
            addresses[0],
            port,
            secret,
            chosen,
            try_rdma and not loopback,
            device,
            whole_number(quota_bytes, 0, (1 << 63) - 1, "quota_bytes"),
            whole_number(max_peers, 1, (1 << 31) - 1, "max_peers"),
            seconds(handshake_timeout_s, "handshake_timeout_s", above=0.0),
            _choose_peer_timeout(peer_timeout_s),
            incarnation or 0,
            -1 if listener is None else listener,
            _choose_tls(),
        )
        self.name = self._core.name
        self.transports = tuple(chosen)
        self.address = join_address(advertised, self._core.port)
        self.incarnation = self._core.incarnation
        self._open = OpenNode(self._core, self.address)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._core.closed

    @property
    def peers(self) -> list[Peer]:
        """The peers that are connected now, in either direction."""
        return [Peer(self._open, core) for core in self._core.peers()]

    def __repr__(self) -> str:
        return f"<Node {self.name!r} at {self.address}{', closed' if self.closed else ''}>"

    def allocate(
        self,
        size_bytes: int,
        *,
        name: str | None = None,
        access: str = "rw",
        mappable: bool = False,
        device: Any = None,
    ) -> Region:
        """Allocates zeroed memory that peers can reach.

        Args:
            size_bytes: at least 1. Starts on a page.
            name: unique in this Node; peers find it by `Peer.region(name)`. Without a name they
                need its handle.
            access: what peers may do: "rw", "r" (a write grant cannot be revoked later on one
                host, so give it only where it is needed), "w", or "none".
            mappable: `Region.private` works also if this Node's transports leave out shm.
            device: None or "cpu" is memory of the host, "cuda:N" or a torch.device memory of a GPU
                as this process counts them, which comes in whole 2 MiB. No words are in it, and
                access "r" is a promise that processes of this host keep by themselves.

        Raises:
            TypeError: the device is none.
            ValueError: size, access, name or device is not valid, the name is taken, or there is no
                such GPU.
            UnavailableError: NVIDIA's driver cannot be used; the message tells why.
            MemoryError: the system, or the GPU, has not enough memory.
            BusyError: the Node has as many regions as it can have.
            ClosedError: the Node was closed.
        """
        readable, writable = access_flags(access)
        size_bytes = byte_count(size_bytes)
        gpu = gpu_number(device)
        core = self._core.allocate(
            size_bytes, name_text(name or "", "region"), writable, readable, bool(mappable), gpu
        )
        return Region(self._open, core, 0, core.size_bytes)

    def restore(
        self,
        descriptor: int,
        *,
        name: str | None,
        id: int,
        generation: int,
        size_bytes: int,
        access: str = "rw",
        on_gpu: bool = False,
    ) -> Region:
        """Takes up a region that a former process had: the same memory under the same number.

        For a process that goes on as the Node of one that ended (`Node(incarnation=)`): handles,
        and what peers were granted, are then good here. The content stays as it is. Restore regions
        before others are allocated, or one of those may get an id that is needed. A region that
        is not restored yet is stale for peers, so restore or allocate last a region whose name
        they wait for (`Peer.wait_region`). Any thread may call it.

        Args:
            descriptor: what `Region.descriptor` gave in the former process. It stays the caller's.
            name: the region's name, None or "" if it had none.
            id: of its handle (`Handle.id`).
            generation: of its handle.
            size_bytes: of its handle.
            access: what peers may do: "rw", "w" or "none". A region with access "r" cannot be
                restored: its memory is sealed, so that nobody, this process included, can map it
                for writing any more.
            on_gpu: it was allocated on a GPU (`Region.device`), which this process must see.

        Raises:
            ValueError: a name or id that is taken, an id, generation, size or access that no
                restored region can have, or a descriptor that is not of the memory of a region of
                this size, or of memory that is sealed against writing (access "r").
            MemoryError: it cannot be mapped.
            BusyError: no descriptor is left.
            UnavailableError: this Node's transports leave out shm; or the memory is on a GPU that
                this process cannot use.
            ClosedError: the Node was closed.
        """
        readable, writable = access_flags(access)
        core = self._core.restore(
            descriptor_number(descriptor),
            name_text(name or "", "region"),
            whole_number(id, 0, (1 << 32) - 1, "a region's id"),
            whole_number(generation, 1, (1 << 64) - 1, "a region's generation"),
            byte_count(size_bytes),
            writable,
            readable,
            on_gpu,
        )
        return Region(self._open, core, 0, core.size_bytes)

    def lend(self, descriptor: int, *, name: str, size_bytes: int) -> LentRegion:
        """Lets peers of this Node read memory that another Node of this process has.

        For a Node whose peers may only read what the peers of the other one write: neither side
        copies anything, and peers of this Node reach nothing else of the other Node. They
        find it by `Peer.region(name)`, with access "r". On one host they get a descriptor that is
        opened for reading alone, so that they cannot map the memory for writing.

        Args:
            descriptor: of the region's memory, opened for reading alone: what `os.open` gives for
                "/proc/self/fd/N", where N is from `Region.descriptor`. It stays the caller's.
            name: unique in this Node; `Node.region` does not find it.
            size_bytes: how much of the memory, from its start.

        Raises:
            ValueError: a name that is taken, or a descriptor that is not of the memory of a region
                of at least this size, or is good for writing.
            MemoryError: it cannot be mapped.
            BusyError: no descriptor is left, or the Node has as many regions as it can have.
            UnavailableError: this Node's transports have rdma.
            ClosedError: the Node was closed.
        """
        core = self._core.lend(
            descriptor_number(descriptor), byte_count(size_bytes), name_text(name, "region")
        )
        return LentRegion(self._open, core)

    def adopt(self, tensor: Any, *, name: str | None = None, access: str = "rw") -> Region:
        """Allocates a region of the right size and moves an array or tensor in.

        See `Region.adopt`: a torch tensor lives in the region afterwards, which is on its device;
        of a numpy array a copy does, reached by `region.array(dtype, shape)`.

        Raises:
            TypeError: neither an array nor a tensor, or it holds Python objects.
            ValueError: it is empty, not contiguous, or neither on the CPU nor on a GPU of CUDA.
            UnavailableError, MemoryError, BusyError, ClosedError: as for `allocate`.
        """
        size, _ = adoptable(tensor)
        device = tensor.device if getattr(tensor, "is_cuda", False) else None
        region = self.allocate(size, name=name, access=access, device=device)
        region.adopt(tensor)
        return region

    def region(self, name: str) -> Region:
        """Finds a region of this Node by name, also one that a peer allocated here.

        Raises:
            LookupError: there is none.
            ClosedError: the Node was closed.
        """
        core = self._core.region(name_text(name, "region"))
        return Region(self._open, core, 0, core.size_bytes)

    def connect(
        self,
        address_or_handle: str | Handle,
        *,
        timeout_s: float = 10.0,
        require: str | None = None,
    ) -> Peer:
        """Connects to the Node that listens at an address; its side needs no call.

        Args:
            address_or_handle: "host:port", or a Handle, of which only the address is used:
                `Peer.region(handle)` then tells whether it is still valid.
            timeout_s: for resolving the name, connecting, and the mutual proof of the secret.
            require: a transport, to fail rather than fall back to a slower one.

        Warns:
            PathWarning: both ends could have a faster path; once per address and process, and not
                if `transports`, TENSORWIRE_TRANSPORTS or `require` restrict the choice.

        Raises:
            PeerLostError: nobody listens there, or the other side hung up.
            TimeoutError: no answer in time.
            PermissionError: the secrets differ, or one side encrypts and the other does not.
            UnavailableError: `require` cannot be had, or no transport is common to both.
            ValueError: malformed address or unknown transport.
            ClosedError: the Node was closed.
        """
        if isinstance(address_or_handle, Handle):
            address_or_handle = address_or_handle.address
        host, port = split_address(address_or_handle)
        if port == 0:
            raise ValueError(f"{address_or_handle!r} has port 0; use the other Node's .address")
        required = "" if require is None else _choose_transports([require])[0][0]
        peer = Peer(self._open, self._core.connect(host, port, timeout_s, required))
        if require is None and self._free_choice:
            core = peer._core
            try:
                warn_if_slower(core.address, core.name, core.transport, core.reason, core.offered)
            except BaseException:
                peer.close()  # the warning is an error here, so the caller gets no peer
                raise
        return peer

    def accept(self, timeout_s: float | None = None) -> Peer:
        """Waits for the next peer that connects here; each is returned once.

        Calling it is not needed to be reachable: connections are served in any case.

        Raises:
            TimeoutError: nobody came in time (None waits for ever).
            ClosedError: the Node was closed.
        """
        return Peer(self._open, self._core.accept(timeout_s))

    def wait_until(
        self,
        word: Word,
        value: int,
        timeout_s: float | None = None,
        *,
        peer: Peer | None = None,
    ) -> None:
        """Blocks until a word of this Node is at least `value`; see `Word.wait_until`."""
        if not isinstance(word, Word):
            raise TypeError(f"wait_until takes a Word (region.word(offset)), not {word!r}")
        word.wait_until(value, timeout_s, peer=peer)

    def listener(self) -> int:
        """Returns a descriptor of the listening socket, for a process that takes this one's place.

        It is the caller's, who closes it (`os.close`). As long as anybody has one, peers can
        connect, and wait until somebody accepts them: `Node(listener=)`.

        Raises:
            BusyError: no descriptor is left.
            ClosedError: the Node was closed, or listens no more; or this is a forked child.
        """
        return self._core.listener()

    def stop_listening(self) -> None:
        """Accepts no more peers, and gives back the two descriptors that this takes.

        Peers that are connected stay. Calling it again does nothing.

        Raises:
            ClosedError: the Node was closed; or this is a forked child.
        """
        self._core.stop_listening()

    def stats(self) -> dict[str, int]:
        """Returns counters of this Node since its start; docs/memory-advanced.md explains each."""
        return self._core.stats()

    def close(self) -> None:
        """Ends everything; calling it again, or in a forked child, does nothing.

        Transfers in flight complete with `ClosedError`, waiting calls raise it, and peers see this
        Node as lost at once. Every descriptor is closed, and the memory of regions, its own and
        mapped ones, is given back, whatever objects of the Node are still referenced: all but what
        arrays, tensors and memoryviews show, which stays for them and goes with the last of them.
        """
        self._open.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_all(transfers: Iterable[Transfer], timeout_s: float | None = None) -> None:
    """Waits until every transfer is complete.

    Also after the first failure it waits for the others, so that all buffers are free to use
    afterwards, unless it raises TimeoutError.

    Args:
        transfers: of any peers.
        timeout_s: for all together; None waits for ever.

    Raises:
        TimeoutError: not all were complete in time. They go on.
        ClosedError, PeerLostError, StaleHandleError, ...: the error of the first transfer, in the
            order given, that failed.
    """
    deadline = None if timeout_s is None else monotonic() + seconds(timeout_s, "timeout_s")
    failed = None
    for transfer in transfers:
        try:
            transfer.wait(None if deadline is None else max(deadline - monotonic(), 0.0))
        except Exception as error:
            if not transfer.done():
                raise
            failed = failed or error
    if failed is not None:
        raise failed


def _choose_secret(secret: bytes | None) -> bytes:
    source = "secret"
    if secret is None:
        if path := os.environ.get("TENSORWIRE_SECRET_FILE"):
            source = f"the secret in {path} (TENSORWIRE_SECRET_FILE)"
            try:
                secret = FilePath(path).read_bytes().strip()
            except OSError as error:
                raise ValueError(f"{source} cannot be read: {error}") from error
        elif text := os.environ.get("TENSORWIRE_SECRET"):
            source = "TENSORWIRE_SECRET"
            secret = os.fsencode(text)
        else:
            return b""
    if not isinstance(secret, bytes):
        raise TypeError(f"secret is bytes, not {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"{source} has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are asked")
    return secret


def _choose_transports(transports: Iterable[str] | None) -> tuple[list[str], bool]:
    """Returns the transports to use, and whether rdma is one more where it can be had."""
    if transports is None:
        text = os.environ.get("TENSORWIRE_TRANSPORTS", "")
        if not text.strip():
            return ["shm", "tcp"], True
        transports = [name.strip() for name in text.split(",")]
    elif isinstance(transports, str):
        raise TypeError(f"transports is a list of names, such as [{transports!r}]")
    chosen = list(transports)
    for name in chosen:
        if name not in TRANSPORTS:
            raise ValueError(f"unknown transport {name!r}; known are {', '.join(TRANSPORTS)}")
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"transports names each transport at most once and one at least: {chosen}")
    return chosen, False


def _choose_tls() -> str:
    """Returns the value of TENSORWIRE_TLS, "auto" without one; the core checks it."""
    chosen = os.environ.get("TENSORWIRE_TLS", "").strip() or "auto"
    if chosen != "off":
        # The core takes the OpenSSL that is loaded. Were another one loaded before Python's own,
        # Python's ssl could not be imported any more.
        with contextlib.suppress(ImportError):
            import _ssl  # noqa: F401
    return chosen


def _choose_peer_timeout(timeout_s: float | None) -> float:
    if timeout_s is not None:
        source, given = "peer_timeout_s", repr(timeout_s)
        found = seconds(timeout_s, source)
    else:
        source = "TENSORWIRE_PEER_TIMEOUT"
        given = os.environ.get(source, "").strip() or "10"
        try:
            found = float(given)
        except ValueError:
            found = 0.0
    if not 3 <= found <= 86400:
        raise ValueError(f"{source} is {given}, not a number of seconds from 3 to 86400")
    return found


def _resolve(host: str) -> list[str]:
    try:
        return _core.resolve(host, _RESOLVE_S)
    except ValueError as error:
        raise ValueError(f"cannot listen on {host!r}: {error}") from error


def _reachable_host(host: str) -> str:
    """Returns `host`; for a wildcard the address of the interface that leads out of the machine."""
    if host not in ("0.0.0.0", "::"):
        return host
    found = source_address("192.0.2.1" if host == "0.0.0.0" else "2001:db8::1")
    if found is None:
        raise ValueError(
            f"listening on {host} needs advertise=: no interface leads out of this machine, so it "
            "is not clear by which address others reach it"
        )
    return found
