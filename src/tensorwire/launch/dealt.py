"""Keeps which server has which shares of the parameters where shares can move.

A share is in memory that outlives every process; its server has the share's socket to the launcher.
A server is a process with a socket for each share, also for shares that it does not have.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence

from tensorwire.launch.keeper import Keeper
from tensorwire.launch.process import Process


class Dealt:
    """The servers that run, by their numbers, and the owners of all shares.

    Attributes:
        owners: the number of the server that has a share, by shares.
        servers: the processes, by numbers.
    """

    def __init__(self) -> None:
        self.owners: dict[int, int] = {}
        self.servers: dict[int, Process] = {}
        self._sockets: dict[int, list[socket.socket]] = {}

    def shares_of(self, number: int) -> list[int]:
        """Returns the shares of a server, or of the last server that ended under its number."""
        return sorted(share for share, owner in self.owners.items() if owner == number)

    def has_served(self, process: Process) -> bool:
        """Tells whether a process has a share, so that it could have another one at once."""
        return any(self.servers.get(owner) is process for owner in self.owners.values())

    def run(self, number: int, process: Process, sockets: Sequence[socket.socket]) -> None:
        """Makes a process a server, in place of another one with its number.

        Args:
            number: of the server.
            process: that waits for what to serve.
            sockets: to it, by shares; owned from now on.
        """
        self.forget(number)
        self.servers[number], self._sockets[number] = process, list(sockets)

    def give(self, share: int, process: Process, keeper: Keeper) -> None:
        """Gives a share to a server, and has the keeper tell it."""
        number = next(n for n, each in self.servers.items() if each is process)
        keeper.attach(self._sockets[number][share])
        self.owners[share] = number

    def forget(self, number: int) -> None:
        """Forgets a server that is gone."""
        self.servers.pop(number, None)
        for each in self._sockets.pop(number, []):
            each.close()  # that the keeper of a share has closed, too

    def close(self) -> None:
        """Closes all sockets, so that servers without a share end."""
        for number in list(self._sockets):
            self.forget(number)


def deal_anew(owners: Mapping[int, int], servers: Sequence[int]) -> dict[int, int]:
    """Returns equally many shares for each of some servers, with as few moves as can be.

    Args:
        owners: by shares.
        servers: their numbers; at most as many as there are shares.

    Returns:
        The new owners, by shares.
    """
    most, more = divmod(len(owners), len(servers))
    # Servers that have most keep one more, so that it does not move.
    has = Counter(owner for owner in owners.values() if owner in servers)
    ordered = sorted(servers, key=lambda number: (-has[number], number))
    room = {number: most + (place < more) for place, number in enumerate(ordered)}
    found, homeless = {}, []
    for share, owner in sorted(owners.items()):
        if room.get(owner, 0) > 0:
            found[share], room[owner] = owner, room[owner] - 1
        else:
            homeless.append(share)
    for share in homeless:
        number = max(sorted(room), key=lambda each: room[each])
        found[share], room[number] = number, room[number] - 1
    return dict(sorted(found.items()))
