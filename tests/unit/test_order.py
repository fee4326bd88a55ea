"""Which commit comes next, where each worker goes at its own pace."""

import threading
from types import SimpleNamespace
from typing import Any

from tensorwire.errors import TimeoutError
from tensorwire.parameters import Mode
from tensorwire.parameters.messages import APPLY
from tensorwire.parameters.server.paced.events import Event, EventKind
from tensorwire.parameters.server.paced.order import Leader


class Inbox:
    """The first commit of each of two slices; gradients of the first are still under way."""

    def __init__(self) -> None:
        self.taken = [1, 1]
        self.first_has_come, self.second_may_come = threading.Event(), threading.Event()

    def wait(self, index: int, number: int, timeout_s: float) -> int:
        if number > 2 or (index == 1 and not self.second_may_come.wait(timeout_s)):
            raise TimeoutError("nothing")
        return 2

    def await_gradients(self, index: int, timeout_s: float) -> None:
        if index == 0:
            self.second_may_come.set()
            if not self.first_has_come.wait(timeout_s):
                raise TimeoutError("under way")

    def read(self, index: int) -> Any:
        return SimpleNamespace(operation=APPLY)


def test_a_commit_whose_gradients_are_under_way_holds_no_other_one_up() -> None:
    """Named for a bug: workers on slow links waited for each other, and kept in step by that."""
    inbox = Inbox()
    spec, member = SimpleNamespace(slices=2), SimpleNamespace(servers={}, has_left=lambda _: False)
    opening = SimpleNamespace(
        committers=[0, 1], mode=Mode("async"), spec=spec, member=member, durable=False,
        closing=threading.Event(),
    )  # fmt: skip
    account = SimpleNamespace(lead=None, events=0)
    ledger = SimpleNamespace(account=account, note=lambda: None)
    calls = SimpleNamespace(is_summing=lambda _: False)
    leader = Leader(opening, ledger, inbox, calls)  # type: ignore[arg-type]
    try:
        leader.decide(1)
        assert leader.send() == Event(EventKind.APPLIED, 1)
        inbox.taken[1] = 2
        inbox.first_has_come.set()
        leader.decide(2)
        assert leader.send() == Event(EventKind.ANSWERED, 1)
        leader.decide(2)
        assert leader.send() == Event(EventKind.APPLIED, 0)
    finally:
        leader.close()
