"""A worker is one process: a second one that claims its rank is refused, the first goes on."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tensorwire.membership import drop_claim, hold_claim

CLAIM = """
from tensorwire.membership import hold_claim
hold_claim("a job", 1, "RANK")
print("held", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    drop_claim()


def test_a_rank_is_one_process() -> None:
    command = [sys.executable, "-c", CLAIM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        for _ in range(2):  # the first is not disturbed
            with pytest.raises(RuntimeError, match=f"worker 1 of this job is process {first.pid} "):
                hold_claim("a job", 1, "RANK")
        hold_claim("a job", 2, "RANK")
        hold_claim("another job", 1, "RANK")
        first.communicate(b"\n", timeout=30)
    hold_claim("a job", 1, "RANK")
    hold_claim("a job", 1, "RANK")  # again, in the same process


def test_a_forked_child_keeps_no_claim() -> None:
    """Else data workers that outlive a worker would keep its rank."""
    hold_claim("a job", 1, "RANK")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        drop_claim()
        command = [sys.executable, "-c", CLAIM]
        done = subprocess.run(command, input=b"\n", capture_output=True, timeout=30)
        assert done.stdout == b"held\n", done.stderr
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
