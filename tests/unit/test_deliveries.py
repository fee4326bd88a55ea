"""Workers at their own pace get versions over a network in turns; none waits for a slow one."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorwire.errors import TimeoutError
from tensorwire.parameters.server.paced import deliveries
from tensorwire.parameters.server.paced.deliveries import Deliveries


class FakeTransfer:
    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout_s: float) -> None:
        if not self.done.wait(timeout_s):
            raise TimeoutError("under way")


class FakeView:
    """The memory of a worker; what is written there is under way until it is let through."""

    def __init__(self) -> None:
        self.transfer: FakeTransfer | None = None
        self.value = 0

    def __getitem__(self, _: slice) -> "FakeView":
        return self

    def write(self, data: Any) -> FakeTransfer:
        self.value, self.transfer = int(data[0]), FakeTransfer()
        return self.transfer


class Rig:
    def __init__(self, servers: int, workers: int = 4) -> None:
        self.views = [FakeView() for _ in range(workers)]
        peers = {
            rank: SimpleNamespace(region=lambda _, view=view: view, lost=False)
            for rank, view in enumerate(self.views)
        }
        member = SimpleNamespace(servers=dict.fromkeys(range(1, servers)), workers=peers)
        regions = SimpleNamespace(
            share=SimpleNamespace(size_bytes=64, start=0), name=lambda kind: str(kind)
        )
        opening: Any = SimpleNamespace(regions=regions, member=member, mapped=set())
        self.master = np.zeros(64, np.uint8)
        self.told: list[int] = []
        self.failures: list[BaseException] = []
        answer = lambda rank, number, data, after: self.told.append(rank)  # noqa: E731
        self.deliveries = Deliveries(opening, self.master, answer, self.failures.append)

    def send(self, *ranks: int) -> None:
        for rank in ranks:
            self.master[0] += 1
            assert self.deliveries.bring(rank)
            self.deliveries.send(rank, 7, b"told")

    def begun(self, count: int) -> bool:
        deadline = time.monotonic() + 5
        while len(self.told) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(self.told) == count

    def let_through(self, rank: int) -> None:
        transfer = self.views[rank].transfer
        assert transfer is not None
        transfer.done.set()


@pytest.mark.parametrize("servers", [1, 2])
def test_as_many_at_a_time_as_servers(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "_LEAST_S", 60.0)  # on a busy machine too nobody is slow
    rig = Rig(servers)
    rig.send(0, 1, 2, 3)
    for done in range(4):
        assert rig.begun(min(servers + done, 4))
        rig.let_through(done)
    rig.deliveries.close()
    assert rig.told == [0, 1, 2, 3]
    # Each has the version that was in place when it was its turn to be answered.
    assert [view.value for view in rig.views] == [1, 2, 3, 4]
    assert not rig.failures


def test_a_worker_that_does_not_read_holds_nobody_up() -> None:
    rig = Rig(1)
    rig.send(0, 1, 2)  # nothing is let through
    rig.deliveries.close()
    assert rig.told == [0, 1, 2]


def test_what_must_not_happen_is_told() -> None:
    rig = Rig(1)
    rig.views[0].write = lambda data: 1 / 0  # type: ignore[method-assign, assignment]
    rig.send(0)
    rig.deliveries.close()
    (failure,) = rig.failures
    assert isinstance(failure, ZeroDivisionError)
