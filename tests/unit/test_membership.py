"""The environment that a launcher sets, and peers that know the secret: anybody may start both."""

import contextlib
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tensorwire import Node, Peer
from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.membership.colocation import Colocation
from tensorwire.membership.identity import CONTROL, told_of_plain
from tensorwire.membership.server import ServerMember
from tensorwire.membership.worker import WorkerMember
from tensorwire.membership.world import World

GOOD = {
    "TENSORWIRE_RANK": "1",
    "TENSORWIRE_WORKERS": "2",
    "TENSORWIRE_SERVERS": "127.0.0.1:1, 127.0.0.1:2",
}


def test_a_complete_environment() -> None:
    place = World.from_environment({**GOOD, "TENSORWIRE_SLICES": "4"})
    assert place == World(1, 2, ("127.0.0.1:1", "127.0.0.1:2"), 4)
    assert World.from_environment(GOOD) == World(1, 2, ("127.0.0.1:1", "127.0.0.1:2"), 2)


@pytest.mark.parametrize(
    ("said", "durable", "asked"),
    [("0", False, False), ("default", True, False), ("1", True, True)],
)
def test_what_the_launcher_says_of_durability(said: str, durable: bool, asked: bool) -> None:
    place = World.from_environment({**GOOD, "TENSORWIRE_DURABLE": said})
    assert place is not None
    assert (place.durable, place.asked) == (durable, asked)


def test_another_word_for_durability_is_an_error() -> None:
    with pytest.raises(ValueError, match="TENSORWIRE_DURABLE is 'yes'"):
        World.from_environment({**GOOD, "TENSORWIRE_DURABLE": "yes"})


def test_slices_are_taken_over_in_durable_jobs_only() -> None:
    durable = {**GOOD, "TENSORWIRE_DURABLE": "1", "TENSORWIRE_TAKEOVER": "1"}
    place = World.from_environment(durable)
    assert place is not None
    assert place.takeover
    for change in ({"TENSORWIRE_DURABLE": "0"}, {"TENSORWIRE_TAKEOVER": "yes"}):
        with pytest.raises(ValueError, match="TENSORWIRE_TAKEOVER is"):
            World.from_environment({**durable, **change})


def test_nothing_said_is_alone() -> None:
    assert World.from_environment({}) is None
    assert World.from_environment({"TENSORWIRE_SLICES": "3"}) == World(slices=3)
    assert World.from_environment({"TENSORWIRE_WORKERS": "1", "TENSORWIRE_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"TENSORWIRE_RANK": "2"}, "TENSORWIRE_RANK is '2', not a number from 0 to 1"),
        ({"TENSORWIRE_RANK": "one"}, "not a number"),
        ({"TENSORWIRE_RANK": None}, "TENSORWIRE_RANK is not; start the script by a launcher"),
        ({"TENSORWIRE_WORKERS": None}, "TENSORWIRE_WORKERS is not"),
        ({"TENSORWIRE_WORKERS": "0"}, "TENSORWIRE_WORKERS is '0'"),
        ({"TENSORWIRE_SERVERS": " , "}, "is empty"),
        ({"TENSORWIRE_SERVERS": None}, "RANK and TENSORWIRE_WORKERS say .*_SERVERS is not set"),
        ({"TENSORWIRE_SERVERS": None, "TENSORWIRE_WORKERS": None}, "TENSORWIRE_RANK say"),
        ({"TENSORWIRE_SERVERS": None, "TENSORWIRE_RANK": None}, "TENSORWIRE_WORKERS say"),
        ({"TENSORWIRE_SLICES": "-1"}, "TENSORWIRE_SLICES is '-1'"),
    ],
)
def test_what_makes_no_sense(change: dict[str, str | None], words: str) -> None:
    environ = {**GOOD, **change}
    with pytest.raises(ValueError, match=words):
        World.from_environment({k: v for k, v in environ.items() if v is not None})


def test_slices_are_dealt_equally() -> None:
    with pytest.raises(ValueError, match="3 slices cannot be dealt equally to 2 workers"):
        World(0, 2, ("127.0.0.1:1",), 3).check()


def test_pipelines_of_consecutive_workers() -> None:
    places = [World(rank, 6, ("127.0.0.1:1",), 6, 2) for rank in range(6)]
    assert {place.replicas for place in places} == {3}
    assert [place.stage for place in places] == [0, 1] * 3
    assert [place.my_slices for place in places[::2]] == [range(2), range(2, 4), range(4, 6)]
    assert all(a.my_slices == b.my_slices for a, b in zip(places[::2], places[1::2], strict=True))


