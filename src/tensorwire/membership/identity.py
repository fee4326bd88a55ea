"""Defines names of the members of a job, and the word by which a worker leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from tensorwire.errors import PeerLostError, UnavailableError
from tensorwire.jobs.host import LOOPBACK
from tensorwire.memory import Peer

CONTROL = "control"
"""Region at every server: one word per worker, CONTROL_BYTES apart."""
CONTROL_BYTES = 64
GOODBYE = 1 << 62
"""Value of a worker's control word when it has left in good order."""

FAREWELL = GOODBYE + (1 << 61)
"""The same where slices may become another worker's: above all words that say whose they are."""

LOST_MEMBER_CODE = 75
"""Exit code of a server that ends because another process did, which is then to blame."""

_TAKEOVER_BITS = 16  # of the rank, above which the number of a takeover lies

_LISTENS = "0A"  # in /proc/net/tcp
_CLOSED = "closed by its user"  # the core says so
_MOST_NAMES = 8  # that one message lists


def lost(peer: Peer, noticed: object = "") -> PeerLostError:
    """Returns the error for a lost member; `noticed` is the reason if its Peer shows none."""
    reason = peer.lost_reason.rpartition("): ")[2]  # alone: the message names the peer
    if _CLOSED in reason:
        reason = "it ended before the others; its own messages tell why"
    return PeerLostError(f"{called(peer)} was lost: {reason or noticed}")


def taken_by(rank: int, number: int) -> int:
    """Returns the control word of a place whose slices are a worker's since a takeover or a change.

    It is that place's own one where a process has joined the job in it. Words only grow, and of two
    of these the later one counts.
    """
    return GOODBYE + (number << _TAKEOVER_BITS | rank + 1)


def taker_in(word: int) -> int | None:
    """Returns the present owner of a place's slices by its control word; None: the first owner."""
    rank = (word - GOODBYE) % (1 << _TAKEOVER_BITS) - 1
    return rank if GOODBYE < word < FAREWELL else None


def was_never_there(word: int) -> bool:
    """Tells by its control word whether a place never had a worker, because workers are fewer."""
    return GOODBYE < word < taken_by(-1, 1)


def ended_in_order(peer: Peer) -> bool:
    """Tells whether a member that is lost has closed its Node itself: it was not killed."""
    return _CLOSED in peer.lost_reason


def is_open(address: str) -> bool:
    """Tells whether a process holds the socket on which a member of this host listens, or listened.

    This does not connect to it: nobody may accept for a long time.
    """
    port = f":{int(address.rpartition(':')[2]):04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for line in file:
                fields = line.split()
                if fields[3] == _LISTENS and fields[1].endswith(port):
                    return True
    return False


def called(peer: Peer) -> str:
    """Returns a member for messages: "worker 1 (pid 77)", elsewhere "… (pid 77 at 10.0.0.2)"."""
    where = "" if _is_here(peer) else f" at {peer.address.rpartition(':')[0]}"
    return f"{peer.name.replace('-', ' ')} (pid {peer.pid}{where})"


def _is_here(peer: Peer) -> bool:
    return peer.path.transport == "shm" or peer.address.startswith(LOOPBACK)


def told_of_plain(peers: Sequence[Peer], tls: str) -> str:
    """Returns a line on what is not encrypted on its way to other hosts; "" if all is.

    Args:
        peers: the servers.
        tls: the setting, TENSORWIRE_TLS; other than "off", tcp is plain within a host alone.
    """
    plain: dict[str, list[str]] = {}
    for peer in peers:
        by = peer.path.transport
        if not (_is_here(peer) or peer.path.encrypted) and (by == "rdma" or tls == "off"):
            plain.setdefault(by, []).append(peer.address)
    reasons = {"tcp": "by tcp, as TENSORWIRE_TLS is off", "rdma": "by rdma"}
    found = "; ".join(f"to {', '.join(where)} {reasons[by]}" for by, where in plain.items())
    return found and f"tensorwire: not encrypted: what travels {found} (docs/security.md)"


def turn_away(peer: Peer, here: str, reason: str) -> None:
    """Ends a connection that is none of the job's; the other side and a line here tell why.

    Args:
        peer: has connected and proved the secret.
        here: the member that says it.
        reason: why, with the names that are expected.
    """
    text = f"{here} turned away {peer.name!r} (pid {peer.pid} at {peer.address}): {reason}"
    peer.close(text)
    print(text, file=sys.stderr, flush=True)


def listed(names: Sequence[str]) -> str:
    """Returns names for messages: "worker-0, worker-1 and 7 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def check_name(peer: Peer, name: str, address: str) -> None:
    """Raises UnavailableError, and closes the connection, if another Node listens there."""
    if peer.name != name:
        peer.close()
        raise UnavailableError(f"{peer.name!r} (pid {peer.pid}) listens at {address}, not {name}")


def worker_name(rank: int) -> str:
    """Returns the name of a worker's Node."""
    return f"worker-{rank}"


def server_name(index: int) -> str:
    """Returns the name of a server's Node."""
    return f"server-{index}"
