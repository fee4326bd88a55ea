"""How close rdma comes to perftest, between the two machines of the rig.

    make bench-rdma

Both run on the same emulated NICs and take turns. `ib_write_bw` and ours keep equally many writes
of 1 MiB under way; `ib_read_lat` is one round trip of the NIC, and so is ours, a completed write of
8 bytes: put and flush. The cost of Python has no bar. The figures show what the software
costs beside the NIC's own interface; they say nothing about the speed of a real NIC.
"""

import argparse
import statistics
from typing import Any

from actors import MachineGroup, node_options, start_actor_on
from measurer import DEPTH, MIB, SMALL, WRITES, serve_measurer
from rig import Machine, Rig

from tensorwire.bench import machine as this_machine
from tensorwire.bench.rows import Report, Row, Verdict
from tensorwire.testing.target import target_elsewhere

BANDWIDTH_BAR, LATENCY_BAR = 0.9, 1.5


def perftest(first: Machine, second: Machine, tool: str, *options: object) -> list[float]:
    """Runs a tool of perftest between the machines; the figures of its last row."""
    command = [tool, "-d", first.device, "-F", *map(str, options)]
    with second.start(command) as server:
        until = 'until [ -n "$(ss -Hltn sport = :18515)" ]; do sleep 0.05; done'
        second.run(["sh", "-c", until], timeout_s=20.0)
        out = first.run([*command, second.address], timeout_s=120.0)
        server.wait(60.0)
    return [float(word) for word in out.strip().splitlines()[-2].split()]


def measure(rig: Rig, rounds: int) -> Report:
    """Takes turns and compares."""
    first, second = rig.machines
    seconds: dict[str, list[float]] = {}
    with MachineGroup(deadline_s=30.0) as group:
        options = node_options(first, name="near", transports=["rdma"])
        near: Any = target_elsewhere(group.start_on(first, serve_measurer, options))
        _, far = start_actor_on(group, second, "far", transports=["rdma"])
        handle = far.allocate("r", 2 * MIB)
        assert near.connect(handle) == "rdma"
        near.find_remote(handle)
        for _ in range(rounds):
            bandwidth = perftest(first, second, "ib_write_bw", "-s", MIB, "-n", WRITES, "-t", DEPTH)
            latency = perftest(first, second, "ib_read_lat", "-s", 8, "-n", SMALL)
            for name, value in (
                ("write perftest", MIB / (bandwidth[3] * MIB)),
                ("write tensorwire-c++", near.write_seconds()),
                ("latency perftest", latency[4] / 1e6),
                ("latency tensorwire-c++", near.latency_seconds()),
                ("latency tensorwire", near.python_seconds()),
            ):
                seconds.setdefault(name, []).append(value)
                print(f"{name:24} {value * 1e6:10.1f} us", flush=True)
    report = Report("rdma", this_machine.describe(), settings={"depth": DEPTH, "rounds": rounds})
    for name, values in seconds.items():
        kind, system = name.split()
        size = MIB if kind == "write" else 8
        limits = seconds[f"{kind} perftest"]
        ratio = statistics.median(a / b for a, b in zip(limits, values, strict=True))
        median = statistics.median(values)
        report.rows.append(
            Row("rdma", f"rdma.{kind}", system, size, median, max(values),
                size / median / 1e9 if kind == "write" else None, ratio, operations=len(values),
                note="soft-RoCE under emulation; the slowest round stands for the p99")
        )  # fmt: skip
    for kind, bar, direction in (
        ("write", BANDWIDTH_BAR, ">="),
        ("latency", LATENCY_BAR, "<="),
    ):
        row = report.find(f"rdma.{kind}", "tensorwire-c++", MIB if kind == "write" else 8)
        assert row is not None
        assert row.ratio_to_limit is not None
        value = row.ratio_to_limit if kind == "write" else 1 / row.ratio_to_limit
        met = value >= bar if direction == ">=" else value <= bar
        tool = "ib_write_bw at 1 MiB" if kind == "write" else "ib_read_lat at 8 bytes"
        report.verdicts.append(
            Verdict(f"{kind} beside {tool}", bar, direction, "x", value, met=met)
        )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="where to write the rows")
    parser.add_argument("--rounds", type=int, default=7, help="how often both take their turn")
    arguments = parser.parse_args()
    with Rig("measure") as rig:
        report = measure(rig, arguments.rounds)
    for verdict in report.verdicts:
        print(verdict.line())
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
