"""The command `tensorwire`: what a person types. Each subcommand is one file of this package."""

from __future__ import annotations

from importlib import import_module

import click

from tensorwire.bench import machine

_FILES = {
    **{name: name for name in ("bench", "doctor", "explain", "mount", "rpc")},
    **{name: name for name in ("run", "scale", "serve", "status")},
    **dict.fromkeys(("cat", "cp", "ls", "stat"), "files"),
}
"""The file of each subcommand in this package. A command imports its own file only."""
_RENAMED = {"info": "doctor --quick"}
"""The commands that there were until 0.1.0, each with the new one that its error names."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_FILES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _RENAMED:
            raise click.UsageError(f"it is now: tensorwire {_RENAMED[cmd_name]}")
        if (file := _FILES.get(cmd_name)) is None:
            return None
        command: click.Command = getattr(import_module(f"{__name__}.{file}"), cmd_name)
        return command


@click.group(
    cls=_Commands,
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
        tensorwire doctor --quick

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
