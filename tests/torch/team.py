"""Worker processes and server processes that serve many jobs one after another.

Importing torch costs seconds, so the processes live as long as the test session, or until one of
them does not answer. A case is a function at the top of a test module; it runs in every worker of a
fresh job.
"""

import contextlib
import functools
import importlib
import os
import pickle
import random
import secrets
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hosts import Host, enter

from tensorwire.testing import Channel, Member, PeerGroup

PATIENCE_S = 100.0  # for a busy machine, which imports torch slowly


@dataclass
class Failure:
    """The error of a case."""

    kind: str
    text: str
    trace: str


class Team:
    """Runs cases. Use `team()`."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._servers: list[Member] = []
        self._workers: list[Member] = []

    def run(self, case: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Returns the results of `case(job, *args)` in each worker of a job that ends well.

        Options: workers (2; 0: one process without a server), servers (1), slices, transports (or
        by rank), pipeline (1), mode and staleness, network (True: servers are reached by tcp, and
        workers may share memory with each other), hosts (of `hosts.two_hosts()`: servers and
        workers take turns on them), imports (modules that servers may import; or by rank what each
        worker was told).
        """
        outcomes, codes = self._run(case, args, **options)
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise AssertionError(f"a worker failed:\n{outcome.trace}")
        logs = [server.log()[-2000:] for server in self._servers[: len(codes)]]
        assert not any(codes), "\n".join((f"exit codes of servers: {codes}", *logs))
        return outcomes

    def failures(self, case: Callable[..., Any], *args: Any, **options: Any) -> list[Failure]:
        """Returns the errors of `case` in each worker; all must raise, and none may hang."""
        outcomes, _ = self._run(case, args, **options)
        assert all(isinstance(outcome, Failure) for outcome in outcomes), outcomes
        return outcomes

    def alone(self, case: Callable[..., Any], *args: Any, slices: int = 1) -> Any:
        """Returns the result of `case(job, *args)` in a process without servers."""
        return self.run(case, *args, workers=0, slices=slices)[0]

    def failure_alone(self, case: Callable[..., Any], *args: Any, slices: int = 1) -> Failure:
        """Returns the error of a case in a process without servers."""
        return self.failures(case, *args, workers=0, slices=slices)[0]

    def without_job(self, case: Callable[..., Any], *args: Any, workers: int = 2) -> list[Any]:
        """Returns the results of `case(rank, *args)` in each process; no job is made for it."""
        with self._afresh_after_silence():
            self._start_workers(workers)
            for rank in range(workers):
                self._workers[rank].send((case.__module__, case.__name__, (rank, *args), {}, None))
            outcomes = self._outcomes(workers)
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                raise AssertionError(f"a process failed:\n{outcome.trace}")
        return outcomes

    def ddp(self, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Returns the results of `case(rank, *args)` in two processes with a gloo group."""
        with tempfile.TemporaryDirectory() as folder:
            name = case.__module__, case.__name__
            return self.without_job(in_group, f"{folder}/store", name, args)

    @contextlib.contextmanager
    def _afresh_after_silence(self) -> Iterator[None]:
        """Every answer was received, or the processes are gone: no case gets another one's."""
        try:
            yield
        except BaseException:  # the time limit of a test is one too
            members = [*self._workers, *self._servers]
            self._workers, self._servers = [], []
            for member in members:
                member.kill()
            raise

    def _start_workers(self, count: int) -> None:
        while len(self._workers) < count:
            name = f"worker-{len(self._workers)}"
            self._workers.append(self._group.start(_work, name=name))

    def _outcomes(self, workers: int) -> list[Any]:
        outcomes: list[Any] = []
        for worker in self._workers[:workers]:
            try:
                outcomes.append(pickle.loads(worker.recv(PATIENCE_S)))
            except TimeoutError as error:
                raise AssertionError(f"{error}\nThe workers before it: {outcomes}") from None
        return outcomes

    def _run(
        self,
        case: Callable[..., Any],
        args: Sequence[Any],
        *,
        workers: int = 2,
        servers: int = 1,
        slices: int | None = None,
        transports: Sequence[str] | dict[int, Sequence[str]] | None = None,
        pipeline: int = 1,
        mode: str = "sync",
        staleness: int | None = None,
        network: bool = False,
        hosts: Sequence[Host] = (),
        imports: str | dict[int, str] = "",
    ) -> tuple[list[Any], list[int]]:
        with self._afresh_after_silence():
            options: dict[str, Any] = {"slices": slices, "pipeline": pipeline}
            options |= {"mode": mode, "staleness": staleness}
            self._start_workers(workers or 1)
            environment = {}
            if workers:
                while len(self._servers) < servers:
                    name = f"server-{len(self._servers)}"
                    self._servers.append(self._group.start(_serve, name=name))
                addresses: list[str] = []
                secret = secrets.token_hex(32)
                for index, server in enumerate(self._servers[:servers]):
                    host = hosts[index % len(hosts)] if hosts else None
                    may = imports if isinstance(imports, str) else imports[0]
                    server.send((index, workers, addresses, secret, network, host, may))
                    addresses.append(server.recv(PATIENCE_S))
                environment = {
                    "TENSORWIRE_WORKERS": str(workers),
                    "TENSORWIRE_SERVERS": ",".join(addresses),
                    "TENSORWIRE_SECRET": secret,
                }
            for rank in range(workers or 1):
                if workers:
                    environment = {**environment, "TENSORWIRE_RANK": str(rank)}
                    told = imports if isinstance(imports, str) else imports[rank]
                    environment["TENSORWIRE_IMPORT"] = told
                host = hosts[rank % len(hosts)] if hosts else None
                mine = transports.get(rank) if isinstance(transports, dict) else transports
                call = (
                    case.__module__,
                    case.__name__,
                    tuple(args),
                    environment,
                    {**options, "transports": mine, "host": host},
                )
                self._workers[rank].send(call)
            outcomes = self._outcomes(workers or 1)
            codes = [s.recv(PATIENCE_S) for s in self._servers[:servers]] if workers else []
        return outcomes, codes


@contextlib.contextmanager
def make_team() -> Iterator[Team]:
    """A Team whose processes end with the block."""
    with PeerGroup(deadline_s=PATIENCE_S / 2, environment={"OMP_NUM_THREADS": "1"}) as group:
        yield Team(group)


def in_group(rank: int, path: str, name: tuple[str, str], args: Sequence[Any]) -> Any:
    """Runs `case(rank, *args)` between two processes of torch.distributed."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        return getattr(importlib.import_module(name[0]), name[1])(rank, *args)
    finally:
        dist.destroy_process_group()


def _work(channel: Channel) -> None:
    import torch

    import tensorwire.torch as tw

    torch.set_num_threads(1)
    while True:
        try:
            module, name, args, environment, options = channel.recv(None)
        except EOFError:
            return
        os.environ.update(environment)
        # For each case, since some of what they import adds filters of its own. Most compute the
        # same in all workers on purpose; test_same_batches.py asks for it.
        warnings.resetwarnings()
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=tw.SameBatchesWarning)
        torch.manual_seed(1)
        random.seed(1)
        job = None
        try:
            case = getattr(importlib.import_module(module), name)
            host = options.pop("host") if options is not None else None
            with enter(host.path) if host else contextlib.nullcontext():
                if options is not None:
                    job = tw.init(**options)
                    case = functools.partial(case, job)
                result = case(*args)
                if job is not None:
                    job.close()
        except BaseException as error:
            if job is not None:
                job._leave(goodbye=False)
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        for variable in [each for each in os.environ if each.startswith("TENSORWIRE_")]:
            del os.environ[variable]
        # Pickled here: multiprocessing would share tensors' memory instead of copying them.
        channel.send(pickle.dumps(result))


def _serve(channel: Channel) -> None:
    from tensorwire.membership.server import ServerMember
    from tensorwire.torch import server

    # The processes of workers that fail do not end here.
    ServerMember.await_ends = lambda self, timeout_s: None  # type: ignore[method-assign]
    while True:
        try:
            index, workers, before, secret, network, host, imports = channel.recv(None)
        except EOFError:
            return
        os.environ["TENSORWIRE_SECRET"] = secret
        os.environ["TENSORWIRE_IMPORT"] = imports
        os.environ["TENSORWIRE_TRANSPORTS"] = "tcp" if network else "shm,tcp"
        reader, writer = os.pipe()
        with open(reader) as lines:
            thread = threading.Thread(target=lambda: channel.send(lines.readline().strip()))
            thread.start()
            options = [f"--index={index}", f"--workers={workers}", f"--servers={','.join(before)}"]
            options += [f"--listen={host.address}:0"] if host else []
            with enter(host.path) if host else contextlib.nullcontext():
                code = server.main([*options, f"--address-fd={writer}"])
            thread.join()
        channel.send(code)
