"""
The native core of tensorwire. Use tensorwire.memory; this module may change.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Any, Final, overload

import numpy
from numpy.typing import NDArray

from tensorwire._core import (
    bench_loops as bench_loops,
    fuse as fuse,
    rpc as rpc
)


class Buffer:
    def __init__(self, address: int, size_bytes: int, writable: bool, owner: object, gpu: int = -1, region: Region | None = None, verify: bool = False) -> None: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def gpu(self) -> int: ...

def gpus() -> tuple[str, list[str]]:
    """
    The newest CUDA that NVIDIA's driver knows, and the names of the GPUs that are seen here.
    """

def import_gpu_memory(descriptor: int, size_bytes: int, writable: bool) -> None:
    """
    Maps what a peer could pass as memory of a GPU, and lets go of it: for tests.
    """

def gpu_of(address: int) -> int:
    """The number of the GPU whose memory is at an address."""

def gpu_dlpack(array: object) -> tuple[int, int, int, object]:
    """
    Address, bytes, GPU and owner of the memory of a contiguous DLPack object.
    """

def unfilled_bytes(size: int) -> tuple[bytes, int]:
    """
    Bytes with any content, and where it is: to be filled before anybody else has them.
    """

def copied_bytes(local: object) -> bytes:
    """As bytes(local)."""

def same_bytes(one: object, other: object) -> bool: ...

def take_rows(table: object, row_bytes: int, rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], packed: object) -> None:
    """
    Copies rows of a table out of it, to `packed`, one behind the other.

    `table` has rows of `row_bytes` each and `packed` has room for those that are taken; both are contiguous memory of the host, with the buffer protocol. `rows` has their numbers, an array of int64 with one dimension, which must not change meanwhile. Much is copied by several threads; the GIL is not held. Any thread may call it.

    Raises TypeError if `rows` is another array, ValueError if a number is no row's or something has no room; nothing was copied then.
    """

def put_rows(table: object, row_bytes: int, rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], packed: object) -> None:
    """
    Copies `packed` into rows of a table; each number may be there once. See `take_rows`.
    """

def checksum(local: object) -> int: ...

class Transfer:
    """
    One operation or one batch in flight; `await` it or `wait`.

    It completes exactly once: placed in the target's memory, or failed. That tells nothing about whether the target is awake or has looked. Until then it keeps the local memory alive, which must not be changed (a source) or used (a destination). Dropping the object does not stop the transfer. Any thread may use it.
    """

    def done(self) -> bool:
        """True when it is complete, well or not. Never blocks."""

    def wait(self, timeout_s: float | None = None, *, lead: bool = True) -> None:
        """
        Waits until it is complete; may be called again, with the same outcome.

        Args:
            timeout_s: None waits for ever, 0 only looks.
            lead: the waiting thread may do the work of the Node's own meanwhile, which is
                fastest for one that waits again and again. It leaves what peers send over TCP
                to the next such waiter for up to a millisecond. False: for a thread that
                waits now and then, and does other things in between.

        Raises:
            TimeoutError: it is not complete yet. Only the waiting has ended: the transfer goes
                on, and its memory must stay as it is.
            PeerLostError: the peer or the link was lost; any part of the bytes may be placed.
            ClosedError: the Peer or Node was closed on this side, or this is a forked child.
            StaleHandleError: the region was freed; nothing was placed in other memory.
            PermissionError, ValueError: the owner of the memory refused.
        """

    def block_stream(self, stream: Any) -> None:
        """
        Lets what is put on a stream of a GPU from now on wait until the transfer is complete.

        The calling thread does not wait. The stream goes on whether the transfer ends well or not;
        `wait` tells.

        Args:
            stream: a torch.cuda.Stream, an object with `__cuda_stream__`, or a handle as an int.

        Raises:
            TypeError: none of these.
            ValueError: it is being captured into a CUDA graph, or a handle alone does not tell the
                GPU.
            UnavailableError: the driver refused.
        """

    @property
    def progress_id(self) -> int:
        """Equals that of its Node."""

    @property
    def bytes(self) -> int:
        """Payload bytes."""

    @property
    def value(self) -> int:
        """
        What the word held before a fetch_add, when that is complete (else BusyError).
        """

    @property
    def code(self) -> int:
        """The error code of a failed transfer, 0 while pending or done well."""

    def __await__(self) -> Generator[Any, None, None]: ...

class Notifier:
    @overload
    def __init__(self, node: Node) -> None: ...

    @overload
    def __init__(self, transfer: Transfer) -> None: ...

    def fileno(self) -> int: ...

    def arm(self) -> None: ...

    def disarm(self) -> None: ...

    def drain(self) -> None: ...

class PrivateMapping:
    @property
    def size_bytes(self) -> int: ...

    @property
    def tracked(self) -> bool: ...

    told_by_kernel: Final[bool] = ...
    """(arg: object, /) -> bool"""

    def written(self, compare: bool) -> list[tuple[int, int]]: ...

    def revert(self) -> None: ...

class LocalMemory:
    def __init__(self, size_bytes: int) -> None: ...

    def map_private(self) -> PrivateMapping: ...

def memory_file(name: str, size_bytes: int) -> int:
    """A memfd without pages that can be sealed, as a descriptor."""

class View:
    @property
    def address(self) -> int: ...

    @property
    def writable(self) -> bool: ...

class Region:
    @property
    def size_bytes(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    @property
    def readable(self) -> bool: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def gpu(self) -> int: ...

    def view(self) -> View: ...

    @property
    def freed(self) -> bool: ...

    @property
    def address(self) -> int: ...

    def discard(self) -> None: ...

    def map_private(self) -> PrivateMapping: ...

    def descriptor(self) -> int: ...

    def load_word(self, offset: int) -> int: ...

    def reaches(self, offset: int, value: int) -> bool: ...

class RemoteRegion:
    @property
    def size_bytes(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def writable(self) -> bool: ...

    @property
    def readable(self) -> bool: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def gpu(self) -> int: ...

    def view(self) -> View: ...

    @property
    def mapped(self) -> bool: ...

    @property
    def copied(self) -> PrivateMapping: ...

    @property
    def incarnation(self) -> int: ...

class Prepared:
    @property
    def size(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def runs(self) -> int: ...

    def start(self, indices: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None, signal: tuple[RemoteRegion, int, int] | None = None, on_stream: tuple[int, int] | None = None) -> Transfer: ...

class FaultPlan:
    def __init__(self, nth: int, action: str, delay_s: float = 0.0) -> None: ...

    @property
    def count(self) -> int: ...

    @property
    def hit(self) -> bool: ...

class Peer:
    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def transport(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def offered(self) -> list[str]: ...

    @property
    def encrypted(self) -> bool: ...

    @property
    def wire(self) -> str: ...

    @property
    def lost(self) -> bool: ...

    @property
    def lost_reason(self) -> str: ...

    def allocate(self, size_bytes: int, name: str, timeout_s: float | None) -> RemoteRegion: ...

    def lookup(self, name: str, timeout_s: float | None, await_: bool = False) -> RemoteRegion: ...

    def attach(self, id: int, generation: int, timeout_s: float | None, copied: bool = False) -> RemoteRegion: ...

    def free(self, remote: RemoteRegion, timeout_s: float | None) -> None: ...

    def write(self, locals: Sequence[object], remotes: Sequence[RemoteRegion], offsets: Sequence[int], signal: tuple[RemoteRegion, int, int] | None = None, on_stream: tuple[int, int] | None = None) -> Transfer: ...

    def read(self, locals: Sequence[object], remotes: Sequence[RemoteRegion], offsets: Sequence[int], on_stream: tuple[int, int] | None = None) -> Transfer: ...

    def write_one(self, local: object, remote: RemoteRegion, offset: int, limit: int, signal: tuple[RemoteRegion, int, int] | None = None, on_stream: tuple[int, int] | None = None) -> Transfer: ...

    def read_one(self, local: object, remote: RemoteRegion, offset: int, limit: int, on_stream: tuple[int, int] | None = None) -> Transfer: ...

    def signal(self, word: RemoteRegion, word_offset: int, value: int, after: Sequence[Transfer]) -> Transfer: ...

    def fetch_add(self, remote: RemoteRegion, offset: int, value: int) -> Transfer: ...

    def prepare(self, write: bool, locals: Sequence[object], remotes: Sequence[RemoteRegion], offsets: Sequence[int]) -> Prepared: ...

    def succeed(self, successor: Peer) -> None: ...

    def follows(self, other: Peer) -> bool: ...

    def inject(self, plan: FaultPlan | None) -> None: ...

def listening_host(socket: int) -> str: ...

class Pace:
    """
    How long waits for one thing have taken lately, for `Word.wait_until`. Any thread may use it.
    """

    def __init__(self) -> None: ...

def crowded() -> bool:
    """
    Whether more threads wanted to run lately than there are cores, on the whole host.
    """

class Node:
    def __init__(self, name: str, host: str, port: int, secret: bytes, transports: Sequence[str], try_rdma: bool, rdma_device: str, quota_bytes: int, max_peers: int, handshake_timeout_s: float, peer_timeout_s: float, incarnation: int, listener: int, tls: str) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def progress_id(self) -> int: ...

    def allocate(self, size_bytes: int, name: str, writable: bool, readable: bool, mappable: bool = False, gpu: int = -1) -> Region: ...

    def restore(self, descriptor: int, name: str, id: int, generation: int, size_bytes: int, writable: bool, readable: bool, on_gpu: bool = False) -> Region: ...

    def lend(self, descriptor: int, size_bytes: int, name: str) -> Region: ...

    def listener(self) -> int: ...

    def stop_listening(self) -> None: ...

    def region(self, name: str) -> Region: ...

    def free(self, region: Region) -> None: ...

    def connect(self, host: str, port: int, timeout_s: float | None, require: str) -> Peer: ...

    def accept(self, timeout_s: float | None) -> Peer: ...

    def peers(self) -> list[Peer]: ...

    def wait_word(self, region: Region, offset: int, value: int, timeout_s: float | None, peer: Peer | None = None, pace: Pace | None = None) -> None: ...

    def raise_word(self, region: Region, offset: int, value: int) -> None: ...

    def close_peer(self, peer: Peer, reason: str) -> None: ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...

def expect_leaks() -> None:
    """
    Says nothing at the end about objects that outlive the interpreter, as tensors of torch's own globals do.
    """

def begin_exit(before: Callable[[], None]) -> None:
    """
    The calling thread ends the interpreter: what it closes ends other threads by SystemExit, each of which calls before() first.
    """

def exiting() -> bool:
    """True after `begin_exit`."""

def resolve(host: str, timeout_s: float | None) -> list[str]:
    """The addresses of a host, as text, the best first."""

def memory_limit(root: str = '') -> tuple[int, str]:
    """
    How many bytes of memory this process may have, and what sets that limit.
    """

def control_groups(controller: str, root: str = '') -> list[tuple[bytes, str, bool]]:
    """
    The control groups that bound this process, its own first, where they can have limits of a controller such as memory: folder, name for people, and whether it is of version 2.
    """

def cpu_quota(root: str = '') -> float | None:
    """
    How many cores the control groups of this process grant at present, such as 0.5; None without a limit.
    """

def cores() -> float:
    """
    How many cores this process can keep busy: those that it may run on, or fewer, such as 0.5, where its control groups granted fewer when it began.
    """
