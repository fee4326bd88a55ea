"""On a link of 1 Gbit/s tcp is as fast as a plain socket, and large transfers starve no small ones.

Figures are of one run and beside each other, so the machine may be slow.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import hosts
import numpy as np
import pytest
from actor import MIB, PATIENCE_S
from hosts import Hosts, enter
from network import on, start_far

from tensorwire import Node, wait_all
from tensorwire.testing import PeerGroup

WHY_NOT = hosts.missing_shape()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("nothing_left"),
]

MEGABITS = 1000
BYTES_PER_S = MEGABITS * 125_000
SIZE = 24 * MIB  # a fifth of a second


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        hosts.shape(made, MEGABITS)
        yield made


@pytest.mark.slow
def test_a_large_write_fills_the_link(pair: Hosts) -> None:
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address)) as near:
        _, far = start_far(group, pair)
        remote = near.connect(far.address()).region(far.allocate("target", SIZE))
        data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
        with socket.create_connection((pair[1].address, far.listen_plainly(SIZE))) as plain:

            def ours() -> float:
                started = time.perf_counter()
                remote.write(data).wait(PATIENCE_S)
                return time.perf_counter() - started

            def theirs() -> float:
                started = time.perf_counter()
                plain.sendall(data)
                assert plain.recv(1) == b"!"
                return time.perf_counter() - started

            ours(), theirs()
            pairs = [(theirs(), ours()) for _ in range(5)]
        # The link is what limits both.
        assert median(plain for plain, _ in pairs) > 0.8 * SIZE / BYTES_PER_S
        assert median(plain / mine for plain, mine in pairs) >= 0.9, pairs


@pytest.mark.slow
def test_small_transfers_are_not_starved(pair: Hosts) -> None:
    """A small one waits for what is queued before it, never for the rest of the large one."""
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address)) as near:
        _, far = start_far(group, pair)
        peer = near.connect(far.address())
        large = peer.region(far.allocate("large", 160 * MIB))
        small = peer.region(far.allocate("small", 4096))
        transfer = large.write(np.ones(160 * MIB, np.uint8))
        begun, times = time.perf_counter(), []
        while not transfer.done():
            started = time.perf_counter()
            small[64:].write(bytes(1000), signal=(small.word(0), len(times) + 1)).wait(PATIENCE_S)
            times.append(time.perf_counter() - started)
        all_s = time.perf_counter() - begun
        assert far.value("small", 0) == len(times)
        transfer.wait(0)
        kernel = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
        # What was handed to the kernel, what the stream had prepared, and the queue of the link.
        queued_s = (kernel + 8 * MIB) / BYTES_PER_S + hosts.QUEUE_MS / 1000
        assert median(times) < 2 * queued_s, times
        # A packet that is lost and sent again delays everything behind it.
        assert max(times) < all_s / 2, times


@pytest.mark.slow
def test_small_transfers_overtake_many_large_ones(pair: Hosts) -> None:
    """More than the window of unanswered transfers has room for."""
    count, size = 700, MIB // 4
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address)) as near:
        _, far = start_far(group, pair)
        peer = near.connect(far.address())
        large = peer.region(far.allocate("large", size))
        small = peer.region(far.allocate("small", 4096))
        data = np.ones(size, np.uint8)
        started = time.perf_counter()
        transfers = [large.write(data) for _ in range(count)]
        small.write(bytes(1000)).wait(PATIENCE_S)
        small_s = time.perf_counter() - started
        wait_all(transfers)
        assert small_s < (time.perf_counter() - started) / 3
