"""Describes a job: the commands and environments of its processes. Pure; starts nothing.

The variables named here are the contract with the processes: `tensorwire.torch` reads them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import ipaddress
import math
import os
import resource
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorwire.jobs.engines import MAX_WORKERS, find_cluster_start, without_ranks
from tensorwire.jobs.host import boot_id
from tensorwire.jobs.job_file import shown_command
from tensorwire.jobs.job_log import JOB_LOG
from tensorwire.membership.world import SHARES_MOVE
from tensorwire.memory import cores
from tensorwire.memory.node import TRANSPORTS
from tensorwire.tracebacks import wants_full

# Workers run the sitecustomize.py in it, which tells the launcher of an exception that ends them.
_STARTUP = str(Path(__file__).with_name("startup"))
# A launcher that may have fewer open files keeps none of its processes, unless it is asked to.
_FILES_PER_PROCESS = 64
_FILE_WORKER_COMMAND = (sys.executable, "-P", "-m", "tensorwire.files.worker_process")
# With `rebalance`, where nobody says how many: the fewer, the coarser is what can be moved.
_SHARES_PER_SERVER = 4
# Each costs every worker and server a connection, and every step an answer.
_MOST_SHARES = 256
_SERVER_COMMAND = (sys.executable, "-P", "-m", "tensorwire.torch.server")


@dataclass(frozen=True, slots=True)
class Patience:
    """The times that a job's processes get for their tasks, in seconds.

    Attributes:
        start_s: a server, until it listens.
        goodbye_s: the servers, to end by themselves after the last worker has.
        grace_s: all, to end by themselves after one has failed or a signal came; then SIGTERM.
        alone_s: the servers, in such an end, after the last worker is gone; then SIGTERM.
        kill_s: after SIGTERM; then SIGKILL.
        stuck_s: a worker, to end after an error that nothing has caught; all, to end by themselves
            after one has ended that had lost another, which is then to blame, and may end slowly.
        standby_s: since a standby was used, until there is another one for a server that dies; the
            first one twice as long after all workers have joined: short jobs do not pay for one.
        rebalance_s: how long servers' work is measured before it is compared.
    """

    start_s: float = 60.0
    goodbye_s: float = 10.0
    grace_s: float = 3.0
    alone_s: float = 1.0
    kill_s: float = 1.0
    stuck_s: float = 30.0
    standby_s: float = 3.0
    rebalance_s: float = 5.0


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The description of one host's job.

    Args:
        command: what follows `python`: a script, or "-m" and a module, and its arguments.
        workers: how many, at least 1.
        servers: how many, at least 1.
        slices: of a training step's samples, a multiple of `workers`; default left to the workers.
        transports: that the processes may use, of "shm", "rdma", "tcp"; default all.
        listen: host name or address on which the servers listen.
        full_tracebacks: each worker prints its own traceback, whole; so does TENSORWIRE_TRACEBACKS
            with the value "full".
        imports: modules that the servers may import for the optimizers of the script.
        durable: whether a server or worker that is killed is replaced: then processes have
            TENSORWIRE_DURABLE. This needs shm among the transports, and `listen` on loopback.
            Default: where it can be.
        restarts: the most deaths in a row of one process without progress between them, from
            which it is replaced; with 0 the job is not durable.
        silence_s: how long a process of a durable job may be stopped (SIGSTOP, a frozen cgroup)
            before it is killed and replaced; 0: for ever.
        restart_workers: whether another process runs the script in the place of a worker that was
            killed; else the living ones compute its slices too, and workers may come and go
            (docs/elastic.md). That needs a durable job.
        file_workers: how many more workers there are whose gradients come from files
            (docs/files.md); they have the last ranks.
        shares: in how many the parameters are dealt; the number of servers can change between 1 and
            that (`tensorwire scale`). That needs a durable job. Default: servers cannot change.
        rebalance: shares move by themselves from a server whose work takes longer than the others'
            for long; then `shares` are by default four times the servers.
        server_command: the program of a server, to which its options are added; default this
            Python with `-m tensorwire.torch.server`.
        cores: that the job may use; default the cores of this process.

    Raises:
        ValueError: an argument cannot be right; nothing has been started.
    """

    command: Sequence[str]
    workers: int
    servers: int = 1
    slices: int | None = None
    transports: Sequence[str] | None = None
    listen: str = "127.0.0.1"
    full_tracebacks: bool = False
    imports: Sequence[str] = ()
    durable: bool | None = None
    restarts: int = 3
    silence_s: float = 10.0
    restart_workers: bool = True
    file_workers: int = 0
    shares: int | None = None
    rebalance: bool = False
    server_command: Sequence[str] = _SERVER_COMMAND
    # Once for a job: a worker that replaces another must compute with as many threads.
    cores: float = field(default_factory=cores, kw_only=True)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; at least 1 is needed")
        if self.servers < 1:
            raise ValueError(f"servers is {self.servers}; at least 1 is needed")
        elastic = not self.restart_workers
        for name, count in (("workers", self.members), ("slices", self.slices or 1)):
            if count > MAX_WORKERS:
                raise ValueError(f"{name} is {count}; there can be {MAX_WORKERS} at most")
        if elastic and self.slices is not None and self.slices < self.workers:
            raise ValueError(
                f"slices is {self.slices}, and there are {self.workers} workers: each computes one "
                "at least"
            )
        if (
            not elastic
            and self.slices is not None
            and (self.slices < 1 or self.slices % self.members)
        ):
            raise ValueError(
                f"slices is {self.slices}, not a multiple of the {self.members} workers; each "
                f"worker computes the same number of slices"
            )
        if self.file_workers:
            self._check_file_workers()
        if self.transports is not None:
            _check_transports(self.transports)
        if not self.listen or self.listen.startswith("-") or "," in self.listen:
            raise ValueError(f"listen is {self.listen!r}; a host name or IP address is needed")
        if self.restarts < 0:
            raise ValueError(f"restarts is {self.restarts}; 0 or more are needed")
        if not 0 <= self.silence_s < math.inf:
            raise ValueError(f"silence is {self.silence_s:g}; seconds are needed, or 0 for never")
        if self.durable and (why := self._obstacle()):
            raise ValueError(
                f"the servers of this job cannot be replaced when they die: {why}, or use "
                "--on-death end"
            )
        if not self.restart_workers and (why := self._takeover_obstacle()):
            raise ValueError(f"no worker can take over the slices of one that is killed: {why}")
        if self.shares is not None and self.shares < self.servers:
            raise ValueError(
                f"shares is {self.shares} and servers is {self.servers}; each server has at least "
                "one share"
            )
        if self.moves_shares and self.dealt > _MOST_SHARES:
            raise ValueError(
                f"there would be {self.dealt} shares, and {_MOST_SHARES} are the most: as many are "
                "enough as servers are wanted, or a few for each"
            )
        if self.moves_shares and (why := self._share_obstacle()):
            raise ValueError(f"shares of servers cannot move to other servers: {why}")
        for name in self.imports:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"--import {name!r}: the name of a module is needed")
        _check_command(self.command)
        if self.server_command == _SERVER_COMMAND and importlib.util.find_spec("torch") is None:
            raise ValueError(
                "the servers need torch: pip install 'tensorwire[torch]', or, in a clone of the "
                "repository, 'make .venv/.with-torch', which gets the smaller build for CPUs"
            )
        wants_full()
        if (start := find_cluster_start(os.environ)) is not None and start.workers > 1:
            raise ValueError(
                f"{start.told_by} say that {start.workers} processes run this command, and each "
                "would be a job of its own: start it once, or let them run the script itself, as "
                "docs/launchers.md says"
            )

    @property
    def members(self) -> int:
        """The number of workers: first the workers with a script, then the workers of files."""
        return self.workers + self.file_workers

    @property
    def places(self) -> int:
        """The most workers that there can be: one for each slice, where they may come and go."""
        return self.members if self.restart_workers else self.slices or self.workers

    @property
    def moves_shares(self) -> bool:
        """True if servers are processes that can have several shares, which can move."""
        return self.shares is not None or self.rebalance

    @property
    def dealt(self) -> int:
        """The number of shares of the parameters; one for each server if the user names none."""
        if self.shares is not None:
            return self.shares
        return self.servers * (_SHARES_PER_SERVER if self.rebalance else 1)

    @property
    def is_durable(self) -> bool:
        """True if a killed member is replaced; by default if that is possible."""
        if self.durable is None and self.restart_workers and not self.moves_shares:
            files = _FILES_PER_PROCESS * (1 + self.servers + self.members)
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return not self._obstacle() and hard >= files
        return self.durable or self.moves_shares or not self.restart_workers

    @property
    def collects_failures(self) -> bool:
        """True if workers send their errors to the launcher; else each prints its own, whole."""
        return not (self.full_tracebacks or wants_full() or os.pathsep in _STARTUP)

    def environment(self) -> dict[str, str]:
        """Returns the environment of all processes of one run: ours, with a fresh secret per call.

        It has no ranks of another job; nothing in it may make a server or its libraries take
        themselves for a worker.
        """
        environment = without_ranks(os.environ)
        environment["PYTHONUNBUFFERED"] = "1"  # a crash takes no lines with it
        for name in ("DURABLE", "TAKEOVER", "PRESENT", "DESCRIPTOR_STORE", "TERM", "JOINS"):
            environment.pop(f"TENSORWIRE_{name}", None)
        environment.pop(JOB_LOG, None)
        environment.pop(SHARES_MOVE, None)
        if self.moves_shares:
            environment[SHARES_MOVE] = "1"
        if self.is_durable:
            asked = self.durable or not self.restart_workers
            environment["TENSORWIRE_DURABLE"] = "1" if asked else "default"
        if not self.restart_workers:
            environment["TENSORWIRE_TAKEOVER"] = "1"
            environment["TENSORWIRE_PRESENT"] = str(self.workers)
        if not environment.get("TENSORWIRE_SECRET_FILE"):
            environment["TENSORWIRE_SECRET"] = secrets.token_hex(32)
        if self.transports is not None:
            environment["TENSORWIRE_TRANSPORTS"] = ",".join(self.transports)
        if self.imports:
            environment["TENSORWIRE_IMPORT"] = ",".join(self.imports)
        return environment

    def worker_environment(
        self,
        environment: Mapping[str, str],
        rank: int,
        addresses: list[str],
        port: int,
        report_fd: int | None = None,
        store_fd: int | None = None,
        term: int = 0,
        joins: int = 0,
    ) -> dict[str, str]:
        """Returns the environment of one worker: our variables, and torchrun's for other libraries.

        Args:
            environment: of `environment`.
            rank: 0 to workers - 1.
            addresses: of all servers, in their order.
            port: for a store that worker 0 may open, as `init_process_group` does.
            report_fd: where it writes about an exception that ends it (`reports.failure_in`).
            store_fd: its socket to the keeper of its descriptors, if it has one.
            term: how often it was replaced, with this time.
            joins: how many workers have joined the running job in its place, with it; 0: it begins
             with the job.
        """
        count = str(self.places)
        added = {
            "TENSORWIRE_RANK": str(rank),
            "TENSORWIRE_WORKERS": count,
            "TENSORWIRE_SERVERS": ",".join(addresses),
            "RANK": str(rank),
            "WORLD_SIZE": count,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": count,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if self.slices is not None:
            added["TENSORWIRE_SLICES"] = str(self.slices)
        if not environment.get("OMP_NUM_THREADS"):
            # Each worker would take all cores, and together they would be slower than one.
            # By the places: bits depend on it, and not on how many workers there are at present.
            added["OMP_NUM_THREADS"] = str(max(1, int(self.cores) // self.places))
        if report_fd is not None:
            added["TENSORWIRE_REPORT_FD"] = str(report_fd)
            paths = [_STARTUP, *filter(None, [environment.get("PYTHONPATH")])]
            added["PYTHONPATH"] = os.pathsep.join(paths)
        if store_fd is not None:
            added["TENSORWIRE_DESCRIPTOR_STORE"] = str(store_fd)
            if term:
                added["TENSORWIRE_TERM"] = str(term)
            if joins:
                added["TENSORWIRE_JOINS"] = str(joins)
        return {**environment, **added}

    def worker_command(self, rank: int) -> list[str]:
        """Returns the command of a worker: the script, or for the last ranks the file worker."""
        if self.file_workers and rank >= self.workers:
            return list(_FILE_WORKER_COMMAND)
        return [sys.executable, *self.command]

    def server_arguments(self, index: int, addresses: list[str]) -> list[str]:
        """Returns the options of one server, and of each that takes its place.

        Args:
            index: its place among the servers; where shares can move, the share's place.
            addresses: of the servers that listen already.
        """
        host = f"[{self.listen}]" if ":" in self.listen else self.listen
        arguments = ["--index", str(index), "--workers", str(self.places)]
        if not self.restart_workers:
            arguments += ["--present", str(self.workers)]
        arguments += ["--count", str(self.dealt)]
        arguments += [f"--command={shown_command(self.command)}"]
        if self.imports or os.environ.get("TENSORWIRE_IMPORT"):
            script = Path(os.getcwd() if self.command[0] == "-m" else self.command[0])
            folder = script if script.is_dir() else script.parent
            arguments += [f"--import-from={folder.resolve()}"]
        if addresses:
            arguments += ["--servers", ",".join(addresses)]
        return [*arguments, "--listen", f"{host}:0"]

    def server_command_for(
        self, arguments: list[str], address_fd: int, store_fd: int | None
    ) -> list[str]:
        """Returns the command of one server.

        Args:
            arguments: of `server_arguments`.
            address_fd: where it writes its own address, "host:port" and a newline.
            store_fd: its socket to the keeper of its descriptors, if it has one.
        """
        command = [*self.server_command, *arguments, "--address-fd", str(address_fd)]
        return command if store_fd is None else [*command, "--descriptor-store", str(store_fd)]

    def standby_command(self, store_fds: Sequence[int], ready_fd: int | None = None) -> list[str]:
        """Returns the command of a process that may become any server; a socket will tell it which.

        Args:
            store_fds: its sockets; several where it may have several shares.
            ready_fd: where it writes a line when it could begin at once.
        """
        stores = ",".join(map(str, store_fds))
        command = [*self.server_command, "--standby", "--descriptor-store", stores]
        return command if ready_fd is None else [*command, "--address-fd", str(ready_fd)]

    def _share_obstacle(self) -> str:
        """Returns why no share could move, and the remedy."""
        if self.durable is False:
            return "--on-death end says that nothing outlives a process; leave it out"
        why = self._obstacle()
        return why and f"{why}, or leave out --servers S:MAX and --rebalance"

    def _check_file_workers(self) -> None:
        if self.file_workers < 0:
            raise ValueError(f"file workers is {self.file_workers}; 0 or more are needed")
        if self.slices not in (None, self.members):
            raise ValueError(
                f"slices is {self.slices}; a file worker computes one slice, so that "
                f"{self.members} workers compute {self.members}: leave --slices out"
            )
        if not self.restart_workers:
            raise ValueError(
                "a worker that runs the script cannot compute the slices of a file worker: leave "
                "out --on-death takeover and --workers W:MAX, or --file-workers"
            )
        if self.transports is not None and "shm" not in self.transports:
            raise ValueError(
                f"transports are {', '.join(self.transports)}; file workers need shm, because they "
                "see in the servers' memory what worker 0 asks for"
            )

    def _takeover_obstacle(self) -> str:
        """Returns why no worker could take over the slices of another one, and the remedy."""
        if self.durable is False:
            return "--on-death end says that nothing outlives a process; leave it out"
        if self.places == 1:
            return "there is one, with one slice; start several, or name more: --workers 1:MAX"
        why = self._obstacle()
        return why and f"{why}, or let workers be restarted"

    def _obstacle(self) -> str:
        """Returns why no server could be replaced, and the remedy; "" if all of them can be."""
        names = self.transports
        if names is None and (inherited := os.environ.get("TENSORWIRE_TRANSPORTS")):
            names = tuple(name.strip() for name in inherited.split(","))
        if self.restarts == 0:
            return "restarts is 0; 1 or more are needed"
        if names is not None and "shm" not in names:
            return (
                f"its transports are {', '.join(names)}, and only what is in shared memory "
                "outlives a server; add shm"
            )
        if not boot_id():
            return (
                "/proc/sys/kernel/random/boot_id cannot be read here, by which processes know that "
                "they can share memory, and only what is in shared memory outlives a server; make "
                "it readable"
            )
        if not _is_loopback(self.listen):
            return (
                f"they listen on {self.listen}, and workers of other hosts would lose what was "
                "under way; listen on 127.0.0.1"
            )
        return ""


def reserve_port() -> socket.socket:
    """Returns a socket with a port of this host, reserved as long as the socket is open.

    It is bound and does not listen, so that a process that names this port can listen there: with
    SO_REUSEADDR, which the stores of torch.distributed set.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", 0))
    return made


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_transports(names: Sequence[str]) -> None:
    known = ", ".join(TRANSPORTS)
    for name in names:
        if name not in TRANSPORTS:
            raise ValueError(f"unknown transport {name!r}; known are {known}")
    if not names or len(set(names)) != len(names):
        raise ValueError(f"transports names each of {known} at most once and one at least")


def _check_command(command: Sequence[str]) -> None:
    """Finds the mistakes that would make every worker fail at once."""
    match command:
        case ():
            raise ValueError("no script is named")
        case ("-m",):
            raise ValueError("-m needs the name of a module")
        case ("-m", module, *_):
            # Only the first part: looking further would import the package here.
            top = module.partition(".")[0]
            here = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()])
            if here is None and (not top or importlib.util.find_spec(top) is None):
                raise ValueError(f"there is no module {module!r} that Python could import")
        case (script, *_):
            path = Path(script)
            if not path.exists():
                raise ValueError(f"the script {script!r} does not exist")
            if path.is_dir() and not (path / "__main__.py").is_file():
                raise ValueError(f"{script!r} is a folder without __main__.py, not a script")
