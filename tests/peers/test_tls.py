"""Encrypted connections: who is let in, what somebody between two Nodes sees and can do."""

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import hosts
import numpy as np
import pytest
import wire
from hosts import Hosts, enter
from middle import CHANGE_CIPHER_SPEC, Act, Middle, Passed, attack, between, pass_on
from network import SECRET, pair_on

from tensorwire import Node, PeerLostError
from tensorwire.testing import Elsewhere, PeerGroup, check_transport
from tensorwire.testing.target import serve_target

OTHER_SECRET = b"of another job, or an old one"
NAMES = ("a near name of many bytes", "a far name of many bytes", "a region of many bytes")
WHY_NOT = hosts.missing()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
FAILS_AT_ONCE = ("flip", "flip the tag", "repeat", "end")
HOWS = ("flip the tag", "flip the length", "drop", "repeat", "reorder", "truncate", "end")


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with hosts.two_hosts() as made:
        yield made


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also connections within this host are encrypted."""
    monkeypatch.setenv("TENSORWIRE_TLS", "on")


def node(name: str, secret: bytes | None = SECRET, **options: object) -> Node:
    return Node(name, secret=secret, transports=["tcp"], **options)  # type: ignore[arg-type]


def content(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def holds(seen: bytes | bytearray, data: np.ndarray) -> bool:
    """Any 16 bytes of the data in a row are there: such a run has 8 that begin at a multiple of 8.

    Eight random bytes do not occur by chance.
    """
    known = np.unique(data[: data.size // 8 * 8].view(np.uint64))
    for shift in range(8):
        part = bytes(seen[shift:])
        if np.isin(np.frombuffer(part[: len(part) // 8 * 8], np.uint64), known).any():
            return True
    return False


# ---- between two hosts


class Capture:
    """Everything that passes one host's end of the link."""

    def __init__(self, host: hosts.Host) -> None:
        with enter(host.path):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._socket.bind((host.link, 3))
        self._socket.settimeout(0.5)
        self.bytes = bytearray()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                # Without the headers, so that a run of bytes goes on from one packet to the next.
                self.bytes += self._socket.recv(1 << 17)[66:]

    def end(self) -> bytearray:
        """Returns what was seen, once nothing comes any more."""
        self._thread.join()
        self._socket.close()
        return self.bytes


def exchange(two: Hosts, tensor: np.ndarray, answer: np.ndarray) -> tuple[bool, bytearray]:
    """Moves both between two hosts; returns what the path says, and all that was on the link."""
    capture = Capture(two[0])
    with pair_on(two, ["tcp"]) as pair:
        region = pair.far.allocate(tensor.size + 64, name=NAMES[2])
        remote = pair.to_far.region(NAMES[2])
        remote[64:].write(tensor, signal=(remote.word(0), 1)).wait()
        region.word(0).wait_until(1, 10)
        assert (region.array()[64:] == tensor).all()
        region.array()[64:] = answer
        found = np.zeros_like(answer)
        remote[64:].read(found).wait()
        assert (found == answer).all()
        path = pair.to_far.path
        assert ("TLS 1.3" in path.wire) == path.encrypted == pair.to_near.path.encrypted
    return path.encrypted, capture.end()


@needs_hosts
def test_between_hosts_everything_is_encrypted(two: Hosts) -> None:
    tensor, answer = content(1 << 18, 1), content(1 << 18, 2)
    encrypted, seen = exchange(two, tensor, answer)
    assert encrypted
    assert len(seen) > 2 * tensor.size
    assert not holds(seen, tensor)
    assert not holds(seen, answer)
    for known in (SECRET, NAMES[2].encode(), b"near", b"TWIREv01"):
        assert known not in seen


