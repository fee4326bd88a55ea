"""Turns facts and figures into findings: what is fine, worth knowing, or wrong.

Pure. A rule is a function that yields findings; thresholds are the constants below. A warning is
something that costs speed on this machine and can be changed; a note is everything else that a
reader should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tensorwire.bench.operations import PYTHON, RAW
from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.facts import Cpu, Facts, Gpus, Rdma, SharedMemory, Tcp
from tensorwire.doctor.measure import LARGE_BYTES
from tensorwire.memory.devices import UCX_REMEDY, Interface, RdmaPort
from tensorwire.memory.path import memory_paths
from tensorwire.memory.path_warning import why_slower

OK, NOTE, WARNING, MISSING = "ok", "note", "warning", "missing"

FASTER = 1.25
"""The least ratio of speeds for a warning: a path that was not chosen to the one that was."""
PROMISE_SHARE = 0.5
"""The least share of the promised speed; a lower one is a warning."""
LIMIT_SHARE = 0.5
"""The least share of the speed of memcpy or a raw socket; a lower one is a warning."""
JUMBO_FROM_GB_PER_S = 25 / 8
"""The promise from which packets of 1500 bytes cost as much as large ones save."""
LAN_ROUND_TRIP_S = 1e-3
"""The round trip that buffers should bridge while nothing was measured."""
LOCKED_BYTES = 1 << 30
DEV_SHM_BYTES = 1 << 30
ONE_CORE_GB_PER_S = 2.0
"""About where one stream is bound by the core that serves it."""

_FOR_ALL = ("cores", "load", "transports")
"""Subjects of notes that matter on any path."""

_CONTROLS = ("cubic", "bbr", "dctcp", "htcp", "reno")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: "ok", "note" or "warning"; "missing" for what an inventory does not find.
        subject: what was looked at.
        text: what was found.
        remedy: one line on what to do, "" when there is nothing to do.
    """

    level: str
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class TriedPath:
    """A way to the peer.

    Attributes:
        name: "shm", "rdma" or "tcp".
        reached: whether it could be had; if not, `reason` says why.
        reason: why it is a way, or is none.
    """

    name: str
    reached: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """The known facts about the way to one peer.

    Attributes:
        address: of the peer.
        alone: the peer was started only to look at this machine, which is judged apart.
        loopback: nothing leaves this machine.
        chosen, reason: the path that is taken when nothing is restricted, and why.
        routes: all paths that were tried.
        here, there: facts of both ends, None where unknown.
        interface_here, interface_there: what packets leave and arrive by, None where unknown.
        offered_there: the transports that the peer offers.
        rows: what was measured.
    """

    address: str
    loopback: bool
    chosen: str
    reason: str
    alone: bool = False
    routes: tuple[TriedPath, ...] = ()
    here: Facts | None = None
    there: Facts | None = None
    interface_here: Interface | None = None
    interface_there: Interface | None = None
    offered_there: tuple[str, ...] = ()
    rows: Sequence[Row] = field(default_factory=tuple)

    @property
    def ends(self) -> list[Facts]:
        """Facts of the ends that are known."""
        return [facts for facts in (self.here, self.there) if facts is not None]

    def find(self, case: str, system: str = PYTHON) -> Row | None:
        """Returns the row of the largest size of a case that was measured; None without one."""
        rows = [r for r in self.rows if r.case == case and r.system == system and r.measured]
        return max(rows, key=lambda row: row.bytes, default=None)

    def promised_gb_per_s(self, path: str) -> float | None:
        """Returns the promised speed of a path by the devices of both ends; None if unknown."""
        promises: list[float | None] = []
        if path == "tcp" and not self.loopback:
            interfaces = (self.interface_here, self.interface_there)
            promises = [each.promised_gb_per_s for each in interfaces if each is not None]
        elif path == "rdma":
            for end in self.ends:
                ports = (port.promised_gb_per_s or 0.0 for port in end.rdma.active)
                promises.append(max(ports, default=0.0))
        return min((promise for promise in promises if promise), default=None)


def worst(findings: Iterable[Finding]) -> str:
    """Returns the gravest level."""
    levels = {finding.level for finding in findings}
    return next((level for level in (WARNING, NOTE) if level in levels), OK)


