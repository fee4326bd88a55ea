"""Two hosts in a box: machines under QEMU, each with a soft-RoCE device, on a network of their own.

The machines see the file system of this host at the same paths and write into a layer of their own,
in memory. Commands run there through `agent.py`. Nothing here needs root, a NIC or KVM.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import image
from commands import MachineOffError, Process, RigError

ROOT = image.ROOT
QEMU = "qemu-system-x86_64"
MTU = 9000  # room for 4096, the most that an RDMA packet carries
MEMORY_MIB = 2048  # taken as it is touched
BOOT_S = 100.0
# On a busy host an emulated machine gets its timers late. The kernel must not panic for it
# (no_timer_check), nor measure its clocks against each other and then run several times too fast
# (hpet, nolapic_timer: clocks whose frequency is known).
BOOT_OPTIONS = (
    "console=ttyS0 quiet panic=-1 no_timer_check clocksource=hpet nolapic_timer mitigations=off "
    "random.trust_cpu=on"
)
POWERED_OFF = "it was powered off"
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

# In the machine, once its agent answers.
SETUP = """
set -e
hostname {name}
ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default dev eth0
rdma link add rxe0 type rxe netdev eth0
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none share {share}
until rdma link show rxe0/1 | grep -q 'state ACTIVE'; do sleep 0.05; done
"""


class Machine:
    """One machine. It can be powered off and booted again; what it wrote to its root is then gone.

    Attributes:
        name: "a" or "b"; its host name.
        address: on the network of the rig.
        device: its RDMA device.
        why_off: why it is off; empty while it is on.
        boot_s: how long the last boot took.
    """

    device = "rxe0"

    def __init__(self, rig: "Rig", index: int) -> None:
        self.rig = rig
        self.index = index
        self.name = "ab"[index]
        self.address = f"10.86.0.{index + 1}"
        self.log = image.BUILD / f"{rig.name}-{self.name}.log"
        self.changed = threading.Condition(threading.RLock())
        self.why_off = "it was not booted"
        self.boot_s = 0.0
        self.processes: dict[int, Process] = {}
        self._ids = 0
        self._ready = False
        self._qemu: subprocess.Popen[bytes] | None = None
        self._agent: socket.socket | None = None
        self._monitor: Any = None
        self._reader: threading.Thread | None = None
        self._sending = threading.Lock()

    def __repr__(self) -> str:
        return f"<machine {self.name} {self.address} {self.why_off or 'on'}>"

    @property
    def is_on(self) -> bool:
        return not self.why_off

    @property
    def qemu_pid(self) -> int:
        """The process of this host that is the machine."""
        assert self._qemu is not None
        return self._qemu.pid

    def boot(self) -> None:
        """Starts the machine and waits until commands can run in it.

        The machine lives at most as long as the thread that calls this.

        Raises:
            RigError: it does not come up; the message has the end of its console.
        """
        started = time.monotonic()
        self.start_boot()
        self.finish_boot()
        self.boot_s = time.monotonic() - started

    def start_boot(self) -> None:
        """The first half of `boot`, so that both machines can boot at once."""
        assert self.why_off, f"{self!r} is on"
        agent, agent_theirs = socket.socketpair()
        monitor, monitor_theirs = socket.socketpair()
        self._agent, self._ready = agent, False
        self._monitor = monitor.makefile("rwb", buffering=0)
        with agent_theirs, monitor, monitor_theirs:
            fds = self.rig.wire[self.index].fileno(), agent_theirs.fileno(), monitor_theirs.fileno()
            parent = os.getpid()

            def die_with_parent() -> None:
                LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)

            with open(f"{self.log}.qemu", "wb") as log:
                self._qemu = subprocess.Popen(
                    self._command(*fds), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    pass_fds=fds, preexec_fn=die_with_parent, process_group=0,
                )  # fmt: skip
        self.why_off = ""
        self._reader = threading.Thread(
            target=self._read, args=(agent, self._qemu), name=f"rig {self.name}", daemon=True
        )
        self._reader.start()

    def finish_boot(self) -> None:
        """The second half of `boot`."""
        with self.changed:
            self.changed.wait_for(lambda: self._ready or self.why_off, BOOT_S)
            if self.why_off or not self._ready:
                why = self.why_off or f"it is silent after {BOOT_S:g} s; {self._console()}"
                raise RigError(f"machine {self.name} does not boot: {why}")
        self.monitor("qmp_capabilities")
        values = {"name": self.name, "address": self.address, "share": self.rig.share}
        self.run(["sh", "-c", SETUP.format(**values)])

    def start(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
    ) -> Process:
        """Starts a command.

        Args:
            argv: the program and its arguments; the program is looked up in PATH.
            env: more variables than PATH, HOME and LANG, or other values for them.
            cwd: its folder.

        Raises:
            RigError: it cannot be started.
            MachineOffError: the machine is off.
        """
        return self._start(argv, env, cwd, channel=False)

    def start_with_channel(
        self, argv: list[str], *, env: Mapping[str, str] | None = None
    ) -> tuple[Process, socket.socket]:
        """Starts a command that has a socket to this process.

        `{channel}` in its arguments becomes the descriptor's number there.
        """
        process = self._start(argv, env, ROOT, channel=True)
        return process, process.open_channel()

    def run(
        self,
        argv: list[str],
        timeout_s: float = 60.0,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
    ) -> str:
        """Runs a command to its good end and returns what it wrote to its standard output.

        Raises:
            RigError: it failed; the message has what it wrote.
        """
        with self.start(argv, env=env, cwd=cwd) as process:
            return process.check(timeout_s)

    def python(
        self, program: str | Path, *arguments: object, env: Mapping[str, str] | None = None
    ) -> Process:
        """Starts a Python program with this interpreter and the search path of this process.

        Args:
            program: the path of a file, or the name of a module.
            arguments: of the program.
            env: as for `start`.
        """
        text = str(program)
        target = [text] if text.endswith(".py") else ["-m", text]
        argv = [sys.executable, "-u", *target, *map(str, arguments)]
        return self.start(argv, env={**python_environment(), **(env or {})})

    def power_off(self) -> None:
        """Takes the power away: the machine is gone at once and says nothing to anybody."""
        self._end()
        self.why_off = POWERED_OFF

    def link(self, up: bool) -> None:
        """Pulls the network cable out, or plugs it in."""
        self.monitor("set_link", name="net", up=up)

    def monitor(self, command: str, **arguments: Any) -> Any:
        """Runs a command of QEMU's monitor (QMP)."""
        if self._monitor is None or self.why_off:
            raise MachineOffError(f"{self!r}")
        order: dict[str, Any] = {"execute": command, "arguments": arguments}
        self._monitor.write(json.dumps(order).encode() + b"\n")
        while line := self._monitor.readline():
            answer = json.loads(line)  # or a greeting, or an event
            if "error" in answer:
                raise RigError(f"{command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise MachineOffError(f"{self!r} ended")

    def order(self, op: str, **fields: Any) -> None:
        """Sends one line to the agent."""
        agent = self._agent
        if self.why_off or agent is None:
            raise MachineOffError(f"machine {self.name} is off: {self.why_off}")
        line = json.dumps({"op": op, **fields}).encode() + b"\n"
        with self._sending:
            try:
                agent.sendall(line)
            except OSError as error:
                raise MachineOffError(f"machine {self.name} takes no orders: {error}") from error

    def _start(
        self, argv: list[str], env: Mapping[str, str] | None, cwd: str | Path, channel: bool
    ) -> Process:
        environment = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "HOME": "/root",
                       "LANG": "C.UTF-8", **(env or {})}  # fmt: skip
        with self.changed:
            self._ids += 1
            process = Process(self, self._ids, list(argv))
            fields = {"argv": process.argv, "env": environment, "cwd": str(cwd)}
            self.order("start", id=self._ids, channel=channel, **fields)
            self.processes[self._ids] = process
        process._wait_for(lambda: process.pid or process._failure, 30.0, "it did not start")
        if process._failure:
            del self.processes[process._id]
            raise RigError(f"{shlex.join(argv)} in machine {self.name}: {process._failure}")
        return process

    def _command(self, wire: int, agent: int, monitor: int) -> list[str]:
        files = "security_model=none,multidevs=remap"
        return [
            shutil.which(QEMU) or QEMU, "-name", f"rig-{self.name}", "-no-user-config",
            "-nodefaults", "-display", "none", "-no-reboot",
            "-machine", "pc", "-accel", "tcg", "-cpu", "max", "-m", str(self.rig.memory_mib),
            "-kernel", str(self.rig.image.kernel), "-initrd", str(self.rig.image.initramfs),
            "-append", BOOT_OPTIONS,
            "-serial", f"file:{self.log}",
            "-virtfs", f"local,path=/,mount_tag=host,readonly=on,{files}",
            "-virtfs", f"local,path={self.rig.share},mount_tag=share,{files}",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,fd={agent}",
            "-device", "virtserialport,chardev=agent,name=agent",
            "-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "monitor,mode=control",
            "-netdev", f"dgram,id=net,local.type=fd,local.str={wire}",
            "-device", f"virtio-net-pci,netdev=net,mac=52:54:00:86:00:0{self.index + 1},"
                       f"host_mtu={MTU},romfile=",
        ]  # fmt: skip

    def _read(self, agent: socket.socket, qemu: subprocess.Popen[bytes]) -> None:
        """Body of the thread that hears the agent."""
        received = bytearray()
        with contextlib.suppress(OSError):
            while data := agent.recv(1 << 18):
                received += data
                *lines, received = received.split(b"\n")
                with self.changed:
                    for line in lines:
                        self._on_event(json.loads(line))
                    self.changed.notify_all()
        qemu.wait()
        with self.changed:
            if not self.why_off:
                self.why_off = f"it ended by itself ({qemu.returncode}); {self._console()}"
            for process in self.processes.values():
                process.on_lost()
            self.processes.clear()
            self.changed.notify_all()

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self._ready = True
            return
        process = self.processes.get(event["id"])
        if process is None:
            return
        getattr(process, f"on_{event['event']}")(event)

    def _end(self) -> None:
        if self._qemu is None:
            return
        with self.changed:
            self.why_off = self.why_off or POWERED_OFF
        self._qemu.kill()
        self._qemu.wait()
        assert self._agent is not None
        assert self._reader is not None
        with contextlib.suppress(OSError):
            self._agent.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._agent.close()
        self._monitor.close()
        self._qemu = self._agent = self._monitor = self._reader = None

    def _console(self) -> str:
        """The end of what its kernel and QEMU wrote; of a panic all, however long its trace is."""
        texts = []
        for path in (self.log, Path(f"{self.log}.qemu")):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").splitlines()
                panics = (at for at, line in enumerate(lines) if "Kernel panic" in line)
                texts += lines[min(max(0, len(lines) - 40), next(panics, len(lines))) :]
        return f"the end of {self.log}:\n" + "\n".join(texts)


