"""Nodes that lie to a Node that connects to them: it is not led astray, nor held up.

The asker is a process of its own, so that a crash or a hang is seen as one.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wire
from actor import MIB, PATIENCE_S, eventually, start_actor
from hostile import (
    SECRET,
    serve_asker,
)
from wire import Wire

from tensorwire.testing import PeerGroup

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def asker_process() -> Iterator[Any]:
    with PeerGroup() as group:
        _, target = start_actor(group, "asker", serve_asker, secret=SECRET)
        yield target


@pytest.fixture
def asker(asker_process: Any) -> Iterator[Any]:
    asker_process.mark()
    yield asker_process
    eventually(lambda: asker_process.peer_count() == 0, "the liar is forgotten")
    asker_process.forget()
    assert asker_process.growth(PATIENCE_S) == []
    stats = asker_process.stats()
    assert stats["transfers_started"] == stats["transfers_completed"]


def answers_to(stream: Wire, transfer: int, grant: dict[str, int], **values: Any) -> None:
    stream.frame(wire.GRANT, transfer=transfer, flags=6, **{**grant, **values})


REGION = {"region": 1, "generation": 77, "total": 64 * MIB}


def linked(asker: Any, fake: wire.FakeNode, **grant: Any) -> Wire:
    """Connects the asker over TCP and grants it a region."""
    connected = asker.begin("ask", "connect", fake.address)
    stream = fake.accept_tcp()
    assert connected() == ""
    found = asker.begin("ask", "find")
    question = stream.answer(wire.LOOKUP)
    answers_to(stream, question.transfer, REGION, **grant)
    assert found() == ""
    return stream


def test_done_before_the_bytes_were_taken(asker: Any) -> None:
    """The caller would take its memory back while it is still being sent."""
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        writing = asker.begin("ask", "write", 64 * MIB)
        header = wire.decode("Header", stream.receive(64))
        stream.frame(wire.DONE, transfer=header["transfer"])
        assert stream.hung_up()
        assert writing().startswith("PeerLostError")


ANSWERS: dict[str, Callable[[Wire, Any], None]] = {
    # what is done to a read of 1,000 bytes
    "done without data": lambda s, q: s.frame(wire.DONE, transfer=q.transfer),
    "less": lambda s, q: s.frame(wire.DATA, b"d" * 999, transfer=q.transfer, flags=wire.LAST),
    "more": lambda s, q: s.frame(wire.DATA, b"d" * 1001, transfer=q.transfer, flags=wire.LAST),
    "nothing": lambda s, q: s.frame(wire.DATA, transfer=q.transfer, flags=wire.LAST),
    "before it": lambda s, q: s.frame(
        wire.DATA, b"d" * 1000, transfer=q.transfer, offset=wire.U64 - 7
    ),
    "behind it": lambda s, q: s.frame(wire.DATA, b"d" * 8, transfer=q.transfer, offset=1000),
    "across its end": lambda s, q: s.frame(wire.DATA, b"d" * 8, transfer=q.transfer, offset=996),
    "twice": lambda s, q: (
        s.frame(wire.DATA, b"d" * 600, transfer=q.transfer),
        s.frame(wire.DATA, b"d" * 600, transfer=q.transfer, flags=wire.LAST),
    )[-1],
    "half of it twice": lambda s, q: (
        s.frame(wire.DATA, b"d" * 500, transfer=q.transfer),
        s.frame(wire.DATA, b"d" * 500, transfer=q.transfer, flags=wire.LAST),
    )[-1],
    "backwards": lambda s, q: (
        s.frame(wire.DATA, b"d" * 500, transfer=q.transfer, offset=500),
        s.frame(wire.DATA, b"d" * 500, transfer=q.transfer, flags=wire.LAST),
    )[-1],
    "for another": lambda s, q: s.frame(wire.DATA, b"d" * 1000, transfer=q.transfer + 1),
    "a grant": lambda s, q: answers_to(s, q.transfer, REGION),
    "no frame": lambda s, q: s.send(b"d" * 64),
}


@pytest.mark.parametrize("lie", ANSWERS.values(), ids=ANSWERS.keys())
def test_wrong_answers_to_a_read(asker: Any, lie: Callable[[Wire, Any], None]) -> None:
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        reading = asker.begin("ask", "read", 1000)
        lie(stream, stream.answer(wire.READ))
        assert stream.hung_up()
        assert "broke the protocol" in reading()


def test_one_piece_of_a_read_answered_for_two(asker: Any) -> None:
    """The bytes of both add up, and the second piece has got none."""
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        reading = asker.begin("ask", "read_pieces", [500, 500])
        first, second = stream.answer(wire.READ), stream.answer(wire.READ)
        assert (first.total, second.total) == (0, 500)
        for _ in range(2):
            stream.frame(wire.DATA, b"d" * 500, transfer=first.transfer, flags=wire.LAST)
        assert stream.hung_up()
        assert "broke the protocol" in reading()


def test_answers_to_pieces_of_a_read_in_turns(asker: Any) -> None:
    """Each piece gets its own bytes in order; pieces may be answered at the same time."""
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        reading = asker.begin("ask", "read_pieces", [500, 500])
        first, second = stream.answer(wire.READ), stream.answer(wire.READ)
        assert first.transfer == second.transfer
        for offset, flags in ((500, 0), (0, 0), (250, wire.LAST), (750, wire.LAST)):
            body = {"transfer": first.transfer, "offset": offset, "flags": flags}
            stream.frame(wire.DATA, b"d" * 250, **body)
        assert reading() == ""
    asker.lost_reason()


def test_answers_to_a_write_that_nobody_sent(asker: Any) -> None:
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        for number in range(3):
            adding = asker.begin("ask", "add")
            question = stream.answer(wire.FETCH_ADD)
            stream.frame(wire.DONE, transfer=question.transfer, value=number)
            assert adding() == ""
        stream.frame(wire.DONE, transfer=question.transfer)  # a second time
        assert stream.hung_up()
        assert "broke the protocol" in asker.lost_reason()


@pytest.mark.parametrize(
    ("status", "reason"), [(3, "StaleHandleError: the region was freed"), (7, "gave no reason")]
)
def test_a_refusal_without_a_reason(asker: Any, status: int, reason: str) -> None:
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        reading = asker.begin("ask", "read", 1000)
        question = stream.answer(wire.READ)
        stream.frame(wire.DONE, status=status, transfer=question.transfer)
        assert reason in reading()


@pytest.mark.parametrize("status", [1, 2, 5, 11, 12])
def test_an_answer_does_not_tell_what_the_asker_did(asker: Any, status: int) -> None:
    """The asker may have closed its own Node, or passed an argument of the wrong type."""
    with wire.FakeNode(SECRET) as fake, linked(asker, fake) as stream:
        writing = asker.begin("ask", "write", 1000)
        question = stream.answer(wire.WRITE)
        stream.frame(wire.DONE, b"because", status=status, transfer=question.transfer)
        assert stream.hung_up()
        reason = writing()
        assert reason.startswith("PeerLostError")
        assert "a status that is no answer" in reason


@pytest.mark.parametrize(
    "grant",
    [{"total": 0}, {"generation": 0}, {"type_": wire.DONE}],
    ids=["no bytes", "no generation", "no grant"],
)
def test_grants_that_cannot_be(asker: Any, grant: dict[str, int]) -> None:
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept_tcp() as stream:
            assert connected() == ""
            found = asker.begin("ask", "find")
            transfer = stream.answer(wire.LOOKUP).transfer
            if "type_" in grant:
                stream.frame(wire.DONE, transfer=transfer)
            else:
                answers_to(stream, transfer, REGION, **grant)
            assert stream.hung_up()
            found()
            assert "broke the protocol" in asker.lost_reason()


def test_texts_that_are_no_utf8(asker: Any) -> None:
    """Names and reasons from outside end up in messages that a program prints."""
    bad = b"\xff\xfe\x80 \xc3"
    with wire.FakeNode(SECRET, name=bad, name_bytes=len(bad)) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(fake.challenge(b""))
            assert stream.hung_up()
        assert connected().startswith("PeerLostError")
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(fake.challenge(b""))
            stream.receive(40)
            values = {"status": wire.BUSY, "message": bad, "message_bytes": len(bad)}
            stream.send(wire.encode("Welcome", **values))
        assert connected().startswith("BusyError")
    for reply in (wire.GRANT, wire.GOODBYE):
        with wire.FakeNode(SECRET) as fake:
            connected = asker.begin("ask", "connect", fake.address)
            with fake.accept_tcp() as stream:
                assert connected() == ""
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                stream.frame(reply, bad, transfer=transfer, status=wire.NOT_FOUND)
                assert found().startswith(("LookupError", "PeerLostError"))
                asker.describe()


def test_a_server_that_does_not_know_the_secret(asker: Any) -> None:
    with wire.FakeNode(b"something else entirely") as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            client_hello = stream.receive(160)
            server_hello = wire.hello(SECRET, kind=wire.CHALLENGE)
            stream.send(server_hello)
            stream.receive(40)
            keys = wire.Keys.derive(fake.secret, client_hello, server_hello)
            stream.send(wire.encode("Welcome", proof=keys.server))
            assert stream.hung_up()
        assert connected().startswith("PermissionError")


def test_a_server_that_reflects(asker: Any) -> None:
    """The server sends the client's own hello, and the client's own proof, back."""
    with wire.FakeNode(SECRET) as fake:
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.send(stream.receive(160))
            assert stream.hung_up()
        assert connected().startswith("PeerLostError")
        connected = asker.begin("ask", "connect", fake.address)
        with fake.accept() as stream:
            stream.receive(160)
            stream.send(wire.hello(SECRET, kind=wire.CHALLENGE))
            proof = stream.receive(40)[:32]
            stream.send(wire.encode("Welcome", proof=proof))
            assert stream.hung_up()
        assert connected().startswith("PermissionError")


# ---- on this host


SHM = {"transports": wire.SHM_BIT, "host": wire.host_id()}


def attached(asker: Any, fake: wire.FakeNode, page: int, bell: int) -> tuple[Wire, str]:
    connected = asker.begin("ask", "connect", fake.address)
    stream = fake.accept_shm()
    stream.next_frame()  # the client's page and doorbell
    stream.attach(page, bell, incarnation=fake.incarnation)
    return stream, connected()


@pytest.mark.parametrize("lie", ["unsealed", "too small", "pipe", "null", "missing"])
def test_grants_of_memory_that_is_none(asker: Any, lie: str) -> None:
    null, pipe = os.open("/dev/null", os.O_RDWR), os.pipe()
    try:
        with (
            wire.FakeNode(SECRET, **SHM) as fake,
            wire.page(fake.incarnation, [0, 77]) as page,
            wire.doorbell() as bell,
            wire.memory(1 << 20, seals=0) as unsealed,
            wire.memory(4096) as small,
        ):
            stream, error = attached(asker, fake, page, bell)
            assert error == ""
            memory = {"unsealed": unsealed, "too small": small, "pipe": pipe[0], "null": null}
            with stream:
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                fds = [memory[lie]] if lie in memory else []
                stream.frame(
                    wire.GRANT, fds=fds, transfer=transfer, flags=6, region=1, generation=77,
                    total=1 << 20,
                )  # fmt: skip
                assert stream.hung_up()
                assert found()
    finally:
        for descriptor in (null, *pipe):
            os.close(descriptor)


def test_a_second_grant_cannot_widen_the_first(asker: Any) -> None:
    """The same generation, first to read, then to write: the mapping of the first is read-only."""
    with (
        wire.FakeNode(SECRET, **SHM) as fake,
        wire.page(fake.incarnation, [0, 77]) as page,
        wire.doorbell() as bell,
        wire.memory(4096) as memory,
    ):
        stream, error = attached(asker, fake, page, bell)
        assert error == ""
        with stream:
            for flags in (wire.READABLE, wire.READABLE | wire.WRITABLE):
                found = asker.begin("ask", "find")
                transfer = stream.answer(wire.LOOKUP).transfer
                values = {"flags": flags, "region": 1, "generation": 77, "total": 4096}
                stream.frame(wire.GRANT, fds=[memory], transfer=transfer, **values)
                assert found() == ""
            assert asker.ask("write", 4096) == ""
        assert os.pread(memory, 4096, 0) == bytes([7]) * 4096


def test_a_server_that_never_attaches(asker: Any) -> None:
    """The server answers questions all the same; they can be asked only once the page is there."""
    with wire.FakeNode(SECRET, **SHM) as fake:
        connected = asker.begin("ask", "connect", fake.address, 0.5)
        with fake.accept_shm() as stream:
            assert stream.hung_up()
        assert connected().startswith("TimeoutError")


def test_a_pipe_is_no_doorbell(asker: Any) -> None:
    """A process that shares a pipe can hold its lock, and so hold up its writers."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        with wire.FakeNode(SECRET, **SHM) as fake, wire.page(fake.incarnation, armed=1) as page:
            stream, error = attached(asker, fake, page, writer)
            with stream:
                assert "broke the protocol" in error
    finally:
        for descriptor in (reader, writer):
            os.close(descriptor)


@pytest.mark.parametrize("content", [0, 0xFFFFFFFFFFFFFFFE], ids=["empty", "full"])
def test_a_doorbell_that_blocks_holds_up_nobody(asker: Any, content: int) -> None:
    """An empty one blocks its reader; a full one blocks its writer."""
    with (
        wire.FakeNode(SECRET, **SHM) as fake,
        wire.page(fake.incarnation, [0, 77], armed=1) as page,
        wire.memory(4096) as memory,
        wire.doorbell() as bell,
    ):
        os.eventfd_write(bell, content)
        os.set_blocking(bell, True)
        stream, error = attached(asker, fake, page, bell)
        assert error == ""
        with stream:
            found = asker.begin("ask", "find")
            transfer = stream.answer(wire.LOOKUP).transfer
            values = {"flags": 6, "region": 1, "generation": 77, "total": 4096}
            stream.frame(wire.GRANT, fds=[memory], transfer=transfer, **values)
            assert found() == ""
            for _ in range(3):
                assert asker.ask("signal") == ""
            assert os.eventfd_read(bell) == min(content + 3, 0xFFFFFFFFFFFFFFFF)