def test_pipelines_are_dealt_equally() -> None:
    with pytest.raises(ValueError, match="5 workers cannot be dealt to pipelines of 2"):
        World(0, 5, ("127.0.0.1:1",), 5, 2).check()
    with pytest.raises(ValueError, match="3 slices cannot be dealt equally to 2 replicas"):
        World(0, 4, ("127.0.0.1:1",), 3, 2).check()


def test_what_is_not_encrypted_is_told_in_one_line() -> None:
    def peer(address: str, transport: str, encrypted: bool = False) -> Any:
        return SimpleNamespace(
            address=address, path=SimpleNamespace(transport=transport, encrypted=encrypted)
        )

    here = [peer("127.0.0.1:1", "tcp"), peer("10.0.0.1:1", "shm")]
    told = told_of_plain([*here, peer("10.0.0.2:1", "tcp")], "off")
    assert "to 10.0.0.2:1 by tcp, as TENSORWIRE_TLS is off" in told
    assert "127.0.0.1" not in told
    assert "10.0.0.1" not in told
    assert "to 10.0.0.3:1, 10.0.0.4:1 by rdma" in told_of_plain(
        [peer("10.0.0.3:1", "rdma"), peer("10.0.0.4:1", "rdma"), *here], ""
    )
    assert told_of_plain([*here, peer("10.0.0.2:1", "tcp", True)], "") == ""


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match=r"worker 1 cannot join: server 0 at 127\.0\.0\.1:1"):
        WorkerMember.join(World(1, 2, ("127.0.0.1:1",), 2), timeout_s=2.0)


@pytest.fixture
def nodes() -> Iterator[contextlib.ExitStack]:
    """Closes what is entered."""
    with contextlib.ExitStack() as stack:
        yield stack


def knock(nodes: contextlib.ExitStack, name: str, address: str) -> Peer:
    """A Node of this name connects; returns the member as it sees it."""
    return nodes.enter_context(Node(name)).connect(address)


def refusal(peer: Peer) -> str:
    """Returns the message to a process that was turned away."""
    with pytest.raises(PeerLostError) as caught:
        peer.region("anything", 20.0)
    return str(caught.value)


def job_of(nodes: contextlib.ExitStack, servers: int | None = 1) -> tuple[ServerMember, World]:
    node = nodes.enter_context(Node("server-0"))
    return ServerMember(0, 2, node, servers), World(0, 2, (node.address,), 2)


def join(nodes: contextlib.ExitStack, rank: int, place: World) -> WorkerMember:
    member = WorkerMember.join(World(rank, 2, place.servers, 2))
    nodes.callback(member.close)
    return member


STRANGERS = [
    "worker-\u00b2",  # isdigit(), and no number to int()
    "worker-\u0661",  # int() takes it: ARABIC-INDIC DIGIT ONE
    "worker-01",
    "worker-+1",
    "worker-2",
    "worker-",
    "worker--1",
    "worker-1 ",
    "server-0",
    "server-1",
    "server-5",
    "server-\u00b2",
    "machine-1",
    "somebody",
]


