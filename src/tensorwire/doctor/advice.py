"""Facts and figures in, findings out: what is fine, what is worth knowing, what is wrong.

Pure. A rule is a function that yields findings; thresholds are the constants below. A warning is
something that costs speed on this machine and can be changed; a note is everything else that a
reader should know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tensorwire.bench.rows import Row, format_seconds, format_size
from tensorwire.doctor.facts import Cpu, Facts, Rdma, SharedMemory, Tcp
from tensorwire.doctor.measure import LARGE_BYTES, OWN, RAW
from tensorwire.memory.devices import UCX_REMEDY, Interface
from tensorwire.memory.path_warning import why_slower

OK, NOTE, WARNING = "ok", "note", "warning"

FASTER = 1.25
"""A path that was not chosen must be so many times as fast before it is worth a warning."""
PROMISE_SHARE = 0.5
"""Less of the promised speed is a warning."""
LIMIT_SHARE = 0.5
"""Less of what memcpy or a raw socket reaches is a warning."""
JUMBO_FROM_GB_PER_S = 25 / 8
"""From this promise on, packets of 1500 bytes cost what large ones save."""
LAN_ROUND_TRIP_S = 1e-3
"""What buffers should bridge while nothing was measured."""
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
        level: "ok", "note" or "warning".
        subject: what was looked at.
        text: what was found.
        remedy: one line on what to do, "" when there is nothing to do.
    """

    level: str
    subject: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Route:
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
class Link:
    """What is known about the way to one peer.

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
    routes: tuple[Route, ...] = ()
    here: Facts | None = None
    there: Facts | None = None
    interface_here: Interface | None = None
    interface_there: Interface | None = None
    offered_there: frozenset[str] = frozenset()
    rows: Sequence[Row] = field(default_factory=tuple)

    def find(self, case: str, system: str = OWN) -> Row | None:
        """The largest size of a case that was measured."""
        rows = [r for r in self.rows if r.case == case and r.system == system and r.measured]
        return max(rows, key=lambda row: row.bytes, default=None)

    def promised_gb_per_s(self, path: str) -> float | None:
        """What the devices of both ends promise on a path; None where nobody promises."""
        if path == "tcp" and not self.loopback:
            ends = [self.interface_here, self.interface_there]
            found = [end.promised_gb_per_s for end in ends if end is not None]
        elif path == "rdma":
            ends_ = [facts.rdma.active for facts in (self.here, self.there) if facts is not None]
            found = [max((p.promised_gb_per_s or 0.0 for p in e), default=0.0) for e in ends_]
        else:
            return None
        return min((promise for promise in found if promise), default=None)


def worst(findings: Iterable[Finding]) -> str:
    """The gravest level."""
    levels = {finding.level for finding in findings}
    return next((level for level in (WARNING, NOTE) if level in levels), OK)


# --- one machine --------------------------------------------------------------------------------


def about_machine(facts: Facts) -> list[Finding]:
    """What can be said of a machine before anything was measured."""
    return [
        *about_cpu(facts.cpu),
        *about_memory(facts.memory),
        *about_restriction(facts.restricted),
        *about_interfaces(facts.interfaces),
        *about_tcp(facts.tcp, facts.interfaces),
        *about_rdma(facts.rdma, facts.transports),
    ]


def about_cpu(cpu: Cpu) -> Iterator[Finding]:
    """Cores, quota, other work."""
    free = cpu.free
    text = f"{cpu.usable} of {cpu.cores} usable"
    if cpu.quota is not None:
        text += f", the control group grants {cpu.quota:g}"
    if free < 2:
        yield Finding(
            WARNING, "cores", f"{text}: both ends of a transfer share one",
            "two cores or more for this process (docker: --cpus=2; Slurm: --cpus-per-task=2)",
        )  # fmt: skip
    elif cpu.quota is not None and cpu.quota < cpu.usable:
        yield Finding(
            NOTE, "cores", f"{text}: long runs are throttled",
            "start no more threads than the group grants (OMP_NUM_THREADS), or raise its cpu.max",
        )  # fmt: skip
    else:
        yield Finding(OK, "cores", text)
    if cpu.load is None:
        return
    text = f"{cpu.load:.1f} runnable tasks on {free:g} cores"
    if cpu.oversubscribed:
        yield Finding(
            NOTE, "load", f"{text}: more than they can do",
            "measure when the machine is quiet; in a job, give each process cores of its own",
        )  # fmt: skip
    else:
        yield Finding(OK, "load", text)


def about_memory(memory: SharedMemory) -> Iterator[Finding]:
    """What shm regions are made of."""
    if memory.fault:
        yield Finding(
            WARNING, "shared memory", memory.fault,
            "allow memfd_create and F_ADD_SEALS (Linux 3.17, the seccomp profile of the container)",
        )  # fmt: skip
    else:
        known = [x for x in (memory.available_bytes, memory.group_left_bytes) if x is not None]
        text = "memfd, sealed"
        if known:
            text += f"; {_gib(min(known))} can be had"
        if memory.group_left_bytes is not None and memory.group_left_bytes == min(known):
            text += " (bound by the control group)"
        yield Finding(OK, "shared memory", text)
    if memory.dev_shm_bytes is None:
        yield Finding(OK, "/dev/shm", "not mounted; tensorwire does not use it")
    elif memory.dev_shm_bytes >= DEV_SHM_BYTES:
        yield Finding(OK, "/dev/shm", f"{_gib(memory.dev_shm_bytes)}; tensorwire does not use it")
    else:
        yield Finding(
            NOTE, "/dev/shm", f"{_gib(memory.dev_shm_bytes)}; tensorwire does not use it, workers "
            "of torch's DataLoader do", "docker: --shm-size=8g, or --ipc=host",
        )  # fmt: skip
    if memory.huge_pages in ("always", "within_size", "advise", "force"):
        yield Finding(OK, "huge pages", f"for shared memory: {memory.huge_pages}")
    else:
        yield Finding(
            NOTE, "huge pages", f"for shared memory: {memory.huge_pages or 'unknown'}; large "
            "regions are faster with them",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root)",
        )  # fmt: skip


def about_restriction(restricted: str) -> Iterator[Finding]:
    """The environment leaves paths out."""
    if restricted:
        yield Finding(
            NOTE, "transports", f"TENSORWIRE_TRANSPORTS allows {restricted} only",
            "unset it to use the fastest",
        )  # fmt: skip


def about_interfaces(interfaces: Iterable[Interface]) -> Iterator[Finding]:
    """Each interface that is up, with what it promises."""
    for each in interfaces:
        if each.state == "down" and each.carrier is None:
            continue  # switched off: nobody meant to use it
        subject = f"interface {each.name}"
        text = f"{_speed(each)}, mtu {each.mtu}"
        if each.physical and each.carrier is False:
            yield Finding(
                NOTE, subject, f"{text}, no carrier", "plug the cable in, or switch the port on"
            )
        elif each.physical and each.duplex == "half":
            yield Finding(
                WARNING, subject, f"{text}, half duplex", f"ethtool -s {each.name} autoneg on"
            )
        elif (each.promised_gb_per_s or 0) >= JUMBO_FROM_GB_PER_S and (each.mtu or 9000) < 9000:
            yield Finding(
                NOTE, subject, f"{text}: small packets for that speed",
                f"ip link set {each.name} mtu 9000, if all switches and peers do the same",
            )  # fmt: skip
        else:
            yield Finding(OK, subject, text)


def about_tcp(tcp: Tcp, interfaces: Iterable[Interface]) -> Iterator[Finding]:
    """Buffers against the bandwidth-delay product, and congestion control."""
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
    elif window < needed:
        yield Finding(
            NOTE, "tcp buffers",
            f"{_size(window)} can be on its way; {fastest * 8:.0f} Gbit/s over a round trip of "
            f"{format_seconds(LAN_ROUND_TRIP_S)} need {_size(needed)}",
            buffers_remedy(needed),
        )  # fmt: skip
    else:
        explicit = tcp.explicit_receive_bytes
        text = f"{_size(window)} can be on its way; the kernel sizes them"
        if explicit is not None:
            text += f" (net.core.rmem_max, {_size(explicit)}, does not bound that)"
        yield Finding(OK, "tcp buffers", text)
    if tcp.congestion and tcp.congestion not in _CONTROLS:
        yield Finding(
            NOTE, "congestion control", f"{tcp.congestion} is rare in a cluster",
            "sysctl -w net.ipv4.tcp_congestion_control=cubic",
        )  # fmt: skip
    elif tcp.congestion:
        yield Finding(OK, "congestion control", tcp.congestion)


def buffers_remedy(needed: int) -> str:
    """The commands that let so many bytes be on their way."""
    most = max(16 << 20, 1 << (2 * needed - 1).bit_length())
    return f'sysctl -w net.ipv4.tcp_rmem="4096 131072 {most}" net.ipv4.tcp_wmem="4096 65536 {most}"'


def about_rdma(rdma: Rdma, transports: Sequence[str]) -> Iterator[Finding]:
    """Devices, the library, permissions, locked memory."""
    if not rdma.active:
        yield from _about_idle_rdma(rdma)
    for port in rdma.ports:
        subject = f"rdma {port.device}/{port.port}"
        speed = f"{port.gigabits_per_s:g} Gbit/s" if port.gigabits_per_s else "rate unknown"
        beside = f", shares its wire with {port.netdev}" if port.netdev else ""
        text = f"{port.state}, {speed}, {port.link_layer}, {len(port.gids)} GIDs{beside}"
        if not port.active:
            remedy = (
                "start a subnet manager (opensm), and look at the cable"
                if port.link_layer == "InfiniBand"
                else f"ip link set {port.netdev or 'DEV'} up, and look at the cable"
            )
            yield Finding(NOTE, subject, text, remedy)
        elif not port.gids or not (port.link_layer == "InfiniBand" or _has_ip_gid(port.gids)):
            yield Finding(
                NOTE, subject, f"{text}; none of them is of an IP address",
                f"ip addr add ADDRESS/LENGTH dev {port.netdev or 'DEV'}",
            )  # fmt: skip
        else:
            yield Finding(OK, subject, text)
    if not rdma.active:
        return
    if "rdma" not in transports:
        yield Finding(NOTE, "rdma", "this tensorwire has no rdma transport; the devices idle")
    if not rdma.ucx:
        yield Finding(WARNING, "UCX", f"cannot be loaded: {rdma.ucx_fault}", UCX_REMEDY)
    else:
        yield Finding(OK, "UCX", rdma.ucx)
    if not rdma.verbs:
        yield Finding(
            WARNING, "rdma access", "/dev/infiniband/uverbs* cannot be opened",
            "docker: --device=/dev/infiniband; else rights of the group 'rdma'",
        )  # fmt: skip
    yield about_locked_memory(rdma)


def _about_idle_rdma(rdma: Rdma) -> Iterator[Finding]:
    """Without an active port the rest is told, and nothing of it is wrong."""
    if not rdma.ports:
        yield Finding(OK, "rdma", "no device under /sys/class/infiniband")
    version = f"{rdma.ucx} can be loaded" if rdma.ucx else "libucp.so.0 (libucx0) is not installed"
    yield Finding(OK, "UCX", f"{version}; only rdma needs it")
    yield about_locked_memory(rdma)


def about_locked_memory(rdma: Rdma) -> Finding:
    """How much may be locked; a warning where a device is active, which needs it."""
    limit = rdma.locked_bytes
    text = "no limit" if limit is None else f"{_size(limit)} may be locked"
    if not rdma.active:
        return Finding(OK, "locked memory", f"{text}; only rdma needs much")
    if limit is None or limit >= LOCKED_BYTES:
        return Finding(OK, "locked memory", text)
    return Finding(
        WARNING, "locked memory", f"{text}; rdma locks every region",
        "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
    )  # fmt: skip


def _has_ip_gid(gids: Iterable[str]) -> bool:
    return any(not gid.startswith("fe80") for gid in gids)


# --- one peer -----------------------------------------------------------------------------------


def about_link(link: Link) -> list[Finding]:
    """What can be said of the way to a peer, with what was measured on it."""
    return [
        *about_ends(link),
        *about_choice(link),
        *about_unused_rdma(link),
        *about_versions(link),
        *about_mtu(link),
        *about_network(link),
        *about_rdma_speed(link),
        *about_limits(link),
    ]


def about_ends(link: Link) -> Iterator[Finding]:
    """What is wrong with either machine, and what disturbs figures. Nothing for this one alone."""
    if link.alone:
        return
    ends = [("here", link.here), ("there", None if link.loopback else link.there)]
    for where, facts in ends:
        for finding in about_machine(facts) if facts is not None else ():
            if finding.level == WARNING or (finding.level == NOTE and finding.subject in _FOR_ALL):
                yield replace(finding, subject=f"{finding.subject} {where}")


def about_choice(link: Link) -> Iterator[Finding]:
    """Why this path, and whether it is the fastest."""
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
    elif (best.gb_per_s or 0.0) > FASTER * (mine.gb_per_s or 0.0):
        name = best.case.partition(".")[0]
        yield Finding(
            WARNING, "path", f"{why}; but {name} wrote {format_size(mine.bytes)} at "
            f"{best.gb_per_s:.2f} GB/s and {link.chosen} at {mine.gb_per_s:.2f}",
            f"Node(transports=[{name!r}]) or TENSORWIRE_TRANSPORTS={name}",
        )  # fmt: skip
    else:
        yield Finding(OK, "path", f"{why}; no other path that was measured is faster")


def about_unused_rdma(link: Link) -> Iterator[Finding]:
    """RDMA devices at both ends that carry nothing."""
    here, there = link.here, link.there
    tried = next((route for route in link.routes if route.name == "rdma"), None)
    if here is None or there is None or link.loopback or tried is None or tried.reached:
        return
    if link.chosen == "shm":
        return
    if not here.rdma.active or not there.rdma.active:
        return
    devices = f"{here.rdma.active[0].device} here, {there.rdma.active[0].device} there"
    for where, facts in (("here", here), ("there", there)):
        if "rdma" not in facts.transports:
            text = f"{devices}, but the tensorwire {where} has no rdma transport"
            yield Finding(NOTE, "unused rdma", text)
            return
        if not facts.rdma.ucx:
            text = f"{devices}, but UCX is missing {where}"
            yield Finding(WARNING, "unused rdma", text, f"{where}: {UCX_REMEDY}")
            return
    yield Finding(
        WARNING, "unused rdma", f"{devices}, but rdma could not be used: {tried.reason}",
        "look at the rdma findings of both machines: 'tensorwire doctor' on each",
    )  # fmt: skip


def about_versions(link: Link) -> Iterator[Finding]:
    """Two versions of tensorwire."""
    if link.here is None or link.there is None:
        return
    if link.here.tensorwire != link.there.tensorwire:
        yield Finding(
            WARNING, "versions", f"tensorwire {link.here.tensorwire} here, "
            f"{link.there.tensorwire} there", "install the same on both sides",
        )  # fmt: skip


def about_mtu(link: Link) -> Iterator[Finding]:
    """Packets that one end sends and the other does not take."""
    here, there = link.interface_here, link.interface_there
    if link.loopback or here is None or there is None or here.mtu is None or there.mtu is None:
        return
    if here.mtu != there.mtu:
        yield Finding(
            WARNING, "mtu", f"{here.mtu} on {here.name} here, {there.mtu} on {there.name} there",
            f"the same on both: ip link set DEV mtu {min(here.mtu, there.mtu)}, or the larger one",
        )  # fmt: skip


def about_network(link: Link) -> Iterator[Finding]:
    """What TCP reached of what the interfaces promise, and what holds it back."""
    row = link.find("tcp.write")
    if link.loopback or row is None or row.gb_per_s is None or row.bytes < LARGE_BYTES:
        return
    raw = link.find("tcp.write", RAW)
    reached = f"{row.gb_per_s * 8:.3g} Gbit/s with {format_size(row.bytes)}"
    promised = link.promised_gb_per_s("tcp")
    name = link.interface_here.name if link.interface_here is not None else "the interface"
    if promised is None:
        text = f"tcp reached {reached}; {name} promises nothing that can be compared"
        beside = ""
        if raw is not None and raw.gb_per_s is not None and raw.bytes == row.bytes:
            beside = f"; a raw socket reached {raw.gb_per_s * 8:.3g}"
        yield Finding(OK, "network", text + beside)
        return
    share = row.gb_per_s / promised
    text = f"tcp reached {reached}, {share:.0%} of the {promised * 8:.3g} Gbit/s promised by {name}"
    if share >= PROMISE_SHARE:
        yield Finding(OK, "network", text)
        return
    cause, remedy = _why_slow(link, row, raw, promised)
    level = WARNING if link.chosen == "tcp" else NOTE
    yield Finding(level, "network", f"{text}; {cause}", remedy)


def _why_slow(link: Link, row: Row, raw: Row | None, promised: float) -> tuple[str, str]:
    """The likeliest cause and its remedy, gravest first."""
    assert row.gb_per_s is not None
    latency = link.find("tcp.signal", RAW) or link.find("tcp.signal")
    ends = [facts for facts in (link.here, link.there) if facts is not None]
    windows = [end.tcp.window_bytes for end in ends if end.tcp.window_bytes is not None]
    if latency is not None and latency.seconds_median is not None and windows:
        needed = int(promised * 1e9 * latency.seconds_median)
        if min(windows) < needed:
            return (
                f"{_size(min(windows))} can be on its way, a round trip of "
                f"{format_seconds(latency.seconds_median)} needs {_size(needed)}",
                buffers_remedy(needed),
            )
    if raw is not None and raw.gb_per_s is not None and raw.bytes == row.bytes:
        if row.gb_per_s < LIMIT_SHARE * raw.gb_per_s:
            return (
                f"a raw socket reached {raw.gb_per_s * 8:.3g} Gbit/s, so it is tensorwire",
                "look at cores and load on both sides, then report it with --json",
            )
        same = f"a raw socket reached no more ({raw.gb_per_s * 8:.3g} Gbit/s)"
    else:
        same = "no raw socket was measured beside it"
    interface = link.interface_here
    if raw is not None and (raw.gb_per_s or 0.0) >= ONE_CORE_GB_PER_S:
        mtu = interface.mtu if interface is not None else None
        return (
            f"{same}: one stream is bound by one core" + (f", mtu {mtu}" if mtu else ""),
            "mtu 9000 on both sides and the switch; rdma; or several processes per host",
        )
    name = interface.name if interface is not None else "DEV"
    return (
        f"{same}: the network, not tensorwire",
        f"other traffic? a limit? ethtool {name}, tc -s qdisc show dev {name}, the switch between",
    )


def about_rdma_speed(link: Link) -> Iterator[Finding]:
    """What RDMA reached of what the ports promise."""
    row, promised = link.find("rdma.write"), link.promised_gb_per_s("rdma")
    if row is None or row.gb_per_s is None or row.bytes < LARGE_BYTES or promised is None:
        return
    share = row.gb_per_s / promised
    text = f"rdma reached {row.gb_per_s * 8:.3g} Gbit/s with {format_size(row.bytes)}, {share:.0%} "
    text += f"of the {promised * 8:.3g} Gbit/s that the ports promise"
    if share >= PROMISE_SHARE:
        yield Finding(OK, "rdma speed", text)
        return
    yield Finding(
        WARNING, "rdma speed", text,
        "ib_write_bw between the hosts tells what the devices give; lspci -vv their PCIe width",
    )  # fmt: skip


def about_limits(link: Link) -> Iterator[Finding]:
    """Each path beside memcpy or a raw socket in the same processes."""
    for route in link.routes:
        if not route.reached:
            continue
        rows = [link.find(f"{route.name}.{action}") for action in ("write", "read")]
        found = [r for r in rows if r is not None and r.bytes >= LARGE_BYTES and r.ratio_to_limit]
        if not found:
            continue
        slowest = min(found, key=lambda row: row.ratio_to_limit or 0.0)
        limit = "a raw socket" if route.name == "tcp" else "memcpy"
        share = slowest.ratio_to_limit or 0.0
        action = slowest.case.partition(".")[2]
        text = f"{action} of {format_size(slowest.bytes)} at {share:.0%} of {limit}"
        if share >= LIMIT_SHARE:
            yield Finding(OK, f"{route.name} speed", text)
            continue
        # Without an interval, or with other work on the cores, it may be chance.
        sure = slowest.ratio_interval is not None and slowest.ratio_interval[1] < LIMIT_SHARE
        busy = [facts for facts in (link.here, link.there) if facts and facts.cpu.oversubscribed]
        yield Finding(
            WARNING if sure and not busy else NOTE, f"{route.name} speed", text,
            "measure again when the machine is quiet" if busy
            else "look at cores and load on both sides; if both are fine, report it with --json",
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
