"""The rules of `tensorwire doctor`: facts and figures in, findings out."""

from dataclasses import replace
from typing import Any

import pytest

from tensorwire.bench.operations import RAW
from tensorwire.bench.rows import Row
from tensorwire.doctor import advice
from tensorwire.doctor.advice import NOTE, OK, WARNING, Finding, LinkFacts, TriedPath
from tensorwire.doctor.facts import Cpu, Facts, Gpus, Rdma, SharedMemory, Tcp
from tensorwire.memory.devices import Interface, RdmaPort

MIB = 1 << 20
ETH = Interface("eth0", "up", True, 100_000, 9000, "full", True)
VETH = Interface("veth0", "up", True, 10_000, 1500, "full", False)
IB = RdmaPort("mlx5_0", 1, "ACTIVE", 100.0, "InfiniBand", ("fe80::1",), "")
ROCE = RdmaPort("mlx5_1", 1, "ACTIVE", 100.0, "Ethernet", ("fe80::1", "::ffff:a00:1"), "eth1")
TCP = Tcp(64 * MIB, 64 * MIB, 4 * MIB, True, "cubic")
READY = Rdma((IB,), "1.13.1", "", True, None)
HERE = Facts(
    "a", "6.1", "3.11", "1.0", ("shm", "rdma", "tcp"), "",
    Cpu("x", 8, 8, None, 0.5), SharedMemory("", "advise", 8 << 30, 16 << 30, None), TCP, Rdma(),
    Gpus(fault="no driver"), (),
)  # fmt: skip


def of(findings: Any, subject: str) -> Finding:
    (found,) = [each for each in findings if each.subject == subject]
    return found


def row(case: str, gb_per_s: float | None, system: str = "tensorwire", **changes: Any) -> Row:
    size = changes.pop("size", 64 * MIB)
    seconds = size / gb_per_s / 1e9 if gb_per_s else changes.pop("seconds")
    return Row("doctor", case, system, size, seconds, seconds, gb_per_s, **changes)


def link(**changes: Any) -> LinkFacts:
    basis = LinkFacts(
        "10.0.0.1:7000", False, "tcp", "the peer is on another host",
        routes=(TriedPath("shm", False, "another host"), TriedPath("tcp", True, "")),
        here=HERE, there=HERE, interface_here=ETH, interface_there=ETH,
        offered_there=("shm", "tcp"),
    )  # fmt: skip
    return replace(basis, **changes)


# ---- one machine


def test_a_fine_machine() -> None:
    assert {each.level for each in advice.about_machine(HERE)} == {OK}


@pytest.mark.parametrize(
    ("cpu", "subject", "level"),
    [
        (Cpu("x", 8, 1, None, 0.1), "cores", WARNING),
        (Cpu("x", 8, 8, 1.5, 0.1), "cores", WARNING),
        (Cpu("x", 8, 8, 4.0, 0.1), "cores", NOTE),
        (Cpu("x", 8, 8, 8.0, 0.1), "cores", OK),
        (Cpu("x", 8, 2, None, 2.5), "load", NOTE),
        (Cpu("x", 8, 8, 0.5), "threads", NOTE),
        (Cpu("x", 8, 8, 0.5, threads=1), "threads", OK),
        (Cpu("x", 8, 8, 4.0, threads=8), "threads", NOTE),
        (Cpu("x", 8, 8, 4.0, threads=4), "threads", OK),
        (Cpu("x", 8, 8, threads=9), "threads", NOTE),
    ],
)
def test_cores(cpu: Cpu, subject: str, level: str) -> None:
    found = of(advice.about_cpu(cpu), subject)
    assert found.level == level
    assert bool(found.remedy) == (level != OK)


@pytest.mark.parametrize(
    ("memory", "subject", "level", "word"),
    [
        (SharedMemory(fault="no memfd: denied"), "shared memory", WARNING, "denied"),
        (SharedMemory(available_bytes=8 << 30, group_left_bytes=1 << 30), "shared memory", OK,
         "1.0 GiB can be had (bound by the control group)"),
        (SharedMemory(dev_shm_bytes=64 * MIB), "/dev/shm", NOTE, "DataLoader"),
        (SharedMemory(), "/dev/shm", OK, "not mounted"),
        (SharedMemory(huge_pages="never"), "huge pages", NOTE, "never"),
        (SharedMemory(), "huge pages", NOTE, "unknown"),
        (SharedMemory(huge_pages="within_size"), "huge pages", OK, "within_size"),
    ],
)  # fmt: skip
def test_memory(memory: SharedMemory, subject: str, level: str, word: str) -> None:
    found = of(advice.about_memory(memory), subject)
    assert (found.level, word in found.text) == (level, True)