def test_strangers_are_turned_away_and_the_members_gather(
    nodes: contextlib.ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """Named for a bug: worker-\u00b2 ended the job, and server-5 was taken for a server."""
    server, place = job_of(nodes)
    address = place.servers[0]
    first = join(nodes, 0, place)
    turned_away = {name: knock(nodes, name, address) for name in STRANGERS}
    second = join(nodes, 1, place)
    server.gather()
    assert {rank: peer.name for rank, peer in server.workers.items()} == {
        0: "worker-0",
        1: "worker-1",
    }
    assert server.servers == {}
    lines = capfd.readouterr().err.splitlines()
    for name, line in zip(STRANGERS, lines, strict=True):
        assert f"server 0 turned away {name!r} (pid " in line
        assert line.endswith("it is no member of this job; expected: worker-1")
        assert line in refusal(turned_away[name])
    for member in (first, second):
        assert member.servers[0].region(CONTROL)


def test_a_second_one_of_a_name_is_turned_away(
    nodes: contextlib.ExitStack, capfd: pytest.CaptureFixture[str]
) -> None:
    """Named for a bug: it took the place of the first, which then waited for ever."""
    server, place = job_of(nodes)
    address = place.servers[0]
    first = join(nodes, 1, place)
    again = knock(nodes, "worker-1", address)
    join(nodes, 0, place)
    server.gather()
    assert server.workers[1].incarnation == first.node.incarnation
    reason = "worker 1 (pid {0}) is here already; expected: worker-0"
    assert reason.format(server.workers[1].pid) in refusal(again)
    # The job runs: who has a path that tells its end at once cannot have come back.
    others = [knock(nodes, name, address) for name in ("worker-1", "worker-\u00b2")]
    assert server.returned() is None
    assert "is here already, and the job runs" in refusal(others[0])
    assert "it is no member of this job, which runs" in refusal(others[1])
    server.check()
    assert first.servers[0].region(CONTROL)
    assert len(capfd.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("count", [3, None])
def test_servers_come_in_turn(nodes: contextlib.ExitStack, count: int | None) -> None:
    """A server takes no other one, told their number or not."""
    server, place = job_of(nodes, count)
    address = place.servers[0]
    names = ["server-01", "server-1", "server-1", "server-2", "server-9"]
    peers = [knock(nodes, name, address) for name in names]
    for rank in range(2):
        join(nodes, rank, place)
    server.gather()
    assert {i: peer.name for i, peer in server.servers.items()} == {1: "server-1", 2: "server-2"}
    for peer in peers[::2]:
        assert "turned away" in refusal(peer)
    assert not peers[1].lost
    assert not peers[3].lost


def test_an_address_where_another_one_listens(nodes: contextlib.ExitStack) -> None:
    """Named for a bug: any listener at an address of TENSORWIRE_SERVERS was a server."""
    address = job_of(nodes)[1].servers[0]
    with pytest.raises(UnavailableError, match=r"server 1 .*'server-0' .*listens .*not server-1"):
        WorkerMember.join(World(0, 2, (address, address), 2))
    with pytest.raises(UnavailableError, match=r"'server-0' \(pid .*, not server-1"):
        ServerMember(2, 2, nodes.enter_context(Node("server-2"))).connect((address, address))


def test_a_server_that_is_replaced_while_another_one_connects(
    nodes: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named for a bug: a server that joined ended its job by being there at that moment."""
    there, place = job_of(nodes)
    kills, connect = [True], Node.connect

    def connect_or_lose(node: Node, *args: Any, **options: Any) -> Peer:
        if kills and kills.pop():
            raise PeerLostError("server 0 was killed")
        return connect(node, *args, **options)

    monkeypatch.setattr(Node, "connect", connect_or_lose)
    member = ServerMember(1, 2, nodes.enter_context(Node("server-1")))
    member.durable = True
    member.connect(place.servers)
    assert member.servers[0].name == "server-0"
    for durable, closed in ((False, False), (True, True)):  # nobody takes its place
        member.durable, kills[:] = durable, [True]
        if closed:
            there.node.close()
        with pytest.raises(PeerLostError, match="server 0 was killed"):
            member.connect(place.servers)


@pytest.mark.parametrize(
    "told",
    [b"", b"x" * 16, b"x" * 17, struct.pack("<QQ", 1 << 48, 7000), struct.pack("<QQ", 5, 1 << 16)],
)
def test_an_introduction_that_makes_no_sense(nodes: contextlib.ExitStack, told: bytes) -> None:
    """Named for a bug: the error named no worker."""
    node = nodes.enter_context(Node("worker-0"))
    colocation = Colocation(World(0, 2, ("127.0.0.1:1",), 2), node, ())
    good = colocation.introduction()
    assert len(good) == 16
    with pytest.raises(ValueError, match=r"worker 1 introduced itself with host .* no sense"):
        colocation.learn([good, told])


def test_a_goodbye_reaches_every_server_though_one_has_ended(nodes: contextlib.ExitStack) -> None:
    """Named for a bug: server 0 had everybody's goodbye and ended, and server 1 waited in vain."""
    places = [nodes.enter_context(Node(f"server-{index}")) for index in range(2)]
    servers = [ServerMember(index, 1, node, 2) for index, node in enumerate(places)]
    addresses = tuple(node.address for node in places)
    servers[1].connect(addresses[:1])
    worker = WorkerMember.join(World(0, 1, addresses, 1))
    for server in servers:
        server.gather()
    places[0].close()
    with pytest.raises(PeerLostError):
        worker.servers[0].region("anything", 20.0)
    worker.close()
    assert servers[1].has_left(0)
    servers[1].check()
