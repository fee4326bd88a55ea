"""Output that is not read holds up no program, whatever its reader is."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from tensorwire.aside import Aside, write_all

# Says on its stdin's other end, a pipe that is read, that it goes on.
PROGRAM = """
import logging, os, signal, sys, traceback, warnings
from tensorwire.aside import put_output_aside
put_output_aside()
for number in range(1000):
    print(number, "x" * 2000)
    print(number, "x" * 2000, file=sys.stderr)
logging.warning("y")
warnings.warn("y")
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
os.write(int(sys.argv[1]), b"goes on")
print("no end", end="")
if sys.argv[2] == "wait":
    signal.pause()
"""


def start(stdout: int, stderr: int, end: str) -> tuple[subprocess.Popen[bytes], int]:
    """The program, and a pipe on which it says when it has printed all."""
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(theirs), end],
        stdout=stdout,
        stderr=stderr,
        pass_fds=[theirs],
    )
    os.close(theirs)
    return process, ours


def full_pipe() -> tuple[int, int]:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    os.write(theirs, b"x" * 4096)
    return ours, theirs


@contextlib.contextmanager
def held(kind: str) -> Iterator[int]:
    ours, theirs = full_pipe() if kind == "pipe" else pty.openpty()
    try:
        yield theirs
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
@pytest.mark.parametrize("end", ["wait", "exit"])
def test_a_process_goes_on_and_ends_while_nobody_reads(kind: str, end: str) -> None:
    with held(kind) as theirs:
        process, told = start(theirs, theirs, end)
        try:
            assert os.read(told, 100) == b"goes on"
            if end == "wait":
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == (-signal.SIGTERM if end == "wait" else 0)
        finally:
            process.kill()
            process.wait()
            os.close(told)


def test_what_is_read_late_is_whole_up_to_what_is_missing() -> None:
    ours, theirs = os.pipe()
    process, told = start(theirs, subprocess.DEVNULL, "exit")
    os.close(theirs)
    assert os.read(told, 100) == b"goes on"
    os.close(told)
    with os.fdopen(ours, "rb") as file:
        *lines, last = file.read().decode().split("\n")
    assert process.wait(30) == 0
    missing = [line for line in lines if line.startswith("tensorwire:")]
    assert last == "no end"
    (text,) = missing
    count = int(text.split()[1])
    kept = [int(line.split()[0]) for line in lines if line not in missing]
    assert count > 0
    assert kept == list(range(1000 - count))


def test_a_reader_that_goes_away_ends_nobody() -> None:
    ours, theirs = full_pipe()
    process, told = start(theirs, theirs, "exit")
    os.close(theirs)
    os.close(ours)
    assert os.read(told, 100) == b"goes on"
    os.close(told)
    assert process.wait(30) == 0


def test_pieces_are_delivered_in_order_and_counted() -> None:
    go, got = threading.Event(), []

    def deliver(pieces: Sequence[str]) -> None:
        assert go.wait(30)
        got.extend(pieces)

    aside = Aside(deliver, 3, lambda count: f"{count} missing")
    aside.put("large", 5)  # alone, so that it may be larger than all that may wait
    for each in "abcd":
        aside.put(each)
    assert aside.waiting == 5
    go.set()
    assert aside.wait(30)
    aside.put("e")
    assert aside.wait(30)
    assert got == ["large", "4 missing", "e"]
    aside.close()


def test_a_descriptor_that_does_not_block_is_waited_for() -> None:
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    thread = threading.Thread(target=write_all, args=(theirs, b"x" * 300_000))
    thread.start()
    with os.fdopen(ours, "rb") as file:
        assert len(file.read(300_000)) == 300_000
    thread.join()
    os.close(theirs)