@pytest.mark.parametrize(
    ("changes", "level", "word"),
    [
        ({}, OK, "100 Gbit/s, mtu 9000"),
        ({"mtu": 1500}, NOTE, "small packets"),
        ({"mtu": 1500, "megabits_per_s": 10_000}, OK, "10 Gbit/s"),
        ({"carrier": False}, NOTE, "no carrier"),
        ({"duplex": "half"}, WARNING, "half duplex"),
        ({"megabits_per_s": None, "mtu": 1500}, OK, "reports no speed"),
        ({"physical": False}, OK, "virtual (100 Gbit/s means nothing)"),
    ],
)
def test_interfaces(changes: dict[str, Any], level: str, word: str) -> None:
    found = of(advice.about_interfaces([replace(ETH, **changes)]), "interface eth0")
    assert (found.level, word in found.text) == (level, True)


def test_an_interface_that_is_switched_off_is_nothing() -> None:
    off = replace(ETH, state="down", carrier=None)
    assert list(advice.about_interfaces([off])) == []


def test_buffers_for_a_fast_interface() -> None:
    small = replace(TCP, send_bytes=4 * MIB)
    assert of(advice.about_tcp(small, [VETH]), "tcp buffers").level == OK
    found = of(advice.about_tcp(small, [ETH]), "tcp buffers")
    assert found.level == NOTE
    assert "100 Gbit/s over a round trip of 1 ms need 11.9 MiB" in found.text
    assert 'net.ipv4.tcp_rmem="4096 131072 33554432"' in found.remedy
    assert of(advice.about_tcp(Tcp(), [ETH]), "tcp buffers").level == NOTE


def test_buffers_of_the_remedy_are_enough() -> None:
    for needed in (1, 10 * MIB, 12_500_000, 100 * MIB):
        most = int(advice.buffers_remedy(needed).split()[4].strip('"'))
        assert replace(TCP, receive_bytes=most, send_bytes=most).window_bytes >= needed


def test_kernel_switches() -> None:
    found = advice.about_tcp(replace(TCP, adapts=False, congestion="vegas"), [])
    levels = [(each.subject, each.level) for each in found]
    assert ("tcp buffers", WARNING) in levels
    assert ("congestion control", NOTE) in levels


@pytest.mark.parametrize(
    ("rdma", "subject", "level", "remedy"),
    [
        (Rdma(), "rdma", OK, ""),
        (Rdma(), "UCX", OK, ""),
        (READY, "rdma mlx5_0/1", OK, ""),
        (READY, "UCX", OK, ""),
        (replace(READY, ucx="", ucx_fault="not found"), "UCX", WARNING, "libucx0"),
        (replace(READY, verbs=False), "rdma access", WARNING, "--device=/dev/infiniband"),
        (replace(READY, locked_bytes=65536), "locked memory", WARNING, "ulimit -l unlimited"),
        (replace(READY, locked_bytes=8 << 30), "locked memory", OK, ""),
        (replace(READY, ports=(replace(IB, state="INIT"),)), "rdma mlx5_0/1", NOTE, "opensm"),
        (replace(READY, ports=(replace(ROCE, state="DOWN"),)), "rdma mlx5_1/1", NOTE, "eth1 up"),
        (replace(READY, ports=(replace(ROCE, gids=("fe80::1",)),)), "rdma mlx5_1/1", NOTE,
         "ip addr add"),
        (replace(READY, ports=(ROCE,)), "rdma mlx5_1/1", OK, ""),
    ],
)  # fmt: skip
def test_rdma(rdma: Rdma, subject: str, level: str, remedy: str) -> None:
    found = of(advice.about_rdma(rdma, ["shm", "rdma", "tcp"]), subject)
    assert found.level == level
    assert remedy in found.remedy
    assert bool(remedy) == bool(found.remedy)


def test_devices_of_a_version_without_rdma() -> None:
    assert of(advice.about_rdma(READY, ["shm", "tcp"]), "rdma").level == NOTE


# ---- the choice of the path


def test_the_choice_is_the_fastest() -> None:
    routes = (TriedPath("shm", True, ""), TriedPath("tcp", True, ""))
    rows = [row("shm.write", 8.0), row("tcp.write", 2.0)]
    found = of(advice.about_choice(link(chosen="shm", routes=routes, rows=rows)), "path")
    assert found.level == OK
    slow = [row("shm.write", 1.0), row("tcp.write", 2.0)]
    found = of(advice.about_choice(link(chosen="shm", routes=routes, rows=slow)), "path")
    assert found.level == WARNING
    assert "tcp wrote 64 MiB at 2.00 GB/s and shm at 1.00" in found.text
    assert "transports=['tcp']" in found.remedy


