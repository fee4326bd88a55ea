"""Processes that are killed in every phase, and what the other one has afterwards."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import rpc_serving
from ends import attached_channel, stop_process
from test_rpc_conformance import wait_for

from tensorwire import rpc
from tensorwire.rpc.payload import tensors

SCRIPT = Path(rpc_serving.__file__)
TYPES = rpc_serving.TYPES


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    started = []

    def run(*arguments: str) -> Any:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_the_server_is_killed(start: Any, transport: str, arity: str) -> None:
    """While its servicer has the payload of a call that has not ended."""
    process = start("serve", "ours", transport)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    with attached_channel(target, transports=(transport,), **rpc_serving.OPTIONS) as channel:
        call = rpc_serving.start_call(channel, arity, rpc.pack(np.ones(rpc_serving.SIZE)))
        got = rpc.unpack(next(call)) if arity[1] == "s" else None
        assert process.stdout.readline() == f"in the servicer {float(rpc_serving.SIZE)}\n"
        attachment = channel.attachment
        assert attachment.transport == transport
        process.send_signal(signal.SIGKILL)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        wait_for(lambda: attachment.lost)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/t/echo", *TYPES)(rpc.pack(np.ones(rpc_serving.SIZE)))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        if got is not None:  # memory of this process, which stays
            assert got.sum() == rpc_serving.SIZE
        del got, call
        wait_for(lambda: tensors.held_tensors() == 0)
    tensors._lent.clear()  # of calls that did not end well, for ten minutes


@pytest.mark.parametrize("arity", ["uu", "us", "su", "ss"])
def test_the_client_is_killed(start: Any, transport: str, arity: str) -> None:
    """Its servicer notices, keeps what it looks at, and everything is given back."""
    server = rpc.server(ThreadPoolExecutor(4), transports=(transport,), **rpc_serving.OPTIONS)
    server.add_generic_rpc_handlers((rpc_serving.Methods(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    process = start("call", transport, str(port), arity)
    line = process.stdout.readline()
    if arity[1] == "s":
        assert line == f"got {float(rpc_serving.SIZE)}\n"
        line = process.stdout.readline()
    assert line == "calling\n"
    (attachment,) = server.attachments
    wait_for(lambda: tensors.held_tensors() > 0)
    process.send_signal(signal.SIGKILL)
    wait_for(lambda: server.attachments == [] and attachment.lost)
    wait_for(lambda: tensors.held_tensors() == 0)
    with attached_channel(f"127.0.0.1:{port}", transports=(transport,)) as channel:
        answer = channel.unary_unary("/t/echo", *TYPES)(rpc.pack(np.ones(rpc_serving.SIZE)))
        assert rpc.unpack(answer)[0] == 2
    server.stop(0).wait()
    tensors._lent.clear()


@pytest.mark.slow
def test_many_requests_between_two_processes(start: Any) -> None:
    """Named for a bug: a write that was done while somebody looked at it ended the client."""
    process = start("serve", "ours", "tcp")
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    with attached_channel(target, transports=("tcp",), runtime=True) as channel:
        call = channel.stream_unary("/t/count")
        for _ in range(5000):
            assert call(bytes(4096) for _ in range(8)) == b"8"


def test_a_stopped_server_meets_the_deadline(start: Any, transport: str) -> None:
    """Messages of a call whose time is over before its payload could go ahead are not sent."""
    process = start("serve", "ours", transport)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    with attached_channel(target, transports=(transport,), **rpc_serving.OPTIONS) as channel:
        call = channel.unary_unary("/t/echo", *TYPES)
        array = np.ones(rpc_serving.SIZE)
        call(rpc.pack(array, owner=array.base), timeout=60)
        stop_process(process)
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                call(rpc.pack(array), timeout=0.3)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        process.send_signal(signal.SIGCONT)
        assert rpc.unpack(call(rpc.pack(array), timeout=20))[-1] == 2
    tensors._lent.clear()


def test_futures_do_not_wait_for_a_stopped_server(start: Any, transport: str) -> None:
    """A stopped server makes no new memory for what they send, which travels inside."""
    process = start("serve", "ours", transport)
    target = f"127.0.0.1:{process.stdout.readline().strip()}"
    with attached_channel(target, transports=(transport,), **rpc_serving.OPTIONS) as channel:
        call = channel.unary_unary("/t/echo", *TYPES)
        call(rpc.pack(np.ones(200)), timeout=60)
        stop_process(process)
        began = time.monotonic()
        arrays = [np.full(100_000, number, np.float64) for number in range(4)]
        futures = [call.future(rpc.pack(each), timeout=60) for each in arrays]
        # Each would wait for patience_s and more; what they take is told to all at the first one.
        assert time.monotonic() - began < rpc_serving.OPTIONS["limits"].patience_s
        process.send_signal(signal.SIGCONT)
        for number, each in enumerate(futures):
            assert rpc.unpack(each.result(50))[0] == number + 1
    tensors._lent.clear()


BEGIN = f"""
import os, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
from rpc_serving import *
server = rpc.server(ThreadPoolExecutor(2), **OPTIONS)
server.add_generic_rpc_handlers((Methods(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = rpc.insecure_channel(f"127.0.0.1:{{port}}", **OPTIONS)
channel.attach()
answer = channel.unary_unary("/t/echo", *TYPES)(rpc.pack(np.ones(SIZE)))
kept = rpc.unpack(answer)
"""


def outcome(tmp_path: Path, program: str) -> tuple[int, str, str]:
    file = tmp_path / "program.py"
    file.write_text(BEGIN + program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_it_exits_without_a_word(tmp_path: Path) -> None:
    """A program that closes nothing ends, quietly, with its arrays and streams still there."""
    assert outcome(tmp_path, "print(kept[0])\n") == (0, "2.0\n", "")


def test_a_forked_child_has_no_attachment(tmp_path: Path) -> None:
    program = """
attachment = channel.attachment
if os.fork() == 0:
    say(attachment.lost, channel.attachment, server.attachments[0].lost)
    os._exit(0)
os.wait()
say(attachment.lost, kept[0])
"""
    code, printed, _ = outcome(tmp_path, program)
    assert (code, printed) == (0, "True None True\nFalse 2.0\n")


def test_a_forked_child_is_told_that_what_has_arrived_is_not_its_own(tmp_path: Path) -> None:
    """Its parent's memory is not mapped there: looking at it would end the child."""
    program = """
del kept
if os.fork() == 0:
    for look in (rpc.unpack, rpc.embed):
        try:
            look(answer)
        except ClosedError as error:
            say(error)
    del answer
    os._exit(0)
say(os.wait()[1], rpc.unpack(answer)[0])
"""
    code, printed, _ = outcome(tmp_path, "from tensorwire import ClosedError\n" + program)
    *told, last = printed.splitlines()
    assert (code, last) == (0, "0 2.0")
    assert len(told) == 2
    assert all("copy what a child needs before the fork" in each for each in told)