def _judge(subject: str, text: str, *cases: tuple[object, str, str, str]) -> Finding:
    """Returns the first case (condition, level, text, remedy) that holds, or that all is well."""
    for holds, level, found, remedy in cases:
        if holds:
            return Finding(level, subject, found, remedy)
    return Finding(OK, subject, text)


# --- one machine --------------------------------------------------------------------------------


def about_machine(facts: Facts) -> list[Finding]:
    """Returns the findings about a machine that need no measurement."""
    return [
        *about_cpu(facts.cpu),
        *about_memory(facts.memory),
        *about_restriction(facts.restricted),
        *about_interfaces(facts.interfaces),
        *about_tcp(facts.tcp, facts.interfaces),
        *about_rdma(facts.rdma, facts.transports),
        about_gpus(facts.gpus),
    ]


def about_cpu(cpu: Cpu) -> Iterator[Finding]:
    """Yields the finding about cores, quota and other work."""
    text = f"{cpu.usable} of {cpu.cores} usable"
    if cpu.quota is not None:
        text += f", the control group grants {cpu.quota:g}"
    yield _judge(
        "cores", text,
        (cpu.free < 2, WARNING, f"{text}: both ends of a transfer share one",
         "two cores or more for this process (docker: --cpus=2; Slurm: --cpus-per-task=2)"),
        (cpu.free < cpu.usable, NOTE, f"{text}: long runs are throttled",
         "raise cpu.max or cpu.cfs_quota_us (docker: --cpus; Kubernetes: resources.limits.cpu)"),
    )  # fmt: skip
    if cpu.quota is not None or cpu.threads is not None:
        granted = f"{cpu.free:g} cores"
        share = "1" if cpu.free < 2 else f"{int(cpu.free)} / workers, at least 1"
        yield _judge(
            "threads", f"OMP_NUM_THREADS is {cpu.threads or 'not set'}, on {granted}",
            (cpu.threads is not None and cpu.threads > max(1, cpu.free), NOTE,
             f"each worker takes {cpu.threads} (OMP_NUM_THREADS), more than {granted} can run",
             "unset it under tensorwire run, which divides the cores among its workers; elsewhere "
             f"set it to {share}"),
            (cpu.threads is None and cpu.free < cpu.usable, NOTE,
             f"torch takes {cpu.usable} where nobody tells it otherwise, and {granted} are granted",
             f"tensorwire run divides what is granted; elsewhere set OMP_NUM_THREADS to {share}"),
        )  # fmt: skip
    if cpu.load is not None:
        text = f"{cpu.load:.1f} runnable tasks on {cpu.free:g} cores"
        yield _judge(
            "load", text,
            (cpu.oversubscribed, NOTE, f"{text}: more than they can do",
             "measure when the machine is quiet; in a job, give each process cores of its own"),
        )  # fmt: skip


def about_memory(memory: SharedMemory) -> Iterator[Finding]:
    """Yields the findings about the memory for shm regions."""
    known = [x for x in (memory.available_bytes, memory.group_left_bytes) if x is not None]
    text = "memfd, sealed"
    if known:
        text += f"; {_gib(min(known))} can be had"
    if memory.group_left_bytes is not None and memory.group_left_bytes == min(known):
        text += " (bound by the control group)"
    yield _judge(
        "shared memory", text,
        (memory.fault, WARNING, memory.fault,
         "allow memfd_create and F_ADD_SEALS (Linux 3.17, the seccomp profile of the container)"),
    )  # fmt: skip
    size = memory.dev_shm_bytes
    text = f"{'not mounted' if size is None else _gib(size)}; tensorwire does not use it"
    yield _judge(
        "/dev/shm", text,
        (size is not None and size < DEV_SHM_BYTES, NOTE,
         f"{text}, workers of torch's DataLoader do", "docker: --shm-size=8g, or --ipc=host"),
    )  # fmt: skip
    text = f"for shared memory: {memory.huge_pages or 'unknown'}"
    yield _judge(
        "huge pages", text,
        (memory.huge_pages not in ("always", "within_size", "advise", "force"), NOTE,
         f"{text}; large regions are faster with them",
         "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)"),
    )  # fmt: skip


def about_restriction(restricted: str) -> Iterator[Finding]:
    """Yields a finding if the environment leaves paths out."""
    if restricted:
        text = f"TENSORWIRE_TRANSPORTS allows {restricted} only"
        yield Finding(NOTE, "transports", text, "unset it to use the fastest")


