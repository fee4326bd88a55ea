"""The network between two hosts goes away, for a while or for ever, both ways or one way."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import hosts
import numpy as np
import pytest
from actor import MIB, PATIENCE_S, all_complete, background, eventually
from hosts import Hosts, enter
from network import digest, on, start_far

from tensorwire import Node, Peer, PeerLostError, StaleHandleError, TimeoutError, wait_all
from tensorwire.testing import PeerGroup
from tensorwire.testing.faults import check_completed_once
from tensorwire.testing.setup import pattern

WHY_NOT = hosts.missing_shape()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("nothing_left"),
]

SHORT_S = 3.0
TIMEOUT_S = 3.0  # of peers, where a test waits for the loss
SLACK_S = 2.0  # for a busy machine
SIZE = 64 * MIB  # half a second on the link


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        hosts.shape(made, 1000)
        yield made


@pytest.fixture(autouse=True)
def mended(pair: Hosts) -> Iterator[None]:
    yield
    hosts.restore(pair)


def unplug_far(pair: Hosts) -> None:
    hosts.unplug(pair[1])


@pytest.mark.parametrize("break_", [hosts.cut, unplug_far])
@pytest.mark.slow
def test_a_short_partition_loses_nothing(pair: Hosts, break_: Callable[[Hosts], None]) -> None:
    """Transfers and waits go on, and the bits are the ones that were sent."""
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address)) as near:
        _, far = start_far(group, pair)
        peer = near.connect(far.address())
        target, source = (peer.region(far.allocate(key, SIZE)) for key in ("target", "source"))
        counter = peer.region(far.allocate("counter", 64))
        sent, read = pattern(SIZE - 64, 1), np.empty(SIZE, np.uint8)
        source[64:].write(pattern(SIZE - 64, 2)).wait(PATIENCE_S)
        waiting = far.begin("wait_until", "target", 0, 1, 60.0)
        pending = [
            target[64:].write(sent, signal=(target.word(0), 1)),
            source.read(read),
        ]
        pending.append(counter.word(0).set(7, after=pending))
        break_(pair)
        pending.append(peer.fetch_add(counter.word(8), 5))
        time.sleep(SHORT_S)
        assert [transfer.done() for transfer in pending] == [False] * 4
        hosts.restore(pair)
        wait_all(pending, PATIENCE_S)
        waiting()
        assert far.digest("source") == digest(read)
        assert far.contents("target", 64) == sent.tobytes()
        assert (read[64:] == pattern(SIZE - 64, 2)).all()
        assert far.words("counter", [0, 8]) == [7, 5]
        assert near.peers == [peer]
        assert all_complete(near)


def connected(node: Node, address: str) -> Peer:
    """Connects as soon as the kernel knows again where the host is."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return node.connect(address, timeout_s=PATIENCE_S)
        except PeerLostError as error:
            if "No route to host" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class Links:
    """Three connections from one near Node to far ones, named by what the near one sees there.

    "idle" does nothing, "busy" is written to and read from, "writer" is written to and writes back
    for ever. Each side has leased all that the other allows.
    """

    def __init__(
        self, group: PeerGroup, pair: Hosts, *, writer_bytes: int = SIZE, **options: Any
    ) -> None:
        self.writer_bytes = writer_bytes
        self.options = {"quota_bytes": MIB, **options}
        self.near = Node("near", **on(pair[0].address, **self.options))
        self.members = {}
        self.actors = {}
        for name in ("idle", "busy", "writer"):
            member, actor = start_far(group, pair, name, **self.options)
            self.members[name], self.actors[name] = member, actor
        self.peers: dict[str, Peer] = {}
        for name in ("idle", "busy"):
            self.peers[name] = self.near.connect(self.actors[name].address())
            assert self.actors[name].accept() == "near"
            self.peers[name].allocate(MIB, "lease")
            self.actors[name].allocate("word", 64)
        self.near.allocate(SIZE, name="target")
        writer = self.actors["writer"]
        writer.connect(self.near.address)
        self.peers["writer"] = self.near.accept(PATIENCE_S)
        writer.lease(MIB, "lease")
        writer.find_remote("target")
        self.busy, self.both = (
            self.peers[name].region(self.actors[name].allocate("target", SIZE))
            for name in ("busy", "writer")
        )
        self.word = self.near.allocate(64).word(0)

    def watch(self) -> None:
        """Both sides begin to wait, and transfers to be on their way in both directions."""
        self.waiting = {
            name: background(self._await_loss, peer) for name, peer in self.peers.items()
        }
        self.far_sides = {
            name: self.actors[name].begin("await_loss", "word", 50.0) for name in ("idle", "busy")
        }
        self.far_sides["writer"] = self.actors["writer"].begin(
            "write_until_lost", self.writer_bytes
        )
        data = np.ones(SIZE, np.uint8)
        self.transfers = [each.write(data) for each in (self.busy, self.both) for _ in range(8)]
        self.transfers.append(self.busy.word(0).set(1, after=self.transfers))
        self.transfers.append(self.busy.read(np.empty(SIZE, np.uint8)))
        received = self.near.stats()["bytes_received"]
        eventually(lambda: self.near.stats()["bytes_received"] > received, "the writer writes")
        assert not self.transfers[0].done()

    def _await_loss(self, peer: Peer) -> tuple[str, float]:
        try:
            self.word.wait_until(1, 50.0, peer=peer)
        except PeerLostError as error:
            return str(error), time.monotonic()
        raise AssertionError("somebody raised the word")

    def check_lost(self, since: float, timeout_s: float) -> None:
        """Everybody has noticed in time, and says whom it lost; nothing is left open."""
        noticed = {}
        for name, future in self.waiting.items():
            text, noticed[f"near, {name}"] = future.result(60.0)
            assert f"lost peer '{name}' ({self.peers[name].address}, pid " in text
        for name, finish in self.far_sides.items():
            text, noticed[f"far, {name}"] = finish()
            assert "lost peer 'near' (10.213.87.1:" in text
        late = {who: when - since for who, when in noticed.items()}
        assert max(late.values()) < timeout_s + SLACK_S, late
        ends = [(transfer, transfer.code) for transfer in self.transfers if transfer.done()]
        assert len(ends) == len(self.transfers)
        assert all(code != 0 for _, code in ends)
        for transfer in self.transfers:
            with pytest.raises(PeerLostError, match=r"lost peer '(busy|writer)'"):
                transfer.wait(0)
        # What peers had leased is given back on both sides.
        with pytest.raises(LookupError):
            self.near.region("lease")
        for name in ("idle", "busy"):
            with pytest.raises(AssertionError, match="LookupError"):
                self.actors[name].find("lease", "lease")
        assert self.near.peers == []
        for actor in self.actors.values():
            assert actor.peer_count() == 0
            stats = actor.stats()
            assert stats["transfers_started"] == stats["transfers_completed"]
        assert all_complete(self.near)
        check_completed_once(self.transfers, ends, "after the loss")

    def check_new(self) -> None:
        """The same Nodes connect anew, in both directions, and lease as much as before."""
        for name in ("idle", "busy"):
            peer = connected(self.near, self.actors[name].address())
            peer.allocate(MIB, "lease").write(pattern(MIB)).wait(PATIENCE_S)
            self.actors[name].find("lease", "lease")
            assert self.actors[name].contents("lease") == pattern(MIB).tobytes()
            with pytest.raises(PeerLostError):
                self.peers[name].region("lease")
        self.actors["writer"].connect(self.near.address)
        self.actors["writer"].lease(MIB, "lease")


