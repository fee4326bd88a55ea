"""The n-th operation fails, vanishes, is late or cuts the line, for every n of an exchange."""

import os
from collections.abc import Callable

import numpy as np
import pytest

import tensorwire as tw
from tensorwire.testing import Exchange, for_every_n

OPERATIONS = 15


def everything(exchange: Exchange) -> None:
    """One of each kind of operation, each checked by its effect."""
    _, far, to_far, _ = exchange.pair
    wait = exchange.timeout_s
    region = far.allocate(4096, name="region")
    remote = to_far.region("region", wait)
    data = np.arange(512, dtype=np.uint64)
    exchange.finish(remote.write(data))
    assert (region.array("u8") == data).all()
    back = np.zeros_like(data)
    exchange.finish(remote.read(back))
    assert (back == data).all()
    exchange.finish(remote[8:].write(b"\7" * 8, signal=(remote.word(0), 1)))
    region.word(0).wait_until(1, wait)
    assert bytes(region.memoryview()[8:16]) == b"\7" * 8
    exchange.finish(to_far.write([b"a", b"b"], [remote[100:], remote[200:]]))
    exchange.finish(to_far.read([bytearray(1), bytearray(1)], [remote[100:], remote[200:]]))
    prepared = to_far.prepare_write([data[:2], data[4:6]], [remote[1024:1040], remote[2048:2064]])
    exchange.finish(prepared.start())
    exchange.finish(prepared.start([1, 0, 1], signal=(remote.word(16), 5)))
    region.word(16).wait_until(5, wait)
    assert region.array("u8")[256:258].tolist() == [4, 5]
    writes = [exchange.track(remote[3000 + i :].write(bytes([i]))) for i in range(2)]
    exchange.finish(to_far.signal(remote.word(24), 6, after=writes))
    region.word(24).wait_until(6, wait)
    assert bytes(region.memoryview()[3000:3002]) == b"\0\1"
    counter = exchange.track(to_far.fetch_add(remote.word(32), 2))
    counter.wait(wait)
    assert counter.value == 4  # from the data
    assert region.word(32).value == 6
    leased = to_far.allocate(64, "leased", wait)
    exchange.finish(leased.write(b"mine"))
    assert bytes(far.region("leased").memoryview()[:4]) == b"mine"
    leased.free(wait)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["fail", "drop", "delay", "cut"])
def test_every_operation(action: str, transport: str) -> None:
    count = for_every_n(everything, action, transports=[transport], timeout_s=0.25, delay_s=0.03)
    assert count == OPERATIONS


def large_and_waiting(exchange: Exchange) -> None:
    """Transfers that are still on their way when another one fails."""
    region = exchange.pair.far.allocate(16 << 20)
    remote = exchange.pair.to_far.region(region.handle(), exchange.timeout_s)
    local = np.ones(4 << 20, np.uint8)
    word = remote.word(8)
    transfers = [exchange.track(remote[16:].write(local, signal=(word, i))) for i in range(1, 4)]
    transfers.append(exchange.track(remote.read(np.empty(16 << 20, np.uint8))))
    transfers.append(exchange.track(word.set(9, after=transfers[:3])))
    tw.wait_all(transfers, 20)
    assert region.word(8).value == 9


@pytest.mark.parametrize("action", ["fail", "cut"])
def test_others_on_their_way(action: str, transport: str) -> None:
    assert for_every_n(large_and_waiting, action, transports=[transport]) == 6


class TestTheDriver:
    """for_every_n itself: each kind of trouble is found and told."""

    def one_write(self, exchange: Exchange) -> tw.Transfer:
        region = exchange.pair.far.allocate(8)
        remote = exchange.pair.to_far.region(region.handle(), exchange.timeout_s)
        return exchange.track(remote.write(b"x"))

    def fails(self, script: Callable[[Exchange], None], action: str, told: str) -> None:
        with pytest.raises(AssertionError, match=told):
            for_every_n(script, action, transports=["tcp"], timeout_s=0.1, deadline_s=1, limit=20)

    def test_a_wrong_result(self) -> None:
        def script(exchange: Exchange) -> None:
            self.one_write(exchange).wait(exchange.timeout_s)
            raise AssertionError("seven is not eight")

        self.fails(script, "delay", r"delay of operation 1 .*seven is not eight")

    def test_a_wrong_error(self) -> None:
        def script(exchange: Exchange) -> None:
            try:
                self.one_write(exchange).wait(exchange.timeout_s)
            except tw.TensorwireError:
                raise KeyError("surprise") from None

        self.fails(script, "fail", r"fail of operation 1 .*KeyError: 'surprise'")

    def test_an_error_without_a_fault(self) -> None:
        def script(exchange: Exchange) -> None:
            raise tw.BusyError("always")

        self.fails(script, "fail", r"operation 1 .*BusyError: always")

    @pytest.mark.filterwarnings("ignore")  # the script's thread ends after its test
    def test_a_hang(self, capfd: pytest.CaptureFixture[str]) -> None:
        def script(exchange: Exchange) -> None:
            self.one_write(exchange).wait()

        self.fails(script, "drop", r"operation 2 .*still ran after 1 s")
        assert "in script" in capfd.readouterr().err

    def test_a_transfer_left_open(self) -> None:
        def script(exchange: Exchange) -> None:
            self.one_write(exchange)
            region = exchange.pair.far.allocate(64 << 20)
            remote = exchange.pair.to_far.region(region.handle(), 10)
            exchange.track(remote.write(bytes(64 << 20)))

        self.fails(script, "delay", "left transfers open")

    def test_a_leak(self) -> None:
        opened: list[int] = []

        def script(exchange: Exchange) -> None:
            opened.append(os.eventfd(0))

        self.fails(script, "fail", "left behind")
        for fd in opened:
            os.close(fd)

    def test_too_many_operations(self) -> None:
        def script(exchange: Exchange) -> None:
            region = exchange.pair.far.allocate(8)
            remote = exchange.pair.to_far.region(region.handle(), exchange.timeout_s)
            for _ in range(30):
                exchange.finish(remote.write(b"x"))

        self.fails(script, "delay", "more than 20 operations")

    def test_an_unknown_action(self) -> None:
        with pytest.raises(ValueError, match="fail, drop, delay, cut"):
            for_every_n(everything, "explode")