def about_interfaces(interfaces: Iterable[Interface]) -> Iterator[Finding]:
    """Yields a finding for each interface that is up, with its promised speed."""
    for each in interfaces:
        if each.state == "down" and each.carrier is None:
            continue  # switched off: nobody meant to use it
        text = f"{_speed(each)}, mtu {each.mtu}"
        fast = (each.promised_gb_per_s or 0) >= JUMBO_FROM_GB_PER_S
        yield _judge(
            f"interface {each.name}", text,
            (each.physical and each.carrier is False, NOTE, f"{text}, no carrier",
             "plug the cable in, or switch the port on"),
            (each.physical and each.duplex == "half", WARNING, f"{text}, half duplex",
             f"ethtool -s {each.name} autoneg on"),
            (fast and (each.mtu or 9000) < 9000, NOTE, f"{text}: small packets for that speed",
             f"ip link set {each.name} mtu 9000, if all switches and peers do the same"),
        )  # fmt: skip


def about_tcp(tcp: Tcp, interfaces: Iterable[Interface]) -> Iterator[Finding]:
    """Yields findings about buffers for the bandwidth-delay product and congestion control."""
    if tcp.adapts is False:
        yield Finding(
            WARNING, "tcp buffers", "the kernel does not size receive buffers by itself",
            "sysctl -w net.ipv4.tcp_moderate_rcvbuf=1",
        )  # fmt: skip
    window = tcp.window_bytes
    fastest = max((each.promised_gb_per_s or 0.0 for each in interfaces), default=0.0)
    needed = int(fastest * 1e9 * LAN_ROUND_TRIP_S)
    if window is None:
        yield Finding(NOTE, "tcp buffers", "limits cannot be read here")
    else:
        text = f"{_size(window)} can be on its way"
        explicit = ""
        if tcp.explicit_receive_bytes is not None:
            size = _size(tcp.explicit_receive_bytes)
            explicit = f" (net.core.rmem_max, {size}, does not bound that)"
        yield _judge(
            "tcp buffers", f"{text}; the kernel sizes them{explicit}",
            (window < needed, NOTE,
             f"{text}; {fastest * 8:.0f} Gbit/s over a round trip of "
             f"{format_seconds(LAN_ROUND_TRIP_S)} need {_size(needed)}", buffers_remedy(needed)),
        )  # fmt: skip
    if tcp.congestion:
        yield _judge(
            "congestion control", tcp.congestion,
            (tcp.congestion not in _CONTROLS, NOTE, f"{tcp.congestion} is rare in a cluster",
             "sysctl -w net.ipv4.tcp_congestion_control=cubic"),
        )  # fmt: skip


def buffers_remedy(needed: int) -> str:
    """Returns the commands that permit this many bytes to be on their way."""
    most = max(16 << 20, 1 << (2 * needed - 1).bit_length())
    return f'sysctl -w net.ipv4.tcp_rmem="4096 131072 {most}" net.ipv4.tcp_wmem="4096 65536 {most}"'


def about_rdma(rdma: Rdma, transports: Sequence[str]) -> Iterator[Finding]:
    """Yields findings about RDMA devices, the library, permissions and locked memory.

    Without an active port, missing parts are reported but are no fault.
    """
    if not rdma.ports:
        yield Finding(OK, "rdma", "no device under /sys/class/infiniband")
    yield from map(_about_port, rdma.ports)
    if not rdma.active:
        ucx = f"{rdma.ucx} can be loaded" if rdma.ucx else "libucp.so.0 (libucx0) is not installed"
        yield Finding(OK, "UCX", f"{ucx}; only rdma needs it")
    else:
        if "rdma" not in transports:
            yield Finding(NOTE, "rdma", "this tensorwire has no rdma transport; the devices idle")
        text = f"cannot be loaded: {rdma.ucx_fault}"
        yield _judge("UCX", rdma.ucx, (not rdma.ucx, WARNING, text, UCX_REMEDY))
        if not rdma.verbs:
            yield Finding(
                WARNING, "rdma access", "/dev/infiniband/uverbs* cannot be opened",
                "docker: --device=/dev/infiniband; else rights of the group 'rdma'",
            )  # fmt: skip
    yield about_locked_memory(rdma)


