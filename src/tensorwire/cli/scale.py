"""`tensorwire scale`: changes a running job while it runs."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from tensorwire.command import Command, bare_address
from tensorwire.errors import TimeoutError
from tensorwire.jobs.asking import ScaleError, ask_launcher, secret_of
from tensorwire.jobs.job_file import running_servers
from tensorwire.jobs.job_log import LoggedJob, logged_jobs

_REPLACED_S = 10.0  # in which servers that were killed have been replaced


@click.command(cls=Command, short_help="Change the number of workers or servers of a running job.")
@click.option(
    "--workers", "-w", type=int, metavar="N", help="How many workers the job is to have, from 1."
)
@click.option(
    "--servers",
    "-s",
    type=int,
    metavar="N",
    help="How many servers the job is to have, from 1 to the MAX of --servers S:MAX.",
)
@click.option(
    "--drain",
    type=int,
    multiple=True,
    metavar="RANK",
    help="A worker that is to leave, where there are to be fewer; may be given several times. "
    "Default: those with the highest ranks.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=300.0,
    metavar="SECONDS",
    help="Until it is done (default 300); then it is taken back.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.argument("address", required=False)
def scale(
    workers: int | None,
    servers: int | None,
    drain: tuple[int, ...],
    timeout_s: float,
    as_json: bool,
    address: str | None,
) -> None:
    """Change the number of workers or servers of a job of `tensorwire run`, while it trains.

    Results have the bits of the undisturbed run (docs/elastic.md). It returns when the change is
    made. Ctrl-C takes it back, if it is not made by then.

    ADDRESS names one of the job's servers, "host:port", as `tensorwire status` shows it; without it
    the only job of this user on this host is meant.

    \b
    Four workers from now on:
        tensorwire scale --workers 4

    \b
    Two servers, which share what all have:
        tensorwire scale --servers 2

    \b
    Without worker 0, of three:
        tensorwire scale --workers 2 --drain 0
    """  # noqa: D301 (\b is what click reads)
    if workers is None and servers is None:
        raise click.UsageError("say what is to change: --workers N or --servers N")
    if drain and workers is None:
        raise click.UsageError("--drain says which workers leave: say --workers N, too")
    if not timeout_s > 0:
        raise click.UsageError(f"--timeout is {timeout_s:g}, not a number of seconds above 0")
    asked: dict[str, Any] = {}
    if workers is not None:
        asked["workers"] = {"count": workers, "drain": sorted(set(drain))}
    if servers is not None:
        asked["servers"] = {"count": servers}
    job = _find(address, [each for each in logged_jobs() if each.running])
    if not job.control:
        raise click.ClickException(
            f"the job at {job.addresses[0]} cannot be scaled: only jobs of tensorwire run can, "
            "once their workers are started"
        )

    def show(text: str) -> None:
        click.echo(text, err=True)

    try:
        outcome = ask_launcher(
            job.control, _secret_of(job, min(timeout_s, _REPLACED_S)), asked, timeout_s, show
        )
    except (ScaleError, TimeoutError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(outcome))
        return
    for each in outcome.values():
        click.echo(each["text"])


def _find(address: str | None, jobs: list[LoggedJob]) -> LoggedJob:
    """Returns the running job that is meant."""
    if address is not None:
        address = bare_address(address)
        found = [job for job in jobs if address in job.addresses]
        if not found:
            raise click.ClickException(
                f"no job of this user on this host has a server at {address}; tensorwire status "
                "lists them"
            )
    else:
        found = [job for job in jobs if job.addresses]
        if not found and jobs:
            raise click.ClickException(f"the job is still starting; try again: {jobs[-1].command}")
        if not found:
            raise click.ClickException("no job of this user runs on this host")
        if len(found) > 1:
            known = ", ".join(f"{job.addresses[0]} ({job.command})" for job in found)
            raise click.ClickException(f"several jobs run, say which one by its address: {known}")
    return found[0]


def _secret_of(job: LoggedJob, wait_s: float) -> bytes:
    """Returns the job's secret from one of its servers; killed servers are replaced soon."""
    deadline = time.monotonic() + wait_s
    while not (servers := [each for each in running_servers() if each.address in job.addresses]):
        if not any(each.running and each.path == job.path for each in logged_jobs()):
            raise click.ClickException("the job has ended")
        if time.monotonic() > deadline:
            raise click.ClickException("the servers of the job do not run at present; try again")
        time.sleep(0.05)
    return secret_of(servers[0])
