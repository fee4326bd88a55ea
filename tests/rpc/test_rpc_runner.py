"""Quick calls run in the thread that reads them, and no call waits for one that is not quick."""

import contextvars
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from ends import RUNTIME_SHM, RUNTIME_TCP, Ends, Methods, System
from test_rpc_conformance import LONG_S, UU, echo, wait_for

from tensorwire.rpc.payload.threads import Threads
from tensorwire.rpc.runtime.line import Line
from tensorwire.rpc.runtime.runner import QUICK_S, Runner

WIRES = {"shm": RUNTIME_SHM, "tcp": RUNTIME_TCP}
OFTEN = 40


@pytest.fixture(params=WIRES)
def both(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(System(request.param, WIRES[request.param], WIRES[request.param]))
    yield made
    made.close()


def runner_of(ends: Ends) -> Runner:
    (end,) = ends.server._service._ends
    made: Runner = end.runner
    return made


def test_quick_calls_stay_in_a_thread_of_the_pool(both: Ends) -> None:
    both.methods = {"/t/m": UU(lambda request, context: threading.current_thread().name.encode())}
    call = both.serve().channel().unary_unary("/t/m")
    assert not runner_of_once(call, both).takes("/t/m")
    names = [call(b"") for _ in range(OFTEN)]
    assert all(each.startswith(b"ThreadPoolExecutor") for each in names)
    wait_for(lambda: call(b"") and runner_of(both).takes("/t/m"))  # one that is late is distrusted
    assert runner_of(both)._count > 0


def runner_of_once(call: Any, ends: Ends) -> Runner:
    call(b"")
    return runner_of(ends)


def test_answers_of_calls_that_came_together_leave_together(
    both: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    class Counting:
        def __init__(self, line: Line) -> None:
            self._inner = line._writer

        def write_out(self, outbox: deque[bytes], *given: Any) -> bool:
            written.append(len(outbox))
            return self._inner.write_out(outbox, *given)

        def drain(self, *given: Any) -> None:
            self._inner.drain(*given)

    both.methods = {"/t/m": UU(echo)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/m")
    for _ in range(OFTEN):
        call(b"x")
    client = channel.attachment.runtime
    for line in (client.line, runner_of(both)._line):
        monkeypatch.setattr(line, "_writer", Counting(line))
    found = []
    for _ in range(20):
        written.clear()
        client.line.hold()
        calls = [call.future(b"x") for _ in range(8)]
        client.line.release()
        assert [each.result(LONG_S) for each in calls] == [b"x"] * 8
        assert written[0] == 8  # the calls
        found.append(max(written[1:]))
    assert max(found) > 1  # answers; those of a thread that was held up for long leave earlier


def test_an_answer_does_not_wait_for_a_call_that_waits_for_it(both: Ends) -> None:
    """The caller acts on the first of two answers before the second call can end."""
    answered = threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        if request == b"second":
            assert answered.wait(LONG_S)
        return request

    both.methods = {"/t/m": UU(method)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/m")
    took = []
    for _ in range(5):
        for _ in range(OFTEN):
            call(b"x")
        began = time.monotonic()
        channel.attachment.runtime.line.hold()
        first, second = call.future(b"first"), call.future(b"second")
        channel.attachment.runtime.line.release()
        assert first.result(LONG_S) == b"first"
        answered.set()
        assert second.result(LONG_S) == b"second"
        took.append(time.monotonic() - began)
        answered.clear()
    assert max(took) < LONG_S / 4


def test_nobody_waits_for_a_quick_method_that_blocks(both: Ends) -> None:
    """Other calls go on, a cancellation, and the later requests of a batch."""
    goes_on, cancelled = threading.Event(), threading.Event()

    def method(request: bytes, context: Any) -> bytes:
        if request == b"block":
            context.add_callback(cancelled.set)
            goes_on.wait(LONG_S)
        return request

    both.methods = {"/t/m": UU(method)}
    call = both.serve().channel().unary_unary("/t/m")
    for _ in range(3):
        for _ in range(OFTEN):
            call(b"x")
        blocked = [call.future(b"block") for _ in range(3)]
        others = [call.future(b"y") for _ in range(20)]
        assert [each.result(LONG_S) for each in others] == [b"y"] * 20
        assert [call(b"z", timeout=LONG_S) for _ in range(5)] == [b"z"] * 5
        assert not any(each.done() for each in blocked)
        blocked[0].cancel()
        assert cancelled.wait(LONG_S)
        goes_on.set()
        assert [each.result(LONG_S) for each in blocked[1:]] == [b"block"] * 2
        goes_on.clear()
        cancelled.clear()
    assert call(b"x") == b"x"


def test_one_thread_serves_many_clients(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    both.serve(workers=1)
    calls = [both.channel().unary_unary("/t/m") for _ in range(4)]
    done: list[float] = []

    def work(call: Any) -> None:
        for _ in range(200):
            assert call(b"x", timeout=LONG_S) == b"x"
            done.append(time.monotonic())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, calls))
    assert len(done) == 800


def test_what_a_servicer_sets_is_its_own(both: Ends) -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def method(request: bytes, context: Any) -> bytes:
        before = variable.get()
        variable.set(before + 1)
        if request:
            context.abort(grpc.StatusCode.ABORTED, "as it was told")
        return b"%d" % before

    both.methods = {"/t/m": UU(method)}
    call = both.serve().channel().unary_unary("/t/m")
    for _ in range(OFTEN):
        assert call(b"") == b"0"
        with pytest.raises(grpc.RpcError) as caught:
            call(b"x")
        assert caught.value.code() is grpc.StatusCode.ABORTED


def test_a_pool_that_takes_nothing_any_more(both: Ends) -> None:
    pool = ThreadPoolExecutor(2)
    server = both.system.server(pool)
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
    both.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call = both.channel().unary_unary("/t/m")
    for _ in range(OFTEN):
        call(b"x")
    pool.shutdown(wait=True)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x", timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the server's threads are gone" in caught.value.details()
    both.channel().close()
    server.stop(0).wait()


def test_a_pool_that_is_in_use_gets_its_thread_back(both: Ends) -> None:
    """A thread that reads for one client is no thread that the user cannot have."""
    pool = ThreadPoolExecutor(1)
    server = both.system.server(pool)
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
    both.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call, stop = both.channel().unary_unary("/t/m"), threading.Event()

    def work() -> None:
        while not stop.is_set():
            call(b"x")

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    waited = []
    for _ in range(10):
        began = time.monotonic()
        pool.submit(lambda: None).result(LONG_S)
        waited.append(time.monotonic() - began)
    stop.set()
    thread.join()
    assert min(waited) < 0.05
    server.stop(0).wait()
    pool.shutdown()


def test_calls_of_a_server_that_stops(both: Ends) -> None:
    both.methods = {"/t/m": UU(echo)}
    call = both.serve().channel().unary_unary("/t/m")
    for _ in range(OFTEN):
        call(b"x")
    assert both.server.stop(5).wait(LONG_S)
    wait_for(lambda: not runner_of(both)._running)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"x", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


class OwnPool(Executor):
    """Threads of the user's own, which cannot say whether others wait."""

    def __init__(self) -> None:
        self.count = 0

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Future[Any]:
        self.count += 1
        threading.Thread(target=work, args=given, kwargs=named).start()
        return Future()


def test_another_kind_of_pool_runs_each_call(both: Ends) -> None:
    pool = OwnPool()
    server = both.system.server(pool)
    server.add_generic_rpc_handlers((Methods({"/t/m": UU(echo)}),))
    both.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call = both.channel().unary_unary("/t/m")
    call(b"")
    before = pool.count
    for _ in range(OFTEN):
        call(b"x")
    assert pool.count == before + OFTEN
    server.stop(0).wait()


class NoLine(Line):
    def __init__(self) -> None:
        pass


def test_which_methods_are_quick() -> None:
    with ThreadPoolExecutor(1) as pool:
        runner = Runner(NoLine(), pool)
        for _ in range(4):
            assert not runner.takes("/t/m")
            runner.took("/t/m", QUICK_S / 2)
        assert runner.takes("/t/m")
        assert not runner.takes("/t/other")
        runner.took("/t/m", 2 * QUICK_S)
        assert not runner.takes("/t/m")
        for _ in range(50):
            runner.took("/t/m", QUICK_S / 2)
        runner.took("/t/m", 2 * QUICK_S)  # once in a while: the machine may have been busy
        assert runner.takes("/t/m")
        runner.took("/t/m", 2 * QUICK_S)
        assert not runner.takes("/t/m")
        for number in range(3000):
            runner.took(f"/t/{number}", 0.0)
        assert len(runner._trust) <= 1024


@pytest.mark.parametrize("lock", ["_turn", "_writing"])
def test_a_handler_of_a_signal_comes_as_soon_as_a_lock_is_taken(both: Ends, lock: str) -> None:
    """Before anybody can know whose thread has it."""
    both.methods = {"/t/echo": UU(echo)}
    channel = both.serve().channel()
    call = channel.unary_unary("/t/echo")
    assert call(b"") == b""
    client = channel.attachment.runtime
    owner = client.reader if lock == "_turn" else client.line
    got: list[bytes] = []

    def handler(taken: bool) -> None:
        if taken and not got:
            got.append(b"")
            try:
                got.append(call(b"of the handler"))
            except RuntimeError:
                got.append(b"let another thread do that")

    class Turn(dict[int, object]):
        def setdefault(self, key: int, mine: object) -> Any:
            has = super().setdefault(key, mine)
            handler(has is mine)
            return has

    class Writing:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.release, self._is_owned = inner.release, inner._is_owned

        def acquire(self, blocking: bool) -> bool:
            taken: bool = self.inner.acquire(blocking=blocking)
            handler(taken)
            return taken

    setattr(owner, lock, Turn() if lock == "_turn" else Writing(client.line._writing))
    thread = threading.Thread(target=lambda: got.append(call(b"of the thread")), daemon=True)
    thread.start()
    thread.join(LONG_S)
    of_the_handler = b"of the handler" if lock == "_writing" else b"let another thread do that"
    assert got == [b"", of_the_handler, b"of the thread"]


def test_a_thread_keeps_nothing_of_what_it_has_done() -> None:
    """Also of the first that it did, which its Thread was made with."""
    threads, done = Threads(), threading.Event()
    thing = threading.Event()
    gone = weakref.ref(thing)
    threads.run(thing.set)
    assert thing.wait(LONG_S)
    del thing
    until = time.monotonic() + 1.0  # a thread that has nothing to do ends after two
    while gone() is not None:
        assert time.monotonic() < until
        time.sleep(0.005)
    threads.run(done.set)
    assert done.wait(LONG_S)