def _about_port(port: RdmaPort) -> Finding:
    speed = f"{port.gigabits_per_s:g} Gbit/s" if port.gigabits_per_s else "rate unknown"
    beside = f", shares its wire with {port.netdev}" if port.netdev else ""
    text = f"{port.state}, {speed}, {port.link_layer}, {len(port.gids)} GIDs{beside}"
    infiniband, device = port.link_layer == "InfiniBand", port.netdev or "DEV"
    start = "start a subnet manager (opensm)" if infiniband else f"ip link set {device} up"
    local = all(gid.startswith("fe80") for gid in port.gids)
    return _judge(
        f"rdma {port.device}/{port.port}", text,
        (not port.active, NOTE, text, f"{start}, and look at the cable"),
        (not port.gids or (local and not infiniband), NOTE,
         f"{text}; none of them is of an IP address", f"ip addr add ADDRESS/LENGTH dev {device}"),
    )  # fmt: skip


def about_locked_memory(rdma: Rdma) -> Finding:
    """Returns the finding about the lock limit; a warning if an active device needs more."""
    limit = rdma.locked_bytes
    text = "no limit" if limit is None else f"{_size(limit)} may be locked"
    return _judge(
        "locked memory", text if rdma.active else f"{text}; only rdma needs much",
        (rdma.active and limit is not None and limit < LOCKED_BYTES, WARNING,
         f"{text}; rdma locks every region",
         "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"),
    )  # fmt: skip


def about_gpus(gpus: Gpus) -> Finding:
    """Returns the finding about regions in memory of a GPU; a machine without one is well."""
    if not gpus.cuda:
        return Finding(OK, "GPU", f"none can be used: {gpus.fault}")
    if not gpus.names:
        return Finding(OK, "GPU", f"a driver for CUDA {gpus.cuda}, and no GPU that is seen here")
    counts = (f"{gpus.names.count(name)} x {name}" for name in dict.fromkeys(gpus.names))
    return Finding(OK, "GPU", f"{', '.join(counts)}; a driver for CUDA {gpus.cuda}")


# --- one peer -----------------------------------------------------------------------------------


def about_link(link: LinkFacts) -> list[Finding]:
    """Returns the findings about the way to a peer, with its measurements."""
    return [
        *about_ends(link),
        *about_choice(link),
        *about_unused_rdma(link),
        *about_versions(link),
        *about_mtu(link),
        *about_network(link),
        *about_rdma_speed(link),
        *about_limits(link),
        *about_gpu_paths(link),
    ]


def about_ends(link: LinkFacts) -> Iterator[Finding]:
    """Yields faults of either machine and disturbances of figures; nothing for this one alone."""
    if link.alone:
        return
    for where, facts in (("here", link.here), ("there", None if link.loopback else link.there)):
        for finding in about_machine(facts) if facts is not None else ():
            if finding.level == WARNING or (finding.level == NOTE and finding.subject in _FOR_ALL):
                yield replace(finding, subject=f"{finding.subject} {where}")


def about_choice(link: LinkFacts) -> Iterator[Finding]:
    """Yields the finding about the chosen path, its reason, and a faster one."""
    rdma = link.here.rdma if link.here is not None else Rdma()
    slower = why_slower(link.chosen, link.reason, rdma.ports, bool(rdma.ucx), link.offered_there)
    why = f"{link.chosen}: {link.reason or 'chosen'}"
    if slower is not None:
        yield Finding(WARNING, "path", f"{link.chosen}: {slower.reason}", slower.remedy)
        return
    mine = link.find(f"{link.chosen}.write")
    others = [link.find(f"{r.name}.write") for r in link.routes if r.name != link.chosen]
    # Compared at one size only, else the cache decides.
    best = max(
        (row for row in others if row and mine and row.bytes == mine.bytes),
        key=lambda row: row.gb_per_s or 0.0,
        default=None,
    )
    if mine is None or mine.bytes < LARGE_BYTES or best is None:
        yield Finding(OK, "path", why)
        return
    name = best.case.partition(".")[0]
    yield _judge(
        "path", f"{why}; no other path that was measured is faster",
        ((best.gb_per_s or 0.0) > FASTER * (mine.gb_per_s or 0.0), WARNING,
         f"{why}; but {name} wrote {format_size(mine.bytes)} at {best.gb_per_s:.2f} GB/s and "
         f"{link.chosen} at {mine.gb_per_s:.2f}",
         f"Node(transports=[{name!r}]) or TENSORWIRE_TRANSPORTS={name}"),
    )  # fmt: skip


