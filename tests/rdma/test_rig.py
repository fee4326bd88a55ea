"""The rig does what tests rely on: real RDMA verbs between two machines, and real failures."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from actor import eventually, exists
from commands import MachineOffError, RigError
from rig import Machine, Rig

Machines = tuple[Machine, Machine]


def test_both_have_an_active_device(machines: Machines) -> None:
    for machine in machines:
        assert "state ACTIVE" in machine.run(["rdma", "link", "show", "rxe0/1"])
        told = machine.run(["ibv_devinfo", "-d", "rxe0"])
        assert "PORT_ACTIVE" in told
        assert "active_mtu:\t\t4096" in told
        assert machine.run(["hostname"]).strip() == machine.name
    assert (
        len({machine.run(["cat", "/proc/sys/kernel/random/boot_id"]) for machine in machines}) == 2
    )


def test_they_reach_each_other(machines: Machines) -> None:
    for here, there in (machines, machines[::-1]):
        here.run(["busybox", "ping", "-c", "2", "-W", "5", there.address])


def test_files_of_the_host_are_seen_and_not_changed(
    rig: Rig, machines: Machines, tmp_path: Path
) -> None:
    first, second = machines
    here = Path(__file__).read_text()
    assert first.run(["cat", __file__]) == here
    first.run(["sh", "-c", f"echo other >{__file__}; cat {__file__}"])
    assert Path(__file__).read_text() == here == second.run(["cat", __file__])
    first.run(["sh", "-c", f"echo from {first.name} >{rig.share}/file"])
    assert (
        (rig.share / "file").read_text() == "from a\n" == second.run(["cat", f"{rig.share}/file"])
    )
    for folder in ("/tmp", "/dev/shm", "/run"):
        second.run(["sh", "-c", f"echo x >{folder}/rig-probe"])
        assert not Path(folder, "rig-probe").exists()


def test_commands_run_side_by_side(machines: Machines) -> None:
    first, _ = machines
    script = "read line || echo no input; echo out $VALUE; echo err >&2; pwd; exec sleep 100"
    with first.start(["sh", "-c", script], env={"VALUE": "7"}, cwd="/tmp") as long:
        long.wait_for(r"(?m)^/tmp$")
        long.wait_for(r"(?m)^err$")
        assert long.stdout == "no input\nout 7\n/tmp\n"
        assert long.stderr == "err\n"
        many = [first.start(["sh", "-c", f"exit {code}"]) for code in range(5)]
        assert [process.wait() for process in many] == list(range(5))
        assert list(first.start(["printf", "one\\ntwo\\nthree"]).lines()) == ["one", "two", "three"]
        big = first.run([sys.executable, "-c", "print('x' * 10_000_000)"])
        assert big == "x" * 10_000_000 + "\n"
        assert long.poll() is None
    assert long.returncode == -signal.SIGKILL


def test_a_command_that_fails_says_so(machines: Machines) -> None:
    first, _ = machines
    with pytest.raises(RigError, match="No such file"):
        first.start(["no-such-command"])
    with pytest.raises(RigError, match="what went wrong"):
        first.run(["sh", "-c", "echo what went wrong >&2; exit 3"])
    with first.start(["sleep", "100"]) as process, pytest.raises(TimeoutError, match="still runs"):
        process.wait(0.1)
    with pytest.raises(RigError, match="wrote nothing that matches"):
        first.start(["echo", "this"]).wait_for("that")


def test_signals_reach_the_whole_group(machines: Machines) -> None:
    first, _ = machines
    # The child counts; stopped with its parent, it stands still.
    script = "(while :; do echo turn; sleep 0.02; done) & wait"
    with first.start(["sh", "-c", script]) as process:
        process.wait_for("turn")
        process.signal(signal.SIGSTOP)
        states = f"cat /proc/[0-9]*/stat 2>/dev/null | awk '$5 == {process.pid} {{print $3}}'"
        # A shell that has just made a child by vfork waits (D) until the child, which stands, runs.
        stands = ({"T"}, {"T", "D"})
        eventually(lambda: set(first.run(["sh", "-c", states]).split()) in stands, "all stand")
        first.run(["true"])  # what was written before has come when this ends
        before = process.output
        assert first.run(["sleep", "0.3"]) == ""
        assert process.output == before
        process.signal(signal.SIGCONT)
        process.wait_for(rf"(turn\n){{{before.count('turn') + 1}}}")
        process.signal(signal.SIGINT)
        assert process.wait() in (130, -signal.SIGINT)
    with first.start(
        ["sh", "-c", "trap 'exit 9' USR1; echo up; while :; do sleep 0.1; done"]
    ) as process:
        process.wait_for("up")
        process.signal(signal.SIGUSR1)
        assert process.wait() == 9


@pytest.mark.parametrize("wiring", [[], ["-R"]], ids=["addresses by tcp", "rdmacm"])
@pytest.mark.parametrize("tool", ["ib_write_bw", "ib_read_lat"])
def test_perftest(machines: Machines, tool: str, wiring: list[str]) -> None:
    first, second = machines
    command = [tool, "-d", first.device, "-n", "50", "-F", *wiring]
    with second.start(command) as server:
        wait_listening(second, 18515, by_rdmacm=bool(wiring))
        out = first.run([*command, second.address])
        assert server.wait() == 0
    # Its figures depend on a clock rate that the kernel measures wrongly on a busy host.
    row = out.strip().splitlines()[-2].split()
    assert row[:2] == (["65536", "50"] if tool == "ib_write_bw" else ["2", "50"])


def test_ucx_puts(machines: Machines) -> None:
    """UCX's transport rc_verbs below its wire-up.

    `ucx_perftest` of UCP exchanges worker addresses, which needs an auxiliary transport over UD;
    none works on soft-RoCE.
    """
    first, second = machines
    common = ["-x", "rc_verbs", "-d", f"{first.device}:1"]
    with second.start(["ucx_perftest", *common]) as server:
        wait_listening(second, 13337)
        test = ["-t", "put_lat", "-D", "zcopy", "-s", "4096", "-n", "50", "-f"]
        out = first.run(["ucx_perftest", second.address, *common, *test])
        assert server.wait() == 0
    row = out.strip().splitlines()[-1].split()
    assert row[0] == "50"
    assert float(row[1]) > 0


def test_ucx_connects_by_its_listener(machines: Machines) -> None:
    """UCP on rc_verbs alone, wired up by rdmacm: the way that needs no UD."""
    first, second = machines
    environment = {"UCX_TLS": "rc_verbs", "UCX_NET_DEVICES": f"{first.device}:1",
                   "UCX_LOG_LEVEL": "info"}  # fmt: skip
    command = ["io_demo", "-p", "7000", "-d", "65536"]
    with second.start(command, env=environment) as server:
        server.wait_for("started listener")
        work = ["-i", "20", "-o", "read,write", second.address]
        with first.start([*command, *work], env=environment) as client:
            assert client.wait() == 0, client.output
    assert f"rc_verbs/{first.device}:1" in client.output
    assert "detected error" not in client.output


def wait_listening(machine: Machine, port: int, by_rdmacm: bool = False) -> None:
    """Waits until a program there listens; its own output lies in its buffers."""
    listing = "rdma resource show cm_id state LISTEN" if by_rdmacm else f"ss -Hltn sport = :{port}"
    until = f'until [ -n "$({listing})" ]; do sleep 0.05; done'
    machine.run(["sh", "-c", until], timeout_s=20.0)


def test_the_link_goes_down_and_up(machines: Machines) -> None:
    first, second = machines
    ping = ["busybox", "ping", "-c", "1", "-W", "5", second.address]
    first.run(ping)
    first.link(False)
    first.run(
        ["sh", "-c", "until rdma link show rxe0/1 | grep -q 'state DOWN'; do sleep 0.05; done"]
    )
    assert first.start([*ping[:-2], "1", second.address]).wait() != 0
    first.link(True)
    first.run(["sh", "-c", "until rdma link show rxe0/1 | grep -q ACTIVE; do sleep 0.05; done"])
    first.run(ping)


def test_a_powered_off_machine_is_gone_and_comes_back(machines: Machines) -> None:
    first, second = machines
    process = second.start(["sleep", "1000"])
    second.run(["touch", "/written"])
    pid = second.qemu_pid
    second.power_off()
    assert not exists(pid)
    with pytest.raises(MachineOffError, match="powered off"):
        process.wait()
    with pytest.raises(MachineOffError, match="powered off"):
        second.run(["true"])
    # Nobody says that it is gone: frames to it are lost.
    assert first.start(["busybox", "ping", "-c", "1", "-W", "1", second.address]).wait() != 0
    second.boot()
    assert second.start(["test", "-e", "/written"]).wait() == 1
    first.run(["busybox", "ping", "-c", "1", "-W", "5", second.address])


def test_a_panic_is_told_with_the_console(machines: Machines) -> None:
    _, second = machines
    process = second.start(["sh", "-c", "echo c >/proc/sysrq-trigger; sleep 100"])
    with pytest.raises(MachineOffError, match=r"(?s)ended by itself.*sysrq triggered crash"):
        process.wait()
    assert not second.is_on
    second.power_off()


def test_a_killed_run_leaves_nothing_behind(rig: Rig) -> None:
    script = """
from rig import Rig
made = Rig("killed", memory_mib=256)
for machine in made.machines:
    machine.start_boot()
    print(machine.qemu_pid, flush=True)
time.sleep(1000)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        pids = [int(run.stdout.readline()) for _ in range(2)]
        assert all(exists(pid) for pid in pids)
        run.kill()
    eventually(lambda: not any(exists(pid) for pid in pids), "the end of both machines")
