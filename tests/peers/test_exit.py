"""The end of an interpreter while its threads use Nodes: nothing is printed, nothing crashes."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cold  # in which order an interpreter takes itself apart

HEAD = """
import atexit
late = []  # called at exit, after what tensorwire does then
atexit.register(lambda: [call() for call in late])
import asyncio, signal, socket, subprocess, sys, threading, time
import numpy as np
import tensorwire as tw

FAR = '''
import sys, tensorwire as tw
node = tw.Node("far")
node.allocate(64 << 20, name="memory")
print(node.address, flush=True)
sys.stdin.read()
'''

def start(*runs):
    threads = [threading.Thread(target=run, daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    return threads

def stopped():
    "A peer that takes no byte."
    command = [sys.executable, "-c", FAR]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    print(child.pid, flush=True)
    near = tw.Node("near", transports=["tcp"])
    region = near.connect(child.stdout.readline().strip()).region("memory")
    child.send_signal(signal.SIGSTOP)
    return near, region

ready = threading.Event()
"""

IDLE = """
def run():
    node = tw.Node("idle")
    region = node.allocate(64)
    array = region.array()
    ready.set()
    threading.Event().wait()
start(run)
ready.wait()
"""

WAITING = """
node = tw.Node("waiting")
region = node.allocate(8 * 16)
other = tw.Node("other")
peer = node.connect(other.address)
def wait(i):
    started.release()
    if i % 4 == 0:
        node.accept()
    else:
        region.word(8 * i).wait_until(1, peer=peer if i % 4 == 2 else None)
started = threading.Semaphore(0)
start(*[lambda i=i: wait(i) for i in range(16)])
for _ in range(16):
    started.acquire()
"""

WRITING = """
a, b = tw.Node("a"), tw.Node("b")
b.allocate(4 << 20, name="memory")
remote = a.connect(b.address).region("memory")
def write(size):
    data = np.ones(size, np.uint8)
    while True:
        remote[:size].write(data).wait()
        ready.set()
start(lambda: write(8), lambda: write(100_000), lambda: write(4 << 20))
ready.wait()
"""

IN_FLIGHT = """
near, remote = stopped()
def run():
    transfer = remote.write(np.ones(64 << 20, np.uint8))
    ready.set()
    transfer.wait()
start(run)
ready.wait()
"""

IN_FLIGHT_GLOBAL = """
near, remote = stopped()
region = near.allocate(64 << 20)
transfer = remote.write(region)
word, array = region.word(0), region.array()
transfers = [remote[:8].read(region[8 * i : 8 * i + 8]) for i in range(4)]
"""

ASYNCIO = """
near, remote = stopped()
async def wait(word):
    await word.reached(1)
async def send():
    await remote.write(np.ones(64 << 20, np.uint8))
async def main():
    region = near.allocate(64)
    tasks = [asyncio.create_task(wait(region.word(0))), asyncio.create_task(send())]
    asyncio.get_running_loop().call_later(0.05, ready.set)
    await asyncio.gather(*tasks, wait(region.word(8)))
start(lambda: asyncio.run(main()))
ready.wait()
"""

ASYNCIO_WRITING = """
a, b = tw.Node("a"), tw.Node("b", transports=["tcp"])
b.allocate(1 << 20, name="memory")
remote = a.connect(b.address).region("memory")
async def send():
    data = np.ones(1 << 20, np.uint8)
    while True:
        await remote.write(data)
        ready.set()
async def main():
    await asyncio.gather(send(), send())
start(lambda: asyncio.run(main()))
ready.wait()
"""

CONNECTING = """
mute = socket.create_server(("127.0.0.1", 0))
node = tw.Node("caller")
address = "127.0.0.1:%d" % mute.getsockname()[1]
start(*[lambda: (ready.set(), node.connect(address, timeout_s=30))] * 4)
ready.wait()
time.sleep(0.6)
"""

JOINED = """
node = tw.Node("joined")
word = node.allocate(64).word(0)
def run():
    try:
        ready.set()
        word.wait_until(1)
    finally:
        print("cleaned up", flush=True)
(thread,) = start(run)
ready.wait()
late += [lambda: thread.join(30), lambda: print("joined:", not thread.is_alive(), flush=True)]
"""

PROGRAMS = {
    "idle": IDLE,
    "waiting": WAITING,
    "writing": WRITING,
    "in flight": IN_FLIGHT,
    "in flight, of globals": IN_FLIGHT_GLOBAL,
    "connecting": CONNECTING,
    "asyncio": ASYNCIO,
    "asyncio, writing": ASYNCIO_WRITING,
}


def run(program: str) -> list[str]:
    """Lines that it prints."""
    command = [sys.executable, "-c", HEAD + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.isdecimal():
            os.kill(int(line), signal.SIGKILL)
    assert (done.returncode, done.stderr) == (0, "")
    return lines


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_daemon_threads_at_exit(program: str) -> None:
    """Named for two bugs: a report of leaks, and errors of threads that were not asked to end."""
    run(program)


def test_a_daemon_thread_ends_its_own_way_at_exit() -> None:
    """The thread runs its `finally`, and can be joined."""
    assert run(JOINED) == ["cleaned up", "joined: True"]
