"""The process of an attacker; see attack.py. Nothing of tensorwire is imported here."""

import os
import signal

import members
import owners
import strangers
from attack import Attack, main


class StopsTheVictim(Attack):
    """No attack on the product: stops the victim's process, so that a test sees harm noticed."""

    def act(self) -> None:
        os.kill(self.aim.pid, signal.SIGSTOP)
        self.pause(0.1)

    def rest(self) -> None:
        os.kill(self.aim.pid, signal.SIGCONT)


KINDS: dict[str, type[Attack]] = {
    kind.__name__: kind for kind in (*strangers.KINDS, *members.KINDS, *owners.KINDS)
}
FOR_TESTS: dict[str, type[Attack]] = {StopsTheVictim.__name__: StopsTheVictim}

if __name__ == "__main__":
    main(KINDS | FOR_TESTS)
