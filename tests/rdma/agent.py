"""The first process of a machine: starts what the host asks for and tells what becomes of it.

Runs in the guest, on the standard library alone. Both directions of the virtio port carry one JSON
object per line; `rig.py` is the other end. Bytes are in base64.

    to the agent                                  to the host
    start id argv env cwd channel                 ready
    signal id number                              started id pid | failed id error
    channel id data, an empty one ends it         out id data, err id data, channel id data
                                                  signalled id error
                                                  exit id code
"""

import base64
import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import time
import traceback
from typing import Any

CHUNK = 1 << 16


def find_port() -> int:
    """Opens the virtio port that is called agent."""
    while True:
        for name in os.listdir("/sys/class/virtio-ports"):
            with open(f"/sys/class/virtio-ports/{name}/name") as file:
                if file.read().strip() == "agent":
                    return os.open(f"/dev/{name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.01)


class Child:
    """A process, the pipes that it writes to, and its channel if it has one."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.id = order["id"]
        self.channel: socket.socket | None = None
        self.to_channel = bytearray()
        self.channel_ends = False
        theirs, fds = None, []
        if order["channel"]:
            self.channel, theirs = socket.socketpair()
            self.channel.setblocking(False)
            fds = [theirs.fileno()]
        try:
            self.process = subprocess.Popen(
                [part.format(channel=fds[0]) if fds else part for part in order["argv"]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=order["env"],
                cwd=order["cwd"],
                pass_fds=fds,
                start_new_session=True,
            )
        except BaseException:
            if self.channel:
                self.channel.close()
            raise
        finally:
            if theirs:
                theirs.close()


class Agent:
    """The loop of the agent."""

    def __init__(self) -> None:
        self.port = find_port()
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, Child] = {}
        self.received = bytearray()
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        self.wake = wake_read, wake_write
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno())
        self.selector.register(self.port, selectors.EVENT_READ, self.on_port)
        self.selector.register(wake_read, selectors.EVENT_READ, self.on_signal)

    def run(self) -> None:
        """Serves until the machine ends."""
        self.tell("ready")
        while True:
            for key, events in self.selector.select():
                key.data(events)

    def tell(self, event: str, **fields: Any) -> None:
        """Writes one line to the host, which always reads."""
        line = memoryview(json.dumps({"event": event, **fields}).encode() + b"\n")
        while line:
            line = line[os.write(self.port, line) :]

    def on_port(self, events: int) -> None:
        data = os.read(self.port, CHUNK)
        if not data:
            time.sleep(0.01)  # nobody has the other end open
        *lines, self.received = (self.received + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            getattr(self, f"do_{order['op']}")(order)

    def do_start(self, order: dict[str, Any]) -> None:
        try:
            child = Child(order)
        except OSError as error:
            self.tell("failed", id=order["id"], error=str(error))
            return
        self.children[child.process.pid] = child
        self.tell("started", id=child.id, pid=child.process.pid)
        for name, pipe in (("out", child.process.stdout), ("err", child.process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(
                pipe, selectors.EVENT_READ, lambda _, n=name, p=pipe: self.forward(child, n, p)
            )
        if child.channel:
            self.selector.register(
                child.channel, selectors.EVENT_READ, lambda events: self.on_channel(child, events)
            )

    def do_signal(self, order: dict[str, Any]) -> None:
        pid = next((p for p, child in self.children.items() if child.id == order["id"]), None)
        error = None
        if pid is not None:  # otherwise it has ended, which the host hears or has heard
            try:
                os.killpg(pid, order["number"])
                if order["number"] == signal.SIGSTOP:
                    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            except OSError as caught:
                error = str(caught)
        self.tell("signalled", id=order["id"], error=error)

    def do_channel(self, order: dict[str, Any]) -> None:
        for child in self.children.values():
            if child.id == order["id"] and child.channel:
                child.to_channel += base64.b64decode(order["data"])
                child.channel_ends |= not order["data"]
                self.feed(child)

    def feed(self, child: Child) -> None:
        """Gives a child what its channel takes; the rest waits for the selector."""
        assert child.channel is not None
        try:
            while child.to_channel:
                del child.to_channel[: child.channel.send(child.to_channel)]
            if child.channel_ends:
                child.channel.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            child.to_channel.clear()  # it reads no more
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.to_channel else 0)
        self.selector.modify(child.channel, wanted, self.selector.get_key(child.channel).data)

    def on_channel(self, child: Child, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.feed(child)
        if events & selectors.EVENT_READ:
            self.forward(child, "channel", child.channel)

    def forward(self, child: Child, name: str, source: Any) -> bool:
        """Passes on one piece; closes the source at its end. Returns whether there was one."""
        if source.closed if name != "channel" else source.fileno() < 0:
            return False  # an event of the same round closed it
        try:
            data = os.read(source.fileno(), CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.tell(name, id=child.id, data=base64.b64encode(data).decode())
        if not data:
            self.selector.unregister(source)
            source.close()
            if name == "channel":
                child.channel = None
        return bool(data)

    def on_signal(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self.wake[0].recv(CHUNK)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is None:
                continue  # an orphan that the first process inherited
            # What it wrote comes first. Its own children may hold the pipes open and write on.
            pipes = [("out", child.process.stdout), ("err", child.process.stderr)]
            for name, source in [*pipes, ("channel", child.channel)]:
                for _ in range(16):
                    if source is None or not self.forward(child, name, source):
                        break
            child.process.returncode = code = os.waitstatus_to_exitcode(status)
            self.tell("exit", id=child.id, code=code)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))
    try:
        Agent().run()
    except BaseException:
        # The end of the first process is a panic of the kernel, and that ends the machine.
        with open("/dev/console", "w") as console:
            traceback.print_exc(file=console)
        raise


if __name__ == "__main__":
    main()
