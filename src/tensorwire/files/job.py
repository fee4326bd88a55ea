"""Reader side of a job: finds its door and the secret for reading, on this host or as told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from tensorwire.errors import UnavailableError
from tensorwire.jobs.host import LOOPBACK
from tensorwire.jobs.job_file import (
    RunningFileWorker,
    RunningServer,
    running_file_workers,
    running_servers,
)
from tensorwire.jobs.job_log import logged_jobs
from tensorwire.jobs.secret import secret_in
from tensorwire.memory import Node

READ_SECRET, READ_SECRET_FILE = "TENSORWIRE_READ_SECRET", "TENSORWIRE_READ_SECRET_FILE"


class Way(NamedTuple):
    """How readers reach a job: the address of the door, the secret, b"" if there is none."""

    address: str
    secret: bytes


def find_way(
    address: str, secret: str | bytes | None = None, secret_file: str | None = None
) -> Way:
    """Returns how to reach the job whose server 0 is at an address.

    Args:
        address: of server 0 or of its door; for a job of another host or user of the door, which
            `tensorwire ls` shows.
        secret: for reading; None: the secret in `secret_file`, else the one that the environment
            names (TENSORWIRE_READ_SECRET_FILE, TENSORWIRE_READ_SECRET), else the one in the job's
            file, for jobs of this host and user.
        secret_file: a file with the secret.

    Raises:
        UnavailableError: the server lets no reader in.
        PermissionError: a file with a secret cannot be read, or is not there.
    """
    known = next((each for each in _running() if _is_at(each, address)), None)
    if known is not None and not known.door:
        raise UnavailableError(
            f"the server at {address} lets no reader in; its own messages tell why"
        )
    if secret is None and (path := secret_file or os.environ.get(READ_SECRET_FILE)):
        try:
            secret = secret_in(path, "")
        except OSError as error:
            raise PermissionError(
                f"the file with the secret for reading, {path}, cannot be read: {error.strerror}"
            ) from error
    if secret is None:
        secret = os.environ.get(READ_SECRET) or (known.reading_secret if known else "")
    data = secret if isinstance(secret, bytes) else os.fsencode(secret)
    return Way(known.door if known else address, data)


def find_server(address: str) -> RunningServer | None:
    """Returns server 0 of the job of this user and host at an address; None if it is not known."""
    return next((each for each in _running() if each.index == 0 and _is_at(each, address)), None)


def is_launched_here(address: str) -> bool:
    """Tells whether an address belongs to a running job of this user on this host."""
    try:
        found = [each for each in logged_jobs() if each.running]
    except UnavailableError:  # there is no folder for logs
        return False
    return any(_same(each, address) for job in found for each in job.addresses)


def running_jobs() -> list[RunningServer]:
    """Returns the first servers of the jobs of this host and user that let readers in."""
    return [each for each in _running() if each.index == 0 and each.door]


def file_workers_of(address: str) -> list[RunningFileWorker]:
    """Returns the workers, by rank, of a job on this host that take gradients from files."""
    known = next((each for each in _running() if _is_at(each, address)), None)
    server = address if known is None else known.address
    try:
        found = [each for each in running_file_workers() if _same(each.server, server)]
    except (UnavailableError, OSError):
        return []
    return sorted(found, key=lambda each: each.rank)


def make_node(name: str, secret: bytes, transports: tuple[str, ...] | None) -> Node:
    """Returns a reader's Node, without the secret of a job that the environment may name.

    Raises:
        ValueError: the secret is too short.
    """
    if not secret:
        with _without_job_secret():
            return Node(name, transports=transports)
    return Node(name, secret=secret, transports=transports)


@contextlib.contextmanager
def _without_job_secret() -> Iterator[None]:
    """Hides the job's secret in the environment from a Node; a reader has its own or none."""
    names = "TENSORWIRE_SECRET", "TENSORWIRE_SECRET_FILE"
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _running() -> list[RunningServer]:
    try:
        return running_servers()
    except (UnavailableError, OSError):
        return []  # no file of a job is there


def _is_at(server: RunningServer, address: str) -> bool:
    return any(_same(address, each) for each in (server.address, server.door) if each)


def _same(one: str, other: str) -> bool:
    (host, _, port), (there, _, their) = one.rpartition(":"), other.rpartition(":")
    here = host.startswith(LOOPBACK) and there.startswith(LOOPBACK)
    return port == their and (host == there or here)
