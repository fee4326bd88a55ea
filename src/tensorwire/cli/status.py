"""`tensorwire status`: the running jobs of this user, or one job by a server's address."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console

from tensorwire.bench.report import new_table
from tensorwire.command import Command, bare_address, terminal
from tensorwire.errors import TensorwireError
from tensorwire.jobs.asking import secret_of
from tensorwire.jobs.host import pid_namespace
from tensorwire.jobs.job_file import RunningServer, running_servers
from tensorwire.jobs.job_log import LoggedJob, logged_jobs
from tensorwire.launch import is_stopped
from tensorwire.membership.status import read_status, reader_name
from tensorwire.memory import Node

_COLOURS = {
    "connected": "green", "left": "bright_black", "lost": "red", "expected": "yellow",
    "stopped": "yellow", "taken": "red", "absent": "bright_black",
}  # fmt: skip
_CONNECT_S = 5.0
_MOST_MOVES = 12  # that are shown


@click.command(cls=Command, short_help="Show the workers, servers and versions of running jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--failed", is_flag=True, help="Show the members of jobs that have failed, too.")
@click.argument("address", required=False)
def status(address: str | None, as_json: bool, failed: bool) -> None:
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
        address = bare_address(address)
        mine = next((server for server in known if server.address == address), None)
        jobs = [_look(address, mine, known, logs)]
    else:
        jobs = [_look(each.address, each, known, logs) for each in known if each.index == 0]
        asked = {job["address"] for job in jobs}
        jobs += [
            _without_servers(log)
            for log in logs
            if log.running and log.addresses and log.addresses[0] not in asked
        ]
        jobs += [_of_log(log) for log in logs if not log.running]
    if as_json:
        click.echo(json.dumps(jobs, indent=1))
    elif not jobs:
        click.echo("no job of this user has a server on this host; one that trains alone has none")
    for job in () if as_json else jobs:
        _show(job, terminal(120), failed)
    if address is not None and "error" in jobs[0]:
        raise click.exceptions.Exit(1)


def _look(
    address: str,
    known: RunningServer | None,
    neighbours: Sequence[RunningServer],
    logs: Sequence[LoggedJob],
) -> dict[str, Any]:
    """Asks all servers of a job, from the one at an address on; returns answers or the error.

    Args:
        address: of the server that is asked first.
        known: that server, if it is of this host and user.
        neighbours: all servers of this host and user.
        logs: of jobs on this host.
    """
    job: dict[str, Any] = {"address": address}
    if known is not None:
        job |= _run_by(known)
    job |= _told_of(address, logs)
    here = {each.address: each for each in neighbours}
    try:
        if known is not None and _is_stopped(known):
            return {**job, "error": _stopped(f"server {known.index}", known.pid)}
        with Node(reader_name(), secret=secret_of(known) or None if known else None) as node:
            first = _ask(node, address)
            servers = [first]
            for each in first["servers"]:
                if _is_stopped(here.get(each)):
                    silent = {"index": here[each].index, "address": each, "pid": here[each].pid}
                    servers.append({**silent, "stores": [], "restarts": None})
                elif each != first["address"]:
                    servers.append(_ask(node, each))
    except (TensorwireError, ValueError, OSError) as error:
        return {**job, "error": str(error)}
    job |= _told_of(first["address"], logs)
    job["workers"] = [_seen(worker, known) for worker in first["workers"]]
    job["servers"] = sorted(
        (
            {k: each[k] for k in ("index", "address", "pid", "stores", "restarts")}
            for each in servers
        ),
        key=lambda each: int(each["index"]),
    )
    return job


def _told_of(address: str, logs: Sequence[LoggedJob]) -> dict[str, Any]:
    """Returns the log's facts of a running job, by the address of a server; {} without a log."""
    for log in logs:
        if log.running and address in log.addresses:
            # A server that was replaced is younger than its job.
            return {**_run_by(log), **_told(log)}
    return {}


def _run_by(noted: RunningServer | LoggedJob) -> dict[str, Any]:
    """Returns the command of a running job, and since when it runs."""
    age_s = time.monotonic() - noted.ticks if noted.ticks else None
    return {"command": noted.command, "started": noted.started, "age_s": age_s}