@contextlib.contextmanager
def links(pair: Hosts, **options: Any) -> Iterator[Links]:
    with enter(pair[0].path), PeerGroup() as group:
        made = Links(group, pair, **options)
        with made.near:
            yield made


def lose(
    pair: Hosts,
    break_: Callable[[Hosts], None],
    *,
    timeout_s: float,
    partition_s: float,
    **options: Any,
) -> None:
    with links(pair, **options) as made:
        made.watch()
        since = time.monotonic()
        break_(pair)
        made.check_lost(since, timeout_s)
        for name in ("idle", "busy"):
            with pytest.raises((PeerLostError, TimeoutError), match=r"10\.213\.87\.2:"):
                made.near.connect(made.actors[name].address(), timeout_s=0.2)
        time.sleep(max(since + partition_s - time.monotonic(), 0))
        hosts.restore(pair)
        made.check_new()


@pytest.mark.slow
def test_a_long_partition(pair: Hosts) -> None:
    """Both sides give each other up in time, and find each other anew."""
    options = {"peer_timeout_s": TIMEOUT_S}
    lose(pair, unplug_far, timeout_s=TIMEOUT_S, partition_s=2 * TIMEOUT_S, **options)


@pytest.mark.slow
def test_a_partition_with_the_default_timeout(pair: Hosts) -> None:
    """And a network that swallows everything."""
    lose(pair, hosts.cut, timeout_s=10, partition_s=12)


def near_to_far(pair: Hosts) -> None:
    hosts.cut_one_way(*pair)


def far_to_near(pair: Hosts) -> None:
    hosts.cut_one_way(pair[1], pair[0])


@pytest.mark.parametrize("break_", [near_to_far, far_to_near])
def test_loss_in_one_direction(pair: Hosts, break_: Callable[[Hosts], None]) -> None:
    """The side that hears the other, in vain, notices as well as the side that hears nothing.

    It hears the same short messages again and again, since its answers do not arrive.
    """
    options = {"peer_timeout_s": TIMEOUT_S, "writer_bytes": 8}
    lose(pair, break_, timeout_s=TIMEOUT_S, partition_s=TIMEOUT_S, **options)


