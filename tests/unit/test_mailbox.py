"""Mailboxes: messages are whole, the latest ones stay, and waiting threads learn of a loss."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tensorwire.errors import PeerLostError, TimeoutError
from tensorwire.memory import Mailbox, Node, Peer, RemoteMailbox, mailbox_bytes

SIZE = 1000


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Peer, Peer]]:
    with Node("here") as here, Node("there") as there:
        peer = there.connect(here.address, require=request.param)
        yield here, here.accept(5), peer


def message(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(SIZE, number % 251, np.uint8)


def test_messages_are_sent_and_awaited(pair: tuple[Node, Peer, Peer]) -> None:
    here, sender, peer = pair
    inbox = Mailbox(here.allocate(mailbox_bytes(SIZE), name="inbox", access="w"))
    outbox = RemoteMailbox(peer.region("inbox"))
    assert inbox.count == 0
    with pytest.raises(TimeoutError):
        inbox.wait(1, 0.01, peer=sender)
    outbox.send(message(1), 1).wait(5)
    assert (inbox.wait(1, 5) == message(1)).all()
    outbox.send(b"short", 7).wait(5)
    found = inbox.wait(3, 5)
    assert (inbox.count, found[:5].tobytes()) == (7, b"short")
    with pytest.raises(ValueError, match="1001"):
        outbox.send(np.zeros(SIZE + 1, np.uint8), 8)
    peer.close()
    with pytest.raises(PeerLostError):
        inbox.wait(8, 5, peer=sender)


def test_the_word_waits_for_other_transfers(pair: tuple[Node, Peer, Peer]) -> None:
    here, _, peer = pair
    inbox = Mailbox(here.allocate(mailbox_bytes(SIZE), name="inbox", access="w"))
    data = here.allocate(8 << 20, name="data")
    outbox = RemoteMailbox(peer.region("inbox"))
    large = np.full(8 << 20, 3, np.uint8)
    for number in range(1, 20):
        data.array()[:] = 0
        outbox.send(message(number), number, [peer.write(large, peer.region("data"))])
        assert (inbox.wait(number, 5) == message(number)).all()
        assert data.array().all()


def test_the_latest_messages_stay(pair: tuple[Node, Peer, Peer]) -> None:
    here, _, peer = pair
    inbox = Mailbox(here.allocate(mailbox_bytes(SIZE, 3), name="inbox", access="w"), 3)
    outbox = RemoteMailbox(peer.region("inbox"), 3)
    for number in range(1, 11):
        outbox.send(message(number), number).wait(5)
    inbox.wait(10, 5)
    assert [int(inbox.message(number)[0]) for number in (8, 9, 10)] == [8, 9, 10]


def test_readers_see_whole_messages(pair: tuple[Node, Peer, Peer]) -> None:
    here, _, peer = pair
    region = here.allocate(mailbox_bytes(SIZE, 2), name="board", access="r")
    board, reader = Mailbox(region, 2), RemoteMailbox(peer.region("board"), 2)
    assert reader.latest(time.monotonic() + 5)[0] == 0
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            board.post(message(number))
            time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        last = 0
        while last < 50:
            number, data = reader.latest(time.monotonic() + 5)
            assert number >= last
            assert number == 0 or (data == message(number)).all()
            last = number
    finally:
        over.set()
        writer.join()
    with pytest.raises(TimeoutError, match="faster than they could be read"):
        reader.latest(time.monotonic())