class Rig:
    """Both machines and what joins them. As a context: on in the block, gone after it.

    Args:
        name: of its logs in build/rig.
        memory_mib: of each machine.

    Attributes:
        machines: the two.
        share: a folder of this host that both machines can write to, at the same path.
    """

    def __init__(self, name: str = "rig", memory_mib: int = MEMORY_MIB) -> None:
        if shutil.which(QEMU) is None:
            raise RigError(f"{QEMU} is missing: apt-get install qemu-system-x86")
        self.name = name
        self.memory_mib = memory_mib
        self.image = image.image()
        self.share = image.BUILD / f"{name}-share"
        self._lock = open(image.BUILD / f"{name}-lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise RigError(f"a rig named {name!r} runs already in this tree") from None
        shutil.rmtree(self.share, ignore_errors=True)
        self.share.mkdir()
        self.wire = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for end in self.wire:
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        self.machines = [Machine(self, index) for index in range(2)]
        self._closing = threading.Event()
        self._drain = threading.Thread(target=self._drain_off, name="rig wire", daemon=True)
        self._drain.start()

    def boot(self) -> None:
        """Boots every machine that is off."""
        off = [machine for machine in self.machines if machine.why_off]
        started = time.monotonic()
        for machine in off:
            machine.start_boot()
        for machine in off:
            machine.finish_boot()
            machine.boot_s = time.monotonic() - started

    def close(self) -> None:
        """Ends both machines; nothing is left but the logs."""
        for machine in self.machines:
            machine.power_off()
        self._closing.set()
        self._drain.join()
        for end in self.wire:
            end.close()
        shutil.rmtree(self.share, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> "Rig":
        try:
            self.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _drain_off(self) -> None:
        """Body of a thread: frames to a machine that is off are lost, as on a real wire."""
        while not self._closing.wait(0.05):
            for machine, end in zip(self.machines, self.wire, strict=True):
                with contextlib.suppress(BlockingIOError):
                    while machine.why_off:
                        end.recv(1 << 17)


def python_environment() -> dict[str, str]:
    """Returns the environment in which Python in a machine can import this process's modules."""
    path = os.pathsep.join(path for path in sys.path if path)
    return {"PYTHONPATH": path, "TENSORWIRE_TESTS_MODULES": "numpy"}  # torch takes a minute there