def test_paths_are_compared_at_one_size() -> None:
    routes = (TriedPath("shm", True, ""), TriedPath("tcp", True, ""))
    rows = [row("shm.write", 1.0), row("tcp.write", 9.0, size=MIB)]
    assert of(advice.about_choice(link(chosen="shm", routes=routes, rows=rows)), "path").level == OK


def test_one_host_by_tcp() -> None:
    reason = "same host, but its shared memory cannot be reached (refused): another user?"
    found = of(advice.about_choice(link(reason=reason)), "path")
    assert found.level == WARNING
    assert found.remedy


def test_rdma_at_both_ends() -> None:
    ready = replace(HERE, rdma=READY)
    routes = (TriedPath("rdma", False, "no route"), TriedPath("tcp", True, ""))

    def judge(here: Facts, there: Facts, **changes: Any) -> list[Finding]:
        return list(
            advice.about_unused_rdma(link(here=here, there=there, routes=routes, **changes))
        )

    bare = replace(ready, rdma=replace(READY, ucx="", ucx_fault="no"))
    old = replace(ready, transports=("shm", "tcp"))
    (found,) = judge(bare, ready)
    assert (found.level, "UCX is missing here" in found.text) == (WARNING, True)
    (found,) = judge(ready, bare)
    assert found.remedy.startswith("there: apt install libucx0")
    (found,) = judge(ready, old)
    assert (found.level, "tensorwire there has no rdma" in found.text) == (NOTE, True)
    (found,) = judge(ready, ready)
    assert "no route" in found.text
    assert judge(ready, HERE) == []
    assert judge(ready, ready, loopback=True) == []
    assert judge(ready, ready, chosen="shm") == []


def test_versions_and_mtu() -> None:
    other = replace(HERE, tensorwire="0.9")
    assert of(advice.about_versions(link(there=other)), "versions").level == WARNING
    small = replace(ETH, name="eth7", mtu=1500)
    found = of(advice.about_mtu(link(interface_there=small)), "mtu")
    assert (found.level, "9000 on eth0 here, 1500 on eth7 there" in found.text) == (WARNING, True)
    assert list(advice.about_mtu(link(interface_there=None))) == []


def test_what_is_wrong_there_is_told_here() -> None:
    there = replace(HERE, host="b", cpu=Cpu("x", 1, 1, None, 3.0))
    subjects = {each.subject for each in advice.about_ends(link(there=there))}
    assert subjects == {"cores there", "load there"}
    assert list(advice.about_ends(link(there=there, loopback=True))) == []
    assert list(advice.about_ends(link(there=there, alone=True))) == []


# ---- figures against promises


def network(rows: list[Row], **changes: Any) -> Finding:
    return of(advice.about_network(link(rows=rows, **changes)), "network")


def test_the_promise_is_the_slower_end() -> None:
    slow = replace(ETH, megabits_per_s=1000)
    assert link().promised_gb_per_s("tcp") == 12.5
    assert link(interface_there=slow).promised_gb_per_s("tcp") == 0.125
    assert link(interface_there=None).promised_gb_per_s("tcp") == 12.5
    assert link(interface_here=VETH, interface_there=VETH).promised_gb_per_s("tcp") is None
    assert link(loopback=True).promised_gb_per_s("tcp") is None
    assert link().promised_gb_per_s("shm") is None
    ready = replace(HERE, rdma=READY)
    assert link(here=ready, there=ready).promised_gb_per_s("rdma") == 12.5
    assert link(here=ready).promised_gb_per_s("rdma") == 12.5


def test_a_promise_that_is_kept() -> None:
    found = network([row("tcp.write", 7.0)])
    assert found.level == OK
    assert "56% of the 100 Gbit/s promised by eth0" in found.text


def test_slow_because_of_buffers() -> None:
    small = replace(HERE, tcp=replace(TCP, send_bytes=4 * MIB))
    rows = [row("tcp.write", 1.1), row("tcp.signal", None, RAW, size=8, seconds=2e-3)]
    found = network(rows, there=small)
    assert found.level == WARNING
    assert "9% of the 100 Gbit/s" in found.text
    assert "2 MiB can be on its way" in found.text
    assert "sysctl" in found.remedy


def test_slow_because_of_one_core() -> None:
    small = replace(ETH, mtu=1500)
    found = network([row("tcp.write", 2.9), row("tcp.write", 3.0, RAW)], interface_here=small)
    assert "one stream is bound by one core, mtu 1500" in found.text
    assert "mtu 9000" in found.remedy