@needs_hosts
def test_encryption_can_be_turned_off(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_TLS", "off")
    tensor, answer = content(1 << 16, 1), content(1 << 16, 2)
    encrypted, seen = exchange(two, tensor, answer)
    assert not encrypted
    assert holds(seen, tensor)
    assert holds(seen, answer)
    assert NAMES[2].encode() in seen
    assert SECRET not in seen


@needs_hosts
@pytest.mark.parametrize("off", ["near", "far"])
def test_a_member_that_does_not_encrypt_is_refused(
    two: Hosts, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    monkeypatch.setenv("TENSORWIRE_TLS", "off" if off == "far" else "auto")
    with enter(two[1].path):
        far = node("far", listen=f"{two[1].address}:0")
    monkeypatch.setenv("TENSORWIRE_TLS", "off" if off == "near" else "auto")
    with far, enter(two[0].path), node("near", listen=f"{two[0].address}:0") as near:
        with pytest.raises(PermissionError, match="TENSORWIRE_TLS") as caught:
            near.connect(far.address)
        assert far.address in str(caught.value)
        assert far.peers == near.peers == []


@needs_hosts
def test_without_a_secret_nothing_leaves_the_host(two: Hosts) -> None:
    with enter(two[1].path):
        far = node("far", listen=f"{two[1].address}:0")
    with far, enter(two[0].path), node("near", secret=None) as near:
        with pytest.raises(PermissionError, match="this Node has none"):
            near.connect(far.address)


# ---- within one host


def test_loopback_is_plain_unless_one_side_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with node("near") as near, node("far") as far:
        assert not near.connect(far.address).path.encrypted
        monkeypatch.setenv("TENSORWIRE_TLS", "on")
        with node("asking") as asking:
            assert asking.connect(far.address).path.encrypted
            assert near.connect(asking.address).path.encrypted


def test_what_only_seems_to_stay_within_the_host_is_encrypted() -> None:
    elsewhere = b"of another host!"  # at the other end of a tunnel to loopback
    with node("far") as far, wire.dial(far.address) as client:
        client.send(wire.hello(SECRET, host=elsewhere))
        assert wire.decode("Hello", client.receive(160))["kind"] == 4
        assert client.hung_up()
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as tunnel, node("near") as near:

        def answer() -> None:
            for _ in range(2):
                with tunnel.accept()[0] as client:
                    heard.append(client.recv(4096))
                    client.sendall(wire.hello(SECRET, kind=3, host=elsewhere))
                    heard.append(client.recv(4096))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((PeerLostError, PermissionError), match="TENSORWIRE_TLS"):
            near.connect(f"127.0.0.1:{tunnel.getsockname()[1]}", timeout_s=5)
        thread.join()
    assert [bytes_[:1] for bytes_ in heard] == [b"T", b"", b"\x16", b""]


def test_a_word_that_is_no_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORWIRE_TLS", "yes")
    with pytest.raises(ValueError, match="off, on or auto, not 'yes'"):
        node("near")


@pytest.mark.usefixtures("on")
def test_it_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="TENSORWIRE_TLS=on"):
        node("near", secret=None)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("theirs", [OTHER_SECRET, SECRET + b"x", SECRET[:-1], SECRET + b"\0"])
def test_another_secret_is_refused(theirs: bytes) -> None:
    with node("near") as near, node("far", secret=theirs) as far:
        with pytest.raises(PermissionError, match="wrong secret; give every process") as caught:
            near.connect(far.address)
        assert far.address in str(caught.value)
        assert far.peers == []


@pytest.mark.usefixtures("on")
@pytest.mark.slow
def test_the_transport_passes_its_suite_encrypted() -> None:
    @contextlib.contextmanager
    def start(options: dict) -> Iterator:
        with PeerGroup() as group:
            yield group.start(serve_target, options, name="target")

    place = Elsewhere(start, {"secret": SECRET}, {"secret": SECRET}, "encrypted")
    assert len(list(check_transport("tcp", places=[place]))) > 20


NO_OPENSSL = """
import os
from tensorwire import Node, UnavailableError
secret = b"sixteen bytes and more"
with Node("here", secret=secret) as here, Node("there", secret=secret) as there:
    assert not here.connect(there.address).path.encrypted
try:
    Node("outside", listen="0.0.0.0:0", advertise="127.0.0.1", secret=secret)
except UnavailableError as error:
    print(error)
os.environ["TENSORWIRE_TLS"] = "off"
Node("outside", listen="0.0.0.0:0", advertise="127.0.0.1", secret=secret).close()
"""


def test_without_openssl_only_what_leaves_the_host_is_refused() -> None:
    environment = {**os.environ, "TENSORWIRE_OPENSSL": "/nowhere/libssl.so"}
    run = [sys.executable, "-c", NO_OPENSSL]
    said = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert "/nowhere/libssl.so cannot be loaded" in said
    assert "libssl3" in said
    assert "TENSORWIRE_TLS=off" in said


def tls_of_others() -> ssl.SSLObject:
    """Returns one side of a session of Python's own, to which nothing is sent."""
    pipes, ends = (ssl.MemoryBIO(), ssl.MemoryBIO()), []
    for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(side)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("AECDH-AES256-SHA:@SECLEVEL=0")  # needs no certificate
        server = side == ssl.PROTOCOL_TLS_SERVER
        ends.append(context.wrap_bio(pipes[server], pipes[not server], server_side=server))
    for end in (*ends, *ends, *ends):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[0]


@pytest.mark.usefixtures("on")
def test_a_failure_leaves_nothing_to_other_users_of_openssl() -> None:
    others = tls_of_others()
    with socket.create_server(("127.0.0.1", 0)) as liar, node("near") as near:

        def cut() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with liar.accept()[0] as client:
                        client.recv(4096)
                        client.sendall(b"\x16\x03\x03")

        thread = threading.Thread(target=cut)
        thread.start()
        with pytest.raises((PeerLostError, TimeoutError)):
            near.connect(f"127.0.0.1:{liar.getsockname()[1]}", timeout_s=1)
        liar.shutdown(socket.SHUT_RDWR)
        thread.join()
    with pytest.raises(ssl.SSLWantReadError):
        others.read(1)


# ---- somebody in the middle

SIZE = 40_000
SENT = content(SIZE, 3)


def job(act: Act, patience_s: float = 0.7) -> tuple[Middle, Exception | None]:
    """A short job over a Middle; returns how it ended. Whatever was placed is right."""
    with node("near", peer_timeout_s=3) as near, node("far") as far:
        region = far.allocate(SIZE + 64, name=NAMES[2])
        failed: Exception | None = None
        with between(far.address, act) as middle:
            try:
                peer = near.connect(middle.address, timeout_s=patience_s)
                remote = peer.region(NAMES[2])
                written = remote[64:].write(SENT, signal=(remote.word(0), 1))
                written.wait(patience_s)
                region.word(0).wait_until(1, patience_s)
                found = np.zeros_like(SENT)
                remote[64:].read(found).wait(patience_s)
                assert (found == SENT).all()
                peer.close()
            except (PeerLostError, PermissionError, TimeoutError, OSError) as error:
                failed = error
            array = region.array()
            assert ((array[64:] == SENT) | (array[64:] == 0)).all()
            assert int(array[:8].view(np.uint64)[0]) <= 1
            if int(array[:8].view(np.uint64)[0]):
                assert (array[64:] == SENT).all()
        return middle, failed


@pytest.mark.usefixtures("on")
def test_somebody_who_only_listens_learns_nothing() -> None:
    middle, failed = job(pass_on, 20)
    assert failed is None
    assert len(middle.seen) > 2 * SIZE
    assert not holds(middle.seen, SENT)
    for known in (SECRET, NAMES[2].encode(), b"near", b"TWIREv01"):
        assert known not in middle.seen


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("sender", ["client", "server"])
@pytest.mark.parametrize(
    "how", ["flip", *(pytest.param(how, marks=pytest.mark.slow) for how in HOWS)]
)
def test_whatever_is_changed_is_an_error_that_names_the_peer(how: str, sender: str) -> None:
    for number in range(1000):
        middle, failed = job(attack(how, sender, number), 2 if how in FAILS_AT_ONCE else 0.7)
        if middle.records[sender] <= number:
            break
        if not middle.harmed:
            assert failed is None
            continue
        if failed is None:
            # It was said again over another connection, or nothing follows that would show it.
            assert middle.connections > 1 or number >= middle.records[sender] - 2
            continue
        # Who only holds back what was sent is not told from a slow network.
        held_back = isinstance(failed, TimeoutError) and how not in FAILS_AT_ONCE
        assert held_back or middle.address in str(failed) or "'far'" in str(failed)
        assert not isinstance(failed, PermissionError) or number < 2
    assert number > 5


@pytest.mark.usefixtures("on")
def test_records_of_an_earlier_session_are_refused() -> None:
    earlier: dict[tuple[str, int], bytes] = {}

    def record(sender: str, number: int, bytes_: bytes) -> list[bytes]:
        earlier[sender, number] = bytes_
        return [bytes_]

    assert job(record, 20)[1] is None
    numbers = [
        number
        for (sender, number), bytes_ in earlier.items()
        if sender == "client" and bytes_[0] != CHANGE_CIPHER_SPEC
    ]
    for number in numbers[:-1]:
        middle, failed = job(
            lambda sender, now, bytes_, number=number: [
                earlier["client", number] if (sender, now) == ("client", number) else bytes_
            ]
        )
        if failed is None:
            # It was said again over another connection, or nothing follows that would show it.
            late = number >= middle.records["client"] - 2
            assert middle.connections > 1 or late or not middle.harmed


def refusal(kind: int) -> bytes:
    """A Hello that refuses a connection."""
    bytes_ = bytearray(160)
    bytes_[:8], bytes_[8], bytes_[10], bytes_[16] = b"TWIREv01", 3, kind, 1
    return bytes(bytes_)


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    ("kind", "error"),
    [(2, TimeoutError), (3, PeerLostError), (4, PermissionError), (5, PermissionError)],
)
def test_who_says_that_the_other_side_does_not_encrypt_changes_nothing(
    kind: int, error: type[Exception]
) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as liar, node("near") as near:

        def lie() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with liar.accept()[0] as client:
                        client.settimeout(1)
                        heard.extend(client.recv(4096))
                        client.sendall(refusal(kind))
                        with contextlib.suppress(TimeoutError):
                            heard.extend(client.recv(4096))

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(error, match=r"127\.0\.0\.1"):
            near.connect(f"127.0.0.1:{liar.getsockname()[1]}", timeout_s=1)
        liar.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert b"TWIRE" not in heard
    assert b"near" not in heard