def about_unused_rdma(link: LinkFacts) -> Iterator[Finding]:
    """Yields a finding if RDMA devices at both ends carry nothing."""
    here, there = link.here, link.there
    tried = next((route for route in link.routes if route.name == "rdma"), None)
    if here is None or there is None or link.loopback or tried is None or tried.reached:
        return
    if link.chosen == "shm" or not here.rdma.active or not there.rdma.active:
        return
    text = f"{here.rdma.active[0].device} here, {there.rdma.active[0].device} there, but "
    for where, facts in (("here", here), ("there", there)):
        if "rdma" not in facts.transports:
            text += f"the tensorwire {where} has no rdma transport"
            yield Finding(NOTE, "unused rdma", text)
            return
        if not facts.rdma.ucx:
            text += f"UCX is missing {where}"
            yield Finding(WARNING, "unused rdma", text, f"{where}: {UCX_REMEDY}")
            return
    yield Finding(
        WARNING, "unused rdma", f"{text}rdma could not be used: {tried.reason}",
        "look at the rdma findings of both machines: 'tensorwire doctor' on each",
    )  # fmt: skip


def about_versions(link: LinkFacts) -> Iterator[Finding]:
    """Yields a finding if the ends have different versions of tensorwire."""
    versions = [end.tensorwire for end in link.ends]
    if len(set(versions)) == 2:
        text = f"tensorwire {versions[0]} here, {versions[1]} there"
        yield Finding(WARNING, "versions", text, "install the same on both sides")


def about_mtu(link: LinkFacts) -> Iterator[Finding]:
    """Yields a finding if one end sends larger packets than the other one takes."""
    here, there = link.interface_here, link.interface_there
    if link.loopback or here is None or there is None or here.mtu is None or there.mtu is None:
        return
    if here.mtu != there.mtu:
        yield Finding(
            WARNING, "mtu", f"{here.mtu} on {here.name} here, {there.mtu} on {there.name} there",
            f"the same on both: ip link set DEV mtu {min(here.mtu, there.mtu)}, or the larger one",
        )  # fmt: skip


def about_network(link: LinkFacts) -> Iterator[Finding]:
    """Yields the findings about TCP's speed, against the interfaces' promise, and its limits."""
    row = link.find("tcp.write")
    if link.loopback or row is None or row.gb_per_s is None or row.bytes < LARGE_BYTES:
        return
    raw = link.find("tcp.write", RAW)
    raw_gb_per_s = raw.gb_per_s if raw is not None and raw.bytes == row.bytes else None
    reached = f"tcp reached {row.gb_per_s * 8:.3g} Gbit/s with {format_size(row.bytes)}"
    promised = link.promised_gb_per_s("tcp")
    name = link.interface_here.name if link.interface_here is not None else "the interface"
    if promised is None:
        text = f"{reached}; {name} promises nothing that can be compared"
        if raw_gb_per_s is not None:
            text += f"; a raw socket reached {raw_gb_per_s * 8:.3g}"
        yield Finding(OK, "network", text)
        return
    share = row.gb_per_s / promised
    text = f"{reached}, {share:.0%} of the {promised * 8:.3g} Gbit/s promised by {name}"
    cause, remedy = _why_slow(link, row.gb_per_s, raw_gb_per_s, promised)
    level = WARNING if link.chosen == "tcp" else NOTE
    yield _judge("network", text, (share < PROMISE_SHARE, level, f"{text}; {cause}", remedy))


