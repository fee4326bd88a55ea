"""Commands for the machines of the rig, from a prompt or from the arguments.

python tests/rdma/shell.py                 a prompt for both machines
python tests/rdma/shell.py 'ibv_devinfo'   one command in each
"""

import argparse
import contextlib
import signal
import threading

from commands import MachineOffError
from rig import Machine, Rig


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs commands in two machines with RDMA.")
    parser.add_argument("command", nargs="*", help="for a shell in each machine; none: a prompt")
    arguments = parser.parse_args()
    with Rig("shell") as rig:
        for machine in rig.machines:
            print(f"{machine.name}: {machine.address}, up after {machine.boot_s:.1f} s")
        for command in arguments.command:
            for machine in rig.machines:
                show(machine, command)
        if not arguments.command:
            prompt(rig)


def prompt(rig: Rig) -> None:
    """Lines `a COMMAND` or `b COMMAND` until the end of the input."""
    print("a COMMAND, b COMMAND, or & behind it to go on at once; Ctrl-D ends")
    names = {machine.name: machine for machine in rig.machines}
    while True:
        try:
            words = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        name, _, command = words.partition(" ")
        if name in names and command.endswith("&"):
            arguments = names[name], command[:-1]
            threading.Thread(target=show_until_off, args=arguments, daemon=True).start()
        elif name in names and command:
            show(names[name], command)


def show_until_off(machine: Machine, command: str) -> None:
    with contextlib.suppress(MachineOffError):
        show(machine, command)


def show(machine: Machine, command: str) -> None:
    """Runs a command in a shell and prints what it writes; Ctrl-C goes to the command."""
    with machine.start(["sh", "-c", f"exec 2>&1\n{command}"]) as process:
        lines = process.lines(timeout_s=float(1 << 20))
        while True:
            try:
                for line in lines:
                    print(f"{machine.name}| {line}", flush=True)
                break
            except KeyboardInterrupt:
                process.signal(signal.SIGINT)
                lines = iter(())
        if code := process.wait():
            print(f"{machine.name}| exit code {code}", flush=True)


if __name__ == "__main__":
    main()
