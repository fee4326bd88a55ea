"""Peers of a process that has hardly any descriptors left: each is told that this is the reason."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorwire import Node
from tensorwire.errors import BusyError, TimeoutError

SERVER = """
import os, resource, sys
from tensorwire import Node
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(int(sys.argv[1]))]
with Node() as node:
    node.allocate(8, name="r")
    print(node.address, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def poor_server(taken: int) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(taken)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        yield process.stdout.readline().strip()
        process.kill()


@pytest.mark.parametrize(
    ("path", "taken"), [("shm", 20), ("shm", 21), ("shm", 22), ("shm", 23), ("tcp", 24)]
)
def test_a_peer_too_many_is_told_of_descriptors(path: str, taken: int) -> None:
    """By whichever of its descriptors is the first that the server cannot have."""
    with poor_server(taken) as address, contextlib.ExitStack() as stack:

        def connect() -> None:
            node = stack.enter_context(Node(transports=[path]))
            node.connect(address, timeout_s=1).region("r")

        def connect_many() -> None:
            for _ in range(64):
                connect()

        connect()
        with pytest.raises((BusyError, TimeoutError), match=r"descriptors .*ulimit -n"):
            connect_many()
