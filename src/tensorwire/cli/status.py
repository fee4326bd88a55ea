"""`tensorwire status`: the running jobs of this user, or one job by a server's address."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from tensorwire.command import Command, terminal
from tensorwire.errors import TensorwireError
from tensorwire.membership import (
    LoggedJob,
    RunningServer,
    logged_jobs,
    read_status,
    reader_name,
    running_servers,
)
from tensorwire.memory import Node

_COLOURS = {"connected": "green", "left": "bright_black", "lost": "red", "expected": "yellow"}
_CONNECT_S = 5.0


@click.command(cls=Command, short_help="Show the workers, servers and versions of running jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.argument("address", required=False)
def status(address: str | None, as_json: bool) -> None:
    """Show running jobs: their workers, servers, stores, versions and bytes.

    Without ADDRESS all jobs of this user that have a server on this host, however they were
    started, and those of `tensorwire run` that have failed of late.

    ADDRESS is a server's, "host:port"; for a job of another host the secret is in
    TENSORWIRE_SECRET_FILE or TENSORWIRE_SECRET. Looking costs the job a few microseconds, and
    nothing while nobody looks.

    \b
    All my jobs on this host:
        tensorwire status

    \b
    One job, for a program:
        tensorwire status --json 10.0.0.2:41234
    """  # noqa: D301 (\b is what click reads)
    known = running_servers()
    logs = logged_jobs()
    if address is not None:
        mine = next((server for server in known if server.address == address), None)
        jobs = [_look(address, mine, logs)]
    else:
        jobs = [_look(server.address, server, logs) for server in known if server.index == 0]
        jobs += [_of_log(log) for log in logs if not log.running]
    if as_json:
        click.echo(json.dumps(jobs, indent=1))
    elif not jobs:
        click.echo("no job of this user has its first server on this host")
    for job in () if as_json else jobs:
        _show(job, terminal(120))
    if address is not None and "error" in jobs[0]:
        raise click.exceptions.Exit(1)


def _look(address: str, known: RunningServer | None, logs: Sequence[LoggedJob]) -> dict[str, Any]:
    """What all servers of a job say, from the one at an address on; or the error."""
    job: dict[str, Any] = {"address": address}
    if known is not None:
        job |= {"command": known.command, "started": known.started}
    try:
        with Node(reader_name(), secret=_secret_of(known)) as node:
            first = _ask(node, address)
            others = [each for each in first["servers"] if each != first["address"]]
            servers = [first, *(_ask(node, each) for each in others)]
    except (TensorwireError, ValueError, OSError) as error:
        return {**job, "error": str(error)}
    for log in logs:
        if log.running and first["address"] in log.addresses:
            job |= _told(log)
    job["workers"] = first["workers"]
    job["servers"] = sorted(
        (
            {k: each[k] for k in ("index", "address", "pid", "stores", "replaced")}
            for each in servers
        ),
        key=lambda each: int(each["index"]),
    )
    return job


def _told(log: LoggedJob) -> dict[str, Any]:
    """What only the launcher knows."""
    return {
        "durable": log.durable,
        "members": [asdict(member) for member in log.members],
        "standby": log.standby,
        "saved": log.saved or None,
        "log": log.path,
    }


def _of_log(log: LoggedJob) -> dict[str, Any]:
    """A job that is over, and did not end well."""
    failure = log.failure or f"its launcher (pid {log.launcher}) was killed"
    return {"failed": failure, "command": log.command, "started": log.started, **_told(log)}


def _ask(node: Node, address: str) -> dict[str, Any]:
    peer = node.connect(address, timeout_s=_CONNECT_S)
    try:
        return read_status(peer, node.name)
    finally:
        peer.close()


def _secret_of(known: RunningServer | None) -> bytes | None:
    """The job's secret; None for what the environment says."""
    if known is None:
        return None
    if known.secret_file:
        with open(known.secret_file, "rb") as file:
            return file.read().strip()
    return os.fsencode(known.secret) if known.secret else None


def _show(job: dict[str, Any], console: Console) -> None:
    if "failed" in job:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"]))
        text = f"job that failed, started {started}: {job['command']}"
        console.print(text, markup=False, highlight=False)
        console.print(f"  {job['failed']}", style="red", markup=False, highlight=False)
        _show_members(job, console)
        return
    since = f", for {time.time() - job['started']:.0f} s" if "started" in job else ""
    command = f": {job['command']}" if job.get("command") else ""
    console.print(f"job at {job['address']}{since}{command}", markup=False, highlight=False)
    if "error" in job:
        console.print(f"  cannot be asked: {job['error']}", style="red", markup=False)
        return
    if job.get("durable"):
        _show_members(job, console)
    table = Table(box=box.SIMPLE_HEAD, title="workers", title_justify="left")
    for name in ("rank", "state", "pid", "address", "transport"):
        table.add_column(name, justify="right" if name in ("rank", "pid") else "left")
    for worker in job["workers"]:
        cells = [str(worker.get(name, "")) for name in ("rank", "state", "pid", "address")]
        table.add_row(*cells, worker.get("transport", ""), style=_COLOURS[worker["state"]])
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, title="servers and their shares", title_justify="left")
    durable = any(server["replaced"] is not None for server in job["servers"])
    about = ("server", "pid", "address", *(["replaced"] if durable else []))
    for name in (*about, "store", "optimizer", "tensors", "bytes", "version"):
        right = name in ("server", "pid", "replaced", "store", "tensors", "bytes", "version")
        table.add_column(name, justify="right" if right else "left")
    for server in job["servers"]:
        head = [str(server[name]) for name in ("index", *about[1:])]
        for row in _rows(server["stores"]):
            table.add_row(*head, *row)
            head = [""] * len(about)
    console.print(table)
    for store in job["servers"][0]["stores"]:
        if "clocks" in store:
            console.print(f"  {_pace(store)}", markup=False, highlight=False)


def _pace(store: dict[str, Any]) -> str:
    """Where the slices of a store are, each of which goes at its own pace."""
    clocks = ", ".join(map(str, store["clocks"]))
    found = ", ".join(f"{count} x {behind}" for behind, count in store["staleness"].items())
    return (
        f"store {store['number']}: slices have made {clocks} steps; staleness of versions at most "
        f"{store['staleness_max']}" + (f" ({found})" if found else "")
    )


def _show_members(job: dict[str, Any], console: Console) -> None:
    """Whom the launcher has replaced, and why; what it would go on with."""
    table = Table(box=box.SIMPLE_HEAD, title="members", title_justify="left")
    for name in ("member", "pid", "restarts", "last death"):
        table.add_column(name, justify="right" if name in ("pid", "restarts") else "left")
    for member in job["members"]:
        death, text = member["last_death"], ""
        if death is not None:
            at = time.strftime("%H:%M:%S", time.localtime(death["time"]))
            text = f"{at}, pid {death['pid']} {death['evidence']}"
        name = f"{member['kind']} {member['index']}"
        table.add_row(name, str(member["pid"]), str(member["term"]), text)
    if job["standby"]:
        table.add_row("standby", str(job["standby"]), "", "")
    console.print(table)
    if job["saved"]:
        console.print(f"  last checkpoint: {job['saved']}", markup=False, highlight=False)
    console.print(f"  log: {job['log']}", markup=False, highlight=False)


def _rows(stores: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = ("number", "optimizer", "tensors", "bytes", "version")
    return [[str(store[name]) for name in names] for store in stores] or [["none"] + [""] * 4]
