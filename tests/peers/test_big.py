"""One region and one transfer of over 2 GiB, on each transport: no length is cut to 31 bits."""

from pathlib import Path

import numpy as np
import pytest
from actor import GIB, MIB, PATIENCE_S, Actor, eventually, memory_of, start_actor

from tensorwire import Node, Peer
from tensorwire.testing import PeerGroup

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("nothing_left"),
]

SIZE = 2 * GIB + 64 * MIB
NEEDED = 2 * SIZE + GIB  # the region, and what it is read into


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def samples() -> np.ndarray:
    """Offsets of 8-byte words: both ends, both sides of each GiB, and a few thousand others."""
    edges = [0, *(at + side for at in (GIB, 2 * GIB) for side in (-8, 0)), SIZE - 8]
    others = np.random.default_rng(3).integers(0, SIZE // 8, 4000) * 8
    return np.unique(np.concatenate([edges, others]))


def test_two_gib_and_more(transport: str) -> None:
    if available_bytes() < NEEDED:
        pytest.skip(f"needs {NEEDED / GIB:g} GiB of free memory")
    with PeerGroup() as group, Node("near", transports=[transport]) as node:
        member, target = start_actor(group, "big", transports=[transport])
        before = memory_of("self"), memory_of(member.pid)
        peer = node.connect(target.address())
        there_and_back(peer, target)
        target.free("r")
        # The memory of both processes goes back to the system.
        for pid, was in zip(("self", member.pid), before, strict=True):
            eventually(lambda pid=pid, was=was: grown(pid, was) < 64 * MIB, "memory is freed")
        peer.region(target.allocate("small", 8)).write(b"still ok").wait(PATIENCE_S)
        assert target.contents("small") == b"still ok"


def there_and_back(peer: Peer, target: Actor) -> None:
    remote = peer.region(target.allocate("r", SIZE))
    assert remote.size_bytes == SIZE
    offsets = samples()
    # Only what is touched takes memory: the source is zero between the samples.
    source = np.zeros(SIZE // 8, np.uint64)
    source[offsets // 8] = offsets + 1
    transfer = remote.write(source)
    transfer.wait(60)
    assert transfer.bytes == SIZE
    assert target.words("r", offsets.tolist()) == (offsets + 1).tolist()
    target.fill("r", SIZE - 8, b"from far")
    back = np.empty(SIZE // 8, np.uint64)
    transfer = remote.read(back)
    transfer.wait(60)
    assert transfer.bytes == SIZE
    assert (back[offsets[:-1] // 8] == offsets[:-1] + 1).all()
    assert back[-1:].tobytes() == b"from far"
    assert int(back[:-1].sum()) == int((offsets[:-1] + 1).sum())


def grown(pid: int | str, was: dict[str, int]) -> int:
    now = memory_of(pid)
    return sum(now[kind] - was[kind] for kind in ("RssAnon", "RssShmem"))