def _why_slow(
    link: LinkFacts, gb_per_s: float, raw_gb_per_s: float | None, promised: float
) -> tuple[str, str]:
    """Returns the likeliest cause of a slow network and its remedy, gravest first."""
    latency = link.find("tcp.signal", RAW) or link.find("tcp.signal")
    windows = [end.tcp.window_bytes for end in link.ends if end.tcp.window_bytes is not None]
    if latency is not None and latency.seconds_median is not None and windows:
        needed = int(promised * 1e9 * latency.seconds_median)
        if min(windows) < needed:
            return (
                f"{_size(min(windows))} can be on its way, a round trip of "
                f"{format_seconds(latency.seconds_median)} needs {_size(needed)}",
                buffers_remedy(needed),
            )
    same = "no raw socket was measured beside it"
    if raw_gb_per_s is not None:
        if gb_per_s < LIMIT_SHARE * raw_gb_per_s:
            return (
                f"a raw socket reached {raw_gb_per_s * 8:.3g} Gbit/s, so it is tensorwire",
                "look at cores and load on both sides, then report it with --json",
            )
        same = f"a raw socket reached no more ({raw_gb_per_s * 8:.3g} Gbit/s)"
    interface = link.interface_here
    raw = link.find("tcp.write", RAW)
    if raw is not None and (raw.gb_per_s or 0.0) >= ONE_CORE_GB_PER_S:
        mtu = f", mtu {interface.mtu}" if interface is not None and interface.mtu else ""
        return (
            f"{same}: one stream is bound by one core{mtu}",
            "mtu 9000 on both sides and the switch; rdma; or several processes per host",
        )
    name = interface.name if interface is not None else "DEV"
    return (
        f"{same}: the network, not tensorwire",
        f"other traffic? a limit? ethtool {name}, tc -s qdisc show dev {name}, the switch between",
    )


def about_rdma_speed(link: LinkFacts) -> Iterator[Finding]:
    """Yields the finding about RDMA's speed, against the ports' promise."""
    row, promised = link.find("rdma.write"), link.promised_gb_per_s("rdma")
    if row is None or row.gb_per_s is None or row.bytes < LARGE_BYTES or promised is None:
        return
    share = row.gb_per_s / promised
    text = f"rdma reached {row.gb_per_s * 8:.3g} Gbit/s with {format_size(row.bytes)}, {share:.0%} "
    text += f"of the {promised * 8:.3g} Gbit/s that the ports promise"
    yield _judge(
        "rdma speed", text,
        (share < PROMISE_SHARE, WARNING, text,
         "ib_write_bw between the hosts tells what the devices give; lspci -vv their PCIe width"),
    )  # fmt: skip


def about_limits(link: LinkFacts) -> Iterator[Finding]:
    """Yields a finding about each path beside memcpy or a raw socket in the same processes."""
    for path in (route.name for route in link.routes if route.reached):
        rows = [link.find(f"{path}.{action}") for action in ("write", "read")]
        found = [r for r in rows if r is not None and r.bytes >= LARGE_BYTES and r.ratio_to_limit]
        if not found:
            continue
        slowest = min(found, key=lambda row: row.ratio_to_limit or 0.0)
        share = slowest.ratio_to_limit or 0.0
        action = slowest.case.partition(".")[2]
        limit = "a raw socket" if path == "tcp" else "memcpy"
        text = f"{action} of {format_size(slowest.bytes)} at {share:.0%} of {limit}"
        # Without an interval, or with other work on the cores, it may be chance.
        sure = slowest.ratio_interval is not None and slowest.ratio_interval[1] < LIMIT_SHARE
        busy = any(end.cpu.oversubscribed for end in link.ends)
        yield _judge(
            f"{path} speed", text,
            (share < LIMIT_SHARE and busy, NOTE, text, "measure again when the machine is quiet"),
            (share < LIMIT_SHARE, WARNING if sure else NOTE, text,
             "look at cores and load on both sides; if both are fine, report it with --json"),
        )  # fmt: skip


def about_gpu_paths(link: LinkFacts) -> Iterator[Finding]:
    """Yields findings about the way of GPU memory to the peer, if either end has a GPU."""
    if not any(facts is not None and facts.gpus.names for facts in (link.here, link.there)):
        return
    for path in memory_paths(link.chosen):
        yield _judge(
            f"{path.local} to {path.remote}", path.how,
            (not path.how, NOTE, f"{link.chosen} moves no memory of a GPU",
             "copy to memory of the host, or connect with require='tcp'"),
        )  # fmt: skip


# --- words --------------------------------------------------------------------------------------


def _speed(each: Interface) -> str:
    if each.megabits_per_s is None:
        return "reports no speed" if each.physical else "virtual"
    speed = f"{each.megabits_per_s / 1e3:g} Gbit/s"
    return speed if each.physical else f"virtual ({speed} means nothing)"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"


def _size(size_bytes: int) -> str:
    if size_bytes >= 1 << 20:
        return f"{size_bytes / (1 << 20):.3g} MiB"
    return f"{size_bytes / 1024:.3g} KiB"
