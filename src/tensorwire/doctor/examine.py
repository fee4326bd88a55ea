"""Examines this machine, or the path to a peer: facts, figures and findings together."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorwire.bench import machine
from tensorwire.bench.operations import PYTHON
from tensorwire.bench.rows import Report, Row, format_size
from tensorwire.doctor import facts as facts_module
from tensorwire.doctor.advice import (
    NOTE,
    WARNING,
    Finding,
    LinkFacts,
    TriedPath,
    about_link,
    about_machine,
    worst,
)
from tensorwire.doctor.facts import Facts
from tensorwire.doctor.measure import BENCH, Effort, PathProbe, plan
from tensorwire.errors import PeerLostError, TensorwireError, UnavailableError
from tensorwire.jobs.asking import secret_of
from tensorwire.jobs.job_file import running_servers
from tensorwire.membership.status import DOCTOR
from tensorwire.memory import Node
from tensorwire.memory.bandwidth import interface_of, source_address
from tensorwire.memory.devices import interface
from tensorwire.memory.handle import join_address, split_address
from tensorwire.memory.path_warning import PathWarning

PATHS = ("shm", "rdma", "tcp")
"""All that are tried, fastest first. One that this version does not have says so itself."""

Progress = Callable[[float, str], None]
"""A function that is called before each step, with the share that is done and the step's name."""