def _told(log: LoggedJob) -> dict[str, Any]:
    """Returns the facts that only the launcher knows."""
    members = []
    for each in log.members:
        about = asdict(each)
        member = {name: about[name] for name in ("kind", "index", "pid", "restarts")}
        member |= {} if each.server is None else {"server": each.server}
        member |= {"state": _state(each.pid, log)} if log.running else {}
        members.append({**member, "last_death": each.last_death, "change": each.change})
    return {
        "durable": log.durable,
        "members": members,
        "standby": log.standby,
        "standby_state": _state(log.standby, log) if log.standby and log.running else None,
        "moves": log.moves,
        "saved": log.saved or None,
        "log": log.path,
    }


def _without_servers(log: LoggedJob) -> dict[str, Any]:
    """Returns a job that runs, and of which no process is server 0 at this moment."""
    about = {"address": log.addresses[0], **_run_by(log)}
    error = "its server 0 is being replaced, or the job is about to end"
    return {**about, **_told(log), "error": error}


def _of_log(log: LoggedJob) -> dict[str, Any]:
    """Returns a job that is over, and did not end well."""
    failure = log.failure or f"its launcher (pid {log.launcher}) was killed"
    return {"failed": failure, "command": log.command, "started": log.started, **_told(log)}


def _state(pid: int, log: LoggedJob) -> str:
    """Returns the state of a process of a job whose launcher lives.

    Where it is not in the process table of this one, its launcher knows whether it has ended.
    """
    if pid in log.ended:
        return "ended"
    if not _is_here(log.pids):
        return "running"
    if is_stopped(pid):
        return "stopped"
    return "running" if os.path.exists(f"/proc/{pid}") else "ended"


def _is_here(pids: str) -> bool:
    """Tells whether a process number means the same here as there; "": it is not known."""
    return pids in ("", pid_namespace())


def _is_stopped(server: RunningServer | None) -> bool:
    return server is not None and _is_here(server.pids) and is_stopped(server.pid)


def _stopped(name: str, pid: int) -> str:
    return f"{name} (pid {pid}) is stopped; kill -CONT {pid} lets it go on"


def _seen(worker: dict[str, Any], server: RunningServer | None) -> dict[str, Any]:
    """Returns a worker as its server sees it; on this host also whether its process is stopped."""
    here = server is not None and _is_here(server.pids)
    near = here and worker.get("transport") == "shm" and worker["state"] == "connected"
    return {**worker, "state": "stopped"} if near and is_stopped(worker["pid"]) else worker


def _ask(node: Node, address: str) -> dict[str, Any]:
    peer = node.connect(address, timeout_s=_CONNECT_S)
    try:
        return read_status(peer, node.name)
    finally:
        peer.close()


def _show(job: dict[str, Any], console: Console, failed: bool) -> None:
    if "failed" in job:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["started"]))
        text = f"job that failed, started {started}: {job['command']}"
        console.print(text, markup=False, highlight=False)
        console.print(f"  {job['failed']}", style="red", markup=False, highlight=False)
        if failed:
            _show_members(job, console)
        _show_files(job, console)
        return
    since = "" if job.get("age_s") is None else f", for {job['age_s']:.0f} s"
    command = f": {job['command']}" if job.get("command") else ""
    console.print(f"job at {job['address']}{since}{command}", markup=False, highlight=False)
    if "error" in job:
        text = f"  cannot be asked: {job['error']}"
        console.print(text, style="red", markup=False, highlight=False)
    for name, pid in _stopped_of(job).items():
        if (text := _stopped(name, pid)) != job.get("error"):
            console.print(f"  {text}", style="yellow", markup=False, highlight=False)
    if job.get("durable") or ("error" in job and job.get("members")):
        _show_members(job, console)
        _show_files(job, console)
    if "error" in job:
        return
    table = new_table("workers", ">rank", "state", ">pid", "address", "transport", wraps=True)
    for worker in job["workers"]:
        cells = [str(worker.get(name, "")) for name in ("rank", "state", "pid", "address")]
        if worker["state"] in ("taken", "absent"):
            was = "gone" if worker["state"] == "taken" else "none"
            cells[1] = f"{was}; worker {worker['by']} has its slices"
        wire = worker.get("transport", "") + (", TLS" if worker.get("encrypted") else "")
        table.add_row(*cells, wire, style=_COLOURS[worker["state"]])
    console.print(table)
    durable = any(server["restarts"] is not None for server in job["servers"])
    owners = {m["index"]: m["server"] for m in job.get("members", ()) if "server" in m}
    of = "share" if owners else "server"
    about = ["pid", "address", *(["restarts"] if durable else [])]
    headings = f">{of}", ">pid", *about[1:2], *(f">{name}" for name in about[2:])
    more = ">store", "optimizer", ">tensors", ">bytes", ">version"
    table = new_table("servers and their shares", *headings, *more, wraps=True)
    for server in job["servers"]:
        head = [str(server[name]) for name in ("index", *about)]
        if owners:
            head[0] += f" (server {owners[server['index']]})"
        for row in _rows(server["stores"]):
            table.add_row(*head, *row)
            head = [""] * len(headings)
    console.print(table)
    for store in job["servers"][0]["stores"]:
        if "clocks" in store:
            console.print(f"  {_pace(store)}", markup=False, highlight=False)


