"""Torch rendezvous: workers of an engine meet at a store of torch.distributed.

It is the store of the default process group if there is one; else worker 0 keeps one at MASTER_ADDR
and MASTER_PORT, which `init_process_group` may share, before or after. Through it workers claim
their ranks, tell on which host they are, and get the job's secret. docs/launchers.md has the trust.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import multiprocessing
import os
import queue
import secrets
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from tensorwire.errors import UnavailableError
from tensorwire.jobs.claim import drop_claim, hold_claim, refusal
from tensorwire.jobs.engines import Start, explicit_start, find_start, torch_job
from tensorwire.jobs.host import this_host
from tensorwire.memory.bandwidth import source_address
from tensorwire.outside import parse_json

JOIN_TIMEOUT = "TENSORWIRE_JOIN_TIMEOUT"
_PAUSES_S = 0.005, 0.1  # between two looks at what may be there: the first one, and the longest
_ENTRY_S = 3.0  # for a store to answer a client that has reached it; then it is tried again
_ELSEWHERE = "192.0.2.1"  # an address that no host has

_meetings = itertools.count()  # which all workers hold in the same order
_kept: dict[tuple[str, int], Any] = {}  # for good: if worker 0 closed a store, all would lose it


class Meeting:
    """The workers of a job, all of them there; made by `meet`.

    Args:
        start: this worker.
        store: as below.
        deadline: of `time.monotonic`, until when all have to be there; else `join_timeout_s`.

    Attributes:
        rank: this worker.
        workers: how many there are.
        store: what they share, empty but for this meeting.
        hosts: the ranks of each host, in order; hosts by their first rank.
        address: where all hosts can reach worker 0; "" if the engine did not say it.
    """

    _deadline: float | None = None

    def __init__(self, start: Start, store: Any, deadline: float | None = None) -> None:
        self.rank = start.rank
        self.workers = start.workers
        self.store = store
        self.address = start.host
        self._told_by = start.told_by
        self._deadline = deadline or time.monotonic() + join_timeout_s()
        self._claim()
        members = self._gather()
        hosts: dict[str, list[int]] = {}
        for rank, member in enumerate(members):
            # A host that cannot be told from others is one of its own.
            hosts.setdefault(member["host"] or f"of {rank}", []).append(rank)
        self.hosts = list(hosts.values())
        self._agree_on_secret()
        self._deadline = None  # what comes later has its own time

    @property
    def listen(self) -> str:
        """The address of this host that sockets for other workers must listen on."""
        return "127.0.0.1" if len(self.hosts) == 1 else address_towards(self.address)

    def _claim(self) -> None:
        me = f"process {os.getpid()} on {socket.gethostname()}"
        if self.store.add(f"claims/{self.rank}", 1) > 1:
            key = f"members/{self.rank}"
            holder = "another process"
            if self.store.check([key]):
                holder = parse_json(self.store.get(key), dict[str, str])["name"]
            raise RuntimeError(refusal(self.rank, self._told_by, holder))
        told = {"host": str(this_host() or ""), "name": me}
        self.store.set(f"members/{self.rank}", json.dumps(told))

    def _gather(self) -> list[dict[str, str]]:
        names = {f"members/{rank}": f"worker {rank}" for rank in range(self.workers)}
        self.wait(names, f"{self._told_by} say {self.workers} workers; start all of them")
        return [parse_json(self.store.get(key), dict[str, str]) for key in names]

    def wait(self, keys: Mapping[str, str], advice: str) -> None:
        """Waits until all keys are in the store, for `join_timeout_s`; Ctrl-C ends it at once.

        Args:
            keys: each with the name of the process that sets it.
            advice: what to do if one does not.

        Raises:
            UnavailableError: the time is over, or the store is gone; the message names the missing
                workers.
        """
        deadline = time.monotonic() + join_timeout_s() if self._deadline is None else self._deadline
        try:
            missing = [who for key, who in keys.items() if not self._has(key, deadline)]
        except RuntimeError as error:
            raise UnavailableError(
                f"worker {self.rank} has lost the store at which the workers meet, so worker 0 "
                f"has probably ended; its own error tells why ({_line(error)})"
            ) from error
        if missing:
            raise UnavailableError(
                f"worker {self.rank} waited {join_timeout_s():g} s ({JOIN_TIMEOUT}) for "
                f"{', '.join(missing)}: {advice}"
            )

    def _has(self, key: str, deadline: float) -> bool:
        """Waits for a key in the store; unlike `store.wait`, this handles signals."""
        for pause_s in _pauses_s(deadline):
            if self.store.check([key]):
                return True
            time.sleep(pause_s)
        return bool(self.store.check([key]))

    def _agree_on_secret(self) -> None:
        """Agrees on the secret, which then is in the environment, and no longer in the store."""
        environ = os.environ
        names = "TENSORWIRE_SECRET_FILE", "TENSORWIRE_SECRET"
        mine = next((name for name in names if environ.get(name)), "")
        if self.rank == 0:
            if not mine:
                environ["TENSORWIRE_SECRET"] = secrets.token_hex(32)
                _make_private(self.store)
            self.store.set("secret", mine or environ["TENSORWIRE_SECRET"])
        self.wait({"secret": "worker 0"}, "its own error tells why it did not go on")
        told = self.store.get("secret").decode()
        theirs = told if told in names else ""
        if self.rank > 0 and theirs != mine:
            raise ValueError(
                f"worker 0 has its secret from {theirs or 'nobody'} and worker {self.rank} from "
                f"{mine or 'nobody'}: set TENSORWIRE_SECRET_FILE for all workers, or for none"
            )
        if not theirs and self.rank > 0:
            environ["TENSORWIRE_SECRET"] = told
        if self.store.add("secrets", 1) == self.workers:
            self.store.delete_key("secret")


def meet(rank: int | None = None, workers: int | None = None) -> Meeting | None:
    """Meets all workers that an engine has started with this one; None if there are no others.

    Args:
        rank: of this worker, where the program knows it itself.
        workers: how many there are, then.

    Raises:
        RuntimeError: another process has claimed this rank.
        UnavailableError: a worker is missing, or the meeting point cannot be reached, or no folder
            is fit for the lock on the rank.
        ValueError: the engine or the arguments make no sense.
    """
    number = next(_meetings)
    group = _default_group()
    start = _find(rank, workers, None if group is None else group[0])
    if start is None or start.workers == 1:
        return None
    deadline = time.monotonic() + join_timeout_s()
    shared = None if group is None else _whole(group[1])
    if place := start.address if group is None else _place_of(shared):
        hold_claim(place, start.rank, start.told_by)
    try:
        import torch.distributed as dist

        # With a group or without one it is the same job, so that a second process of a rank is
        # noticed in the store too.
        shared = _open_store(start, deadline) if group is None else shared
        store = dist.PrefixStore(f"tensorwire/{start.job}/{number}", shared)
        return Meeting(start, store, deadline)
    except BaseException:
        drop_claim()
        raise


def _find(rank: int | None, workers: int | None, group: Start | None) -> Start | None:
    if rank is None or workers is None:
        return find_start(os.environ) if group is None else group
    if group is None or workers == 1:
        return explicit_start(os.environ, rank, workers)
    if (group.rank, group.workers) != (rank, workers):
        raise ValueError(
            f"rank {rank} of world_size {workers} is not what init_process_group was told: rank "
            f"{group.rank} of {group.workers}"
        )
    return group


def check_alone() -> None:
    """Checks that this process, which was told of no others, was not started as one of several.

    Warns if multiprocessing has started it.

    Raises:
        ValueError: `torch.multiprocessing.spawn` has started it.
    """
    if multiprocessing.parent_process() is None:
        return
    target = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(target, "__module__", "") == "torch.multiprocessing.spawn":
        raise ValueError(
            "torch.multiprocessing.spawn has started this process and nothing says which of how "
            "many it is: call init_process_group before tw.init(), or set MASTER_ADDR and "
            "MASTER_PORT and call tw.init(rank=…, world_size=…); tw.init(rank=0, world_size=1) if "
            "it is to train alone"
        )
    warnings.warn(
        "multiprocessing has started this process and nothing says who else is in its job, so it "
        "trains alone; tw.init(rank=…, world_size=…) names its place, and tw.init(rank=0, "
        "world_size=1) says that this is meant",
        RuntimeWarning,
        stacklevel=4,
    )


def join_timeout_s() -> float:
    """Returns how long a worker waits for the others.

    Raises:
        ValueError: the variable makes no sense.
    """
    text = os.environ.get(JOIN_TIMEOUT, "120")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 86400:
        raise ValueError(f"{JOIN_TIMEOUT} is {text!r}, not a number of seconds from 1 to 86400")
    return value


def address_towards(host: str) -> str:
    """Returns this host's address on the way to another one, "" for any; sends nothing."""
    found = socket.getaddrinfo(host or _ELSEWHERE, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address = str(probe.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback:
        # This host's own name, which its /etc/hosts maps to loopback: others need another address.
        # Without another interface all hosts are this one.
        address = source_address(_ELSEWHERE) or address
    return f"[{address}]" if ":" in address else address


def _default_group() -> tuple[Start, Any] | None:
    """Returns the default process group of torch.distributed and its store; None without one."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    told_by = "init_process_group's rank and world_size"
    rank, workers = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store() if workers > 1 else None
    if store is None and workers > 1:
        raise UnavailableError(
            f"the default process group ({dist.get_backend()}) has no store at which workers could "
            "meet: call tw.init() before init_process_group, or tw.init(rank=…, world_size=…) then"
        )
    host = getattr(_base(store), "host", None) or os.environ.get("MASTER_ADDR", "")
    return Start(rank, workers, told_by, host, job=torch_job(os.environ)), store


def _whole(store: Any) -> Any:
    """Returns the store below the prefixes of a group; its own if others may share the whole.

    Each of these would have a worker 0, below another prefix.
    """
    import torch.distributed as dist

    base, name = _base(store), dist.group.WORLD.group_name
    store.set("tensorwire/group", "")
    prefixes = f"default_pg/{name}/", f"{name}/"  # where torch made the store, or the program did
    mine = any(base.check([f"{prefix}/tensorwire/group"]) for prefix in prefixes)
    return base if mine else store


def _place_of(store: Any) -> str:
    """Returns the name of a store in the form of `Start.address`, on this host; "" without one."""
    if path := getattr(store, "path", ""):
        return os.path.realpath(path)
    if not (port := getattr(store, "port", 0)):
        return ""
    # A host has several names; what a process without a group would be told is the one that counts.
    told = os.environ.get("MASTER_ADDR") if os.environ.get("MASTER_PORT") == str(port) else ""
    return f"{told or store.host}:{port}"


def _open_store(start: Start, deadline: float) -> Any:
    """Opens the store, kept by worker 0, in a way that `init_process_group` here shares."""
    import torch.distributed as dist

    where = start.host, start.port
    if where in _kept:
        return _kept[where]
    keeps = start.rank == 0 and not start.kept
    try:
        if keeps:
            # By loopback it need not wait for itself, whatever the host's name for others is.
            store = dist.TCPStore("127.0.0.1", start.port, is_master=True, multi_tenant=True)
        else:
            store = _enter_store(start.host, start.port, deadline)
        store.set_timeout(timedelta(seconds=join_timeout_s()))
    except (OSError, RuntimeError) as error:
        if keeps:
            raise UnavailableError(
                f"worker 0 cannot keep a store at port {start.port}: set MASTER_PORT to a free "
                f"port for all workers ({_line(error)})"
            ) from error
        raise UnavailableError(
            f"worker {start.rank} waited {join_timeout_s():g} s ({JOIN_TIMEOUT}) for the store of "
            f"worker 0 at {start.address}: was worker 0 started, is {start.host} its host, and can "
            f"it be reached there? MASTER_ADDR and MASTER_PORT name another place ({_line(error)})"
        ) from error
    _kept[where] = store
    return store


def _enter_store(host: str, port: int, deadline: float) -> Any:
    """Returns a client of a TCPStore.

    The constructor handles no signals, so it never waits for long.

    Raises:
        OSError: no process listens there until the deadline.
        RuntimeError: the process that listens there is no store.
    """
    import torch.distributed as dist

    while True:
        _await_listener(host, port, deadline)
        left_s = deadline - time.monotonic()
        limit = timedelta(seconds=max(min(left_s, _ENTRY_S), 1.0))
        try:
            return dist.TCPStore(host, port, is_master=False, timeout=limit)
        except RuntimeError:
            if left_s <= _ENTRY_S:
                raise
        time.sleep(_PAUSES_S[1])


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Waits until a port takes connections; Ctrl-C ends it at once, although a name is resolved.

    Raises:
        OSError: no process listened there in time; the last reason.
    """
    over = threading.Event()
    told: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def knock() -> None:
        error: OSError = TimeoutError("no time was left")
        for pause_s in _pauses_s(deadline):
            left_s = deadline - time.monotonic()
            try:
                socket.create_connection((host, port), max(min(left_s, 2.0), 0.01)).close()
            except OSError as caught:
                error = caught
            except UnicodeError:
                error = OSError(f"{host!r} is no name of a host")
            else:
                told.put(None)
                return
            if over.wait(pause_s):
                return
        told.put(error)

    threading.Thread(target=knock, daemon=True).start()
    try:
        error = told.get(timeout=max(deadline - time.monotonic(), 0.0) + _PAUSES_S[1])
    except queue.Empty:
        error = TimeoutError(f"the name {host} was not resolved")
    finally:
        over.set()
    if error is not None:
        raise error


def _pauses_s(deadline: float) -> Iterator[float]:
    """Yields how long to wait after each look at something, growing, until the deadline."""
    pause_s, longest_s = _PAUSES_S
    while (left_s := deadline - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(2 * pause_s, longest_s)


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _make_private(store: Any) -> None:
    """Makes a store that is a file readable for its owner only."""
    if path := getattr(_base(store), "path", None):
        os.chmod(path, 0o600)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]
