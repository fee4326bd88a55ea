"""`tensorwire doctor` as people run it: processes, namespaces, kills. Figures are not judged."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hosts
import pytest
from click.testing import CliRunner

import tensorwire as tw
from tensorwire.bench.raw_socket import RawClient, RawServer
from tensorwire.bench.rows import Report, Row
from tensorwire.cli import main
from tensorwire.doctor.dialogue import CLIENT_REGION, SERVER_REGION, Dialogue
from tensorwire.doctor.examine import examine_peer
from tensorwire.doctor.measure import Effort, PathProbe
from tensorwire.doctor.serve import Doctor
from tensorwire.errors import PeerLostError
from tensorwire.memory import Handle

SECRET = "a secret of sixteen bytes and more"
WAIT_S = 60.0
TINY = Effort(seconds=0.4, sizes=(8, 1 << 20))
NO_HOSTS = hosts.missing()
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
ROW_KEYS = {"case", "system", "bytes", "seconds_median", "seconds_p99", "gb_per_s"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tensorwire", "doctor", *arguments]


def run(
    *arguments: str, prefix: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, **environment},
    )


@contextlib.contextmanager
def serving(
    *arguments: str, prefix: Sequence[str] = (), **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A doctor that serves, and its address; its end is checked unless the test has seen to it."""
    with subprocess.Popen(
        [*prefix, *command("--serve", *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("at the other end: tensorwire doctor "), line
            yield process, line.split()[-1]
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=WAIT_S)
                assert (process.returncode, err) == (0, "")
                assert "ended" in out.splitlines()  # lines about guests may come behind it
        finally:
            process.kill()


def rows_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table that begins with the names of its columns."""
    names, *rows = data["rows"] or [[]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def measured(data: dict[str, Any]) -> set[tuple[str, int, str]]:
    return {
        (row["case"], row["bytes"], row["system"]) for row in rows_of(data) if row["seconds_median"]
    }


FULL = {
    (f"{path}.{action}", size, system)
    for path, limit in (("shm", "memcpy"), ("tcp", "raw-socket"))
    for action, size in (("write", 1 << 20), ("read", 1 << 20), ("write", 8), ("signal", 8))
    for system in ("tensorwire", limit)
    if path == "tcp" or system == "tensorwire" or size > 8
}


def check_json(data: dict[str, Any], path: Path) -> None:
    """Checks the common content of every bench's file, and a doctor's additions."""
    assert data["bench"] == "doctor"
    assert data["machine"]["cores"] >= 1
    assert {"tensorwire", "python", "kernel"} <= set(data["versions"])
    for row in rows_of(data):
        assert set(row) >= ROW_KEYS
        assert row["seconds_median"] is not None or row["note"]
    for finding in data["findings"]:
        assert set(finding) == {"level", "subject", "text", "remedy"}
        assert finding["level"] in ("ok", "note", "warning")
    assert {route["name"] for route in data["routes"]} == {"shm", "rdma", "tcp"}
    assert len(Report.load(path).rows) == len(rows_of(data))


# ---- alone


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = run("--seconds", "1", "--json", str(path))
    data = json.loads(path.read_text())
    assert (done.returncode, done.stderr) == (data["exit_code"], "")
    assert done.returncode in (0, 1)
    check_json(data, path)
    assert measured(data) >= FULL
    assert data["chosen"] == "shm"
    subjects = {finding["subject"] for finding in data["findings"]}
    assert {"cores", "shared memory", "huge pages", "tcp buffers", "path"} <= subjects
    assert {"rdma", "UCX", "locked memory"} & subjects
    for word in ("measured", "memcpy", "socket", "round trip", "findings"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout


def test_a_secret_of_the_job_is_not_needed_alone() -> None:
    """The second process shares one of its own."""
    done = run("--seconds", "0.2", TENSORWIRE_SECRET="short")
    assert done.returncode in (0, 1), done.stderr


def test_restricted_paths_are_told(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    run("--seconds", "0.3", "--json", str(path), TENSORWIRE_TRANSPORTS="tcp")
    data = json.loads(path.read_text())
    assert data["chosen"] == "tcp"
    assert {route["name"]: route["reached"] for route in data["routes"]}["shm"] is False
    assert "transports" in {finding["subject"] for finding in data["findings"]}


@pytest.mark.parametrize("plain", [False, True])
def test_colour_is_for_terminals(plain: bool) -> None:
    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    if plain:
        environment["NO_COLOR"] = "1"
    process = subprocess.Popen(
        command("127.0.0.1:1"), stdout=far, stderr=far, stdin=far, env=environment
    )
    os.close(far)
    out, deadline = b"", time.monotonic() + WAIT_S
    with contextlib.suppress(OSError):  # the terminal's end
        while time.monotonic() < deadline:
            if select.select([near], [], [], 1.0)[0]:
                if not (part := os.read(near, 4096)):
                    break
                out += part
    assert process.wait(WAIT_S) == 2
    os.close(near)
    assert b"was not examined" in out
    assert (re.search(rb"\x1b\[[0-9;]*3\dm", out) is None) == plain


# ---- two ends


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    with serving() as (_, address):
        done = run(address, "--seconds", "2", "--json", str(path))
        again = run(address, "--seconds", "0.2")
    data = json.loads(path.read_text())
    assert (done.returncode, done.stderr) == (data["exit_code"], "")
    assert again.returncode in (0, 1)
    check_json(data, path)
    assert measured(data) >= FULL
    assert data["failure"] is None
    assert data["facts"]["there"]["tensorwire"] == data["facts"]["here"]["tensorwire"]
    for row in rows_of(data):
        if row["system"] == "tensorwire" and row["case"].endswith("write") and row["bytes"] > 8:
            assert row.get("ratio_to_limit") is not None or row["note"], row
    assert done.stdout.count("there ") >= 1


@pytest.mark.slow
def test_a_secret_that_both_have() -> None:
    with serving(TENSORWIRE_SECRET=SECRET) as (_, address):
        done = run(address, "--seconds", "0.2", TENSORWIRE_SECRET=SECRET)
        assert done.returncode in (0, 1), done.stdout
        for other in ({"TENSORWIRE_SECRET": SECRET + "!"}, {}):
            done = run(address, "--seconds", "0.2", **other)
            assert done.returncode == 2
            assert "was not examined" in done.stdout
            assert "TENSORWIRE_SECRET" in done.stdout
            assert SECRET not in done.stdout


def test_nobody_listens() -> None:
    done = run("127.0.0.1:1")
    assert done.returncode == 2
    assert "cannot reach 127.0.0.1:1" in done.stdout


def test_somebody_else_listens(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with subprocess.Popen(
            command(f"127.0.0.1:{port}", "--json", str(path)), stdout=subprocess.PIPE, text=True
        ) as process:
            stream, _ = listener.accept()
            with stream:
                stream.recv(160)
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))
            out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "was not examined" in out
    data = json.loads(path.read_text())
    assert data["failure"]
    assert data["exit_code"] == 2


def test_the_peer_is_killed_in_the_middle(tmp_path: Path) -> None:
    """Earlier measurements are kept, and the loss has a name."""
    path = tmp_path / "doctor.json"
    with serving() as (server, address):
        client = subprocess.Popen(
            command(address, "--seconds", "60", "--json", str(path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        assert any("measures by tcp" in line for line in lines)
        time.sleep(1.0)  # some way into the first path
        server.kill()
        out, err = client.communicate(timeout=WAIT_S)
    assert (client.returncode, err) == (2, "")
    assert "lost while shm was measured" in out
    data = json.loads(path.read_text())
    assert "lost" in data["failure"]
    assert measured(data), "the rows so far are kept"


@pytest.mark.slow
def test_the_measuring_end_is_killed_in_the_middle() -> None:
    """The serving end goes on, and what was leased is free again."""
    with serving() as (server, address):
        client = subprocess.Popen(command(address, "--seconds", "60"), stdout=subprocess.DEVNULL)
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        assert any("measures by tcp" in line for line in lines)
        client.kill()
        client.wait(WAIT_S)
        done = run(address, "--seconds", "0.2")
        assert done.returncode in (0, 1), done.stdout


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    client = subprocess.Popen(
        command("--seconds", "60", "--json", str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(4.0)  # long enough to measure; a terminal interrupts the whole group
    os.killpg(client.pid, signal.SIGINT)
    out, err = client.communicate(timeout=WAIT_S)
    assert (client.returncode, err) == (130, "")
    assert "interrupted" in out
    assert json.loads(path.read_text())["settings"]["interrupted"] is True


def test_a_closed_port_leaves_the_limit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a port closed by a firewall: the rest is measured, and a note says what is missing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        port = taken.getsockname()[1]
        monkeypatch.setattr(RawServer, "listen", lambda *_: (port, "00" * 16))
        doctor = Doctor()
        thread = threading.Thread(target=doctor.run)
        thread.start()
        found = examine_peer(doctor.address, TINY)
        doctor.close()
        thread.join(WAIT_S)
    assert found.failure == ""
    assert {row.system for row in found.rows} == {"tensorwire", "memcpy"}
    (note,) = [each for each in found.findings if "no raw socket" in each.text]
    assert note.level == "note"


@pytest.mark.slow
def test_a_stopped_peer_is_an_error_in_time() -> None:
    with serving() as (server, address):
        client = subprocess.Popen(
            command(address, "--seconds", "60"), stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        assert any("measures by tcp" in line for line in lines)
        time.sleep(0.5)
        server.send_signal(signal.SIGSTOP)
        try:
            out, _ = client.communicate(timeout=2 * WAIT_S)
        finally:
            server.send_signal(signal.SIGCONT)
        assert client.returncode == 2
        assert "was not examined" in out


def test_a_loss_that_the_node_has_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A raw socket may see it first; then what it knows is told."""

    def fail(*_: object) -> Iterator[Row]:
        raise PeerLostError("the raw socket was reset")
        yield  # a generator, as the one in its place

    monkeypatch.setattr(PathProbe, "measure", fail)
    with tw.Node("lost") as node:
        found = examine_peer(node.address, TINY)
    assert found.failure == "lost while shm was measured: the raw socket was reset"


# ---- a Node that is no doctor


def test_a_node_at_work() -> None:
    """A little is measured, nothing is left behind, and the bytes are few."""
    with tw.Node("work") as node:
        before = node.stats()["bytes_received"]
        found = examine_peer(node.address)
        assert found.failure == ""
        assert {f.subject for f in found.findings} >= {"peer", "path"}
        cases = {(row.case, row.bytes) for row in found.rows if row.measured}
        assert {("shm.write", 1 << 20), ("tcp.read", 1 << 20), ("tcp.write", 8)} <= cases
        assert not any("signal" in case for case, _ in cases)
        assert max(size for _, size in cases) == 1 << 20
        assert node.stats()["bytes_received"] - before < 64 << 20
        deadline = time.monotonic() + WAIT_S
        while node.peers and time.monotonic() < deadline:
            time.sleep(0.01)
        assert node.peers == []


def test_a_node_that_lends_nothing() -> None:
    with tw.Node("poor", quota_bytes=4096) as node:
        found = examine_peer(node.address, TINY)
        assert found.failure == ""
        assert not any(row.measured for row in found.rows)
        assert all("quota" in row.note for row in found.rows)
        assert any("no memory to measure with" in each.text for each in found.findings)


def test_a_node_that_is_full() -> None:
    with tw.Node("full", max_peers=1) as node, tw.Node("first") as first:
        first.connect(node.address)
        found = examine_peer(node.address, TINY)
        assert found.exit_code == 2
        assert "refused" in found.failure


# ---- two hosts


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[hosts.Host, hosts.Host]]:
    with hosts.two_hosts() as made:
        yield made


def inside(host: hosts.Host) -> list[str]:
    return ["ip", "netns", "exec", host.name]


@contextlib.contextmanager
def shaped(pair: tuple[hosts.Host, hosts.Host], rate: str, burst: str) -> Iterator[None]:
    """Each end sends only so fast."""
    for host in pair:
        made = subprocess.run(
            [*inside(host), "tc", "qdisc", "replace", "dev", f"{host.name}v", "root", "tbf",
             "rate", rate, "burst", burst, "latency", "50ms"],
            capture_output=True, text=True,
        )  # fmt: skip
        if made.returncode != 0:
            pytest.skip(f"tc tbf is not permitted here: {made.stderr.strip()}")
    try:
        yield
    finally:
        for host in pair:
            host.run("tc", "qdisc", "del", "dev", f"{host.name}v", "root")


def examine_between(
    pair: tuple[hosts.Host, hosts.Host], path: Path, seconds: float
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    here, there = pair
    options = {"TENSORWIRE_SECRET": SECRET}
    listen = ["--listen", f"{there.address}:0"]
    with serving(*listen, prefix=inside(there), **options) as (_, address):
        arguments = [address, "--seconds", str(seconds), "--json", str(path)]
        done = run(*arguments, prefix=inside(here), **options)
    data = json.loads(path.read_text())
    check_json(data, path)
    return done, data


@needs_hosts
@pytest.mark.slow
def test_a_network_of_one_gigabit(pair: tuple[hosts.Host, hosts.Host], tmp_path: Path) -> None:
    with shaped(pair, "1gbit", "256kb"):
        done, data = examine_between(pair, tmp_path / "doctor.json", 14)
    assert data["chosen"] == "tcp"
    rows = {
        row["system"]: row["gb_per_s"]
        for row in rows_of(data)
        if row["case"] == "tcp.write" and row["bytes"] == 64 << 20
    }
    # The link grants 0.125 GB/s and a burst; a busy machine may not fill it.
    assert 0.05 < rows["tensorwire"] < 0.14, rows
    assert rows["raw-socket"] < 0.14
    # One kernel, two namespaces: shared memory could be had, and the doctor says how.
    assert done.returncode == 1
    assert "same host, but its shared memory cannot be reached" in done.stdout
    assert "--network=host" in done.stdout
    assert "Gbit/s with 64 MiB" in done.stdout


@needs_hosts
@pytest.mark.slow
def test_a_slow_network_is_not_waited_for(
    pair: tuple[hosts.Host, hosts.Host], tmp_path: Path
) -> None:
    """64 MiB would take half a minute each: they are left out, and a note says so."""
    with shaped(pair, "20mbit", "32kb"):
        begin = time.monotonic()
        done, data = examine_between(pair, tmp_path / "doctor.json", 8)
        assert time.monotonic() - begin < 25
    sizes = {row["bytes"] for row in rows_of(data) if row["seconds_median"]}
    assert sizes == {8, 1 << 20}
    assert "left out: each takes about" in done.stdout


@needs_hosts
def test_connecting_across_namespaces_warns_once(pair: tuple[hosts.Host, hosts.Host]) -> None:
    here, there = pair
    secret = SECRET.encode()
    with contextlib.ExitStack() as stack:
        with hosts.enter(there.path):
            node = stack.enter_context(tw.Node("there", listen=f"{there.address}:0", secret=secret))
        with hosts.enter(here.path):
            other = stack.enter_context(tw.Node("here", secret=secret))
            with pytest.warns(tw.PathWarning, match="reached by tcp: same host") as caught:
                assert other.connect(node.address).path.transport == "tcp"
            assert [Path(each.filename).name for each in caught] == ["test_doctor.py"]
            other.connect(node.address)  # a second warning would be an error
        with hosts.enter(there.path):
            fresh = stack.enter_context(
                tw.Node("fresh", listen=f"{there.address}:0", secret=secret)
            )
        with hosts.enter(here.path):
            quiet = stack.enter_context(tw.Node("quiet", secret=secret, transports=["tcp"]))
            quiet.connect(fresh.address)
            other.connect(fresh.address, require="tcp")


# ---- what people type wrong


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "host:port"),
        (["127.0.0.1:0"], "port 0"),
        (["127.0.0.1:99999"], "65535"),
        (["127.0.0.1:7000", "--seconds", "0"], "range"),
        (["127.0.0.1:7000", "--json", "/no/such/folder/x.json"], "does not exist"),
        (["--serve", "127.0.0.1:7000"], "--listen"),
        (["--serve", "--json", "x.json"], "measuring end"),
        (["--listen", "127.0.0.1:0"], "--serve"),
        (["--serve", "--listen", "0.0.0.0:0"], "TENSORWIRE_SECRET_FILE"),
        (["--serve", "--listen", "nonsense"], "host:port"),
        (["--serve", "--listen", "192.0.2.1:7000"], "TENSORWIRE_SECRET_FILE"),
    ],
)
def test_bad_input(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2, result.output
    assert word in result.output


def test_help_teaches() -> None:
    result = CliRunner().invoke(main, ["doctor", "--help"])
    for word in ("tensorwire doctor --serve --listen", "TENSORWIRE_SECRET_FILE", "Exits with 0"):
        assert word in result.output


# ---- peers that do not keep to it


def introduce(node: tw.Node, address: str) -> tuple[Dialogue, tw.RemoteRegion]:
    """Sends the first messages of an honest client."""
    mine = node.allocate(256 << 10, name=CLIENT_REGION)
    peer = node.connect(address)
    dialogue = Dialogue(mine, peer)
    hello = dialogue.receive()
    theirs = peer.region(Handle.from_bytes(bytes.fromhex(hello["handle"])))
    dialogue.answer_to(theirs)
    return dialogue, theirs


@pytest.mark.slow
def test_clients_that_lie_do_not_end_the_doctor() -> None:
    with serving() as (_, address):
        with tw.Node("asks") as node:
            dialogue, _ = introduce(node, address)
            for message in ({}, {"do": "dance"}, {"do": "raw", "mode": "send", "bytes": 1 << 40},
                            {"do": "raw", "mode": "rm", "bytes": 8}, {"do": "raw"}):  # fmt: skip
                with pytest.raises(ValueError, match=r"doctor|raw socket"):
                    dialogue.ask(message)
            assert dialogue.ask({"do": "interface", "host": "no address"}) == {"name": None}
        for message in (
            {"do": "pong", "first": 1, "count": 10**9},
            {"do": "pong", "first": "1", "count": None},
        ):
            with tw.Node("lies") as node:
                dialogue, _ = introduce(node, address)
                dialogue.send(message)
                with pytest.raises(tw.PeerLostError):
                    dialogue.receive()
        for raw in (b"[1, 2]", b"no json", b"\xff", b"[" * 100_000):
            with tw.Node("babbles") as node:
                dialogue, theirs = introduce(node, address)
                data = len(raw).to_bytes(8, "little") + raw
                theirs[128:].write(data, signal=(theirs.word(64), 1)).wait(WAIT_S)
                with pytest.raises(tw.PeerLostError):
                    dialogue.receive()
        with tw.Node("silent") as node:
            node.connect(address)  # a stranger: no region of a client
        done = run(address, "--seconds", "0.2")
        assert done.returncode in (0, 1), done.stdout


@pytest.mark.slow
def test_a_server_that_lies_is_an_error_not_a_crash() -> None:
    with tw.Node("liar") as node:
        node.allocate(64, name=SERVER_REGION)

        def answer(text: bytes) -> None:
            peer = node.accept(WAIT_S)
            while True:
                try:
                    theirs = peer.region(CLIENT_REGION)
                    break
                except (LookupError, tw.PeerLostError):
                    peer = node.accept(WAIT_S)  # that one only looked at what is chosen
            data = len(text).to_bytes(8, "little") + text
            theirs[128:].write(data, signal=(theirs.word(64), 1)).wait(WAIT_S)

        for text in (b"no json", b"{}", b'{"handle": "00"}', b'{"handle": 7}'):
            with subprocess.Popen(
                command(node.address),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as client:
                answer(text)
                out, err = client.communicate(timeout=WAIT_S)
            assert client.returncode == 2, out
            assert "Traceback" not in err
            assert err.startswith("Error: ")


def test_raw_sockets_serve_whoever_knows_the_token() -> None:
    import numpy as np

    server = RawServer(most_bytes=1 << 20)
    memory = np.zeros(1000, np.uint8)
    port, token = server.listen("fetch", 1000)
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as stranger:
        stranger.sendall(bytes(16) + b"\x01")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    client = RawClient("127.0.0.1", port, token, "fetch", memory)
    assert len(client.run(3)) == 3
    assert (memory == 1).all()
    client.close()
    for mode, size in (("fetch", 0), ("fetch", 1 << 40), ("exec", 8)):
        with pytest.raises(ValueError, match="raw socket"):
            server.listen(mode, size)
    port, token = server.listen("echo", 8)
    server.close()
    with pytest.raises(OSError, match="refused"):
        RawClient("127.0.0.1", port, token, "echo", memory[:8])
