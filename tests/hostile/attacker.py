"""The process of an attacker; see attack.py. Nothing of tensorwire is imported here."""

import members
import owners
import strangers
from attack import Attack, main

KINDS: dict[str, type[Attack]] = {
    kind.__name__: kind for kind in (*strangers.KINDS, *members.KINDS, *owners.KINDS)
}

if __name__ == "__main__":
    main(KINDS)
