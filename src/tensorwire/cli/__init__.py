"""The command `tensorwire`: what a person types. Each subcommand is one file of this package."""

from __future__ import annotations

import click

from tensorwire.bench import machine
from tensorwire.cli.bench import bench as bench_commands
from tensorwire.cli.doctor import doctor as doctor_command
from tensorwire.cli.explain import explain as explain_command
from tensorwire.cli.files import cat as cat_command
from tensorwire.cli.files import cp as cp_command
from tensorwire.cli.files import ls as ls_command
from tensorwire.cli.files import stat as stat_command
from tensorwire.cli.info import info as info_command
from tensorwire.cli.mount import mount as mount_command
from tensorwire.cli.rpc import rpc as rpc_commands
from tensorwire.cli.run import run as run_command
from tensorwire.cli.scale import scale as scale_command
from tensorwire.cli.serve import serve as serve_command
from tensorwire.cli.status import status as status_command


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Each command has its own --help with examples.",
)
@click.version_option(machine.version("tensorwire") or "unknown", prog_name="tensorwire")
def main() -> None:
    """Train PyTorch models with several processes; use another process as memory.

    \b
    Train with two workers and a parameter server:
        tensorwire run --workers 2 train.py

    \b
    See first what this machine can do and what is missing:
        tensorwire info

    \b
    Whether it is as fast as it should be, alone or towards a peer:
        tensorwire doctor

    \b
    What a transfer costs here, beside memcpy and other libraries:
        tensorwire bench memory --quick

    \b
    What the jobs that run now are doing:
        tensorwire status

    \b
    Another number of workers for such a job:
        tensorwire scale --workers 4

    \b
    The parameters of such a job, as files:
        tensorwire ls -l tw://127.0.0.1:41234/params

    \b
    Where the tensors of a training script are, and which are copied:
        tensorwire explain train.py

    \b
    What the RPCs of a gRPC program carry, and what they would gain:
        tensorwire rpc trace -- python client.py
    """  # noqa: D301 (\b is what click reads)


for _command in (
    info_command, doctor_command, bench_commands, run_command, serve_command, scale_command,
    status_command,
    explain_command, rpc_commands, ls_command, cat_command, cp_command, stat_command,
    mount_command,
):  # fmt: skip
    main.add_command(_command)
