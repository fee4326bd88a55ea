"""PeerGroup, Footprint and assert_no_leak: the tools that other tests trust."""

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire.testing import Channel, Footprint, MemberError, PeerGroup, assert_no_leak


def echo(channel: Channel, greeting: str) -> str:
    channel.send(greeting)
    while (value := channel.recv()) is not None:
        channel.send(value)
    return "bye"


def fail(channel: Channel) -> None:
    print("about to fail")
    raise RuntimeError("as planned")


def hang(channel: Channel) -> None:
    channel.send(os.getpid())
    threading.Event().wait()


def forked_or_spawned(channel: Channel) -> tuple[int, bool]:
    return os.getppid(), "hypothesis" in sys.modules


def start_grandchild(channel: Channel) -> None:
    """A group in a member; the member is then killed, and its own member must not survive."""
    with PeerGroup() as group:
        channel.send(group.start(hang).recv())
        channel.recv()


def unpicklable(channel: Channel) -> object:
    return threading.Lock()


@contextlib.contextmanager
def expect(kind: type[Exception], match: str | None = None) -> Iterator[None]:
    """The block must raise this, and nothing may be left of it."""
    with assert_no_leak(), pytest.raises(kind, match=match):
        yield


@contextlib.contextmanager
def expect_leak(match: str, settle_s: float = 0.0) -> Iterator[None]:
    with pytest.raises(AssertionError, match=match), assert_no_leak(settle_s):
        yield


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"  # ended; whoever adopted it has not looked yet


def test_talks_both_ways_and_returns() -> None:
    with assert_no_leak(), PeerGroup() as group:
        first, second = (group.start(echo, f"hello {i}", name=f"echo {i}") for i in range(2))
        assert (first.recv(), second.recv()) == ("hello 0", "hello 1")
        for value in ({"a": [1, 2]}, "x" * 1_000_000):
            second.send(value)
            assert second.recv() == value
        second.send(None)
        assert second.result() == "bye"
        assert second.result() == "bye"
        assert second.wait() == 0
        assert list(group) == [first, second]
        assert first.exit_code is None


def test_processes_are_spawned() -> None:
    import hypothesis  # noqa: F401  a forked child would have it

    with PeerGroup() as group:
        assert group.start(forked_or_spawned).result() == (os.getpid(), False)


def test_an_error_comes_with_traceback_and_log() -> None:
    with assert_no_leak(), PeerGroup() as group:
        member = group.start(fail)
        with pytest.raises(MemberError, match=r"(?s)RuntimeError: as planned.*about to fail"):
            member.result()
        with pytest.raises(MemberError, match="as planned"):
            member.result()
        assert member.wait() == 1


def test_an_unnoticed_error_is_raised_at_the_end() -> None:
    with expect(MemberError, "as planned"), PeerGroup() as group:
        group.start(fail).wait()


def test_an_unpicklable_result_is_an_error() -> None:
    with PeerGroup() as group, pytest.raises(MemberError, match="pickle"):
        group.start(unpicklable).result()


def test_kill_is_no_error() -> None:
    with assert_no_leak(), PeerGroup() as group:
        pid = group.start(hang).recv()
        assert pid == group.members[0].pid
        group.kill(0)
        assert group.members[0].exit_code == -signal.SIGKILL
        assert is_gone(pid)
        with pytest.raises(MemberError, match="ended without a result"):
            group.members[0].recv()


def test_a_death_that_nobody_ordered_is_an_error() -> None:
    with expect(MemberError, "-11"), PeerGroup() as group:
        os.kill(group.start(hang).recv(), signal.SIGSEGV)
        group.members[0].wait()