@dataclass(slots=True)
class Examination:
    """The results of an examination.

    Attributes:
        address: of the peer, "" for this machine alone.
        here, there: facts of both ends; `there` is None for a peer that is no doctor.
        link: the way to the peer, None before it was reached.
        rows, findings: what was measured and what it means.
        failure: why the peer could not be reached, or was lost on the way; "" otherwise.
        interrupted: ended by the user.
    """

    address: str
    here: Facts
    there: Facts | None = None
    link: LinkFacts | None = None
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failure: str = ""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 nothing is wrong, 1 there are warnings, 2 the peer was not reached, 130 interrupted."""
        if self.failure:
            return 2
        if self.interrupted:
            return 130
        return 1 if worst(self.findings) == WARNING else 0

    def to_json(self) -> dict[str, Any]:
        """Returns the report that every bench makes, with the additions of a doctor."""
        settings = {"address": self.address, "interrupted": self.interrupted}
        here, there = self.here, self.there
        return {
            **Report(BENCH, machine.describe(), self.rows, settings=settings).to_json(),
            "versions": {
                "tensorwire": here.tensorwire,
                "tensorwire_there": there.tensorwire if there else None,
                "python": here.python,
                "kernel": here.kernel,
                "ucx": here.rdma.ucx or None,
            },
            "facts": {"here": here.to_json(), "there": there.to_json() if there else None},
            "chosen": self.link.chosen if self.link else None,
            "routes": [asdict(route) for route in self.link.routes] if self.link else [],
            "findings": [asdict(finding) for finding in self.findings],
            "failure": self.failure or None,
            "exit_code": self.exit_code,
        }


def examine_peer(
    address: str, effort: Effort | None = None, progress: Progress = lambda share, text: None
) -> Examination:
    """Measures the way to the Node at an address, and judges it.

    A peer that is not reached, or is lost on the way, is a `failure` of the result, not an error.

    Raises:
        ValueError: a malformed address, or settings of the environment that no Node accepts.
    """
    _, port = split_address(address)
    if port == 0:
        raise ValueError(f"{address!r} has port 0; the other end shows the port that it listens on")
    progress(0.0, "looking at this machine")
    found = Examination(address, facts_module.read())
    _Look(found, address, effort or Effort(), _secret_of_job(address), progress).run()
    return found


def _secret_of_job(address: str) -> bytes | None:
    """Returns the secret of a job of this user on this host whose server listens at an address.

    None if there is no such job or it has no secret: then the secret of the environment counts.

    Raises:
        UnavailableError: the job's secret is in a file that cannot be read.
    """
    try:
        servers = running_servers()
    except UnavailableError:  # no folder is fit for files of jobs, so no job has left one
        return None
    server = next((each for each in servers if each.address == address), None)
    try:
        return None if server is None else secret_of(server) or None
    except OSError as error:
        raise UnavailableError(
            f"the secret of the job at {address} cannot be read: {error}"
        ) from error


def examine_machine(
    effort: Effort | None = None, progress: Progress = lambda share, text: None
) -> Examination:
    """Looks at this machine, and measures its paths with a second process of its own.

    Raises:
        ValueError: settings of the environment that no Node accepts.
        UnavailableError: the second process could not be started.
    """
    progress(0.0, "looking at this machine")
    found = Examination("", facts_module.read())
    found.findings += about_machine(found.here)
    secret = secrets.token_hex(16)
    with _second_process(secret) as address:
        effort = effort or Effort(seconds=4.0)
        _Look(found, address, effort, secret.encode(), progress).run()
    return found


@contextlib.contextmanager
def _second_process(secret: str) -> Iterator[str]:
    """Yields the address of a doctor in a child process, which ends with the block."""
    environment = {k: v for k, v in os.environ.items() if k != "TENSORWIRE_SECRET_FILE"}
    with subprocess.Popen(
        [sys.executable, "-m", "tensorwire.doctor.serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, "TENSORWIRE_SECRET": secret},
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            address = child.stdout.readline().strip()
            if not address:
                raise UnavailableError("a second process could not be started to measure with")
            yield address
        finally:
            child.stdin.close()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()


@dataclass(slots=True)
class _Look:
    """A measurement of the way to one peer, with an Examination that gets its results."""

    found: Examination
    address: str
    effort: Effort
    secret: bytes | None
    progress: Progress
    probes: list[PathProbe] = field(default_factory=list)

    def run(self) -> None:
        """Runs all measurements; findings are added also if the peer is lost on the way."""
        found = self.found
        try:
            self._connect()
            self._measure()
        except (TensorwireError, PermissionError) as error:
            found.failure = str(error)
        except KeyboardInterrupt:
            found.interrupted = True
        finally:
            for probe in self.probes:
                probe.close()
        if found.link is not None:
            found.findings += about_link(found.link)
            found.findings += _notes_as_findings(found.rows)
        self.progress(1.0, "done")

    def _connect(self) -> None:
        """Connects by every path, and once as a user would."""
        self.progress(0.05, f"connecting to {self.address}")
        chosen, reason, offered = self._choose()
        routes = []
        for path in PATHS:
            try:
                probe = PathProbe(self.address, path, self.secret)
            except UnavailableError as error:
                routes.append(TriedPath(path, False, str(error)))
                continue
            self.probes.append(probe)
            routes.append(TriedPath(path, True, probe.reason))
        helper = next((probe for probe in self.probes if probe.helped), None)
        name = interface_of(split_address(self.address)[0])
        self.found.there = there = helper.facts if helper is not None else None
        self.found.link = LinkFacts(
            address=self.address,
            alone=not self.found.address,
            loopback=name == "lo",
            chosen=chosen,
            reason=reason,
            routes=tuple(routes),
            here=self.found.here,
            there=there,
            interface_here=interface(name) if name is not None else None,
            interface_there=helper.interface_there() if helper is not None else None,
            offered_there=offered,
            rows=self.found.rows,
        )
        if helper is None:
            text = "a Node at work, no doctor: little is measured, and gently"
            remedy = "start 'tensorwire doctor --serve' at the other end for all of it"
            self.found.findings.append(Finding(NOTE, "peer", text, remedy))
        elif there is None:
            text = f"its facts cannot be read here: {helper.facts_fault}"
            remedy = "install the same tensorwire on both sides"
            self.found.findings.append(Finding(WARNING, "versions", text, remedy))

    def _choose(self) -> tuple[str, str, tuple[str, ...]]:
        """Returns the path of a plain `connect`, its reason, and the other side's offer."""
        name, listen = f"{DOCTOR}{os.getpid()}", self._listen()
        with warnings.catch_warnings(), Node(name, listen=listen, secret=self.secret) as node:
            warnings.simplefilter("ignore", PathWarning)  # it becomes a finding
            peer = node.connect(self.address)
            path = peer.path
            encrypted = ", encrypted by TLS 1.3" if path.encrypted else ", not encrypted"
            return path.transport, path.reason + encrypted, peer.offered

    def _listen(self) -> str:
        """Returns the address where a Node of a job would listen, in reach of the peer.

        A Node on loopback is not expected to have peers elsewhere, and chooses accordingly.
        """
        source = source_address(split_address(self.address)[0])
        secret = any(os.environ.get(f"TENSORWIRE_SECRET{end}") for end in ("", "_FILE"))
        if self.secret is not None or not secret or source is None:
            return "127.0.0.1:0"
        return join_address(source, 0)

    def _measure(self) -> None:
        share = 1 / max(1, len(self.probes))
        for index, probe in enumerate(self.probes):
            effort = self.effort if probe.helped else self.effort.gentle()
            cases = len(plan(effort, probe.helped))

            def show(done: int, text: str, index: int = index, cases: int = cases) -> None:
                self.progress(0.1 + 0.9 * share * (index + done / cases), text)

            try:
                for row in probe.measure(effort, effort.seconds * share, show):
                    self.found.rows.append(row)
            except PeerLostError as error:
                # A raw socket may be the first to see it, and knows less about why.
                reason = probe.peer.lost_reason or str(error)
                text = f"lost while {probe.transport} was measured: {reason}"
                raise PeerLostError(text) from error
            probe.close()


def _notes_as_findings(rows: list[Row]) -> Iterator[Finding]:
    """Yields the reasons why rows have no figure, each once."""
    told = set()
    for row in rows:
        if row.system == PYTHON and row.note and row.note not in told:
            told.add(row.note)
            yield Finding(NOTE, f"{row.case} {format_size(row.bytes)}", row.note)