def test_a_patient_peer_that_does_not_hear_us(pair: Hosts) -> None:
    """The peer repeats itself for as long as its own timeout: that is no answer."""
    options = {"peer_timeout_s": TIMEOUT_S}
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address, **options)) as near:
        _, far = start_far(group, pair, peer_timeout_s=10 * TIMEOUT_S)
        peer = near.connect(far.address())
        near.allocate(8, name="target")
        word = near.allocate(8).word(0)
        assert far.accept() == near.name
        far.use_accepted("target")
        losing = far.begin("write_until_lost", 8)
        eventually(lambda: near.stats()["bytes_received"] > 0, "the far side writes")
        since = time.monotonic()
        near_to_far(pair)
        with pytest.raises(PeerLostError, match="silent"):
            word.wait_until(1, PATIENCE_S, peer=peer)
        assert time.monotonic() - since < TIMEOUT_S + SLACK_S
        hosts.restore(pair)
        losing()


def test_who_gives_up_first_tells_the_other(pair: Hosts) -> None:
    """If it is still heard, also with data on the way in both directions."""
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address)) as near:
        _, far = start_far(group, pair, peer_timeout_s=TIMEOUT_S)
        peer = near.connect(far.address())
        target = peer.region(far.allocate("target", SIZE))
        near.allocate(SIZE, name="target")
        assert far.accept() == near.name
        far.use_accepted("target")
        losing = far.begin("write_until_lost", SIZE)
        eventually(lambda: near.stats()["bytes_received"] > 0, "the far side writes")
        transfer = target.write(np.ones(SIZE, np.uint8))
        since = time.monotonic()
        hosts.cut_one_way(*pair)
        with pytest.raises(PeerLostError):
            transfer.wait(PATIENCE_S)
        assert time.monotonic() - since < TIMEOUT_S + SLACK_S
        losing()


@pytest.mark.slow
def test_a_stopped_peer_is_not_lost_before_its_link(pair: Hosts) -> None:
    """A stopped peer answers, also when it has no room left; then the network goes away."""
    options = {"peer_timeout_s": TIMEOUT_S}
    with enter(pair[0].path), PeerGroup() as group, Node(**on(pair[0].address, **options)) as near:
        member, far = start_far(group, pair, **options)
        busy, idle = (near.connect(far.address()) for _ in range(2))
        target = busy.region(far.allocate("target", SIZE))
        word = near.allocate(8).word(0)
        member.stop()
        transfer = target.write(np.ones(SIZE, np.uint8))
        with pytest.raises(TimeoutError):
            transfer.wait(TIMEOUT_S + 1)
        assert len(near.peers) == 2
        since = time.monotonic()
        hosts.cut(pair)
        with pytest.raises(PeerLostError, match="silent"):
            transfer.wait(PATIENCE_S)
        with pytest.raises(PeerLostError, match="silent"):
            word.wait_until(1, PATIENCE_S, peer=idle)
        assert time.monotonic() - since < TIMEOUT_S + SLACK_S
        hosts.restore(pair)
        member.cont()


def test_back_at_another_address(pair: Hosts) -> None:
    """A process that comes back elsewhere under the same name is another one."""
    options = {"peer_timeout_s": TIMEOUT_S}
    with contextlib.ExitStack() as stack:
        stack.enter_context(enter(pair[0].path))
        group = stack.enter_context(PeerGroup())
        near = stack.enter_context(Node("near", **on(pair[0].address, **options)))
        _, before = start_far(group, pair, **options)
        handle = before.allocate("weights", 64, "rw", "weights")
        lost = near.connect(handle)
        remote = lost.region(handle)
        remote.write(b"before").wait(PATIENCE_S)
        moved = hosts.move(pair[1], "10.213.87.3")
        stack.callback(hosts.move, moved, pair[1].address)
        since = time.monotonic()
        transfer = remote.write(b"lost")
        _, after = start_far(group, (pair[0], moved), **options)
        peer = near.connect(after.address(), timeout_s=PATIENCE_S)
        assert peer.name == lost.name == "far"
        assert peer.address.startswith("10.213.87.3:")
        assert peer.incarnation != handle.incarnation
        with pytest.raises(StaleHandleError, match=r"'far' at 10\.213\.87\.3:\d+ .*restarted"):
            peer.region(handle)
        with pytest.raises(LookupError):
            peer.region("weights")
        new = peer.region(after.allocate("weights", 64, "rw", "weights"))
        new.write(b"after").wait(PATIENCE_S)
        with pytest.raises(PeerLostError, match=r"'far' \(10\.213\.87\.2:"):
            transfer.wait(PATIENCE_S)
        assert time.monotonic() - since < TIMEOUT_S + SLACK_S
        with pytest.raises(PeerLostError, match=r"'far' \(10\.213\.87\.2:"):
            lost.region(handle)
        with pytest.raises((PeerLostError, TimeoutError), match=r"10\.213\.87\.2:"):
            near.connect(handle, timeout_s=0.5)
        assert after.contents("weights", 0, 6) == b"after\0"
        assert near.peers == [peer]