def test_slow_because_of_the_network() -> None:
    found = network([row("tcp.write", 0.11), row("tcp.write", 0.12, RAW)])
    assert "the network, not tensorwire" in found.text
    assert "tc -s qdisc show dev eth0" in found.remedy


def test_slow_because_of_tensorwire() -> None:
    found = network([row("tcp.write", 1.0), row("tcp.write", 6.0, RAW)])
    assert "so it is tensorwire" in found.text


def test_a_slow_network_that_is_not_used_is_a_note() -> None:
    assert network([row("tcp.write", 1.0)], chosen="rdma").level == NOTE


def test_nothing_is_promised() -> None:
    rows = [row("tcp.write", 0.12), row("tcp.write", 0.125, RAW)]
    found = network(rows, interface_here=VETH, interface_there=VETH)
    assert found.level == OK
    assert "0.96 Gbit/s" in found.text
    assert "a raw socket reached 1" in found.text


def test_small_sizes_and_loopback_say_nothing_of_bandwidth() -> None:
    assert list(advice.about_network(link(rows=[row("tcp.write", 0.001, size=8)]))) == []
    assert list(advice.about_network(link(rows=[row("tcp.write", 1.0)], loopback=True))) == []
    assert list(advice.about_network(link())) == []


def test_rdma_against_its_ports() -> None:
    ready = replace(HERE, rdma=READY)
    fast = link(here=ready, there=ready, rows=[row("rdma.write", 11.0)])
    assert of(advice.about_rdma_speed(fast), "rdma speed").level == OK
    slow = replace(fast, rows=[row("rdma.write", 2.0)])
    assert of(advice.about_rdma_speed(slow), "rdma speed").level == WARNING
    assert list(advice.about_rdma_speed(replace(slow, here=HERE, there=HERE))) == []


@pytest.mark.parametrize(
    ("ratio", "interval", "load", "level"),
    [
        (0.9, (0.8, 1.0), 0.1, OK),
        (0.3, (0.2, 0.4), 0.1, WARNING),
        (0.3, (0.2, 0.9), 0.1, NOTE),  # it may be chance
        (0.3, None, 0.1, NOTE),
        (0.3, (0.2, 0.4), 20.0, NOTE),  # somebody else has the cores
    ],
)
def test_beside_the_limit(
    ratio: float, interval: tuple[float, float] | None, load: float, level: str
) -> None:
    here = replace(HERE, cpu=replace(HERE.cpu, load=load))
    rows = [
        row("tcp.write", 1.0, ratio_to_limit=ratio, ratio_interval=interval),
        row("tcp.read", 1.0, ratio_to_limit=0.95, ratio_interval=(0.9, 1.0)),
    ]
    found = of(advice.about_limits(link(here=here, rows=rows)), "tcp speed")
    assert found.level == level
    assert f"{ratio:.0%} of a raw socket" in found.text


def test_every_note_and_warning_of_the_machine_has_a_remedy() -> None:
    bad = replace(
        HERE, restricted="tcp", cpu=Cpu("x", 1, 1, 0.5, 9.0),
        memory=SharedMemory("none", "never", 1),
        tcp=Tcp(1, 1, 1, False, "odd"), interfaces=(replace(ETH, duplex="half"),),
        rdma=Rdma((IB, replace(ROCE, state="DOWN")), "", "no", False, 1),
    )  # fmt: skip
    findings = advice.about_machine(bad)
    assert advice.worst(findings) == WARNING
    for each in findings:
        assert bool(each.remedy) == (each.level != OK), each


def test_memory_of_gpus() -> None:
    assert of(advice.about_machine(HERE), "GPU").text == "none can be used: no driver"
    assert not [each for each in advice.about_link(link()) if "gpu" in each.subject]
    two = replace(HERE, gpus=Gpus(("H100", "H100"), "13.0"))
    assert of(advice.about_machine(two), "GPU").text == "2 x H100; a driver for CUDA 13.0"
    for chosen, level in (("tcp", OK), ("shm", OK), ("rdma", NOTE)):
        found = advice.about_link(link(here=two, chosen=chosen))
        told = [each for each in found if "gpu" in each.subject]
        assert [each.subject for each in told] == [
            "host to gpu", "pinned to gpu", "gpu to host", "gpu to gpu",
        ]  # fmt: skip
        assert {each.level for each in told} == {level}
    seen_none = replace(HERE, gpus=Gpus((), "13.0"))
    assert "no GPU that is seen here" in of(advice.about_machine(seen_none), "GPU").text
