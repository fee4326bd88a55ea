"""Finds a worker's job: by `tensorwire run` or `serve`, by an engine, or it is alone.

If an engine has started the workers, the first one of every host starts a server beside it. It
tells the others the address through the store at which they meet. See docs/launchers.md.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from dataclasses import replace

from tensorwire import tracebacks
from tensorwire.errors import UnavailableError
from tensorwire.jobs.claim import drop_claim, hold_claim
from tensorwire.jobs.engines import without_ranks
from tensorwire.jobs.job_file import shown_command
from tensorwire.membership.entry import SUPERVISOR, enter_job
from tensorwire.membership.world import RANK, SHARES_MOVE, SLICES, World

from . import rendezvous
from .rendezvous import Meeting

_START_S = 120.0
# After a failure: what its server gets to tell the others, and they wait for the failed one to end.
_FAILED_END_S = 5.0
_servers: list[tuple[int, subprocess.Popen[bytes]]] = []  # with their place among all
_by_engine = False


def find_place(rank: int | None = None, workers: int | None = None) -> World:
    """Finds this worker's place; alone if nothing tells of other workers.

    Args:
        rank: of this worker, where the program knows it itself; then also `workers`.
        workers: how many there are.

    Raises:
        RuntimeError: another process is this worker.
        ValueError: variables or arguments contradict each other, or do not say enough.
        UnavailableError: a server did not start, or a worker is missing, or no folder is fit for
            the lock on the rank.
    """
    global _by_engine
    _by_engine = False
    launcher = "tensorwire run"
    if workers != 1 and os.environ.get(SUPERVISOR):
        launcher = "tensorwire serve"
        tracebacks.install(f"worker {os.environ.get(RANK, '')}")
        enter_job(timeout_s=rendezvous.join_timeout_s())
    # A program that says that it is alone is alone, whatever a launcher has said to it.
    told = {key: os.environ[key] for key in os.environ if workers != 1 or key == SLICES}
    place = World.from_environment(told)
    if place is not None and place.servers:
        if rank is not None and (rank, workers) != (place.rank, place.workers):
            raise ValueError(
                f"rank {rank} of world_size {workers} is not what {launcher} has said: rank "
                f"{place.rank} of {place.workers}"
            )
        hold_claim(",".join(place.servers), place.rank, "TENSORWIRE_RANK and TENSORWIRE_SERVERS")
        return place
    if (meeting := rendezvous.meet(rank, workers)) is None:
        if workers is None:
            rendezvous.check_alone()
        return World(slices=1 if place is None else place.slices)
    _by_engine = True
    tracebacks.install(f"worker {meeting.rank}")
    slices = place.slices if place is not None and SLICES in os.environ else meeting.workers
    return World(meeting.rank, meeting.workers, _start_servers(meeting), slices)


def as_durable(place: World, durable: bool | None) -> World:
    """Returns a worker's place as `tw.init(durable=…)` wants it.

    Args:
        place: of the worker.
        durable: as it was given.

    Raises:
        ValueError: it cannot be durable, and `durable` is True, or the launcher needs it: it is
            `tensorwire serve`, or workers or servers may come and go.
    """
    why = "" if durable is not False else "tw.init(durable=False)"
    names = [name.strip() for name in os.environ.get("TENSORWIRE_TRANSPORTS", "shm").split(",")]
    if place.durable and "shm" not in names:
        why = f"its transports are {', '.join(names)}, and only shared memory outlives a process"
    if durable and (why or not place.durable):
        why = why or (
            f"start it by 'tensorwire run --workers {place.workers} --on-death restart SCRIPT', on "
            "one host, or leave durable out"
        )
        raise ValueError(
            f"tw.init(durable=True), and this job does not replace processes that are killed: {why}"
        )
    if place.durable and why and os.environ.get(SUPERVISOR):
        raise ValueError(
            f"'tensorwire serve' replaces workers that are killed, which is impossible here: {why}"
        )
    if place.durable and why and (needs := _what_needs_it(place)):
        raise ValueError(f"{needs}, for which killed processes must be replaced: {why}")
    if not (place.durable and why):
        return replace(place, asked=place.durable and (durable is True or place.asked))
    if place.rank == 0 and (place.asked or durable is False):
        text = f"this job does not replace processes that are killed: {why}"
        print(f"tensorwire: {text}", file=sys.stderr, flush=True)
    return replace(place, durable=False)


def _what_needs_it(place: World) -> str:
    """Returns an option that needs memory that outlives processes, as a sentence; else ""."""
    if place.takeover:
        return "this job was started with --workers W:MAX or --on-death takeover"
    moves = os.environ.get(SHARES_MOVE) == "1"
    return "this job was started with --servers S:MAX or --rebalance" if moves else ""


def _start_servers(meeting: Meeting) -> tuple[str, ...]:
    """Starts a server beside the first worker of every host; returns the addresses of all."""
    addresses: list[str] = []
    for index, ranks in enumerate(meeting.hosts):
        key, whose = f"servers/{index}", f"server {index}, which worker {ranks[0]} starts"
        if ranks[0] == meeting.rank:
            try:
                made = start_server(
                    index, meeting.workers, len(meeting.hosts), addresses, meeting.listen
                )
            except BaseException as error:
                meeting.store.set(key, f"!{type(error).__name__}: {error}")
                raise
            meeting.store.set(key, made)
        meeting.wait({key: whose}, "its own messages tell why")
        told = meeting.store.get(key).decode()
        if told.startswith("!"):
            raise UnavailableError(f"{whose}, failed: {told[1:]}")
        addresses.append(told)
    return tuple(addresses)


def leave(orderly: bool, error: BaseException | None = None) -> None:
    """Ends this worker's place; the server that this process started ends after other workers.

    Engines blame the worker that ends first, and torch.multiprocessing.spawn shows no other one's
    error. So a worker that ends only because another has failed lets that one go first; most
    engines then end it at once.

    Args:
        orderly: the work of this process is done.
        error: the exception that ends it, if one does.
    """
    drop_claim()
    killed = False
    while _servers:
        index, process = _servers.pop()
        try:
            # After a failure it first tells the others what happened.
            code = process.wait(None if orderly else _FAILED_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            continue
        if code < 0:
            killed, who = True, f"server {index} (pid {process.pid}), beside this worker,"
            print(f"tensorwire: {who} was killed by signal {-code}", file=sys.stderr, flush=True)
    # Only this worker can tell of a server that was killed.
    if _by_engine and tracebacks.is_consequence(error) and not killed:
        time.sleep(_FAILED_END_S)


def start_server(
    index: int, workers: int, count: int, before: list[str], listen: str = "127.0.0.1"
) -> str:
    """Starts a server that ends with this process; returns its address.

    Raises:
        UnavailableError: it ended or gave no address in time.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-P", "-m", "tensorwire.torch.server", f"--index={index}"]
    command += [f"--workers={workers}", f"--count={count}", f"--servers={','.join(before)}"]
    command += [f"--listen={listen}:0", f"--command={shown_command(sys.argv)}"]
    command += [f"--address-fd={writer}", f"--parent={os.getpid()}"]
    command += [f"--import-from={os.path.abspath(sys.path[0])}"]  # the folder of the script
    with open(reader) as channel:
        try:
            process = subprocess.Popen(
                command,
                env=without_ranks(os.environ),
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        ready, _, _ = select.select([channel], [], [], _START_S)
        address = channel.readline().strip() if ready else ""
    _servers.append((index, process))
    if not address:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise UnavailableError(
            f"server {index} did not start (exit code {process.wait()}); its messages are above"
        )
    return address
