"""The memory API with Nodes of one process: settings, views, and bad use with advice."""

import asyncio
import contextlib
import gc
import os
import pickle
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorwire as tw
from tensorwire import BusyError, ClosedError, Node, Peer
from tensorwire.testing import FaultPlan, Pair, assert_no_leak, inject, node_pair

SECRET = b"0123456789abcdef"


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with node_pair([request.param]) as pair:
        yield pair


@pytest.fixture
def node() -> Iterator[Node]:
    with Node("alone") as node:
        yield node


class TestNode:
    """Settings, and the life of a Node."""

    def test_defaults(self) -> None:
        with assert_no_leak(), Node() as node:
            assert node.name == f"{os.uname().nodename}-{os.getpid()}"
            assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d*", node.address)
            assert node.incarnation > 0
            assert node.peers == []
            assert not node.closed
            del node

    @pytest.mark.parametrize(
        "given",
        [
            {"quota_bytes": 1.5},
            {"quota_bytes": -1},
            {"max_peers": "many"},
            {"max_peers": 0},
            {"handshake_timeout_s": "10"},
            {"handshake_timeout_s": None},
            {"handshake_timeout_s": float("nan")},
            {"handshake_timeout_s": 0},
            {"peer_timeout_s": "10"},
            {"rdma_device": 5},
        ],
    )
    def test_numbers_are_checked_by_their_names(self, given: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(given))} is "):
            Node(**given)

    @pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "2.9", "86401", "inf"])
    def test_the_timeout_of_peers_is_checked(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TENSORWIRE_PEER_TIMEOUT", text)
        range_text = "not a number of seconds from 3 to 86400"
        with pytest.raises(ValueError, match=f"^TENSORWIRE_PEER_TIMEOUT is {text}, {range_text}"):
            Node()
        Node(peer_timeout_s=3).close()
        with pytest.raises(ValueError, match=f"^peer_timeout_s is -5, {range_text}"):
            Node(peer_timeout_s=-5)

    def test_close_is_final_and_repeatable(self) -> None:
        node = Node()
        node.close()
        node.close()
        assert node.closed
        assert "closed" in repr(node)
        with pytest.raises(tw.ClosedError, match="closed"):
            node.allocate(8)
        with node:
            pass

    def test_incarnations_differ(self) -> None:
        with Node("a") as first, Node("a") as second:
            assert first.incarnation != second.incarnation

    def test_ipv6(self) -> None:
        with Node(listen="[::1]:0") as node, Node() as other:
            assert node.address.startswith("[::1]:")
            region = node.allocate(8)
            remote = other.connect(region.handle()).region(region.handle())
            remote.write(b"ipv6").wait(10)
            assert region.memoryview()[:4] == b"ipv6"

    def test_a_port_is_taken(self, node: Node) -> None:
        with pytest.raises(tw.UnavailableError, match=node.address):
            Node(listen=node.address)

    @pytest.mark.parametrize(
        ("options", "error", "advice"),
        [
            ({"listen": "nonsense"}, ValueError, "host:port"),
            ({"listen": "0.0.0.0:0"}, ValueError, "TENSORWIRE_SECRET_FILE"),
            ({"listen": "[::]:0"}, ValueError, "loopback"),
            ({"listen": "no-such-host.invalid:0"}, ValueError, "no-such-host.invalid"),
            ({"secret": b"short"}, ValueError, "16"),
            ({"secret": "text" * 8}, TypeError, "bytes"),
            ({"transports": ["ipx"]}, ValueError, "known are shm, rdma, tcp"),
            ({"transports": []}, ValueError, "one at least"),
            ({"transports": ["shm", "shm"]}, ValueError, "at most once"),
            ({"transports": "shm"}, TypeError, r"\['shm'\]"),
            ({"transports": ["rdma"]}, tw.UnavailableError, "rdma"),
            ({"name": "x" * 2000}, ValueError, "name"),
        ],
    )
    def test_bad_settings(self, options: Any, error: type[Exception], advice: str) -> None:
        with assert_no_leak(), pytest.raises(error, match=advice):
            Node(**options)

    def test_settings_from_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "tcp")
        monkeypatch.setenv("TENSORWIRE_SECRET", "the secret of another job")
        file = tmp_path / "secret"
        file.write_bytes(SECRET + b"\n")
        monkeypatch.setenv("TENSORWIRE_SECRET_FILE", str(file))
        with Node() as node, Node(secret=SECRET) as same:
            assert same.connect(node.address).path.transport == "tcp"
        file.write_bytes(b"short\n")
        with pytest.raises(ValueError, match=str(file)):
            Node()
        file.unlink()
        with pytest.raises(ValueError, match=f"{file}.*No such file"):
            Node()
        monkeypatch.delenv("TENSORWIRE_SECRET_FILE")
        with Node(listen="0.0.0.0:0") as open_to_all:
            assert not open_to_all.closed
        monkeypatch.setenv("TENSORWIRE_TRANSPORTS", "shm,pigeon")
        with pytest.raises(ValueError, match="pigeon"):
            Node()

    def test_wrong_secret(self) -> None:
        with Node(secret=SECRET) as node:
            for other in (None, SECRET[::-1]):
                with Node(secret=other) as stranger:
                    with pytest.raises(PermissionError, match="secret"):
                        stranger.connect(node.address)
                    assert stranger.peers == node.peers == []
            with Node(secret=SECRET) as friend:
                assert friend.connect(node.address).name == node.name

    @pytest.mark.parametrize(
        ("address", "error", "advice"),
        [
            ("127.0.0.1:1", tw.PeerLostError, r"127\.0\.0\.1:1.*is the Node running"),
            ("no-such-host.invalid:5", tw.PeerLostError, r"no-such-host\.invalid"),
            ("127.0.0.1:0", ValueError, "port 0"),
            ("127.0.0.1", ValueError, "host:port"),
            (7000, TypeError, "str"),
        ],
    )
    def test_unreachable(
        self, node: Node, address: Any, error: type[Exception], advice: str
    ) -> None:
        with pytest.raises(error, match=advice):
            node.connect(address)

    def test_somebody_who_does_not_answer(self, node: Node) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(tw.TimeoutError, match=address):
                node.connect(address, timeout_s=0.05)

    def test_no_common_transport(self) -> None:
        with Node(transports=["shm"]) as shm, Node(transports=["tcp"]) as tcp:
            with pytest.raises(tw.UnavailableError, match="shm"):
                shm.connect(tcp.address)
            with pytest.raises(tw.UnavailableError, match="tcp"):
                shm.connect(tcp.address, require="tcp")
            with pytest.raises(ValueError, match="carrier"):
                shm.connect(tcp.address, require="carrier")
            with pytest.raises(tw.UnavailableError, match="rdma"):
                shm.connect(tcp.address, require="rdma")

    def test_fallback_is_told(self) -> None:
        with Node() as both, Node(transports=["tcp"]) as tcp, Node() as third:
            path = both.connect(tcp.address).path
            assert (path.transport, path.copies) == ("tcp", 2)
            assert "shm" in path.reason
            assert tcp.address in path.wire
            assert both.connect(third.address).path.transport == "shm"
            assert both.connect(third.address, require="tcp").path.transport == "tcp"

    @pytest.mark.parametrize("transports", [["shm"], ["tcp"]])
    def test_memory_comes_zeroed_and_on_a_page(self, transports: list[str]) -> None:
        with Node(transports=transports) as node:
            memory = node.allocate(5000).array()
            assert memory.ctypes.data % 4096 == 0
            assert not memory.any()

    def test_a_region_that_was_awaited_is_not_kept(self) -> None:
        """Neither one that was found is kept, nor one that came after the wait was over."""

        def mapped() -> int:
            return Path("/proc/self/maps").read_text().count("memfd:tensorwire")

        with Node("a") as owner, Node("b") as user:
            peer = user.connect(owner.address)
            before = mapped()
            with pytest.raises(tw.TimeoutError):
                peer.wait_region("late", 0.01)
            late = owner.allocate(4096, name="late")
            there = owner.allocate(4096, name="there")
            assert peer.wait_region("there").size_bytes == 4096
            late.free()
            there.free()
            del late, there
            deadline = time.monotonic() + 10
            while mapped() > before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert mapped() == before

    def test_a_lost_question_is_asked_again(self) -> None:
        with Node("a") as owner, Node("b") as user:
            peer = user.connect(owner.address)
            inject(peer, FaultPlan(1, "drop"))
            with pytest.raises(tw.TimeoutError):
                peer.wait_region("x", 0.05)
            inject(peer, None)
            owner.allocate(8, name="x")
            assert peer.wait_region("x", 10).size_bytes == 8

    def test_accept(self, node: Node) -> None:
        with pytest.raises(tw.TimeoutError, match="connected"):
            node.accept(0.01)
        with Node("caller") as caller, Node("second") as second:
            caller.connect(node.address)
            peer = node.accept(10)
            assert peer.name == "caller"
            assert node.peers == [peer]
            for each in (second, caller):
                each.connect(node.address)
            assert [node.accept(10).name for _ in range(2)] == ["second", "caller"]
            with pytest.raises(tw.TimeoutError):
                node.accept(0)
            assert hash(node.peers[0]) == hash(peer)
            assert peer != "caller"

    def test_too_many_peers(self) -> None:
        with Node(max_peers=1) as node, Node() as first, Node() as second:
            first.connect(node.address)
            with pytest.raises(tw.BusyError, match="max_peers"):
                second.connect(node.address)

    def test_no_more_peers(self) -> None:
        with Node() as node, Node() as first, Node() as second:
            peer = first.connect(node.address)
            accepted = node.accept(5)
            node.stop_listening()
            node.stop_listening()
            with pytest.raises(tw.PeerLostError, match="refused"):
                second.connect(node.address, timeout_s=1)
            with pytest.raises(ClosedError):
                node.listener()
            Node(listen=node.address).close()  # no descriptor of the socket is left
            first.allocate(8, name="here")
            accepted.wait_region("here", timeout_s=5)
            assert not peer.lost
        with pytest.raises(ClosedError):
            node.stop_listening()

    def test_forgotten(self) -> None:
        with assert_no_leak(), pytest.warns(ResourceWarning, match="'lost' was never closed"):
            Node("lost")  # its last reference ends here

    def test_kept_by_its_parts(self) -> None:
        with warnings.catch_warnings(), assert_no_leak():
            warnings.simplefilter("ignore", ResourceWarning)
            region = Node().allocate(8)
            gc.collect()
            assert not region.freed
            assert not region._node.core.closed
            del region

    def test_stats_count(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        remote.write(bytes(100)).wait(10)
        stats = pair.near.stats()
        assert stats["bytes_written"] == 100
        assert stats["transfers_started"] == stats["transfers_completed"] > 0

    def test_fork(self, node: Node) -> None:
        """In a forked child the Node is dead, its memory is safe, and the parent goes on."""
        region = node.allocate(8)
        with Node("other") as other:
            remote = other.connect(node.address).region(region.handle())
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = _check_forked_child(node, region, remote)
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            remote.write(b"parent").wait(10)
            assert region.memoryview()[:6] == b"parent"


def _check_forked_child(node: Node, region: tw.Region, remote: tw.RemoteRegion) -> int:
    for number, call in enumerate(
        (
            lambda: node.allocate(8),
            lambda: node.connect(node.address),
            lambda: node.accept(0),
            lambda: remote.write(b"child"),
            lambda: remote.read(bytearray(1)),
            lambda: remote.word(0).set(1),
            lambda: remote.peer.region("x"),
            lambda: region.word(0).wait_until(1, 0),
        ),
        start=10,
    ):
        try:
            call()
        except tw.ClosedError as error:
            if "fork" in str(error):
                continue
        return number
    if not node.closed:
        return 2
    node.close()
    with Node("child") as mine, Node("grandchild") as other:
        handle = mine.allocate(8).handle()
        other.connect(mine.address).region(handle).write(b"new life").wait(10)
    return 0


class TestRegion:
    """Local memory and views of it."""

    @pytest.mark.parametrize(
        ("size", "error"),
        [
            (0, ValueError),
            (-1, ValueError),
            (1 << 63, ValueError),
            (1.5, TypeError),
            ("8", TypeError),
            (1 << 60, MemoryError),
        ],
    )
    def test_sizes(self, node: Node, size: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"bytes|memory"):
            node.allocate(size)

    @pytest.mark.parametrize("access", ["rw", "r", "w", "none"])
    def test_access(self, node: Node, access: str) -> None:
        region = node.allocate(np.int64(100), access=access)
        assert region.access == region.handle().access == access
        region.array()[:] = 7  # the owner always may
        assert bytes(region.memoryview()) == bytes([7] * 100)

    def test_bad_access(self, node: Node) -> None:
        with pytest.raises(ValueError, match="'rw', 'r', 'w' and 'none'"):
            node.allocate(8, access="x")

    def test_names(self, node: Node) -> None:
        with node.allocate(8, name="a") as region:
            assert node.region("a").handle() == region.handle()
            with pytest.raises(ValueError, match="'a'"):
                node.allocate(8, name="a")
        assert region.freed
        assert "freed" in repr(region)
        with pytest.raises(LookupError, match="'a'"):
            node.region("a")
        with pytest.raises(ValueError, match="255"):
            node.allocate(8, name="x" * 256)

    def test_slices_share(self, node: Node) -> None:
        region = node.allocate(100)
        region[10:30][5:].array()[:] = 1
        region[10:30][:5].memoryview()[:] = b"22222"
        assert region.array().sum() == 15 + 5 * ord("2")
        assert region[:].size_bytes == 100
        assert region[100:].size_bytes == 0
        assert region[7:7].array("float64").shape == (0,)

    @pytest.mark.parametrize(
        ("piece", "error"),
        [
            (slice(-1, None), ValueError),
            (slice(0, -1), ValueError),
            (slice(0, 101), ValueError),
            (slice(50, 40), ValueError),
            (slice(0, 10, 2), ValueError),
            (slice(None, None, -1), ValueError),
            (slice(0.0, 5), TypeError),
            (5, TypeError),
            (..., TypeError),
            ((slice(0, 1), slice(0, 1)), TypeError),
        ],
    )
    def test_bad_slices(self, node: Node, piece: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"slice|outside"):
            node.allocate(100)[piece]

    def test_arrays(self, node: Node) -> None:
        region = node.allocate(96)
        whole = region.array("float32", (2, 3, 4))
        whole[:] = np.arange(24).reshape(2, 3, 4)
        assert region.array(np.float32).tolist() == list(range(24))
        assert region[4:].array("f4", 3).tolist() == [1, 2, 3]
        assert region.array("f4", []).item() == 0
        assert region[1:].array("<i8", 1).shape == (1,)  # need not be aligned
        structured = region.array("u1,u4", 2)
        structured["f1"] = 5
        assert region.array("u1,u4", 2)["f1"].tolist() == [5, 5]

    @pytest.mark.parametrize(
        ("dtype", "shape", "error", "advice"),
        [
            ("float64", None, ValueError, "no multiple"),
            ("float32", (5, 6), ValueError, "needs 120 bytes"),
            ("float32", (-1,), ValueError, "negative"),
            ("float32", "x", TypeError, "integer"),
            ("float32", 1.5, TypeError, "integer"),
            (object, 1, TypeError, "Python objects"),
            ("no such", 1, TypeError, "no such"),
        ],
    )
    def test_bad_arrays(
        self, node: Node, dtype: Any, shape: Any, error: type[Exception], advice: str
    ) -> None:
        with pytest.raises(error, match=advice):
            node.allocate(100).array(dtype, shape)

    def test_dlpack(self, node: Node) -> None:
        region = node.allocate(16)
        view = np.from_dlpack(region[8:])
        region.array()[8:] = 3
        assert view.tolist() == [3] * 8

    def test_views_keep_the_memory(self) -> None:
        with assert_no_leak():
            with Node() as node:
                region = node.allocate(1 << 20)
                views = [region.array(), np.from_dlpack(region), np.asarray(region.memoryview())]
                region.free()
                region.free()
                del region, node
            gc.collect()
            views[0][:] = 5
            assert all(int(view.sum()) == 5 << 20 for view in views)
            del views

    def test_adopt(self, node: Node) -> None:
        source = np.arange(12.0).reshape(3, 4)
        region = node.adopt(source, name="matrix", access="r")
        assert (region.size_bytes, region.access) == (96, "r")
        assert region.array("f8", (3, 4)).tolist() == source.tolist()
        view = region.adopt(source.T[:2, :2], offset=8)  # copied in, so any strides will do
        assert view.tolist() == [[0, 4], [1, 5]]
        assert np.shares_memory(view, region.array())
        assert view.flags.writeable

    @pytest.mark.parametrize(
        ("source", "offset", "error", "advice"),
        [
            (np.zeros(13), 0, ValueError, "does not fit"),
            (np.zeros(12), 8, ValueError, "does not fit"),
            (np.zeros(1), -8, ValueError, "does not fit"),
            (np.zeros(1), 4, ValueError, "item size 8"),
            (np.array([None]), 0, TypeError, "Python objects"),
            ([1, 2], 0, TypeError, "numpy array or a torch tensor"),
        ],
    )
    def test_bad_adopt(
        self, node: Node, source: Any, offset: int, error: type[Exception], advice: str
    ) -> None:
        with pytest.raises(error, match=advice):
            node.allocate(96).adopt(source, offset)

    def test_adopt_nothing(self, node: Node) -> None:
        with pytest.raises(ValueError, match="bytes"):
            node.adopt(np.zeros(0))
        with pytest.raises(TypeError, match="list"):
            node.adopt([1.0])

    def test_slices_are_not_regions(self, node: Node) -> None:
        piece = node.allocate(100)[10:20]
        for method in (piece.handle, piece.free):
            with pytest.raises(ValueError, match="slice of 100 bytes"):
                method()

    @pytest.mark.parametrize(
        ("offset", "error"),
        [
            (4, ValueError),
            (-8, ValueError),
            (96, ValueError),
            (1 << 70, ValueError),
            ("0", TypeError),
            (0.0, TypeError),
        ],
    )
    def test_bad_words(self, node: Node, offset: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"word|integer"):
            node.allocate(100).word(offset)

    def test_words_of_slices(self, node: Node) -> None:
        region = node.allocate(100)
        region.array("u8", 12)[2] = 77
        assert region[16:].word(0).value == region[10:].word(6).value == 77
        with pytest.raises(ValueError, match="multiple of 8"):
            region[10:].word(8)
        assert "77" in repr(region.word(16))

    def test_handle(self, node: Node) -> None:
        handle = node.allocate(100, name="n", access="r").handle()
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert (handle.address, handle.incarnation) == (node.address, node.incarnation)
        assert (handle.size_bytes, handle.name, handle.node) == (100, "n", "alone")

    def test_tensor_without_torch(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
        with pytest.raises(tw.UnavailableError, match="import torch"):
            node.allocate(8).tensor()

    def test_pages_are_given_back_and_come_again(self, pair: Pair) -> None:
        with assert_no_leak():
            region = pair.far.allocate(1 << 20, name="pages", access="rw")
            remote = pair.to_far.region("pages")
            remote.write(np.full(1 << 20, 7, np.uint8)).wait()
            assert region.array().min() == 7
            region.discard()
            assert not region.array().any()
            remote[100:200].write(np.full(100, 9, np.uint8)).wait()
            assert region.array().sum() == 900
            with pytest.raises(ValueError, match="slice"):
                region[:64].discard()
            region.free()
            del region, remote


class TestTransfers:
    """Transfers that are refused, before and after they are under way."""

    def test_waiting(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        transfer = remote.write(b"x" * 10)
        transfer.wait()
        transfer.wait(0)
        transfer.wait(timeout_s=1)
        assert transfer.done()
        assert (transfer.code, transfer.bytes) == (0, 10)
        tw.wait_all([])
        tw.wait_all([transfer, remote.write(b"y")], timeout_s=10)

    @pytest.mark.parametrize(
        ("local", "error", "advice"),
        [
            (np.zeros((4, 4))[:, 1], ValueError, "contiguous"),
            (np.zeros((3, 4)).T, ValueError, "contiguous"),
            (np.array([None, "x"]), TypeError, "objects"),
            (memoryview(bytes(10))[::2], ValueError, "contiguous"),
            (np.zeros(101, np.uint8), ValueError, "101"),
            ("text", TypeError, "str"),
            (None, TypeError, "NoneType"),
            ([b"x"], TypeError, "list"),
        ],
    )
    def test_bad_locals(self, pair: Pair, local: Any, error: type[Exception], advice: str) -> None:
        region = pair.far.allocate(100)
        remote = pair.to_far.region(region.handle())
        for call in (remote.write, remote.read, lambda local: pair.to_far.write(local, remote)):
            with pytest.raises(error, match=advice):
                call(local)
        for batch in (pair.to_far.write, pair.to_far.read, pair.to_far.prepare_write):
            with pytest.raises(error, match=advice):
                batch([bytearray(1), local], [remote, remote])
        assert not region.array().any()

    @pytest.mark.parametrize("local", [b"12345", np.frombuffer(b"12345", np.uint8)])
    def test_read_only_destination(self, pair: Pair, local: Any) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        for call in (
            lambda: remote.read(local),
            lambda: pair.to_far.read([local], [remote]),
            lambda: pair.to_far.prepare_read([local], [remote]),
        ):
            with pytest.raises(ValueError, match="read-only"):
                call()

    def test_arrays_at_places_of_a_slice(self, pair: Pair) -> None:
        region = pair.far.allocate(400)
        remote = pair.to_far.region(region.handle())[8:200]
        word, sent = pair.to_far.region(region.handle()).word(392), np.arange(6, dtype="float32")
        local = [sent, sent[:2].reshape(2, 1), sent[:0], np.array([9], np.uint8)]
        remote.write_at(local, [0, 100, 192, 191], signal=(word, 3)).wait()
        assert (region[8:32].array("float32") == sent).all()
        assert (region[108:116].array("float32") == sent[:2]).all()
        assert region.array()[199] == 9
        assert region.word(392).value == 3
        assert not region.array()[116:199].any()

    def test_arrays_at_no_places_of_a_slice(self, pair: Pair) -> None:
        region = pair.far.allocate(400)
        remote = pair.to_far.region(region.handle())[8:200]
        array = np.ones(8, np.uint8)
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            ([array], [], ValueError, "not 0 offsets for 1 arrays"),
            ([array, bytes(8)], [0, 8], TypeError, "not bytes"),
            ([array], [-1], ValueError, "8 bytes do not fit at offset -1"),
            ([array, array], [0, 185], ValueError, "8 bytes do not fit at offset 185"),
            ([array], ["0"], TypeError, "<="),
            ([array, np.ones((4, 4))[:, 0]], [0, 8], ValueError, "contiguous"),
            ([np.array([None])], [0], TypeError, "object"),
        ]
        for local, offsets, error, advice in bad:
            with pytest.raises(error, match=advice):
                remote.write_at(local, offsets)
        with pytest.raises(TypeError, match="RemoteWord, value"):
            remote.write_at([array], [0], signal=5)  # type: ignore[arg-type]
        assert not region.array().any()

    def test_batches_that_do_not_match(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            ([b"a", b"b"], [remote], ValueError, "2 and 1"),
            (b"ab", [remote, remote], TypeError, "local is bytes"),
            ([b"a"], {remote}, TypeError, "remote is set"),
            ([b"a"], [b"b"], TypeError, "remote 0 is bytes"),
            ([b"a", bytes(9)], [remote, remote[:8]], ValueError, "local 1 has 9 bytes"),
            (b"a", b"b", TypeError, "RemoteRegion"),
        ]
        for local, remotes, error, advice in bad:
            for call in (pair.to_far.write, pair.to_far.read, pair.to_far.prepare_write):
                with pytest.raises(error, match=advice):
                    call(local, remotes)

    @pytest.mark.parametrize(
        ("signal", "error", "advice"),
        [
            (5, TypeError, "RemoteWord, value"),
            ((1, 2, 3), TypeError, "RemoteWord, value"),
            (("word", 1), TypeError, "remote.word"),
        ],
    )
    def test_bad_signals(
        self, pair: Pair, signal: Any, error: type[Exception], advice: str
    ) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        for call in (
            lambda: remote.write(b"x", signal=signal),
            lambda: pair.to_far.write([b"x"], [remote], signal=signal),
            lambda: pair.to_far.prepare_write([b"x"], [remote]).start(signal=signal),
        ):
            with pytest.raises(error, match=advice):
                call()

    @pytest.mark.parametrize(
        ("value", "error"),
        [(-1, ValueError), (1 << 64, ValueError), (1.0, TypeError), ("1", TypeError)],
    )
    def test_bad_word_values(self, pair: Pair, value: Any, error: type[Exception]) -> None:
        region = pair.far.allocate(100)
        remote = pair.to_far.region(region.handle())
        word = remote.word(0)
        calls = [
            lambda: remote.write(b"x", signal=(word, value)),
            lambda: word.set(value),
            lambda: pair.to_far.signal(word, value),
            lambda: region.word(0).wait_until(value, 0),
            lambda: pair.far.wait_until(region.word(0), value, 0),
            lambda: asyncio.run(region.word(0).reached(value, 0)),
        ]
        if value != -1:
            calls += [lambda: word.fetch_add(value), lambda: pair.to_far.fetch_add(word, value)]
        for call in calls:
            with pytest.raises(error, match="word"):
                call()
        assert region.word(0).value == 0

    def test_counting_down(self, pair: Pair) -> None:
        region = pair.far.allocate(8)
        word = pair.to_far.region(region.handle()).word(0)
        assert word.fetch_add(5) == 0
        assert word.fetch_add(-2) == 5
        assert region.word(0).value == 3

    def test_words_of_somebody_else(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        other = pair.to_near.region(pair.near.allocate(100).handle())
        for call in (
            lambda: remote.write(b"x", signal=(other.word(0), 1)),
            lambda: pair.to_far.signal(other.word(0), 1),
            lambda: pair.to_far.fetch_add(other.word(0)),
            lambda: pair.to_far.write(b"x", other),
        ):
            with pytest.raises(ValueError, match="peer"):
                call()
        with pytest.raises(TypeError, match="Word"):
            pair.far.wait_until(remote.word(0), 1)  # type: ignore[arg-type]

    def test_bad_indices(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(100).handle())
        prepared = pair.to_far.prepare_write([b"x"], [remote])
        for indices, error in (([1], ValueError), ([0.0], TypeError), ([[0]], ValueError)):
            with pytest.raises(error, match="ind"):
                prepared.start(indices)
        assert "1 pieces" in repr(prepared)

    def test_regions_are_found_by_name_or_handle(self, pair: Pair) -> None:
        for wrong in (5, None, b"name"):
            with pytest.raises(TypeError, match=r"name .* or Handle"):
                pair.to_far.region(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="name"):
            pair.to_far.region("")
        for size, error in ((0, ValueError), ("8", TypeError)):
            with pytest.raises(error, match="bytes"):
                pair.to_far.allocate(size)  # type: ignore[arg-type]

    def test_messages_name_peer_and_region(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(8, name="weights", access="r").handle())
        with pytest.raises(PermissionError, match=r"weights.*'far'.*127\.0\.0\.1"):
            remote.write(b"x")

    def test_wait_all_waits_for_the_rest(self, pair: Pair) -> None:
        region, gone = pair.far.allocate(16 << 20), pair.far.allocate(8)
        remote = pair.to_far.region(region.handle())
        stale = pair.to_far.region(gone.handle())
        gone.free()
        transfers = [stale.write(b"x"), remote.write(np.ones(16 << 20, np.uint8))]
        with pytest.raises(tw.StaleHandleError):
            tw.wait_all(transfers, 10)
        assert all(transfer.done() for transfer in transfers)
        assert region.array()[-1] == 1

    def test_a_freed_region_ends_the_waiting(self, pair: Pair) -> None:
        pair.to_far.allocate(8, "leased")
        region = pair.far.region("leased")
        pair.to_far.close()
        with pytest.raises(tw.StaleHandleError, match="leased"):
            region.word(0).wait_until(1, 20)
        with pytest.raises(tw.StaleHandleError, match="leased"):
            asyncio.run(region.word(0).reached(1, 20))

    def test_a_lost_peer_ends_the_waiting(self, pair: Pair) -> None:
        word = pair.far.allocate(8).word(0)
        pair.near.close()
        for call in (
            lambda: word.wait_until(1, 20, peer=pair.to_near),
            lambda: pair.far.wait_until(word, 1, 20, peer=pair.to_near),
            lambda: asyncio.run(word.reached(1, 20, peer=pair.to_near)),
        ):
            with pytest.raises(tw.PeerLostError, match="near"):
                call()

    def test_representations(self, pair: Pair) -> None:
        remote = pair.to_far.region(pair.far.allocate(8, name="w").handle())
        assert "'w' [2:4] at 'far'" in repr(remote[2:4])
        assert "byte 0 of 'w' at 'far'" in repr(remote.word(0))
        assert "'far'" in repr(pair.to_far)
        pair.far.close()
        with pytest.raises(tw.PeerLostError):
            pair.to_far.region("w")
        assert "lost" in repr(pair.to_far)


class TestTorch:
    """torch tensors as source, destination and inhabitants of regions."""

    torch: Any

    @pytest.fixture(autouse=True)
    def import_torch(self) -> None:
        self.torch = pytest.importorskip("torch")

    def test_tensor_views(self, node: Node) -> None:
        torch = self.torch
        region = node.allocate(96)
        view = region.tensor(torch.float32, (2, 3, 4))
        view.copy_(torch.arange(24.0).reshape(2, 3, 4))
        assert region.array("f4").tolist() == list(range(24))
        assert region[4:8].tensor(torch.float32, ()).item() == 1
        assert region.tensor().dtype is torch.uint8
        assert region[5:5].tensor(torch.float64).shape == (0,)
        assert region.tensor(torch.bfloat16).shape == (48,)
        assert torch.from_dlpack(region).data_ptr() == view.data_ptr()
        with pytest.raises(ValueError, match="needs"):
            region.tensor(torch.float64, 13)

    def test_tensors_keep_the_memory(self) -> None:
        with assert_no_leak():
            with Node() as node:
                tensor = node.allocate(4096).tensor()  # small: torch starts no threads
                del node
            gc.collect()
            tensor.fill_(3)
            assert tensor.sum() == 3 * 4096
            del tensor

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int64", "bool"])
    def test_round_trip(self, pair: Pair, dtype: str) -> None:
        torch = self.torch
        source = torch.arange(1000).reshape(10, 100).to(getattr(torch, dtype))
        remote = pair.to_far.region(pair.far.allocate(source.nbytes).handle())
        remote.write(source).wait(10)
        back = torch.zeros_like(source)
        pair.to_far.read(
            [back[:5], back[5:]], [remote[: source.nbytes // 2], remote[source.nbytes // 2 :]]
        ).wait(10)
        assert torch.equal(back, source)

    def test_requires_grad(self, pair: Pair) -> None:
        torch = self.torch
        region = pair.far.allocate(12)
        remote = pair.to_far.region(region.handle())
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        remote.write(weight).wait(10)
        assert region.array("f4").tolist() == [1, 2, 3]
        remote.read(torch.nn.Parameter(weight.detach().clone())).wait(10)

    def test_the_source_may_be_dropped(self, pair: Pair) -> None:
        torch = self.torch
        region = pair.far.allocate(4 << 20)
        remote = pair.to_far.region(region.handle())
        transfer = remote.write(torch.full((1 << 20,), 7.0))
        scratch = torch.full((1 << 20,), 1.0)
        transfer.wait(10)
        assert (region.array("f4") == 7).all()
        del scratch

    def test_adopt_moves_a_parameter(self, pair: Pair) -> None:
        torch = self.torch
        layer = torch.nn.Linear(4, 3)
        before = layer.weight.detach().clone()
        region = pair.far.allocate(256)
        view = region.adopt(layer.weight, offset=64)
        assert layer.weight.data_ptr() == view.data_ptr()
        assert torch.equal(layer.weight, before)
        assert layer.weight.requires_grad
        pair.to_far.region(region.handle())[64:].write(np.ones((3, 4), np.float32)).wait(10)
        assert layer(torch.ones(4)).shape == (3,)
        assert (layer.weight == 1).all()
        layer(torch.ones(4)).sum().backward()
        assert (layer.weight.grad == 1).all()

    def test_adopt_allocates(self, node: Node) -> None:
        torch = self.torch
        tensor = torch.arange(6.0)
        region = node.adopt(tensor, name="t")
        tensor += 1
        assert region.array("f4").tolist() == [1, 2, 3, 4, 5, 6]
        for wrong, advice in ((torch.zeros(4, 4).t(), "contiguous"), (torch.zeros(0), "bytes")):
            with pytest.raises(ValueError, match=advice):
                node.adopt(wrong)


def test_everything_public_has_a_docstring() -> None:
    for name in tw.__all__:
        thing = getattr(tw, name)
        assert thing.__doc__, name
        for member, value in vars(thing).items() if isinstance(thing, type) else ():
            if not member.startswith("_") and callable(value) and thing is not tw.Handle:
                assert value.__doc__, f"{name}.{member}"


def test_version(repository: Path) -> None:
    text = (repository / "pyproject.toml").read_text()
    assert f'version = "{tw.__version__}"' in text
    with pytest.raises(AttributeError, match="no_such"):
        tw.no_such  # noqa: B018


def test_peer_is_public() -> None:
    assert Peer.__module__.startswith("tensorwire.memory")


def test_own_word_is_raised_and_wakes_a_waiter_of_this_process() -> None:
    with Node("alone", transports=["shm"]) as node:
        word = node.allocate(64).word(8)
        waiter = threading.Thread(target=word.wait_until, args=(5, 10.0))
        waiter.start()
        word.set(4)
        assert waiter.is_alive()
        word.set(5)
        waiter.join(10.0)
        assert not waiter.is_alive()
        word.set(3)
        assert word.value == 5


def test_a_region_without_access_is_not_mapped_by_peers() -> None:
    with Node("owner", transports=["shm"]) as owner, Node("peer", transports=["shm"]) as node:
        owner.allocate(1 << 20, name="private", access="none")
        before = Path("/proc/self/maps").read_text().count("memfd:tensorwire")
        remote = node.connect(owner.address).region("private")
        attach_pages = 2  # each side maps the other's page
        assert (
            Path("/proc/self/maps").read_text().count("memfd:tensorwire") == before + attach_pages
        )
        with pytest.raises(PermissionError, match="read-only"):
            remote.write(b"x")


def test_wildcard_listening_advertises_a_reachable_address() -> None:
    with Node("wide", listen="0.0.0.0:0", secret=b"s" * 32, advertise="127.0.0.1") as node:
        assert node.address.startswith("127.0.0.1:")
        with Node("near", secret=b"s" * 32) as other:
            assert other.connect(node.address).name == "wide"


def test_a_signal_waits_only_for_transfers_of_its_own_node() -> None:
    with node_pair(transports=["shm"]) as one, node_pair(transports=["shm"]) as other:
        foreign = other.to_far.allocate(64).write(b"x")
        word = one.to_far.allocate(64).word(0)
        with pytest.raises(ValueError, match="same Node"):
            word.set(1, after=[foreign])
        with pytest.raises(TypeError):
            word.set(1, after=[None])  # type: ignore[list-item]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_is_closed_with_a_reason(transport: str) -> None:
    with Node("a", transports=[transport]) as a, Node("b", transports=[transport]) as b:
        there = b.connect(a.address)
        here = a.accept(20.0)
        for reason in ("x" * 1025, "\u00e4" * 513, "two\nlines", "\x1b[2J"):
            with pytest.raises(ValueError, match="a reason is text without control characters"):
                here.close(reason)
        assert not here.lost
        here.close("no, thanks")
        here.close("again")
        with pytest.raises(tw.PeerLostError, match="it said goodbye: no, thanks"):
            b.allocate(64).word(0).wait_until(1, 20.0, peer=there)
        assert there.lost_reason.endswith("it said goodbye: no, thanks")


@pytest.mark.parametrize("timeout_s", ["1", float("nan"), [1]])
def test_timeouts_that_are_no_numbers(timeout_s: Any) -> None:
    """Calls that wait; not a list of signatures, and not a wait of no time."""
    told = "a timeout is a number of seconds or None, not (str|nan|list)|timeout_s is a number of s"
    with Node("a") as a, Node("b") as b:
        peer = a.connect(b.address)
        region = b.allocate(64, name="r", access="rw")
        transfer = peer.region("r").write(b"x")
        word = region.word(0)
        for attempt in (
            lambda: a.connect(b.address, timeout_s=timeout_s),
            lambda: a.accept(timeout_s),
            lambda: peer.region("r", timeout_s),
            lambda: peer.wait_region("r", timeout_s),
            lambda: peer.allocate(8, timeout_s=timeout_s),
            lambda: word.wait_until(1, timeout_s),
            lambda: transfer.wait(timeout_s),
            lambda: tw.wait_all([transfer], timeout_s),
            lambda: asyncio.run(word.reached(1, timeout_s)),  # type: ignore[arg-type]
        ):
            with pytest.raises((TypeError, ValueError), match=told):
                attempt()
        transfer.wait(5)


def test_concurrent_connects_keep_to_max_peers() -> None:
    with Node("far") as far, Node("near", max_peers=2) as near:

        def connect() -> None:
            with contextlib.suppress(BusyError):
                near.connect(far.address)

        threads = [threading.Thread(target=connect) for _ in range(12)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(near.peers) == 2


def test_a_private_mapping_of_a_closed_node() -> None:
    node = Node("a")
    region = node.allocate(4096)
    node.close()
    with pytest.raises(ClosedError):
        region.private()