# ---- strangers


def hello_of(near: Node) -> bytes:
    """Returns the first bytes of a Node that knows the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: connect_in_vain(near, listener))
        thread.start()
        with listener.accept()[0] as client:
            bytes_ = client.recv(4096)
        thread.join()
    return bytes_


def connect_in_vain(near: Node, listener: socket.socket) -> None:
    with pytest.raises((PeerLostError, TimeoutError, PermissionError)):
        near.connect(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)


@pytest.mark.usefixtures("on")
def test_who_stops_inside_the_handshake_is_sent_away_in_time() -> None:
    with node("far", handshake_timeout_s=0.5) as far, node("near") as near:
        hello = hello_of(near)
        host, _, port = far.address.rpartition(":")
        for said in (b"", hello[:1], hello[:100], hello):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.settimeout(10)
                stranger.sendall(said)
                before = time.monotonic()
                while stranger.recv(4096):
                    pass
                assert time.monotonic() - before < 5
        assert near.connect(far.address).path.encrypted


@pytest.mark.usefixtures("on")
def test_a_server_that_stops_inside_the_handshake_is_left_in_time() -> None:
    with node("far") as far, node("near") as near:
        for passed_bytes in (0, 3, 100):

            def stop(sender: str, number: int, record: bytes, size: int = passed_bytes) -> Passed:
                if sender == "client":
                    return [record]
                return [record[:size]] if number == 0 else []

            with between(far.address, stop) as middle:
                with pytest.raises(TimeoutError, match=middle.address):
                    near.connect(middle.address, timeout_s=0.5)


@pytest.mark.usefixtures("on")
def test_who_is_sent_away_inside_the_handshake_comes_again() -> None:
    cuts = 0

    def cut(sender: str, number: int, record: bytes) -> Passed:
        nonlocal cuts
        if sender == "client" or cuts == 20:
            return [record]
        cuts += 1
        return [record[:50]] if cuts % 2 else None

    with node("far") as far, node("near") as near, between(far.address, cut) as middle:
        assert near.connect(middle.address, timeout_s=20).path.encrypted
        assert middle.connections == 11


@pytest.mark.usefixtures("on")
def test_a_flood_of_strangers_does_not_keep_a_member_out() -> None:
    with node("far") as far, node("near") as near, contextlib.ExitStack() as stack:
        hello = hello_of(near)
        host, _, port = far.address.rpartition(":")
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):
                stranger.sendall((hello, hello[:50], b"", b"GET / HTTP/1.1\r\n")[number % 4])
        assert near.connect(far.address, timeout_s=10).path.encrypted
