"""Process functions for test_waiting.py: processes that block in one call."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from actor import MIB, background, cpu_seconds

from tensorwire import Node, TimeoutError, wait_all
from tensorwire.testing import Channel

CALLS = (
    "wait_until",
    "wait_until, peer",
    "wait_until beside another",
    "reached",
    "accept",
    "connect",
    "Transfer.wait",
    "Transfer.wait, lead=False",
    "wait_all",
    "fetch_add",
    "region",
    "allocate",
)


@contextlib.contextmanager
def blocking(
    name: str, transports: list[str], address: str, freeze: Callable[[], None]
) -> Iterator[Callable[[float | None], Any]]:
    """Gives a call that blocks, as long as the process at `address` is frozen, for a time."""
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node("waiter", transports=transports))
        peer = node.connect(address)
        remote = peer.region("r")
        word = node.allocate(64).word(0)
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
        freeze()
        if name == "wait_until beside another":
            other = background(word.wait_until, 2, 20.0)
        if name in ("Transfer.wait", "Transfer.wait, lead=False", "wait_all"):
            transfer = remote.write(np.ones(remote.size_bytes, np.uint8))
        calls: dict[str, Callable[[float | None], Any]] = {
            "wait_until": lambda s: word.wait_until(1, s),
            "wait_until, peer": lambda s: word.wait_until(1, s, peer=peer),
            "wait_until beside another": lambda s: word.wait_until(1, s),
            "reached": lambda s: asyncio.run(word.reached(1, s)),
            "accept": node.accept,
            "connect": lambda s: node.connect(silent_address, timeout_s=s or 1e6),
            "Transfer.wait": lambda s: transfer.wait(s),
            "Transfer.wait, lead=False": lambda s: transfer.wait(s, lead=False),
            "wait_all": lambda s: wait_all([transfer], s),
            "fetch_add": lambda s: remote.word(0).fetch_add(1, s),
            "region": lambda s: peer.region("r", s),
            "allocate": lambda s: peer.allocate(MIB, None, s),
        }
        yield calls[name]
        # So that the process ends at once: what is in flight ends with its peer.
        peer.close()
        if name == "wait_until beside another":
            node.close()
            other.exception(5)


def idles(
    channel: Channel, name: str, transports: list[str], address: str, seconds: float
) -> tuple[float, float]:
    """Blocks until the time is over; gives processor seconds and seconds."""

    def freeze() -> None:
        channel.send("ready")
        channel.recv()

    with blocking(name, transports, address, freeze) as call:
        cpu, start = cpu_seconds(), time.monotonic()
        with contextlib.suppress(TimeoutError):
            call(seconds)
            raise AssertionError(f"{name} did not block")
        return cpu_seconds() - cpu, time.monotonic() - start


def interrupted(channel: Channel, name: str, transports: list[str], address: str) -> float:
    """Blocks for ever, until SIGINT; gives when KeyboardInterrupt came (monotonic)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def freeze() -> None:
        channel.send("ready")
        channel.recv()

    with blocking(name, transports, address, freeze) as call:
        channel.send("blocking")
        try:
            call(None)
        except KeyboardInterrupt:
            return time.monotonic()
        raise AssertionError(f"{name} ended without an interrupt")


def player(
    channel: Channel, transports: list[str], cores: list[int], rounds: int, serves: bool
) -> int:
    """Plays ping-pong by signals, on the given cores; gives the rounds."""
    os.sched_setaffinity(0, cores)
    with Node("player", transports=transports) as node:
        mine = node.allocate(64, name="mine").word(0)
        channel.send(node.address)
        peer = node.connect(channel.recv())
        theirs = peer.region("mine").word(0)
        channel.send("ready")
        channel.recv()
        for round_ in range(1, rounds + 1):
            if serves:
                theirs.set(round_)
                mine.wait_until(round_, 20, peer=peer)
            else:
                mine.wait_until(round_, 20, peer=peer)
                theirs.set(round_)
        # Nobody leaves before the other has everything.
        channel.send("played")
        channel.recv()
        return mine.value
