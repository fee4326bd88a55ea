"""How a worker finds its job: the variables of `tensorwire run`, torchrun's store, or nothing.

Under torchrun the first worker of every host starts one server beside it and tells the others its
address through the store that torchrun keeps. docs/launch.md has the variables.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import select
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

from tensorwire import tracebacks
from tensorwire.errors import UnavailableError
from tensorwire.membership import Place

_TIMEOUT_S = 120.0
_servers: list[subprocess.Popen[bytes]] = []


def find_place() -> Place:
    """This worker's place; alone where nobody says anything else.

    Raises:
        ValueError: variables contradict each other.
        UnavailableError: a server did not start.
    """
    place = Place.from_environment()
    if place is not None and place.servers:
        return place
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        tracebacks.install(f"worker {os.environ['RANK']}")
        return _under_torchrun()
    return place or Place()


def torchrun_store() -> Any:
    """The store of torchrun, for this job; the job's secret is in the environment afterwards."""
    import torch.distributed as dist

    environ = os.environ
    rank = int(environ["RANK"])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    base = dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=not agent and rank == 0,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"tensorwire/{environ['TORCHELASTIC_RUN_ID']}/{attempt}", base)
    if "TENSORWIRE_SECRET_FILE" not in environ and "TENSORWIRE_SECRET" not in environ:
        if rank == 0:
            store.set("secret", secrets.token_hex(32))
        environ["TENSORWIRE_SECRET"] = store.get("secret").decode()
    return store


def _under_torchrun() -> Place:
    environ = os.environ
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    host, hosts = int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"])
    first = environ["LOCAL_RANK"] == "0"
    store = torchrun_store()
    addresses: list[str] = []
    for index in range(hosts):
        if first and index == host:
            here = address_towards(environ["MASTER_ADDR"]) if hosts > 1 else "127.0.0.1"
            store.set(f"server/{index}", start_server(index, size, hosts, addresses, here))
        addresses.append(store.get(f"server/{index}").decode())
    slices = int(environ.get("TENSORWIRE_SLICES", str(size)))
    return Place(rank, size, tuple(addresses), slices)


def wait_for_servers(orderly: bool) -> None:
    """Other workers may still need the server that this process started; it ends after them."""
    while _servers:
        process = _servers.pop()
        try:
            # After a failure it first tells the others what happened.
            process.wait(None if orderly else 5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def address_towards(host: str) -> str:
    """This host's own address on the way to another one; nothing is sent."""
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address = str(probe.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback:
        # This host's own name, which its /etc/hosts maps to loopback: others need another address.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                address = str(probe.getsockname()[0])
            except OSError:
                pass  # no other interface: all hosts are this one
    return f"[{address}]" if ":" in address else address


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
    command += [f"--listen={listen}:0"]
    command += [f"--address-fd={writer}", f"--parent={os.getpid()}"]
    with open(reader) as channel:
        try:
            process = subprocess.Popen(command, pass_fds=[writer], start_new_session=True)
        finally:
            os.close(writer)
        ready, _, _ = select.select([channel], [], [], _TIMEOUT_S)
        address = channel.readline().strip() if ready else ""
    _servers.append(process)
    if not address:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise UnavailableError(
            f"server {index} did not start (exit code {process.wait()}); its messages are above"
        )
    return address