def test_stop_and_continue() -> None:
    with PeerGroup() as group:
        member = group.start(echo, "hello")
        member.recv()
        group.stop(0)
        member.send(1)
        assert Path(f"/proc/{member.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        with pytest.raises(TimeoutError):
            member.recv(timeout_s=0.05)
        group.cont(0)
        assert member.recv() == 1
        group.stop(0)  # and the end of the group must cope


def test_a_hang_shows_where() -> None:
    with assert_no_leak(), PeerGroup() as group:
        member = group.start(hang)
        member.recv()
        with pytest.raises(TimeoutError, match="in hang"):
            member.result(timeout_s=0.05)
        member.kill()


def test_a_member_that_does_not_end_is_killed_and_reported() -> None:
    pids = []
    with expect(MemberError, "was not expected to end so"), PeerGroup(deadline_s=0.05) as group:
        pids.append(group.start(hang).recv())
    assert is_gone(pids[0])


def test_an_exception_reaps_at_once() -> None:
    start = time.monotonic()
    with expect(ZeroDivisionError), PeerGroup(deadline_s=60) as group:
        for _ in range(3):
            group.start(hang).recv()
        raise ZeroDivisionError
    assert time.monotonic() - start < 30


def test_members_die_with_their_parent() -> None:
    with PeerGroup() as group:
        member = group.start(start_grandchild)
        grandchild = member.recv()
        assert not is_gone(grandchild)
        member.kill()
        deadline = time.monotonic() + 10
        while not is_gone(grandchild):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_only_importable_functions() -> None:
    with PeerGroup() as group, pytest.raises(ValueError, match="cannot be imported"):
        group.start(lambda channel: None)


class TestLeaks:
    """assert_no_leak finds one thing of every kind."""

    def test_descriptor(self) -> None:
        with expect_leak(r"descriptors: 1 × .*eventfd"):
            fd = os.eventfd(0)
        os.close(fd)

    def test_socket(self) -> None:
        with expect_leak(r"descriptors: 1 × socket.*tcp 0100007F"):
            server = socket.create_server(("127.0.0.1", 0))
        server.close()

    def test_mapping(self) -> None:
        with expect_leak(r"mappings: 1 × /memfd:leaked.*8192 bytes"):
            fd = os.memfd_create("leaked")
            os.ftruncate(fd, 8192)
            mapping = mmap.mmap(fd, 8192)
            os.close(fd)
        mapping.close()

    def test_thread(self) -> None:
        event = threading.Event()
        thread = threading.Thread(target=event.wait)
        with expect_leak(r"threads: 1 × "):
            thread.start()
        event.set()
        thread.join()

    def test_child(self) -> None:
        with expect_leak(r"children: 1 × .*true, ended and not waited for", settle_s=0.5):
            pid = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.waitpid(pid, 0)

    def test_a_child_that_falls_asleep_is_no_leak(self) -> None:
        pid = os.spawnv(os.P_NOWAIT, "/bin/sleep", ["sleep", "60"])
        try:
            with assert_no_leak(settle_s=0):
                os.kill(pid, signal.SIGSTOP)
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def test_shared_file(self) -> None:
        path = Path(f"/dev/shm/tensorwire-test-{os.getpid()}")
        with expect_leak(f"shared_files: 1 × {path.name}"):
            path.touch()
        path.unlink()

    def test_a_named_semaphore_is_no_leak(self) -> None:
        path = Path(f"/dev/shm/sem.tensorwire-test-{os.getpid()}")
        with assert_no_leak(settle_s=0):
            path.touch()
        path.unlink()

    def test_same_again_is_no_leak(self) -> None:
        first = os.eventfd(0)
        with assert_no_leak(settle_s=0):
            second = os.eventfd(0)
            os.close(first)
        os.close(second)

    def test_what_ends_soon_is_no_leak(self) -> None:
        with assert_no_leak(settle_s=10):
            threading.Timer(0.05, lambda: None).start()

    def test_the_exception_of_the_block_comes_first(self) -> None:
        duplicates: list[int] = []
        with open(os.devnull) as file, contextlib.suppress(ZeroDivisionError):
            with assert_no_leak(settle_s=0):
                duplicates.append(os.dup(file.fileno()))
                raise ZeroDivisionError
        os.close(duplicates.pop())

    def test_growth(self) -> None:
        before = Footprint.now()
        assert Footprint.now().growth(before) == []
