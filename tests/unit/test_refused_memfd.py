"""A container whose seccomp profile refuses memfd_create, as some do."""

import errno
import os
import subprocess
import sys

import pytest

# A filter in classic BPF: the number of the system call, and the answer to it.
REFUSE = """
import ctypes, os, struct
number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | ERRNO), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
assert libc.prctl(22, 2, program, 0, 0) == 0, "seccomp"
try:
    os.memfd_create("refused")
    raise SystemExit("memfd_create was allowed")
except OSError as error:
    assert error.errno == ERRNO
"""

USE = """
import numpy as np
from tensorwire import Node
from tensorwire.errors import UnavailableError
from tensorwire.memory import local_memory, memory_file

for make in (Node, lambda: local_memory(1), lambda: memory_file("file", 1)):
    try:
        make()
        print("made")
    except UnavailableError as error:
        print(error)
with Node(transports=["tcp"]) as one, Node(transports=["tcp"]) as other:
    one.allocate(32, name="r")
    remote = other.connect(one.address).region("r")
    back = np.zeros(4, int)
    remote.write(np.arange(4)).wait(20)
    remote.read(back).wait(20)
    print(back.tolist())
"""


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_memfd_create_is_refused(number: int) -> None:
    program = REFUSE.replace("ERRNO", str(number)) + USE
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *refused, moved = done.stdout.splitlines()
    assert len(refused) == 3
    for line in refused:
        assert line.startswith(f"cannot allocate shared memory: {os.strerror(number)}")
        assert "the seccomp profile of the container has to allow it" in line
    assert moved == "[0, 1, 2, 3]"
