"""A process is killed and another one goes on as its Node: what peers had stays good."""

import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from actor import PATIENCE_S, eventually
from successor import own, succeed

from tensorwire import ClosedError, Node, Peer, PeerLostError, StaleHandleError, UnavailableError
from tensorwire.testing import PeerGroup, warm_up

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


class Holder:
    """Holds the descriptors of a server, like the launcher of its successors."""

    def __init__(self, group: PeerGroup, path: str) -> None:
        self._group, self._path = group, path
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            self._member = group.start(own, path)
            with door.accept()[0] as passing:
                _, self._held, _, _ = socket.recv_fds(passing, 16, 16)
        self.address, self.handles = self._member.recv()
        os.unlink(path)

    def kill(self, peer: Peer) -> None:
        """Kills the server and waits until its peer has noticed."""
        self._member.kill()
        eventually(lambda: peer.lost, "the loss")

    def start(self, node: Node) -> Peer:
        """Starts a successor, connects to it and waits until all is restored."""
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(self._path)
            door.listen()
            self._member = self._group.start(succeed, self.handles, self._path)
            with door.accept()[0] as passing:
                socket.send_fds(passing, [b"all"], self._held)
        os.unlink(self._path)
        peer = node.connect(self.address, timeout_s=PATIENCE_S)
        peer.wait_region("ready", PATIENCE_S)
        assert self._member.recv()[0] == self.address
        return peer

    def seen(self, offset: int, value: int) -> bytes:
        """The first bytes that the server sees after a word."""
        self._member.send((offset, value))
        data: bytes = self._member.recv()
        return data

    def close(self) -> None:
        """Gives the descriptors back."""
        for descriptor in self._held:
            os.close(descriptor)


def test_objects_of_a_killed_process_go_on(tmp_path: Path) -> None:
    """Twice: every object from before writes, reads, signals, adds and waits."""
    warm_up("shm")
    with PeerGroup() as group, Node("worker", transports=["shm", "tcp"]) as node:
        holder = Holder(group, str(tmp_path / "s"))
        peer = node.connect(holder.address)
        data, words = peer.region("data"), peer.region("words")
        word = words.word(8)
        prepared = peer.prepare_write([np.full(8, 7, np.uint8)], [data[:8]])
        view = data.array()
        where = view.ctypes.data
        data[100:].write(b"kept").wait(PATIENCE_S)
        assert words.word(0).fetch_add(1, PATIENCE_S) == 0
        slow_word = node.allocate(8).word(0)
        for life in (1, 2):
            old_pid = peer.pid
            with pytest.raises(ValueError, match="not lost"):
                peer.succeed(peer)
            holder.kill(peer)
            with pytest.raises(PeerLostError):
                data.write(b"x").wait(PATIENCE_S)
            again = holder.start(node)
            assert again != peer
            peer.succeed(again)
            with pytest.raises(ValueError, match="not lost"):
                peer.succeed(again)
            assert not peer.lost
            assert peer.lost_reason == ""
            assert peer.pid == again.pid != old_pid
            assert peer.path == again.path
            # The memory is the same, and so is where it is mapped.
            assert bytes(view[100:104]) == b"kept"
            for one in (peer, again):
                assert one.region("data").array().ctypes.data == where
            assert peer.region(holder.handles[1]).size_bytes == data.size_bytes
            assert words.word(0).fetch_add(1, PATIENCE_S) == life
            prepared.start(signal=(word, 10 * life)).wait(PATIENCE_S)
            assert holder.seen(8, 10 * life) == bytes([7] * 8)
            value = np.array([life], np.uint64)
            data.write(value, signal=(again.region("words").word(16), life)).wait(PATIENCE_S)
            assert holder.seen(16, life) == value.tobytes()
            back = np.zeros(1, np.uint64)
            peer.read([back], [again.region("data")[:8]]).wait(PATIENCE_S)
            assert back[0] == life
            peer.signal(word, 10 * life + 1).wait(PATIENCE_S)
            word.set(10 * life + 2, [data[200:].write(b"after")]).wait(PATIENCE_S)
            holder.seen(8, 10 * life + 2)
            with pytest.raises(TimeoutError):
                slow_word.wait_until(1, 0.01, peer=peer)
        holder.kill(peer)
        with pytest.raises(PeerLostError):
            slow_word.wait_until(1, PATIENCE_S, peer=peer)
        holder.close()
        del view, back


def test_writers_of_other_threads(tmp_path: Path) -> None:
    """While one thread hands over to successors, others write, look up and wait."""
    warm_up("shm")
    with PeerGroup() as group, Node("worker") as node:
        holder = Holder(group, str(tmp_path / "s"))
        peer = node.connect(holder.address)
        data = peer.region("data")
        stop = threading.Event()
        counts, wrong = [0, 0], list[BaseException]()

        def work(slot: int) -> None:
            local = np.full(64, slot, np.uint8)
            while not stop.is_set():
                try:
                    data[64 * slot :].write(local).wait(PATIENCE_S)
                    if slot:
                        peer.region("data", PATIENCE_S)
                    counts[slot] += 1
                except PeerLostError:
                    stop.wait(0.001)
                except BaseException as error:
                    wrong.append(error)
                    return

        threads = [threading.Thread(target=work, args=[slot]) for slot in (0, 1)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            holder.kill(peer)
            again = holder.start(node)
            peer.succeed(again)
            before = list(counts)
            eventually(
                lambda before=before: wrong or all(map(int.__gt__, counts, before)), "writes go on"
            )
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        holder.kill(peer)
        holder.close()


def test_what_is_no_successor(transport: str) -> None:
    """Each mistake is told, and the peer stays what it was."""
    with (
        Node("a", transports=[transport]) as first,
        Node("b", transports=[transport]) as second,
        Node("a", transports=[transport]) as same_name,
    ):
        peer, other = second.connect(first.address), second.connect(same_name.address)
        remote = second.connect(first.address)
        elsewhere = first.connect(same_name.address)
        with pytest.raises(TypeError, match="by a Peer"):
            peer.succeed(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="another Node of this process"):
            peer.succeed(elsewhere)
        if transport == "tcp":
            peer.close()
            with pytest.raises(UnavailableError, match="only over shared memory"):
                peer.succeed(remote)
            return
        with pytest.raises(ValueError, match="is not lost"):
            peer.succeed(remote)
        peer.close()
        with pytest.raises(ValueError, match="not the same Node"):
            peer.succeed(other)
        with pytest.raises(ValueError, match="its own successor"):
            peer.succeed(peer)
        with pytest.raises(ClosedError):
            peer.region("nothing")
        peer.succeed(remote)
        assert not peer.lost
        with pytest.raises(LookupError):
            peer.region("nothing")
        region = first.allocate(64, name="r")
        mine = peer.region("r")
        peer.close()
        assert remote.lost
        with pytest.raises(ValueError, match="its own successor"):
            remote.succeed(peer)
        peer.succeed(second.connect(first.address))
        remote.succeed(peer)
        mine.write(b"through").wait(PATIENCE_S)
        assert bytes(region.array()[:7]) == b"through"
        assert peer.allocate(64).size_bytes == 64
        region.free()
        with pytest.raises(StaleHandleError):
            mine.write(b"x").wait(PATIENCE_S)
        second.close()
        with pytest.raises(ClosedError):
            peer.succeed(remote)