def _pace(store: dict[str, Any]) -> str:
    """Returns a line about the progress of slices, each of which goes at its own pace."""
    clocks = ", ".join(map(str, store["clocks"]))
    found = ", ".join(f"{count} x {behind}" for behind, count in store["staleness"].items())
    return (
        f"store {store['number']}: slices have made {clocks} steps; staleness of versions at most "
        f"{store['staleness_max']}" + (f" ({found})" if found else "")
    )


def _show_members(job: dict[str, Any], console: Console) -> None:
    """Shows the members that the launcher has replaced, and the state of all others."""
    running = "failed" not in job
    changed = ["change"] if any(member["change"] for member in job["members"]) else []
    states = ["state"] if running else []
    headings = "member", ">pid", *states, ">restarts", "last death", *changed
    table = new_table("members", *headings, wraps=True)
    for member in job["members"]:
        death, text = member["last_death"], ""
        if death is not None:
            at = time.strftime("%H:%M:%S", time.localtime(death["time"]))
            text = f"{at}, pid {death['pid']} {death['evidence']}"
        name = f"{member['kind']} {member['index']}"
        if "server" in member:
            name += f" (server {member['server']})"
        state = [member["state"]] if running else []
        style = _COLOURS.get(state[0], "") if state else ""
        cells = [name, str(member["pid"]), *state, str(member["restarts"]), text]
        cells += [member["change"]] if changed else []
        table.add_row(*cells, style=style)
    if job["standby"]:
        state = [job["standby_state"]] if running else []
        table.add_row("standby", str(job["standby"]), *state)
    console.print(table)
    if job["moves"]:
        _show_moves(job["moves"], console)


def _show_moves(moves: Sequence[dict[str, Any]], console: Console) -> None:
    """Shows the last moves of shares between servers."""
    headings = "time", ">share", ">from", ">to", ">bytes", ">version", "why"
    table = new_table("shares that moved", *headings, wraps=True)
    for move in moves[-_MOST_MOVES:]:
        at = time.strftime("%H:%M:%S", time.localtime(move["time"]))
        servers = f"server {move['giver']}", f"server {move['taker']}"
        versions = ", ".join(map(str, move["versions"].values()))
        numbers = str(move["size"]), versions
        table.add_row(at, str(move["share"]), *servers, *numbers, move["why"])
    console.print(table)
    if len(moves) > _MOST_MOVES:
        text = f"  and {len(moves) - _MOST_MOVES} before; --json has all"
        console.print(text, markup=False, highlight=False)


def _show_files(job: dict[str, Any], console: Console) -> None:
    if job["saved"]:
        console.print(f"  last checkpoint: {job['saved']}", markup=False, highlight=False)
    console.print(f"  log: {job['log']}", markup=False, highlight=False)


def _stopped_of(job: dict[str, Any]) -> dict[str, int]:
    """Returns the processes of a running job that are stopped, as far as they are of this host."""
    found = {
        f"{each['kind']} {each['index']}": each["pid"]
        for each in job.get("members", ())
        if each["state"] == "stopped"
    }
    for worker in job.get("workers", ()):
        if worker["state"] == "stopped":
            found[f"worker {worker['rank']}"] = worker["pid"]
    return found


def _rows(stores: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = ("number", "optimizer", "tensors", "bytes", "version")
    rows = [[str(store[name]) for name in names] for store in stores]
    return rows or [["-", "no optimizer was made so far", "", "", ""]]
