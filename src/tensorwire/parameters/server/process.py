"""Runs a server as a process: its options, its place in the job, its end."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

from tensorwire import failpoints
from tensorwire.aside import put_output_aside
from tensorwire.durability.descriptor_store import DescriptorStore, Takeover
from tensorwire.durability.durable_memory import open_node
from tensorwire.errors import PeerLostError, TensorwireError, UnavailableError
from tensorwire.jobs.host import pid_namespace
from tensorwire.jobs.job_file import JobFile, RunningServer
from tensorwire.membership.collective import CollectiveServer
from tensorwire.membership.identity import LOST_MEMBER_CODE, server_name
from tensorwire.membership.server import ServerMember
from tensorwire.memory import Node

from ..kernel import Kernel
from .lending.checkpoints import CheckpointShelf, open_shelf
from .lending.door import ReaderDoor, open_door
from .server import Server, most_threads
from .shares import Shares

READY = "ready\n"
"""The line that a standby writes to `--address-fd` when it could serve at once."""

_PR_SET_PDEATHSIG = 1

_ending: list[int] = []
"""The signals by which this process learned that a person ends the job."""


def serve(
    arguments: list[str] | None,
    program: str,
    make_kernels: Callable[[argparse.Namespace], Callable[[str], Kernel]],
) -> int:
    """Serves one job.

    Args:
        arguments: of the command line; None: those of this process.
        program: its name, for people.
        make_kernels: gives what makes the arithmetic for a Spec's optimizer, for these options;
            ValueError or OSError ends the server.

    Returns:
        The exit code; 0 when all workers have left in good order.
    """
    parser = _parser(program)
    options = parser.parse_args(arguments)
    put_output_aside()
    stores = [DescriptorStore.of_descriptor(each) for each in options.descriptor_store]
    # Ctrl-C is for the workers; the server leaves when they have left, or when it is told.
    signal.signal(signal.SIGINT, _note_ending)
    signal.siginterrupt(signal.SIGINT, False)
    # A server that is replaced ends by SIGTERM as by any other signal, and sends no message.
    signal.signal(signal.SIGTERM, signal.SIG_DFL if stores else _leave)
    if options.parent:
        _end_with(options.parent)
    if options.standby and not stores:
        parser.error("--standby needs --descriptor-store")
    if options.standby:
        return _stand_by(options, stores, parser, make_kernels)
    return _serve_share(options, stores[0] if stores else None, None, make_kernels)


def _stand_by(
    options: argparse.Namespace,
    stores: list[DescriptorStore],
    parser: argparse.ArgumentParser,
    make_kernels: Callable[[argparse.Namespace], Callable[[str], Kernel]],
) -> int:
    """Waits until it is told which shares to serve; one with several sockets may have several.

    Returns:
        The exit code: 0 when all shares have ended in good order, or when none is wanted.
    """
    if options.address_fd >= 0:
        with os.fdopen(options.address_fd, "w") as channel:
            channel.write(READY)

    def serve_next(store: DescriptorStore) -> int | None:
        takeover = store.wait_for_takeover()
        if takeover is None:
            return None
        return _serve_share(parser.parse_args(takeover.arguments), store, takeover, make_kernels)

    if len(stores) == 1:
        return serve_next(stores[0]) or 0
    return Shares(serve_next).run(stores)


def _serve_share(
    options: argparse.Namespace,
    store: DescriptorStore | None,
    takeover: Takeover | None,
    make_kernels: Callable[[argparse.Namespace], Callable[[str], Kernel]],
) -> int:
    """Serves one share until all workers have left; returns the exit code."""
    term, restarts = (takeover.term, takeover.restarts) if takeover is not None else (0, 0)
    failpoints.arm(server_name(options.index), os.environ.get("TENSORWIRE_FAIL", ""), term)
    name = server_name(options.index)
    server: Server | None = None
    job_file: JobFile | None = None
    door: ReaderDoor | None = None
    shelf: CheckpointShelf | None = None
    try:
        make_kernel = make_kernels(options)
        options_of_node = {"listen": options.listen, "advertise": options.advertise}
        with open_node(name, store, **options_of_node) as node:
            member = ServerMember(
                options.index,
                options.workers,
                node,
                options.count,
                store,
                restarts,
                options.present,
            )
            member.connect(tuple(filter(None, options.servers.split(","))))
            # Before anybody knows the address: workers look for it at once.
            collective = CollectiveServer(member) if options.index == 0 else None
            if options.address_fd >= 0:
                with os.fdopen(options.address_fd, "w") as channel:
                    channel.write(f"{node.address}\n")
            door = open_door(member, store, **options_of_node)
            if door is not None and options.index == 0:
                shelf = open_shelf(node, door.node, replaces=takeover is not None)
            job_file = _tell_of_job(options, node, door)
            member.gather(partial(door.tell, list) if door else lambda: None)
            threads = options.threads or most_threads()
            server = Server(member, make_kernel, threads, collective, door)
            if collective:
                collective.start(server.fail)
            server.run()
    except (TensorwireError, ValueError, OSError) as error:
        if _ending and isinstance(error, PeerLostError):
            return 1  # the others were told to end too, by a process that knows why
        # In one piece: workers may write to the same place.
        sys.stderr.write(f"{name.replace('-', ' ')}: {type(error).__name__}: {error}\n")
        return LOST_MEMBER_CODE if isinstance(error, PeerLostError) else 1
    finally:
        if door:
            door.close()
        if shelf:
            shelf.join()
        if server:
            server.join()
        if job_file:
            job_file.close()
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    description = "A server of a job. Started by a launcher, never by hand."
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--index", type=int, default=0, help="place among the servers, from 0")
    parser.add_argument("--workers", type=int, default=1, help="how many workers there are")
    parser.add_argument("--present", type=int, default=None, help="with how many the job begins")
    parser.add_argument("--count", type=int, default=None, help="how many servers there are")
    parser.add_argument("--servers", default="", help="addresses of the servers before this one")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--advertise", default=None, metavar="HOST", help="how others reach it")
    parser.add_argument("--address-fd", type=int, default=-1, help="where to write the address")
    parser.add_argument(
        "--descriptor-store",
        type=_descriptors,
        default=[],
        metavar="N,N",
        help="who keeps its memory; of a standby one for each share that it may serve",
    )
    parser.add_argument("--standby", action="store_true", help="wait there for what to serve")
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    parser.add_argument("--command", default="", help="what the workers run, for people")
    parser.add_argument("--import-from", metavar="FOLDER", help="where modules may be, too")
    parser.add_argument("--threads", type=int, default=0, help="for arithmetic; 0: chosen")
    return parser


def _descriptors(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _tell_of_job(
    options: argparse.Namespace, node: Node, door: ReaderDoor | None
) -> JobFile | None:
    """Lets `tensorwire status` find the job, or prints why it cannot: the job runs without it."""
    told = RunningServer(
        index=options.index,
        address=node.address,
        pid=os.getpid(),
        workers=options.workers,
        command=options.command,
        started=time.time(),
        secret=os.environ.get("TENSORWIRE_SECRET", ""),
        secret_file=os.environ.get("TENSORWIRE_SECRET_FILE", ""),
        door=door.address if door else "",
        reading_secret=door.secret if door else "",
        pids=pid_namespace(),
        ticks=time.monotonic(),
    )
    try:
        return JobFile(told)
    except (UnavailableError, OSError) as error:
        text = f"server {options.index}: tensorwire status will not list this job: {error}\n"
        sys.stderr.write(text)
        return None


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def _note_ending(number: int, frame: object) -> None:
    """Notes a Ctrl-C, or that the launcher was told to end the job."""
    _ending.append(number)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
